"""The two forms of loss scaling whose scale never changes."""

from typing import Self

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32

from .._errors import describe
from .._typing import AnyArray, FloatScalar, ScalarLike
from ._arguments import scale_in_range, scale_value
from ._base import AbstractLossScaling
from ._record import StepRecord, replaced


class StaticLossScaling(AbstractLossScaling):
    """A scale that never changes; non-finite steps are still skipped.

    Args:
        loss_scaling: A positive number, stored as float32. Prefer a power of two:
            others round each gradient once more.

    Raises:
        ValueError: It is not one finite positive number between 2^-126 and 2^126.

    Examples:
        >>> import mpx
        >>> float(mpx.StaticLossScaling(1024.0).loss_scale)
        1024.0
    """

    loss_scaling: Float32[Array, ""]
    record: StepRecord

    def __init__(self, loss_scaling: ScalarLike) -> None:
        self.loss_scaling = scale_value(loss_scaling, "loss_scaling", type(self))
        self.record = StepRecord()

    @property
    def loss_scale(self) -> AnyArray:
        """The scale, float32."""
        return self.loss_scaling

    def _at_scale(self, scale: FloatScalar) -> Self:
        return replaced(self, loss_scaling=scale)

    def _validate(self) -> None:
        super()._validate()
        scale_in_range(np.asarray(self.loss_scaling), "loss_scaling", type(self))


class NoLossScaling(AbstractLossScaling):
    """The loss scaling of a step that needs no scale: bfloat16, float32.

    Args:
        skip: Whether non-finite steps are skipped and counted. With False nothing is
            checked, the compiled step contains no trace of it, and the state never
            changes.

    Raises:
        TypeError: `skip` is not True or False; an array is not allowed, because it must
            be known when the step is traced.

    Examples:
        >>> import mpx
        >>> float(mpx.NoLossScaling().loss_scale)
        1.0
    """

    record: StepRecord
    skip: bool = eqx.field(static=True)

    def __init__(self, skip: bool = True) -> None:
        if not isinstance(skip, bool):
            raise TypeError(
                "`skip` of `mpx.NoLossScaling` must be True or False, known when the "
                f"step is traced; got {describe(skip)}."
            )
        self.record = StepRecord()
        self.skip = skip

    @property
    def loss_scale(self) -> AnyArray:
        """One, float32."""
        return jnp.ones((), jnp.float32)

    @property
    def _is_stateful(self) -> bool:
        return self.skip

    @property
    def _is_one(self) -> bool:
        return True
