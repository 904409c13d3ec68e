"""What one program is: a loss that a package's users would write, and its arguments."""

import dataclasses
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

SEEDS = 7
"""How many sets of numbers errors are the median of, where nothing else is said."""
HALF = ("bfloat16", "float16")
PRECISIONS = (*HALF, "current", "delayed", "mxfp8", "nvfp4")
Loss = Callable[..., Any]


class Built(NamedTuple):
    """A program that was made.

    Attributes:
        loss: `loss(params, *batch) -> (value, outputs)`: a scalar, and any tree of new
            state, predictions, indices.
        params: What is differentiated: its floating point leaves.
        batch: The other arguments; arrays have their examples along the first axis.
        region: The same loss with its solver in `with mpx.autocast(enabled=False)`, as
            the docs tell users who need it; None where it has none.
    """

    loss: Loss
    params: Any
    batch: tuple[Any, ...]
    region: Loss | None = None


@dataclasses.dataclass(frozen=True)
class Client:
    """A program of another package.

    Attributes:
        name: Its name, which also seeds its numbers.
        package: The package, as PyPI has it.
        build: Makes it from a key.
        linear: It has products of data with weights: recipes run, too.
        without: Recipes that find nothing to quantize all the same: blocks, where there
            are convolutions only.
        layouts: It runs on several devices, too.
        faults: What cannot work and is not ours to mend: a cell (a precision, or a
            layout) and the reason, which names the evidence.
        sensitive: Why half precision costs more than `goals.WORST` times the error of a
            naive cast that stayed in float32, if it does.
        seeds: How many sets of numbers its errors are the median of: more where those
            of single sets differ by orders of magnitude.
        note: What a reader of the table must know.
    """

    name: str
    package: str
    build: Callable[[jax.Array], Any]
    linear: bool = False
    without: tuple[str, ...] = ()
    layouts: bool = False
    faults: dict[str, str] = dataclasses.field(default_factory=dict)
    sensitive: str = ""
    seeds: int = SEEDS
    note: str = ""

    @property
    def words(self) -> dict[str, Any]:
        """What its record says without a measurement."""
        return {
            "program": self.name,
            "package": self.package,
            "precisions": [p for p in PRECISIONS if self.has(p)],
            "sensitive": self.sensitive,
            "note": self.note,
            "faults": self.faults,
        }

    def has(self, precision: str) -> bool:
        """Whether it is to run in a precision."""
        return precision in HALF or (self.linear and precision not in self.without)

    def make(self, seed: int = 0) -> Built:
        """The program; the seed chooses its numbers, never its shapes."""
        key = jax.random.key(zlib.crc32(self.name.encode()) + seed)
        return Built(*self.build(key))


def client(
    package: str = "", **options: Any
) -> Callable[[Callable[[jax.Array], Any]], Client]:
    """Makes a program of a function of a key, with that function's name.

    Args:
        package: The package, if it is not that of the module.
        **options: Further fields of `Client`.
    """

    def decorate(build: Callable[[jax.Array], Any]) -> Client:
        module = build.__module__.rpartition(".")[2].replace("_", "-")
        return Client(build.__name__, package or module, build, **options)

    return decorate
