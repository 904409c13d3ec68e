"""What a device said, as tables, goals, and lines for the terminal."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from ..models.eight_bits import WORKLOADS
from ..models.plain import title
from ..results import Results
from ..tables import Goal, Table, megabytes, ratio
from .about import float32_products
from .plan import FIRST_ARMS, LAYER_ARMS, PAPER_ARM, PRODUCT_ARMS, SWEEP_ARMS, Case

Record = dict[str, Any]

# What Transformer Engine's guide says of a model of 5B parameters on an H200, over
# bfloat16, and what half precision is to gain over float32 there (see `goals`).
DEVICE = "H200"
OVER_BFLOAT16 = {"delayed": 1.69, "current": 1.57}
OVER_FLOAT32 = {"paper desktop": 1.6, "paper base": 1.7}
# Results whose sizes differ by more are not of the same computation.
LIKE = 0.1


def name(case: Case) -> str:
    """A case in words, on one line."""
    model = " to ".join(map(str, case.features)) or case.model
    batch = str(case.batch or "")
    return ", ".join(filter(None, (case.part, model, batch, case.arm)))


def in_short(record: Record) -> str:
    """What a record says, in a few words."""
    for key in ("error", "skipped"):
        if key in record:
            return f"{key}: {record[key]}"
    if "outcome" in record:
        return f"{record['test']} {record['outcome']} {record.get('reason', '')}"
    if "seconds" in record:
        faster = ratio(statistics.median(_ratios(record)))
        return f"{_milliseconds(record['seconds'])} ms, {record['base']} / it {faster}"
    if "largest" in record:
        return f"largest batch {record['largest']}"
    if "flops_per_second" in record:
        return (
            f"bfloat16 at {record['flops_per_second']['bfloat16'] / 1e12:.0f} TFLOP/s"
        )
    return "done"


def tables(found: Results) -> list[Table]:
    """One for the device, one for the tests, one for every setup."""
    makers = (
        *(_about, _tests, _layers, _transformers, _workloads),
        *(_largest, _sweep, _products),
    )
    return [table for maker in makers for table in maker(found)]


def goals(found: Results) -> list[Goal]:
    """No test failed; on an H200, as fast as others are there."""
    records = _of(found, "tests")
    tests = [record for record in records if "test" in record]
    failed = [r["test"] for r in tests if r["outcome"] not in ("passed", "skipped")]
    made = []
    if records:
        is_done = any(record.get("finished") for record in records)
        text = f"{len(tests)} tests that need a GPU"
        text += "" if is_done else ", not all of them that there are"
        made.append(Goal(f"{text}; failed: {failed}", is_done and not failed))
    if DEVICE not in found.device:
        return made
    for record in _measured(found, "steps"):
        arm, model = record["arm"], record["model"]
        limit = OVER_BFLOAT16.get(arm) if model == "layers" else None
        if arm.removeprefix("autocast ") in ("bfloat16", "float16"):
            limit = OVER_FLOAT32.get(model)
        if limit is not None:
            value = statistics.median(_ratios(record))
            text = f"{model}, {record['base']} to {arm}, at least {limit}: "
            made.append(Goal(text + ratio(value), value >= limit))
    return made


# --- Records --------------------------------------------------------------------------


def _of(found: Results, part: str) -> list[Record]:
    return [record for record in found.records if record["part"] == part]


def _measured(found: Results, part: str) -> list[Record]:
    return [record for record in _of(found, part) if "seconds" in record]


def _setups(records: Iterable[Record]) -> dict[tuple[Any, ...], list[Record]]:
    made: dict[tuple[Any, ...], list[Record]] = {}
    for record in records:
        made.setdefault(Case.of(record).setup, []).append(record)
    return made


def _sorted(records: Iterable[Record], arms: Sequence[str]) -> list[Record]:
    """In the order of some arms; others, which are the peers', come last."""
    known = list(arms)
    place = lambda r: known.index(r["arm"]) if r["arm"] in known else len(known)  # noqa: E731
    return sorted(records, key=place)


def _ratios(record: Record) -> list[float]:
    """How much faster the arm is than its base, round by round."""
    pairs = zip(record["base_seconds"], record["seconds"], strict=True)
    return [base / seconds for base, seconds in pairs]


def _milliseconds(seconds: Sequence[float]) -> str:
    return f"{1000 * statistics.median(seconds):.3g}"


def _faster(record: Record) -> str:
    """The median, and the quartiles where there are enough samples."""
    samples = _ratios(record)
    text = ratio(statistics.median(samples))
    if len(samples) < 4:
        return text
    low, _, high = statistics.quantiles(samples)
    return f"{text} [{ratio(low)}, {ratio(high)}]"


def _why_not(record: Record) -> str:
    return record.get("error") or record.get("skipped") or "not measured"


def _notes(records: Iterable[Record]) -> list[str]:
    """What was not measured and why, and results that are not like their base's."""
    notes = []
    for record in records:
        if "error" in record or "skipped" in record:
            notes.append(f"*{record['arm']}*: {_why_not(record)}.")
        elif "size" in record:
            size, base = record["size"], record["base_size"]
            if not abs(size - base) <= LIKE * abs(base):
                notes.append(f"*{record['arm']}*: its result is {size}, not {base}.")
    return notes


# --- Tables ---------------------------------------------------------------------------


def _about(found: Results) -> list[Table]:
    made = []
    for record in _of(found, "about"):
        if "flops_per_second" not in record:
            continue
        flops = record["flops_per_second"]
        float32 = float32_products(record["float32_error"])
        limit = record["memory_limit"]
        rows = [
            ["copy", f"{record['copy_bytes_per_second'] / 1e9:.0f} GB/s"],
            ["product in bfloat16", f"{flops['bfloat16'] / 1e12:.3g} TFLOP/s"],
            [
                f"product in float32, by {float32}",
                f"{flops['float32'] / 1e12:.3g} TFLOP/s",
            ],
            ["memory", f"{limit / 1e9:.1f} GB" if limit else "not known"],
        ]
        note = (
            "Bytes read and written. JAX's default precision of float32 products gives "
            f"a relative error of {record['float32_error']:.1g} here: {float32}."
        )
        made.append(
            Table(f"What the device does, {found.device}", ["of", "rate"], rows, [note])
        )
    return made


def _tests(found: Results) -> list[Table]:
    records = [record for record in _of(found, "tests") if "test" in record]
    if not records:
        return []
    outcomes = [record["outcome"] for record in records]
    rows = [[kind, str(outcomes.count(kind))] for kind in sorted(set(outcomes))]
    notes = [
        f"`{record['test']}`: {record.get('reason', record['outcome'])}"
        for record in records
        if record["outcome"] not in ("passed", "skipped")
    ]
    return [Table(f"Tests that need a GPU, {found.device}", ["", "tests"], rows, notes)]


def _layers(found: Results) -> list[Table]:
    """Stacks of linear layers."""
    from ..models.layers import flops

    made = []
    records = [r for r in _of(found, "steps") if r["model"] == "layers"]
    for (_, _, tokens, _, features), every in _setups(records).items():
        count = flops(tokens, features)
        rows = [
            [
                record["arm"],
                _milliseconds(record["seconds"]),
                f"{count / statistics.median(record['seconds']) / 1e12:.3g}",
                _faster(record),
                str(record["unit_calls"]),
                _megabytes(record["memory"]),
            ]
            for record in _sorted(every, LAYER_ARMS)
            if "seconds" in record
        ]
        sizes = " to ".join(map(str, features))
        made.append(
            Table(
                f"Forward and backward of linear layers, {sizes}, {tokens} tokens, "
                f"{found.device}",
                [
                    "arm",
                    "ms",
                    "TFLOP/s",
                    f"{LAYER_ARMS[0]} / arm",
                    "calls of units",
                    "memory, MB",
                ],
                rows,
                [_SAMPLES, *_notes(every)],
            )
        )
    return made


_SAMPLES = (
    "Medians and quartiles of rounds that alternate with the arm compared with, in "
    "one process; the arm compared with itself shows what is left to chance. Memory is "
    "what the executable asks for."
)


def _transformers(found: Results) -> list[Table]:
    return _steps(found, [r for r in _of(found, "steps") if r["model"] != "layers"])


def _workloads(found: Results) -> list[Table]:
    """Wide steps in 8 bits, and models of other kinds in half precision."""
    return _steps(found, _of(found, "workloads"))


def _steps(found: Results, records: list[Record]) -> list[Table]:
    """A table for each model."""
    made = []
    arms = list(dict.fromkeys(record["arm"] for record in records))
    for (_, model, batch, blocks, _), every in _setups(records).items():
        rows = [
            [
                record["arm"],
                _milliseconds(record["seconds"]),
                _faster(record),
                _megabytes(record["memory"]),
                _over(record["base_memory"], record["memory"]),
            ]
            for record in _sorted(every, arms)
            if "seconds" in record
        ]
        base = every[0]["base"]
        sizes = f": {blocks} blocks, batch {batch}" if batch else ""
        made.append(
            Table(
                f"Training step of the {_title(model)}{sizes}, Adam, {found.device}",
                ["arm", "ms", f"{base} / arm", "memory, MB", f"{base} / arm"],
                rows,
                [_SAMPLES, *_notes(every)],
            )
        )
    return made


def _title(model: str) -> str:
    return WORKLOADS[model].title if model in WORKLOADS else title(model)


def _largest(found: Results) -> list[Table]:
    made = []
    for (_, model, batch, blocks, _), every in _setups(_of(found, "largest")).items():
        done = [record for record in every if "largest" in record]
        base = next((r for r in done if r["arm"] == FIRST_ARMS[0]), None)
        rows = []
        for record in done:
            seconds, largest = record["largest_seconds"], record["largest"]
            rows.append(
                [
                    record["arm"],
                    _megabytes(record["memory"]),
                    _megabytes(record["peak"]),
                    str(largest),
                    _over(largest, base["largest"]) if base else "",
                    f"{largest / seconds:.0f}" if seconds else "",
                ]
            )
        columns = ["arm", f"memory at {batch}, MB", f"peak at {batch}, MB"]
        columns += ["largest batch", f"arm / {FIRST_ARMS[0]}", "images/s there"]
        note = "Memory is what the executable asks for, peak what was in use."
        made.append(
            Table(
                f"The largest batch of the {title(model)}: {blocks} blocks, "
                f"{found.device}",
                columns,
                rows,
                [note, *_notes(every)],
            )
        )
    return made


def _sweep(found: Results) -> list[Table]:
    """Over the batch size, with the batch that the steps had."""
    made = []
    arms = (*SWEEP_ARMS, PAPER_ARM)
    swept = _of(found, "sweep")
    for model, blocks in dict.fromkeys((r["model"], r["blocks"]) for r in swept):
        every = [
            record
            for record in (*swept, *_of(found, "steps"))
            if (record["model"], record.get("blocks")) == (model, blocks)
            and record["arm"] in arms
        ]
        rows = []
        for batch in sorted({record["batch"] for record in every}):
            here = {r["arm"]: r for r in every if r["batch"] == batch}
            timed = [r for r in here.values() if "seconds" in r]
            row = [str(batch)]
            row += [_milliseconds(timed[0]["base_seconds"])] if timed else [""]
            row += [_megabytes(timed[0]["base_memory"])] if timed else [""]
            for arm in arms:
                row += _both(here.get(arm))
            rows.append(row)
        base = FIRST_ARMS[0]
        columns = ["batch", f"{base}, ms", "memory, MB"]
        columns += [f"{arm}: {what}" for arm in arms for what in ("time", "memory")]
        notes = [f"Ratios are {base} to the arm; higher is better.", *_notes(every)]
        heading = (
            f"Over the batch size: {title(model)}, {blocks} blocks, {found.device}"
        )
        made.append(Table(heading, columns, rows, list(dict.fromkeys(notes))))
    return made


def _both(record: Record | None) -> list[str]:
    if record is None or "seconds" not in record:
        return ["", ""]
    return [_faster(record), _over(record["base_memory"], record["memory"])]


def _products(found: Results) -> list[Table]:
    records = _of(found, "products")
    rows = []
    for (_, _, tokens, _, features), every in _setups(records).items():
        here = {record["arm"]: record for record in every if "seconds" in record}
        if not here:
            continue
        base = next(iter(here.values()))["base_seconds"]
        rows.append(
            [
                f"{tokens} x {features[0]} x {features[1]}",
                _milliseconds(base),
                *(_faster(here[arm]) if arm in here else "" for arm in PRODUCT_ARMS),
            ]
        )
    if not rows:
        return []
    notes = [
        f"{LAYER_ARMS[0]} to the arm, medians and quartiles: below 1, fewer bits do "
        "not pay. Quantization is part of the time.",
        *dict.fromkeys(_notes(records)),
    ]
    return [
        Table(
            "Forward and backward of one product by its size (tokens x inputs x "
            f"outputs), {found.device}",
            ["size", f"{LAYER_ARMS[0]}, ms", *PRODUCT_ARMS],
            rows,
            notes,
        )
    ]


def _megabytes(count: int | None) -> str:
    return "" if count is None else megabytes(count)


def _over(above: float | None, below: float | None) -> str:
    return ratio(above / below) if above and below else ""
