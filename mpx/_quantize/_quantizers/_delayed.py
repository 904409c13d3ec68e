"""Delayed scaling: scales from the amaxes of earlier steps.

Current scaling reads an array twice, once for its amax and once to quantize it. Delayed
scaling quantizes with a scale known before, and takes the amax in the same pass. So it
has a state, which one pure function updates.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, Protocol, TypeAlias, cast

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32

from ..._base.errors import describe
from ..._base.typing import FloatScalar
from .._formats._blocks import LARGEST_SCALE, Join, as_cotangent, refuse_batching
from .._formats._format import Format, check_flags
from .._formats._rounding import SMALLEST_FLOAT32, largest_magnitude
from .._formats._target import Target
from ._casting import amax_in_parts, amax_of
from ._kinds import Quantizer
from ._recipes import (
    AbstractRecipe,
    Float8CurrentScaling,
    Leg,
    Role,
    check_fp8_format,
    format_of,
)

AmaxAlgorithm: TypeAlias = str | Callable[[Array], Array]
# Perhaps with its inverse.
Scale: TypeAlias = Array | tuple[Array, Array]


class DelayedScalingState(eqx.Module):
    """The state of delayed scaling for one array: past amaxes and the scale.

    An immutable PyTree of two arrays. `mpx.DelayedScaling.init` returns the first one,
    `mpx.DelayedScaling.update` the next one.

    Attributes:
        amax_history: float32; first the slot of the next amax, then amaxes from the
            oldest to the newest.
        scale: float32, the scale of the next step.
    """

    amax_history: Float32[Array, " length"]
    scale: FloatScalar


class RecipeWithState(Protocol):
    """The interface of a recipe with `has_state`; see the members of `DelayedScaling`.

    Attributes:
        warm_start: Whether a scale of 0 means: compute it from the current array.
    """

    @property
    def warm_start(self) -> bool: ...

    def init(self) -> DelayedScalingState:
        """Returns the state of a slot before the first step."""
        ...

    def update(
        self, state: DelayedScalingState, amax: Array, role: Role
    ) -> DelayedScalingState:
        """Returns the state after a step, from the amax measured in it."""
        ...

    def _scale(self, amax: Array, role: Role, otherwise: Array | float) -> Array: ...


@dataclasses.dataclass(frozen=True)
class DelayedScaling(AbstractRecipe):
    r"""FP8 with one scale per array, from the amaxes of earlier steps.

    $$q = \mathrm{sat}(\mathrm{round}(x \cdot s)) \qquad
    x \approx q \cdot (1 / s) \qquad
    s' = \frac{\mathrm{MAX}}{a} \cdot 2^{-\mathrm{margin}}$$

    where $s$ is the scale of the state, $s'$ that of the next one, and $a$ the largest
    amax of the history, this step's included. `update` has every detail.

    The scale starts at 1, which flushes small gradients to zero (in E5M2 those below
    $2^{-17}$), and so those of earlier layers. In training, arrays that were zero in
    all steps take a scale from the largest amax of their role: gradients of all layers
    arrive in the second step. With `warm_start=True` it starts at 0, which means:
    computed from the array itself, as in current scaling. That reads it once more.

    Args:
        margin: Keeps scaled values this many powers of two below MAX, for arrays that
            grow.
        fp8_format: `Format.HYBRID` (E4M3, for gradients E5M2) or `Format.E4M3`.
        amax_history_len: The length of the amax history.
        amax_compute_algo: "max" of the history, "most_recent" for this step's amax, or
            a function from the history (float32, this step's amax first) to one amax.
        warm_start: Whether the first step computes its scales from the arrays. With
            `mpx.quantization.quantize` omit `scale` while it is 0.
        backward_override: Must be None: a high-precision backward pass would have no
            amaxes of gradients. Transformer Engine allows no other value either.
        reduce_amax: Must be True: an array sharded over several devices has one amax,
            and so one scale.
        fp8_dpa: See `mpx.quantization.AbstractRecipe`.

    Raises:
        TypeError: An option is of the wrong kind.
        ValueError: An option has a value that is not listed.

    Source: NVIDIA, Transformer Engine's documentation, FP8 delayed scaling.

    Examples:
        >>> import jax.numpy as jnp, mpx
        >>> from mpx.quantization import Role, quantize
        >>> recipe = mpx.DelayedScaling(amax_history_len=16)
        >>> state = recipe.init()
        >>> x = jnp.array([7.0, -3.5])
        >>> q = quantize(x, recipe.quantizer(Role.INPUT), scale=state.scale)
        >>> state = recipe.update(state, jnp.abs(x).max(), Role.INPUT)
        >>> float(state.scale)
        64.0
    """

    has_state: ClassVar[bool] = True
    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: AmaxAlgorithm = "max"
    warm_start: bool = False
    reduce_amax: bool = dataclasses.field(default=True, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fp8_format(self)
        check_flags(self, "warm_start", "reduce_amax")
        if not self.reduce_amax:
            raise ValueError(
                "`reduce_amax` of `mpx.DelayedScaling` must be True, because a "
                "sharded array has one scale; got False. Omit it."
            )
        for name in ("margin", "amax_history_len"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(
                    f"`{name}` of `mpx.DelayedScaling` must be an integer; got "
                    f"{value!r}."
                )
        if self.amax_history_len < 1:
            raise ValueError(
                "`amax_history_len` of `mpx.DelayedScaling` must be at least 1; got "
                f"{self.amax_history_len!r}."
            )
        if not -64 <= self.margin <= 64:
            raise ValueError(
                "`margin` of `mpx.DelayedScaling` must be between -64 and 64; got "
                f"{self.margin!r}."
            )
        algorithm = self.amax_compute_algo
        if algorithm not in ("max", "most_recent") and not callable(algorithm):
            raise ValueError(
                "`amax_compute_algo` of `mpx.DelayedScaling` must be 'max', "
                "'most_recent' or a function from the history to an amax; got "
                f"{algorithm!r}."
            )
        if self.backward_override is not None:
            raise ValueError(
                "`backward_override` of `mpx.DelayedScaling` must be None; got "
                f"{self.backward_override!r}. Use `mpx.Float8CurrentScaling`."
            )

    def _quantizer(self, role: Role, leg: Leg) -> Quantizer:
        return Quantizer(format_of(self.fp8_format, role), scale_from="history")

    def _without_state(self) -> AbstractRecipe:
        return Float8CurrentScaling(self.fp8_format)

    def init(self) -> DelayedScalingState:
        """Returns the first step's state: amaxes of zero, and a scale of 1 or 0."""
        history = jnp.zeros(self.amax_history_len, jnp.float32)
        scale = 0.0 if self.warm_start else 1.0
        return DelayedScalingState(history, jnp.full((), scale, jnp.float32))

    def update(
        self, state: DelayedScalingState, amax: Array, role: Role
    ) -> DelayedScalingState:
        r"""Returns the state after a step, from the amax measured in it.

        In this order:

        $$h_0 \leftarrow \mathrm{amax}, \qquad a = \max(h) \text{ or } h_0, \qquad
        s' = \frac{\mathrm{MAX} / a}{2^{\mathrm{margin}}}, \qquad
        h \leftarrow \mathrm{roll}(h, -1), \qquad h_0 \leftarrow 0$$

        Where $a$ is zero (or subnormal) or non-finite, the scale is unchanged. Scales
        are between $2^{-126}$ and $2^{126}$. An infinite or NaN amax comes from a step
        that is skipped, and leaves the state unchanged: in the history it would block
        the scale until it has left the history.

        Pure, to be jitted with the rest of the step; `jax.vmap` updates stacked states.

        Args:
            state: The state that the step was computed with.
            amax: The largest magnitude in the array, a scalar; stored as float32.
            role: The role of the array, which gives the largest number of its format.

        Returns:
            The next state.

        Raises:
            TypeError: `role` is not a role.
            ValueError: `amax` is not a scalar, or the function of `amax_compute_algo`
                did not return one.
        """
        amax = _one_number(amax, "`amax` of `mpx.DelayedScaling.update`")
        history = state.amax_history.at[0].set(amax)
        scale = self._scale(self._chosen(history), role, state.scale)
        history = jnp.roll(history, -1).at[0].set(0.0)
        is_good = amax < jnp.inf
        return DelayedScalingState(
            jnp.where(is_good, history, state.amax_history),
            jnp.where(is_good, scale, state.scale),
        )

    def _scale(self, amax: Array, role: Role, otherwise: Array | float) -> Array:
        """Returns the scale of an amax; `otherwise` if that is zero or non-finite."""
        usable = (amax >= SMALLEST_FLOAT32) & (amax < jnp.inf)
        scale = format_of(self.fp8_format, role).largest / jnp.where(usable, amax, 1.0)
        scale = jnp.clip(scale / 2.0**self.margin, SMALLEST_FLOAT32, LARGEST_SCALE)
        return jnp.where(usable, scale, otherwise)

    def _chosen(self, history: Array) -> Array:
        if self.amax_compute_algo == "max":
            return largest_magnitude(history)
        if isinstance(self.amax_compute_algo, str):
            return history[0]
        chosen = self.amax_compute_algo(history)
        return _one_number(chosen, "The result of `amax_compute_algo`")


@dataclasses.dataclass(frozen=True)
class RecipeByLeg(AbstractRecipe):
    r"""Another recipe for each of the three matmuls of a linear layer.

    $$y = Q_1(x)\,Q_1(w) \qquad dx = Q_2(g)\,Q_2(w)^T \qquad dw = Q_3(x)^T\,Q_3(g)$$

    Args:
        forward: The recipe of the output; None: high precision.
        dgrad: The recipe of the gradient of the input, or None.
        wgrad: The recipe of the gradient of the weight, or None.
        fp8_dpa: See `mpx.quantization.AbstractRecipe`.

    Raises:
        TypeError: One of them is neither a recipe nor None.
        ValueError: `backward_override` is set, here or in one of them; or two of them
            are different recipes with a state, since an array has one state.

    Examples:
        >>> import mpx
        >>> from mpx.quantization import Leg, RecipeByLeg, Role
        >>> fp8 = mpx.Float8CurrentScaling()
        >>> recipe = RecipeByLeg(forward=fp8, dgrad=fp8, wgrad=None)
        >>> recipe.quantizer(Role.INPUT, leg=Leg.WGRAD) is None
        True
    """

    forward: AbstractRecipe | None = dataclasses.field(default=None, kw_only=True)
    dgrad: AbstractRecipe | None = dataclasses.field(default=None, kw_only=True)
    wgrad: AbstractRecipe | None = dataclasses.field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        for leg in Leg:
            recipe = self._of(leg)
            if not isinstance(recipe, AbstractRecipe | None):
                raise TypeError(
                    f"`{leg.value}` of `mpx.quantization.RecipeByLeg` must be a recipe "
                    f"or None; got {recipe!r}."
                )
        recipes = [one for one in map(self._of, Leg) if one is not None]
        if any(one.backward_override for one in (self, *recipes)):
            raise ValueError(
                "`backward_override` of recipes in `mpx.quantization.RecipeByLeg` must "
                f"be None; got {self!r}. Set `dgrad` and `wgrad` to None instead."
            )
        if len({one for one in recipes if one.has_state}) > 1:
            raise ValueError(
                "The recipes with a state in `mpx.quantization.RecipeByLeg` must be "
                f"equal, since an array has one state; got {self!r}."
            )

    def _of(self, leg: Leg) -> AbstractRecipe | None:
        return getattr(self, leg.value)

    def _quantizer(self, role: Role, leg: Leg) -> Quantizer | None:
        recipe = self._of(leg)
        return None if recipe is None else recipe.quantizer(role, leg=leg)

    def _stateful(self) -> Any:
        """Returns the recipe that has a state, or None."""
        recipes = (one for one in map(self._of, Leg) if one is not None)
        return next((one for one in recipes if one.has_state), None)

    @property
    def has_state(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether one of the recipes has a state."""
        return self._stateful() is not None

    @property
    def warm_start(self) -> bool:
        """Whether a scale of 0 means: compute it from the current array."""
        return self._stateful().warm_start

    def init(self) -> DelayedScalingState:
        """Returns the state of a slot before the first step."""
        return self._stateful().init()

    def update(
        self, state: DelayedScalingState, amax: Array, role: Role
    ) -> DelayedScalingState:
        """Returns the state after a step, from the amax measured in it."""
        return self._stateful().update(state, amax, role)

    def _scale(self, amax: Array, role: Role, otherwise: Array | float) -> Array:
        return self._stateful()._scale(amax, role, otherwise)

    def _without_state(self) -> AbstractRecipe:
        legs = {leg.value: self._of(leg) for leg in Leg}
        return dataclasses.replace(
            self, **{key: x and x._without_state() for key, x in legs.items()}
        )


def _one_number(value: Array, name: str) -> Array:
    value = jax.lax.stop_gradient(jnp.asarray(value, jnp.float32))
    if value.shape:
        raise ValueError(
            f"{name} must be a scalar; got shape {value.shape}. Use `jax.vmap` for "
            "stacked states, `jnp.max` to combine amaxes."
        )
    return value


# --- Slots: three scales into one product, three amaxes out of it ---------------------
#
# Scales are float32[3] in the order of `Role`. The amaxes are returned as the cotangent
# of the scales, although they are not a gradient: JAX carries only cotangents from the
# backward pass to the caller.

_ROLES = tuple(Role)


def check_scales(recipe: AbstractRecipe, scales: object) -> None:
    """Raises `TypeError` unless scales match the recipe: float32[3], or None."""
    if not recipe.has_state:
        if scales is None:
            return
        raise TypeError(
            "`scales` of a matmul are only for `mpx.DelayedScaling`; got "
            f"{describe(scales)} for `mpx.{type(recipe).__name__}`. Omit them."
        )
    if not recipe._has_history():
        raise ValueError(
            f"`mpx.{type(recipe).__name__}` has a state, and no quantizer that uses "
            "it. Return `mpx.quantization.Quantizer(..., scale_from='history')`."
        )
    shape, dtype = getattr(scales, "shape", None), getattr(scales, "dtype", None)
    has_roles = shape is not None and len(shape) == 1 and shape[0] % 3 == 0
    if not has_roles or dtype != jnp.float32:
        raise TypeError(
            "`scales` of a matmul must be float32[3] for `mpx.DelayedScaling`: of "
            f"input, weight and gradient; got {describe(scales)}."
        )


def amax_and_scale(
    recipe: AbstractRecipe,
    target: Target,
    join: Join,
    role: Role,
    x: Array,
    scales: Array | None,
    parts: int,
) -> tuple[Array | None, Scale | None]:
    """Returns the amax of an array and its scale; None and None without slots.

    Args:
        recipe: The recipe; it has a state if there are scales.
        target: The device.
        join: Joins amaxes over devices.
        role: The role of the array, which selects the slot.
        x: The array.
        scales: The slots. A scale of 0, the initial one of a warm start, is replaced by
            that of the amax, or by 1 if the recipe has no warm start. It is NaN if the
            amax is non-finite.
        parts: The number of parts of the amax.

    The scale is a pair with its inverse if the slots have that.
    """
    if scales is None:
        return None, None
    if not recipe._has_history(role):  # 0 leaves the state as it is
        return jnp.zeros((), jnp.float32), None
    place, room = _ROLES.index(role), scales.size // len(_ROLES)
    amax = amax_of(target, x) if parts == 1 else amax_in_parts(target, x, parts)
    amax = refuse_batching(join(amax), scales)
    given = scales[place * room]
    # Without a warm start no operation may wait for the amax, so that XLA can fuse
    # quantizing an array into the operations that make it.
    first, stateful = 1.0, cast(RecipeWithState, recipe)
    if stateful.warm_start:
        whole = largest_magnitude(amax) if amax.ndim else amax
        first = stateful._scale(whole, role, jnp.where(whole < jnp.inf, 1.0, jnp.nan))
    scale = jnp.where(given == 0, first, given)
    if room == 1:
        return amax, scale
    return amax, (scale, jnp.where(given == 0, 1 / first, scales[place * room + 1]))


def filled(amax: Array, room: int) -> Array:
    """Returns an amax, or those of parts, in the shape of a slot."""
    if not amax.ndim:
        return jnp.broadcast_to(amax, room)
    return jnp.pad(amax, (0, room - amax.size))


def amax_cotangent(
    amaxes: tuple[Array | None, ...],
    room: int,
    scales: Array | None,
    summed_axes: tuple[str, ...],
) -> Array | None:
    """Returns the cotangent of the slots, for a backward rule.

    Args:
        amaxes: The amaxes of input, weight and gradient.
        room: The room for each in the slots.
        scales: The slots.
        summed_axes: See `as_cotangent`.
    """
    each = [x for x in amaxes if x is not None]
    if scales is None or len(each) < len(_ROLES):
        return None
    if room == 1:
        return as_cotangent(jnp.stack(each), scales, summed_axes)
    joined = jnp.concatenate([filled(x, room) for x in each])
    return as_cotangent(joined, scales, summed_axes)
