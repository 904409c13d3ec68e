"""A report as text, in 100 columns."""

import textwrap

from .._inspect import share_text, short_type
from ._badness import Range
from ._report import Content, Culprit, Verdict

_WIDTH = 100
_INDENT = 14


def text_of(report: Content) -> str:
    """The whole report."""
    lines = [_head(report)]
    for number, culprit in enumerate(report.culprits):
        title = "First bad value" if number == 0 else f"Independent of it ({number})"
        lines += ["", f"{title}: {_title(culprit)}", *_details(culprit)]
    if report.verdict is not Verdict.NOTHING:
        lines += ["", f"Verdict: {report.verdict.value}"]
    if report.rows:
        lines += _field("rows", ", ".join(map(str, report.rows)))
    lines += textwrap.wrap(report.advice, _WIDTH)
    return "\n".join(lines)


def _head(report: Content) -> str:
    scale = f"loss scale {report.loss_scale:g}"
    if not report.places:
        return f"blame {report.name}: nothing is bad in the replay, {scale}"
    shown = ", ".join(report.places[:4])
    more = len(report.places) - 4
    rest = f" and {more} more" if more > 0 else ""
    head = f"blame {report.name}: not finite, {scale}: {shown}{rest}"
    return "\n".join(textwrap.wrap(head, _WIDTH, subsequent_indent="  "))


def _title(culprit: Culprit) -> str:
    text = f"{culprit.kind} in {culprit.primitive}, {culprit.direction}"
    if culprit.computed != culprit.primitive:
        text += f" (its {culprit.computed})"
    return text


def _details(culprit: Culprit) -> list[str]:
    lines = _field("why", culprit.reason)
    lines += _field("line", "  ".join(filter(None, (culprit.line, culprit.code))))
    if culprit.made_by:
        lines += _field("made by", f"{culprit.made_by} at {culprit.made_at}")
    lines += _field("scope", culprit.scope or culprit.function)
    lines += _field("inside", "; ".join(culprit.inside))
    what = "gradient of" if culprit.gradient == "wgrad" else "parameter"
    lines += _field(what, ", ".join(culprit.parameters))
    lines += _field("devices", ", ".join(map(str, culprit.devices)))
    made = "value" if culprit.primitive in ("input", "constant") else "result"
    for name, ranges in (("operand", culprit.operands), (made, culprit.results)):
        for one in ranges:
            lines += _field(name, _range(one))
    return lines


def _field(name: str, text: str) -> list[str]:
    if not text:
        return []
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=f"  {name:<{_INDENT - 2}}",
        subsequent_indent=" " * _INDENT,
    )


def _range(one: Range) -> str:
    text = f"{short_type(one.type)}  "
    if one.bad == 1:
        return text + "all of it is not finite"
    text += f"{one.least:.4g} to {one.largest:.4g}, amax {one.amax:.4g}"
    if one.zeros:
        text += f", {share_text(one.zeros)} zeros"
    return text + (f", {share_text(one.bad)} not finite" if one.bad else "")
