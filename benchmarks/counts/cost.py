"""What a wide step costs once it is compiled: bytes, kernels, the compiler's time.

It imports nothing that the peers' environment does not have.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax

from ..counter import TARGETS, counter
from ..models.eight_bits import NAIVE, WORKLOADS
from . import program


def count(compiled: Any, fields: dict[str, Any]) -> dict[str, Any]:
    """Bytes, kernels and operations of a step."""
    counts, units = counts_and_units(compiled, fields["target"])
    on_units = sum(kernel.times * kernel.operations for kernel in units)
    linear = WORKLOADS[fields["workload"]].linear_operations
    return {**counts, "on_units": on_units / linear}


def counts_and_units(compiled: Any, target: str) -> tuple[dict[str, Any], list[Any]]:
    """Bytes and kernels of a step, and those kernels that multiply 8 bits or less."""
    kernels = counter.kernels_of(compiled.as_text())
    units = counter.of_few_bits(kernels)
    counts = program.count(compiled)
    found = {
        "memory": counts.memory,
        "temporaries": counts.temporaries,
        "traffic": counter.traffic(kernels),
        "roof": counter.roof_seconds(kernels, TARGETS[target].roof),
        "kernels": sum(kernel.times for kernel in kernels),
        "calls": sum(kernel.times for kernel in units),
    }
    return found, units


def compile_twice(lowered: Any, fields: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """What was compiled, and how many products are in 8 bits under default flags.

    There they may be Triton's. Without a GPU nothing is tuned, and Triton's untuned
    tiling refuses some shapes: None then.
    """
    compiled = lowered.compile()
    kernels = counter.kernels_of(compiled.as_text())
    if fields["target"] != "h100" or not counter.of_few_bits(kernels):
        return compiled, {"default_calls": None}
    try:
        default = lowered.compile({"xla_gpu_enable_triton_gemm": True})
    except jax.errors.JaxRuntimeError:
        return compiled, {"default_calls": None}
    units = counter.of_few_bits(counter.kernels_of(default.as_text()))
    return compiled, {"default_calls": sum(kernel.times for kernel in units)}


class Timed:
    """Compiles steps, and compares the compiler's time with the naive step's."""

    def __init__(self, lower: Callable[[dict[str, Any]], Any]):
        self._lower = lower
        self._naive: dict[tuple[str, str], float] = {}

    def compile(
        self, lowered: Any, fields: dict[str, Any]
    ) -> tuple[Any, dict[str, float]]:
        """What was compiled, and its share of the naive step's CPU time."""
        key = fields["target"], fields["workload"]
        if key not in self._naive:
            naive = self._lower({**fields, "arm": NAIVE})
            self._naive[key] = _compile(naive)[1]
        compiled, seconds = _compile(lowered)
        return compiled, {"compile": round(seconds / self._naive[key], 2)}


def _compile(lowered: Any) -> tuple[Any, float]:
    """What was compiled, and the CPU seconds of the faster of two times."""
    seconds, compiled = [], None
    for index in (1, 2):  # the very first time the compiler is also loaded
        start = time.process_time()
        # An option, or JAX would give what it has compiled already.
        compiled = lowered.compile({"xla_dump_max_hlo_modules": index})
        seconds.append(time.process_time() - start)
    return compiled, min(seconds)
