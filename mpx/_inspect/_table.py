"""A report as text: totals on top, then operations, equal ones in one line.

Plain text for every terminal and file; with rich, if it is installed, the same in
colours.
"""

import collections
import dataclasses
import importlib.util
import io
from collections.abc import Iterable, Sequence
from typing import Any

from ._report import PART, QUANTIZES, Content, Island, Operation
from ._units import bytes_text, count_text, flops_text, share_text, short_type

_BAR = 24

# What operations are called that are one line together, by their rule.
_TOGETHER = {QUANTIZES: "(quantization)", PART: "(between products)"}


@dataclasses.dataclass(frozen=True)
class Line:
    """Operations that differ in nothing but their place and their weights."""

    operations: tuple[Operation, ...]

    @property
    def first(self) -> Operation:
        """The first of them."""
        return self.operations[0]

    @property
    def flops(self) -> int:
        """FLOPs of all of them."""
        return sum(operation.flops or 0 for operation in self.operations)

    @property
    def bytes(self) -> int:
        """Bytes of all of them."""
        return sum(operation.bytes for operation in self.operations)

    @property
    def times(self) -> str:
        """How often they run, together."""
        count = sum(operation.executions for operation in self.operations)
        return count_text(count) + " x ?" * self.first.unknown_loops

    @property
    def parameters(self) -> tuple[str, ...]:
        """The weights of all of them."""
        paths = (path for o in self.operations for path in o.parameters)
        return tuple(dict.fromkeys(paths))


def lines_of(operations: Iterable[Operation]) -> list[Line]:
    """Puts equal operations together, in the order in which the first of them comes.

    The many small ones that quantize the operands of a product are one line, and so
    are those between the products of attention.
    """
    groups: dict[Any, list[Operation]] = {}
    for operation in operations:
        key = dataclasses.replace(operation, number=0, parameters=(), reason="")
        if operation.rule in _TOGETHER:
            what = {"primitive": _TOGETHER[operation.rule], "inputs": (), "outputs": ()}
            operation = dataclasses.replace(operation, precision="", **what)
            key = (operation.where, operation.phase, operation.source)
        groups.setdefault(key, []).append(operation)
    return [Line(tuple(group)) for group in groups.values()]


_HEADER = (
    "FLOPs", "bytes", "runs", "operation", "computed in", "in -> out", "where",
    "weight", "line", "why",
)  # fmt: skip
_NUMBERS = 3


def text(report: Content, limit: int | None) -> str:
    """The report as plain text."""
    shown, note = _chosen(report, limit)
    rows = [_HEADER, *(_cells(line) for line in shown)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(_HEADER) - 1)]
    body = [
        "  ".join(
            cell.rjust(width) if i < _NUMBERS else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, [*widths, 0], strict=True))
        ).rstrip()
        for row in rows
    ]
    parts = [*_summary(report), "", *body]
    return "\n".join([*parts, "", note] if note else parts)


def rich_text(report: Content, limit: int | None) -> Any:
    """The report for rich, which must be installed."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    shown, note = _chosen(report, limit)
    table = Table(box=None, header_style="bold", padding=(0, 1))
    for number, name in enumerate(_HEADER):
        table.add_column(
            name, justify="right" if number < _NUMBERS else "left", no_wrap=number < 4
        )
    for line in shown:
        style = _STYLES.get(line.first.precision, "")
        cells = [Text(cell) for cell in _cells(line)]
        cells[4].stylize(style)
        cells[9].stylize("yellow" if line.first.finding else "dim")
        table.add_row(*cells)
    return Group(
        *(Text(part) for part in _summary(report)), Text(""), table, Text(note)
    )


_STYLES = {
    "bfloat16": "green",
    "float16": "green",
    "float32": "blue",
    "float64": "red",
    "mixed": "red",
}


def show(report: Content, limit: int | None) -> None:
    """Prints the report, with rich if it is installed."""
    if importlib.util.find_spec("rich") is None:
        print(text(report, limit))
        return
    from rich.console import Console

    Console().print(rich_text(report, limit))


def _chosen(report: Content, limit: int | None) -> tuple[list[Line], str]:
    """The lines to show, and what to say of those that are not."""
    lines = lines_of(report.operations)
    if limit is None or len(lines) <= limit:
        return lines, ""
    # What looks like an accident is shown, however cheap.
    lines.sort(key=lambda line: (not line.first.finding, -line.flops, -line.bytes))
    found = sum(bool(line.first.finding) for line in lines)
    room = max(limit - found, limit // 2)
    kept = [*lines[: limit - room], *lines[found : found + room]]
    kept.sort(key=lambda line: (-line.flops, -line.bytes))
    note = (
        f"{len(kept)} of {len(lines)} different operations, those of most FLOPs first. "
        "All of them: `report.table(limit=None)`, or "
        '`report.save("report.html")` for a page to look at.'
    )
    return kept, note


def _cells(line: Line) -> tuple[str, ...]:
    first = line.first
    types = f"{_types(first.inputs)} -> {_types(first.outputs)}" * bool(first.outputs)
    rule = "" if first.rule == "as written" else f"{first.rule}: "
    finding = f"! {first.finding}: " if first.finding else ""
    why = finding + rule + first.reason
    return (
        "?" if first.flops is None else flops_text(line.flops),
        bytes_text(line.bytes),
        line.times,
        first.primitive + _PHASES[first.phase],
        short_type(first.precision),
        cut(types, 44),
        cut(first.where, 36, end=False),
        cut(_several(line.parameters), 32, end=False),
        cut(first.source, 24, end=False),
        cut(why, 160),
    )


def _types(names: Sequence[str]) -> str:
    return " ".join(map(short_type, names))


_PHASES = {"forward": "", "backward": " (backward)", "recompute": " (again)"}


def _several(names: Sequence[str]) -> str:
    more = f" +{len(names) - 1}" if len(names) > 1 else ""
    return "".join(names[:1]) + more


def cut(text: str, width: int, end: bool = True) -> str:
    """Shortens text at its end, or at its start where the end says more."""
    if len(text) <= width:
        return text
    return text[: width - 3] + "..." if end else "..." + text[3 - width :]


def _summary(report: Content) -> list[str]:
    """The totals in a few lines."""
    totals = report.totals
    out = io.StringIO()
    flops = flops_text(totals.flops, "FLOPs")
    print(
        f"{report.name}: {count_text(totals.operations)} operations, "
        f"{count_text(totals.executed)} run, {flops}",
        file=out,
    )
    for name, part in totals.flops_by_precision.items():
        share = part / totals.flops
        bar = "#" * round(_BAR * share)
        print(f"  {name:<14}{share_text(share):>7}  {bar}", file=out)
    if totals.low_flops_share:
        print(
            f"  recipes       {share_text(totals.low_flops_share):>7}  "
            "of FLOPs are in products that a recipe quantizes",
            file=out,
        )
    print(
        f"  casts         {count_text(totals.casts):>7}  "
        f"moving {bytes_text(totals.cast_bytes)}",
        file=out,
    )
    kept = "?" if totals.residual_bytes is None else bytes_text(totals.residual_bytes)
    print(f"  residuals     {kept:>7}  {totals.residuals}", file=out)
    count = f"  islands       {count_text(len(report.islands)):>7}  "
    for number, line in enumerate(island_lines(report.islands)):
        print((" " * len(count) if number else count) + line, file=out)
    print(
        f"  traffic       {bytes_text(totals.bytes):>7}  if nothing were fused",
        file=out,
    )
    print(f"  findings      {totals.findings:>7}  operations worth a look", file=out)
    for note in notes(report):
        print(f"  note: {note}", file=out)
    return out.getvalue().rstrip().splitlines()


_ISLANDS = 6


def island_lines(islands: Sequence[Island]) -> list[str]:
    """What is recomputed: all together, then each kind that keeps most, in a line."""
    if not islands:
        return []
    before = bytes_text(sum(island.bytes_before for island in islands))
    after = bytes_text(sum(island.bytes_after for island in islands))
    found = [f"computed again: {after} kept instead of {before}"]
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
    """What a reader of the totals has to know."""
    totals = report.totals
    found = [f"the rule `{rule}` held for nothing" for rule in report.unused_rules]
    if totals.in_unknown_loops:
        found.append(
            f"{totals.in_unknown_loops} operations are in `while` loops, whose number "
            "of iterations only a run can tell: one is counted ('x ?')"
        )
    if totals.in_branches:
        found.append(
            f"{totals.in_branches} operations are in branches of a `cond`: all "
            "branches are counted"
        )
    if totals.not_counted:
        found.append(
            "FLOPs of these are not known and not counted: "
            + ", ".join(totals.not_counted)
        )
    return found
