"""Building blocks of error messages.

Every message states the requirement (with the public function and the argument in
backticks), the value received, and the fix. The blocks here only describe the value.
"""

import sys
import warnings
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np


def describe(value: object) -> str:
    """Describes a value in one short phrase: `float32[3,4]`, `int 3`, `None`."""
    if isinstance(value, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct):
        shape = ",".join(map(str, value.shape))
        return f"{value.dtype}[{shape}]"
    if value is None:
        return "None"
    if isinstance(value, bool | int | float | complex | str):
        return f"{type(value).__name__} {value!r}"
    if isinstance(value, type):
        return f"the class {value.__module__}.{value.__qualname__}"
    return f"an instance of {type(value).__module__}.{type(value).__qualname__}"


def at_path(path: str) -> str:
    """Returns "at" and a leaf's path for a message; "" for the tree itself."""
    return f" at `{path}`" if path else ""


def listing(names: Any) -> str:
    """Joins up to eight names for a message, and counts the others."""
    names = [f"`{name}`" for name in names]
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return ", ".join(names[:8]) + more


def differences(wanted: Mapping[str, Any], given: Mapping[str, Any]) -> str:
    """Lists names that are missing, unknown, or of another shape; "" if none.

    Args:
        wanted: The shape that each name must have, or None for any.
        given: The actual shapes.
    """
    missing, unknown = wanted.keys() - given.keys(), given.keys() - wanted.keys()
    both = sorted(wanted.keys() & given.keys())
    others = [f"{x} {given[x]} for {wanted[x]}" for x in both if given[x] != wanted[x]]
    if not (missing or unknown or others):
        return ""
    parts = {"missing": sorted(missing), "unknown": sorted(map(str, unknown))}
    parts |= {"of another shape": others} if others else {}
    return "; ".join(f"{what}: {listing(x) or 'none'}" for what, x in parts.items())


def read_texts(
    value: object, must: str, *, may_be_empty: bool = False
) -> tuple[str, ...]:
    """Reads an option that is a string or several; `must` begins the error."""
    texts = (value,) if isinstance(value, str) else value
    is_several = isinstance(texts, list | tuple | set | frozenset)
    if not is_several or not all(
        isinstance(x, str) and (x or may_be_empty) for x in texts
    ):
        raise TypeError(f"{must}; got {describe(value)}.")
    return tuple(texts)


# Packages with frames between a call of mpx and the user's line.
_NOT_THE_USER = {"mpx", "jax", "jaxlib", "equinox", "flax", "jaxtyping", "beartype"}
_NOT_THE_USER |= {"contextlib", "functools"}


def warn_user(message: str) -> None:
    """Warns at the user's line, not at one of mpx or of JAX.

    So Python shows the warning once per line, however often the line runs.
    """
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and _is_ours(frame):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)


def _is_ours(frame: Any) -> bool:
    name = frame.f_globals.get("__name__") or ""
    return name.partition(".")[0] in _NOT_THE_USER
