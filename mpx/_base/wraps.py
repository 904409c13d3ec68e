"""`wraps`: `functools.wraps` for whatever can be called."""

import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
from jaxtyping import PyTree

_TEXTS = ("__module__", "__name__", "__qualname__", "__doc__")


def name_of(func: object) -> str:
    """What a function, or whatever else is called, is called in a report."""
    return getattr(func, "__name__", None) or type(func).__name__


def wraps(func: Callable[..., PyTree]) -> Callable[[Any], Any]:
    """As `functools.wraps`, of callable PyTrees, too.

    Their own attributes are no attributes of the wrapper, and what they call their name
    may be None, as in Equinox's wrappers. JAX follows `__wrapped__` for the name in its
    messages, and would print a whole layer with all its fields each time it is traced:
    for Equinox's modules there is none.
    """
    names = [n for n in _TEXTS if isinstance(getattr(func, n, None), str)]
    assigned = (*names, "__annotations__")

    def decorate(wrapper: Any) -> Any:
        functools.update_wrapper(wrapper, func, assigned=assigned, updated=())
        if isinstance(func, eqx.Module):
            del wrapper.__wrapped__
        return wrapper

    return decorate
