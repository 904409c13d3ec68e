"""How a function saves only half precision for its backward pass.

A function of `mpx.nn` computes in float32. Autodiff would save its intermediate float32
values. Here the derivative is computed inside of `jax.checkpoint` from the arguments,
saved in their own dtype, so the backward pass recomputes the rest. A few float32 for
each row are saved, too, such as a sum, which would cost one more pass.

Forward mode, reverse mode, `vmap`, `scan` and higher derivatives work.

Activations, bias, dropout and rotary positions are such functions.
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, PRNGKeyArray, PyTree

from .._base.dtypes import float_dtype, full_precision_of, is_half
from .._base.typing import DTypeLike

# Marks a value of a function as saved for backward, and returns it.
Keep = Callable[[Array], Array]


def recomputed(func: Callable[..., PyTree], x: Array, *args: PyTree) -> PyTree:
    """Calls a function whose arguments and marked values are saved for backward.

    Args:
        func: `func(keep, x, *args)`, a function of arrays; it marks values with `keep`.
        x: Its first argument. If it is not half precision, nothing is recomputed.
        *args: Other arguments, trees of arrays.

    Returns:
        The result of the function.
    """
    if not is_half(x.dtype):
        return func(_not_kept, x, *args)
    floats, rest = eqx.partition((x, *args), eqx.is_inexact_array)

    @jax.custom_jvp
    def function(floats: PyTree, rest: PyTree) -> PyTree:
        return func(_not_kept, *eqx.combine(floats, rest))

    @function.defjvp
    def rule(primals: PyTree, dots: PyTree) -> PyTree:
        kept: list[Array] = []

        def keep(value: Array) -> Array:
            kept.append(value)
            return value

        result = func(keep, *eqx.combine(*primals))

        def tangent(residuals: PyTree, dots: PyTree) -> PyTree:
            floats, rest, *kept = residuals
            values = iter(kept)

            def of_floats(floats: PyTree) -> PyTree:
                def reuse(value: Array) -> Array:
                    return known(next(values), value)

                return func(reuse, *eqx.combine(floats, rest))

            return jax.jvp(of_floats, (floats,), (dots,))[1]

        return result, linear(tangent, (*primals, *kept), dots[0])

    return function(floats, rest)


def _not_kept(value: Array) -> Array:
    return value


@jax.custom_jvp
def known(value: Array, computed: Array) -> Array:
    """Returns `value` with the derivative of `computed`."""
    return value


@known.defjvp
def _known_rule(primals: Any, dots: Any) -> PyTree:
    return primals[0], dots[1]


def linear(
    func: Callable[[PyTree, PyTree], PyTree], residuals: PyTree, x: PyTree
) -> PyTree:
    """Calls `func(residuals, x)`, linear in `x`, with only the residuals saved.

    The barrier is around the residuals only: XLA may replace `float32(half(y))` by `y`,
    and would then save the float32 `y` instead of the residual. The barrier of
    `jax.checkpoint` would hold back the cotangents as well, and separate them from the
    operations that make them. Four norms and softmaxes of bfloat16 need 100 MB with a
    barrier and 121 without (jax 0.10.2, CPU, 2026-11).
    """

    def evaluate(residuals: PyTree, x: PyTree) -> PyTree:
        return func(jax.lax.optimization_barrier(residuals), x)

    return jax.checkpoint(evaluate, prevent_cse=False)(residuals, x)


def widen(x: Array) -> Array:
    """Casts an array to its compute dtype: float32, or float64 for float64."""
    return x.astype(full_precision_of(x.dtype))


def result_dtype(x: Array, dtype: DTypeLike | None, caller: str) -> np.dtype:
    """Returns the dtype of a result: the user's, or that of the argument."""
    if dtype is not None:
        return float_dtype(dtype, caller)
    is_float = jnp.issubdtype(x.dtype, jnp.floating)
    return x.dtype if is_float else np.dtype(np.float32)


# --- Activations, dropout and bias ----------------------------------------------------


def activate(
    activation: Callable[[Array], Array], x: Float[Array, "..."], *gate: Array
) -> Float[Array, "..."]:
    """Applies an activation, optionally times a gate, computed in float32.

    Saved for backward: the half-precision inputs.
    """

    def evaluate(_: Keep, x: Array, *gate: Array) -> Array:
        y = activation(widen(x))
        return (y * widen(gate[0]) if gate else y).astype(x.dtype)

    return recomputed(evaluate, x, *gate)


def add_bias(x: Float[Array, "... n"], bias: Float[Array, " n"]) -> Array:
    """Returns the sum in the dtype of x; the bias' gradient is summed in float32."""
    wide = widen(x)
    total = wide + bias.astype(wide.dtype).reshape((1,) * (x.ndim - 1) + bias.shape)
    return total.astype(x.dtype)


def dropout(x: Float[Array, "..."], rate: float, key: PRNGKeyArray) -> Array:
    """Drops random elements chosen by a key; see `drop`."""
    return drop(x, jax.random.bernoulli(key, 1 - rate, x.shape), rate)


def drop(x: Float[Array, "..."], keep: Bool[Array, "..."], rate: float) -> Array:
    r"""Sets elements to 0 where `keep` is False and divides the rest by 1 - rate.

    Saved for backward: the mask, one byte for each element.
    """

    def evaluate(keep: Array, x: Array) -> Array:
        return jnp.where(keep, widen(x) / (1 - rate), 0).astype(x.dtype)

    return linear(evaluate, keep, x)


# --- Rotary positions -----------------------------------------------------------------


def rotate(
    x: Float[Array, "batch seq heads size"], base: float
) -> Float[Array, "batch seq heads size"]:
    r"""Rotates pairs of channels by angles that grow with the position (rotary).

    $$\begin{pmatrix} y_i \\ y_{i + d/2} \end{pmatrix} =
    \begin{pmatrix} \cos t\theta_i & -\sin t\theta_i \\
    \sin t\theta_i & \cos t\theta_i \end{pmatrix}
    \begin{pmatrix} x_i \\ x_{i + d/2} \end{pmatrix}, \qquad
    \theta_i = \text{base}^{-2i/d}$$

    Angles, sines and cosines are float32; nothing of the size of x is saved for
    backward. Reference: Su et al., RoFormer, 2021, equation 34.
    """
    length, half = x.shape[1], x.shape[-1] // 2
    dtype = widen(x[:0]).dtype
    rates = base ** (-jnp.arange(half, dtype=dtype) / half)
    angles = jnp.arange(length, dtype=dtype)[:, None] * rates[None, :]

    def evaluate(turns: tuple[Array, Array], x: Array) -> Array:
        cos, sin = (turn[None, :, None, :] for turn in turns)
        first, second = jnp.split(widen(x), 2, axis=-1)
        turned = first * cos - second * sin, second * cos + first * sin
        return jnp.concatenate(turned, -1).astype(x.dtype)

    return linear(evaluate, (jnp.cos(angles), jnp.sin(angles)), x)
