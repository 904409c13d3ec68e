"""`RecipeScaling`: a loss scaling together with the state of recipes.

The state of delayed scaling is a history of amaxes and a scale for each of input,
weight and gradient of each *slot*: a weight, in one way of using it. Slots of a weight
that a scan cuts into layers are stacked. All slots with the same recipe stand in one
array, so that one update serves them all, however many layers there are.
"""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any, Self

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32

from .._autocast import Request, SlotName, providing
from .._errors import describe, listing
from .._loss_scaling import AbstractLossScaling, StepRecord
from .._quantize import AbstractRecipe, DelayedScaling, DelayedScalingState, Role
from .._typing import BoolLike, FloatScalar

_ROLES = tuple(Role)
_VERSION = 1


class DelayedScales(eqx.Module):
    """The state of all slots that share a recipe.

    Attributes:
        amax_history: Past amaxes, as in `mpx.DelayedScalingState`; rows are slots,
            columns input, weight and gradient.
        scale: What to multiply by at the next step.
        recipe: The recipe.
        slots: The name of each slot, and the lengths of the scans that cut it.
    """

    amax_history: Float32[Array, "slots 3 length"]
    scale: Float32[Array, "slots 3"]
    recipe: DelayedScaling = eqx.field(static=True)
    slots: tuple[tuple[SlotName, tuple[int, ...]], ...] = eqx.field(static=True)

    @classmethod
    def new(cls, recipe: DelayedScaling, requests: Mapping[SlotName, Request]) -> Self:
        """The state before the first step."""
        slots = tuple((name, request.lengths) for name, request in requests.items())
        rows = sum(math.prod(lengths) for _, lengths in slots)
        state = recipe.init()
        return cls(
            jnp.tile(state.amax_history, (rows, len(_ROLES), 1)),
            jnp.tile(state.scale, (rows, len(_ROLES))),
            recipe,
            slots,
        )

    @property
    def largest(self) -> np.ndarray:
        """What amaxes of input, weight and gradient are scaled to, float32[3]."""
        unit = jnp.ones((), jnp.float32)
        return np.asarray([self.recipe._scale(unit, role, 0.0) for role in _ROLES])

    def by_slot(self, x: Array) -> dict[SlotName, Array]:
        """The rows of an array by slot, stacked as its scans want them."""
        found, start = {}, 0
        for name, lengths in self.slots:
            rows = math.prod(lengths)
            found[name] = x[start : start + rows].reshape(*lengths, *x.shape[1:])
            start += rows
        return found

    def from_slots(self, by_slot: Mapping[SlotName, Array]) -> Array:
        """The inverse of `by_slot`."""
        parts = [by_slot[name] for name, _ in self.slots]
        depths = [len(lengths) for _, lengths in self.slots]
        return jnp.concatenate(
            [x.reshape(-1, *x.shape[d:]) for x, d in zip(parts, depths, strict=True)]
        )

    def updated(self, amaxes: Float32[Array, "slots 3"]) -> Self:
        """The state after a step with these amaxes."""

        def update(role: Role, history: Array, scale: Array, amax: Array) -> Any:
            state = DelayedScalingState(history, scale)
            new = self.recipe.update(state, amax, role)
            return new.amax_history, new.scale

        columns = [
            jax.vmap(functools.partial(update, role))(
                self.amax_history[:, i], self.scale[:, i], amaxes[:, i]
            )
            for i, role in enumerate(_ROLES)
        ]
        histories, scales = zip(*columns, strict=True)
        return dataclasses.replace(
            self,
            amax_history=jnp.stack(histories, axis=1),
            scale=jnp.stack(scales, axis=1),
        )


class RecipeScaling(AbstractLossScaling):
    r"""A loss scaling, and the scales and amaxes of the recipes of a function.

    `mpx.init_scaling` makes it for a function that `mpx.autocast` made with
    `mpx.DelayedScaling`; a training step treats it like any other scaling. What is
    written there about `loss_scale`, `skipped` and the other counters holds for `loss`
    in it. The scales are those of the next step: they change with each good step, and
    a step that is skipped leaves them and the histories as they were.

    Attributes:
        loss: The loss scaling: `NoLossScaling()` unless anything runs in float16.
        scales: The state of recipes, one for each recipe.
        amaxes: The amaxes of the latest step, before `adjust` has taken them in; zeros
            after.
        calls: How many calls of autocast functions there are in one step.
    """

    loss: AbstractLossScaling
    scales: tuple[DelayedScales, ...]
    amaxes: tuple[Float32[Array, "slots 3"], ...]
    calls: int = eqx.field(static=True)

    def __init__(
        self,
        loss: AbstractLossScaling,
        scales: tuple[DelayedScales, ...],
        amaxes: tuple[Array, ...],
        calls: int,
    ) -> None:
        self.loss, self.scales = loss, scales
        self.amaxes, self.calls = amaxes, calls

    @classmethod
    def _new(
        cls, loss: AbstractLossScaling, requests: Mapping[SlotName, Request], calls: int
    ) -> Self:
        """The state before the first step, of slots that were asked for."""
        by_recipe: dict[AbstractRecipe, dict[SlotName, Request]] = {}
        for name, request in requests.items():
            by_recipe.setdefault(request.recipe, {})[name] = request
        scales = tuple(
            DelayedScales.new(recipe, found)
            for recipe, found in by_recipe.items()
            if isinstance(recipe, DelayedScaling)
        )
        return cls(loss, scales, _nothing(scales), calls)

    @property
    def record(self) -> StepRecord:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The counters."""
        return self.loss.record

    @property
    def loss_scale(self) -> FloatScalar:
        """The scale that the next loss is multiplied by, float32."""
        return self.loss.loss_scale

    def scale(self, tree: Any) -> Any:
        """Multiplies by the loss scale. See `AbstractLossScaling.scale`."""
        return self.loss.scale(tree)

    def unscale(self, tree: Any) -> Any:
        """Divides by the loss scale. See `AbstractLossScaling.unscale`."""
        return self.loss.unscale(tree)

    def adjust(
        self,
        grads_finite: BoolLike,
        *,
        places_finite: Bool[Array, " n"] | None = None,
    ) -> Self:
        """The state after one step; `amaxes` go into the histories of a good one.

        See `AbstractLossScaling.adjust`.
        """
        loss = self.loss.adjust(grads_finite, places_finite=places_finite)
        good = jnp.asarray(grads_finite)
        scales = jax.tree.map(
            lambda new, old: jnp.where(good, new, old),
            tuple(s.updated(a) for s, a in zip(self.scales, self.amaxes, strict=True)),
            self.scales,
        )
        return dataclasses.replace(
            self, loss=loss, scales=scales, amaxes=_nothing(self.scales)
        )

    def scales_by_weight(self) -> dict[str, Float32[Array, "... 3"]]:
        """The scales of input, weight and gradient by the name of their slot."""
        return {str(name): x for name, x in self._tokens().items()}

    def _counted(
        self, grads_finite: BoolLike, places_finite: Bool[Array, " n"] | None
    ) -> Self:
        loss = self.loss._counted(grads_finite, places_finite)
        return dataclasses.replace(self, loss=loss)

    def _with_record(self, record: StepRecord) -> Self:
        return dataclasses.replace(self, loss=self.loss._with_record(record))

    def _backed_off(self) -> Self:
        return dataclasses.replace(self, loss=self.loss._backed_off())

    @property
    def _is_stateful(self) -> bool:
        return self.loss._is_stateful

    # --- Keeping it -------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The loss scaling's fields, and scale and history of each slot by its name.

        Recipes are not in it: they belong to the program. `with_state` reads it.
        """
        slots = {
            str(name): {
                "amax_history": np.asarray(history),
                "scale": np.asarray(scale),
                "largest": state.largest,
            }
            for state in self.scales
            for (name, history), scale in zip(
                state.by_slot(state.amax_history).items(),
                state.by_slot(state.scale).values(),
                strict=True,
            )
        }
        return {
            "kind": type(self).__name__,
            "version": _VERSION,
            "loss": self.loss.state_dict(),
            "slots": slots,
        }

    def with_state(self, state: "Mapping[str, Any] | RecipeScaling") -> Self:
        """This scaling with the state of another run, also of another recipe.

        `mpx.init_scaling(func, model, ...)` makes a state for the program of today;
        what an earlier run learned goes into it slot by slot. A history that is longer
        than there is room for loses its oldest amaxes, a shorter one begins with zeros.
        Scales that were found for another format or margin are converted, exactly.
        Continued with the same recipe, a run goes on bit for bit.

        Args:
            state: A `RecipeScaling`, or what its `state_dict()` returned.

        Returns:
            The scaling.

        Raises:
            TypeError: `state` is neither.
            ValueError: It has not the slots of this scaling, or is of a later version.
        """
        call = "`with_state(state)` of `mpx.RecipeScaling`"
        if isinstance(state, RecipeScaling):
            state = state.state_dict()
        if not isinstance(state, Mapping):
            raise TypeError(
                f"{call} needs a `RecipeScaling` or its `state_dict()`; got "
                f"{describe(state)}."
            )
        _check_state(state, {str(n) for s in self.scales for n, _ in s.slots}, call)
        loss = type(self.loss).from_state_dict(state["loss"])
        scales = tuple(_with_slots(s, state["slots"], call) for s in self.scales)
        return dataclasses.replace(self, loss=loss, scales=scales)

    @classmethod
    def _template(cls) -> Self:
        raise ValueError(
            "The state of recipes belongs to a program. Make it for yours, and read "
            "the dictionary into it: `mpx.init_scaling(func, ...).with_state(state)`."
        )

    def __reduce__(self) -> Any:
        scales = [
            (np.asarray(s.amax_history), np.asarray(s.scale), s.recipe, s.slots)
            for s in self.scales
        ]
        amaxes = [np.asarray(x) for x in self.amaxes]
        return _rebuilt, (self.loss, scales, amaxes, self.calls)

    # --- How a step uses it -----------------------------------------------------------

    def _tokens(self) -> dict[SlotName, Array]:
        """What a step is differentiated by to get the amaxes: the scales."""
        return {
            name: x
            for state in self.scales
            for name, x in state.by_slot(state.scale).items()
        }

    def _providing(
        self, tokens: Mapping[SlotName, Array]
    ) -> contextlib.AbstractContextManager[None]:
        return providing(tokens, self.calls)

    def _seen(self, amaxes: Mapping[SlotName, Array]) -> Self:
        """The state that knows the amaxes of the step."""
        return dataclasses.replace(
            self, amaxes=tuple(state.from_slots(amaxes) for state in self.scales)
        )


def _nothing(scales: tuple[DelayedScales, ...]) -> tuple[Array, ...]:
    """Amaxes of which nothing is known."""
    return tuple(jnp.zeros_like(state.scale) for state in scales)


def _rebuilt(loss: Any, scales: Any, amaxes: Any, calls: int) -> RecipeScaling:
    states = tuple(
        DelayedScales(jnp.asarray(history), jnp.asarray(scale), recipe, slots)
        for history, scale, recipe, slots in scales
    )
    return RecipeScaling(loss, states, tuple(map(jnp.asarray, amaxes)), calls)


def _check_state(state: Mapping[str, Any], slots: set[str], call: str) -> None:
    if state.get("kind") != RecipeScaling.__name__ or "slots" not in state:
        raise ValueError(
            f"{call} needs the state of a `RecipeScaling`; got that of "
            f"{state.get('kind')!r}."
        )
    version = state.get("version")
    if not isinstance(version, int | np.integer) or not 1 <= version <= _VERSION:
        raise ValueError(
            f"{call} was given version {version!r}; this mpx reads up to {_VERSION}. "
            "Install a newer mpx."
        )
    given = set(state["slots"])
    if given != slots:
        raise ValueError(
            f"{call} needs exactly the slots of this program; missing: "
            f"{listing(sorted(slots - given)) or 'none'}; unknown: "
            f"{listing(sorted(given - slots)) or 'none'}. Has the model changed?"
        )


def _with_slots(
    state: DelayedScales, slots: Mapping[str, Any], call: str
) -> DelayedScales:
    room = state.recipe.amax_history_len
    histories, scales = {}, {}
    for name, lengths in state.slots:
        saved = slots[str(name)]
        history, scale = np.asarray(saved["amax_history"]), np.asarray(saved["scale"])
        largest, shape = np.asarray(saved["largest"]), (*lengths, len(_ROLES))
        is_whole = scale.shape == shape == history.shape[:-1]
        if not is_whole or largest.shape != (len(_ROLES),):
            raise ValueError(
                f"{call}: the slot {str(name)!r} is of {shape}; got scales of "
                f"{scale.shape} and histories of {history.shape}."
            )
        # All formats' largest numbers differ by powers of two. A scale that no amax
        # has made yet is the recipe's first one.
        is_made = np.any(history > 0, axis=-1)
        scale = np.where(is_made, scale * (state.largest / largest), scale)
        histories[name] = _resized(jnp.asarray(history, jnp.float32), room)
        scales[name] = jnp.asarray(scale, jnp.float32)
    return dataclasses.replace(
        state,
        amax_history=state.from_slots(histories),
        scale=state.from_slots(scales),
    )


def _resized(history: Array, room: int) -> Array:
    """A history with room for more amaxes, or fewer; the newest one stands last."""
    now, past = history[..., :1], history[..., 1:]
    past = past[..., max(0, past.shape[-1] - (room - 1)) :]
    missing = room - 1 - past.shape[-1]
    widths = [(0, 0)] * (past.ndim - 1) + [(missing, 0)]
    return jnp.concatenate([now, jnp.pad(past, widths)], axis=-1)
