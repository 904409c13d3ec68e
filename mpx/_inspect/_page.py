"""A report as one page of HTML: its style, script and data are in it, no network.

The data are compact, since a training step has ten thousand operations: each text is
there once, and operations are lists of numbers that point to texts.
"""

import dataclasses
import importlib.resources
import json

from .._report_files import document
from ._report import Content, Operation
from ._table import headline, island_lines, notes

_FIELDS = {field.name: field.type for field in dataclasses.fields(Operation)}
_SINGLE = [name for name, kind in _FIELDS.items() if kind is str]
_SEVERAL = [name for name, kind in _FIELDS.items() if kind == tuple[str, ...]]


def page(report: Content) -> str:
    """The whole page."""
    script = importlib.resources.files("mpx._inspect") / "page" / "page.js"
    return document(
        "mpx._inspect",
        report.name,
        script=script.read_text(encoding="utf-8"),
        data=_embedded(data_of(report)),
    )


def data_of(report: Content) -> dict[str, object]:
    """What the script of the page is given."""
    texts: dict[str, int] = {}

    def number(text: str) -> int:
        return texts.setdefault(text, len(texts))

    def compact(operation: Operation) -> list[object]:
        row: list[object] = []
        for field in _FIELDS:
            value = getattr(operation, field)
            if field in _SINGLE:
                row.append(number(value))
            elif field in _SEVERAL:
                row.append([number(text) for text in value])
            else:
                row.append(value)
        return row

    rows = [compact(operation) for operation in report.operations]
    return {
        "fields": list(_FIELDS),
        "single": _SINGLE,
        "several": _SEVERAL,
        "texts": list(texts),
        "operations": rows,
        "totals": dataclasses.asdict(report.totals),
        "headline": headline(report).partition(": ")[2],
        "notes": [*_islands(report), *notes(report)],
    }


def _islands(report: Content) -> list[str]:
    """What is recomputed, in a note."""
    head, *lines = island_lines(report.islands) or [""]
    return [f"{len(report.islands)} islands {head}: {'; '.join(lines)}"] if head else []


def _embedded(data: dict[str, object]) -> str:
    """JSON that cannot end the element that it stands in."""
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
