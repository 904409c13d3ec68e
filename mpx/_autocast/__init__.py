"""Automatic mixed precision for any JAX function.

Not public yet: the interpreter and the transform are still to come.
"""
