"""Writes the table of operations from the registry that autocast reads."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from mpx._program import PRIMITIVES, PrimitiveClass, class_of

_MARK = "<!-- the table of operations -->"

# The order of the page: what people look for first stands first.
_ORDER = (
    PrimitiveClass.HALF,
    PrimitiveClass.FULL,
    PrimitiveClass.PROMOTE,
    PrimitiveClass.FOLLOW,
    PrimitiveClass.CONVERT,
    PrimitiveClass.RECURSE,
    PrimitiveClass.OPAQUE,
)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Called by mkdocs with the text of each page."""
    return markdown.replace(_MARK, table()) if _MARK in markdown else markdown


def table() -> str:
    """The table, in Markdown."""
    rows = ["| class | primitives |", "|---|---|"]
    for kind in _ORDER:
        names = sorted(name for name, found in PRIMITIVES.items() if found.kind is kind)
        cell = " ".join(f"`{name}`" + _in_float16(name, kind) for name in names)
        rows.append(f"| **{kind.value}** | {cell} |")
    return "\n".join(rows)


def _in_float16(name: str, kind: PrimitiveClass) -> str:
    """Says so where a primitive has another class in float16."""
    classes = [class_of(name, np.dtype(d)) for d in (jnp.bfloat16, jnp.float16)]
    other = classes[1]
    return f" (float16: {other.value})" if other not in (kind, None) else ""
