"""How a function keeps half precision for its backward pass.

A function of `mpx.nn` computes in float32. Autodiff would keep what it computes on the
way, in float32. Inside of `jax.checkpoint` the arguments are kept instead, in the dtype
that they were given in, and the backward pass computes the rest again. Named values are
kept, too: a few float32 for each row, such as a sum, which would cost one more pass
over the row.

So forward mode, reverse mode, `vmap`, `scan` and higher derivatives work.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, PyTree

from .._dtypes import float_dtype, full_precision_of, is_half
from .._typing import DTypeLike

_KEPT = "mpx.nn: kept"


def recomputed(func: Callable[..., PyTree], x: Array, *args: PyTree) -> PyTree:
    """Calls a function, of which only the arguments and `kept` values are kept.

    Args:
        func: A function of arrays.
        x: Its first argument. Where it is not half precision, nothing is computed
            again.
        *args: Other arguments, trees of arrays.

    Returns:
        The result of the function.
    """
    if not is_half(x.dtype):
        return func(x, *args)
    policy = jax.checkpoint_policies.save_only_these_names(_KEPT)
    return jax.checkpoint(func, policy=policy)(x, *args)


def kept(x: Array) -> Array:
    """A value of a function that `recomputed` calls, kept for the backward pass."""
    return checkpoint_name(x, _KEPT)


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
