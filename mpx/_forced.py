"""Critical operations in float32: sums, means, norms, softmax, losses.

Written out, `force_full_precision` is three steps: cast, call, cast back. Under a
transform of JAX it does two things more, which change no value:

- What layers have in common is one program (`jax.jit`), traced and lowered once for all
  of them, and not once for each.
- Autodiff would keep the float32 values in between. Instead they are computed again in
  the backward pass, from the half-precision values that went in, where that saves
  memory and costs only elementwise operations and sums, as autocast does it.
"""

import dataclasses
import enum
import functools
import inspect
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jax.core import Tracer

from ._autocast import recomputed_if_cheap
from ._dtypes import float_dtype, half_precision_datatype, is_half
from ._function import call_in, refuse_uncallable
from ._typing import DTypeLike
from ._wraps import wraps

_CALL = "`mpx.force_full_precision(func, return_dtype)`"
_FULL = np.dtype(np.float32)
_NUMBERS = (int, float, complex, np.generic)
# Packages whose functions have no effects.
_PURE = ("jax", "optax", "equinox")
_PLAIN = (*_NUMBERS, str, bytes, np.dtype, enum.Enum, types.NoneType)


def force_full_precision(
    func: Callable[..., Any] | None = None, return_dtype: DTypeLike | None = None
) -> Callable[..., Any]:
    """Makes a function compute in float32 whatever precision its inputs have.

    The same as `cast_function(func, float32, return_dtype)`, except that results go to
    `half_precision_datatype()`, asked for at each call, where `return_dtype` is None.

    Use it as a function or as a decorator, with or without arguments.

    Kept for the backward pass: the half-precision values that go in, and sums, such as
    the mean of each row; what is computed between them in float32 is computed again.
    Where that would not pay or would repeat a matrix product, it is what JAX keeps, as
    it always is with `cast_function`.

    Args:
        func: A function or a callable PyTree; None to get a decorator. Under a
            transform of JAX it is traced once for all calls that are alike, as under
            `jax.jit`; if it can not be, as a module of Flax or Haiku, it runs as it is.
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
    refuse_uncallable(func, _CALL)
    told = None if return_dtype is None else float_dtype(return_dtype, _CALL)

    @wraps(func)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        result = half_precision_datatype() if told is None else told
        if not _may_have_effects(func):
            is_done, found = _as_program((_bound(func), args, kwargs), result)
            if is_done:
                return found
        return call_in(func, args, kwargs, _FULL, result)

    return wrapper


def _may_have_effects(func: Any) -> bool:
    """Whether a call may make or change parameters that it was not given.

    Flax's and Haiku's modules do, and so may any function of the user's that is called
    by them.
    """
    if isinstance(func, functools.partial):
        return _may_have_effects(func.func)
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


@dataclasses.dataclass(frozen=True)
class _Bound:
    """A function with arguments, equal to another one with the same."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    exact: tuple[Any, ...]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.func(*self.args, *args, **{**dict(self.kwargs), **kwargs})


def _bound(func: Callable[..., Any]) -> Callable[..., Any]:
    """A `functools.partial`, which is equal to itself only, as one that is not."""
    is_tree = isinstance(func, jax.tree_util.Partial)
    if is_tree or not isinstance(func, functools.partial):
        return func
    exact = tuple(map(_exact, (*func.args, *func.keywords.values())))
    return _Bound(func.func, func.args, tuple(func.keywords.items()), exact)


# --- Programs -------------------------------------------------------------------------


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Form:
    """A tree without its arrays."""

    structure: Any
    are_arrays: tuple[bool, ...]
    rest: tuple[Any, ...]
    exact: tuple[Any, ...]

    def filled(self, arrays: Sequence[Any]) -> Any:
        """The tree with these arrays."""
        missing = iter(arrays)
        pairs = zip(self.are_arrays, self.rest, strict=True)
        leaves = [next(missing) if is_array else leaf for is_array, leaf in pairs]
        return jax.tree.unflatten(self.structure, leaves)


def _divided(tree: Any, is_array: Callable[[Any], bool]) -> tuple[list[Any], _Form]:
    """The arrays of a tree, and its form."""
    leaves, structure = jax.tree.flatten(tree)
    are_arrays = tuple(map(is_array, leaves))
    arrays, rest = [], []
    for leaf, is_one in zip(leaves, are_arrays, strict=True):
        arrays += [leaf] if is_one else []
        rest.append(None if is_one else leaf)
    exact = tuple(map(_exact, rest))
    return arrays, _Form(structure, are_arrays, tuple(rest), exact)


def _exact(leaf: Any) -> Any:
    """What tells a number from its equals: 1 from 1.0 and True, 0.0 from -0.0."""
    return (type(leaf), repr(leaf)) if isinstance(leaf, _NUMBERS) else None


def _is_tracer(leaf: Any) -> bool:
    return isinstance(leaf, Tracer)


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray | np.generic)


def _as_program(call: tuple[Any, Any, Any], result: np.dtype) -> tuple[bool, Any]:
    """Runs `(func, args, kwargs)` as a program, if it is one.

    Returns:
        Whether it was, and what it returned.
    """
    arrays, form = _divided(call, _is_tracer)
    if not any(is_half(x.dtype) for x in arrays):
        return False, None
    weights = len(_divided(call[0], _is_tracer)[0])
    run = _run_once_for_all if _is_lasting(form) else _run
    try:
        outputs, found = run(form, weights, result, arrays)
    except Exception:
        # It needs values, or changes what is around it, or is wrong. As it is, it runs
        # or raises the error that belongs to it.
        return False, None
    return True, found.filled(outputs)


def _run(
    form: _Form, weights: int, result: np.dtype, arrays: list[Any]
) -> tuple[list[Any], _Form]:
    """Runs a program; the first so many of its arrays are weights."""
    found: list[_Form] = []

    def program(*arrays: Any) -> list[Any]:
        func, args, kwargs = form.filled(arrays)
        outputs = call_in(func, args, kwargs, _FULL, result)
        made, output_form = _divided(outputs, _is_array)
        found[:] = [output_form]
        return made

    closed = jax.make_jaxpr(program)(*map(jax.typeof, arrays))
    are_weights = tuple(i < weights for i in range(len(arrays)))
    return recomputed_if_cheap(closed, are_weights)(*arrays), found[0]


_run_once_for_all: Any = jax.jit(_run, static_argnums=(0, 1, 2))


def _is_lasting(form: _Form) -> bool:
    """Whether a form may be kept: equal ones come, and it holds no arrays of a call."""
    try:
        hash(form)
    except TypeError:
        return False
    return all(map(_is_known, form.rest))


def _is_known(leaf: Any) -> bool:
    if isinstance(leaf, _Bound):
        bound = (leaf.func, *leaf.args, *(value for _, value in leaf.kwargs))
        return all(map(_is_known, bound))
    if isinstance(leaf, _PLAIN):
        return True
    name, module = getattr(leaf, "__name__", ""), getattr(leaf, "__module__", None)
    if getattr(sys.modules.get(module or ""), name, None) is leaf:
        return True
    return (
        isinstance(leaf, types.FunctionType)
        and leaf.__closure__ is None
        and leaf.__defaults__ is None
        and leaf.__kwdefaults__ is None
        and "<locals>" not in leaf.__qualname__
    )
