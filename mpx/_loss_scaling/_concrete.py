"""The loss scalings: dynamic, static, none; and the checks of their arguments."""

import math
from collections.abc import Callable
from typing import Any, Literal, Self

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Float32, Int32

from .._base.errors import describe
from .._base.typing import AnyArray, BoolLike, BoolScalar, FloatScalar, ScalarLike
from ._abstract import AbstractLossScaling, judged
from ._state_dict import StepRecord, advance_record, counted, loss_was_finite, replaced

# --- Checks of numbers that a user passes or a checkpoint contains --------------------

# A scale and its inverse must both be normal float32 numbers: XLA may flush subnormal
# ones to zero, and dividing a gradient by a flushed number destroys it.
SMALLEST_SCALE = 2.0**-126
LARGEST_SCALE = 2.0**126


def scale_value(value: ScalarLike, name: str, owner: type) -> FloatScalar:
    """Converts a user's scale to a new float32 scalar."""
    return number(value, name, owner, jnp.float32, scale_in_range)


def number(
    value: Any, name: str, owner: type, dtype: Any, validate: Callable[..., None]
) -> Array:
    """Converts a user's number; its value is checked unless it is traced."""
    is_array = isinstance(value, jax.Array | np.ndarray | np.generic)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (is_number or (is_array and jnp.issubdtype(value.dtype, np.number))) or (
        is_array
        and (value.ndim != 0 or jnp.issubdtype(value.dtype, np.complexfloating))
    ):
        raise ValueError(
            f"`{name}` of `mpx.{owner.__name__}` must be one real number; got "
            f"{describe(value)}."
        )
    if not isinstance(value, Tracer):
        validate(np.asarray(value, np.float64), name, owner)
    # A copy: the state's buffers may be donated, the user's must survive that.
    return jnp.array(value, dtype, copy=True)


def scale_in_range(value: np.ndarray, name: str, owner: type) -> None:
    """Raises unless a scale is finite and positive, and its inverse normal."""
    if not np.all((value >= SMALLEST_SCALE) & (value <= LARGEST_SCALE)):
        raise ValueError(
            f"`{name}` of `mpx.{owner.__name__}` must be a positive, finite scale "
            "between 2^-126 and 2^126, so that it and its inverse are normal float32 "
            f"numbers; got {value}."
        )


def require(valid: Any, value: np.ndarray, name: str, owner: type, must: str) -> None:
    """Raises unless all numbers are valid."""
    if not np.all(valid):
        raise ValueError(
            f"`{name}` of `mpx.{owner.__name__}` must be {must}; got "
            f"{describe_all(value)}."
        )


def describe_all(value: np.ndarray) -> str:
    """Formats a number, or the shape and values of several."""
    return str(value) if value.ndim == 0 else f"{describe(value)} {value}"


def start(value: np.ndarray, name: str, owner: type) -> None:
    """Raises for an invalid initial scale; one above the largest is lowered to it."""
    scale_in_range(np.asarray(np.minimum(value, LARGEST_SCALE)), name, owner)
    require(value < np.inf, value, name, owner, "finite")


def above_one(value: np.ndarray, name: str, owner: type) -> None:
    """Raises unless a factor makes a scale grow."""
    valid = (value > 1) & (value < np.inf)
    require(valid, value, name, owner, "a finite number larger than 1")


def in_zero_one(value: np.ndarray, name: str, owner: type) -> None:
    """Raises unless a factor makes a scale fall."""
    require((value > 0) & (value < 1), value, name, owner, "between 0 and 1")


def count(value: np.ndarray, name: str, owner: type) -> None:
    """Raises unless it is a number of steps, at least 1."""
    valid = (value >= 1) & (value < 2**31) & (value == np.floor(value))
    require(valid, value, name, owner, "a whole number, at least 1")


def not_negative(value: np.ndarray, name: str, owner: type) -> None:
    """Raises unless it is a number of steps, at least 0."""
    valid = (value >= 0) & (value < 2**31) & (value == np.floor(value))
    require(valid, value, name, owner, "a whole number, at least 0")


def power_of_two(value: np.ndarray, name: str, owner: type) -> None:
    """Raises unless a bound is a power of two, with which scaling is exact."""
    valid = (value > 0) & (value <= LARGEST_SCALE)
    valid &= np.frexp(np.where(valid, value, 1))[0] == 0.5
    nearest = (
        f" (the one below: {2.0 ** math.floor(math.log2(value))})"
        if value.ndim == 0 and 0 < value < np.inf
        else ""
    )
    must = f"a power of two of at most 2^126, so that scaling is exact{nearest}"
    require(valid, value, name, owner, must)


# --- A scale that searches for the largest value with finite gradients ----------------

# The largest power of two that float16 represents. The backward pass of a float16 loss
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
        # Reads values, which are unknown inside a transform.
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


# Jitted, so its two dozen scalar operations are traced once, not in each step.
@jax.jit
def _adjusted(
    scaling: DynamicLossScaling,
    finite: BoolScalar,
    places_finite: Array | None,
    loss_finite: BoolScalar | None,
) -> DynamicLossScaling:
    # Not `jnp.where`, which is a function to be traced.
    select, zero = jax.lax.select, jnp.zeros((), jnp.int32)
    tolerance = scaling.hysteresis - 1
    is_full = scaling.hysteresis_left >= tolerance
    good_steps = select(is_full, counted(scaling.counter), zero)
    grows = good_steps >= scaling.period
    # min also turns an overflow of the product into the cap.
    grown = jax.lax.min(scaling.loss_scaling * scaling.factor, scaling.max_loss_scaling)
    falls = scaling.hysteresis_left <= 0
    is_floored = falls & (scaling.loss_scaling <= scaling.min_loss_scaling)
    # Each field after a good step, and after one that overflowed.
    after = {
        "loss_scaling": (
            select(grows, grown, scaling.loss_scaling),
            select(falls, scaling._lowered(), scaling.loss_scaling),
        ),
        "counter": (select(grows, zero, good_steps), zero),
        "hysteresis_left": (tolerance, jax.lax.max(scaling.hysteresis_left - 1, zero)),
        "floored": (zero, select(is_floored, counted(scaling.floored), zero)),
    }
    # A loss that is non-finite before scaling is so at every scale: the step is bad,
    # but the scale is not the cause.
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
    # Not log2, which is inexact. frexp: x = m 2^e with m in [0.5, 1).
    _, exponent = jnp.frexp(loss_scaling)
    below = jnp.ldexp(jnp.ones((), jnp.float32), exponent - 1)
    return jnp.clip(below, LARGEST_FLOAT16_SCALE, LARGEST_SCALE)


# --- Scales that never change ---------------------------------------------------------


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
            changes. With `"loss"` the loss alone decides, which is known before the
            backward pass begins, and elements of gradients that are not finite are set
            to zero. Not for float16.

    Raises:
        TypeError: `skip` is not True, False or `"loss"`; an array is not allowed,
            because it must be known when the step is traced.

    A decision by the gradients needs all of them before the first weight changes. So
    XLA's compiler for TPUs cannot compute the optimizer in the kernels of gradients,
    and moves up to 7 % more bytes, unless the step clips by the global norm. The loss
    is known before the backward pass begins. `zeroed` counts the steps with a finite
    loss in which elements of gradients were set to zero: a NaN from a layer's
    derivative reaches all layers before it, and in these steps they do not learn.

    Examples:
        >>> import mpx
        >>> float(mpx.NoLossScaling().loss_scale)
        1.0
    """

    record: StepRecord
    skip: bool | Literal["loss"] = eqx.field(static=True)
    zeroed: Int32[Array, ""] | None

    def __init__(self, skip: bool | Literal["loss"] = True) -> None:
        is_loss = isinstance(skip, str) and skip == "loss"
        if not isinstance(skip, bool) and not is_loss:
            raise TypeError(
                '`skip` of `mpx.NoLossScaling` must be True, False or "loss", known '
                f"when the step is traced; got {describe(skip)}."
            )
        self.record = StepRecord()
        self.skip = skip
        self.zeroed = jnp.zeros((), jnp.int32) if is_loss else None

    @property
    def loss_scale(self) -> AnyArray:
        """One, float32."""
        return jnp.ones((), jnp.float32)

    @property
    def _is_stateful(self) -> bool:
        return self.skip is not False

    @property
    def _by_loss(self) -> bool:
        return self.zeroed is not None

    def _noted(self, is_zeroed: BoolScalar) -> Self:
        """Returns the state after a step, with elements set to zero or without."""
        steps: Any = self.zeroed
        steps = jax.lax.select(is_zeroed, counted(steps), steps)
        return replaced(self, zeroed=steps)

    @property
    def _is_one(self) -> bool:
        return True
