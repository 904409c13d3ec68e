"""The table of a sweep: by group, how many functions and cases are right."""

from collections import defaultdict
from pathlib import Path
from typing import Any

from rigs.sweep.explained import find_reason

PAGE = Path(__file__).parents[2] / "docs/numerics.md"
BEGIN, END = "<!-- sweep: begin -->", "<!-- sweep: end -->"
_HEAD = ("group", "functions", "cases", "right", "explained", "wrong", "overflows")


def count(rows: dict[str, Any]) -> list[tuple[str | int, ...]]:
    """Counts results by group, in the order of `_HEAD`, and a last row of sums."""
    groups: dict[str, dict[str, Any]] = defaultdict(dict)
    for name, row in rows.items():
        groups[name.split(".")[0]][name] = row
    counted: list[tuple[str | int, ...]] = []
    for group, members in groups.items():
        verdicts = [judge(name, row["verdict"]) for name, row in members.items()]
        numbers = [verdicts.count(v) for v in ("right", "explained", "wrong")]
        functions = len({name.split("/")[0] for name in members})
        overflows = verdicts.count("overflows")
        counted.append((group, functions, len(members), *numbers, overflows))
    sums = [sum(int(row[i]) for row in counted) for i in range(1, len(_HEAD))]
    return [*counted, ("all", *sums)]


def judge(name: str, verdict: str) -> str:
    """Returns a verdict, `explained` where a wrong case has a reason."""
    return "explained" if verdict == "wrong" and find_reason(name) else verdict


def to_markdown(rows: dict[str, Any]) -> str:
    """Returns the table as Markdown."""
    lines = [_HEAD, ("---", *["--:"] * (len(_HEAD) - 1)), *count(rows)]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def write_page(rows: dict[str, Any], page: Path) -> None:
    """Writes the table between the two markers of a page.

    Raises:
        ValueError: The page does not hold both markers.
    """
    text = page.read_text()
    if BEGIN not in text or END not in text:
        raise ValueError(f"{page} needs the lines `{BEGIN}` and `{END}`.")
    before, rest = text.split(BEGIN, 1)
    after = rest.split(END, 1)[1]
    page.write_text(f"{before}{BEGIN}\n{to_markdown(rows)}\n{END}{after}")
