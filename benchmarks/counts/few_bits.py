"""What a step keeps and moves whose state is in few bits, compiled for an H100.

Whole steps of large models, and the optimizer's part alone: Adam for one matrix of
4096 x 16384 in bfloat16, with gradients in bfloat16, skipped if they are not finite.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

from ..models import whole_steps as models
from ..models.whole_steps import FEW, NAIVE, Case, Kept
from ..results import Results
from ..steps import LEARNING_RATE, ArrayStep, built
from ..tables import Goal, Table, ratio
from .cost import compile as compile, count as count

DELAYED, PART = "delayed", "optimizer"
_SHAPE = (4096, 16384)
_ROWS: tuple[tuple[str, Kept, str], ...] = (
    *(
        (whole, *case)
        for whole in ("Llama, scan", "ffn")
        for case in (
            ("float32", NAIVE),
            *((kept, DELAYED) for kept in ("masters", *FEW)),
        )
    ),
    *((PART, kept, "adam") for kept in ("masters", *FEW)),
)
CASES = [Case("h100", whole, kept, arm) for whole, kept, arm in _ROWS]


def build(fields: dict[str, Any], devices: list[Any] | None = None) -> ArrayStep:
    """The step of a case."""
    case = Case(**fields)
    return _part(case, devices) if case.whole == PART else models.build(case, devices)


def _part(case: Case, devices: list[Any] | None) -> ArrayStep:
    """The optimizer's part of a step."""
    import mpx

    adam = optax.adam(LEARNING_RATE)
    optimizer = mpx.master_weights(
        mpx.compress_state(adam) if case.weights in FEW else adam,
        bits=FEW.get(case.weights, 32),
    )

    def initial(key: Array) -> tuple[tuple, Any]:
        weight = jax.random.normal(key, _SHAPE, jnp.bfloat16)
        return (weight, optimizer.init(weight)), (weight, jnp.asarray(True))

    def step(weight: Array, state: Any, batch: Any) -> tuple:
        return (*mpx.optimizer_update(weight, optimizer, state, *batch), batch[1])

    return built(initial, step, devices)


def _found(found: Results) -> dict[tuple[str, str], dict[str, Any]]:
    return {(r["whole"], r["weights"]): r["counts"] for r in found.records}


_KEPT = {
    "float32": "naive bfloat16: weights, moments in float32",
    "masters": "bfloat16, masters and moments in float32",
    "16 bits": "bfloat16 + 16 bits, moments in 8 bits",
    "8 bits": "bfloat16 + 8 bits, moments in 8 bits",
    "0 bits": "bfloat16, moments in 8 bits",
}


def tables(found: Results) -> Iterator[Table]:
    """A table of whole steps, and one of the optimizer's part."""
    counts = _found(found)
    rows = [
        [whole, _KEPT[kept], *_cells(one, counts[whole, "float32"])]
        for (whole, kept), one in counts.items()
        if whole != PART
    ]
    yield Table(
        "Whole steps with a state in few bits, against naive bfloat16",
        "step | kept | memory, GB | to naive | traffic, GB | to naive",
        rows,
        [
            "Lower is better. Steps as in the table of whole steps; all but the naive "
            "ones under `mpx.DelayedScaling`, with gradients that are checked."
        ],
    )
    size = _SHAPE[0] * _SHAPE[1]
    base = counts[PART, "masters"]
    yield Table(
        "The optimizer's part: Adam, gradients in bfloat16",
        "kept | bytes read and written for each weight | to masters | kernels",
        [
            [
                _KEPT[kept],
                f"{one['traffic'] / size:.1f}",
                ratio(one["traffic"] / base["traffic"]),
                str(one["kernels"]),
            ]
            for (whole, kept), one in counts.items()
            if whole == PART
        ],
        ["Lower is better. Of the kernels two are large; the others are scalars."],
    )


def _cells(one: dict[str, Any], naive: dict[str, Any]) -> list[str]:
    return [
        cell
        for what in ("memory", "traffic")
        for cell in (f"{one[what] / 1e9:.2f}", ratio(one[what] / naive[what]))
    ]


def goals(found: Results) -> Iterator[Goal]:
    """Memory of the Llama, and traffic of the optimizer's part."""
    counts = _found(found)
    llama = lambda kept: counts["Llama, scan", kept]["memory"]  # noqa: E731
    memory = llama("16 bits") / llama("float32")
    text = "memory of the Llama with 16 bits to naive at most 0.63"
    yield Goal(f"{text}: {memory:.3f}", memory <= 0.63)
    for kept in FEW:
        part = counts[PART, kept]["traffic"] / counts[PART, "masters"]["traffic"]
        text = f"traffic of the optimizer's part with {kept} to masters at most 0.60"
        yield Goal(f"{text}: {part:.3f}", part <= 0.60)
