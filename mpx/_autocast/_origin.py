"""What a value is computed from."""

import enum
import functools
import operator
from collections.abc import Iterable


class Origin(enum.Flag):
    """What a value is computed from: of several operands all of it; constants add none.

    A value of weights and constants alone is a weight itself. Where a matmul, a lookup,
    a loop or noise is among what it is made of, it is one for data only, and data for a
    weight: `w + a @ b` is a weight of `x`, `queries @ w` is data of the next layer.
    """

    WEIGHT = enum.auto()
    MADE = enum.auto()
    """Made of weights by a matmul, a lookup or a loop."""
    PATTERN = enum.auto()
    """Of counts, integers, truth values or joined constants: data by itself."""
    NOISE = enum.auto()
    """Random bits, of whatever key: data by itself."""
    DATA = enum.auto()


CONSTANT = Origin(0)


def together_from(origins: Iterable[Origin]) -> Origin:
    """The origin of what is computed from several."""
    found = functools.reduce(operator.or_, origins, CONSTANT)
    if Origin.DATA in found:
        return Origin.DATA
    return found & ~Origin.PATTERN if Origin.WEIGHT in found else found
