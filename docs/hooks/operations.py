"""Writes the table of operations from the registry that autocast reads."""

from typing import Any

from mpx._program import PRIMITIVES, PrimitiveClass

_MARK = "<!-- the table of operations -->"

# The order of the page: what people look for first stands first.
_ORDER = (
    PrimitiveClass.HALF,
    PrimitiveClass.FULL,
    PrimitiveClass.MOVE,
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
        cell = " ".join(f"`{name}`" for name in names)
        rows.append(f"| **{kind.value}** | {cell} |")
    return "\n".join(rows)
