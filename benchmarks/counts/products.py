"""At which sizes of a product fewer bits pay, on which device: the roof of one layer.

A linear layer, forward and both gradients, in a naive cast to bfloat16 and under each
recipe. Its input and the gradient of its output come in bfloat16 from memory, its
weight in float32: nothing is quantized in a kernel that was there anyway, as most of it
is inside of a model. No launch of a kernel is in the roof, so at small sizes a device
is slower than this, and more so with more kernels.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from ..counter import TARGETS, counter
from ..models.layers import NAIVE, build as build_layers
from ..results import Results
from ..steps import ArrayStep
from ..tables import Goal, Table, ratio

ARMS = {
    "h100": ("delayed", "current"),
    "b200": ("delayed", "current", "mxfp8", "nvfp4"),
}
SETUP = ("target", "tokens", "inputs", "outputs")
# Tokens, inputs and outputs.
SIZES = (
    *((8192, n, n) for n in (512, 1024, 2048, 4096, 8192)),
    # Few tokens; wide and narrow; the hidden layer of ViT-Base.
    (256, 4096, 4096),
    (1024, 4096, 4096),
    (8192, 4096, 16384),
    (12608, 768, 3072),
)


@dataclasses.dataclass(frozen=True)
class Case:
    """A layer to compile.

    Attributes:
        target: A name of `targets.TARGETS`.
        tokens: Rows of its input.
        inputs: Numbers of a row.
        outputs: Of a row of its result.
        product: `NAIVE`, or a recipe.
    """

    target: str
    tokens: int
    inputs: int
    outputs: int
    product: str


CASES = [
    Case(target, *size, arm)
    for target, arms in ARMS.items()
    for size in SIZES
    for arm in (NAIVE, *arms)
]


def build(fields: dict[str, Any], devices: list[Any] | None = None) -> ArrayStep:
    """Forward and backward of a case, with shapes for arguments."""
    case = Case(**fields)
    features = case.inputs, case.outputs
    return build_layers(case.product, case.tokens, features, devices)


def count(compiled: Any, fields: dict[str, Any]) -> dict[str, Any]:
    """The roof, and how many kernels there are."""
    found = counter.kernels_of(compiled.as_text())
    roof = TARGETS[fields["target"]].roof
    return {
        "roof": counter.roof_seconds(found, roof),
        "traffic": counter.traffic(found),
        "kernels": sum(kernel.times for kernel in found),
    }


# --- What is shown --------------------------------------------------------------------


def tables(found: Results) -> Iterator[Table]:
    """One row for each size; a column for each recipe on each device."""
    every = found.counts_by(*SETUP, arm="product")
    columns = [(target, arm) for target, arms in ARMS.items() for arm in arms]
    rows = [
        [f"{size[0]} x {size[1]} to {size[2]}"]
        + [_faster(every[target, *size], arm) for target, arm in columns]
        for size in SIZES
        if every
    ]
    heads = [f"{target.upper()}, {arm}" for target, arm in columns]
    if rows:
        yield Table(
            "At which sizes fewer bits pay: one linear layer",
            ["tokens x inputs to outputs", *heads],
            rows,
            [_NOTE],
        )


def _faster(counts: dict[str, dict[str, Any]], arm: str) -> str:
    value = counts[NAIVE]["roof"] / counts[arm]["roof"]
    return ratio(value) if value > 1 else f"**{ratio(value)}**"


_NOTE = (
    "The roof time of a naive cast to bfloat16 over the recipe's, forward and both "
    "gradients; **bold** where fewer bits do not pay. Compiled, not measured: no "
    "launch of a kernel is in it, and each of them costs microseconds."
)


def goals(found: Results) -> Iterator[Goal]:
    """Where products are wide every recipe pays, in its roof."""
    every = found.counts_by(*SETUP, arm="product")
    for target, arms in ARMS.items():
        counts = every.get((target, 8192, 8192, 8192), {})
        for arm in arms if NAIVE in counts else ():
            value = counts[NAIVE]["roof"] / counts[arm]["roof"]
            text = f"{arm} pays at 8192: {value:.2f}, {TARGETS[target].title}"
            yield Goal(text, value > 1)
