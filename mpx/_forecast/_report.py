"""What a forecast holds: plain data, of each target and precision."""

import dataclasses

from .._counter import Roof


@dataclasses.dataclass(frozen=True)
class KernelGroup:
    """Kernels that come from one line of code and do the same work.

    Bytes, operations and seconds are those of all their runs together.
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
    """How often such a kernel runs."""
    scope: str
    """The named scopes, or else the functions, around it."""
    source: str
    """The line of the user's code: `model.py:41`."""


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A step in one precision on one target.

    *Counted* fields are read from the program that the target's compiler made.
    *Modelled* ones follow from them and the constants of the report.
    """

    target: str
    """The name of the target."""
    precision: str
    """The precision, as it was asked for."""
    memory: int | None
    """Counted: bytes on a device at the worst moment; None where the compiler refused
    the program because it does not fit."""
    memory_by_part: dict[str, int]
    """Counted: weights, optimizer, other arguments and results; and temporaries, split
    into activations, gradients and working memory by when each array is alive."""
    traffic: int
    """Counted: bytes that the kernels read and write."""
    quantizing: int
    """Counted: those of them that only quantizing moves."""
    quantized: int
    """Counted: how many numbers are written in 8 bits or less."""
    flops: dict[str, int]
    """Counted: operations by unit: `8 bits`, `16 bits`, `attention`."""
    sent: dict[str, int]
    """Counted: bytes that a device sends, by dtype."""
    kernels: int
    """Counted: how many kernels run."""
    roofline: float
    """Modelled: seconds at the peaks of the data sheet; nothing is faster."""
    time: tuple[float, float]
    """Modelled: seconds in the best and in the worst case."""
    bound: dict[str, float]
    """Modelled: the share of the time that each kind of kernel takes, the largest
    first."""
    by_memory: float
    """Modelled: the share of the time in kernels that wait for memory."""
    top: tuple[KernelGroup, ...] = ()
    """The kernels that move most bytes."""
    batch: int = 0
    """The batch that it was compiled for; 0 where arguments have none."""
    largest_batch: int | None = None
    """Counted: the largest batch that fits; None where it was not asked for."""
    pays_from: int | None = None
    """Modelled: the smallest batch at which it is faster than the baseline; None where
    it was not asked for, or it never is."""


@dataclasses.dataclass(frozen=True)
class Constant:
    """A number that was not counted."""

    target: str
    """The target that it holds for."""
    name: str
    """What it is."""
    value: str
    """It, with its unit."""
    source: str
    """Where it is from."""


@dataclasses.dataclass(frozen=True)
class Content:
    """All that a forecast holds; `Forecast` is it with the ways to look at it."""

    name: str
    """The name of the function."""
    estimates: tuple[Estimate, ...]
    """One for each target and precision, in the order they were asked for."""
    constants: tuple[Constant, ...]
    """What the modelled numbers rest on."""
    versions: dict[str, str]
    """The packages that the counted numbers depend on."""
    titles: dict[str, str]
    """What the targets are called in words."""
    roofs: dict[str, Roof]
    """What each target reaches."""
    notes: tuple[str, ...] = ()
    """What a reader must know."""
