"""What a kernel of its own does for a recipe: both copies of an operand at once.

No kernel is here. Recipes hold one as an object (`mpx.contrib.PallasKernel()`), and
nothing of mpx imports what it is.
"""

import abc

import numpy as np
from jaxtyping import Array

from .._typing import Shape
from ._amax import Join
from ._array import QuantizedArray
from ._quantizers import AbstractQuantizer


class AbstractKernel(abc.ABC):
    """Quantizes an operand of a linear layer for both of its products.

    Part of a recipe: hashable, and compared by value.
    """

    @abc.abstractmethod
    def takes(self, shape: Shape) -> bool:
        """Whether it takes an array of a shape."""

    @abc.abstractmethod
    def quantize(
        self,
        x: Array,
        quantizers: tuple[AbstractQuantizer, AbstractQuantizer],
        dtype: np.dtype,
        axes: tuple[int, int],
        join: Join,
        *,
        step: Array | None = None,
        rounded_to: np.dtype | None = None,
    ) -> tuple[QuantizedArray, QuantizedArray]:
        """Both copies, which are those of the quantizers.

        Square blocks of 4 bits are packed along the axis of their copy.

        Args:
            x: Floating matrices, of a shape that it takes.
            quantizers: Those of the first copy and of the second. If one has square
                blocks, both are the same.
            dtype: The dtype that `dequantize` is to give.
            axes: The axis that blocks of the first copy lie along, and that of the
                second: -1 and -2 in any order.
            join: Makes the amax of the whole array from that of `x`.
            step: The number of the training step, by which noise is drawn; None if
                nobody knows it.
            rounded_to: A dtype that the numbers are rounded to first.
        """
