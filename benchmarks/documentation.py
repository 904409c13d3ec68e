"""The tables and the pictures of the pages, from the committed results.

The pages are written by hand but for their marked places: what stands between
`<!-- table NAME -->` and `<!-- end -->` comes from `benchmarks/results/NAME.json`, and
`gains` from several of them. A test checks that it still does.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from . import parts, results, summary
from .counts import half, products
from .device import tables as device_tables
from .peers.environment import REPOSITORY

PAGE = REPOSITORY / "docs" / "benchmarks.md"
DETAILS = REPOSITORY / "docs" / "benchmark-details.md"
README = REPOSITORY / "README.md"
_OTHERS = (REPOSITORY / "docs" / name for name in ("choose.md", "guides/tpu.md"))
PAGES = (PAGE, DETAILS, README, *_OTHERS)
# The modules that make the tables of a place.
MAKERS: dict[str, tuple[Any, ...]] = parts.PARTS | {
    "workloads": (half,),
    "sizes": (products,),
    "device": (device_tables,),
}
# Tables whose results are beside those of others.
_SOURCES = {"sizes": "workloads"}
PLACE = re.compile(r"(<!-- table ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def render(text: str, folder: Path = results.COMMITTED) -> str:
    """The page with its tables as the results have them."""

    def fill(place: re.Match[str]) -> str:
        return f"{place[1]}\n{_tables(place[2], folder)}\n\n{place[3]}"

    return PLACE.sub(fill, text)


def _tables(name: str, folder: Path) -> str:
    if name == "gains":
        return summary.table(folder)
    texts: list[str] = []
    for found in results.read_all(_SOURCES.get(name, name), folder):
        texts += [table.markdown() for table in parts.tables(found, MAKERS[name])]
        commits = dict.fromkeys(r["commit"] for r in found.records if "commit" in r)
        of = f"; commit {', '.join(commits)}" if commits else ""
        texts.append(f"`{found.command}`; {found.device}; {found.versions_line()}{of}.")
        texts += found.notes
    return "\n\n".join(texts) or "*Not measured yet.*"


def write() -> list[Path]:
    """Writes pages and pictures; returns their paths."""
    for page in PAGES:
        page.write_text(render(page.read_text()))
    folder = REPOSITORY / "docs" / "pictures"
    written = [*PAGES]
    for name in parts.PICTURES:
        found = results.read(name)
        if found is not None:
            path = folder / f"benchmarks-{name}.png"
            parts.PARTS[name][0].picture(found, path)
            written.append(path)
    for name, colours in (("light", summary.LIGHT), ("dark", summary.DARK)):
        written.append(folder / f"gains-{name}.png")
        summary.picture(written[-1], colours, results.COMMITTED)
    return written
