"""What must hold of every program, and the colour of each cell of the table.

A cell is green, red by a fault that is not mpx's, or red. The first two are fine; a
fault is one only if the record says so (`Client.faults`) and the evidence is in the
results: what has no mpx in it, the naive cast or rounding by hand, does no better.
"""

import dataclasses
import statistics
from collections.abc import Set
from typing import Any

from .layouts import LAYOUTS, PRECISIONS as IN_LAYOUTS
from .record import HALF, PRECISIONS

WORST = 2.0
"""How many times the naive cast's gradient error a program's may be."""
MEDIAN = 1.0
TRACE = 1.4
"""How many times as long as float32's tracing and lowering may take, in the median."""
FLOOR = 1e-4
"""Gradient errors below it are as good as none: rounding of float32 and of the loss."""
SPREAD = 3.0
"""How many times one device's gradient error that of a layout may be."""


EXPORTS = 12
"""How many programs' exported weights are equal to the operands of inference."""


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


def is_cast(record: dict[str, Any], dtype: str) -> bool:
    """Whether the naive cast computes half of its products or more in lower precision.

    A library whose state is float32, or that asks for float32, promotes what is cast.
    """
    found = record[f"naive {dtype}"].get("products", {})
    wide = found.get("float32", 0) + found.get("mixed", 0)
    return 2 * wide <= sum(found.values())


def comparison(record: dict[str, Any], dtype: str) -> str:
    """The ratio in brackets, marked if the naive cast stayed in float32."""
    found = ratio(record, dtype)
    if found is None:
        return ""
    return f" ({found:.2f}{'' if is_cast(record, dtype) else ' f32'})"


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
        if is_cast(record, precision):
            return f"gradient error {found:.1f} times the naive cast's"
        if not record["sensitive"]:
            return f"gradient error {found:.1f} times float32's, without a reason"
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
        in_brackets = comparison(record, precision) if precision in HALF else ""
        return Cell("green", error + in_brackets)
    fault = record["faults"].get(precision)
    if fault is not None and _is_shown(record, precision):
        return Cell("fault", "✗", f"{fault} (here: {wrong})")
    return Cell("red", "**✗**", wrong)


def _is_shown(record: dict[str, Any], precision: str) -> bool:
    """Whether what has no mpx in it does no better, so that mpx is not to blame."""
    names = [f"naive {precision}"]
    if precision not in HALF:
        names = ["naive bfloat16", f"rounded {precision}"]
    ours = record[precision].get("gradient")
    for part in (record[name] for name in names if name in record):
        if "error" in part or not part["finite"]:
            return True
        theirs = part["gradient"]
        if None not in (ours, theirs) and ours <= WORST * theirs:
            return True
    return False


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
    return [*made, _exports(results)]


def exported(results: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The parts of exported programs by `program recipe`."""
    kinds = ("error", "current", "delayed")
    return {
        f"{r['program']} {k}": r[k] if isinstance(r[k], dict) else r
        for r in results.get("exports", ())
        for k in kinds
        if k in r
    }


def _exports(results: dict[str, Any]) -> Goal:
    parts = exported(results)
    equal = {n for n, p in parts.items() if p.get("wrong") == []}
    wrong = [n for n, p in parts.items() if p.get("wrong")]
    models = len({name.split()[0] for name in equal})
    text = f"{EXPORTS} models exported with bits equal: {models}"
    return Goal(text + _but(wrong), models >= EXPORTS and not wrong)


def _but(places: list[str]) -> str:
    return f"; not {', '.join(places)}" if places else ""


def _all_run(records: list[dict[str, Any]]) -> Goal:
    cells = {(r["program"], p): cell(r, p) for r in records for p in PRECISIONS}
    count = sum(c.colour != "none" for c in cells.values())
    faults = [" ".join(place) for place, c in cells.items() if c.colour == "fault"]
    red = [" ".join(place) for place, c in cells.items() if c.colour == "red"]
    missing = [
        f"{r['program']} {p}" for r in records for p in r["precisions"] if p not in r
    ]
    return Goal(
        f"no program fails in a precision through mpx: {count - len(red + faults)} of "
        f"{count} pass"
        + (f"; for reasons outside mpx not {', '.join(faults)}" if faults else "")
        + _but([*red, *missing]),
        not red and not missing,
    )


def _errors(records: list[dict[str, Any]]) -> list[Goal]:
    made = []
    for dtype in HALF:
        found = {r["program"]: ratio(r, dtype) for r in records}
        known = {k: v for k, v in found.items() if v is not None}
        cast = {
            r["program"]: known[r["program"]]
            for r in records
            if r["program"] in known and is_cast(r, dtype)
        }
        if not cast:
            continue
        worst = max(cast, key=lambda k: cast[k])
        middle, of_all = (statistics.median(x.values()) for x in (cast, known))
        text = f"{dtype}: gradient error at most {WORST:g} times the naive cast's: "
        text += f"{cast[worst]:.2f} ({worst}) of {len(cast)}"
        made.append(Goal(text, cast[worst] <= WORST))
        text = f"{dtype}: below it in the median: {middle:.2f}; {of_all:.2f} with the "
        text += f"{len(known) - len(cast)} casts that stay in float32"
        made.append(Goal(text, max(middle, of_all) < MEDIAN))
        made.append(_stay_in_float32(records, dtype, known.keys() - cast.keys()))
    return [*made, *_regions(records)]


def _stay_in_float32(
    records: list[dict[str, Any]], dtype: str, names: Set[str]
) -> Goal:
    """Those above the bound have a reason; all are named."""
    above = [
        r for r in records if r["program"] in names and (ratio(r, dtype) or 0) > WORST
    ]
    listed = ", ".join(f"{r['program']} {ratio(r, dtype):.2f}" for r in above)
    return Goal(
        f"{dtype}: where the naive cast stays in float32, more than {WORST:g} times "
        f"its error has a reason: {listed or 'none'}; of {', '.join(sorted(names))}",
        all(r["sensitive"] for r in above),
    )


def in_region(record: dict[str, Any], dtype: str) -> float | None:
    """As `ratio`, with the program's solver in a region of float32."""
    part = record.get(f"region {dtype}")
    return None if part is None else ratio({**record, dtype: part}, dtype)


def _regions(records: list[dict[str, Any]]) -> list[Goal]:
    found = {
        f"{r['program']} {dtype}": in_region(r, dtype)
        for r in records
        for dtype in HALF
        if f"region {dtype}" in r
    }
    if not found:
        return []
    text = f"a solver in a region of float32 gives at most {WORST:g} times the error: "
    text += ", ".join(
        f"{name} {'fails' if x is None else format(x, '.2f')}"
        for name, x in found.items()
    )
    return [Goal(text, all(x is not None and x <= WORST for x in found.values()))]


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
