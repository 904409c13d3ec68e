"""How much longer a step in few bits is traced and compiled.

Question: how much longer do JAX and XLA take for a step of wide layers under a recipe,
or of a Llama in micro-batches, than for the same step in a naive cast to bfloat16? CPU
time of the process is measured, of all threads, arms alternate, and the fastest rounds
are compared, see `time.host`.
"""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Iterator
from typing import Any

from ..counter import TARGETS, counter
from ..models.whole_steps import NAIVE, Case
from ..results import Results
from ..tables import Goal, Table, ratio

# To trace and to compile; of naive's at most, and of delayed scaling less.
_NAMES = {"trace": "tracing", "seconds": "compiling"}
WHAT, LIMIT, FFN = tuple(_NAMES), 7.0, "ffn"
LIMITS = {("delayed", "trace"): 4.0, ("delayed", "seconds"): 3.0}
ARMS = {
    ("h100", FFN): (NAIVE, "bfloat16", "delayed", "current"),
    ("h100", "Llama of 2, micro-batches"): (NAIVE, "bfloat16", "delayed"),
    ("b200", FFN): (NAIVE, "mxfp8", "mxfp8 by Pallas", "nvfp4", "nvfp4 by Pallas"),
}
ROUNDS = 3
FOR_CUDA = True


def measure(request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields a record for every target and arm, with the CPU seconds of all rounds."""
    import jax

    import mpx

    from ..models import whole_steps

    for (target, whole), arms in ARMS.items():
        devices = counter.compile_only_devices(TARGETS[target])
        seconds = {(arm, what): [] for arm in arms for what in WHAT}
        for index, arm in itertools.product(range(ROUNDS + 1), arms):
            with mpx.autocast(target=target, ambient=True):
                case = Case(target, whole, "float32", arm)
                made = whole_steps.build(case, devices)
                step = made.jitted()
                gc.collect()
                jax.clear_caches()
                start = time.process_time()
                traced = step.trace(made.state, made.batch)
                seconds[arm, "trace"].append(time.process_time() - start)
            lowered, start = traced.lower(), time.process_time()
            # An option, or JAX would give what it has compiled already.
            lowered.compile({"xla_dump_max_hlo_modules": index})
            seconds[arm, "seconds"].append(time.process_time() - start)
        for arm in arms:
            # The first round also loads the compiler.
            found = {
                what: [round(x, 3) for x in seconds[arm, what][1:]] for what in WHAT
            }
            yield {"run": {"target": target, "whole": whole, "arm": arm, **found}}


def _shares(found: Results) -> Iterator[tuple[str, str, dict[str, list[float]]]]:
    """Where, arm, and of what was measured its fastest round, and that to naive's."""
    naive: dict[str, float] = {}
    for run in found.records:  # naive is the first of its step
        fastest = {what: min(run[what]) for what in WHAT if what in run}
        naive = fastest if run["arm"] == NAIVE else naive
        where = f"{run['target'].upper()}, {run.get('whole', FFN)}"
        shares = {what: [one, one / naive[what]] for what, one in fastest.items()}
        yield where, run["arm"], shares


def tables(found: Results) -> Iterator[Table]:
    """A row per step and arm."""
    rows = []
    for where, arm, shares in _shares(found):
        cells = [list(map(ratio, shares.get(what, ()))) or ["", ""] for what in WHAT]
        rows.append([where, arm, *itertools.chain(*cells)])
    if rows:
        yield Table(
            f"CPU seconds to trace and to compile a step, {found.device}",
            "step | arm | trace, CPU s | arm / naive | compile, CPU s | arm / naive",
            rows,
            ["The fastest of alternating rounds; lower is better."],
        )


def goals(found: Results) -> Iterator[Goal]:
    """No recipe takes JAX and the compiler much longer."""
    for where, arm, shares in _shares(found):
        for what, (_, share) in shares.items() if arm != NAIVE else ():
            most = LIMITS.get((arm, what), LIMIT)
            text = f"{_NAMES[what]} {arm} takes at most {most} times naive's"
            yield Goal(f"{text}: {share:.2f}, {where}", share <= most)
