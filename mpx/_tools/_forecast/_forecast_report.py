"""The data of a forecast by target and precision, and rules made from it."""

import dataclasses
import math
import re
from collections.abc import Callable, Iterator

from ..._program import aval_of
from ..._quantize import read_target, target_from
from ..._settings import Candidate, Precision, Rule, Rules
from .._counter import TARGETS, Device, Roof
from .._inspect import Operation, is_low
from ._steps import ForecastStep, Variant

# The devices with known rates, by their names in `mpx.autocast`.
_TARGETS = {target_from(key).name: key for key in TARGETS}


def find_target(name: object, argument: str) -> Device:
    """Returns the device with a user's name; errors name `argument`."""
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
    """Counted: operations by unit: `8 bits`, `16 bits`, `attention`. Those of Pallas
    kernels are their `cost_estimate`."""
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
    findings: tuple[str, ...] = ()
    """What of the program could not be counted, or counts less often than it runs."""


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
    """The data of a forecast; `Forecast` adds the views."""

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


# --- Matmuls in few bits, with their lines and shapes ---------------------------------


def quantized(
    step: ForecastStep, precision: Variant, target: str
) -> tuple[Matmul, ...]:
    """Returns the quantized matmuls of the forward pass; of one line and shape once."""
    return tuple(dict.fromkeys(_read(step.operations(precision, target))))


def _read(operations: tuple[Operation, ...]) -> Iterator[Matmul]:
    for one in operations:
        if not (one.is_low and is_low(one.format) and one.flops):
            continue
        if one.phase != "forward":
            continue
        types = (*one.inputs[:2], *one.outputs[:1])
        shapes = [re.findall(r"\d+", kind.partition("[")[2]) for kind in types]
        yield Matmul(
            one.source,
            one.scope or one.function.rpartition("/")[2],
            " by ".join("x".join(shape) for shape in shapes[:2]),
            one.flops // (2 * max(one.executions, 1)),
            sum(math.prod(map(int, shape)) for shape in shapes),
        )


# --- Rules for matmuls that lose by quantizing ----------------------------------------

_FEW = {"4 bits", "8 bits"}


def where_it_pays(report: Content, precision: str, target: str) -> Rules:
    """See `Forecast.where_it_pays`."""
    name = target or report.estimates[0].target
    target = find_target(name, "`target` of `where_it_pays`").name
    ours = [e for e in report.estimates if e.target == target]
    few = [e for e in ours if e.precision == precision and set(e.flops) & _FEW]
    if not few:
        has = ", ".join(f"{e.target}: {e.precision}" for e in report.estimates)
        raise ValueError(
            "`where_it_pays(precision, target)` needs an estimate whose matmuls are in "
            f"8 bits or less; got {precision!r} on {target!r}; the report has {has}."
        )
    one, roof = few[0], report.roofs[target]
    each = one.quantizing / max(one.quantized, 1)
    bits = 4 if one.flops.get("4 bits") else 8

    def loses(multiplications: int, numbers: int) -> bool:
        return gain(multiplications, numbers, each, roof, bits) < 0

    here = [m for m in one.matmuls if loses(m.multiplications, m.numbers)]
    if not here:
        return Rules()
    places = (f"{f'{m.source} {m.scope}'.rstrip()}, {m.shapes}" for m in here)
    when = QuantizingLoses(loses, "; ".join(places))
    return Rules(Rule(Precision.HALF, primitive="dot_general", when=when))


@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class QuantizingLoses:
    """Whether quantizing a matmul takes longer than it saves.

    Attributes:
        holds: Whether it does, by multiplications and quantized numbers.
        here: The matmuls of the step for which it holds, in words.
    """

    holds: Callable[[int, int], bool]
    here: str

    def __call__(self, candidate: Candidate) -> bool:
        return self.holds(candidate.multiplications, _numbers(candidate))

    def __repr__(self) -> str:
        return f"<quantizing loses: {self.here}>"


def _numbers(candidate: Candidate) -> int:
    """Returns the count of quantized numbers: both operands, and the gradient."""
    variables = (*candidate.equation.invars[:2], *candidate.equation.outvars)
    return sum(math.prod(aval_of(one).shape) for one in variables)


def gain(
    multiplications: int, numbers: int, each: float, roof: Roof, bits: int = 8
) -> float:
    """Returns the seconds that few bits save in a matmul's forward and backward pass.

    Args:
        multiplications: The multiplications of its forward pass.
        numbers: The count of numbers quantized for all three matmuls.
        each: The bytes moved to quantize a number.
        roof: The device; the middle of best and worst case counts.
        bits: The bits that it multiplies in.
    """
    matmul, reads, start = (
        sum(pair) / 2 for pair in (roof.matmul, roof.reads, roof.start)
    )
    # No device has units of both kinds that recipes use.
    peak = max(roof.peak(bits), roof.peak(bits, are_integers=True))
    faster = 1 / roof.peak(16) - 1 / peak
    quantizing = numbers * each / (roof.bandwidth * reads) + 3 * start
    return 6 * multiplications * faster / matmul - quantizing
