"""The counters of a training run, and loss scaling as a dictionary.

A dictionary has a kind and a version; older versions are migrated, damaged ones raise.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int32

from .._base.errors import describe, differences, listing
from .._base.typing import AnyArray, BoolScalar

# --- Counters: part of every loss scaling ---------------------------------------------

# The number of places of the last bad step that are kept. Places are numbers, not
# names, so that the state keeps its structure; `mpx.check` turns them into paths.
PLACES = 8

LARGEST_COUNT = 2**31 - 1

Module = TypeVar("Module", bound=eqx.Module)


class StepRecord(eqx.Module):
    """Counters of a training run, exact and part of the state.

    They saturate at 2^31 - 1, the largest int32.

    Attributes:
        steps: The number of steps.
        skipped: The total number of skipped steps.
        bad_losses: Those of them whose loss was non-finite before it was scaled, which
            is not caused by the scale.
        skipped_in_a_row: Steps skipped since the last good one.
        last_finite: The number of the last good step, counted from 1; 0 if there is
            none.
        finite: Whether the last step was good; True before the first.
        halted: Whether a limit was exceeded, after which `mpx.optimizer_step` changes
            nothing.
        places: The first eight non-finite places of the last skipped step: 0 is the
            loss, the next ones the gradient's leaves, then the optimizer's state; -1 is
            unused.
        places_seen: The number of places checked in that step; 0 if unknown.
        last_bad: The number of the last skipped step, counted from 1; 0 if there is
            none.
        bad_scale: Its loss scale; 0 if there is none, or it is unknown.
    """

    steps: Int32[Array, ""]
    skipped: Int32[Array, ""]
    bad_losses: Int32[Array, ""]
    skipped_in_a_row: Int32[Array, ""]
    last_finite: Int32[Array, ""]
    finite: Bool[Array, ""]
    halted: Bool[Array, ""]
    places: Int32[Array, "8"]
    places_seen: Int32[Array, ""]
    last_bad: Int32[Array, ""]
    bad_scale: Float32[Array, ""]

    def __init__(self) -> None:
        # One array each: donated buffers must not be shared.
        self.steps = jnp.zeros((), jnp.int32)
        self.skipped = jnp.zeros((), jnp.int32)
        self.bad_losses = jnp.zeros((), jnp.int32)
        self.skipped_in_a_row = jnp.zeros((), jnp.int32)
        self.last_finite = jnp.zeros((), jnp.int32)
        self.finite = jnp.ones((), bool)
        self.halted = jnp.zeros((), bool)
        self.places = jnp.full((PLACES,), -1, jnp.int32)
        self.places_seen = jnp.zeros((), jnp.int32)
        self.last_bad = jnp.zeros((), jnp.int32)
        self.bad_scale = jnp.zeros((), jnp.float32)


def _updated(
    record: StepRecord,
    finite: BoolScalar,
    places_finite: Array | None,
    loss_finite: BoolScalar | None = None,
    loss_scale: AnyArray | None = None,
) -> StepRecord:
    """Returns the record after one more step.

    Args:
        record: The record, which is unchanged.
        finite: Whether the step was good, one boolean.
        places_finite: One boolean for each place, in the order of `places`; if None,
            the places of a bad step are unknown, -1.
        loss_finite: Whether the loss was finite before it was scaled; None: the first
            value of `places_finite`.
        loss_scale: The scale of the step; None if there is none.

    Returns:
        The new record.
    """
    select, steps = jax.lax.select, counted(record.steps)
    row = record.skipped_in_a_row
    is_bad_loss = ~finite & ~loss_was_finite(places_finite, loss_finite)
    seen = 0 if places_finite is None else places_finite.size
    return replaced(
        record,
        steps=steps,
        skipped=select(finite, record.skipped, counted(record.skipped)),
        bad_losses=select(is_bad_loss, counted(record.bad_losses), record.bad_losses),
        skipped_in_a_row=select(finite, jnp.zeros_like(row), counted(row)),
        last_finite=select(finite, steps, record.last_finite),
        finite=finite,
        places=select(finite, record.places, _first_places(places_finite)),
        places_seen=select(
            finite, record.places_seen, jnp.full_like(record.places_seen, seen)
        ),
        last_bad=select(finite, record.last_bad, steps),
        bad_scale=record.bad_scale
        if loss_scale is None
        else select(finite, record.bad_scale, loss_scale),
    )


# Jitted, so it is traced once, not in each step.
advance_record = jax.jit(_updated)


def counted(counter: Int32[Array, ""]) -> Int32[Array, ""]:
    """Returns a counter plus one; saturates at the largest int32."""
    return jax.lax.min(counter, np.int32(LARGEST_COUNT - 1)) + np.int32(1)


def loss_was_finite(
    places_finite: Bool[Array, " n"] | None, loss_finite: BoolScalar | None
) -> BoolScalar:
    """Returns whether a step's loss was finite before scaling; True if unknown."""
    if loss_finite is not None:
        return loss_finite
    if places_finite is None:
        return jnp.ones((), bool)
    # The first one. A slice becomes dead code to XLA (jaxlib 0.10.2, 2026-11) once it
    # is simplified; with it in the program, the transpose of a weight's gradient is not
    # folded into its matmul, and the optimizer runs on transposed weights and copies
    # them there and back (`benchmarks workloads`, experts).
    is_other = np.arange(places_finite.size) > 0
    return jax.lax.reduce_and(places_finite | is_other, axes=(0,))


def _first_places(places_finite: Bool[Array, " n"] | None) -> Int32[Array, "8"]:
    none = jnp.full((PLACES,), -1, jnp.int32)
    if places_finite is None:
        return none
    # One sort: `jnp.nonzero` takes cumulative sums and scatters.
    last = places_finite.size
    padded = jnp.pad(places_finite, (0, PLACES), constant_values=True)
    numbers = jax.lax.iota(jnp.int32, padded.size)
    first = jax.lax.sort(jax.lax.select(padded, jnp.full_like(numbers, last), numbers))[
        :PLACES
    ]
    return jax.lax.select(first == last, none, first)


def refuse_arithmetic(record: StepRecord, call: str) -> None:
    """Raises `TypeError` if the counters' dtypes show that they were computed with.

    Averaging a whole training state by `jax.tree.map` does that.
    """
    if record.finite.dtype != bool or record.steps.dtype != np.int32:
        raise TypeError(
            f"{call} must be an unchanged loss scaling with int32 counters; got "
            f"{record.steps.dtype}. Exclude it from `jax.tree.map`: average weights, "
            "not a training state."
        )


def validate_record(record: StepRecord, owner: type) -> None:
    """Raises `ValueError` for counters that no run can reach; reads values."""
    read = {f.name: np.asarray(getattr(record, f.name)) for f in fields(record)}
    order = ("skipped_in_a_row", "skipped", "steps")
    order = (*zip(order, order[1:], strict=False), ("last_finite", "steps"))
    order = (*order, ("last_bad", "steps"))
    for small, large in (*order, ("bad_losses", "skipped")):
        if not np.all((read[small] >= 0) & (read[small] <= read[large])):
            raise ValueError(
                f"`{small}` of `mpx.{owner.__name__}` must be between 0 and "
                f"`{large}`, {read[large]}; got {read[small]}."
            )


def refuse_limit(limit: Any, call: str) -> None:
    """Raises unless a limit of skipped steps is None or a whole number."""
    is_int = isinstance(limit, int | np.integer) and not isinstance(limit, bool)
    if limit is not None and (not is_int or limit < 0):
        raise ValueError(
            f"`max_skipped_in_a_row` of {call} must be None or a whole number, at "
            "least "
            f"0; got {describe(limit)}."
        )


def replaced(module: Module, **changes: object) -> Module:
    """Returns a copy of a module with other fields, without calling `__init__`."""
    new = object.__new__(type(module))
    for name, value in {**vars(module), **changes}.items():
        object.__setattr__(new, name, value)
    return new


# --- State dictionaries ---------------------------------------------------------------

VERSION = 3

# The fields of a loss scaling's record are among the scaling's fields, with a prefix.
_PREFIX = "record."

# Fields of the record that a version added; 0 in older states.
_NEW = {
    2: {"bad_losses": np.int32, "places_seen": np.int32},
    3: {"last_bad": np.int32, "bad_scale": np.float32},
}

# Version 0: the state of the published package `mixed-precision-for-JAX`. Its only loss
# scaling has fields that are arguments of this kind.
_PUBLISHED_KIND = "DynamicLossScaling"
_PUBLISHED = {"loss_scaling", "min_loss_scaling", "counter", "factor", "period"}


def write_state(state: object) -> dict[str, Any]:
    """Returns the fields of a loss scaling or a record by name, with kind and version.

    Args:
        state: A loss scaling, or a separate record.
    """
    arrays = {
        name: value if isinstance(value, bool | str) else np.asarray(value)
        for name, value in _fields(state).items()
    }
    return {"kind": type(state).__name__, "version": VERSION, **arrays}


def read(cls: Any, state: Mapping[str, object]) -> Any:
    """Rebuilds a loss scaling of class `cls` (or of a subclass) from its fields."""
    call = f"`mpx.{cls.__name__}.from_state_dict(state)`"
    state = _migrated(state, call)
    kind = kinds(cls).get(str(state["kind"]))
    if kind is None:
        raise ValueError(
            f"{call} needs the state of {listing(sorted(kinds(cls)))}; got that of "
            f"{state['kind']!r}."
        )
    if state["version"] == 0:
        fields = {k: np.asarray(v) for k, v in state.items() if k in _PUBLISHED}
        state = write_state(kind(**fields))  # fills in the rest
    by_loss = str(state.get("skip")) == "loss"
    scaling = _filled(kind("loss") if by_loss else kind._template(), state, call)
    scaling._validate()
    return scaling


def read_record(state: object, call: str) -> StepRecord:
    """Rebuilds a record from what `write_state` returned; `call` is for errors."""
    state = _migrated(state, call)
    if state["kind"] != StepRecord.__name__:
        raise ValueError(
            f"{call} needs the state of a `mpx.reports.StepRecord`; got that of "
            f"{state['kind']!r}."
        )
    record = _filled(StepRecord(), state, call)
    validate_record(record, StepRecord)
    return record


def refuse_other_keys(
    given: Iterable[str], wanted: Iterable[str], call: str, what: str
) -> None:
    """Raises unless a dictionary has exactly the keys that were written."""
    if found := differences(dict.fromkeys(wanted), dict.fromkeys(given)):
        raise ValueError(
            f"{call} needs exactly {what}; {found}. Was the file written completely?"
        )


def read_version(version: object, oldest: int, newest: int, call: str) -> int:
    """Returns the version of a state; raises if this mpx cannot read it."""
    found = np.asarray(version)
    is_int = found.shape == () and np.issubdtype(found.dtype, np.integer)
    if not is_int or not oldest <= found <= newest:
        raise ValueError(
            f"{call} needs version {newest} or older; got version {version}. Install "
            "a newer mpx."
        )
    return int(found)


def _fields(module: Any) -> dict[str, Any]:
    """Returns the fields of a module by name, those of its record with a prefix."""
    fields = {f.name: getattr(module, f.name) for f in dataclasses.fields(module)}
    fields = {name: value for name, value in fields.items() if value is not None}
    record = fields.pop("record", None)
    inner = {} if record is None else _fields(record)
    return fields | {_PREFIX + name: value for name, value in inner.items()}


def _filled(template: Any, state: Mapping[str, Any], call: str) -> Any:
    """Returns a module with the values of a state, which must have its structure."""
    expected = _fields(template)
    given = {k: v for k, v in state.items() if k not in ("kind", "version")}
    refuse_other_keys(given, expected, call, f"the fields of version {VERSION}")
    steps = next(k for k in expected if k in ("steps", f"{_PREFIX}steps"))
    stack = np.shape(given[steps])  # several states, as `jax.vmap` makes them
    values = {k: _value(v, expected[k], stack, k, call) for k, v in given.items()}
    own = {k: v for k, v in values.items() if not k.startswith(_PREFIX)}
    record = {k.removeprefix(_PREFIX): v for k, v in values.items() if k not in own}
    if record:
        own["record"] = replaced(template.record, **record)
    return replaced(template, **own)


def _value(
    value: object, like: Any, stack: tuple[int, ...], name: str, call: str
) -> object:
    array = np.asarray(value)
    if isinstance(like, str):
        return like
    if isinstance(like, bool):
        if array.dtype != bool or array.shape != ():
            raise ValueError(f"{call} needs a boolean for `{name}`; got {value!r}.")
        return bool(array)
    if array.dtype != like.dtype:
        raise ValueError(
            f"{call} needs {like.dtype} for `{name}`; got {array.dtype}. Save the "
            "dictionary unchanged, with its dtypes."
        )
    if array.shape != stack + like.shape:
        expected = jax.ShapeDtypeStruct(stack + like.shape, like.dtype)
        raise ValueError(
            f"{call} needs {describe(expected)} for `{name}`; got {describe(array)}. "
            "Several states are stacked with equal leading axes."
        )
    if not name.endswith("places") and array.dtype == np.int32 and np.any(array < 0):
        raise ValueError(f"{call} needs counts of at least 0; got `{name}` {array}.")
    # A copy: an array that shares the memory of the dictionary must not be donated.
    return jnp.array(array)


def kinds(cls: Any) -> dict[str, Any]:
    """Returns the concrete classes that `cls` can read, by name."""
    # Includes users' classes, once they are imported.
    found = {c for sub in cls.__subclasses__() for c in kinds(sub).values()}
    if not getattr(cls, "__abstractmethods__", None):
        found.add(cls)
    return {c.__name__: c for c in found}


def _migrated(state: object, call: str) -> dict[str, Any]:
    """Adds later versions' fields to a state, and a kind to a published MPX's."""
    if not isinstance(state, Mapping):
        raise TypeError(
            f"{call} needs the dictionary from `state_dict()`; got {state!r}."
        )
    version = read_version(state.get("version", 0), 0, VERSION, call)
    if version == 0:
        if set(state) != _PUBLISHED:
            raise ValueError(
                f"{call} cannot read a state with the keys "
                f"{listing(sorted(state)) or 'none'}; it needs the dictionary from "
                "`state_dict()` (with `kind` and `version`), or the fields of the "
                f"published MPX: {listing(sorted(_PUBLISHED))}."
            )
        return {"kind": _PUBLISHED_KIND, "version": 0, **state}
    if "kind" not in state:
        raise ValueError(f"{call} needs the key `kind`; got {listing(sorted(state))}.")
    prefix = "" if state["kind"] == StepRecord.__name__ else _PREFIX
    shape = np.shape(state.get(f"{prefix}steps", 0))  # several may be stacked
    new = [fields for since, fields in _NEW.items() if since > version]
    return dict(state) | {
        prefix + name: np.zeros(shape, dtype)
        for fields in new
        for name, dtype in fields.items()
    }
