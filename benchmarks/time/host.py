"""What mpx costs on the host: CPU seconds to trace and to lower a training step.

Question: how much longer does JAX need to trace and to lower the step with mpx, against
the same Equinox step without it? The baseline uses no mpx at all, not even
`force_full_precision` in the model.

All arms of one process alternate, round by round, with JAX's caches cleared before each
sample, so that every sample is what a user pays who starts the program. CPU time of the
process is measured, not the clock on the wall, and the fastest rounds are compared, as
`timeit` advises: what else runs on the machine makes a round slower, never faster.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable, Iterator
from typing import Any

from ..results import Results
from ..tables import Goal, Table, signed_percent

# float32 comes again at the end: what it adds to itself is what is left to chance.
ARMS = {
    "ours": (
        *("float32", "mpx float16", "mpx bfloat16", "autocast bfloat16"),
        "float32",
    ),
    "peers": ("float32", "MPX float16", "JMP float16", "float32"),
}
# Added share over float32 that mpx may cost; and autocast, which writes the function
# anew.
LIMITS = {"trace": 0.10, "lower": 0.15}
AUTOCAST = {"trace": 1.0, "lower": 1.0}


def requests(options: Any, found: Results) -> Iterator[dict[str, Any]]:
    """One for each side: the cases, and how many rounds."""
    del found
    for side, arms in ARMS.items():
        cases = [case(arm) for arm in arms]
        yield {"side": side, "cases": cases, "rounds": options.rounds}


def measure(request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields a record for every case, with the seconds of all rounds."""
    import jax

    from benchmarks.models import plain
    from benchmarks.steps import known_arms

    arms = known_arms()
    cases = [plain.Case(**fields) for fields in request["cases"]]
    built = [(case.arm, plain.build(arms[case.arm], case)) for case in cases]
    rounds = []
    for index in range(request["rounds"] + 1):
        samples = []
        for arm, step in built:
            jax.clear_caches()
            function = step.jitted()
            gc.collect()
            gc.disable()  # as `timeit` does
            start = time.process_time()
            traced = function.trace(step.state, step.batch)
            middle = time.process_time()
            lowered = traced.lower()
            end = time.process_time()
            gc.enable()
            del traced, lowered
            samples.append({"arm": arm, "trace": middle - start, "lower": end - middle})
        if index:  # the first round also imports what JAX imports lazily
            rounds.append(samples)
    for record in records(request["side"], rounds):
        yield {"run": record}


def case(arm: str) -> dict[str, Any]:
    """The paper's desktop model, complete."""
    sizes = {"model": "desktop, mean", "blocks": 12, "batch": 256}
    return {"target": "v5e", **sizes, "arm": arm}


def records(side: str, rounds: Iterable[Any]) -> list[dict[str, Any]]:
    """A record per arm with all its samples, in the order of the rounds."""
    return [
        {
            **case(column[0]["arm"]),
            "side": side,
            "trace": [round(sample["trace"], 4) for sample in column],
            "lower": [round(sample["lower"], 4) for sample in column],
        }
        for column in zip(*rounds, strict=True)
    ]


def added(found: Results, record: dict[str, Any], what: str) -> float:
    """The share that the fastest round adds to float32's fastest.

    What else runs on a machine only ever makes a round slower. How far it can be
    trusted, float32's second row tells, which adds nothing.
    """
    base = next(
        r for r in found.records if (r["side"], r["arm"]) == (record["side"], "float32")
    )
    return min(record[what]) / min(base[what]) - 1


def tables(found: Results) -> list[Table]:
    """A row per arm."""
    rows = []
    for record in found.records:
        row = [record["arm"]]
        for what in LIMITS:
            share = added(found, record, what)
            row += [f"{min(record[what]):.3f}", signed_percent(share) if share else ""]
        rows.append(row)
    rounds = sorted({len(record["trace"]) for record in found.records})
    return [
        Table(
            "Host cost of the desktop ViT's step, 12 blocks, batch 256, "
            f"{found.device}",
            "arm | trace, CPU s | added | lower, CPU s | added",
            rows,
            notes=[
                f"The fastest of {' or '.join(map(str, rounds))} alternating "
                "rounds; added to float32 of the same process. float32 once more "
                "shows what is left to chance."
            ],
        )
    ]


def goals(found: Results) -> Iterator[Goal]:
    """Mpx stays within the limits."""
    for record in found.records:
        limits = AUTOCAST if "autocast" in record["arm"] else LIMITS
        for what, limit in limits.items() if record["side"] == "ours" else ():
            if record["arm"] != "float32":
                share = added(found, record, what)
                text = (
                    f"{what} time of {record['arm']} within {100 * limit:.0f}% of the "
                )
                text += f"same Equinox step without mpx: {signed_percent(share)}"
                yield Goal(text, share <= limit)
