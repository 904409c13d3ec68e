"""The page `docs/works-with.md`, from the results."""

import collections
import re
import statistics
from pathlib import Path
from typing import Any

from . import goals
from .layouts import LAYOUTS, PRECISIONS as IN_LAYOUTS
from .record import HALF, PRECISIONS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "works-with.md"

_HEAD = """\
# Works with

<!-- Written by `python -m rigs.clients --page`; `make clients` measures it again. -->

Programs of other packages, unmodified, each wrapped by one line of mpx:
`loss = mpx.autocast(loss)`. `make clients` runs them in an environment of its own, on a
CPU, and writes this page. The programs are in `rigs/clients/programs/`.

"""

_HOW = """\
## How to read it

* A value is the relative error of the gradient against float32, by the global norm,
  median of seven seeds, or of as many as its note says. In brackets: ratio to the error
  of the *naive* cast of all weights and inputs to the same precision; lower is better.
  No bracket: the naive cast fails. *f32*: the naive cast computes most matmuls in
  float32, as the library asks for it or its state is float32; then the ratio compares
  half precision with float32.
* float16 has dynamic loss scaling. Recipes run where a program has weight matmuls:
  *current* is `Float8CurrentScaling`, *delayed* `DelayedScaling` in its third step,
  *MXFP8* and *NVFP4* the recipes of these names. They have [fewer
  digits](numerics.md#what-makes-a-gradient-error-large).
* Everything else that a loss returns (statistics, a cache, predictions) must have the
  dtypes and shapes that it has in float32; otherwise the cell fails.
* ✗ fails for a reason outside mpx, **✗** fails; [reasons](#failures-and-notes) follow.
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
    parts = [_HEAD, _summary(results), _programs(results), _HOW, _reasons(results)]
    parts += [_products(results), _layouts(results), _versions(results)]
    return "\n".join(part.rstrip("\n") + "\n" for part in parts if part)


def write(results: dict[str, Any]) -> None:
    """Writes the page."""
    PAGE.write_text(render(results))


def _summary(results: dict[str, Any]) -> str:
    """What the tables say, in a few figures."""
    records = [r for r in results["programs"] if goals.runs(r)]
    cells = [goals.cell(r, p).colour for r in records for p in PRECISIONS]
    tried = sum(colour != "none" for colour in cells)
    rows = [
        [
            "programs that run in float32",
            f"{len(records)} of {len(results['programs'])}",
        ],
        [
            "their precisions that pass",
            f"{cells.count('green')} of {tried}; {cells.count('fault')} fail for a "
            f"reason outside mpx, {cells.count('red')} otherwise",
        ],
    ]
    for dtype in HALF:
        found = [
            ratio
            for r in records
            if (ratio := goals.ratio(r, dtype)) is not None and goals.is_cast(r, dtype)
        ]
        if found:
            text = _spread(found)
            rows.append([f"{dtype}: error, ratio to the naive cast's", text])
    for recipe in PRECISIONS:
        found = [
            r[recipe]["gradient"] / r["bfloat16"]["gradient"]
            for r in records
            if recipe not in HALF and _has_errors(r, recipe, "bfloat16")
        ]
        if found:
            name = _COLUMNS[recipe]
            rows.append([f"{name}: error, ratio to bfloat16's", _spread(found)])
    return _table(["", "found"], [*rows, *_exports(results)])


def _exports(results: dict[str, Any]) -> list[list[str]]:
    """What `mpx.export` writes against what inference multiplies."""
    parts = goals.exported(results)
    good = {name: part for name, part in parts.items() if "error" not in part}
    if not good:
        return []
    count = lambda key: sum(part[key] for part in good.values())  # noqa: E731
    wrong = sum(len(part["wrong"]) for part in good.values())
    read = count("tensors") - count("not read")
    text = f"{read - wrong} of {read} in {len(good)} exports; {count('quantized')} are "
    rows = [["`mpx.export`: tensors equal to what inference reads", text + "quantized"]]
    off = [f"{n} {p['output']:.0e}" for n, p in good.items() if not p["same output"]]
    text = f"{len(good) - len(off)} of {len(good)}{'; off: ' if off else ''}"
    rows.append(["outputs of imported weights that are equal", text + ", ".join(off)])
    refused = [f"{n}: {_message(p['error'])}" for n, p in parts.items() if "error" in p]
    if refused:
        rows.append(["not exported", "; ".join(refused)])
    return rows


def _spread(values: list[float]) -> str:
    low, high = min(values), max(values)
    middle = statistics.median(values)
    return (
        f"{middle:.2g} in the median of {len(values)} programs, {low:.2g} to {high:.2g}"
    )


def _has_errors(record: dict[str, Any], *precisions: str) -> bool:
    """Whether all of them gave a finite gradient that is off at all."""
    parts = [record.get(precision, {}) for precision in precisions]
    return all(part.get("finite") and part.get("gradient", 0) > 0 for part in parts)


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
    """Reasons with the programs that have them, equal ones once."""
    found: dict[str, dict[str, list[str]]] = {}

    def add(reason: str, name: str, precision: str = "") -> None:
        places = found.setdefault(reason, {}).setdefault(name, [])
        places += [precision] if precision else []

    for record in results["programs"]:
        name = record["program"]
        if not goals.runs(record):
            part = record.get("float32", record)
            add(
                _message(part.get("error", "its gradient is not finite")),
                name,
                "float32",
            )
            continue
        for precision in PRECISIONS:
            cell = goals.cell(record, precision)
            why, _, here = cell.why.removesuffix(")").partition(" (here: ")
            if cell.colour == "fault":
                add(_escaped(why), name, f"{precision}, {here}")
            elif cell.why:
                add(_escaped(cell.why), name, precision)
        for reason in _beside_float32(record):
            add(reason, name)
        if record["note"]:
            add(record["note"], name)
        for dtype in HALF:
            if f"naive {dtype}" in record and goals.ratio(record, dtype) is None:
                error = record[f"naive {dtype}"].get("error", "not finite")
                add(f"The naive cast fails: {_message(error)}", name, dtype)
    lines = [
        "* " + ", ".join(_place(*place) for place in places.items()) + f": {reason}"
        for reason, places in found.items()
    ]
    return "## Failures and notes\n\n" + "\n".join(lines or ["Nothing."])


def _place(name: str, precisions: list[str]) -> str:
    return f"**{name}**" + (f" ({'; '.join(precisions)})" if precisions else "")


def _beside_float32(record: dict[str, Any]) -> list[str]:
    """Why a program needs float32, and what a region of it gives."""
    reasons = [record["sensitive"]] if record["sensitive"] else []
    parts = [
        f"{dtype} {record[f'region {dtype}']['gradient']:.1e} "
        f"({goals.in_region(record, dtype):.2f})"
        for dtype in HALF
        if goals.in_region(record, dtype) is not None
    ]
    if parts:
        reasons.append(
            "With its solver in a region [`with mpx.autocast(enabled=False)`]"
            "(autocast.md#solvers-with-tolerances): " + ", ".join(parts)
        )
    return reasons


def _message(text: str) -> str:
    """The first sentence of another package's error, whose signs are not Markdown.

    What follows it, types and tracebacks, differs between precisions.
    """
    end = r":? Traceback |\. |: (?=[*({\[]|The input )"
    return f"`{re.split(end, text)[0].replace('`', chr(39)).rstrip('.: ')}`"


def _escaped(text: str) -> str:
    """A text in which no sign is Markdown."""
    return re.sub(r"([*_<`])", r"\\\1", text)


def _products(results: dict[str, Any]) -> str:
    found: dict[str, set[str]] = collections.defaultdict(set)
    for record in results["programs"]:
        for precision in PRECISIONS:
            for reason in record.get(precision, {}).get("reasons", {}):
                found[reason].add(record["program"])
    rows = [
        [reason, ", ".join(sorted(names))] for reason, names in sorted(found.items())
    ]
    text = "## Matmuls that stay in float32, and why\n\n"
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
        "eight virtual devices. Blank: this layout also fails in float32, mostly "
        "because a library sets no shardings for its matmuls on explicit axes.\n"
    )
    lines, red = [], []
    for record in results["layouts"]:
        if "layouts" not in record:
            red.append(f"* {record['program']}: {_message(record['error'])}")
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
                    f"* {record['program']}, {name}, {p}: {_message(c.why)}"
                    for p, c in cells.items()
                    if c.why
                ]
            rows.append([name, *texts])
        lines += [f"\n**{record['program']}**\n", _table(["layout", *IN_LAYOUTS], rows)]
    return "\n".join([text, *lines, "", *red])


def _versions(results: dict[str, Any]) -> str:
    found = ", ".join(f"{k} {v}" for k, v in results["versions"].items())
    return f"\nMeasured with {found}." if found else ""
