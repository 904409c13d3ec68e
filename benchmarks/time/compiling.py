"""How much longer the compiler takes where autocast recomputes islands.

Question: how much longer does XLA compile a step for an H100 if islands are recomputed,
against the same step that keeps what JAX keeps? CPU time of the process is measured, of
all threads, arms alternate, and the fastest rounds are compared, see `time.host`.
"""

from __future__ import annotations

import dataclasses
import gc
import time
from collections.abc import Iterable, Iterator
from typing import Any

from ..counts.residuals import DEFAULT, FLOAT32, KEPT
from ..models.plain import Case
from ..results import Results
from ..tables import Goal, Table, ratio

ARMS = (FLOAT32, KEPT, DEFAULT)
SETUPS = (("h100", "desktop", 4, 256), ("h100", "gpt", 4, 16))
ROUNDS = 4
LIMIT = 1.2


def measure(request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields one answer per setup and round with the CPU seconds of every arm.

    Args:
        request: how many `rounds`.
    """
    import mpx
    from benchmarks import our_arms
    from benchmarks.counter import counter
    from benchmarks.models import plain as residual_models

    for setup in SETUPS:
        devices = counter.compile_only_devices(counter.TARGETS[setup[0]])
        lowered = {}
        for arm in ARMS:
            with mpx.autocast(target=counter.TARGETS[setup[0]].name, ambient=True):
                case = Case(*setup, arm)
                step = residual_models.build(our_arms.ARMS[arm], case, devices)
                lowered[arm] = step.jitted().lower(step.state, step.batch)
        for index in range(request["rounds"] + 1):
            seconds = {}
            for arm, program in lowered.items():
                gc.collect()
                start = time.process_time()
                # An option, or JAX would give what it has compiled already.
                program.compile({"xla_dump_max_hlo_modules": index})
                seconds[arm] = time.process_time() - start
            if index:  # the first round also loads the compiler
                yield {"setup": setup, "seconds": seconds}


def records(answers: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """A record per setup and arm with all its samples, in the order of the rounds."""
    found: dict[tuple[Any, ...], list[float]] = {}
    for answer in answers:
        for arm, seconds in answer["seconds"].items():
            samples = found.setdefault((*answer["setup"], arm), [])
            samples.append(round(seconds, 3))
    return [
        {**dataclasses.asdict(Case(*case)), "seconds": seconds}
        for case, seconds in found.items()
    ]


def _setups(found: Results) -> Iterator[tuple[str, dict[str, float]]]:
    """The fastest round of each arm, in each setup."""
    made: dict[str, dict[str, float]] = {}
    for record in found.records:
        name = f"{record['model']}, {record['blocks']} blocks, batch {record['batch']}"
        made.setdefault(name, {})[record["arm"]] = min(record["seconds"])
    yield from made.items()


def tables(found: Results) -> list[Table]:
    """A row per setup and arm."""
    rows = [
        [name, arm, f"{fastest:.2f}", ratio(fastest / seconds[KEPT])]
        for name, seconds in _setups(found)
        for arm, fastest in seconds.items()
    ]
    if not rows:
        return []
    return [
        Table(
            title=f"CPU seconds to compile a step for an H100, {found.device}",
            columns="step | arm | CPU s | arm / kept",
            rows=rows,
            notes=["The fastest of alternating rounds; lower ratios are better."],
        )
    ]


def goals(found: Results) -> list[Goal]:
    """Recomputing takes the compiler little longer."""
    return [
        Goal(
            f"compile time of {DEFAULT} at most {LIMIT} times {KEPT}'s: "
            f"{seconds[DEFAULT] / seconds[KEPT]:.2f}: {name}",
            seconds[DEFAULT] <= LIMIT * seconds[KEPT],
        )
        for name, seconds in _setups(found)
    ]
