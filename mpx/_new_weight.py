"""An update that says what a weight becomes (`NewWeight`).

Optax transformations return what is to be added to a weight. What is rounded by its
own rules, or kept in two parts, cannot be reached by adding an array.
"""

from typing import Any, NoReturn

import equinox as eqx
import numpy as np
from jax.core import Tracer
from jaxtyping import Array

from ._errors import describe

CALL = "`mpx.master_weights(optimizer)`"
_INSIDE = (
    "put transformations of updates (`optax.add_decayed_weights`, `clip`, "
    "`MultiSteps`, `mpx.skip_nonfinite`, noise) inside: "
    "`mpx.master_weights(optax.chain(...))`"
)


class NewWeight:
    """An update that says what a weight becomes: `weight + update` is that.

    Args:
        value: The new weight.
        weight: The weight that it was computed for, and is applied to.
    """

    # numpy leaves the sum to us, too.
    __array_ufunc__ = None
    __slots__ = ("_weight", "value")

    def __init__(self, value: Array, weight: object) -> None:
        self.value, self._weight = value, weight

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weight."""
        return self.value.shape

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the weight."""
        return self.value.dtype

    def __radd__(self, weight: object) -> Array:
        return self._applied_to(weight)

    def __add__(self, weight: object) -> Array:
        return self._applied_to(weight)

    def __repr__(self) -> str:
        # JAX's errors show it.
        return f"NewWeight({describe(self.value)}: {_INSIDE})"

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"An update of {CALL} has no {name!r}: {_INSIDE}.")

    def _applied_to(self, weight: Any) -> Array:
        if weight is self._weight or _are_equal(weight, self._weight):
            return self.value
        raise ValueError(
            f"An update of {CALL} contains the new value of a weight, and must be "
            f"added to that weight, {describe(self._weight)}; got "
            f"{describe(weight)}. Apply it before the weights are cast or changed, "
            f"and {_INSIDE}."
        )

    def _refused(self, *_: object) -> NoReturn:
        raise TypeError(
            f"An update of {CALL} does not support arithmetic: it contains the new "
            f"value of the weight. So {_INSIDE}."
        )

    __mul__ = __rmul__ = __sub__ = __rsub__ = __neg__ = __truediv__ = _refused
    __rtruediv__ = __pow__ = __abs__ = __lt__ = __gt__ = __le__ = __ge__ = _refused


def _are_equal(one: Any, other: Any) -> bool:
    """Whether two arrays are known to be the same to the bit."""
    arrays = one, other
    if any(isinstance(x, Tracer) or not eqx.is_array(x) for x in arrays):
        return False
    if not all(x.is_fully_addressable for x in arrays):  # parts are elsewhere
        return False
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    a, b = map(np.asarray, arrays)
    return a.tobytes() == b.tobytes()
