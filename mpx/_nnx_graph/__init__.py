"""Calling a function of Flax NNX objects as a function of trees.

NNX modules are changed in place by the functions that are given to them: a forward pass
advances batch statistics and random streams. JAX's transforms know values only and drop
such changes in silence. So `taken_apart` replaces every NNX object among the arguments
of a call by what it holds, in three groups:

- *weights*: the Variables to differentiate, in the place where the object stood;
- *fixed*: the other parameters and plain arrays, to be cast like any input;
- *state*: every other Variable (statistics, random streams, caches), never cast.

`Parts.call` puts the objects together again inside of a transform, calls the function
and returns the new values as results; `Parts.write_back` puts these into the objects
that came in, where they are wanted. NNX's own update context does the bookkeeping, so
that shared references, new Variables and changed attributes come out as from
`nnx.value_and_grad`.

Flax is imported by the calls, never by importing this module.
"""

from ._checks import (
    has_nnx_objects,
    is_nnx_module,
    is_nnx_object,
    places,
    refuse_method,
    refuse_weights,
)
from ._parts import Parts, call_with_objects, taken_apart
