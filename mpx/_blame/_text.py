"""A report as text, in 100 columns."""

import textwrap
from typing import Any

from .._inspect import share_text, short_type
from .._rules import Rule
from ._badness import Range
from ._report import Content, Culprit, Verdict

_WIDTH = 100
_INDENT = 14
_ROWS = 16


def text_of(report: Content) -> str:
    """The whole report."""
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
    """The rows of the batch, as many as fit, and how many there are."""
    shown = ", ".join(map(str, report.rows[:_ROWS]))
    more = len(report.rows) - _ROWS
    text = shown + (f" and {more} more, {len(report.rows)} in all" if more > 0 else "")
    untried = f"; {report.untried_rows} more were not tried"
    return text + (untried if report.untried_rows else "")


def head(report: Content, *, all_places: bool = False) -> str:
    """What is bad, in a line."""
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
    """A title for each culprit."""
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
    """Names and texts of what is known of a culprit, but for its numbers."""
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
    """What its operands and results held, each with what it is."""
    made = "value" if culprit.primitive in ("input", "constant") else "result"
    pairs = (("operand", culprit.operands), (made, culprit.results))
    return [(name, one) for name, found in pairs for one in found]


def rule_text(rule: Rule) -> str:
    """A rule as code."""
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
