r"""Weights at the entry of `jax.shard_map`, cast before they come together.

What goes in by `P()` every device has whole. If it lies in pieces outside, the compiler
gathers it in front of the `shard_map`, in the dtype in which it goes in. So a weight
that is only used in half precision inside goes in rounded, and beside it zeros, to
which its gradient goes back in float32:

$$w' = \operatorname{f32}(\operatorname{gather}(\operatorname{half}(w))) + 0, \qquad
  \bar 0 = \bar w'$$

Not under a recipe, which quantizes from float32.
"""

from collections.abc import Collection, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import JaxprEqn

from .._program import aval_of
from .._typing import AnyArray
from ._context import FULL, Place, Provenance, Value
from ._demand import Demand
from ._wire import cast_where_it_lies, only_gradient


def dtypes_at_entry(
    place: Place,
    equation: JaxprEqn,
    operands: Sequence[Value],
    inside: Sequence[Demand],
) -> list[np.dtype | None]:
    """The dtype in which each operand of a `shard_map` goes in; None: as it is.

    Args:
        place: Where it stands.
        equation: The `shard_map`.
        operands: Its operands.
        inside: What its program wants of them.
    """
    specs = equation.params["in_specs"]
    rows = zip(operands, equation.invars, inside, specs, strict=True)
    axes = equation.params["newly_manual_axes"]
    return [
        _dtype_of(place, value, aval_of(atom).dtype, demand)
        if value.facts.is_weight and not _is_cut(spec, axes)
        else None
        for value, atom, demand, spec in rows
    ]


def _is_cut(spec: Any, axes: Collection[str]) -> bool:
    """Whether each device has a piece of its own."""
    parts = (part if isinstance(part, tuple) else (part,) for part in spec)
    return set(axes) <= {name for part in parts for name in part}


def _dtype_of(
    place: Place, value: Value, declared_dtype: np.dtype, demand: Demand
) -> np.dtype | None:
    settings = place.settings
    is_master = value.facts.provenance is Provenance.DECLARED and value.dtype == FULL
    if settings.wire is None or not is_master or settings.recipe is not None:
        return None
    if not settings.is_enabled:
        half = declared_dtype
    else:
        half = settings.dtype if demand is Demand.HALF else FULL
    dtype = settings.wire.gather_dtype or half
    return None if dtype == FULL or half == FULL else np.dtype(dtype)


def narrowed(place: Place, weight: AnyArray, dtype: np.dtype) -> list[AnyArray]:
    """What goes in for a weight: it rounded, and what its gradient goes to."""
    assert place.settings.wire is not None  # `dtypes_at_entry`
    narrow = jax.lax.stop_gradient(cast_where_it_lies(weight, dtype))
    return [narrow, only_gradient(lambda x: x, weight, place.settings.wire)]


@jax.custom_vjp
def joined(narrow: AnyArray, zeros: AnyArray) -> AnyArray:
    """The weight where it has arrived, float32, whose gradient goes to the zeros."""
    return narrow.astype(FULL)


def _forward(narrow: AnyArray, zeros: AnyArray) -> tuple[AnyArray, None]:
    return narrow.astype(FULL), None


joined.defvjp(_forward, lambda _, g: (None, g))
