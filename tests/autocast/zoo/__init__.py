"""A zoo of small programs for autocast: one of each thing that JAX programs do.

Programs stand in modules by kind. `PROGRAMS` has all of them by name; a suite is the
product of it with dtypes and ways to call.
"""

from collections.abc import Collection
from typing import Any

import pytest

from tests.helpers import slow_but

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


# Programs of JAX and its functions alone, one of each kind.
OF_EACH_KIND = (
    "static_leaves",
    "flash_attention_plain",
    "custom_jvp_with_an_integer",
    "custom_batching",
    "fft",
    "random_numbers_and_keys",
    "with_64_bits",
    "cholesky",
    "sort_and_top_k",
    "segments",
    "cond",
    "loops_in_loops",
    "while_until_small",
    "remat_in_scan",
    "callbacks",
    "linearize_inside",
    "explicit_mesh",
    "pmean_under_vmap",
    "pallas",
)


def cases(quick: Collection[str] = ()) -> list[Any]:
    """The names for `parametrize`, of which all but the quick ones are slow."""
    marked = slow_but(quick, PROGRAMS)
    for i, name in enumerate(PROGRAMS):
        if PROGRAMS[name].third_party:
            marks = [*marked[i].marks, pytest.mark.third_party]
            marked[i] = pytest.param(name, marks=marks)
    return marked
