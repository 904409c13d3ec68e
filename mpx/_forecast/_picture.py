"""The picture of a forecast: memory by part, and the range of the time, as SVG."""

import html

from .._inspect import bytes_text
from ._report import Content
from ._tables import time_text

_LEFT, _WIDTH, _ROW = 170, 520, 26
# Of parts, in their order: the colours of the pages of reports.
_TONES = ("#3b6fd4", "#8a4fc4", "#8a929c", "#0d8a6f", "#b8860b", "#b4560f", "#d1453b")
_STYLE = """<style>text{font:13px system-ui,sans-serif;fill:currentColor}
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
        rows.append(_text(0, y + 14, f"{one.target}, {one.precision}"))
        x = float(_LEFT)
        for part, size in one.memory_by_part.items():
            width = size / most * _WIDTH
            rows.append(_bar(x, y, width, tones[part], f"{part}: {bytes_text(size)}"))
            x += width
        rows.append(_text(x + 6, y + 14, bytes_text(one.memory or 0)))
        y += _ROW
    x = 0.0
    for part, tone in tones.items():
        rows += [_bar(x, y + 4, 10, tone, part), _text(x + 15, y + 17, part)]
        x += 36 + 7 * len(part)
    title = "Time, best to worst case; the red line is the roofline (modelled)"
    rows.append(_text(0, y + 54, title, "head"))
    y += 64
    for one in fits:
        best, worst, roof = (
            _LEFT + value / longest * _WIDTH for value in (*one.time, one.roofline)
        )
        rows += [
            _text(0, y + 14, f"{one.target}, {one.precision}"),
            _bar(best, y, max(worst - best, 1), _TONES[3], "best to worst case"),
            _bar(roof, y, 2, _TONES[6], "roofline"),
            _text(worst + 6, y + 14, " to ".join(map(time_text, one.time))),
        ]
        y += _ROW
    size = f"0 0 {_LEFT + _WIDTH + 140} {y + 6}"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{size}" role="img"'
    head += ' aria-label="Memory and time of the step">'
    return "\n".join([head, _STYLE, *rows, "</svg>"])


def _bar(x: float, y: float, width: float, tone: str, says: str) -> str:
    place = f'x="{x:.1f}" y="{y}" width="{width:.1f}" height="18" fill="{tone}"'
    return f"<rect {place}><title>{html.escape(says)}</title></rect>"


def _text(x: float, y: float, words: str, name: str = "") -> str:
    return f'<text x="{x:.0f}" y="{y}" class="{name}">{html.escape(words)}</text>'
