"""`DelayedScales`: past amaxes and scales of all slots that share a recipe.

`state_dict` of `RecipeScaling` writes them as a dictionary, which another run reads.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple, Self

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float32

from .._base.errors import describe, differences
from .._base.typing import Shape
from .._loss_scaling import read_version, refuse_other_keys
from .._quantize import DelayedScalingState, Format, Role
from .._recipe_state import Request, SlotName

ROLES = tuple(Role)

# Scales are between these, so that they and their inverses are normal numbers.
SMALLEST_SCALE, LARGEST_SCALE = 2.0**-126, 2.0**126


class DelayedScales(eqx.Module):
    """The state of all slots that share a recipe.

    Attributes:
        amax_history: Past amaxes, as in `mpx.quantization.DelayedScalingState`; rows
            are slots, columns input, weight and gradient.
        scale: The scales of the next step.
        recipe: The recipe, one with a state.
        slots: The name of each slot, and the lengths of the scans that cut it.
    """

    amax_history: Float32[Array, "slots 3 length"]
    scale: Float32[Array, "slots 3"]
    recipe: Any = eqx.field(static=True)
    slots: tuple[tuple[SlotName, tuple[int, ...]], ...] = eqx.field(static=True)

    @classmethod
    def new(cls, recipe: Any, requests: Mapping[SlotName, Request]) -> Self:
        """Returns the state before the first step."""
        slots = tuple((name, request.lengths) for name, request in requests.items())
        rows = sum(math.prod(lengths) for _, lengths in slots)
        state = recipe.init()
        return cls(
            jnp.tile(state.amax_history, (rows, len(ROLES), 1)),
            jnp.tile(state.scale, (rows, len(ROLES))),
            recipe,
            slots,
        )

    @property
    def largest(self) -> np.ndarray:
        """The values that amaxes of input, weight and gradient scale to, float32[3]."""
        unit = jnp.ones((), jnp.float32)
        return np.asarray([self.recipe._scale(unit, role, 0.0) for role in ROLES])

    @property
    def is_new(self) -> bool:
        """Whether the state is known to be before its first step, with scales of 1."""
        is_known = not isinstance(self.scale, Tracer)
        # The values of an array on other processes' devices cannot be read here.
        is_known = is_known and getattr(self.scale, "is_fully_addressable", True)
        if self.recipe.warm_start or not is_known:
            return False
        history, scale = np.asarray(self.amax_history), np.asarray(self.scale)
        return not history.any() and bool((scale == 1).all())

    def by_slot(self, x: Array) -> dict[SlotName, Array]:
        """Returns the rows of an array by slot, in the shape of its scans."""
        found, start = {}, 0
        for name, lengths in self.slots:
            rows = math.prod(lengths)
            found[name] = x[start : start + rows].reshape(*lengths, *x.shape[1:])
            start += rows
        return found

    def arrays_by_slot(self) -> dict[SlotName, tuple[Array, Array]]:
        """Returns the amax history and the scale of each slot."""
        scales = self.by_slot(self.scale)
        return {n: (x, scales[n]) for n, x in self.by_slot(self.amax_history).items()}

    def from_slots(self, by_slot: Mapping[SlotName, Array]) -> Array:
        """Joins the rows of slots: the inverse of `by_slot`."""
        parts = [by_slot[name] for name, _ in self.slots]
        depths = [len(lengths) for _, lengths in self.slots]
        return jnp.concatenate(
            [x.reshape(-1, *x.shape[d:]) for x, d in zip(parts, depths, strict=True)]
        )

    def updated(self, amaxes: Float32[Array, "slots 3"]) -> Self:
        """Returns the state after a step with these amaxes."""

        def update(
            role: Role, history: Array, scale: Array, amax: Array
        ) -> tuple[Array, Array]:
            new = self.recipe.update(DelayedScalingState(history, scale), amax, role)
            return new.amax_history, new.scale

        columns = [
            jax.vmap(functools.partial(update, role))(
                self.amax_history[:, i], self.scale[:, i], amaxes[:, i]
            )
            for i, role in enumerate(ROLES)
        ]
        histories, scales = (jnp.stack(x, axis=1) for x in zip(*columns, strict=True))
        is_unknown = ~histories.any(axis=-1) & (amaxes == 0)
        if histories.shape[-1] < 2:  # such a history is empty after each step
            is_unknown &= scales == self.recipe.init().scale
        if not self.recipe.warm_start:
            others = self._scales_of_others(amaxes, scales)
            scales = jnp.where(is_unknown, others, scales)
        return dataclasses.replace(self, amax_history=histories, scale=scales)

    def _scales_of_others(
        self, amaxes: Float32[Array, "slots 3"], otherwise: Float32[Array, "slots 3"]
    ) -> Float32[Array, "slots 3"]:
        """Returns scales for arrays that were always zero, by the largest of a role.

        If a gradient underflows in one matmul, the matmul before it gets a zero
        gradient, and no amax. With an unchanged scale, only one more layer would get a
        gradient with each step. A quarter of the format's range (2^8 in E5M2) is left
        above the largest amax, three quarters below.
        """
        columns = []
        for i, role in enumerate(ROLES):
            format = self.recipe.quantizer(role).format
            room = (format.largest / format.smallest) ** 0.25
            largest = jnp.max(jnp.where(amaxes < jnp.inf, amaxes, 0)[:, i], initial=0)
            columns.append(self.recipe._scale(largest * room, role, otherwise[:, i]))
        return jnp.stack(columns, axis=1)

    def validate(self, owner: str) -> None:
        """Raises `ValueError` for values that no run can reach; reads them."""
        for name, (history, scale) in self.arrays_by_slot().items():
            refuse_unreachable(str(name), scale, history, owner)
            if not self.recipe.warm_start and np.any(np.asarray(scale) == 0):
                raise ValueError(
                    f"{owner}: a scale of the slot {str(name)!r} is 0, which is only "
                    "valid before the first step of a recipe with `warm_start=True`."
                )
            self._refuse_overflow(str(name), np.asarray(scale), history, owner)

    def _refuse_overflow(
        self, name: str, scale: np.ndarray, history: Array, owner: str
    ) -> None:
        """Raises for a scale with which the newest amax would overflow."""
        # An update stores it last, and every named algorithm takes at least that amax.
        if callable(self.recipe.amax_compute_algo) or history.shape[-1] < 2:
            return
        newest = history[..., -1]
        most = [
            self.recipe._scale(newest[..., i], role, np.inf)
            for i, role in enumerate(ROLES)
        ]
        most = np.stack([np.asarray(x) for x in most], axis=-1)
        if np.any(scale > most * (1 + 1e-6)):
            raise ValueError(
                f"{owner}: with the scales of the slot {name!r}, {scale.tolist()}, "
                f"its newest amaxes, {np.asarray(newest).tolist()}, would overflow "
                f"the format: they allow scales of at most {most.tolist()}."
            )


def refuse_unreachable(name: str, scale: object, history: object, call: str) -> None:
    """Raises `ValueError` for scales and amaxes of a slot that no run can reach."""
    scale, history = np.asarray(scale), np.asarray(history)
    if {scale.dtype, history.dtype} != {np.dtype(np.float32)}:
        raise ValueError(
            f"{call} needs scales and amaxes in float32; got {scale.dtype} and "
            f"{history.dtype} for the slot {name!r}."
        )
    is_new = (scale == 0) & np.all(history == 0, axis=-1)  # a warm start
    if not np.all(is_new | ((scale >= SMALLEST_SCALE) & (scale <= LARGEST_SCALE))):
        raise ValueError(
            f"{call} needs scales between 2^-126 and 2^126 (or 0 before the first step "
            f"of a warm start); got {scale.tolist()} for the slot {name!r}."
        )
    if not np.all((history >= 0) & (history < np.inf)):
        raise ValueError(
            f"{call} needs amaxes that are finite and at least 0; got "
            f"{history.tolist()} for the slot {name!r}."
        )


# --- The state of recipes as a dictionary ---------------------------------------------

KIND = "RecipeScaling"
VERSION = 3
_FIELDS = ("amax_history", "scale", "largest")


class Saved(NamedTuple):
    """A saved state, whose own consistency was checked.

    Attributes:
        loss: The state of the loss scaling.
        slots: Amax history, scale and largest number of each slot, by its name.
        shapes: The shapes of the model's weights by path; None if they are unknown.
    """

    loss: Mapping[str, Any]
    slots: dict[str, dict[str, np.ndarray]]
    shapes: dict[str, Shape] | None = None


def write(
    loss: Any, scales: tuple[DelayedScales, ...], shapes: Mapping[str, Shape]
) -> dict[str, Any]:
    """Returns the state of a loss scaling and slots as a dictionary of NumPy arrays."""
    slots = {
        str(name): {
            "amax_history": np.asarray(history),
            "scale": np.asarray(scale),
            "largest": state.largest,
        }
        for state in scales
        for name, (history, scale) in state.arrays_by_slot().items()
    }
    weights = {path: np.asarray(shape, np.int32) for path, shape in shapes.items()}
    state = {"kind": KIND, "version": VERSION, "loss": loss.state_dict()}
    return state | {"slots": slots, "weights": weights}


def read(state: object, call: str) -> Saved:
    """Checks a dictionary made by `write`, or an older version of it."""
    if not isinstance(state, Mapping):
        raise TypeError(
            f"{call} needs a loss scaling or its `state_dict()`; got {describe(state)}."
        )
    if state.get("kind") != KIND:  # that of a loss scaling without slots
        return Saved(state, {})
    version = read_version(state.get("version"), 1, VERSION, call)
    state = {"weights": {}, **state} if version < 3 else state
    fields = "kind", "version", "loss", "slots", "weights"
    refuse_other_keys(state, fields, call, "the fields that were written")
    for key in fields[2:]:
        if not isinstance(state[key], Mapping):
            raise ValueError(
                f"{call} needs a dictionary as {key!r}; got {describe(state[key])}."
            )
    slots = {
        name: _slot(name, slot, version, call) for name, slot in state["slots"].items()
    }
    shapes = {
        path: tuple(map(int, np.ravel(x))) for path, x in state["weights"].items()
    }
    return Saved(state["loss"], slots, shapes)


def parameter_of(name: str) -> str:
    """Returns the path of the weight of a slot, from the slot's name."""
    return name.rpartition(" (")[0]


def refuse_another_model(
    saved: Saved, wanted: set[str], shapes: Mapping[str, Shape], call: str
) -> None:
    """Raises unless a state has the slots of this program, up to those of recipes.

    Another recipe may quantize a weight that both models have, or leave it: this
    changes only one side. On both sides, the scope or the shape of a use has changed.
    """
    if saved.shapes is None:
        return
    unknown = wanted ^ saved.slots.keys()
    sides = (map(parameter_of, unknown & x) for x in (wanted, saved.slots.keys()))
    changed = set.intersection(*map(set, sides))
    same = {path for path, x in shapes.items() if saved.shapes.get(path) == x} - changed
    unknown = {name for name in unknown if parameter_of(name) not in same}
    both = (dict.fromkeys(unknown & x) for x in (wanted, saved.slots.keys()))
    if found := differences(*both):
        raise ValueError(
            f"{call} needs exactly the slots of this program; {found}. If the model "
            "has changed, load only the others: `with_state(state, strict=False)`."
        )


def with_slots(
    state: DelayedScales, slots: Mapping[str, Mapping[str, np.ndarray]], call: str
) -> DelayedScales:
    """Returns the state with saved slots, converted to its recipe."""
    room = state.recipe.amax_history_len
    first = float(state.recipe.init().scale)
    histories, scales = {}, {}
    for name, lengths in state.slots:
        saved, shape = slots[str(name)], (*lengths, len(ROLES))
        history, scale = saved["amax_history"], saved["scale"]
        if scale.shape != shape:
            raise ValueError(
                f"{call}: the slot {str(name)!r} is of {shape}; got scales of "
                f"{scale.shape} and histories of {history.shape}."
            )
        # The largest numbers of all formats differ by powers of two. A scale that was
        # not computed from an amax becomes the recipe's first one.
        is_made = np.any(history > 0, axis=-1) | ((scale != 0) & (scale != 1))
        ratio = state.largest.astype(np.float64) / saved["largest"]
        made = np.clip(scale * ratio, SMALLEST_SCALE, LARGEST_SCALE)
        histories[name] = _resized(jnp.asarray(history, jnp.float32), room)
        scales[name] = jnp.asarray(np.where(is_made, made, first), jnp.float32)
    return replace(
        state, amax_history=state.from_slots(histories), scale=state.from_slots(scales)
    )


def _slot(name: str, slot: object, version: int, call: str) -> dict[str, np.ndarray]:
    """Returns the arrays of a slot; raises if no run can reach them."""
    if not isinstance(slot, Mapping):
        raise ValueError(
            f"{call} needs a dictionary for the slot {name!r}; got {describe(slot)}."
        )
    refuse_other_keys(slot, _FIELDS, call, f"the fields of the slot {name!r}")
    found = {field: np.asarray(slot[field]) for field in _FIELDS}
    for field, array in found.items():
        if array.dtype != np.float32:
            raise ValueError(
                f"{call} needs float32 for {field!r} of the slot {name!r}; got "
                f"{describe(array)}. Save the dictionary unchanged, with its dtypes."
            )
    history, scale, largest = found.values()
    ends_in_roles = scale.shape[-1:] == largest.shape == (len(ROLES),)
    if not ends_in_roles or history.shape[:-1] != scale.shape or not history.shape[-1]:
        raise ValueError(
            f"{call} needs arrays of one slot; got histories of {history.shape}, "
            f"scales of {scale.shape} and largest numbers of {largest.shape} for the "
            f"slot {name!r}."
        )
    if version == 1:  # it stored infinities that saturating matmuls hid
        found["amax_history"] = history = np.where(history == np.inf, 0, history)
    refuse_unreachable(name, scale, history, call)
    digits, exponent = np.frexp(largest / np.float32(Format.E4M3.largest))
    if not np.all((largest > 0) & (digits == 0.5) & (np.abs(exponent) <= 80)):
        raise ValueError(
            f"{call} needs the largest numbers of formats, divided by powers of two "
            f"(a margin), as 'largest'; got {largest.tolist()} for the slot {name!r}."
        )
    return found


def _resized(history: Array, room: int) -> Array:
    """Pads or cuts a history to `room` amaxes; the newest one is last."""
    now, past = history[..., :1], history[..., 1:]
    past = past[..., max(0, past.shape[-1] - (room - 1)) :]
    widths = [(0, 0)] * (past.ndim - 1) + [(room - 1 - past.shape[-1], 0)]
    return jnp.concatenate([now, jnp.pad(past, widths)], axis=-1)
