"""The state of recipes as a dictionary: what it holds, and how another run reads it."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from .._errors import describe, differences
from .._loss_scaling import read_version, refuse_other_keys
from .._quantize import Format
from ._delayed_scales import (
    LARGEST_SCALE,
    ROLES,
    SMALLEST_SCALE,
    DelayedScales,
    refuse_unreachable,
)

KIND = "RecipeScaling"
VERSION = 2
_FIELDS = ("amax_history", "scale", "largest")


class Saved(NamedTuple):
    """What was saved, checked for itself.

    Attributes:
        loss: The state of the loss scaling.
        slots: Amax history, scale and largest number of each slot, by its name.
    """

    loss: Mapping[str, Any]
    slots: dict[str, dict[str, np.ndarray]]


def write(loss: Any, scales: tuple[DelayedScales, ...]) -> dict[str, Any]:
    """The state of a loss scaling and of slots as a dictionary of numpy arrays."""
    slots = {
        str(name): {
            "amax_history": np.asarray(history),
            "scale": np.asarray(scale),
            "largest": state.largest,
        }
        for state in scales
        for (name, history), scale in zip(
            state.by_slot(state.amax_history).items(),
            state.by_slot(state.scale).values(),
            strict=True,
        )
    }
    state = {"kind": KIND, "version": VERSION, "loss": loss.state_dict()}
    return state | {"slots": slots}


def read(state: object, call: str) -> Saved:
    """Checks a dictionary that `write` made, or an older version of it."""
    if not isinstance(state, Mapping):
        raise TypeError(
            f"{call} needs a `RecipeScaling` or its `state_dict()`; got "
            f"{describe(state)}."
        )
    if state.get("kind") != KIND:
        raise ValueError(
            f"{call} needs the state of a `RecipeScaling`; got that of "
            f"{state.get('kind')!r}."
        )
    version = read_version(state.get("version"), 1, VERSION, call)
    fields = "kind", "version", "loss", "slots"
    refuse_other_keys(state, fields, call, "the fields that were written")
    for key in ("loss", "slots"):
        if not isinstance(state[key], Mapping):
            raise ValueError(
                f"{call} needs a dictionary as {key!r}; got {describe(state[key])}."
            )
    slots = {
        name: _slot(name, slot, version, call) for name, slot in state["slots"].items()
    }
    return Saved(state["loss"], slots)


def refuse_other_slots(given: set[str], wanted: set[str], call: str) -> None:
    """Raises unless a state has the slots of this program."""
    if found := differences(dict.fromkeys(wanted), dict.fromkeys(given)):
        raise ValueError(
            f"{call} needs exactly the slots of this program; {found}. If the model "
            "has changed, load only the others: `with_state(state, strict=False)`."
        )


def with_slots(
    state: DelayedScales, slots: Mapping[str, Mapping[str, np.ndarray]], call: str
) -> DelayedScales:
    """The state with what was saved, converted to its recipe."""
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
        # All formats' largest numbers differ by powers of two. A scale that no amax
        # has made yet is the recipe's first one.
        is_made = np.any(history > 0, axis=-1) | ((scale != 0) & (scale != 1))
        ratio = state.largest.astype(np.float64) / saved["largest"]
        made = np.clip(scale * ratio, SMALLEST_SCALE, LARGEST_SCALE)
        histories[name] = _resized(jnp.asarray(history, jnp.float32), room)
        scales[name] = jnp.asarray(np.where(is_made, made, first), jnp.float32)
    return replace(
        state,
        amax_history=state.from_slots(histories),
        scale=state.from_slots(scales),
    )


def _slot(name: str, slot: object, version: int, call: str) -> dict[str, np.ndarray]:
    """The arrays of a slot, if a run can have reached them."""
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
    if version == 1:  # which kept what a product in the range of its format hid
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
    """A history with room for more amaxes, or fewer; the newest one stands last."""
    now, past = history[..., :1], history[..., 1:]
    past = past[..., max(0, past.shape[-1] - (room - 1)) :]
    missing = room - 1 - past.shape[-1]
    widths = [(0, 0)] * (past.ndim - 1) + [(missing, 0)]
    return jnp.concatenate([now, jnp.pad(past, widths)], axis=-1)
