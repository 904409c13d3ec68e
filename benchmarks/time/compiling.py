"""How much longer the compiler takes for a step in few bits.

Question: how much longer does XLA compile a step of wide layers under a recipe, against
the same step in a naive cast to bfloat16? CPU time of the process is measured, of all
threads, arms alternate, and the fastest rounds are compared, see `time.host`.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from typing import Any

from ..counter import TARGETS, counter
from ..models.whole_steps import NAIVE, Case
from ..results import Results
from ..tables import Goal, Table, ratio

ARMS = {
    "h100": (NAIVE, "bfloat16", "delayed", "current"),
    "b200": (NAIVE, "mxfp8", "mxfp8 by Pallas", "nvfp4", "nvfp4 by Pallas"),
}
ROUNDS = 3
LIMIT = 7.0
FOR_CUDA = True


def measure(request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields a record for every target and arm, with the CPU seconds of all rounds."""
    import mpx

    from ..models import whole_steps

    for target, arms in ARMS.items():
        devices = counter.compile_only_devices(TARGETS[target])
        lowered = {}
        for arm in arms:
            with mpx.autocast(target=target, ambient=True):
                step = whole_steps.build(Case(target, "ffn", "float32", arm), devices)
                lowered[arm] = step.jitted().lower(step.state, step.batch)
        seconds: dict[str, list[float]] = {arm: [] for arm in arms}
        for index in range(ROUNDS + 1):
            for arm, program in lowered.items():
                gc.collect()
                start = time.process_time()
                # An option, or JAX would give what it has compiled already.
                program.compile({"xla_dump_max_hlo_modules": index})
                if index:  # the first round also loads the compiler
                    seconds[arm].append(round(time.process_time() - start, 3))
        for arm, samples in seconds.items():
            yield {"run": {"target": target, "arm": arm, "seconds": samples}}


def _shares(found: Results) -> Iterator[tuple[str, str, float, float]]:
    """Target, arm, its fastest round, and that as a share of the naive step's."""
    fastest = {(r["target"], r["arm"]): min(r["seconds"]) for r in found.records}
    for (target, arm), seconds in fastest.items():
        yield target, arm, seconds, seconds / fastest[target, NAIVE]


def tables(found: Results) -> Iterator[Table]:
    """A row per target and arm."""
    rows = [
        [target.upper(), arm, f"{seconds:.2f}", ratio(share)]
        for target, arm, seconds, share in _shares(found)
    ]
    if rows:
        yield Table(
            f"CPU seconds to compile the step *ffn*, {found.device}",
            "compiled for | arm | CPU s | arm / naive",
            rows,
            ["The fastest of alternating rounds; lower is better."],
        )


def goals(found: Results) -> Iterator[Goal]:
    """No recipe takes the compiler much longer."""
    for target, arm, _, share in _shares(found):
        if arm != NAIVE:
            text = f"compile time of {arm} at most {LIMIT} times naive's: {share:.2f}"
            yield Goal(f"{text}, {TARGETS[target].title}", share <= LIMIT)
