"""Casting what goes into a function and what comes out of it.

JAX computes in the dtype of the operands, so a function is moved to another precision
by casting its inputs. `force_full_precision` is the tool for critical operations inside
half-precision code: sums, means, norms, softmax, losses.
"""

import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import numpy as np

from ._cast import cast_leaf
from ._dtypes import float_dtype, half_precision_datatype
from ._tree import is_model_state
from ._typing import DTypeLike
from ._wraps import wraps


def cast_function(
    func: Callable[..., Any],
    dtype: DTypeLike,
    return_dtype: DTypeLike | None = None,
) -> Callable[..., Any]:
    """Makes a function that computes in `dtype` and returns `return_dtype`.

    1. cast every float leaf of the arguments to `dtype` (see `cast_tree`), and of
       `func` itself where it is a callable PyTree such as an Equinox layer;
    2. call `func`;
    3. cast every float leaf of the result, whatever its tree, to `return_dtype`
       (`dtype` if None).

    Equinox's `State` goes in and comes out as it is: statistics stay in full precision.

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
        TypeError: `func` cannot be called, or a dtype is not floating.
        ValueError: A dtype does not exist, or is float64 and not enabled in JAX.

    Both errors come at once rather than at the first call.

    Examples:
        >>> import jax.numpy as jnp, mpx
        >>> mpx.cast_function(jnp.sin, "float16")(jnp.ones(2)).dtype
        dtype('float16')
    """
    call = "`mpx.cast_function(func, dtype, return_dtype)`"
    compute = float_dtype(dtype, call)
    result = compute if return_dtype is None else float_dtype(return_dtype, call)
    return _wrap(func, call, compute, lambda: result)


def force_full_precision(
    func: Callable[..., Any] | None = None, return_dtype: DTypeLike | None = None
) -> Callable[..., Any]:
    """Makes a function compute in float32 whatever precision its inputs have.

    The same as `cast_function(func, float32, return_dtype)`, except that results go to
    `half_precision_datatype()`, asked for at each call, where `return_dtype` is None.

    Use it as a function or as a decorator, with or without arguments.

    Args:
        func: A function or a callable PyTree; None to get a decorator.
        return_dtype: The floating dtype of the result, or its name;
            `half_precision_datatype()` if None.

    Returns:
        A function of the same arguments, or the decorator that makes it.

    Raises:
        TypeError: `func` cannot be called, or `return_dtype` is not floating.
        ValueError: `return_dtype` does not exist, or is float64 and not enabled in JAX.

    Examples:
        >>> import jax, jax.numpy as jnp, mpx
        >>> x = jnp.full(4, 3e4, jnp.float16)  # the squares' sum overflows float16
        >>> mpx.force_full_precision(jnp.linalg.norm, x.dtype)(x)
        Array(6.e+04, dtype=float16)
        >>> @mpx.force_full_precision(return_dtype="float32")
        ... def mean_of_squares(x):
        ...     return jnp.mean(x**2)
        >>> float(mean_of_squares(x))
        900000000.0
    """
    if func is None:
        return functools.partial(force_full_precision, return_dtype=return_dtype)
    call = "`mpx.force_full_precision(func, return_dtype)`"
    full = np.dtype(np.float32)
    if return_dtype is None:
        return _wrap(func, call, full, half_precision_datatype)
    result = float_dtype(return_dtype, call)
    return _wrap(func, call, full, lambda: result)


def _wrap(
    func: Callable[..., Any],
    call: str,
    compute: np.dtype,
    result: Callable[[], np.dtype],
) -> Callable[..., Any]:
    if not callable(func):
        raise TypeError(
            f"{call} needs a function or a callable PyTree as `func`; got {func!r}."
        )

    # updated=(): a layer's fields are no business of the wrapper's __dict__.
    @wraps(func)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        cast_func, args, kwargs = _cast((func, args, kwargs), compute)
        return _cast(cast_func(*args, **kwargs), result())

    if isinstance(func, eqx.Module):
        # JAX follows `__wrapped__` for the name in its messages and would print the
        # whole layer, with all its fields, each time it is traced.
        del wrapper.__wrapped__
    return wrapper


def _cast(tree: Any, dtype: np.dtype) -> Any:
    """Casts float leaves but Equinox's model state, whose statistics stay float32."""

    def cast(node: Any) -> Any:
        return node if is_model_state(node) else cast_leaf(node, dtype)

    return jax.tree.map(cast, tree, is_leaf=is_model_state)
