"""How a function keeps half precision for its backward pass.

Each function of `mpx.nn` has a `jax.custom_jvp` rule, whose tangents are a *linear
part*: a function that is linear in the tangents, given some *residuals*. Autodiff would
evaluate as much of it as does not depend on the tangents in the forward pass, and would
keep that, in float32. Inside of `jax.checkpoint` it keeps what goes in: the residuals,
in the dtype that they were given in. They are made wide in the backward pass.

So forward mode, reverse mode, `vmap`, `scan` and higher derivatives work, which a
`jax.custom_vjp` would not give all of.

A sharp edge: XLA may replace `float32(half(y))` by `y`, and would then keep the float32
`y` in the residual's place. A barrier on the residuals forbids that: four norms and
softmaxes of bfloat16 need 100 MB with it and 121 without (jax 0.10.2, CPU, 2026-11).
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, PyTree

from .._dtypes import float_dtype, full_precision_of
from .._typing import DTypeLike


def from_residuals(
    linear_part: Callable[[PyTree, PyTree], PyTree], residuals: PyTree, tangents: PyTree
) -> PyTree:
    """Applies `linear_part(residuals, tangents)`, which keeps the residuals only.

    Args:
        linear_part: A function that is linear in its second argument.
        residuals: A tree of arrays, kept for the backward pass as they are.
        tangents: A tree of arrays.

    Returns:
        What the linear part returns.
    """

    def evaluate(residuals: PyTree, tangents: PyTree) -> PyTree:
        return linear_part(jax.lax.optimization_barrier(residuals), tangents)

    # The barrier above stands for checkpoint's own, which would hold back the
    # cotangents as well and part them from the operations that make them.
    return jax.checkpoint(evaluate, prevent_cse=False)(residuals, tangents)


def widen(x: Array) -> Array:
    """An array in the dtype that is computed in: float32, or float64 if it is that."""
    return x.astype(full_precision_of(x.dtype))


def result_dtype(x: Array, dtype: DTypeLike | None, caller: str) -> np.dtype:
    """The dtype of a result: what the user asked for, or that of the argument."""
    if dtype is not None:
        return float_dtype(dtype, caller)
    is_float = jnp.issubdtype(x.dtype, jnp.floating)
    return x.dtype if is_float else np.dtype(np.float32)


def active(tangent: object) -> PyTree:
    """A tangent, or None where nothing is differentiated."""
    is_zero = tangent is None or isinstance(tangent, SymbolicZero)
    return None if is_zero else tangent
