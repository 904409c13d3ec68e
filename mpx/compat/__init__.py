"""Adapters to other packages.

`jmp` and `jaxamp` have the names and signatures of these packages; `flax` registers
mpx's states with `flax.serialization`. Each module is imported explicitly.
"""
