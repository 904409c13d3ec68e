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
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from ..results import Results
from ..tables import Goal, Table, signed_percent

# float32 comes again at the end: what it adds to itself is what is left to chance.
ARMS = {
    "ours": ("float32", "mpx float16", "mpx bfloat16", "float32"),
    "peers": ("float32", "MPX float16", "JMP float16", "float32"),
}
RECIPES = {"job": "the main job's", "adam": "with bare Adam"}
# Added share over float32 that mpx may cost, on the main job's step.
LIMITS = {"trace": 0.10, "lower": 0.15}


def measure(request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields one answer per round with the seconds of every case.

    Args:
        request: `cases`, and how many `rounds`.
    """
    from benchmarks import steps

    arms = steps.known_arms()
    cases = [steps.Case(**fields) for fields in request["cases"]]
    built = [(case.arm, steps.build(arms[case.arm], case)) for case in cases]
    makers = [
        ({"arm": arm}, lambda step=step: (step.jitted(), (step.state, step.batch)))
        for arm, step in built
    ]
    yield from in_rounds(makers, request["rounds"])


def in_rounds(makers: Sequence[Any], rounds: int) -> Iterator[dict[str, Any]]:
    """Yields one answer per round: what names each function, and its seconds.

    Args:
        makers: for each function, what names it, and what makes it anew, jitted, with
            its arguments.
        rounds: how many.
    """
    import jax

    for index in range(rounds + 1):
        samples = []
        for names, make in makers:
            jax.clear_caches()
            function, arguments = make()
            gc.collect()
            gc.disable()  # as `timeit` does
            start = time.process_time()
            traced = function.trace(*arguments)
            middle = time.process_time()
            lowered = traced.lower()
            end = time.process_time()
            gc.enable()
            del traced, lowered
            samples.append({**names, "trace": middle - start, "lower": end - middle})
        if index:  # the first round also imports what JAX imports lazily
            yield {"round": samples}


def case(arm: str, recipe: str) -> dict[str, Any]:
    """The paper's desktop model, complete."""
    return {
        "problem": "desktop",
        "arm": arm,
        "batch": 256,
        "blocks": 12,
        "recipe": recipe,
    }


def records(
    side: str, recipe: str, answers: Iterable[dict[str, Any]]
) -> list[dict[str, Any]]:
    """A record per arm with all its samples, in the order of the rounds."""
    rounds = [answer["round"] for answer in answers]
    return [
        {
            **case(column[0]["arm"], recipe),
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
        r
        for r in found.records
        if (r.get("side"), r.get("recipe")) == (record["side"], record["recipe"])
        and r["arm"] == "float32"
    )
    return min(record[what]) / min(base[what]) - 1


def tables(found: Results) -> list[Table]:
    """A row per arm."""
    rows = []
    steps = [record for record in found.records if "recipe" in record]
    for record in steps:
        row = [RECIPES[record["recipe"]], record["arm"]]
        for what in LIMITS:
            share = added(found, record, what)
            row += [f"{min(record[what]):.3f}", signed_percent(share) if share else ""]
        rows.append(row)
    rounds = sorted({len(record["trace"]) for record in steps})
    return [
        Table(
            "Host cost of the desktop ViT's step, 12 blocks, batch 256, "
            f"{found.device}",
            "step | arm | trace, CPU s | added | lower, CPU s | added",
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
        is_judged = record.get("side") == "ours" and record["recipe"] == "job"
        for what, limit in LIMITS.items() if is_judged else ():
            if record["arm"] != "float32":
                share = added(found, record, what)
                text = (
                    f"{what} time of {record['arm']} within {100 * limit:.0f}% of the "
                )
                text += f"same Equinox step without mpx: {signed_percent(share)}"
                yield Goal(text, share <= limit)
