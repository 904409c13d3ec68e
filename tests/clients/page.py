"""The page `docs/works-with.md`, from the results."""

import collections
from pathlib import Path
from typing import Any

from . import goals
from .layouts import LAYOUTS, PRECISIONS as IN_LAYOUTS
from .record import HALF, PRECISIONS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "works-with.md"

_HEAD = """\
# Works with

<!-- Written by `python -m tests.clients --page`; `make clients` measures it anew. -->

Programs of other packages, unmodified, each wrapped by one line of mpx:
`loss = mpx.autocast(loss)`. `make clients` runs them in an environment of its own, on a
CPU, and writes this page; what each program is stands in `tests/clients/programs/`.

"""

_HOW = """\
## How to read it

* A number is the error of the gradient against float32, by the global norm, the
  median of seven sets of numbers, or of as many as its note says. In brackets: how
  many times the error of the *naive* cast it is, of all weights and inputs to the same
  precision. No bracket: the naive cast itself fails. *f32*: the naive cast computes
  most of its products in float32, since the library asks for it or its state is
  float32; then it is a cast of weights and inputs only, and the number compares half
  precision with float32.
* float16 is with dynamic loss scaling. Recipes run where a program has products of data
  with weights: *current* is `Float8CurrentScaling`, *delayed* `DelayedScaling` in its
  third step, *MXFP8* and *NVFP4* the recipes of these names. Errors of 8 bits are about
  sixteen times bfloat16's ([why](numerics.md#what-makes-a-gradient-error-large)).
* What the loss returns besides its value, new statistics, a cache, predictions, has the
  dtypes and shapes that it has in float32; otherwise the cell is red.
* ✗ is red by a fault that is not mpx's, **✗** is red; reasons stand below the table.
* *trace*, *equations* and *compile* are ratios of bfloat16's gradient to float32's: CPU
  time to trace and lower, size of the program, CPU time to compile.
"""

_COLUMNS = {
    "bfloat16": "bfloat16",
    "float16": "float16",
    "current": "current",
    "delayed": "delayed",
    "mxfp8": "MXFP8",
    "nvfp4": "NVFP4",
}


def render(results: dict[str, Any]) -> str:
    """The page as Markdown."""
    parts = [_HEAD, _goals(results), _programs(results), _HOW, _reasons(results)]
    parts += [_products(results), _layouts(results), _versions(results)]
    return "\n".join(part.rstrip("\n") + "\n" for part in parts if part)


def write(results: dict[str, Any]) -> None:
    """Writes the page."""
    PAGE.write_text(render(results))


def _goals(results: dict[str, Any]) -> str:
    judged = goals.judge(results)
    lines = ["| goal | |", "|---|---|"]
    lines += [f"| {g.text} | {'met' if g.met else '**missed**'} |" for g in judged]
    return "\n".join(lines)


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|---|" + "--:|" * (len(head) - 1)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def _times(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _programs(results: dict[str, Any]) -> str:
    head = ["program", *_COLUMNS.values(), "trace", "equations", "compile"]
    rows = []
    for record in results["programs"]:
        name = f"{record['package']}: {record['program']}"
        if not goals.runs(record):
            rows.append([name, "no float32", *[""] * (len(head) - 2)])
            continue
        rows.append(
            [name]
            + [goals.cell(record, p).text for p in PRECISIONS]
            + [_times(goals.trace_ratio(record))]
            + [_times(goals.program_ratio(record, w)) for w in ("equations", "compile")]
        )
    return "\n## Programs\n\n" + _table(head, rows)


def _reasons(results: dict[str, Any]) -> str:
    lines = []
    for record in results["programs"]:
        if not goals.runs(record):
            part = record.get("float32", record)
            why = part.get("error", "its gradient is not finite")
            lines.append(f"* {record['program']}, float32: {_code(why)}")
            continue
        for precision in PRECISIONS:
            found = goals.cell(record, precision)
            if found.why:
                lines.append(f"* {record['program']}, {precision}: {_code(found.why)}")
        lines += _beside_float32(record)
        if record["note"]:
            lines.append(f"* {record['program']}: {record['note']}")
        naive = [
            f"{dtype}: {_code(record[f'naive {dtype}'].get('error', 'not finite'))}"
            for dtype in HALF
            if f"naive {dtype}" in record and goals.ratio(record, dtype) is None
        ]
        if naive:
            lines.append(
                f"* {record['program']}, the naive cast fails. " + "; ".join(naive)
            )
    return "## What is red, and where the naive cast fails\n\n" + "\n".join(
        lines or ["Nothing."]
    )


def _beside_float32(record: dict[str, Any]) -> list[str]:
    """Why a program needs float32, and what a region of it gives."""
    lines = []
    if record["sensitive"]:
        lines.append(f"* {record['program']}: {record['sensitive']}")
    parts = [
        f"{dtype} {record[f'region {dtype}']['gradient']:.1e} "
        f"({goals.in_region(record, dtype):.2f})"
        for dtype in HALF
        if goals.in_region(record, dtype) is not None
    ]
    if parts:
        lines.append(
            f"* {record['program']}, its solver in a region "
            "[`with mpx.autocast(enabled=False)`](autocast.md#solvers-with-tolerances):"
            f" {', '.join(parts)}"
        )
    return lines


def _code(text: str) -> str:
    """Messages of others, whose signs are not Markdown."""
    short = text if len(text) < 160 else text[:157] + "..."
    return f"`{short.replace('`', chr(39))}`"


def _products(results: dict[str, Any]) -> str:
    found: dict[str, set[str]] = collections.defaultdict(set)
    for record in results["programs"]:
        for precision in PRECISIONS:
            for reason in record.get(precision, {}).get("reasons", {}):
                found[reason].add(record["program"])
    rows = [
        [reason, ", ".join(sorted(names))] for reason, names in sorted(found.items())
    ]
    text = "## Products that stay in float32, and why\n\n"
    return text + (
        _table(["reason, as `mpx.explain` has it", "programs"], rows)
        if rows
        else "None."
    )


def _layouts(results: dict[str, Any]) -> str:
    if not results["layouts"]:
        return ""
    text = (
        "## Several devices\n\nGradient errors against float32 on one device, on "
        "eight virtual devices. Empty: the program does not run so in float32, mostly "
        "because a library does not say how its products lie on explicit axes.\n"
    )
    lines, red = [], []
    for record in results["layouts"]:
        if "layouts" not in record:
            red.append(f"* {record['program']}: {_code(record['error'])}")
            continue
        rows = []
        for name in ("one device", *LAYOUTS):
            cells = {p: goals.layout_cell(record, name, p) for p in IN_LAYOUTS}
            if name == "one device":
                alone = record["layouts"][name]
                texts = [
                    f"{alone[p].get('gradient', float('nan')):.1e}" for p in IN_LAYOUTS
                ]
            else:
                texts = [c.text for c in cells.values()]
                red += [
                    f"* {record['program']}, {name}, {p}: {_code(c.why)}"
                    for p, c in cells.items()
                    if c.why
                ]
            rows.append([name, *texts])
        lines += [f"\n**{record['program']}**\n", _table(["layout", *IN_LAYOUTS], rows)]
    return "\n".join([text, *lines, "", *red])


def _versions(results: dict[str, Any]) -> str:
    found = ", ".join(f"{k} {v}" for k, v in results["versions"].items())
    return f"\nMeasured with {found}." if found else ""
