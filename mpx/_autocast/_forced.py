"""Critical operations in float32: sums, means, norms, softmax, losses.

Written out, `force_full_precision` is three steps: cast, call, cast back. While JAX
traces, a function without effects becomes a program (`as_program`), which is traced
once for all equal layers and saves half precision for the backward pass.
"""

import dataclasses
import enum
import functools
import inspect
import sys
import types
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jax.core import Tracer
from jaxtyping import PyTree

from .._base.dtypes import float_dtype, half_precision_datatype, is_half
from .._base.typing import AnyArray, DTypeLike
from .._base.wraps import wraps
from .._program import Form, divide, recomputed_if_cheap
from .._settings import call_in, refuse_uncallable, settings_of
from ._transform import ambient_residuals

# --- A call as a program --------------------------------------------------------------
#
# - A function of several equal layers is traced and lowered once (`jax.jit`).
# - Autodiff would save the values in between. Instead they are recomputed in the
#   backward pass from the inputs, where that saves memory and costs only elementwise
#   operations, sums and lookups, as in autocast.
#
# Neither changes a value. A call can be a program if it is a function of the arrays in
# it that JAX traces. Everything else in it is part of the program.
#
# Not on TPUs: their compiler recomputes on its own, and needs more memory and traffic
# with explicit recomputation.

_NUMBERS = (int, float, complex, np.generic)
_PLAIN = (*_NUMBERS, str, bytes, np.dtype, enum.Enum, types.NoneType)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Exact:
    """A form that is equal only to one with exactly the same numbers."""

    form: Form
    numbers: tuple[object, ...]


def _exactly(form: Form) -> _Exact:
    return _Exact(form, tuple(map(_exact, form.leaves)))


def _exact(leaf: object) -> object:
    """Distinguishes a number from its equals: 1 from 1.0 and True, 0.0 from -0.0."""
    return (type(leaf), repr(leaf)) if isinstance(leaf, _NUMBERS) else None


def _is_tracer(leaf: object) -> bool:
    return isinstance(leaf, Tracer)


def as_program(
    func: Callable[..., PyTree],
    args: PyTree,
    kwargs: PyTree,
    compute: np.dtype,
    result: np.dtype,
) -> tuple[bool, PyTree]:
    """Does the same as `call_in`, as a program, if that is possible and useful.

    Args:
        func: The function, without effects.
        args: Its arguments.
        kwargs: Its keyword arguments.
        compute: The dtype to compute in.
        result: The dtype of the result.

    Returns:
        Whether the call was made, and its result.
    """
    arrays, form = divide((_bound(func), args, kwargs), _is_tracer)
    if not any(is_half(x.dtype) for x in arrays) or ambient_residuals() != "small":
        return False, None
    weights = sum(map(_is_tracer, jax.tree.leaves(func)))
    try:
        run = _run_once_for_all if _is_lasting(form) else _full_precision
        outputs, found = run(_exactly(form), weights, compute, result, arrays)
    except Exception:
        # It needs values, or has effects, or is wrong. Unchanged, it runs or raises its
        # own error.
        return False, None
    return True, found.form.filled(outputs)


# Profilers show this name.
def _full_precision(
    exact: _Exact,
    weights: int,
    compute: np.dtype,
    result: np.dtype,
    arrays: list[AnyArray],
) -> tuple[list[AnyArray], _Exact]:
    """Runs a program; the first `weights` of its arrays are weights."""
    found: list[_Exact] = []

    def program(*arrays: AnyArray) -> list[AnyArray]:
        func, args, kwargs = exact.form.filled(arrays)
        made, form = divide(call_in(func, args, kwargs, compute, result))
        # Set while `make_jaxpr` traces, below.
        found[:] = [_exactly(form)]
        return made

    closed = jax.make_jaxpr(program)(*map(jax.typeof, arrays))
    are_weights = tuple(i < weights for i in range(len(arrays)))
    return recomputed_if_cheap(closed, are_weights)(*arrays), found[0]


_run_once_for_all: Any = jax.jit(_full_precision, static_argnums=(0, 1, 2, 3))


def _bound(func: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """Turns a `functools.partial` into a PyTree that compares by its parts."""
    if not isinstance(func, functools.partial):
        return func
    if not all(map(_is_known, (func.func, *func.args, *func.keywords.values()))):
        return func
    return jax.tree_util.Partial(func.func, *func.args, **func.keywords)


def _is_lasting(form: Form) -> bool:
    """Returns whether a form is cacheable: equal ones recur, and it holds no arrays."""
    try:
        hash(form)
    except TypeError:
        return False
    return all(map(_is_known, form.leaves))


def _is_known(leaf: object) -> bool:
    """Returns whether a leaf is plain, or a function that its module keeps."""
    if isinstance(leaf, _PLAIN):
        return True
    module = sys.modules.get(getattr(leaf, "__module__", None) or "")
    if module and vars(module).get(getattr(leaf, "__name__", "")) is leaf:
        return True
    return (
        isinstance(leaf, types.FunctionType)
        and leaf.__closure__ is None
        and leaf.__defaults__ is None
        and leaf.__kwdefaults__ is None
        and "<locals>" not in leaf.__qualname__
    )


# --- The public function --------------------------------------------------------------
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
    given_dtype = None if return_dtype is None else float_dtype(return_dtype, _CALL)

    @wraps(func)
    def wrapper(*args: PyTree, **kwargs: PyTree) -> PyTree:
        result = half_precision_datatype() if given_dtype is None else given_dtype
        if not _may_have_effects(func):
            is_done, found = as_program(func, args, kwargs, _FULL, result)
            if is_done:
                return found
        return call_in(func, args, kwargs, _FULL, result)

    return wrapper


def _may_have_effects(func: object) -> bool:
    """Returns whether a call may make or change parameters other than its arguments.

    Flax's and Haiku's modules do, and so may any user function that they call, and any
    object that is unknown to JAX. An autocast function may depend on the step around
    it.
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
