"""What a device said, as tables, goals, and lines for the terminal."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from ..models.plain import title
from ..results import Results
from ..tables import Goal, Table, megabytes, ratio
from .about import float32_products
from .plan import LAYER_ARMS, PRODUCT_ARMS, Case

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
    return ", ".join(filter(None, (case.part, model, str(case.batch or ""), case.arm)))


def in_short(record: Record) -> str:
    """What a record says, in a few words."""
    for key in ("error", "skipped"):
        if key in record:
            return f"{key}: {record[key]}"
    if "seconds" in record:
        faster = ratio(statistics.median(_ratios(record)))
        return f"{_milliseconds(record['seconds'])} ms, {record['base']} / it {faster}"
    if "flops_per_second" in record:
        return (
            f"bfloat16 at {record['flops_per_second']['bfloat16'] / 1e12:.0f} TFLOP/s"
        )
    return "done"


def tables(found: Results) -> list[Table]:
    """One for the device, one for every setup."""
    makers = (_about, _layers, _steps, _products)
    return [table for make in makers for table in make(found)]


def goals(found: Results) -> Iterator[Goal]:
    """On an H200, as fast as others are there."""
    for record in _timed(_of(found, "steps")) if DEVICE in found.device else ():
        arm, model = record["arm"], record["model"]
        limit = OVER_BFLOAT16.get(arm) if model == "layers" else None
        if arm.removeprefix("autocast ") in ("bfloat16", "float16"):
            limit = OVER_FLOAT32.get(model)
        if limit is not None:
            value = statistics.median(_ratios(record))
            text = f"{model}, {record['base']} to {arm}, at least {limit}: "
            yield Goal(text + ratio(value), value >= limit)


# --- Records --------------------------------------------------------------------------


def _of(found: Results, part: str) -> list[Record]:
    return [record for record in found.records if record["part"] == part]


def _timed(records: Iterable[Record]) -> list[Record]:
    return [record for record in records if "seconds" in record]


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


def _notes(records: Iterable[Record]) -> list[str]:
    """What was not measured and why, and results that are not like their base's."""
    notes = []
    for record in records:
        if "error" in record or "skipped" in record:
            notes.append(
                f"*{record['arm']}*: {record.get('error') or record['skipped']}."
            )
        elif "size" in record:
            size, base = record["size"], record["base_size"]
            if not abs(size - base) <= LIKE * abs(base):
                notes.append(f"*{record['arm']}*: its result is {size}, not {base}.")
    return notes


# --- Tables ---------------------------------------------------------------------------


def _about(found: Results) -> Iterator[Table]:
    for record in _of(found, "about"):
        if "flops_per_second" not in record:
            continue
        flops, limit = record["flops_per_second"], record["memory_limit"]
        float32 = float32_products(record["float32_error"])
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
        title = f"What the device does, {found.device}"
        yield Table(title, "of | rate", rows, [note])


_SAMPLES = (
    "Medians and quartiles of rounds that alternate with the arm compared with, in "
    "one process; the arm compared with itself shows what is left to chance. Memory is "
    "what the executable asks for."
)


def _layers(found: Results) -> Iterator[Table]:
    """Stacks of linear layers."""
    from ..models.layers import flops

    records = [r for r in _of(found, "steps") if r["model"] == "layers"]
    for (_, _, tokens, _, features), every in _setups(records).items():
        count, sizes = flops(tokens, features), " to ".join(map(str, features))
        rows = [
            [
                record["arm"],
                _milliseconds(record["seconds"]),
                f"{count / statistics.median(record['seconds']) / 1e12:.3g}",
                _faster(record),
                str(record["unit_calls"]),
                megabytes(record["memory"]),
            ]
            for record in _timed(_sorted(every, LAYER_ARMS))
        ]
        yield Table(
            f"Forward and backward of linear layers, {sizes}, "
            f"{tokens} tokens, {found.device}",
            f"arm | ms | TFLOP/s | {LAYER_ARMS[0]} / arm | calls of units | memory, MB",
            rows,
            [_SAMPLES, *_notes(every)],
        )


def _steps(found: Results) -> Iterator[Table]:
    """A table for each model: transformers, and whole steps."""
    transformers = [r for r in _of(found, "steps") if r["model"] != "layers"]
    for records in (transformers, _of(found, "workloads")):
        arms = list(dict.fromkeys(record["arm"] for record in records))
        for (_, model, batch, blocks, _), every in _setups(records).items():
            rows = [
                [
                    record["arm"],
                    _milliseconds(record["seconds"]),
                    _faster(record),
                    megabytes(record["memory"]),
                    ratio(record["base_memory"] / record["memory"]),
                ]
                for record in _timed(_sorted(every, arms))
            ]
            base = every[0]["base"]
            sizes = f": {blocks} blocks, batch {batch}" if batch else ""
            name = title(model) if batch else model
            yield Table(
                f"Training step of the {name}{sizes}, Adam, {found.device}",
                f"arm | ms | {base} / arm | memory, MB | {base} / arm",
                rows,
                [_SAMPLES, *_notes(every)],
            )


def _products(found: Results) -> Iterator[Table]:
    records, rows = _of(found, "products"), []
    for (_, _, tokens, _, features), every in _setups(records).items():
        here = {record["arm"]: record for record in _timed(every)}
        if here:
            base = next(iter(here.values()))["base_seconds"]
            size = f"{tokens} x {features[0]} x {features[1]}"
            cells = [_faster(here[x]) if x in here else "" for x in PRODUCT_ARMS]
            rows.append([size, _milliseconds(base), *cells])
    notes = [
        f"{LAYER_ARMS[0]} to the arm, medians and quartiles: below 1, fewer bits do "
        "not pay. Quantization is part of the time.",
        *dict.fromkeys(_notes(records)),
    ]
    if rows:
        yield Table(
            "Forward and backward of one product by its size (tokens x inputs x "
            f"outputs), {found.device}",
            ["size", f"{LAYER_ARMS[0]}, ms", *PRODUCT_ARMS],
            rows,
            notes,
        )
