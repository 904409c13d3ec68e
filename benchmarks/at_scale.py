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
import re
from typing import NamedTuple

from .documentation import PLACE
from .peers.environment import REPOSITORY
from .tables import Table

PAGE = REPOSITORY / "docs" / "guides" / "devices.md"
FULL = 4  # bytes of a float32
TOKENS = 8192  # of a sequence


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


class Precision(NamedTuple):
    """Bytes of a number: of gathered weights, summed gradients, activations."""

    name: str
    gather: int
    ends: int
    reduce: int
    activation: int


class Mesh(NamedTuple):
    """So many devices, each group of `tensor` with one sequence of a batch."""

    data: int
    fsdp: int
    tensor: int

    def __str__(self) -> str:
        sizes = self._asdict().items()
        return " ".join(f"{name}={size}" for name, size in sizes if size > 1)


PRECISIONS = (
    Precision("float32", gather=4, ends=4, reduce=4, activation=4),
    Precision("bfloat16", gather=2, ends=2, reduce=4, activation=2),
    Precision("bfloat16, reduced so", gather=2, ends=2, reduce=2, activation=2),
    Precision("FP8", gather=1, ends=2, reduce=4, activation=2),
)
MESHES = tuple(
    Mesh(*sizes)
    for sizes in ((1, 8, 1), (1, 64, 1), (1, 512, 1), (1, 512, 8), (4, 512, 8))
)


def bytes_of(
    mesh: Mesh, precision: Precision, model: Model = Model(), tokens: int = TOKENS
) -> dict[str, float]:
    """What lies on one device, and what it receives in a step.

    >>> found = bytes_of(Mesh(1, 8, 1), PRECISIONS[0])
    >>> round(found["state"] / 1e9)  # 16 bytes for each of 70.6e9 weights, 8 devices
    141
    """
    others = {axis: (size - 1) / size for axis, size in mesh._asdict().items()}
    here = model.weights / (mesh.fsdp * mesh.tensor)
    blocks = model.blocks * model.block * precision.gather
    travelling = (blocks + model.ends * precision.ends) / mesh.tensor
    stream = tokens * model.width * precision.activation
    logits = tokens * model.words * FULL / mesh.tensor
    summed = model.weights / mesh.tensor * others["fsdp"] + 2 * here * others["data"]
    # Masters, two moments and gradients, all float32.
    state = 4 * FULL * here
    # The block that computes and the one that comes next; what goes into each block,
    # which remat keeps and sequence parallelism divides.
    gathered = 2 * model.block * precision.gather / mesh.tensor
    kept = model.blocks * stream / mesh.tensor + logits
    received = {
        "gathers": 2 * travelling * others["fsdp"],
        "reductions": precision.reduce * summed,
        "activations": model.blocks * 2 * 3 * 2 * stream * others["tensor"],
    }
    memory = state + gathered + kept
    whole = {"state": state, "memory": memory, **received}
    return whole | {"wire": sum(received.values())}


def table() -> Table:
    """A row for each mesh and precision."""
    rows = []
    for mesh in MESHES:
        for index, precision in enumerate(PRECISIONS):
            found = bytes_of(mesh, precision)
            first = "" if index else f"{math.prod(mesh):,}: {mesh}"
            cells = [f"{one / 1e9:,.1f}" for one in found.values()]
            rows.append([first, precision.name, *cells])
    title = "A 70B model: GB on each device, and GB that it receives in a step"
    return Table(title, ["devices", "policy", *bytes_of(mesh, precision)], rows)


def render(text: str) -> str:
    """The page with the table as it is computed."""

    def fill(place: re.Match[str]) -> str:
        is_here = place[2] == "at-scale"
        return (
            f"{place[1]}\n{table().markdown()}\n\n{place[3]}" if is_here else place[0]
        )

    return PLACE.sub(fill, text)


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text()))
    print(PAGE)
