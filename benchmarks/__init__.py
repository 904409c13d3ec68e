"""Benchmarks of mpx: what it costs and what it gives, with its peers beside it.

`python -m benchmarks` (or `make bench`) runs everything; `python -m benchmarks
--help` lists the parts. Each table is one module that states its question in its
docstring: `counts/` of compiled programs, `time/` on the host, `numerics/`, and
`device/` on a GPU. `parts` lists them, and says what a module of counts has. What they
run is in `models/`, `our_arms.py` and `peers/`. Every number comes
with the command, the versions and the device it was measured on or compiled for.
"""
