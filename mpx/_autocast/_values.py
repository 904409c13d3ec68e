"""Values on their way through autocast: their provenance, and casting them.

Three *provenances* say how a float32 value of the program came to be:

- *declared*: an argument or a constant, or such a value moved or sliced. It may become
  half at each use.
- *half*: computed in half precision.
- *full*: computed in float32; what it meets is computed in float32, too.

A declared value is cast anew at each use, so that the gradients of all its uses are
summed in float32; XLA merges the casts. A computed value is cast once for a few uses,
which then share one gradient in half precision.
"""

import enum
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray, Tracer

from ._slots import Slots

FULL = np.dtype(np.float32)
FLOAT16 = np.dtype(np.float16)
_CASTABLE = frozenset(np.dtype(d) for d in (jnp.float16, jnp.bfloat16, jnp.float32))

# The gradients of so many uses of a computed value are summed in half precision: a
# block's norm feeds three products, and no digits are lost in a sum of eight.
_USES_OF_A_CAST = 8


class Provenance(enum.Enum):
    """How a value of float16, bfloat16 or float32 came to be."""

    DECLARED = "declared"
    HALF = "half"
    FULL = "full"
    OTHER = "other"
    """Not a value that autocast would touch."""


class Facts(NamedTuple):
    """What is known of a value without knowing the value; a key of caches.

    Attributes:
        provenance: Its provenance.
        is_broadcast: A declared value that was broadcast, or a scalar.
        is_product: What a matrix product gave, moved perhaps.
        literal: The number that all of its elements are, if it is known.
        parameter: The path of the parameter that it is, moved or sliced perhaps. Rows
            that were looked up in a table are none.
        is_fixed: Computed, but from parameters and constants alone.
        is_weight: A parameter, or computed from parameters and constants alone.
    """

    provenance: Provenance
    is_broadcast: bool = False
    is_product: bool = False
    literal: float | None = None
    parameter: str | None = None
    is_fixed: bool = False
    is_weight: bool = False


class Value:
    """A value of the program: an array in its present dtype, and its facts."""

    __slots__ = (
        "_casts",
        "array",
        "facts",
        "is_constant",
        "narrow",
        "slots",
        "widened_by",
    )

    def __init__(
        self,
        array: Any,
        facts: Facts,
        is_constant: bool = False,
        slots: Slots | None = None,
    ) -> None:
        """Makes a value.

        Args:
            array: The array.
            facts: What is known of it.
            is_constant: Whether it is a number that stands in the program.
            slots: The state of recipes that a weight carries.
        """
        self.array = array
        self.facts = facts
        self.is_constant = is_constant
        self.slots = slots
        self.widened_by: Any = None  # the equation that cast it from half to float32
        self.narrow: Any = None  # the array that it was cast from
        self._casts: dict[np.dtype, list[Any]] = {}

    @property
    def dtype(self) -> Any:
        """The dtype that it has now."""
        return self.array.dtype

    def offer(self, array: Any) -> None:
        """Gives a cast of the array that was made elsewhere."""
        self._casts[array.dtype] = [array, 0]

    def cast(self, dtype: np.dtype) -> tuple[Any, bool]:
        """The array in a dtype, and whether a cast for an earlier use is used again."""
        if self.array.dtype == dtype:
            return self.array, False
        if self.is_constant:
            with np.errstate(over="ignore"):
                return np.asarray(self.array, dtype), False
        if self.facts.provenance is Provenance.DECLARED:
            return jax.lax.convert_element_type(self.array, dtype), False
        cast = self._casts.get(dtype)
        if cast is None or cast[1] >= _USES_OF_A_CAST:
            array = jax.lax.convert_element_type(self.array, dtype)
            self._casts[dtype] = [array, 1]
            return array, False
        cast[1] += 1
        return cast[0], True


def is_castable(aval: Any) -> bool:
    """Whether values of this type are ones that autocast may cast."""
    return type(aval) is ShapedArray and aval.dtype in _CASTABLE


def computed(array: Any, is_product: bool = False, is_fixed: bool = False) -> Value:
    """A value that an equation gave."""
    dtype = array.dtype
    if dtype not in _CASTABLE:
        return Value(array, Facts(Provenance.OTHER))
    provenance = Provenance.FULL if dtype == FULL else Provenance.HALF
    return Value(array, Facts(provenance, is_product=is_product, is_fixed=is_fixed))


def declared(array: Any, parameter: str | None = None) -> Value:
    """An argument or a constant."""
    if not hasattr(array, "shape"):
        array = np.asarray(array)
    if array.dtype not in _CASTABLE:
        return Value(array, Facts(Provenance.OTHER))
    is_scalar = array.shape == ()
    return Value(array, Facts(Provenance.DECLARED, is_scalar, parameter=parameter))


def constant(array: Any, parameter: str | None = None) -> Value:
    """A constant of the program, a number of which is known to be it."""
    value = declared(array, parameter)
    is_known = value.array.shape == () and not isinstance(array, Tracer)
    if value.facts.provenance is Provenance.DECLARED and is_known:
        return Value(value.array, value.facts._replace(literal=float(array)))
    return value


def literal(number: Any) -> Value:
    """A number that stands in the program."""
    # A Python number of JAX's own may carry a dtype that numpy does not see.
    array = np.asarray(number, getattr(number, "dtype", None))
    if array.dtype not in _CASTABLE or array.shape != ():
        return declared(number)
    facts = Facts(Provenance.DECLARED, is_broadcast=True, literal=float(array))
    return Value(array, facts, is_constant=True)


def does_not_fit(number: float, dtype: np.dtype) -> bool:
    """Whether a number changes its meaning in half precision.

    It becomes infinite, or zero, or so small that few of its digits are left.
    """
    if not np.isfinite(number) or number == 0:
        return False
    with np.errstate(over="ignore", under="ignore"):
        rounded = float(np.asarray(number, dtype))
    return not abs(rounded - number) <= abs(number) / 64
