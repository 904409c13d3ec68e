"""Bytes of a 70B model on 8 to 16,384 devices: where they lie, and on the wire.

Arithmetic, no measurement: `python -m benchmarks.at_scale` writes the table of
docs/guides/devices.md. Every assumption is a constant here or a sentence there.

* Weights, moments and gradients are divided over `fsdp` x `tensor` devices.
* A block's weights are gathered over `fsdp` twice in a step, for the forward and the
  backward pass, and its gradients are reduced and divided once.
* Over `data`, what is left of the gradients is summed: a ring sends it twice.
* Over `tensor`, each block sums its activations twice in each pass (Megatron), of which
  there are three: forward, again for remat, backward. A ring again.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from .documentation import PLACE
from .peers.environment import REPOSITORY
from .tables import Table

PAGE = REPOSITORY / "docs" / "guides" / "devices.md"
FULL = 4  # bytes of a float32


@dataclasses.dataclass(frozen=True)
class Model:
    """The sizes of Llama 3 70B (arXiv:2407.21783, table 3)."""

    blocks: int = 80
    width: int = 8192
    hidden: int = 28_672
    heads: int = 64
    groups: int = 8
    words: int = 128_256

    @property
    def block(self) -> int:
        """Weights of the matrices of one block."""
        keys_and_values = 2 * self.width * self.width * self.groups // self.heads
        return 2 * self.width**2 + keys_and_values + 3 * self.width * self.hidden

    @property
    def ends(self) -> int:
        """Weights of the embedding and of the last layer, which no recipe quantizes."""
        return 2 * self.words * self.width

    @property
    def weights(self) -> int:
        return self.blocks * self.block + self.ends


@dataclasses.dataclass(frozen=True)
class Precision:
    """How many bytes a number has, and where.

    Attributes:
        name: for people.
        gather: weights of the blocks that travel.
        ends: weights of the embedding and the last layer that travel.
        reduce: gradients that are summed over devices.
        activation: activations, kept and summed.
    """

    name: str
    gather: int
    ends: int
    reduce: int
    activation: int


@dataclasses.dataclass(frozen=True)
class Mesh:
    """So many devices, each group of `tensor` with one sequence of a batch."""

    data: int
    fsdp: int
    tensor: int

    @property
    def devices(self) -> int:
        return math.prod(dataclasses.astuple(self))

    def __str__(self) -> str:
        sizes = dataclasses.asdict(self).items()
        return " ".join(f"{name}={size}" for name, size in sizes if size > 1)


PRECISIONS = (
    Precision("float32", gather=4, ends=4, reduce=4, activation=4),
    Precision("bfloat16", gather=2, ends=2, reduce=4, activation=2),
    Precision("bfloat16, reduced so", gather=2, ends=2, reduce=2, activation=2),
    Precision("FP8", gather=1, ends=2, reduce=4, activation=2),
)
MESHES = (
    Mesh(1, 8, 1),
    Mesh(1, 64, 1),
    Mesh(1, 512, 1),
    Mesh(1, 512, 8),
    Mesh(4, 512, 8),
)
TOKENS = 8192  # of a sequence


@dataclasses.dataclass(frozen=True)
class Bytes:
    """Of one device: what lies on it, and what it receives in a step."""

    state: float
    gathered: float
    kept: float
    gathers: float
    reductions: float
    activations: float

    @property
    def memory(self) -> float:
        return self.state + self.gathered + self.kept

    @property
    def wire(self) -> float:
        return self.gathers + self.reductions + self.activations


def bytes_of(
    mesh: Mesh, precision: Precision, model: Model = Model(), tokens: int = TOKENS
) -> Bytes:
    """The bytes of one device.

    >>> found = bytes_of(Mesh(1, 8, 1), PRECISIONS[0])
    >>> round(found.state / 1e9)  # 16 bytes for each of 70.6e9 weights, over 8 devices
    141
    """
    others = {
        axis: (size - 1) / size for axis, size in dataclasses.asdict(mesh).items()
    }
    here = model.weights / (mesh.fsdp * mesh.tensor)
    travelling = (
        model.blocks * model.block * precision.gather + model.ends * precision.ends
    ) / mesh.tensor
    stream = tokens * model.width * precision.activation
    logits = tokens * model.words * FULL / mesh.tensor
    sums = model.blocks * 2 * 3
    return Bytes(
        # Masters, two moments and gradients, all float32.
        state=4 * FULL * here,
        # The block that computes and the one that comes next.
        gathered=2 * model.block * precision.gather / mesh.tensor,
        # Remat keeps what goes into each block; sequence parallelism divides it.
        kept=model.blocks * stream / mesh.tensor + logits,
        gathers=2 * travelling * others["fsdp"],
        reductions=precision.reduce
        * (model.weights / mesh.tensor * others["fsdp"] + 2 * here * others["data"]),
        activations=sums * 2 * stream * others["tensor"],
    )


def tables() -> Sequence[Table]:
    """A row for each mesh and precision."""
    rows = []
    for mesh in MESHES:
        for index, precision in enumerate(PRECISIONS):
            found = bytes_of(mesh, precision)
            first = f"{mesh.devices:,}: {mesh}" if index == 0 else ""
            parts = (found.state, found.memory, found.gathers, found.reductions)
            numbers = [f"{part / 1e9:,.1f}" for part in (*parts, found.activations)]
            rows.append([first, precision.name, *numbers, f"{found.wire / 1e9:,.1f}"])
    heads = ["devices", "policy", "state", "memory", "gathers", "reductions"]
    title = "A 70B model: GB on each device, and GB that it receives in a step"
    return [Table(title, [*heads, "activations", "wire"], rows)]


def render(text: str) -> str:
    """The page with the table as it is computed."""
    table = "\n\n".join(table.markdown() for table in tables())

    return PLACE.sub(
        lambda place: (
            f"{place[1]}\n{table}\n\n{place[3]}" if place[2] == "at-scale" else place[0]
        ),
        text,
    )


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text()))
    print(PAGE)
