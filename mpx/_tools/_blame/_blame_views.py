"""Views of a report of `mpx.blame`: text, one page of HTML, JSON."""

import dataclasses
import html
import os
import textwrap
from typing import Any

from ..._settings import Rule
from .._inspect import share_text, short_type
from .._report_files import document, framed, save_as, to_json
from ._blame_report import Content, Culprit, Range, Verdict

# --- Text, in 100 columns -------------------------------------------------------------

_WIDTH = 100
_INDENT = 14
_ROWS = 16


def text_of(report: Content) -> str:
    """Returns the whole report."""
    is_bad = report.verdict is not Verdict.NOTHING
    first = report.verdict.value if is_bad else head(report)
    lines = [f"blame {report.name}: {first}"]
    for line in report.advice.splitlines():
        indent = "  " if line.startswith("  ") else ""
        lines += textwrap.wrap(line, _WIDTH, subsequent_indent=indent)
    if report.rows:
        lines += _field("rows", rows_text(report))
    if is_bad:
        text = head(report)
        lines += ["", *textwrap.wrap(text, _WIDTH, subsequent_indent="  ")]
    for title, culprit in zip(titles(report), report.culprits, strict=True):
        lines += ["", title]
        for name, text in details(culprit):
            lines += _field(name, text)
        for name, one in ranges(culprit):
            lines += _field(name, _range(one))
    return "\n".join(lines)


def rows_text(report: Content) -> str:
    """Returns the rows of the batch, as many as fit, and their number."""
    shown = ", ".join(map(str, report.rows[:_ROWS]))
    more = len(report.rows) - _ROWS
    text = shown + (f" and {more} more, {len(report.rows)} in all" if more > 0 else "")
    untried = f"; {report.untried_rows} more were not tried"
    return text + (untried if report.untried_rows else "")


def head(report: Content, *, all_places: bool = False) -> str:
    """Returns one line about the bad results."""
    scale = f"loss scale {report.loss_scale:g}"
    if not report.places and report.culprits:
        return f"finite, {scale}, with large numbers"
    if not report.places:
        return f"nothing is bad in the replay, {scale}"
    shown = report.places if all_places else report.places[:4]
    more = len(report.places) - len(shown)
    rest = f" and {more} more" if more else ""
    return f"non-finite, {scale}: {', '.join(shown)}{rest}"


def titles(report: Content) -> list[str]:
    """Returns a title for each culprit."""
    return [
        f"Independent of it ({number}): {_title(culprit)}"
        if number
        else f"First bad value: {_title(culprit)}"
        for number, culprit in enumerate(report.culprits)
    ]


def _title(culprit: Culprit) -> str:
    text = f"{culprit.kind} in {culprit.primitive}, {culprit.direction}"
    if culprit.computed != culprit.primitive:
        text += f" (its {culprit.computed})"
    return text


def details(culprit: Culprit) -> list[tuple[str, str]]:
    """Returns the names and texts of a culprit's fields, without its ranges."""
    what = "gradient of" if culprit.gradient == "wgrad" else "parameter"
    found = [
        ("why", culprit.reason),
        ("line", "  ".join(filter(None, (culprit.line, culprit.code)))),
        ("made by", culprit.made_by and f"{culprit.made_by} at {culprit.made_at}"),
        ("scope", culprit.scope or culprit.function),
        ("inside", "; ".join(culprit.inside)),
        (what, ", ".join(culprit.parameters)),
        ("devices", ", ".join(map(str, culprit.devices))),
    ]
    return [(name, text) for name, text in found if text]


def ranges(culprit: Culprit) -> list[tuple[str, Range]]:
    """Returns the ranges of operands and results, each with `operand` or `result`."""
    made = "value" if culprit.primitive in ("input", "constant") else "result"
    pairs = (("operand", culprit.operands), (made, culprit.results))
    return [(name, one) for name, found in pairs for one in found]


def rule_text(rule: Rule) -> str:
    """Returns a rule as code."""
    named: Any = rule.precision
    parts = [f"mpx.Precision.{named.name}"]
    for name in ("primitive", "scope", "parameter"):
        value = getattr(rule, name)
        parts += [f'{name}="{value}"'] if value is not None else []
    if rule.when is not None:
        parts.append(f"when={rule.when}")
    return f"mpx.Rule({', '.join(parts)})"


def _field(name: str, text: str) -> list[str]:
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=f"  {name:<{_INDENT - 2}}",
        subsequent_indent=" " * _INDENT,
    )


def _range(one: Range) -> str:
    text = f"{short_type(one.type)}  "
    if one.bad == 1:
        return text + "all of it is non-finite"
    text += f"{one.least:.4g} to {one.largest:.4g}, amax {one.amax:.4g}"
    if one.zeros:
        text += f", {share_text(one.zeros)} zeros"
    return text + (f", {share_text(one.bad)} non-finite" if one.bad else "")


# --- One page of HTML, which includes its style and needs no network ------------------


def page(report: Content) -> str:
    """Returns the whole page."""
    pairs = zip(titles(report), report.culprits, strict=True)
    return document(
        "mpx._tools._blame",
        f"blame {report.name}",
        head=html.escape(head(report, all_places=True)),
        kind=report.verdict.name.lower(),
        verdict=html.escape(report.verdict.value),
        advice=_advice(report),
        culprits="\n".join(_section(title, culprit) for title, culprit in pairs),
    )


def _advice(report: Content) -> str:
    """Returns the advice as HTML, with code as such."""
    parts = []
    for line in report.advice.splitlines():
        tag = "pre" if line.startswith("  ") else "p"
        parts.append(f"<{tag}>{html.escape(line.strip())}</{tag}>")
    if report.rows:
        parts.append(f"<dl><dt>rows of the batch</dt><dd>{rows_text(report)}</dd></dl>")
    return "\n    ".join(parts)


def _section(title: str, culprit: Culprit) -> str:
    fields = "".join(
        f"<dt>{html.escape(name)}</dt><dd>{html.escape(text)}</dd>"
        for name, text in details(culprit)
    )
    rows = "".join(_row(name, one) for name, one in ranges(culprit))
    return (
        f'  <section class="card" aria-label="{html.escape(title)}">\n'
        f"    <h2>{html.escape(title)}</h2>\n    <dl>{fields}</dl>\n"
        "    <table><thead><tr><th>value</th><th>type</th><th>least</th>"
        "<th>largest</th><th>amax</th><th>zeros</th><th>NaN</th><th>infinite</th></tr>"
        f"</thead><tbody>{rows}</tbody></table>\n  </section>"
    )


def _row(name: str, one: Range) -> str:
    is_none_finite = one.bad == 1
    numbers = [
        "" if is_none_finite else f"{x:.4g}" for x in (one.least, one.largest, one.amax)
    ]
    cells = [html.escape(text) for text in (name, short_type(one.type), *numbers)]
    made = "".join(f"<td>{cell}</td>" for cell in (*cells, _share(one.zeros)))
    return f"<tr>{made}{_bad(one.nans)}{_bad(one.infinities)}</tr>"


def _share(share: float) -> str:
    return share_text(share) if share else ""


def _bad(share: float) -> str:
    return f'<td class="bad">{_share(share)}</td>' if share else "<td></td>"


# --- The report -----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class BlameReport(Content):
    """The result of `mpx.blame`; print it, or `save` it as a page."""

    @property
    def first(self) -> Culprit | None:
        """The first value that went bad; None if there is none, or none was found."""
        return self.culprits[0] if self.culprits else None

    def to_json(self) -> str:
        """Returns the report as JSON, with null for non-finite numbers."""
        rule = None if self.rule is None else rule_text(self.rule)
        return to_json(self, "mpx blame", 1, verdict=self.verdict.value, rule=rule)

    def to_html(self) -> str:
        """Returns the report as one page of HTML that needs no network."""
        return page(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the report to a file: a page, JSON, or text.

        Args:
            path: Ends with `.html`, `.json` or `.txt`.

        Raises:
            ValueError: It has another ending.
        """
        writers = {".html": self.to_html, ".json": self.to_json, ".txt": self.__str__}
        save_as(path, writers, "`mpx.reports.BlameReport.save(path)`")

    def __str__(self) -> str:
        """Returns the report as text, in 100 columns."""
        return text_of(self)

    def _repr_html_(self) -> str:
        """Returns the page in a frame, for notebooks."""
        return framed(page(self), self.name, height=480)
