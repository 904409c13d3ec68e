"""A scale that looks for the largest value at which gradients stay finite."""

from typing import Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Float32, Int32

from .._typing import AnyArray, BoolLike, BoolScalar, FloatScalar, ScalarLike
from ._arguments import (
    LARGEST_SCALE,
    above_one,
    count,
    in_zero_one,
    not_negative,
    number,
    power_of_two,
    require,
    scale_value,
    start,
)
from ._base import AbstractLossScaling, judged
from ._record import StepRecord, advance_record, counted, loss_was_finite, replaced

# The largest power of two that float16 holds. The backward pass of a float16 loss
# starts with the scale itself, as a float16.
LARGEST_FLOAT16_SCALE = 2.0**15


class DynamicLossScaling(AbstractLossScaling):
    r"""A scale that grows after many good steps and falls at non-finite ones.

    After a good step, with a counter $c$ of good steps in the current window:

    $$c \leftarrow c + 1; \quad \text{if } c = \text{period}: \;
      s \leftarrow \min(s \cdot \text{factor}, s_{max}),\; c \leftarrow 0$$

    After a non-finite one: $s \leftarrow \max(s \cdot \text{backoff}, s_{min})$, $c
    \leftarrow 0$. If its loss was non-finite before it was scaled, the step is counted
    and nothing else changes, because no smaller scale would help. The scale grows at
    the `period`-th good step, as in PyTorch, Keras, MPX and JMP.

    With `hysteresis` $h > 1$ the scale falls only at the $h$-th skipped step in a row,
    and at each one after it. The next good step resets this tolerance; it counts for
    growth only if there was nothing to reset.

    Use powers of two for scale, factor and backoff: only then are scaling and unscaling
    exact. All fields are arrays: checkpoints save all of them, and changing one does
    not retrace.

    Args:
        loss_scaling: The initial scale, at most the default cap: `mpx.FLOAT16_MAX`
            means 32768.
        min_loss_scaling: The floor, which may be below 1.
        factor: The factor by which the scale grows, larger than 1.
        period: Good steps until the scale grows.
        counter: Good steps already counted, for programs that pass it; 0 if None.
        backoff: The factor by which the scale falls, between 0 and 1; `1 / factor` if
            None.
        max_loss_scaling: The cap, a power of two. By default 32768, or the largest
            power of two not above `loss_scaling` if that is more (at most 2^126). Set
            more than 32768 only for a float32 loss, where the scale is never cast to
            float16.
        hysteresis: Skipped steps in a row until the scale falls.

    Raises:
        ValueError: A factor of 1 or less, a backoff outside (0, 1), a period or
            hysteresis below 1, a negative counter, a scale that is zero, negative, NaN,
            infinite, a bool or not a scalar, a cap that is not a power of two, or not
            `min_loss_scaling <= loss_scaling <= max_loss_scaling`. The message names
            argument and value.

    At the edges: growth stops at the cap, also where the scaled value would overflow. A
    non-finite step at the floor leaves the scale there and is counted in `floored`, and
    `mpx.check` raises. Traced arguments are not checked.

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
            loss_scaling, "loss_scaling", cls, jnp.float32, start
        )
        self.min_loss_scaling = scale_value(min_loss_scaling, "min_loss_scaling", cls)
        self.factor = number(factor, "factor", cls, jnp.float32, above_one)
        self.period = number(period, "period", cls, jnp.int32, count)
        counter = 0 if counter is None else counter
        self.counter = number(counter, "counter", cls, jnp.int32, not_negative)
        if backoff is None:
            self.backoff = 1 / self.factor
        else:
            self.backoff = number(backoff, "backoff", cls, jnp.float32, in_zero_one)
        if max_loss_scaling is None:
            self.max_loss_scaling = _default_cap(self.loss_scaling)
            self.loss_scaling = jnp.minimum(self.loss_scaling, self.max_loss_scaling)
        else:
            self.max_loss_scaling = number(
                max_loss_scaling, "max_loss_scaling", cls, jnp.float32, power_of_two
            )
        self.hysteresis = number(hysteresis, "hysteresis", cls, jnp.int32, count)
        self.hysteresis_left = self.hysteresis - 1
        self.floored = jnp.zeros((), jnp.int32)
        self.record = StepRecord()
        # Values are read, which inside of a transform are not known.
        if not isinstance(self.loss_scaling, Tracer):
            self._validate()

    @property
    def loss_scale(self) -> AnyArray:
        """The scale that the next loss is multiplied by, float32."""
        return self.loss_scaling

    def adjust(
        self,
        grads_finite: BoolLike,
        *,
        places_finite: Bool[Array, " n"] | None = None,
        loss_finite: BoolLike | None = None,
    ) -> Self:
        """Returns the state after one step; see the class for the equations.

        Arguments and errors are those of `AbstractLossScaling.adjust`.
        """
        finite, loss_finite = judged(self, grads_finite, loss_finite)
        return _adjusted(self, finite, places_finite, loss_finite)

    def with_loss_scale(self, loss_scale: ScalarLike) -> Self:
        """Returns a copy that uses another scale from the next step on.

        Args:
            loss_scale: The scale, a positive number.

        Returns:
            The new state, whose window of good steps starts again.

        Raises:
            ValueError: The scale is not between the floor and the cap.
        """
        value = scale_value(loss_scale, "loss_scale", type(self))
        new = replaced(self, loss_scaling=value, counter=jnp.zeros((), jnp.int32))
        if not any(isinstance(x, Tracer) for x in jax.tree.leaves(new)):
            new._validate()
        return new

    def _at_scale(self, scale: FloatScalar) -> Self:
        return replaced(self, loss_scaling=scale)

    def _lowered(self) -> FloatScalar:
        return jax.lax.max(self.loss_scaling * self.backoff, self.min_loss_scaling)

    def _backed_off(self) -> Self:
        zero = jnp.zeros((), jnp.int32)
        return replaced(self, loss_scaling=self._lowered(), counter=zero)

    def _why_stuck(self) -> str | None:
        why = super()._why_stuck()
        if why is None and int(self.floored) > 0:
            why = (
                f"{int(self.floored)} steps were non-finite at the floor of the loss "
                f"scale, {float(self.min_loss_scaling):g}: a smaller scale does not "
                "help"
            )
        return why

    def _validate(self) -> None:
        super()._validate()
        low, scale, cap = (
            np.asarray(x)
            for x in (self.min_loss_scaling, self.loss_scaling, self.max_loss_scaling)
        )
        if not np.all((low > 0) & (low <= scale) & (scale <= cap) & (cap < np.inf)):
            raise ValueError(
                "`mpx.DynamicLossScaling` needs `min_loss_scaling <= loss_scaling "
                f"<= max_loss_scaling`; got {low}, {scale}, {cap}. Set a cap above "
                "32768 only for float32 losses: `max_loss_scaling=2.0**24`."
            )
        for name, valid in (
            ("factor", above_one),
            ("backoff", in_zero_one),
            ("period", count),
            ("counter", not_negative),
            ("hysteresis", count),
            ("hysteresis_left", not_negative),
        ):
            valid(np.asarray(getattr(self, name)), name, type(self))
        left, most = np.asarray(self.hysteresis_left), np.asarray(self.hysteresis) - 1
        must = f"at most `hysteresis - 1`, which is {most}"
        require(left <= most, left, "hysteresis_left", type(self), must)


# Jitted, so that its two dozen scalar operations are traced once and not in each step.
@jax.jit
def _adjusted(
    scaling: DynamicLossScaling,
    finite: BoolScalar,
    places_finite: Array | None,
    loss_finite: BoolScalar | None,
) -> DynamicLossScaling:
    # `select` and not `jnp.where`, which is a function of its own to be traced.
    select, zero = jax.lax.select, jnp.zeros((), jnp.int32)
    tolerance = scaling.hysteresis - 1
    is_full = scaling.hysteresis_left >= tolerance
    good_steps = select(is_full, counted(scaling.counter), zero)
    grows = good_steps >= scaling.period
    # min also turns an overflow of the product into the cap.
    grown = jax.lax.min(scaling.loss_scaling * scaling.factor, scaling.max_loss_scaling)
    falls = scaling.hysteresis_left <= 0
    is_floored = falls & (scaling.loss_scaling <= scaling.min_loss_scaling)
    # What each field becomes after a good step, and after one that overflowed.
    after = {
        "loss_scaling": (
            select(grows, grown, scaling.loss_scaling),
            select(falls, scaling._lowered(), scaling.loss_scaling),
        ),
        "counter": (select(grows, zero, good_steps), zero),
        "hysteresis_left": (tolerance, jax.lax.max(scaling.hysteresis_left - 1, zero)),
        "floored": (zero, select(is_floored, counted(scaling.floored), zero)),
    }
    # A loss that is not finite before it is scaled is so at every scale: the step is
    # bad, and says nothing about the scale.
    is_telling = finite | loss_was_finite(places_finite, loss_finite)
    fields = {
        name: select(is_telling, select(finite, good, bad), getattr(scaling, name))
        for name, (good, bad) in after.items()
    }
    record = advance_record(
        scaling.record, finite, places_finite, loss_finite, scaling.loss_scaling
    )
    return replaced(scaling, record=record, **fields)


def _default_cap(loss_scaling: FloatScalar) -> FloatScalar:
    # frexp, not log2, which is inexact: x = m 2^e with m in [0.5, 1).
    _, exponent = jnp.frexp(loss_scaling)
    below = jnp.ldexp(jnp.ones((), jnp.float32), exponent - 1)
    return jnp.clip(below, LARGEST_FLOAT16_SCALE, LARGEST_SCALE)
