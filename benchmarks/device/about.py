"""What the device itself can do, to hold the other numbers against."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# Products of random numbers: float32 is near 1e-7, TF32 near 3e-4, bfloat16 near 3e-3.
TF32_ERRORS = (1e-5, 1.5e-3)
SAMPLES = 10


def about(device: Any, side: int) -> dict[str, Any]:
    """Its memory, how fast it copies and multiplies, and how it multiplies float32.

    Args:
        device: A JAX device, the default one.
        side: Of the matrices; a copy has four times as many bytes as one in float32.
    """
    keys = jax.random.split(jax.random.key(0))
    a, b = (jax.random.normal(key, (side, side)) for key in keys)
    long = jnp.concatenate([a, b, a, b])
    copy_seconds = _seconds(jax.jit(jnp.negative), long)
    small = min(side, 1024)
    flops = {"float32": 0.0, "bfloat16": 0.0}
    for dtype in flops:
        seconds = _seconds(jax.jit(jnp.matmul), a.astype(dtype), b.astype(dtype))
        flops[dtype] = float(f"{2 * side**3 / seconds:.4g}")
    return {
        "memory_limit": (device.memory_stats() or {}).get("bytes_limit"),
        "capability": str(getattr(device, "compute_capability", "")),
        "copy_bytes_per_second": float(f"{2 * long.nbytes / copy_seconds:.4g}"),
        "flops_per_second": flops,
        "float32_error": _error(a[:small, :small], b[:small, :small]),
    }


def float32_products(error: float) -> str:
    """What products of float32 are computed in, by their error.

    >>> float32_products(3e-7), float32_products(3e-4)
    ('float32', 'TF32')
    """
    if error < TF32_ERRORS[0]:
        return "float32"
    return "TF32" if error < TF32_ERRORS[1] else "less than TF32"


def _error(a: Any, b: Any) -> float:
    """Relative error of a product of float32, as JAX computes it by default."""
    exact = np.asarray(a, np.float64) @ np.asarray(b, np.float64)
    found = np.asarray(jax.jit(jnp.matmul)(a, b), np.float64)
    return float(f"{np.linalg.norm(found - exact) / np.linalg.norm(exact):.3g}")


def _seconds(func: Callable[..., Any], *operands: Any) -> float:
    """The median time of a call, after a warm-up."""
    jax.block_until_ready(func(*operands))
    found = []
    for _ in range(SAMPLES):
        start = time.perf_counter()
        jax.block_until_ready(func(*operands))
        found.append(time.perf_counter() - start)
    return statistics.median(found)
