"""Step time where a GPU is: all arms of an environment alternate in one process.

Question: how much faster is the step in half precision, on the device at hand?

Each sample runs a chain of steps, each on the results of the one before, and waits once
at its end, so that the host's dispatch hides behind the device. Compilation and a
warm-up are not timed; arms alternate sample by sample; weights and images are random
numbers, since zeros would draw less power and run faster. The float32 arm of the same
process is the base of each ratio. On GPUs with TF32, JAX multiplies float32 in TF32 by
default.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any


def measure(arms: dict[str, Any], request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields the device, then one answer per round with seconds per step of every case.

    Args:
        arms: the arms of this environment.
        request: `cases`, `platform` (`"gpu"`; `"cpu"` in tests), `rounds`, `chain`.
    """
    import jax

    from benchmarks import steps

    device = find_device(request["platform"])
    yield {"device": None if device is None else device.device_kind}
    if device is None:
        return
    cases = [steps.Case(**fields) for fields in request["cases"]]
    with jax.default_device(device):
        running = {
            case.arm: start(steps.build_concrete(arms[case.arm], case, seed=0))
            for case in cases
        }
        yield from alternate(running, request["rounds"], request["chain"])


def find_device(platform: str) -> Any:
    """The first device of a platform, or None."""
    import jax

    try:
        return jax.devices(platform)[0]
    except RuntimeError:
        return None


def alternate(
    running: Mapping[str, Running], rounds: int, chain: int
) -> Iterator[dict[str, Any]]:
    """Yields one answer per round, with seconds per step of every arm."""
    for step in running.values():
        step.advance(chain)
    for _ in range(rounds):
        yield {
            "round": [
                {"arm": arm, "seconds": step.advance(chain)}
                for arm, step in running.items()
            ]
        }


class Running:
    """A compiled step and its state."""

    def __init__(self, compiled: Any, state: Any, batch: Any):
        self.compiled, self.state, self.batch = compiled, state, batch

    def advance(self, count: int) -> float:
        """Makes `count` steps; returns the seconds of one."""
        import jax

        loss = None
        jax.block_until_ready(self.state)
        start = time.perf_counter()
        for _ in range(count):
            self.state, loss = self.compiled(self.state, self.batch)
        jax.block_until_ready((self.state, loss))
        return (time.perf_counter() - start) / count


def start(step: Any) -> Running:
    """Compiles a `steps.ArrayStep` of arrays."""
    compiled = step.jitted().lower(step.state, step.batch).compile()
    return Running(compiled, step.state, step.batch)
