"""A report as one page of HTML: its style is in it, and it needs no network."""

import html

from .._inspect import share_text, short_type
from .._report_files import document
from ._badness import Range
from ._report import Content, Culprit
from ._text import details, head, ranges, rows_text, titles


def page(report: Content) -> str:
    """The whole page."""
    pairs = zip(titles(report), report.culprits, strict=True)
    return document(
        "mpx._blame",
        f"blame {report.name}",
        head=html.escape(head(report, all_places=True)),
        kind=report.verdict.name.lower(),
        verdict=html.escape(report.verdict.value),
        advice=_advice(report),
        culprits="\n".join(_section(title, culprit) for title, culprit in pairs),
    )


def _advice(report: Content) -> str:
    """What to do, the lines that are code as such."""
    parts = []
    for line in report.advice.splitlines():
        tag = "pre" if line.startswith("  ") else "p"
        parts.append(f"<{tag}>{html.escape(line.strip())}</{tag}>")
    if report.rows:
        rows = rows_text(report)
        parts.append(f"<dl><dt>rows of the batch</dt><dd>{rows}</dd></dl>")
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
