"""Critical operations in float32: sums, means, norms, softmax, losses.

Written out, `force_full_precision` is three steps: cast, call, cast back. While JAX
traces, what has no effects becomes a program of its own (`_forced_program`), which is
traced once for all layers that are alike and keeps half precision for the backward
pass.
"""

import functools
import inspect
import sys
from collections.abc import Callable

import equinox as eqx
import jax
import numpy as np
from jaxtyping import PyTree

from ._ambient_record import settings_of
from ._dtypes import float_dtype, half_precision_datatype
from ._forced_program import as_program
from ._function import call_in, refuse_uncallable
from ._typing import DTypeLike
from ._wraps import wraps

_CALL = "`mpx.force_full_precision(func, return_dtype)`"
_FULL = np.dtype(np.float32)
# Packages whose functions have no effects.
_PURE = ("jax", "optax", "equinox")


def force_full_precision(
    func: Callable[..., PyTree] | None = None, return_dtype: DTypeLike | None = None
) -> Callable[..., PyTree]:
    """Wraps a function to compute in float32, whatever the precision of its inputs.

    Same as `cast_function(func, float32, return_dtype)`, except that if `return_dtype`
    is None, results are cast to `half_precision_datatype()`, read at each call.

    Use it as a function or as a decorator, with or without arguments.

    Only the half-precision inputs and sums, such as the mean of each row, are saved for
    the backward pass; float32 values between them are recomputed. JAX's own residuals
    are saved instead where recomputing would not pay or would repeat a matmul, on TPUs,
    which recompute on their own, and always with `cast_function`. `with
    mpx.autocast(residuals="small" or "fast", ambient=True)` around calls overrides
    this.

    Args:
        func: A function or a callable PyTree; None to get a decorator. Under a
            transform of JAX it is traced once for all equal calls, as under `jax.jit`;
            a function that cannot be traced so, such as a module of Flax or Haiku, runs
            unchanged.
        return_dtype: The floating dtype of the result, or its name;
            `half_precision_datatype()` if None.

    Returns:
        A function of the same arguments, or the decorator that makes it.

    Raises:
        TypeError: `func` is not callable, or `return_dtype` is not floating.
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
    refuse_uncallable(func, _CALL)
    told = None if return_dtype is None else float_dtype(return_dtype, _CALL)

    @wraps(func)
    def wrapper(*args: PyTree, **kwargs: PyTree) -> PyTree:
        result = half_precision_datatype() if told is None else told
        if not _may_have_effects(func):
            is_done, found = as_program(func, args, kwargs, _FULL, result)
            if is_done:
                return found
        return call_in(func, args, kwargs, _FULL, result)

    return wrapper


def _may_have_effects(func: object) -> bool:
    """Whether a call may make or change parameters that it was not given.

    Flax's and Haiku's modules do, and so may any function of the user's that is called
    by them, and any object of which JAX knows nothing. What `mpx.autocast` made may
    depend on the step around it.
    """
    if isinstance(func, functools.partial):
        return _may_have_effects(func.func)
    is_unknown = not hasattr(func, "__name__") and jax.tree_util.all_leaves([func])
    if is_unknown or settings_of(func) is not None:
        return True
    kinds = type(getattr(func, "__self__", func)).__mro__
    if any(kind.__module__.startswith(("flax.", "haiku.")) for kind in kinds):
        return True
    module = getattr(func, "__module__", None) or ""
    is_pure = isinstance(func, eqx.Module) or module.partition(".")[0] in _PURE
    return not is_pure and _is_called_by_a_framework()


def _is_called_by_a_framework() -> bool:
    if not {"flax.linen", "haiku"} & sys.modules.keys():
        return False
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith(("flax.linen.", "haiku.")):
            return True
        frame = frame.f_back
    return False
