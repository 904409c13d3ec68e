"""Building blocks of error messages.

Every message says what must hold (with the public function and the argument in
backticks), what came, and what to do. The blocks here only describe what came.
"""

from typing import Any

import jax
import numpy as np


def describe(value: Any) -> str:
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
    """Names the place of a leaf: "" for the tree itself."""
    return f" at `{path}`" if path else ""


def listing(names: Any, limit: int = 8) -> str:
    """Joins names for a message and says how many were left out."""
    names = [f"`{name}`" for name in names]
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
