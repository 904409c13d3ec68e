"""`wraps`: `functools.wraps` for whatever can be called."""

import functools
from collections.abc import Callable
from typing import Any

_TEXTS = ("__module__", "__name__", "__qualname__", "__doc__")


def wraps(func: Callable[..., Any]) -> Callable[[Any], Any]:
    """As `functools.wraps`, of callable PyTrees, too.

    Their own attributes are no attributes of the wrapper, and what they call their name
    may be None, as in Equinox's wrappers.
    """
    names = [n for n in _TEXTS if isinstance(getattr(func, n, None), str)]
    return functools.wraps(func, assigned=(*names, "__annotations__"), updated=())
