"""Casting what goes into a function and what comes out of it.

JAX computes in the dtype of the operands, so a function is moved to another precision
by casting its inputs. `force_full_precision` is the tool for critical operations inside
half-precision code: sums, means, norms, softmax, losses.
"""

from collections.abc import Callable

import jax
import numpy as np
from jaxtyping import PyTree

from ._cast import cast_leaf
from ._dtypes import float_dtype
from ._tree import keeps_dtypes
from ._typing import DTypeLike
from ._wraps import wraps


def cast_function(
    func: Callable[..., PyTree],
    dtype: DTypeLike,
    return_dtype: DTypeLike | None = None,
) -> Callable[..., PyTree]:
    """Wraps a function to compute in `dtype` and return `return_dtype`.

    1. cast every float leaf of the arguments to `dtype` (see `cast_tree`), and of
       `func` itself where it is a callable PyTree such as an Equinox layer;
    2. call `func`;
    3. cast every float leaf of the result, whatever its tree, to `return_dtype`
       (`dtype` if None).

    Equinox's `State` is passed and returned unchanged: statistics stay in full
    precision.

    The function keeps its name and docstring. Constants inside `func` keep their dtype
    and may promote: a float32 array in a closure makes the result of a half-precision
    operation float32 before it is cast back.

    Args:
        func: A function or a callable PyTree.
        dtype: The floating dtype to compute in, or its name.
        return_dtype: The floating dtype of the result, or its name; `dtype` if None.

    Returns:
        A function of the same arguments.

    Raises:
        TypeError: `func` is not callable, or a dtype is not floating.
        ValueError: A dtype does not exist, or is float64 and not enabled in JAX.

    Both errors are raised immediately, not at the first call.

    Examples:
        >>> import jax.numpy as jnp, mpx
        >>> mpx.cast_function(jnp.sin, "float16")(jnp.ones(2)).dtype
        dtype('float16')
    """
    call = "`mpx.cast_function(func, dtype, return_dtype)`"
    compute = float_dtype(dtype, call)
    result = compute if return_dtype is None else float_dtype(return_dtype, call)
    refuse_uncallable(func, call)

    @wraps(func)
    def wrapper(*args: PyTree, **kwargs: PyTree) -> PyTree:
        return call_in(func, args, kwargs, compute, result)

    return wrapper


def refuse_uncallable(func: object, call: str) -> None:
    """Raises for what cannot be called."""
    if not callable(func):
        raise TypeError(
            f"{call} needs a function or a callable PyTree as `func`; got {func!r}."
        )


def call_in(
    func: Callable[..., PyTree],
    args: tuple[PyTree, ...],
    kwargs: dict[str, PyTree],
    compute: np.dtype,
    result: np.dtype,
) -> PyTree:
    """Casts a function and its arguments to a dtype, and its result to another one."""
    func, args, kwargs = _cast((func, args, kwargs), compute)
    return _cast(func(*args, **kwargs), result)


def _cast(tree: PyTree, dtype: np.dtype) -> PyTree:
    """Casts float leaves but Equinox's model state, whose statistics stay float32."""

    def cast(node: object) -> PyTree:
        return node if keeps_dtypes(node) else cast_leaf(node, dtype)

    return jax.tree.map(cast, tree, is_leaf=keeps_dtypes)
