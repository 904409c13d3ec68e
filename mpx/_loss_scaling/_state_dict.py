"""Loss scaling as a dictionary: versions, migration, and refusing what is damaged."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from .._errors import describe, listing
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


def write(scaling: object) -> dict[str, object]:
    """The fields of a loss scaling by name, with its kind and the version."""
    return _written(scaling, _fields(scaling))


def write_record(record: StepRecord) -> dict[str, object]:
    """The fields of a record by name, for where it stands alone."""
    return _written(record, _own_fields(record))


def _written(state: object, fields: dict[str, object]) -> dict[str, object]:
    arrays = {k: v if isinstance(v, bool) else np.asarray(v) for k, v in fields.items()}
    return {"kind": type(state).__name__, "version": VERSION, **arrays}


def read(cls: Any, state: Mapping[str, object]) -> Any:
    """Rebuilds a loss scaling of class `cls` (or of a subclass) from its fields."""
    call = f"`mpx.{cls.__name__}.from_state_dict(state)`"
    if not isinstance(state, Mapping):
        raise TypeError(f"{call} needs what `state_dict()` returned; got {state!r}.")
    state = _migrate(dict(state), call)
    kind = kinds(cls).get(str(state["kind"]))
    if kind is None:
        raise ValueError(
            f"{call} was given the state of {state['kind']!r}; this class reads "
            f"{listing(sorted(kinds(cls)))}."
        )
    if state["version"] == 0:
        fields = {k: np.asarray(v) for k, v in state.items() if k in _PUBLISHED}
        state = write(kind(**fields))  # which knows the rest
    template = kind._template()
    scaling = _build(template, _checked(state, _fields(template), call))
    scaling._validate()
    return scaling


def read_record(state: object, call: str) -> StepRecord:
    """Rebuilds a record from what `write_record` returned; `call` is for errors."""
    if not isinstance(state, Mapping):
        raise TypeError(f"{call} needs the state of a `mpx.StepRecord`; got {state!r}.")
    kind = state.get("kind")
    if kind != StepRecord.__name__:
        raise ValueError(
            f"{call} needs the state of a `mpx.StepRecord`; got that of {kind!r}."
        )
    record = StepRecord()
    fields = _checked(_migrate(dict(state), call), _own_fields(record), call)
    record = replaced(record, **fields)
    validate_record(record, StepRecord)
    return record


def _checked(
    state: dict[str, object], expected: dict[str, object], call: str
) -> dict[str, object]:
    """The values of a state, which must be those of `expected` in name and form."""
    given = {k: v for k, v in state.items() if k not in ("kind", "version")}
    missing, unknown = expected.keys() - given.keys(), given.keys() - expected.keys()
    if missing or unknown:
        raise ValueError(
            f"{call} needs exactly the fields of version {VERSION}; missing: "
            f"{listing(sorted(missing)) or 'none'}; unknown: "
            f"{listing(sorted(unknown)) or 'none'}. Was the file written completely?"
        )
    values = {k: _value(v, expected[k], k, call) for k, v in given.items()}
    arrays = (k for k in values if not isinstance(expected[k], bool))
    stacks = {k: _stack(values[k], expected[k]) for k in arrays}
    steps = next(k for k in stacks if k in ("steps", f"{_PREFIX}steps"))
    odd = sorted(k for k in stacks if stacks[k] != stacks[steps])
    if odd:
        raise ValueError(
            f"{call} needs one state, or several stacked with equal leading axes; got "
            f"another shape than that of `{steps}` for {listing(odd)}."
        )
    return values


def _own_fields(module: Any) -> dict[str, object]:
    return {f.name: getattr(module, f.name) for f in dataclasses.fields(module)}


def _fields(scaling: object) -> dict[str, object]:
    fields = _own_fields(scaling)
    record = _own_fields(fields.pop("record"))
    return fields | {_PREFIX + name: value for name, value in record.items()}


def _build(template: Any, values: dict[str, object]) -> Any:
    own = {k: v for k, v in values.items() if not k.startswith(_PREFIX)}
    record = {k.removeprefix(_PREFIX): v for k, v in values.items() if k not in own}
    return replaced(template, record=replaced(StepRecord(), **record), **own)


def _stack(value: Any, like: Any) -> tuple[int, ...]:
    """The leading axes of a field of several states, as vmap makes them."""
    return value.shape[: value.ndim - like.ndim]


def _value(value: object, like: Any, name: str, call: str) -> object:
    array = np.asarray(value)
    if isinstance(like, bool):
        if array.dtype != bool or array.shape != ():
            raise ValueError(f"{call} needs a boolean for `{name}`; got {value!r}.")
        return bool(array)
    tail = array.shape[array.ndim - like.ndim :]  # several states may be stacked
    if array.dtype != like.dtype:
        raise ValueError(
            f"{call} needs {like.dtype} for `{name}`; got {array.dtype}. Save the "
            "dictionary as it is, without changing dtypes."
        )
    if tail != like.shape:
        raise ValueError(
            f"{call} needs {describe(like)} for `{name}`; got {describe(array)}."
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


def _migrate(state: dict[str, Any], call: str) -> dict[str, Any]:
    version = np.asarray(state.get("version", 0))
    is_int = version.shape == () and np.issubdtype(version.dtype, np.integer)
    if not is_int or not 0 <= version <= VERSION:
        raise ValueError(
            f"{call} was given version {version}; this mpx writes version {VERSION} "
            "and "
            "reads what is older. Install a newer mpx."
        )
    if int(version) == 0:
        return _of_published_mpx(state, call)
    if "kind" not in state:
        raise ValueError(f"{call} misses the key `kind`; got {listing(sorted(state))}.")
    prefix = "" if state["kind"] == StepRecord.__name__ else _PREFIX
    shape = np.shape(state.get(f"{prefix}steps", 0))  # several may be stacked
    new = [fields for since, fields in _NEW.items() if since > version]
    return state | {
        prefix + name: np.zeros(shape, dtype)
        for fields in new
        for name, dtype in fields.items()
    }


def _of_published_mpx(state: dict[str, object], call: str) -> dict[str, object]:
    """Version 0, with what it does not say of itself."""
    if set(state) != _PUBLISHED:
        raise ValueError(
            f"{call} cannot read a state with the keys "
            f"{listing(sorted(state)) or 'none'}; "
            "it needs what `state_dict()` returned (with `kind` and `version`), or the "
            f"fields of the published MPX: {listing(sorted(_PUBLISHED))}."
        )
    return {"kind": _PUBLISHED_KIND, "version": 0, **state}
