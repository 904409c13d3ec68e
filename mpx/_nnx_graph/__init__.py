"""Calls a function of Flax NNX objects as a function of trees.

Functions change NNX modules in place: a forward pass updates batch statistics and
random streams. JAX's transforms handle only values and silently drop such changes. So
`taken_apart` replaces every NNX object among the arguments of a call by its values, in
three groups:

- *weights*: the Variables to differentiate, in place of the object;
- *fixed*: the other parameters and plain arrays, cast like any input;
- *state*: every other Variable (statistics, random streams, caches), never cast.

`Parts.call` rebuilds the objects inside a transform, calls the function and returns the
new values as results; `Parts.write_back` writes these into the original objects. NNX's
update context does the bookkeeping, so shared references, new Variables and changed
attributes are the same as from `nnx.value_and_grad`.

Read `_parts` (splitting and rebuilding), then `_checks` (records and refusals). Flax is
imported by the calls, never by importing this module.
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
