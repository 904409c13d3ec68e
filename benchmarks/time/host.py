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
from collections.abc import Iterator
from typing import Any


def measure(arms: dict[str, Any], request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields one answer per round with the seconds of every case.

    Args:
        arms: the arms of this environment.
        request: `cases`, and how many `rounds`.
    """
    import jax

    from benchmarks import steps

    cases = [steps.Case(**fields) for fields in request["cases"]]
    built = [steps.build(arms[case.arm], case) for case in cases]
    for index in range(request["rounds"] + 1):
        samples = []
        for case, step in zip(cases, built, strict=True):
            jax.clear_caches()
            gc.collect()
            gc.disable()  # as `timeit` does
            start = time.process_time()
            traced = step.jitted().trace(step.state, step.batch)
            middle = time.process_time()
            lowered = traced.lower()
            end = time.process_time()
            gc.enable()
            del traced, lowered
            samples.append(
                {"arm": case.arm, "trace": middle - start, "lower": end - middle}
            )
        if index:  # the first round also imports what JAX imports lazily
            yield {"round": samples}
