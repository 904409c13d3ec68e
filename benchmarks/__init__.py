"""Benchmarks of mpx: what it costs and what it gives, with its peers beside it.

`python -m benchmarks` (or `make bench`) runs everything; `python -m benchmarks
--help` lists the parts. Each part is one module that states its question in its
docstring, and every number it prints comes with the command, the versions and
the device it was measured on or compiled for.
"""
