"""Rules from a forecast: which matmuls lose by quantizing."""

import dataclasses
import math

from .._counter import Roof
from .._program import aval_of
from .._rules import Candidate, Precision, Rule, Rules
from ._report import Content, Matmul


def where_it_pays(report: Content, precision: str, target: str) -> Rules:
    """See `Forecast.where_it_pays`."""
    target = target or report.estimates[0].target
    found = [
        one
        for one in report.estimates
        if (one.target, one.precision) == (target, precision)
    ]
    few = [one for one in found if one.flops.get("8 bits") or one.flops.get("4 bits")]
    if not few:
        has = ", ".join(f"{e.target}: {e.precision}" for e in report.estimates)
        raise ValueError(
            "`where_it_pays(precision, target)` needs an estimate whose matmuls are in "
            f"8 bits or less; got {precision!r} on {target!r}; the report has {has}."
        )
    one, roof = few[0], report.roofs[target]
    each = one.quantizing / max(one.quantized, 1)
    bits = 4 if one.flops.get("4 bits") else 8

    costs = _Loses((), each, roof, bits)
    losing = tuple(one for one in one.matmuls if costs.of(one))
    if not losing:
        return Rules()
    loses = dataclasses.replace(costs, here=losing)
    return Rules(Rule(Precision.HALF, primitive="dot_general", when=loses))


@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class _Loses:
    """Whether quantizing a matmul takes longer than it saves.

    Attributes:
        here: Those of the step that do.
        each: Bytes moved to quantize a number.
        roof: What the device reaches.
        bits: In how many bits it multiplies.
    """

    here: tuple[Matmul, ...]
    each: float
    roof: Roof
    bits: int

    def __call__(self, candidate: Candidate) -> bool:
        return self._is_slower(candidate.multiplications, _numbers(candidate))

    def of(self, one: Matmul) -> bool:
        """Whether it holds for a matmul of the report."""
        return self._is_slower(one.multiplications, one.numbers)

    def _is_slower(self, multiplications: int, numbers: int) -> bool:
        return gain(multiplications, numbers, self.each, self.roof, self.bits) < 0

    @property
    def __name__(self) -> str:
        """What reports of `mpx.explain` call the rule."""
        return "quantizing loses"

    def __repr__(self) -> str:
        places = (f"{m.source} {m.scope}".rstrip() for m in self.here)
        pairs = zip(places, self.here, strict=True)
        return f"<quantizing loses: {'; '.join(f'{p}, {m.shapes}' for p, m in pairs)}>"


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
