"""`Forecast`: the views of a forecast (text, HTML, SVG, JSON)."""

import dataclasses
import html
import math
import os
from collections.abc import Callable, Iterator, Mapping

from ..._settings import Rules
from .._counter import Roof
from .._inspect import bytes_text, flops_text, share_text
from .._report_files import aligned, document, framed, from_json, save_as, to_json
from ._forecast_report import Content, Estimate, where_it_pays

# --- Sentences and small tables, for the terminal and the page alike ------------------


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows under heads; the first column and the last `texts` ones are text."""

    title: str
    heads: tuple[str, ...]
    rows: list[tuple[str, ...]]
    texts: int = 0


def baseline_of(report: Content, target: str) -> Estimate:
    """Returns a target's baseline: bfloat16, else the first precision."""
    found = [one for one in report.estimates if one.target == target]
    return next((one for one in found if one.precision == "bfloat16"), found[0])


def ratio_of_times(one: Estimate, base: Estimate) -> tuple[float, float, float]:
    """Returns the ratio of the ranges' middles, and the least and most of the ends."""
    ends = [a / b for a, b in zip(one.time, base.time, strict=True)]
    return sum(one.time) / sum(base.time), min(ends), max(ends)


def sentences(report: Content) -> list[str]:
    """Returns a sentence for each precision and target, except baselines that fit."""
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


def _findings(report: Content) -> list[str]:
    """Returns what was not counted."""
    found = ((one, said) for one in report.estimates for said in one.findings)
    return [f"{label_of(one)}: {said}" for one, said in found]


def _in_words(kind: str) -> str:
    """Returns a kind of kernels for a sentence: `8-bit matmuls`."""
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
    """Yields all tables of the report."""

    def to_baseline(one: Estimate) -> str:
        base = baseline_of(report, one.target)
        if one.memory is None or base.memory is None:
            return ""  # without a program there is no time
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
    """Returns a row for each estimate, without empty columns."""
    rows = [(label_of(e), *(f(e) for f in columns.values())) for e in report.estimates]
    used = [i for i, column in enumerate(zip(*rows, strict=True)) if any(column)]
    heads = ("", *columns)
    picked = [tuple(row[i] for i in used) for row in rows]
    return Table(title, tuple(heads[i] for i in used), picked)


def label_of(one: Estimate) -> str:
    return f"{one.target}, {one.precision}"


def time_text(seconds: float) -> str:
    """Returns a time such as `12.3 ms`."""
    if not math.isfinite(seconds):
        return "?"
    unit, size = ("s", 1.0) if seconds >= 1 else ("ms", 1e-3)
    return (
        f"{seconds / size:.3g} {unit}" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"
    )


def constant_text(roof: Roof, name: str) -> str:
    """Returns a constant with its unit: `3.35 TB/s`, `0.92 to 0.75`."""
    value = getattr(roof, name)
    if name in ("peaks", "integers"):
        return "; ".join(f"{b} bits: {_large(x)}FLOP/s" for b, x in value.items())
    if isinstance(value, tuple):
        return " to ".join(time_text(x) if name == "start" else f"{x:g}" for x in value)
    return f"{_large(value)}B{'' if name == 'memory' else '/s'}"


def _large(value: float) -> str:
    prefix, size = ("T", 1e12) if value >= 1e12 else ("G", 1e9)
    return f"{value / size:.4g} {prefix}"


def versions_text(report: Content) -> str:
    """Returns the versions that the counted numbers depend on."""
    versions = ", ".join(" ".join(pair) for pair in report.versions.items())
    return f"Compiled, not run: {versions}."


def text(report: Content) -> str:
    """Returns the whole report."""
    lines = [f"{report.name}: forecast", *sentences(report), *_findings(report)]
    for table in tables(report):
        lines += ["", table.title, *_lines(table)]
    return "\n".join([*lines, "", *report.notes, versions_text(report)])


def _lines(table: Table) -> list[str]:
    """Aligns text to the left of its column, numbers to the right."""
    count = len(table.heads)
    texts = (0, *range(count - table.texts, count))
    return aligned([table.heads, *table.rows], texts)


# --- Picture: memory by part, and the range of the time, as SVG -----------------------
#
# Labels are above their bars, so a narrow screen shows both.

_WIDTH, _ROW, _LETTER = 500, 44, 8
# The colours of parts, in order: those of the reports' pages.
_TONES = ("#3b6fd4", "#8a4fc4", "#8a929c", "#0d8a6f", "#b8860b", "#b4560f", "#d1453b")
_STYLE = """<style>text{font:14px system-ui,sans-serif;fill:currentColor}
.head{font-weight:600}svg{color:#8a929c}</style>"""


def picture(report: Content) -> str:
    """Returns a bar of memory and a bar of time for each estimate, on common scales."""
    fits = [one for one in report.estimates if one.memory_by_part]
    parts = list(dict.fromkeys(part for one in fits for part in one.memory_by_part))
    tones = dict(zip(parts, _TONES, strict=False))
    most = max((one.memory or 0 for one in fits), default=0) or 1
    longest = max((one.time[1] for one in fits), default=0.0) or 1.0
    rows, y = [_text(0, 14, "Peak memory (counted)", "head")], 24
    for one in fits:
        rows.append(_text(0, y + 14, f"{label_of(one)}: {bytes_text(one.memory or 0)}"))
        x = 0.0
        for part, size in one.memory_by_part.items():
            width = size / most * _WIDTH
            says = f"{part}: {bytes_text(size)}"
            rows.append(_bar(x, y + 20, width, tones[part], says))
            x += width
        y += _ROW
    legend, y = _legend(tones, y + 4)
    title = "Time, best to worst case; red: roofline (modelled)"
    rows += [*legend, _text(0, y + 32, title, "head")]
    y += 42
    for one in fits:
        best, worst, roof = (
            value / longest * _WIDTH for value in (*one.time, one.roofline)
        )
        words = f"{label_of(one)}: {' to '.join(map(time_text, one.time))}"
        rows += [
            _text(0, y + 14, words),
            _bar(best, y + 20, max(worst - best, 1), _TONES[3], "best to worst case"),
            _bar(roof, y + 20, 2, _TONES[6], "roofline"),
        ]
        y += _ROW
    head = '<svg xmlns="http://www.w3.org/2000/svg" role="img"'
    head += f' width="{_WIDTH + 2}" viewBox="0 0 {_WIDTH + 2} {y + 6}"'
    head += ' aria-label="Memory and time of the step">'
    return "\n".join([head, _STYLE, *rows, "</svg>"])


def _legend(tones: Mapping[str, str], y: int) -> tuple[list[str], int]:
    """Returns the legend of parts, on as many lines as needed, and its lower end."""
    rows, x = [], 0
    for part, tone in tones.items():
        width = 32 + _LETTER * len(part)
        if x and x + width > _WIDTH:
            x, y = 0, y + 22
        rows += [_bar(x, y, 10, tone, part), _text(x + 15, y + 14, part)]
        x += width
    return rows, y + 18


def _bar(x: float, y: float, width: float, tone: str, says: str) -> str:
    place = f'x="{x:.1f}" y="{y}" width="{width:.1f}" height="18" fill="{tone}"'
    return f"<rect {place}><title>{html.escape(says)}</title></rect>"


def _text(x: float, y: float, words: str, name: str = "") -> str:
    return f'<text x="{x:.0f}" y="{y}" class="{name}">{html.escape(words)}</text>'


# --- The report -----------------------------------------------------------------------

_FORMAT, _VERSION = "mpx forecast", 2


@dataclasses.dataclass(frozen=True, repr=False)
class Forecast(Content):
    """The result of `mpx.forecast`: an estimate for each target and precision.

    It prints as sentences and tables, and a notebook shows the page. Tables mark which
    numbers are counted and which are modelled, as do the fields of `estimates`.
    """

    def __str__(self) -> str:
        """Returns the report as sentences and tables."""
        return text(self)

    __repr__ = __str__

    @property
    def sentences(self) -> list[str]:
        """Returns one sentence per target and precision, except the baseline."""
        return sentences(self)

    def where_it_pays(self, precision: str, target: str = "") -> Rules:
        """Returns rules that keep matmuls in half precision if quantizing is slower.

        A matmul stays in half precision if quantizing its operands takes longer than 8
        bits save in the three matmuls of forward and backward pass. Quantizing is
        assumed to move as many bytes per number as in this step.

        Args:
            precision: A precision of the report, with a recipe.
            target: A target of the report; the first by default.

        Returns:
            Rules for `rules=` of `mpx.autocast`, which print with the lines and shapes
            that go back to half precision. Empty if no matmul of the step loses.

        Raises:
            ValueError: The report has no such estimate, or it quantizes nothing; the
                target is unknown.
        """
        return where_it_pays(self, precision, target)

    def to_json(self) -> str:
        """Returns the report as JSON, which `from_json` reads."""
        return to_json(self, _FORMAT, _VERSION)

    @classmethod
    def from_json(cls, text: str) -> "Forecast":
        """Returns the report from the JSON that `to_json` wrote.

        Raises:
            ValueError: The text is not a forecast, or one of another version of mpx.
        """
        must = "`from_json(text)` needs a forecast"
        return from_json(cls, text, _FORMAT, _VERSION, must)

    def to_html(self) -> str:
        """Returns the report as one page of HTML that needs no network."""
        says = [*self.sentences, *_findings(self), *self.notes, versions_text(self)]
        return document(
            "mpx._tools._forecast",
            f"{self.name}: forecast",
            says="\n".join(f"<p>{html.escape(one)}</p>" for one in says),
            picture=picture(self),
            tables="\n".join(map(_html, tables(self))),
        )

    def to_svg(self) -> str:
        """Returns the picture as SVG: memory by part, and the range of the time."""
        return picture(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the report: a page, JSON, text, or the picture.

        Args:
            path: Ends with `.html`, `.json`, `.txt` or `.svg`.

        Raises:
            ValueError: It has another ending.
        """
        writers = {".html": self.to_html, ".json": self.to_json, ".svg": self.to_svg}
        writers[".txt"] = self.__str__
        save_as(path, writers, "`Forecast.save(path)`")

    def _repr_html_(self) -> str:
        """Returns the page in a frame, for notebooks."""
        return framed(self.to_html(), self.name, height=720)


def _html(table: Table) -> str:
    def row(cells: tuple[str, ...], tag: str) -> str:
        made = (f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells)
        return f"<tr>{''.join(made)}</tr>"

    body = "\n".join([row(table.heads, "th"), *(row(one, "td") for one in table.rows)])
    name = "numbers" if table.texts == 0 else "texts"
    title = f"<h2>{html.escape(table.title)}</h2>"
    return (
        f'{title}\n<div class="scroll"><table class="{name}">\n{body}\n</table></div>'
    )
