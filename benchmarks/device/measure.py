"""The worker's side of `device`: one case after the other, as far as the time goes.

A case's arm alternates with its base in this process, sample by sample. Each sample is
a chain of steps, each on the results of the one before, with one wait at its end, so
that the host's dispatch hides behind the device. Compilation and a warm-up are not
timed; weights and data are random numbers, since zeros would draw less power and run
faster. The base itself alternates with a second copy of itself, which shows what is
left to chance.

Imported in the peers' environment, too.
"""

from __future__ import annotations

import dataclasses
import gc
import importlib.util
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from ..counter import counter
from ..steps import ArrayStep, known_arms
from .about import about
from .plan import ABOUT, Case, Sizes

# Calls of FP8 and block-scaled units in an optimized program.
UNIT_CALLS = ("__cublas$lt$matmul$f8", "__cudnn$blockScaledDot")
# Compute capabilities with units for FP8 with a scale per tensor, and for blocks.
CAPABILITIES = {"delayed": 8.9, "current": 8.9, "mxfp8": 10.0, "nvfp4": 10.0}
CAPABILITIES |= {"Flax fp8": 8.9, "Qwix fp8": 8.9, "FP8 by hand": 8.9}
CAPABILITIES |= {"jax.nn MXFP8": 10.0, "jax.nn NVFP4": 10.0}
CAPABILITIES |= {"mxfp8 by Pallas": 10.0, "nvfp4 by Pallas": 10.0}
# Packages that an arm needs, which may lack.
PACKAGES = {"Flax fp8": ("flax",), "Qwix fp8": ("flax", "qwix")}


class SkippedError(Exception):
    """A case that cannot be measured here, and why."""


def measure(request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields the device, then two answers for every case: that it starts, and a record.

    Args:
        request: `platform` (`"gpu"`; `"cpu"` in tests), `sizes` and `cases` as fields,
            and `seconds`, after which no case is begun.
    """
    until = time.monotonic() + request["seconds"]
    device = find_device(request["platform"])
    yield {"device": None if device is None else device.device_kind}
    if device is None:
        return
    sizes = Sizes(**request["sizes"])
    worker = Worker(known_arms(), device, sizes, emulate=request["platform"] == "cpu")
    with jax.default_device(device):
        for index, fields in enumerate(request["cases"]):
            if time.monotonic() > until:
                return
            yield {"started": index}
            yield {"case": index, "record": worker.record(Case.of(fields))}


def find_device(platform: str) -> Any:
    """The first device of a platform, or None."""
    try:
        return jax.devices(platform)[0]
    except RuntimeError:
        return None


class Worker:
    """Measures cases, and keeps the base of the last one."""

    def __init__(self, arms: dict[str, Any], device: Any, sizes: Sizes, emulate: bool):
        """Everything is built for `device`.

        Args:
            arms: The arms of this environment.
            device: That it runs on.
            sizes: Of samples.
            emulate: Run also what the device has no units for.
        """
        self.arms, self.device, self.sizes = arms, device, sizes
        self.emulate = emulate
        self._base: tuple[Any, Running] | None = None

    def record(self, case: Case) -> dict[str, Any]:
        """What was measured; or `error`, or `skipped`, with the reason."""
        start = time.perf_counter()
        try:
            if case == ABOUT:
                return about(self.device, self.sizes.matrix)
            self._check(case)
            return {**self._pair(case), "took": round(time.perf_counter() - start, 1)}
        except SkippedError as reason:
            return {"skipped": str(reason)}
        except Exception as error:  # whatever it is, the other cases go on
            return {"error": in_words(error)}
        finally:
            gc.collect()

    def _check(self, case: Case) -> None:
        needed = CAPABILITIES.get(case.arm, 0.0)
        capability = str(getattr(self.device, "compute_capability", "0"))
        if not self.emulate and needed > float(capability):
            raise SkippedError(
                f"the device has no units for it: compute capability {capability}, "
                f"needed {needed}"
            )
        for package in PACKAGES.get(case.arm, ()):
            if importlib.util.find_spec(package) is None:
                raise SkippedError(f"{package} is not installed")

    def _build(self, case: Case, arm: str) -> ArrayStep:
        if case.model == "layers":
            from ..models import layers

            return layers.build(arm, case.batch, case.features, seed=0)
        if case.part == "workloads":
            from ..models import whole_steps

            one = whole_steps.Case("", case.model, "float32", arm)
            return whole_steps.build(one, seed=0)
        from ..models import plain as residual_models

        one = residual_models.Case(*("", case.model, case.blocks, case.batch, arm))
        return residual_models.build(self.arms[arm], one, seed=0)

    def _pair(self, case: Case) -> dict[str, Any]:
        """Samples of the arm and of its base, and what the executable needs."""
        base = self._started_base(case)
        is_base = case.arm == case.base
        arm = base.again() if is_base else Running(self._build(case, case.arm))
        found: dict[str, list[float]] = {"base_seconds": [], "seconds": []}
        base.warm_up()
        arm.warm_up()
        chain = self.sizes.chain
        estimate = chain * (base.advance(chain) + arm.advance(chain))
        fewest, most = self.sizes.rounds
        rounds = min(max(int(self.sizes.seconds / estimate), fewest), most)
        for _ in range(rounds):
            found["base_seconds"].append(base.advance(chain))
            found["seconds"].append(arm.advance(chain))
        rounded = {k: [float(f"{x:.4g}") for x in v] for k, v in found.items()}
        text = arm.compiled.as_text()
        return {
            **rounded,
            "base_memory": counter.memory(base.compiled),
            "memory": counter.memory(arm.compiled),
            "unit_calls": sum(text.count(f'"{call}"') for call in UNIT_CALLS),
            "base_size": base.size,
            "size": arm.size,
        }

    def _started_base(self, case: Case) -> Running:
        key = (case.setup, case.base)
        if self._base is None or self._base[0] != key:
            self._base = None  # frees its memory before the next one's is taken
            gc.collect()
            self._base = (key, Running(self._build(case, case.base)))
        return self._base[1]


class Running:
    """A compiled step, its state and its batch."""

    def __init__(self, step: ArrayStep, compiled: Any = None):
        """Compiles a step of arrays, or takes what was compiled of it."""
        self.step, self.state = step, step.state
        self.size: float | None = None
        lower = step.jitted().lower
        self.compiled = compiled or lower(step.state, step.batch).compile()

    def again(self) -> Running:
        """The same program with a state of its own."""
        state = jax.tree.map(jnp.copy, self.state)
        return Running(dataclasses.replace(self.step, state=state), self.compiled)

    def warm_up(self) -> None:
        """Makes two steps, and keeps the size of the first result to compare it."""
        self.state, result = self.compiled(self.state, self.step.batch)
        if self.size is None:
            size = sum(
                jnp.sum(jnp.abs(leaf.astype(jnp.float32)))
                for leaf in jax.tree.leaves(result)
            )
            self.size = float(f"{size:.6g}")
        self.advance(1)

    def advance(self, count: int) -> float:
        """Makes `count` steps; returns the seconds of one."""
        result = None
        jax.block_until_ready(self.state)
        start = time.perf_counter()
        for _ in range(count):
            self.state, result = self.compiled(self.state, self.step.batch)
        jax.block_until_ready((self.state, result))
        return (time.perf_counter() - start) / count


def in_words(error: Exception) -> str:
    """The kind of an error and the beginning of what it says."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:400]
