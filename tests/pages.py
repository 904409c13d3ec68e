"""Runs the Python blocks of a page, and compares what they print with what it shows.

A diff is run as it was before and as it is after. A block of text right after one of
Python is what that printed, `...` for what is left out. `<!-- not run: why -->` stands
before what cannot be run here, and `<!-- needs NAME -->` before what is run where a
package is installed. `python -m tests.pages PAGE ...` writes anew what a page
shows of what its blocks print.
"""

import contextlib
import dataclasses
import doctest
import importlib.util
import io
import re
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
_BLOCK = re.compile(
    r"(?:<!-- (?P<mark>not run|needs (?P<needs>\w+))[^\n]*-->\n+)?"
    r"^```(?P<kind>python|diff)\n(?P<code>.*?)^```$"
    r"(?:\n\n^```text\n(?P<output>.*?)^```$)?",
    re.MULTILINE | re.DOTALL,
)
_OF_MPX = {"internals.md"}  # its diffs are of mpx's own files
_INCLUDED = "--8<--"  # a program of examples/, which has a test of its own


@dataclasses.dataclass(frozen=True)
class Block:
    """A Python block: the line it starts at, and where the page shows what it prints.

    Attributes:
        line: lines of the page before it.
        codes: its text; of a diff, that before and that after it.
        output: what the page shows; None where it shows nothing.
        span: where in the page that stands.
    """

    line: int
    codes: tuple[str, ...]
    output: str | None
    span: tuple[int, int]


def blocks(page: Path) -> list[Block]:
    """The Python blocks of a page."""
    text = page.read_text(encoding="utf-8")
    return [
        Block(
            text.count("\n", 0, match.start("code")),
            before_and_after(match["code"])
            if match["kind"] == "diff"
            else (match["code"],),
            match["output"],
            match.span("output"),
        )
        for match in _BLOCK.finditer(text)
        if _INCLUDED not in match["code"]
        and match["mark"] != "not run"
        and (not match["needs"] or importlib.util.find_spec(match["needs"]))
        and not (match["kind"] == "diff" and page.name in _OF_MPX)
    ]


def before_and_after(diff: str) -> tuple[str, str]:
    """The program before a change and the one after it, with lines where they stand."""
    lines = diff.splitlines()
    before = ["" if line.startswith("+") else line[1:] for line in lines]
    after = ["" if line.startswith("-") else line[1:] for line in lines]
    return "\n".join(before), "\n".join(after)


def is_shown(block: Block, printed: str) -> bool:
    """Whether the page shows nothing, or what was printed."""
    check = doctest.OutputChecker().check_output
    return block.output is None or check(block.output, printed, doctest.ELLIPSIS)


def run(page: Path) -> list[tuple[Block, str]]:
    """Runs the blocks one after the other; each with what it printed."""
    namespace: dict[str, object] = {"__name__": page.stem}
    found: list[tuple[Block, str]] = []
    for block in blocks(page):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            for code in block.codes:
                # Empty lines in front, so that a traceback names the page's line.
                exec(compile("\n" * block.line + code, page.name, "exec"), namespace)
        found.append((block, printed.getvalue()))
    return found


def write(page: Path) -> None:
    """Puts what the blocks print into the page."""
    text = page.read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        found = run(page)
    for block, printed in reversed(found):
        if not is_shown(block, printed):
            start, end = block.span
            text = text[:start] + printed + text[end:]
    page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    for name in sys.argv[1:]:
        write(Path(name).resolve())
