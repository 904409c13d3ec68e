"""What a forecast holds: plain data, of each target and precision."""

import dataclasses

from .._counter import TARGETS, Roof, Target
from .._quantize import read_target

# The devices whose numbers are known, by the names that mpx has for them.
_TARGETS = {f"tpu {key}" if key[0] == "v" else key: key for key in TARGETS}


def find_target(name: object, argument: str) -> Target:
    """The device that a user names, as an argument that messages mention."""
    found = read_target(name, argument, tuple(_TARGETS))
    return TARGETS[_TARGETS[found.name]]


@dataclasses.dataclass(frozen=True)
class KernelGroup:
    """A group of kernels that come from one line of code and do the same work.

    Bytes, operations and seconds are totals over all their runs.
    """

    kind: str
    """`matmul, 8 bits`, `attention`, `quantizing`, `optimizer`, `elementwise`, ..."""
    bytes: int
    """Bytes read and written (counted)."""
    flops: int
    """Operations of matmuls, convolutions and attention (counted)."""
    seconds: float
    """Roofline time (modelled)."""
    times: int
    """The number of runs of such kernels."""
    scope: str
    """The named scopes, or else the functions, around it."""
    source: str
    """The line of the user's code: `model.py:41`."""


@dataclasses.dataclass(frozen=True)
class Matmul:
    """A matmul of data with a weight that a recipe quantizes, in the forward pass."""

    source: str
    """The line of the user's code: `model.py:41`."""
    scope: str
    """The named scopes, or else the functions, around it."""
    shapes: str
    """The shapes of its operands: `256x512 by 512x64`."""
    multiplications: int
    """Its multiplications."""
    numbers: int
    """How many numbers are quantized for it and its two gradients."""


@dataclasses.dataclass(frozen=True)
class Estimate:
    """An estimate of a step in one precision on one target.

    *Counted* fields are read from the program that the target's compiler made.
    *Modelled* ones follow from them and the constants of the report.
    """

    target: str
    """The name of the target."""
    precision: str
    """The precision, as requested."""
    memory: int | None
    """Counted: peak bytes on a device; None if the compiler refused the program because
    it does not fit."""
    memory_by_part: dict[str, int]
    """Counted: weights, optimizer, other arguments and results; closed-over arrays, if
    there are any of 1 KiB or more; and temporaries, split into activations, gradients
    and working memory by when each array is alive."""
    traffic: int
    """Counted: bytes that the kernels read and write."""
    quantizing: int
    """Counted: those of them that only quantizing reads and writes."""
    quantized: int
    """Counted: the number of values written in 8 bits or less."""
    flops: dict[str, int]
    """Counted: operations by unit: `8 bits`, `16 bits`, `attention`."""
    sent: dict[str, int]
    """Counted: bytes that a device sends, by dtype."""
    kernels: int
    """Counted: the number of kernels that run."""
    roofline: float
    """Modelled: roofline time in seconds, at the peaks of the data sheet."""
    time: tuple[float, float]
    """Modelled: seconds in the best and in the worst case."""
    bound: dict[str, float]
    """Modelled: the share of the time that each kind of kernel takes, the largest
    first."""
    by_memory: float
    """Modelled: the share of the time in kernels that wait for memory."""
    top: tuple[KernelGroup, ...] = ()
    """The kernels that move most bytes."""
    matmuls: tuple[Matmul, ...] = ()
    """The quantized matmuls, those of one line and shape once."""
    batch: int = 0
    """The batch that it was compiled for; 0 if arguments have none."""
    largest_batch: int | None = None
    """Counted: the largest batch that fits; None if not requested."""
    pays_from: int | None = None
    """Modelled: the smallest batch at which it is faster than the baseline; None if not
    requested, or it never is."""


@dataclasses.dataclass(frozen=True)
class Constant:
    """A constant of the model: a number that is not counted."""

    target: str
    """The target that it applies to."""
    name: str
    """The name of the constant."""
    value: str
    """The value with its unit."""
    source: str
    """The source of the value."""


@dataclasses.dataclass(frozen=True)
class Content:
    """All that a forecast holds; `Forecast` is it with the ways to look at it."""

    name: str
    """The name of the function."""
    estimates: tuple[Estimate, ...]
    """One for each target and precision, in the requested order."""
    constants: tuple[Constant, ...]
    """The constants of the modelled numbers."""
    versions: dict[str, str]
    """The packages that the counted numbers depend on."""
    titles: dict[str, str]
    """The titles of the targets."""
    roofs: dict[str, Roof]
    """The peak rates of each target."""
    notes: tuple[str, ...] = ()
    """Notes that a reader must know."""
