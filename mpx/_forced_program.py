"""A call as a program of its own.

- What is computed for several layers alike is traced and lowered once for all of them
  (`jax.jit`), and not once for each.
- Autodiff would keep the values in between. Instead they are computed again in the
  backward pass, from what went in, where that saves memory and costs only elementwise
  operations, sums and lookups, as autocast does it.

Neither changes a value. A call can be a program if it is a function of the arrays that
JAX traces in it. What else is in it, is part of the program.

Not on TPUs: their compiler recomputes on its own, and where it is told to it needs more
memory and traffic.
"""

import dataclasses
import enum
import functools
import sys
import types
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jaxtyping import PyTree

from ._autocast import ambient_residuals
from ._dtypes import is_half
from ._function import call_in
from ._program import Form, divide, recomputed_if_cheap
from ._typing import AnyArray

_NUMBERS = (int, float, complex, np.generic)
_PLAIN = (*_NUMBERS, str, bytes, np.dtype, enum.Enum, types.NoneType)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Exact:
    """A form that is equal only to one with the very same numbers."""

    form: Form
    numbers: tuple[object, ...]


def _exactly(form: Form) -> _Exact:
    return _Exact(form, tuple(map(_exact, form.leaves)))


def _exact(leaf: object) -> object:
    """What tells a number from its equals: 1 from 1.0 and True, 0.0 from -0.0."""
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
    """Does what `call_in` does as a program, if the call can be one, and shall.

    Args:
        func: The function, without effects.
        args: What it is called with.
        kwargs: By name.
        compute: The dtype to compute in.
        result: The dtype of the result.

    Returns:
        Whether it could, and what it returned.
    """
    arrays, form = divide((_bound(func), args, kwargs), _is_tracer)
    if not any(is_half(x.dtype) for x in arrays) or ambient_residuals() != "small":
        return False, None
    weights = sum(map(_is_tracer, jax.tree.leaves(func)))
    try:
        run = _run_once_for_all if _is_lasting(form) else _full_precision
        outputs, found = run(_exactly(form), weights, compute, result, arrays)
    except Exception:
        # It needs values, or changes what is around it, or is wrong. As it is, it runs
        # or raises the error that belongs to it.
        return False, None
    return True, found.form.filled(outputs)


# The name is what profilers show.
def _full_precision(
    exact: _Exact,
    weights: int,
    compute: np.dtype,
    result: np.dtype,
    arrays: list[AnyArray],
) -> tuple[list[AnyArray], _Exact]:
    """Runs a program; the first so many of its arrays are weights."""
    found: list[_Exact] = []

    def program(*arrays: AnyArray) -> list[AnyArray]:
        func, args, kwargs = exact.form.filled(arrays)
        outputs = call_in(func, args, kwargs, compute, result)
        made, form = divide(outputs)
        # Set while `make_jaxpr` traces, below.
        found[:] = [_exactly(form)]
        return made

    closed = jax.make_jaxpr(program)(*map(jax.typeof, arrays))
    are_weights = tuple(i < weights for i in range(len(arrays)))
    return recomputed_if_cheap(closed, are_weights)(*arrays), found[0]


_run_once_for_all: Any = jax.jit(_full_precision, static_argnums=(0, 1, 2, 3))


def _bound(func: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """A `functools.partial`, which is equal to itself only, as a tree, which is not."""
    if not isinstance(func, functools.partial):
        return func
    if not all(map(_is_known, (func.func, *func.args, *func.keywords.values()))):
        return func
    return jax.tree_util.Partial(func.func, *func.args, **func.keywords)


def _is_lasting(form: Form) -> bool:
    """Whether a form may be kept: equal ones come, and it holds no arrays of a call."""
    try:
        hash(form)
    except TypeError:
        return False
    return all(map(_is_known, form.leaves))


def _is_known(leaf: object) -> bool:
    """Whether a leaf is plain, or a function that is there as long as its module."""
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
