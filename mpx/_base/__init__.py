"""Foundations that need no other room of mpx.

In order of reading:

- `errors`: parts of error messages, and warnings at the user's line;
- `typing`: annotations that several modules need;
- `dtypes`: names of dtypes, and the half precision datatype of explicit functions;
- `tree`: leaves and paths of PyTrees;
- `wraps`: `functools.wraps` for callable PyTrees;
- `jax_compat`: everything that differs between versions of JAX.
"""
