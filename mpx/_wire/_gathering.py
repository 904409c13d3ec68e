"""A weight that is gathered, sent in the form that what uses it asks for.

A product under a recipe reads 8 bits of a weight, everything else half precision. Which
it is to be is known when the product is emitted, and not where the program gathers. So
what gathers makes a `Gathering`, and the first use of its value sends it.
"""

import dataclasses
import functools
from typing import Any

import numpy as np
from jax.extend.core import JaxprEqn

from .._jax_compat import bind_equation, execution_context, manual_axes
from .._policy import Wire
from .._program import aval_of, properties
from .._quantize import AbstractProduct, PrequantizedWeight, may_travel, quantized_ahead
from .._typing import AnyArray, Shape
from ._weights import FLOAT32, gathered, only_gradient, where_it_lies


@dataclasses.dataclass(frozen=True)
class Gathering:
    """What an equation gathers.

    Attributes:
        weight: The float32 weight as it lies.
        equation: The equation.
        dtype: The dtype in which it travels as an array.
        wire: What was said of travelling.
        moves: What moves it where it has arrived, or gathers it further.
    """

    weight: AnyArray
    equation: JaxprEqn
    dtype: np.dtype
    wire: Wire
    moves: tuple[JaxprEqn, ...] = ()

    @property
    def shape(self) -> Shape:
        """The shape in which it arrives."""
        last = self.moves[-1] if self.moves else self.equation
        return aval_of(last.outvars[0]).shape

    def then(self, equation: JaxprEqn) -> "Gathering":
        """The same, and then moved by an equation where it arrives."""
        return dataclasses.replace(self, moves=(*self.moves, equation))

    def arrive(self) -> AnyArray:
        """Sends it rounded to its dtype; float32 where it arrives."""
        with execution_context(self.equation):
            whole = gathered(self.equation, self.weight, self.dtype, self.wire)
        return self._moved(whole)

    def arrive_quantized(
        self, product: AbstractProduct, scales: AnyArray | None
    ) -> tuple[AnyArray, PrequantizedWeight] | None:
        """Sends it in the few bits that a product reads.

        Args:
            product: The product.
            scales: The scales of delayed scaling.

        Returns:
            What the gradient goes to, and the weight; None if it is to be an array.
        """
        # What a device gathers on its own needs one scale, which is none of its own.
        is_apart = self.wire.is_alone and bool(manual_axes())
        if self.wire.gather_dtype is not None or is_apart or not may_travel(product):
            return None
        move = functools.partial(_bound, self.equation)

        def arriving(piece: AnyArray) -> AnyArray:
            return self._moved(move(where_it_lies(piece)))

        with execution_context(self.equation):
            ahead = quantized_ahead(product, self.weight, scales, arriving)
            back = (lambda x: x) if self._is_only_typed else move
            whole = only_gradient(back, self.weight, self.wire)
        return self._moved(whole), ahead

    @property
    def _is_only_typed(self) -> bool:
        """Whether a weight that lies in pieces has the shape of what arrives.

        The product then gives each device its piece of the gradient, not the whole.
        """
        names = {equation.primitive.name for equation in self.moves}
        is_placed = self.equation.primitive.name in ("sharding_constraint", "reshard")
        return is_placed and names <= {"transpose"}

    def _moved(self, whole: AnyArray) -> AnyArray:
        for equation in self.moves:
            with execution_context(equation):
                is_gather = properties(equation.primitive.name).gathers
                if is_gather and whole.dtype == FLOAT32:
                    whole = gathered(equation, whole, self.dtype, self.wire)
                else:
                    whole = _bound(equation, whole)
        return whole


def _bound(equation: JaxprEqn, x: Any) -> AnyArray:
    return bind_equation(equation, x)[0]
