"""Loss scaling as a dictionary: versions, migration, and refusing what is damaged."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._errors import describe, differences, listing
from ._record import StepRecord, replaced, validate_record

VERSION = 3

# The fields of a loss scaling's record stand among its own.
_PREFIX = "record."

# Fields of the record that a version brought; 0 in states from before.
_NEW = {
    2: {"bad_losses": np.int32, "places_seen": np.int32},
    3: {"last_bad": np.int32, "bad_scale": np.float32},
}

# Version 0: the state of the published package `mixed-precision-for-JAX`. It has one
# loss scaling, whose fields are arguments of ours of this kind.
_PUBLISHED_KIND = "DynamicLossScaling"
_PUBLISHED = {"loss_scaling", "min_loss_scaling", "counter", "factor", "period"}


def write_state(state: object) -> dict[str, Any]:
    """The fields of a loss scaling or a record by name, with its kind and the version.

    Args:
        state: A loss scaling, or a record that stands alone.
    """
    arrays = {
        name: value if isinstance(value, bool) else np.asarray(value)
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
        state = write_state(kind(**fields))  # which knows the rest
    scaling = _filled(kind._template(), state, call)
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
    """The version of a state, if this mpx reads it."""
    found = np.asarray(version)
    is_int = found.shape == () and np.issubdtype(found.dtype, np.integer)
    if not is_int or not oldest <= found <= newest:
        raise ValueError(
            f"{call} needs version {newest} or older; got version {version}. Install "
            "a newer mpx."
        )
    return int(found)


def _fields(module: Any) -> dict[str, Any]:
    """The fields of a module by name, those of its record with a prefix."""
    fields = {f.name: getattr(module, f.name) for f in dataclasses.fields(module)}
    record = fields.pop("record", None)
    inner = {} if record is None else _fields(record)
    return fields | {_PREFIX + name: value for name, value in inner.items()}


def _filled(template: Any, state: Mapping[str, Any], call: str) -> Any:
    """A module with the values of a state, which must be of the form of its own."""
    expected = _fields(template)
    given = {k: v for k, v in state.items() if k not in ("kind", "version")}
    what = f"the fields of version {VERSION}"
    refuse_other_keys(given, expected, call, what)
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
    """The concrete classes that `cls` can read, by name."""
    # Also those of users, once they are imported.
    found = {c for sub in cls.__subclasses__() for c in kinds(sub).values()}
    if not getattr(cls, "__abstractmethods__", None):
        found.add(cls)
    return {c.__name__: c for c in found}


def _migrated(state: object, call: str) -> dict[str, Any]:
    """A state as this version writes it, or that of the published MPX."""
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
