"""What a report is written to: a page of HTML, a frame for a notebook, a file."""

import html
import importlib.resources
import os
import string
from collections.abc import Callable, Mapping
from pathlib import Path

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
