"""The slots of delayed scaling at one product: three scales in, three amaxes out.

Scales are float32[3] in the order of `Role`. The amaxes take the place of their
gradient, which they are not: JAX carries cotangents from the backward pass to the
caller, and nothing else.
"""

from typing import cast

import jax.numpy as jnp
from jaxtyping import Array

from .._errors import describe
from ._amax import Join, as_cotangent, refuse_batching
from ._casting import amax_of
from ._delayed import RecipeWithState
from ._recipes import AbstractRecipe, Role
from ._target import Target

_ROLES = tuple(Role)


def check_scales(recipe: AbstractRecipe, scales: object) -> None:
    """Raises `TypeError` unless scales are given where, and as, a recipe needs them."""
    if not recipe.has_state:
        if scales is None:
            return
        raise TypeError(
            "`scales` of a matmul are only for `mpx.DelayedScaling`; got "
            f"{describe(scales)} for `mpx.{type(recipe).__name__}`. Omit them."
        )
    shape, dtype = getattr(scales, "shape", None), getattr(scales, "dtype", None)
    if shape != (3,) or dtype != jnp.float32:
        raise TypeError(
            "`scales` of a matmul must be float32[3] for `mpx.DelayedScaling`: of "
            f"input, weight and gradient; got {describe(scales)}."
        )


def amax_and_scale(
    recipe: AbstractRecipe,
    target: Target,
    join: Join,
    role: Role,
    x: Array,
    scales: Array | None,
) -> tuple[Array | None, Array | None]:
    """The amax of an array and the scale to quantize it with; None without slots.

    Args:
        recipe: The recipe, one with a state if there are scales.
        target: The device.
        join: Joins amaxes over devices.
        role: Which slot is the array's.
        x: The array.
        scales: The slots. Where one is 0, which is how a recipe starts warm, the scale
            is that of the amax, or 1 if the recipe does not. It is NaN where the amax
            is not finite.
    """
    if scales is None:
        return None, None
    amax = refuse_batching(join(amax_of(target, x)), scales)
    given = scales[_ROLES.index(role)]
    # Without a warm start nothing may wait for the amax, so that XLA can quantize an
    # array in the operations that make it.
    first, stateful = 1.0, cast(RecipeWithState, recipe)
    if stateful.warm_start:
        first = stateful._scale(amax, role, jnp.where(amax < jnp.inf, 1.0, jnp.nan))
    return amax, jnp.where(given == 0, first, given)


def amax_cotangent(
    kept: tuple[Array | None, Array | None],
    amax: Array | None,
    scales: Array | None,
    summed_axes: tuple[str, ...],
) -> Array | None:
    """What a backward rule returns for the slots.

    Args:
        kept: The amaxes of input and weight, from the forward pass.
        amax: That of the gradient.
        scales: The slots.
        summed_axes: See `as_cotangent`.
    """
    data, weight = kept
    if scales is None or data is None or weight is None or amax is None:
        return None
    return as_cotangent(jnp.stack([data, weight, amax]), scales, summed_axes)
