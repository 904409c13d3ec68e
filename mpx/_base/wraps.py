"""`wraps`: `functools.wraps` for all callables, PyTrees included."""

import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
from jaxtyping import PyTree

_TEXTS = ("__module__", "__name__", "__qualname__", "__doc__")


def name_of(func: object) -> str:
    """Returns the name of a callable for reports."""
    return getattr(func, "__name__", None) or type(func).__name__


def wraps(func: Callable[..., PyTree]) -> Callable[[Any], Any]:
    """Returns a decorator like `functools.wraps`, also for callable PyTrees.

    The fields of a PyTree are not copied to the wrapper, and its `__name__` may be
    None, as in Equinox's wrappers. JAX follows `__wrapped__` for the name in its
    messages, and would print a whole layer with all its fields at each trace, so
    wrappers of Equinox modules have none.
    """
    names = [n for n in _TEXTS if isinstance(getattr(func, n, None), str)]
    assigned = (*names, "__annotations__")

    def decorate(wrapper: Any) -> Any:
        functools.update_wrapper(wrapper, func, assigned=assigned, updated=())
        if isinstance(func, eqx.Module):
            del wrapper.__wrapped__
        return wrapper

    return decorate
