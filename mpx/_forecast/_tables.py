"""A forecast as sentences and small tables, for the terminal and the page alike."""

import dataclasses
import math
from collections.abc import Callable, Iterator

from .._counter import Roof
from .._inspect import bytes_text, flops_text, share_text
from ._report import Content, Estimate


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows under heads; the first column is text, and so are the last so many."""

    title: str
    heads: tuple[str, ...]
    rows: list[tuple[str, ...]]
    texts: int = 0


def baseline_of(report: Content, target: str) -> Estimate:
    """What a target's other precisions are compared with: bfloat16, else the first."""
    found = [one for one in report.estimates if one.target == target]
    return next((one for one in found if one.precision == "bfloat16"), found[0])


def ratio_of_times(one: Estimate, base: Estimate) -> tuple[float, float, float]:
    """Of the middle of both ranges; and the least and the most of both ends."""
    ends = [a / b for a, b in zip(one.time, base.time, strict=True)]
    return sum(one.time) / sum(base.time), min(ends), max(ends)


def sentences(report: Content) -> list[str]:
    """What a person wants to know, for each precision on each target."""
    found = []
    for one in report.estimates:
        base, limit = baseline_of(report, one.target), report.roofs[one.target].memory
        title = report.titles[one.target]
        where = f"On {'an' if title.startswith('N') else 'a'} {title} {one.precision}"
        if one.memory is None or one.memory > limit:
            needs = (
                "more than" if one.memory is None else f"{bytes_text(one.memory)} of"
            )
            found.append(f"{where} does not fit: it needs {needs} {bytes_text(limit)}.")
        elif one is not base and base.memory is not None:
            middle, least, most = ratio_of_times(one, base)
            text = (
                f"{where} takes {middle:.2f} ({least:.2f} to {most:.2f}) of "
                f"{base.precision}'s time in this step and "
                f"{one.memory / base.memory:.2f} of its memory."
            )
            if kinds := " and ".join(map(_in_words, list(one.bound)[:2])):
                text += f" Most of the time goes to {kinds}."
            few = _UNITS["FLOPs, 8 bits and fewer"]
            if one.quantizing and not any(map(one.flops.get, few)):
                text += " No matmul is in 8 bits: the device has no hardware for it."
            if middle >= 1:
                text += " It does not pay."
            elif one.pays_from and one.pays_from > 1:
                text += f" It would not pay below batch {one.pays_from}."
            found.append(text)
    return found


def _in_words(kind: str) -> str:
    """A kind of kernels as it reads in a sentence: `8-bit matmuls`."""
    what, _, bits = kind.partition(" bits")[0].partition(", ")
    return f"{bits}-bit {what}s" if bits else f"{what} kernels"


_UNITS = {
    "FLOPs, 8 bits and fewer": ("4 bits", "8 bits"),
    "16 bits": ("16 bits", "attention"),
    "32 bits": ("32 bits",),
}


def _flops(units: tuple[str, ...]) -> Callable[[Estimate], str]:
    def cell(one: Estimate) -> str:
        count = sum(one.flops.get(unit, 0) for unit in units)
        return flops_text(count) if count else ""

    return cell


_COUNTED: dict[str, Callable[[Estimate], str]] = {
    "memory": lambda e: "too much" if e.memory is None else bytes_text(e.memory),
    "largest batch": lambda e: "" if e.largest_batch is None else str(e.largest_batch),
    "traffic": lambda e: bytes_text(e.traffic),
    "quantizing": lambda e: bytes_text(e.quantizing) if e.quantizing else "",
    "sent": lambda e: ", ".join(f"{bytes_text(n)} {k}" for k, n in e.sent.items()),
    **{head: _flops(units) for head, units in _UNITS.items()},
    "kernels": lambda e: f"{e.kernels:,}",
}
_MODELLED: dict[str, Callable[[Estimate], str]] = {
    "roofline": lambda e: time_text(e.roofline),
    "best": lambda e: time_text(e.time[0]),
    "worst": lambda e: time_text(e.time[1]),
    "waits for memory": lambda e: share_text(e.by_memory),
}


def tables(report: Content) -> Iterator[Table]:
    """All that the report has."""

    def to_baseline(one: Estimate) -> str:
        base = baseline_of(report, one.target)
        if one.memory is None or base.memory is None:
            return ""  # no program, no time
        return f"{ratio_of_times(one, base)[0]:.2f}"

    modelled = {"to baseline": to_baseline, **_MODELLED}
    parts = list(dict.fromkeys(k for e in report.estimates for k in e.memory_by_part))
    memory = {part: _part(part) for part in parts}
    kinds = list(dict.fromkeys(k for e in report.estimates for k in e.bound))
    shares = {kind: _share(kind) for kind in kinds}
    yield _of_estimates("Counted", report, _COUNTED)
    yield _of_estimates("Modelled: time", report, modelled)
    yield _of_estimates("Counted: peak memory", report, memory)
    yield _of_estimates("Modelled: shares of the time", report, shares)
    heads = ("", "bytes", "FLOPs", "runs", "roofline", "line", "scope")
    for one in report.estimates:
        rows = [
            (
                *(group.kind, bytes_text(group.bytes)),
                flops_text(group.flops) if group.flops else "",
                *(str(group.times), time_text(group.seconds)),
                *(group.source, group.scope),
            )
            for group in one.top
        ]
        if rows:
            yield Table(f"Most memory traffic: {label_of(one)}", heads, rows, 2)
    rows = [(f"{c.target}, {c.name}", c.value, c.source) for c in report.constants]
    yield Table("Constants of the model", ("", "value", "source"), rows, 2)


def _part(part: str) -> Callable[[Estimate], str]:
    return lambda e: bytes_text(e.memory_by_part.get(part, 0))


def _share(kind: str) -> Callable[[Estimate], str]:
    return lambda e: share_text(e.bound[kind]) if kind in e.bound else ""


def _of_estimates(
    title: str, report: Content, columns: dict[str, Callable[[Estimate], str]]
) -> Table:
    """A row for each estimate; columns with nothing in them are left out."""
    rows = [(label_of(e), *(f(e) for f in columns.values())) for e in report.estimates]
    used = [i for i, column in enumerate(zip(*rows, strict=True)) if any(column)]
    heads = ("", *columns)
    picked = [tuple(row[i] for i in used) for row in rows]
    return Table(title, tuple(heads[i] for i in used), picked)


def label_of(one: Estimate) -> str:
    return f"{one.target}, {one.precision}"


def time_text(seconds: float) -> str:
    """`12.3 ms`."""
    if not math.isfinite(seconds):
        return "?"
    unit, size = ("s", 1.0) if seconds >= 1 else ("ms", 1e-3)
    return (
        f"{seconds / size:.3g} {unit}" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"
    )


def constant_text(roof: Roof, name: str) -> str:
    """A constant with its unit: `3.35 TB/s`, `0.92 to 0.75`."""
    value = getattr(roof, name)
    if name == "peaks":
        return "; ".join(f"{b} bits: {_large(x)}FLOP/s" for b, x in value.items())
    if isinstance(value, tuple):
        return " to ".join(time_text(x) if name == "start" else f"{x:g}" for x in value)
    return f"{_large(value)}B{'' if name == 'memory' else '/s'}"


def _large(value: float) -> str:
    prefix, size = ("T", 1e12) if value >= 1e12 else ("G", 1e9)
    return f"{value / size:.4g} {prefix}"


def versions_text(report: Content) -> str:
    """What the counted numbers depend on."""
    versions = ", ".join(" ".join(pair) for pair in report.versions.items())
    return f"Compiled, not run: {versions}."


def text(report: Content) -> str:
    """The whole report."""
    lines = [f"{report.name}: forecast", *sentences(report)]
    for table in tables(report):
        lines += ["", table.title, *_aligned(table)]
    return "\n".join([*lines, "", *report.notes, versions_text(report)])


def _aligned(table: Table) -> list[str]:
    """Text at the left of its column, numbers at the right."""
    rows = [table.heads, *table.rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    last = len(widths) - table.texts

    def line(row: tuple[str, ...]) -> str:
        cells = [
            cell.rjust(size) if 0 < i < last else cell.ljust(size)
            for i, (cell, size) in enumerate(zip(row, widths, strict=True))
        ]
        return "  ".join(cells).rstrip()

    return [line(row) for row in rows]
