"""What must hold of every program, and the colour of each cell of the table.

A cell is green, red by the package's own fault, or red. The first two are fine; the
fault of a package is one only if its record says so (`Client.faults`) and the evidence
is in the results: the naive cast to the same precision fails, too.
"""

import dataclasses
import statistics
from typing import Any

from .gradients import HALF, PRECISIONS
from .layouts import LAYOUTS, PRECISIONS as IN_LAYOUTS

WORST = 2.0
"""How many times the naive cast's gradient error a program's may be."""
MEDIAN = 1.0
TRACE = 1.4
"""How many times as long as float32's tracing and lowering may take, in the median."""
FLOOR = 1e-4
"""Gradient errors below it are as good as none: rounding of float32 and of the loss."""
SPREAD = 3.0
"""How many times one device's gradient error that of a layout may be."""


@dataclasses.dataclass(frozen=True)
class Goal:
    """Something that the results must show.

    Attributes:
        text: What must hold, and what was found.
        met: Whether it holds.
    """

    text: str
    met: bool


@dataclasses.dataclass(frozen=True)
class Cell:
    """A program in one precision or layout.

    Attributes:
        colour: `green`, `fault` (red, by the package) or `red`; `none` if it was not
            asked for.
        text: What the table shows.
        why: What is wrong, or the package's fault.
    """

    colour: str
    text: str
    why: str = ""


NONE = Cell("none", "")


def runs(record: dict[str, Any]) -> bool:
    """Whether a program runs in float32."""
    part = record.get("float32", {"error": record.get("error")})
    return "error" not in part and part["finite"]


def ratio(record: dict[str, Any], precision: str) -> float | None:
    """Its gradient error over the naive cast's, if both have one."""
    ours, naive = record.get(precision, {}), record.get(f"naive {precision}", {})
    if not naive.get("finite") or ours.get("gradient") is None:
        return None
    if naive.get("gradient") is None:
        return None
    return max(ours["gradient"], FLOOR) / max(naive["gradient"], FLOOR)


def complaint(record: dict[str, Any], precision: str) -> str:
    """What is wrong with a program in a precision; nothing if it is fine."""
    part = record[precision]
    if "gradient" not in part:
        return part.get("error", "not measured")
    if not part["finite"]:
        return "loss or gradient is not finite"
    if not part["same outputs"]:
        return "what the loss returns has other dtypes or shapes than in float32"
    if not part["same gradients"]:
        return "gradients have other dtypes or shapes than in float32"
    if "" in part.get("reasons", {}):
        return "a product is in float32 without a reason"
    found = ratio(record, precision) if precision in HALF else None
    if found is not None and found > WORST:
        return f"gradient error {found:.1f} times the naive cast's"
    if part["gradient"] >= 1:
        return f"gradient error {part['gradient']:.2g}"
    return ""


def cell(record: dict[str, Any], precision: str) -> Cell:
    """The cell of a program and a precision."""
    if not runs(record) or precision not in record:
        return NONE
    wrong = complaint(record, precision)
    if not wrong:
        error = f"{record[precision]['gradient']:.1e}"
        found = ratio(record, precision) if precision in HALF else None
        return Cell("green", error + (f" ({found:.2f})" if found is not None else ""))
    fault = record["faults"].get(precision)
    if fault is not None and _is_shown(record, precision):
        return Cell("fault", "✗", f"{fault} (here: {wrong})")
    return Cell("red", "**✗**", wrong)


def _is_shown(record: dict[str, Any], precision: str) -> bool:
    """Whether the naive cast does no better, so that mpx is not to blame."""
    naive = record[f"naive {precision if precision in HALF else 'bfloat16'}"]
    return "error" in naive or not naive["finite"] or naive["gradient"] >= 0.1


def layout_cell(record: dict[str, Any], name: str, precision: str) -> Cell:
    """The cell of a program, a layout and a precision."""
    found = record["layouts"].get(name, {})
    if "error" in found.get("float32", {"error": ""}) or precision not in found:
        return NONE
    part, alone = found[precision], record["layouts"]["one device"][precision]
    if "error" in part or "error" in alone:
        return Cell("red", "**✗**", part.get("error") or alone.get("error"))
    if not part["gradient"] <= SPREAD * max(alone["gradient"], 1e-3):
        why = f"gradient error {part['gradient']:.2g}, {alone['gradient']:.2g} alone"
        return Cell("red", "**✗**", why)
    return Cell("green", f"{part['gradient']:.1e}")


def judge(results: dict[str, Any]) -> list[Goal]:
    """All goals."""
    records = [r for r in results["programs"] if runs(r)]
    broken = [r["program"] for r in results["programs"] if not runs(r)]
    made = [_all_run(records), *_errors(records), _reasons(records), _traces(records)]
    made.append(
        Goal(
            f"at least 40 programs run in float32: {len(records)}"
            + (f"; not {', '.join(broken)}" if broken else ""),
            len(records) >= 40,
        )
    )
    cells = {
        (r["program"], name, precision): layout_cell(r, name, precision)
        for r in results["layouts"]
        if "layouts" in r
        for name in LAYOUTS
        for precision in IN_LAYOUTS
    }
    red = [" ".join(place) for place, c in cells.items() if c.colour == "red"]
    count = sum(c.colour == "green" for c in cells.values())
    text = f"every layout that runs in float32 gives one device's gradients: {count}"
    made.append(Goal(text + _but(red), not red and count > 0))
    return made


def _but(places: list[str]) -> str:
    return f"; not {', '.join(places)}" if places else ""


def _all_run(records: list[dict[str, Any]]) -> Goal:
    cells = {(r["program"], p): cell(r, p) for r in records for p in PRECISIONS}
    count = sum(c.colour != "none" for c in cells.values())
    red = [" ".join(place) for place, c in cells.items() if c.colour == "red"]
    missing = [
        f"{r['program']} {p}" for r in records for p in r["precisions"] if p not in r
    ]
    return Goal(
        f"every program runs in all its precisions: {count - len(red)} of {count}"
        + _but([*red, *missing]),
        not red and not missing,
    )


def _errors(records: list[dict[str, Any]]) -> list[Goal]:
    made = []
    for dtype in HALF:
        found = {r["program"]: ratio(r, dtype) for r in records}
        known = {k: v for k, v in found.items() if v is not None}
        if not known:
            continue
        worst = max(known, key=lambda k: known[k])
        middle = statistics.median(known.values())
        made.append(
            Goal(
                f"{dtype}: gradient error at most {WORST:g} times the naive cast's: "
                f"{known[worst]:.2f} ({worst}) of {len(known)}",
                known[worst] <= WORST,
            )
        )
        made.append(
            Goal(f"{dtype}: below it in the median: {middle:.2f}", middle < MEDIAN)
        )
    return made


def _reasons(records: list[dict[str, Any]]) -> Goal:
    without = [
        f"{r['program']} {p}"
        for r in records
        for p in PRECISIONS
        if "" in r.get(p, {}).get("reasons", {})
    ]
    text = "no product is in float32 without a stated reason"
    return Goal(text + _but(without), not without)


def _traces(records: list[dict[str, Any]]) -> Goal:
    ratios = [trace_ratio(r) for r in records]
    known = [x for x in ratios if x is not None]
    middle = statistics.median(known) if known else float("inf")
    return Goal(
        f"tracing and lowering take at most {TRACE:g} times as long in the median: "
        f"{middle:.2f}",
        middle <= TRACE,
    )


def trace_ratio(record: dict[str, Any]) -> float | None:
    """How many times as long tracing and lowering take under autocast."""
    host = record.get("host", {})
    return host["bfloat16"] / host["float32"] if "float32" in host else None


def program_ratio(record: dict[str, Any], what: str) -> float | None:
    """How many times as many equations there are, or as long it takes to compile."""
    ours, plain = record.get("bfloat16", {}), record["float32"]
    return ours[what] / plain[what] if what in ours and plain.get(what) else None
