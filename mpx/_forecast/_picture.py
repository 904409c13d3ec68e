"""The picture of a forecast: memory by part, and the range of the time, as SVG.

Words stand above their bars, so that a narrow screen shows both.
"""

import html
from collections.abc import Mapping

from .._inspect import bytes_text
from ._report import Content
from ._tables import label_of, time_text

_WIDTH, _ROW, _LETTER = 500, 44, 8
# Of parts, in their order: the colours of the pages of reports.
_TONES = ("#3b6fd4", "#8a4fc4", "#8a929c", "#0d8a6f", "#b8860b", "#b4560f", "#d1453b")
_STYLE = """<style>text{font:14px system-ui,sans-serif;fill:currentColor}
.head{font-weight:600}svg{color:#8a929c}</style>"""


def picture(report: Content) -> str:
    """Two bars for each estimate, over those of the same unit."""
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
    """The colours of parts, on as many lines as they need; and where it ends."""
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
