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
from .program import compile as compile, text_of
from .whole_steps_tpu import products

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
# A size at which the product of each leg is told by its result. Of the three, so many
# are to be of 8 bits, on these targets.
LEGS = (1024, 2048, 4096)
_FP8 = ("h100", "b200", "tpu7x")
IN_8_BITS = {
    "current": (3, _FP8),
    "row-wise": (3, _FP8),
    "int8": (3, ("h100", "b200", "v5e")),
    "forward half": (2, _FP8),
    "wgrad half": (2, _FP8),
    "mxfp8": (3, ("b200",)),
}
BY_LEG = ("h100", "b200", "v5e", "tpu7x")
CASES += [Case(target, *LEGS, arm) for target in BY_LEG for arm in IN_8_BITS]


def build(fields: dict[str, Any], devices: list[Any] | None = None) -> ArrayStep:
    """Forward and backward of a case, with shapes for arguments."""
    case = Case(**fields)
    features = case.inputs, case.outputs
    return build_layers(case.product, case.tokens, features, devices)


def count(compiled: Any, fields: dict[str, Any]) -> dict[str, Any]:
    """The roof, and how many kernels there are."""
    text = text_of(compiled)
    found, roof = counter.kernels_of(text), TARGETS[fields["target"]].roof
    sizes = fields["tokens"], fields["inputs"], fields["outputs"]
    return {
        **({"legs": _by_leg(text)} if sizes == LEGS else {}),
        "roof": counter.roof_seconds(found, roof),
        "traffic": counter.traffic(found),
        "kernels": sum(kernel.times for kernel in found),
    }


def _by_leg(text: str) -> dict[str, str]:
    """The dtypes of the operands of each leg's product."""
    tokens, inputs, outputs = LEGS
    legs = {"forward": {tokens, outputs}, "dgrad": {tokens, inputs}}
    legs["wgrad"] = {inputs, outputs}
    found = dict.fromkeys(legs, "")
    for left, right, y in products(counter.parse(text)):
        (leg,) = (name for name, sizes in legs.items() if {*y.shape} - {1} == sizes)
        found[leg] = " x ".join(dict.fromkeys((left.kind, right.kind)))
    return found


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
    of_legs = every.get(("h100", *LEGS)) and {x: every[x, *LEGS] for x in BY_LEG}
    if of_legs:
        yield Table(
            "Operands of a layer's products by leg: forward / dgrad / wgrad",
            ["recipe", *(TARGETS[one].title for one in BY_LEG)],
            [
                [arm, *(" / ".join(of_legs[x][arm]["legs"].values()) for x in BY_LEG)]
                for arm in IN_8_BITS
            ],
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
    for arm, (count, targets) in IN_8_BITS.items():
        for target in targets if ("h100", *LEGS) in every else ():
            legs = every[target, *LEGS][arm]["legs"].values()
            found_count = sum("16" not in one for one in legs)
            text = f"{arm}: {found_count} of {count} products in 8 bits"
            yield Goal(f"{text}, {TARGETS[target].title}", found_count == count)
