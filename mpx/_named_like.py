"""Functions that are traced in place of a user's, and are called as his is in errors.

JAX says which function it was tracing when a program asks for a number that only a run
knows: `if jnp.sum(y) > 0`. It looks through `__wrapped__`, and reads the names of
arguments from a signature.
"""

import functools
import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any

from jax.tree_util import KeyPath
from jaxtyping import PyTree

from ._tree import path_text


def named_like(
    flat: Callable[..., PyTree], func: Callable[..., PyTree], paths: Sequence[KeyPath]
) -> Callable[..., PyTree]:
    """Gives a function the name and the place of another one.

    Args:
        flat: A function of arrays.
        func: The user's function, which it calls.
        paths: For each array its path in `(func, args, kwargs)`.

    Returns:
        `flat`.
    """
    flat.__wrapped__ = _code_of(func)  # pyright: ignore[reportFunctionMemberAccess]
    names = dict.fromkeys(map(_namer(func), paths))
    if len(names) == len(paths):
        parameters = [
            inspect.Parameter(name, inspect.Parameter.POSITIONAL_ONLY) for name in names
        ]
        flat.__signature__ = (  # pyright: ignore[reportFunctionMemberAccess]
            inspect.Signature(parameters)
        )
    return flat


def _code_of(func: Any) -> Any:
    """The function that a callable is written as, perhaps in its class."""
    while isinstance(func, functools.partial):
        func = func.func
    func = inspect.unwrap(func)
    return func if hasattr(func, "__code__") else type(func).__call__


def _namer(func: Callable[..., PyTree]) -> Callable[[KeyPath], str]:
    try:
        parameters = inspect.signature(func).parameters.values()
    except (TypeError, ValueError):
        parameters = ()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    known = [parameter.name for parameter in parameters if parameter.kind in kinds]

    def name(path: KeyPath) -> str:
        root, *rest = path
        if root.idx == 0:
            return _identifier(path_text(tuple(rest)))
        if root.idx == 2:
            return _identifier(str(rest[0].key) + path_text(tuple(rest[1:])))
        first, below = rest[0].idx, path_text(tuple(rest[1:]))
        given = known[first] if first < len(known) else f"args_{first}"
        return _identifier(f"{given}.{below}" if below else given)

    return name


def _identifier(text: str) -> str:
    """`model_layers_0_weight` for `model.layers[0].weight`."""
    return "_" * text[:1].isdigit() + re.sub(r"\W+", "_", text).strip("_") or "_"
