"""The parts of a run on a device, and the cases of each, in order of worth."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from ..processes import Side

PARTS = ("steps", "workloads", "products")

# Seconds that a part may take, so that the later ones have their turn.
SECONDS = {"steps": 420, "workloads": 420, "products": 180}

# In order of worth. A base comes first: its row shows what is left to chance.
LAYER_ARMS = (
    "naive bfloat16",
    "delayed",
    "current",
    "autocast bfloat16",
    "float32",
    "mxfp8",
    "nvfp4",
    "autocast float16",
)
FIRST_ARMS = (
    "float32",
    "autocast bfloat16",
    "autocast bfloat16, half stream",
    "naive bfloat16",
)
LATER_ARMS = ("mpx float16", "mpx bfloat16", "current", "delayed")
LAST_ARMS = ("autocast float16", "mxfp8", "nvfp4")
PEER_ARMS = ("MPX float16", "JMP float16", "MPX bfloat16")
# The whole steps, in few bits and in half precision; the first arm is the base.
WIDE_ARMS = (
    "naive bfloat16",
    "delayed",
    "current",
    "Flax fp8",
    "FP8 by hand",
    "bfloat16",
    "mxfp8",
    "mxfp8 by Pallas",
    "nvfp4",
    "nvfp4 by Pallas",
    "Qwix fp8",
    "jax.nn MXFP8",
    "jax.nn NVFP4",
)
VARIOUS_ARMS = ("naive bfloat16", "bfloat16", "autocast bfloat16")
PRODUCT_ARMS = ("current", "delayed", "mxfp8", "nvfp4")


@dataclasses.dataclass(frozen=True)
class Case:
    """Something to measure.

    Attributes:
        part: One of `PARTS`, or "about" for what the device itself can do.
        model: A name of `plain.VITS` or `GPTS`; of `whole_steps.WHOLE` in workloads;
            "layers" for a stack of linear layers.
        batch: Images, texts, or rows of the input of a stack.
        arm: A name of `our_arms.ARMS` or `peers.arms.ARMS`; for layers, of
            `models.layers.ARMS`; in workloads, one that `whole_steps.Case` has.
        base: The arm that it alternates with, and is compared with.
        blocks: Of a transformer.
        features: Of a stack: of its input, and of what each layer gives.
        side: Whose code it is.
    """

    part: str
    model: str = ""
    batch: int = 0
    arm: str = ""
    base: str = ""
    blocks: int = 0
    features: tuple[int, ...] = ()
    side: Side = "ours"

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Case:
        """The case of a record, which may say more."""
        names = [field.name for field in dataclasses.fields(cls)]
        fields = {name: record[name] for name in names if name in record}
        return cls(**{**fields, "features": tuple(fields.get("features", ()))})

    @property
    def setup(self) -> tuple[Any, ...]:
        """What is equal in all rows of a table."""
        return self.part, self.model, self.batch, self.blocks, self.features


ABOUT = Case("about")


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How large everything is: of a device, or of a test on a CPU.

    Attributes:
        vits: Model, blocks and batch of the Vision Transformers.
        gpt: The same of the GPT.
        wide: Names of `whole_steps.WHOLE` whose layers are wide.
        various: Names of models of other kinds.
        tokens: Rows of the input of the block.
        block: Features of its two layers.
        products: Rows, inputs and outputs of single products.
        recipes: Of single products.
        seconds: For the samples of a pair of arms.
        chain: Steps between two looks at the clock.
        rounds: Samples of an arm, at least and at most.
        matrix: Side of the matrices that show what the device can do.
    """

    vits: Sequence[tuple[str, int, int]]
    gpt: tuple[str, int, int]
    wide: Sequence[str]
    various: Sequence[str]
    tokens: int
    block: tuple[int, int, int]
    products: Sequence[tuple[int, int, int]]
    recipes: Sequence[str]
    seconds: float
    chain: int
    rounds: tuple[int, int]
    matrix: int


FULL = Sizes(
    vits=(("paper desktop", 12, 256), ("paper base", 12, 64)),
    gpt=("gpt", 4, 16),
    wide=("ffn", "Llama, scan", "GPT"),
    various=("LSTM", "state space", "experts", "ResNet"),
    tokens=16384,
    block=(4096, 16384, 4096),
    products=(
        *((n, n, n) for n in (4096, 1024, 2048, 8192, 512)),
        # Few tokens; then the layers of ViT-Base and of the desktop ViT.
        (1024, 4096, 4096),
        (16384, 4096, 4096),
        (12608, 768, 3072),
        (16640, 256, 800),
    ),
    recipes=PRODUCT_ARMS,
    seconds=6.0,
    chain=10,
    rounds=(5, 15),
    matrix=8192,
)
TINY = Sizes(
    vits=(("paper tiny", 1, 4),),
    gpt=("tiny gpt", 1, 4),
    wide=("tiny ffn",),
    various=("tiny scan",),
    tokens=32,
    block=(16, 32, 16),
    products=((32, 32, 32),),
    recipes=("current", "delayed"),
    seconds=0.01,
    chain=2,
    rounds=(2, 3),
    matrix=64,
)


def cases(part: str, sizes: Sizes) -> list[Case]:
    """What a part measures."""
    makers = {"steps": _steps, "workloads": _workloads, "products": _products}
    return makers[part](sizes)


def _steps(sizes: Sizes) -> list[Case]:
    made = [
        Case("steps", "layers", sizes.tokens, arm, LAYER_ARMS[0], 0, sizes.block)
        for arm in LAYER_ARMS
    ]
    every = (*sizes.vits, sizes.gpt)
    for models, arms, side in (
        (sizes.vits, FIRST_ARMS, "ours"),
        (sizes.vits, PEER_ARMS, "peers"),
        (sizes.vits, LATER_ARMS, "ours"),
        ([sizes.gpt], (*FIRST_ARMS, *LATER_ARMS), "ours"),
        ([sizes.gpt], PEER_ARMS, "peers"),
        (every, LAST_ARMS, "ours"),
    ):
        made += [
            Case("steps", model, batch, arm, FIRST_ARMS[0], blocks, side=side)
            for model, blocks, batch in models
            for arm in arms
        ]
    return made


def _workloads(sizes: Sizes) -> list[Case]:
    """Eight bits where products are wide; half precision in models of other kinds."""
    return [
        Case("workloads", model, arm=arm, base=arms[0])
        for models, arms in ((sizes.wide, WIDE_ARMS), (sizes.various, VARIOUS_ARMS))
        for model in models
        for arm in arms
    ]


def _products(sizes: Sizes) -> list[Case]:
    return [
        Case("products", "layers", tokens, arm, LAYER_ARMS[0], 0, (inputs, outputs))
        for tokens, inputs, outputs in sizes.products
        for arm in sizes.recipes
    ]
