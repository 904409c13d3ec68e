"""`AbstractProduct`: what is known of every quantized product before numbers are."""

import abc
import dataclasses
from typing import Any

import numpy as np
from jaxtyping import Array

from ._amax import Join, joined_over
from ._operands import Copies
from ._recipes import AbstractRecipe, Role
from ._slots import amax_and_scale
from ._target import Target


@dataclasses.dataclass(frozen=True, kw_only=True)
class AbstractProduct(abc.ABC):
    """A product of data and a weight.

    Attributes:
        recipe: How operands are quantized.
        dtype: The dtype of the result and of the gradient of the data: half precision,
            or float32.
        target: The device that it is compiled for.
        manual_axes: Axes of `shard_map` in force, over which the pieces of an array
            have one scale.
        sums_over_devices: Whether that is `shard_map(check_vma=False)`, where JAX adds
            up the cotangents of replicated arguments over all `manual_axes`.
        out_sharding: That of the operation, over a mesh of explicit axes. None: as
            the operation finds it.
    """

    recipe: AbstractRecipe
    dtype: np.dtype
    target: Target
    manual_axes: tuple[str, ...] = ()
    sums_over_devices: bool = False
    out_sharding: Any = None

    @abc.abstractmethod
    def _copies(self, role: Role) -> Copies:
        """How an array becomes the operands of its two products."""

    def _copies_at(self, step: Array | None, role: Role) -> Copies:
        """The same in a training step, by whose number noise is drawn."""
        return dataclasses.replace(self._copies(role), step=step)

    def _join(self) -> Join:
        return joined_over(self.manual_axes, self.sums_over_devices)

    def _summed_axes(self) -> tuple[str, ...]:
        """The axes over which JAX adds up what comes in the place of cotangents."""
        return self.manual_axes if self.sums_over_devices else ()

    def _scaled(
        self, role: Role, x: Array, scales: Array | None
    ) -> tuple[Array | None, Array | None]:
        """The amax of an array and the scale to quantize it with."""
        return amax_and_scale(self.recipe, self._join(), role, x, scales)
