"""How reports are written: tables, pages of HTML, frames for notebooks, JSON, files."""

import dataclasses
import html
import importlib.resources
import json
import math
import os
import string
import typing
from collections.abc import Callable, Container, Mapping, Sequence
from pathlib import Path
from typing import Any


def widths_of(rows: Sequence[Sequence[str]]) -> list[int]:
    """Returns the width of each column."""
    return [max(map(len, column)) for column in zip(*rows, strict=True)]


def aligned(rows: Sequence[Sequence[str]], texts: Container[int]) -> list[str]:
    """Returns the lines of a table.

    Args:
        rows: The cells, the head first; of equal numbers.
        texts: The columns whose cells are at the left; numbers are at the right.
    """
    widths = widths_of(rows)

    def cell(column: int, text: str) -> str:
        size = widths[column]
        return text.ljust(size) if column in texts else text.rjust(size)

    return ["  ".join(cell(*pair) for pair in enumerate(row)).rstrip() for row in rows]


def cut(text: str, width: int, end: bool = True, dots: str = "...") -> str:
    """Shortens text at its end, or at its start if the end matters more."""
    if len(text) <= width:
        return text
    kept = width - len(dots)
    return text[:kept] + dots if end else dots + text[len(text) - kept :]


_DOCUMENT = string.Template("""\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="generator" content="mpx">
<title>$title</title>
<style>
$style
</style>
</head>
$body</html>
""")


def document(package: str, title: str, **parts: str) -> str:
    """A page that needs no network: its style, and what else it needs, is in it.

    Args:
        package: Has the folder `page`, in which `page.css` is the style and `page.html`
            the body, with `$title` and a `$name` for each of the parts.
        title: The title, as text.
        **parts: The contents of the body, as HTML.
    """
    files = importlib.resources.files(package) / "page"
    style, body = (
        (files / name).read_text(encoding="utf-8") for name in ("page.css", "page.html")
    )
    title = html.escape(title)
    body = string.Template(body).substitute(title=title, **parts)
    return _DOCUMENT.substitute(title=title, style=style, body=body)


def framed(page: str, title: str, height: int) -> str:
    """A page in a frame, for a notebook; so many pixels high."""
    source = html.escape(page, quote=True)
    return (
        f'<iframe srcdoc="{source}" title="{html.escape(title)}" '
        f'style="width: 100%; height: {height}px; border: 0"></iframe>'
    )


def save_as(
    path: str | os.PathLike[str], writers: Mapping[str, Callable[[], str]], call: str
) -> None:
    """Writes a report in the form that the end of a file's name asks for.

    Args:
        path: The file.
        writers: For each ending what gives the text.
        call: The public method, for the error.

    Raises:
        ValueError: The name has another ending.
    """
    path = Path(path)
    if path.suffix not in writers:
        raise ValueError(
            f"`path` of {call} must end with one of {', '.join(writers)}; got "
            f"{path.name!r}."
        )
    path.write_text(writers[path.suffix]() + "\n", encoding="utf-8")


def to_json(report: Any, format: str, version: int, **changed: Any) -> str:
    """Returns a report as JSON, with null for non-finite numbers.

    Args:
        report: A dataclass.
        format: What the text says that it is.
        version: Of the format.
        **changed: Fields that are written otherwise than they are.
    """
    head = {"format": format, "version": version}
    return json.dumps(_plain(head | dataclasses.asdict(report) | changed), indent=1)


def _plain(value: Any) -> Any:
    """Returns a tree as JSON values: lists, and None for non-finite numbers."""
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def from_json(
    kind: type[Any], text: str, format: str, version: int, must: str, remedy: str = ""
) -> Any:
    """Returns the report that `to_json` wrote; infinities are restored.

    Args:
        kind: The dataclass.
        text: The JSON.
        format: What it must say that it is.
        version: Which version it must be of.
        must: What was called and what it needs, for the error.
        remedy: What to do instead, for the error.

    Raises:
        ValueError: The text is of another format or version.
    """
    data: Any = json.loads(text)
    found: Any = 0
    if isinstance(data, dict):
        found = (data.pop("format", None), data.pop("version", None))
    if found != (format, version):
        raise ValueError(
            f"{must} that this version of mpx wrote (format {format!r}, version "
            f"{version}); got {found}.{remedy}"
        )
    return _read(kind, data)


def _read(kind: Any, value: Any) -> Any:
    """Returns a value of a type from its JSON form."""
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        return kind(**{name: _read(hints[name], one) for name, one in value.items()})
    parts = typing.get_args(kind)
    if isinstance(value, list):
        each = [parts[0]] * len(value) if parts[-1] is ... else parts
        return tuple(map(_read, each, value))
    if isinstance(value, dict):
        return {parts[0](key): _read(parts[1], one) for key, one in value.items()}
    return math.inf if kind is float and value is None else value
