"""`Report`: the views of a report (text, one page of HTML, JSON)."""

import collections
import dataclasses
import importlib.resources
import importlib.util
import json
import os
import shutil
import sys
import textwrap
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any

from .._report_files import (
    aligned,
    cut,
    document,
    framed,
    from_json,
    save_as,
    to_json,
    widths_of,
)
from ._report import (
    PART,
    QUANTIZES,
    Content,
    Island,
    Operation,
    bytes_text,
    count_text,
    flops_text,
    is_low,
    share_text,
    short_type,
)

# --- Text: totals on top, then operations, equal ones in one line ---------------------
#
# It is plain text for terminals and files. With rich installed it has colours.

_BAR = 24

# The name of a line that joins operations, by their rule.
_TOGETHER = {QUANTIZES: "(quantization)", PART: "(between matmuls)"}


def together(operations: Iterable[Operation]) -> list[Operation]:
    """Joins operations that only differ in their number, weights and reason.

    FLOPs, bytes and runs are summed; the order is that of the first ones. The small
    operations that quantize the operands of a matmul become one line, as do those
    between the matmuls of attention.
    """
    groups: dict[Hashable, list[Operation]] = {}
    for operation in operations:
        key = dataclasses.replace(operation, number=0, parameters=(), reason="")
        if operation.rule in _TOGETHER:
            nothing = {"precision": "", "format": "", "inputs": (), "outputs": ()}
            name = _TOGETHER[operation.rule]
            operation = dataclasses.replace(operation, primitive=name, **nothing)
            key = (operation.where, operation.phase, operation.source)
        groups.setdefault(key, []).append(operation)
    return [_sum(group) for group in groups.values()]


def _sum(group: Sequence[Operation]) -> Operation:
    first = group[0]
    flops = None if first.flops is None else sum(o.flops or 0 for o in group)
    return dataclasses.replace(
        first,
        flops=flops,
        bytes=sum(o.bytes for o in group),
        executions=sum(o.executions for o in group),
        parameters=tuple(dict.fromkeys(path for o in group for path in o.parameters)),
    )


_HEADER: tuple[str, ...] = (
    "FLOPs", "bytes", "runs", "operation", "dtype", "in -> out", "where",
    "weight", "line", "why",
)  # fmt: skip
_NUMBERS = _HEADER[:3]

# The columns of a narrow table, and the least width of a table with all columns.
_NARROW: tuple[str, ...] = ("FLOPs", "operation", "dtype", "line", "why")
_WIDE = 180
_GAP = "  "
# The least width of the reason, which is cut first.
_REASON = 24


def text(report: Content, limit: int | None, width: int | None) -> str:
    """Returns the report as plain text, at most `width` wide; None for all columns."""
    shown, note = _chosen(report, limit)
    names = _HEADER if width is None or width >= _WIDE else _NARROW
    rows = [[*names], *([*_row(line, names)] for line in shown)]
    *others, _ = widths_of(rows)
    texts = [i for i, name in enumerate(names) if name not in _NUMBERS]
    below: dict[int, list[str]] = {}
    if width is not None:
        last = max(width - sum(others) - len(_GAP) * len(others), _REASON)
        indent = " " * (others[0] + len(_GAP))
        for number, row in enumerate(rows):
            if number and shown[number - 1].finding:
                below[number] = _wrapped(row[-1], width, indent)
                row[-1] = "! see below"
            row[-1] = cut(row[-1], last)
    body: list[str] = []
    for number, line in enumerate(aligned(rows, texts)):
        body += [line, *below.get(number, ())]
    parts = [*_summary(report, width), "", *body]
    return "\n".join([*parts, "", *_wrapped(note, width)] if note else parts)


def rich_text(report: Content, limit: int | None, width: int | None) -> Any:
    """Returns the same text in colours; needs rich."""
    from rich.text import Text

    found = Text(text(report, limit, width), no_wrap=True)
    for pattern, style in _STYLES:
        found.highlight_regex(pattern, style)
    return found


def _row(line: Operation, names: Sequence[str]) -> tuple[str, ...]:
    cells = dict(zip(_HEADER, _cells(line), strict=True))
    if names == _NARROW:
        cells["operation"] = cut(cells["operation"], 26)
    return tuple(cells[name] for name in names)


def _wrapped(text: str, width: int | None, indent: str = "") -> list[str]:
    """Wraps a text into lines of at most `width` characters."""
    if width is None:
        return [indent + text]
    return textwrap.wrap(
        text,
        width,
        initial_indent=indent,
        subsequent_indent=indent + "  ",
        break_long_words=False,
        break_on_hyphens=False,
    )


# Dtypes and formats, in full or short, and findings.
_STYLES = (
    (r"\bb?f(loat)?16\b", "green"),
    (r"\bf(loat)?32\b", "blue"),
    (r"\b(f(loat)?64|mixed)\b", "red"),
    (r"\b(FP8|MXFP8|NVFP4|INT8|u?i(nt)?8|f(loat)?[48]_\w+)\b", "yellow"),
    (r"! .*", "yellow"),
)


def show(report: Content, limit: int | None, width: int | None) -> None:
    """Prints the report, with rich if it is installed."""
    if importlib.util.find_spec("rich") is None:
        if width is None:
            size = shutil.get_terminal_size((_DEFAULT, 0)).columns
            width = size if sys.stdout.isatty() else _DEFAULT
        print(text(report, limit, width))
        return
    from rich.console import Console

    console = Console(width=width)
    console.print(rich_text(report, limit, console.width))


_DEFAULT = 100


def _chosen(report: Content, limit: int | None) -> tuple[list[Operation], str]:
    """Returns the lines to show, and a note about the others.

    Findings come first, however cheap, then the most expensive operations. Without a
    limit all lines are returned, in program order.
    """
    lines = together(report.operations)
    if limit is None:
        return lines, ""
    lines.sort(key=lambda o: (not o.finding, -(o.flops or 0), -o.bytes))
    found = sum(bool(line.finding) for line in lines)
    if len(lines) <= limit:
        return lines, ""
    room = max(limit - found, limit // 2)
    kept = [*lines[: limit - room], *lines[found : found + room]]
    note = (
        f"{len(kept)} of {len(lines)} different operations: findings first, then "
        "those of most FLOPs. All of them, with every column: "
        '`report.table(limit=None, width=None)`, or `report.save("report.html")` '
        "for a page."
    )
    return kept, note


def _cells(line: Operation) -> tuple[str, ...]:
    types = f"{_types(line.inputs)} -> {_types(line.outputs)}" * bool(line.outputs)
    rule = "" if line.rule == "as written" else f"{line.rule}: "
    finding = f"! {line.finding}: " if line.finding else ""
    return (
        "?" if line.flops is None else flops_text(line.flops),
        bytes_text(line.bytes),
        count_text(line.executions) + " x ?" * line.unknown_loops,
        line.primitive + _LEGS.get(line.leg, _PHASES[line.phase]),
        line.format if line.is_emulated else short_type(line.precision),
        cut(types, 44),
        cut(line.where, 36, end=False),
        cut(_several(line.parameters), 32, end=False),
        cut(line.source, 24, end=False),
        cut(finding + rule + line.reason, 160),
    )


def _types(names: Sequence[str]) -> str:
    return " ".join(map(short_type, names))


_PHASES = {"forward": "", "backward": " (backward)", "recompute": " (again)"}
_LEGS = {leg: f" ({leg})" for leg in ("dgrad", "wgrad")}


def _several(names: Sequence[str]) -> str:
    more = f" +{len(names) - 1}" if len(names) > 1 else ""
    return "".join(names[:1]) + more


def headline(report: Content) -> str:
    """Returns the first line: the formats of most FLOPs, and the number of findings."""
    totals = report.totals
    formats = totals.flops_by_format
    low = [name for name in formats if is_low(name)]
    others = [name for name in formats if name not in low]
    here = emulated(report)
    shares = []
    for name in (low + others[:2]) if low else others[:1]:
        dtype = "mixed dtypes" if name == "mixed" else name
        unit = "" if shares else " of FLOPs"
        text = f"{share_text(formats[name] / totals.flops)}{unit} in {dtype}"
        shares.append(text + f" ({_HOW})" * (name in here))
    findings = f"{totals.findings or 'no'} finding{'s' * (totals.findings != 1)}"
    return f"{report.name}: {', '.join(shares) or 'no FLOPs'}; {findings}"


def emulated(report: Content) -> list[str]:
    """Returns the formats whose matmuls are emulated here."""
    return list(dict.fromkeys(o.format for o in report.operations if o.is_emulated))


_HOW = "emulated on this CPU"


def _summary(report: Content, width: int | None) -> list[str]:
    """Returns the headline, the totals and the notes, in a few lines."""
    totals = report.totals
    lines: list[str] = []

    def add(name: str, value: str, what: str) -> None:
        lines.append(f"  {name:<14}{value:>7}  {what}".rstrip())

    flops = flops_text(totals.flops, "FLOPs")
    run = f"{count_text(totals.executed)} run, {flops}"
    add("operations", count_text(totals.operations), run)
    here = emulated(report)
    for name, part in totals.flops_by_format.items():
        share = part / totals.flops
        bar = "#" * round(_BAR * share)
        add(name, share_text(share), f"{bar}  {_HOW * (name in here)}".rstrip())
    add("casts", count_text(totals.casts), f"moving {bytes_text(totals.cast_bytes)}")
    kept = "?" if totals.residual_bytes is None else bytes_text(totals.residual_bytes)
    add("residuals", kept, totals.residuals)
    for number, line in enumerate(island_lines(report.islands)):
        count = "" if number else count_text(len(report.islands))
        add("" if number else "islands", count, line)
    add("traffic", bytes_text(totals.bytes), "if nothing were fused")
    add("findings", count_text(totals.findings), "operations worth a look")
    if width is not None:
        lines = [cut(line, width) for line in lines]
    lines = [*_wrapped(headline(report), width), *lines]
    for note in notes(report):
        lines += _wrapped(f"note: {note}", width, "  ")
    return lines


_ISLANDS = 6


def island_lines(islands: Sequence[Island]) -> list[str]:
    """Returns lines about recomputed regions: the sum, then the largest kinds."""
    if not islands:
        return []
    before = bytes_text(sum(island.bytes_before for island in islands))
    after = bytes_text(sum(island.bytes_after for island in islands))
    found = [f"recomputed: {after} saved instead of {before}"]
    groups = collections.Counter(islands)
    kinds = sorted(groups, key=lambda island: -island.bytes_before * groups[island])
    for island in kinds[:_ISLANDS]:
        count = groups[island]
        sizes = (island.bytes_after * count, island.bytes_before * count)
        kept, instead = map(bytes_text, sizes)
        what = cut(island.where, 36, end=False) or ", ".join(island.primitives[:4])
        times = f"{count} x " * (count > 1)
        place = f"  {island.source}" if island.source else ""
        found.append(f"{times}{what}: {kept} of {instead}{place}")
    return found


def notes(report: Content) -> list[str]:
    """Returns notes for readers of the totals."""
    totals = report.totals
    found = [f"the rule `{rule}` matched nothing" for rule in report.unused_rules]
    if here := emulated(report):
        gpu = "H100" if "FP8" in here else "TPU v6e" if "INT8" in here else "B200"
        found.append(
            f"{', '.join(here)}: emulated on this target; for another one, "
            f'`mpx.autocast(..., target="{gpu}")`'
        )
    if totals.in_unknown_loops:
        found.append(
            f"{totals.in_unknown_loops} operations are in `while` loops of unknown "
            "length: one iteration is counted ('x ?')"
        )
    if totals.in_branches:
        found.append(
            f"{totals.in_branches} operations are in branches of a `cond`: all "
            "branches are counted"
        )
    if totals.not_counted:
        found.append(
            "FLOPs of these are unknown and not counted: "
            + ", ".join(totals.not_counted)
        )
    return found


# --- One page of HTML, which includes style, script and data and needs no network -----
#
# The data are compact, since a training step has ten thousand operations: each text is
# stored once, and operations are lists of numbers that point to texts.

_FIELDS = {field.name: field.type for field in dataclasses.fields(Operation)}
_SINGLE = [name for name, kind in _FIELDS.items() if kind is str]
_SEVERAL = [name for name, kind in _FIELDS.items() if kind == tuple[str, ...]]


def page(report: Content) -> str:
    """Returns the whole page."""
    script = importlib.resources.files("mpx._tools._inspect") / "page" / "page.js"
    return document(
        "mpx._tools._inspect",
        report.name,
        script=script.read_text(encoding="utf-8"),
        data=_embedded(data_of(report)),
    )


def data_of(report: Content) -> dict[str, object]:
    """Returns the data for the page's script."""
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
    """Returns the recomputed regions as a note."""
    head, *lines = island_lines(report.islands) or [""]
    return [f"{len(report.islands)} islands {head}: {'; '.join(lines)}"] if head else []


def _embedded(data: dict[str, object]) -> str:
    """Returns JSON that cannot end the HTML element around it."""
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")


# --- The report -----------------------------------------------------------------------

_FORMAT = "mpx report"
_VERSION = 4


@dataclasses.dataclass(frozen=True, repr=False)
class Report(Content):
    """The result of `mpx.explain`: every operation of a program, and totals.

    It prints as a sentence, the totals, and a table 100 columns wide: findings first,
    then the most expensive operations, equal ones in one line. `save` writes all of it;
    a notebook shows the page.

    Examples:
        >>> import jax.numpy as jnp, mpx
        >>> x = jnp.ones((8, 8), jnp.bfloat16)
        >>> report = mpx.explain(lambda x: x @ x)(x)
        >>> report.totals.half_flops_share
        1.0
        >>> report.operations[0].inputs
        ('bfloat16[8,8]', 'bfloat16[8,8]')
    """

    @property
    def findings(self) -> tuple[Operation, ...]:
        """The operations that deserve attention, those of most FLOPs first."""
        found = [operation for operation in self.operations if operation.finding]
        return tuple(sorted(found, key=lambda o: -(o.flops or 0)))

    def table(self, limit: int | None = 30, width: int | None = 100) -> str:
        """Returns the report as text.

        Args:
            limit: The number of operation lines, findings first and then those of most
                FLOPs; None for all, in program order.
            width: The maximal width of lines. Below 180 the columns of bytes, runs,
                types, places and weights are omitted. None for all columns at full
                width.

        Returns:
            A sentence, the totals and the operations, one line each, equal ones
            together; the reason of a finding is below its line.
        """
        return text(self, limit, width)

    def show(self, limit: int | None = 30, width: int | None = None) -> None:
        """Prints the report, in colours where rich is installed.

        Args:
            limit: As in `table`.
            width: As in `table`; None for the terminal's width.
        """
        show(self, limit, width)

    def to_json(self) -> str:
        """Returns the report as JSON, which `mpx.reports.Report.from_json` reads."""
        return to_json(self, _FORMAT, _VERSION)

    @classmethod
    def from_json(cls, text: str) -> "Report":
        """Returns the report from the JSON that `to_json` wrote.

        Args:
            text: The JSON.

        Returns:
            An equal report.

        Raises:
            ValueError: The text is not a report, or one of another version of mpx.
        """
        must = "`mpx.reports.Report.from_json(text)` needs a report"
        remedy = " Make a new one with `mpx.explain`."
        return from_json(cls, text, _FORMAT, _VERSION, must, remedy)

    def to_html(self) -> str:
        """Returns the report as one page of HTML that needs no network."""
        return page(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the report to a file: a page, JSON, or the whole table as text.

        Args:
            path: Ends with `.html`, `.json` or `.txt`.

        Raises:
            ValueError: It has another ending.
        """
        writers = {
            ".html": self.to_html,
            ".json": self.to_json,
            ".txt": lambda: self.table(limit=None, width=None),
        }
        save_as(path, writers, "`mpx.reports.Report.save(path)`")

    def __str__(self) -> str:
        """Returns the totals and the most expensive operations."""
        return self.table()

    __repr__ = __str__

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        """Yields the coloured text for rich, in the available width."""
        yield rich_text(self, 30, options.max_width)

    def _repr_html_(self) -> str:
        """Returns the page in a frame, for notebooks."""
        return framed(page(self), self.name, height=720)
