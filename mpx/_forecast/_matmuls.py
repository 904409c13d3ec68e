"""The matmuls of a step that are in few bits, with their lines and shapes."""

import math
import re
from collections.abc import Iterator

from .._inspect import Operation, is_low
from ._report import Matmul
from ._steps import Precision, Step


def quantized(step: Step, precision: Precision, target: str) -> tuple[Matmul, ...]:
    """Those of the forward pass; of one line and shape once."""
    return tuple(dict.fromkeys(_read(step.operations(precision, target))))


def _read(operations: tuple[Operation, ...]) -> Iterator[Matmul]:
    for one in operations:
        if (
            not one.is_low
            or not is_low(one.format)
            or one.phase != "forward"
            or not one.flops
        ):
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
