"""How a function keeps half precision for its backward pass.

A function of `mpx.nn` computes in float32. Autodiff would keep what it computes on the
way, in float32. Here its derivative is computed from the arguments, which are kept in
the dtype that they were given in, inside of `jax.checkpoint`, and so again in the
backward pass. Some values are kept, too: a few float32 for each row, such as a sum,
which would cost one more pass over the row.

So forward mode, reverse mode, `vmap`, `scan` and higher derivatives work.
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from .._dtypes import float_dtype, full_precision_of, is_half
from .._typing import DTypeLike

# Given a value of a function, gives it back, and keeps it for the backward pass.
Keep = Callable[[Array], Array]


def recomputed(func: Callable[..., PyTree], x: Array, *args: PyTree) -> PyTree:
    """Calls a function, of which the arguments and some values are kept.

    Args:
        func: `func(keep, x, *args)`, a function of arrays; what it gives to `keep` is
            kept.
        x: Its first argument. Where it is not half precision, nothing is computed
            again.
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
    """A value that is known, with the derivative of what computes it."""
    return value


@known.defjvp
def _known_rule(primals: Any, dots: Any) -> PyTree:
    return primals[0], dots[1]


def linear(
    func: Callable[[PyTree, PyTree], PyTree], residuals: PyTree, x: PyTree
) -> PyTree:
    """Calls `func(residuals, x)`, linear in `x`, of which the residuals are kept.

    The barrier is around the residuals alone: XLA may replace `float32(half(y))` by
    `y`, and would then keep the float32 `y` in the residual's place. That of
    `jax.checkpoint` would hold back the cotangents as well, and part them from the
    operations that make them. Four norms and softmaxes of bfloat16 need 100 MB with a
    barrier and 121 without (jax 0.10.2, CPU, 2026-11).
    """

    def evaluate(residuals: PyTree, x: PyTree) -> PyTree:
        return func(jax.lax.optimization_barrier(residuals), x)

    return jax.checkpoint(evaluate, prevent_cse=False)(residuals, x)


def widen(x: Array) -> Array:
    """An array in the dtype that is computed in: float32, or float64 if it is that."""
    return x.astype(full_precision_of(x.dtype))


def result_dtype(x: Array, dtype: DTypeLike | None, caller: str) -> np.dtype:
    """The dtype of a result: what the user asked for, or that of the argument."""
    if dtype is not None:
        return float_dtype(dtype, caller)
    is_float = jnp.issubdtype(x.dtype, jnp.floating)
    return x.dtype if is_float else np.dtype(np.float32)
