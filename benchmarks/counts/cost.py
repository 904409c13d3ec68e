"""What a step costs once it is compiled: bytes, kernels, calls of the units."""

from __future__ import annotations

from typing import Any

import jax

from ..counter import TARGETS, counter


def count(program: Any, fields: dict[str, Any]) -> dict[str, Any]:
    """Bytes and kernels of a step."""
    kernels = counter.kernels_of(program.text)
    return {
        "memory": program.memory,
        "temporaries": program.temporaries,
        "traffic": counter.traffic(kernels),
        "roof": counter.roof_seconds(kernels, TARGETS[fields["target"]].roof),
        "kernels": sum(kernel.times for kernel in kernels),
        "tiny": sum(kernel.times for kernel in kernels if kernel.bytes < 65_536),
        "calls": sum(kernel.times for kernel in counter.of_few_bits(kernels)),
    }


def compile(
    lowered: Any, fields: dict[str, Any], flags: dict[str, Any] | None = None
) -> tuple[Any, dict[str, Any]]:
    """The program, without its machine code, and nothing beside."""
    target = TARGETS[fields["target"]]
    devices = counter.compile_only_devices(target)
    return counter.program_of(lowered, target, devices, flags=flags), {}


def compile_twice(lowered: Any, fields: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """What was compiled, and how many products are in 8 bits under default flags.

    There they may be Triton's. Without a GPU nothing is tuned, and Triton's untuned
    tiling refuses some shapes: None then.
    """
    compiled, _ = compile(lowered, fields)
    kernels = counter.kernels_of(compiled.text)
    if fields["target"] != "h100" or not counter.of_few_bits(kernels):
        return compiled, {"default_calls": None}
    try:
        flags = {"xla_gpu_enable_triton_gemm": True}
        default, _ = compile(lowered, fields, flags)
    except jax.errors.JaxRuntimeError:
        return compiled, {"default_calls": None}
    units = counter.of_few_bits(counter.kernels_of(default.text))
    return compiled, {"default_calls": sum(kernel.times for kernel in units)}
