"""The tables and the pictures of the pages, from the committed results.

The pages are written by hand but for their marked places: what stands between
`<!-- table NAME -->` and `<!-- end -->` comes from `benchmarks/results/NAME.json`, and
`gains` and `summary` from several of them. A test checks that it still does.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from . import results, summary
from .counts import (
    activations as activation_counts,
    attention as attention_counts,
    autocast as autocast_counts,
    eight_bits,
    half,
    monitor,
    products,
    recipes as recipe_counts,
    residuals as residual_counts,
    scaling as scaling_traffic,
    sweep,
    whole_steps,
    wire,
)
from .device import tables as device_tables
from .numerics import errors, folds, recipes
from .peers.environment import REPOSITORY
from .results import Results
from .tables import Table
from .time import autocast as autocast_host, compiling as compile_time, host_table

PAGE = REPOSITORY / "docs" / "benchmarks.md"
PAGES = (PAGE, REPOSITORY / "README.md", REPOSITORY / "docs" / "choose.md")
PICTURES: dict[str, Callable[[Results, Path], None]] = {
    "sweep": sweep.picture,
    "recipes": recipes.picture,
}
TABLES: dict[str, Callable[[Results], Sequence[Table]]] = {
    "sweep": sweep.tables,
    "scaling": scaling_traffic.tables,
    "host": lambda found: [*host_table.tables(found), *autocast_host.tables(found)],
    "recipe-counts": lambda found: [
        *recipe_counts.tables(found),
        *activation_counts.tables(found),
    ],
    "residuals": residual_counts.tables,
    "attention": attention_counts.tables,
    "workloads": lambda found: [*eight_bits.tables(found), *half.tables(found)],
    "whole-steps": whole_steps.tables,
    "sizes": products.tables,
    "wire": wire.tables,
    "monitor": monitor.tables,
    "compile-time": compile_time.tables,
    "folds": folds.tables,
    "recipes": recipes.tables,
    "errors": errors.tables,
    "autocast": autocast_counts.tables,
    "device": device_tables.tables,
    "cuda": lambda found: [
        table
        for part in (sweep, autocast_counts, scaling_traffic)
        for table in part.tables(found)
    ],
}
PLACE = re.compile(r"(<!-- table ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


# Tables whose results are beside those of others.
_SOURCES = {"sizes": "workloads"}


def render(text: str, folder: Path = results.COMMITTED) -> str:
    """The page with its tables as the results have them."""

    def fill(place: re.Match[str]) -> str:
        return f"{place[1]}\n{_tables(place[2], folder)}\n\n{place[3]}"

    return PLACE.sub(fill, text)


def _tables(name: str, folder: Path) -> str:
    if name in ("summary", "gains"):
        return (summary.table if name == "summary" else summary.gains)(folder)
    parts: list[str] = []
    for found in results.read_all(_SOURCES.get(name, name), folder):
        parts += [table.markdown() for table in TABLES[name](found)]
        commits = dict.fromkeys(r["commit"] for r in found.records if "commit" in r)
        of = f"; commit {', '.join(commits)}" if commits else ""
        parts.append(f"`{found.command}`; {found.device}; {found.versions_line()}{of}.")
        parts += found.notes
    return "\n\n".join(parts) or "*Not measured yet.*"


def write() -> list[Path]:
    """Writes pages and pictures; returns their paths."""
    for page in PAGES:
        page.write_text(render(page.read_text()))
    folder = REPOSITORY / "docs" / "pictures"
    written = [*PAGES]
    for name, picture in PICTURES.items():
        found = results.read(name)
        if found is not None:
            path = folder / f"benchmarks-{name}.png"
            picture(found, path)
            written.append(path)
    for name, colours in (("light", summary.LIGHT), ("dark", summary.DARK)):
        written.append(folder / f"gains-{name}.png")
        summary.picture(written[-1], colours, results.COMMITTED)
    return written
