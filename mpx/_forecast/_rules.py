"""Rules from a forecast: which matmuls lose by quantizing."""

import dataclasses
import math
from collections.abc import Callable

from .._counter import Roof
from .._program import aval_of
from .._rules import Candidate, Precision, Rule, Rules
from ._report import Content, find_target

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
    """How many numbers are quantized: both operands, and the result's gradient."""
    variables = (*candidate.equation.invars[:2], *candidate.equation.outvars)
    return sum(math.prod(aval_of(one).shape) for one in variables)


def gain(
    multiplications: int, numbers: int, each: float, roof: Roof, bits: int = 8
) -> float:
    """Seconds that a matmul gains by few bits in forward and backward pass.

    Args:
        multiplications: Of its forward pass.
        numbers: That are quantized for all three products.
        each: Bytes moved to quantize a number.
        roof: What the device reaches, in the middle of best and worst case.
        bits: In how many bits it multiplies.
    """
    matmul, reads, start = (
        sum(pair) / 2 for pair in (roof.matmul, roof.reads, roof.start)
    )
    faster = 1 / roof.peak(16) - 1 / roof.peak(bits)
    quantizing = numbers * each / (roof.bandwidth * reads) + 3 * start
    return 6 * multiplications * faster / matmul - quantizing
