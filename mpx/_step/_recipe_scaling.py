"""`RecipeScaling`: a loss scaling together with the state of recipes.

The state of delayed scaling is a history of amaxes and a scale for each of input,
weight and gradient of each *slot*: a weight, in one way of using it. Slots of a weight
that a scan cuts into layers are stacked. All slots with the same recipe are stored in
one array, so one update is enough for any number of layers.
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, Self

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32

from .._base.errors import listing, warn_user
from .._base.typing import AnyArray, BoolLike, FloatScalar, Shape
from .._loss_scaling import AbstractLossScaling, StepRecord
from .._quantize import AbstractRecipe
from .._recipe_state import (
    ProvidedState,
    Request,
    SlotName,
    State,
    StateRequests,
    brief,
    providing_state,
)
from ._delayed_scales import (
    DelayedScales,
    parameter_of,
    read,
    refuse_another_model,
    refuse_unreachable,
    with_slots,
    write,
)


class RecipeScaling(AbstractLossScaling):
    r"""A loss scaling with the scales and amaxes of a function's recipes.

    `mpx.init_scaling` returns it for an autocast function with `mpx.DelayedScaling`; a
    training step treats it like any other scaling. `loss_scale`, `skipped` and the
    other counters are those of `loss`. The scales are those of the next step: they
    change with each good step, and a skipped step leaves them and the histories
    unchanged.

    Attributes:
        loss: The loss scaling: `NoLossScaling()` unless anything runs in float16.
        scales: The states of recipes, one for each recipe.
        amaxes: The amaxes of the latest step until `adjust` adds them to the histories;
            zeros after.
        calls: The number of calls of autocast functions in one step.
        quantized: The uses of weights that recipes quantize. `mpx.inference` with this
            state quantizes the same ones.
        shapes: The shapes of the model's weights by path: a state of another model is
            refused.
        kept: Slots of a recipe that the run has left, as in `state_dict()`: steps leave
            them unchanged, and `with_state` of a scaling that has them takes them back.
    """

    loss: AbstractLossScaling
    scales: tuple[DelayedScales, ...]
    # Each recipe has a different number of slots.
    amaxes: tuple[Float32[Array, "_ 3"], ...]
    calls: int = eqx.field(static=True)
    quantized: tuple[SlotName, ...] = eqx.field(static=True)
    shapes: tuple[tuple[str, Shape], ...] = eqx.field(static=True)
    kept: dict[str, dict[str, Array]]

    @classmethod
    def _new(cls, loss: AbstractLossScaling, found: StateRequests) -> Self:
        """Creates the state before the first step from a function's requests."""
        by_recipe: dict[AbstractRecipe, dict[SlotName, Request]] = {}
        for name, request in found.requests.items():
            by_recipe.setdefault(request.recipe, {})[name] = request
        scales = tuple(
            DelayedScales.new(recipe, found)
            for recipe, found in by_recipe.items()
            if recipe.has_state
        )
        uses, shapes = tuple(found.quantized), tuple(found.shapes.items())
        fields = loss, scales, _nothing(scales), found.calls, uses, shapes, {}
        # Type checkers take `record` for a field.
        return cls(*fields)  # pyright: ignore[reportCallIssue]

    @property
    def record(self) -> StepRecord:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The counters."""
        return self.loss.record

    @property
    def loss_scale(self) -> AnyArray:
        """The scale that the next loss is multiplied by, float32."""
        return self.loss.loss_scale

    def adjust(
        self,
        grads_finite: BoolLike,
        *,
        places_finite: Bool[Array, " n"] | None = None,
        loss_finite: BoolLike | None = None,
    ) -> Self:
        """Returns the state after one step; a good one adds `amaxes` to the histories.

        See `AbstractLossScaling.adjust`.
        """
        loss = self.loss.adjust(
            grads_finite, places_finite=places_finite, loss_finite=loss_finite
        )
        # Select the histories, too: amaxes of a non-finite step may be infinite.
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
        """Returns the scales of input, weight and gradient by slot name."""
        return {str(name): x for name, x in self._tokens().items()}

    def amaxes_by_weight(self) -> dict[str, Float32[Array, "... 3"]]:
        """Returns the newest amaxes of input, weight and gradient by slot name.

        They are those of the last good step; zeros before the first, and for a recipe
        whose history has length 1.
        """
        return {
            str(name): history[..., -1]
            for state in self.scales
            for name, history in state.by_slot(state.amax_history).items()
        }

    def _set_aside(self) -> Self:
        return dataclasses.replace(super()._set_aside(), amaxes=_nothing(self.scales))

    def _with_record(self, record: StepRecord) -> Self:
        return dataclasses.replace(self, loss=self.loss._with_record(record))

    def _with_loss(self, loss: AbstractLossScaling) -> Self:
        return dataclasses.replace(self, loss=loss)

    def _at_scale(self, scale: FloatScalar) -> Self:
        return dataclasses.replace(self, loss=self.loss._at_scale(scale))

    def _backed_off(self) -> Self:
        return dataclasses.replace(self, loss=self.loss._backed_off())

    @property
    def _is_stateful(self) -> bool:
        return self.loss._is_stateful

    @property
    def _by_loss(self) -> bool:
        return self.loss._by_loss

    @property
    def _is_one(self) -> bool:
        return self.loss._is_one

    def _why_stuck(self) -> str | None:
        return self.loss._why_stuck() or super()._why_stuck()

    def _validate(self) -> None:
        self.loss._validate()
        for state in self.scales:
            state.validate("`mpx.quantization.RecipeScaling`")
        for name, slot in self.kept.items():
            values = slot["scale"], slot["amax_history"]
            refuse_unreachable(name, *values, "`mpx.quantization.RecipeScaling`")

    # --- Saving and restoring ---------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Returns the loss scaling's fields, and each slot's scale and history by name.

        It does not contain recipes: they are part of the program. `with_state` reads
        it.
        """
        state = write(self.loss, self.scales, dict(self.shapes))
        kept = jax.tree.map(np.asarray, self.kept)
        return state | {"slots": state["slots"] | kept}

    def with_state(
        self, state: Mapping[str, Any] | AbstractLossScaling, *, strict: bool = True
    ) -> Self:
        """Returns this scaling with the state of another run, also of another recipe.

        `mpx.init_scaling(func, model, ...)` makes a state for the present program; this
        copies the state of an earlier run into it, slot by slot. A longer history loses
        its oldest amaxes, a shorter one begins with zeros. Scales for another format or
        margin are converted exactly; a scale that no amax has set yet becomes the
        recipe's first one. With the same recipe, a run continues bit for bit.

        Slots that only the earlier program has are kept, and a change back continues
        with them; slots that only this one has are new. Counters and loss scaling
        continue as in `mpx.AbstractLossScaling.with_state`.

        Args:
            state: The scaling of the earlier function, or its `state_dict()`.
            strict: False allows a changed model: slots of new weights are new, and
                those of removed ones are dropped.

        Returns:
            The scaling.

        Raises:
            TypeError: `state` is neither of these.
            ValueError: It is incomplete, has slots of another model (if `strict`), is
                of a later version, or contains dtypes, shapes or values that no run can
                reach, such as a scale of NaN.
        """
        call = "`with_state(state)` of `mpx.quantization.RecipeScaling`"
        if isinstance(state, AbstractLossScaling):
            state = state.state_dict()
        saved, own = read(state, call), self.state_dict()["slots"]
        wanted = own.keys() - self.kept.keys()
        # Without a recipe the weights are unknown.
        shapes = dict(self.shapes) or saved.shapes or {}
        if strict:
            refuse_another_model(saved, wanted, shapes, call)
        slots = own | saved.slots
        kept = {n: slots[n] for n in slots.keys() - wanted if parameter_of(n) in shapes}
        loss = self.loss.with_state(saved.loss)
        if loss._by_loss and self.scales:
            loss = self.loss._with_record(loss.record)
        return dataclasses.replace(
            self,
            loss=loss,
            scales=tuple(with_slots(s, slots, call) for s in self.scales),
            amaxes=_nothing(self.scales),
            shapes=tuple(shapes.items()),
            kept=jax.tree.map(jnp.asarray, kept),
        )

    @classmethod
    def _carried(
        cls, new: AbstractLossScaling, state: Mapping[str, Any], strict: bool
    ) -> AbstractLossScaling:
        # Type checkers take `record` for a field.
        empty = cls(new, (), (), 0, (), (), {})  # pyright: ignore[reportCallIssue]
        found = empty.with_state(state, strict=strict)
        return found if found.kept else found.loss

    @classmethod
    def _template(cls) -> Self:
        raise ValueError(
            "The state of recipes is specific to a program. Make one for yours, and "
            "load the dictionary: `mpx.init_scaling(func, ...).with_state(state)`."
        )

    # Pickle by fields, as any module: there is no template without a program.
    __reduce__ = object.__reduce__

    # --- Use by a step ----------------------------------------------------------------

    def _tokens(self) -> dict[SlotName, Array]:
        return {
            name: x
            for state in self.scales
            for name, x in state.by_slot(state.scale).items()
        }

    def _recipes(self) -> dict[SlotName, AbstractRecipe]:
        return {name: s.recipe for s in self.scales for name, _ in s.slots}

    @contextlib.contextmanager
    def _provide(self, tokens: Mapping[SlotName, Array]) -> Iterator[None]:
        if not tokens:
            yield
            return
        state = State(tokens, self._recipes(), dict(self.shapes))
        with providing_state(state, self.calls) as provision:
            yield
        self._refuse_another_function(provision)

    @contextlib.contextmanager
    def _provide_frozen(self) -> Iterator[None]:
        if not self.quantized:  # of a function without a recipe
            yield
            return
        shapes = dict(self.shapes)
        state = State(self._tokens(), self._recipes(), shapes, self.quantized)
        with providing_state(state, self.calls) as provision:
            yield
        self._refuse_another_recipe(provision)
        if provision.used and self._is_new:
            warn_user(
                "`mpx.inference(func, scaling)` got a state before its first step: "
                "its scales are 1, which loses small values. Was only the model "
                "restored? Restore the scaling with it, or use a warm start: "
                "`mpx.DelayedScaling(warm_start=True)`."
            )

    @property
    def _is_new(self) -> bool:
        """Whether the state is known to be before its first step, with scales of 1."""
        return any(state.is_new for state in self.scales)

    @property
    def _made_for(self) -> set[AbstractRecipe]:
        return {state.recipe for state in self.scales}

    def _refuse_another_function(self, provision: ProvidedState) -> None:
        """Raises if the called function does not use the state."""
        if provision.is_switched_off:
            return
        unused = [f"`{brief(recipe)}`" for recipe in self._made_for - provision.used]
        if unused:
            used = [f"`{brief(recipe)}`" for recipe in provision.used]
            raise ValueError(
                f"The state of this step was made for {', '.join(unused)}, but the "
                "function quantizes "
                f"{'by ' + ', '.join(used) if used else 'nothing'}. Pass the same "
                "autocast function to the gradient function as to "
                "`mpx.init_scaling`, or, if the run changes its recipe, convert the "
                "state: `scaling = mpx.init_scaling(func, model, "
                "...).with_state(scaling)`."
            )
        if provision.taken > self.calls:
            raise ValueError(
                f"`mpx.init_scaling` found {self.calls} autocast calls, this step "
                f"makes {provision.taken}; the extra amaxes would be summed. Make "
                "the state from this function: `mpx.init_scaling(func, model, "
                "...).with_state(scaling)`."
            )
        missing = {name.parameter for name in self._recipes()} - provision.parameters
        if missing and provision.taken == self.calls:
            raise ValueError(
                "`scaling` must be the state of this model; got one with scales for "
                f"{listing(sorted(missing))}, which the function has not. Make a state "
                "for this model: `mpx.init_scaling(func, model, ...)`."
            )

    def _refuse_another_recipe(self, provision: ProvidedState) -> None:
        """Raises if the called function quantizes by other recipes."""
        if not (provision.used or provision.has_recipe or provision.is_switched_off):
            what = "has no recipe" if provision.taken else "is not an autocast function"
            raise ValueError(
                "`func` of `mpx.inference(func, scaling)` must compute as the training "
                f"did, by a recipe; this one {what}. Pass `mpx.autocast(func, "
                "recipe=...)`, or call `func` directly."
            )
        made_for = self._made_for
        if not made_for or not provision.used or provision.used & made_for:
            return
        one, other = (
            ", ".join(f"`{brief(recipe)}`" for recipe in recipes)
            for recipes in (made_for, provision.used)
        )
        raise ValueError(
            "`scaling` of `mpx.inference(func, scaling)` must have the state of "
            f"`func`'s recipe, {other}; got that of {one}. Pass the function of the "
            "run, or call a function whose recipe has no state directly."
        )

    def _gathered(self, amaxes: Mapping[SlotName, Array]) -> tuple[Array, ...]:
        return tuple(state.from_slots(amaxes) for state in self.scales)

    def _observe(self, amaxes: tuple[Array, ...]) -> Self:
        return dataclasses.replace(self, amaxes=amaxes)


def _nothing(scales: tuple[DelayedScales, ...]) -> tuple[Array, ...]:
    """Returns amaxes of zero, which mean "unknown"."""
    return tuple(jnp.zeros_like(state.scale) for state in scales)
