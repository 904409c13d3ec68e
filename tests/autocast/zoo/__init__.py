"""A zoo of small programs for autocast: one of each thing that JAX programs do.

Programs stand in modules by kind. `PROGRAMS` has all of them by name; a suite is the
product of it with dtypes and ways to call.
"""

from . import (
    control_flow,
    custom_rules,
    derivatives,
    equinox_models,
    flax_linen,
    flax_nnx,
    haiku_models,
    indexing,
    linear_algebra,
    losses,
    numbers,
    parallel,
)
from .program import Program as Program, Tolerance as Tolerance, gradient as gradient

_MODULES = (
    equinox_models,
    flax_linen,
    flax_nnx,
    haiku_models,
    losses,
    custom_rules,
    numbers,
    linear_algebra,
    indexing,
    control_flow,
    derivatives,
    parallel,
)

PROGRAMS = {
    found.name: found
    for module in _MODULES
    for found in vars(module).values()
    if isinstance(found, Program)
}
