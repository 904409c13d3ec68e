"""A scale that looks for the largest value at which gradients stay finite."""

import math
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Float32, Int32

from .._errors import describe
from .._typing import BoolLike, FloatScalar, ScalarLike
from ._base import (
    LARGEST_SCALE,
    AbstractLossScaling,
    finite_scalar,
    number,
    scale_in_range,
    scale_value,
)
from ._record import StepRecord, replaced

# The largest power of two that float16 holds. The backward pass of a float16 loss
# starts with the scale itself, as a float16.
LARGEST_FLOAT16_SCALE = 2.0**15


class DynamicLossScaling(AbstractLossScaling):
    r"""A scale that grows after many good steps and falls at bad ones.

    After a good step, with a counter $c$ of good steps in the current window:

    $$c \leftarrow c + 1; \quad \text{if } c = \text{period}: \;
      s \leftarrow \min(s \cdot \text{factor}, s_{max}),\; c \leftarrow 0$$

    After a bad one: $s \leftarrow \max(s \cdot \text{backoff}, s_{min})$, $c \leftarrow
    0$. Growth comes at the `period`-th good step, as in PyTorch, Keras, MPX and JMP.

    With `hysteresis` $h > 1$ the scale falls only at the $h$-th bad step in a row, and
    at each one after it. The next good step refills the tolerance and counts for
    growth only if there was nothing to refill.

    Keep scale, factor and backoff powers of two: only then are scaling and unscaling
    exact. All fields are arrays, so none is lost in a checkpoint, and none retraces.

    Args:
        loss_scaling: The scale to start with. `mpx.FLOAT16_MAX` is understood as
            32768: a start above the default cap starts at the cap.
        min_loss_scaling: The floor, which may lie below 1.
        factor: What the scale is multiplied by when it grows, larger than 1.
        period: Good steps until the scale grows.
        counter: Good steps already made, for programs that pass it; 0 if None.
        backoff: What the scale is multiplied by when it falls, between 0 and 1;
            `1 / factor` if None.
        max_loss_scaling: The cap, a power of two. By default 32768, or the largest
            power of two not above `loss_scaling` if that is more (at most 2^126). Give
            more than 32768 where the loss is float32: then the scale never is a
            float16 number.
        hysteresis: Bad steps in a row until the scale falls.

    Raises:
        ValueError: There is a factor of 1 or less, a backoff outside (0, 1), a period
            or hysteresis below 1, a negative counter, a scale that is zero, negative,
            NaN, infinite, a bool or no scalar, a cap that is no power of two, or not
            `min_loss_scaling <= loss_scaling <= max_loss_scaling`. The message names
            argument and value.

    At the edges: growth stops at the cap, also where the product would overflow. A bad
    step at the floor leaves the scale there and is counted in `floored`, and
    `mpx.check` raises. Arguments that are traced are not checked.

    Source: Micikevicius et al. 2018, arXiv:1710.03740, section 3.2.

    Examples:
        >>> import mpx
        >>> scaling = mpx.DynamicLossScaling(4.0, period=2)
        >>> for _ in range(2):
        ...     scaling = scaling.adjust(True)
        >>> float(scaling.loss_scale)
        8.0
        >>> float(scaling.adjust(False).loss_scale)
        4.0
    """

    loss_scaling: Float32[Array, ""]
    min_loss_scaling: Float32[Array, ""]
    factor: Float32[Array, ""]
    period: Int32[Array, ""]
    counter: Int32[Array, ""]
    backoff: Float32[Array, ""]
    max_loss_scaling: Float32[Array, ""]
    hysteresis: Int32[Array, ""]
    hysteresis_left: Int32[Array, ""]
    floored: Int32[Array, ""]
    record: StepRecord

    def __init__(
        self,
        loss_scaling: ScalarLike = 2.0**15,
        min_loss_scaling: ScalarLike = 1.0,
        factor: ScalarLike = 2.0,
        period: ScalarLike = 2000,
        counter: ScalarLike | None = None,
        *,
        backoff: ScalarLike | None = None,
        max_loss_scaling: ScalarLike | None = None,
        hysteresis: ScalarLike = 1,
    ) -> None:
        cls = type(self)
        self.loss_scaling = number(
            loss_scaling, "loss_scaling", cls, jnp.float32, _start
        )
        self.min_loss_scaling = scale_value(min_loss_scaling, "min_loss_scaling", cls)
        self.factor = number(factor, "factor", cls, jnp.float32, _above_one)
        self.period = number(period, "period", cls, jnp.int32, _count)
        counter = 0 if counter is None else counter
        self.counter = number(counter, "counter", cls, jnp.int32, _not_negative)
        if backoff is None:
            self.backoff = 1 / self.factor
        else:
            self.backoff = number(backoff, "backoff", cls, jnp.float32, _in_zero_one)
        if max_loss_scaling is None:
            self.max_loss_scaling = _default_cap(self.loss_scaling)
            self.loss_scaling = jnp.minimum(self.loss_scaling, self.max_loss_scaling)
        else:
            self.max_loss_scaling = number(
                max_loss_scaling, "max_loss_scaling", cls, jnp.float32, _power_of_two
            )
        self.hysteresis = number(hysteresis, "hysteresis", cls, jnp.int32, _count)
        self.hysteresis_left = self.hysteresis - 1
        self.floored = jnp.zeros((), jnp.int32)
        self.record = StepRecord()
        if not isinstance(self.loss_scaling, Tracer):
            self._validate()

    @property
    def loss_scale(self) -> FloatScalar:
        """The scale that the next loss is multiplied by, float32."""
        return self.loss_scaling

    def adjust(
        self,
        grads_finite: BoolLike,
        *,
        places_finite: Bool[Array, " n"] | None = None,
    ) -> Self:
        """The state after one step; see the class for the equations.

        Args:
            grads_finite: Whether the step was good, one boolean.
            places_finite: One boolean for the loss, then one for each leaf of the
                gradients; after a bad step `mpx.check` names the leaves by them.

        Returns:
            The new state; this one stays as it is.

        Raises:
            TypeError: `grads_finite` is not one boolean.
        """
        return _adjusted(self, finite_scalar(grads_finite, self), places_finite)

    def with_loss_scale(self, loss_scale: ScalarLike) -> Self:
        """A copy that uses another scale from the next step on.

        Args:
            loss_scale: The scale, a positive number.

        Returns:
            The new state, whose window of good steps starts anew.

        Raises:
            ValueError: The scale does not lie between the floor and the cap.
        """
        value = scale_value(loss_scale, "loss_scale", type(self))
        new = replaced(self, loss_scaling=value, counter=jnp.zeros((), jnp.int32))
        if not any(isinstance(x, Tracer) for x in jax.tree.leaves(new)):
            new._validate()
        return new

    def _lowered(self) -> FloatScalar:
        return jax.lax.max(self.loss_scaling * self.backoff, self.min_loss_scaling)

    def _backed_off(self) -> Self:
        zero = jnp.zeros((), jnp.int32)
        return replaced(self, loss_scaling=self._lowered(), counter=zero)

    def _validate(self) -> None:
        low, scale, cap = (
            np.asarray(x)
            for x in (self.min_loss_scaling, self.loss_scaling, self.max_loss_scaling)
        )
        if not np.all((low > 0) & (low <= scale) & (scale <= cap) & (cap < np.inf)):
            raise ValueError(
                "`mpx.DynamicLossScaling` needs `min_loss_scaling <= loss_scaling <= "
                f"max_loss_scaling`; got {low}, {scale}, {cap}. A cap above 32768 is "
                "for losses in float32: `max_loss_scaling=2.0**24`."
            )
        for name, valid in (
            ("factor", _above_one),
            ("backoff", _in_zero_one),
            ("period", _count),
            ("counter", _not_negative),
            ("hysteresis", _count),
            ("hysteresis_left", _not_negative),
        ):
            valid(np.asarray(getattr(self, name)), name, type(self))


# Jitted, so that its two dozen scalar operations are traced once and not in each step.
@jax.jit
def _adjusted(scaling: Any, finite: Any, places_finite: Any) -> Any:
    # `select` and not `jnp.where`, which is a function of its own to be traced.
    select, zero = jax.lax.select, jnp.zeros((), jnp.int32)
    tolerance = scaling.hysteresis - 1
    is_full = scaling.hysteresis_left >= tolerance
    counter = select(is_full, scaling.counter + 1, zero)
    grows = counter >= scaling.period
    # min also turns an overflow of the product into the cap.
    grown = jax.lax.min(scaling.loss_scaling * scaling.factor, scaling.max_loss_scaling)
    falls = scaling.hysteresis_left <= 0
    is_floored = falls & (scaling.loss_scaling <= scaling.min_loss_scaling)
    return replaced(
        scaling,
        loss_scaling=select(
            finite,
            select(grows, grown, scaling.loss_scaling),
            select(falls, scaling._lowered(), scaling.loss_scaling),
        ),
        counter=select(finite & ~grows, counter, zero),
        hysteresis_left=select(
            finite, tolerance, jax.lax.max(scaling.hysteresis_left - 1, zero)
        ),
        floored=select(is_floored & ~finite, scaling.floored + 1, zero),
        record=scaling.record.updated(finite, places_finite),
    )


def _default_cap(loss_scaling: FloatScalar) -> FloatScalar:
    # frexp, not log2, which is inexact: x = m 2^e with m in [0.5, 1).
    _, exponent = jnp.frexp(loss_scaling)
    start = jnp.ldexp(jnp.ones((), jnp.float32), exponent - 1)
    return jnp.clip(start, LARGEST_FLOAT16_SCALE, LARGEST_SCALE)


def _require(valid: Any, value: np.ndarray, name: str, owner: type, must: str) -> None:
    if not np.all(valid):
        raise ValueError(
            f"`{name}` of `mpx.{owner.__name__}` must be {must}; got "
            f"{describe_all(value)}."
        )


def describe_all(value: np.ndarray) -> str:
    """Writes a number, or the shape and values of several."""
    return str(value) if value.ndim == 0 else f"{describe(value)} {value}"


def _start(value: np.ndarray, name: str, owner: type) -> None:
    # A start above the largest scale is lowered to it, with the default cap.
    scale_in_range(np.asarray(np.minimum(value, LARGEST_SCALE)), name, owner)
    _require(value < np.inf, value, name, owner, "finite")


def _above_one(value: np.ndarray, name: str, owner: type) -> None:
    valid = (value > 1) & (value < np.inf)
    _require(valid, value, name, owner, "a finite number larger than 1")


def _in_zero_one(value: np.ndarray, name: str, owner: type) -> None:
    _require((value > 0) & (value < 1), value, name, owner, "between 0 and 1")


def _count(value: np.ndarray, name: str, owner: type) -> None:
    valid = (value >= 1) & (value < 2**31) & (value == np.floor(value))
    _require(valid, value, name, owner, "a whole number, at least 1")


def _not_negative(value: np.ndarray, name: str, owner: type) -> None:
    valid = (value >= 0) & (value < 2**31) & (value == np.floor(value))
    _require(valid, value, name, owner, "a whole number, at least 0")


def _power_of_two(value: np.ndarray, name: str, owner: type) -> None:
    valid = (value > 0) & (value <= LARGEST_SCALE)
    valid &= np.frexp(np.where(valid, value, 1))[0] == 0.5
    nearest = (
        f" (the one below: {2.0 ** math.floor(math.log2(value))})"
        if value.ndim == 0 and 0 < value < np.inf
        else ""
    )
    must = f"a power of two of at most 2^126, so that scaling is exact{nearest}"
    _require(valid, value, name, owner, must)
