"""The state around a call that is not in its signature: set and read only here.

`Ambient` is part of the keys of JAX's trace caches: a function traced under one record
is traced again under another. So anything that changes an emitted program is a field of
it, hashable, and equal to its old value if nothing is to be traced again. `Unkeyed` is
in no key: it has lists that grow, and facts about arrays of this call.

Each call of autocast reads both once, at its beginning, and does not check separately
for notes, communication or state: unused features cost nothing.

Sharp edge: both are restored as a whole. Contexts must end in reverse order, as `with`
blocks do.
"""

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

import equinox as eqx
import jax
import numpy as np
from jaxtyping import PyTree

from .._base.dtypes import is_half
from .._base.jax_compat import explaining
from .._quantize import Stored
from ._policy import Wire
from ._settings import MARK, Settings, region


@runtime_checkable
class Source(Protocol):
    """The source of the slots of recipes for autocast functions (`_recipe_state`).

    Attributes:
        is_switched_off: Whether a switched-off function was called.
    """

    is_switched_off: bool

    def take(self) -> Any:
        """Returns the slots' source for one more call."""


@dataclasses.dataclass(frozen=True)
class Ambient:
    """The part of the state that is in the keys of JAX's trace caches.

    Attributes:
        settings: Defaults of functions that do not set the option themselves.
        is_tracing: Whether autocast will rewrite the function traced here.
        is_control: Whether autocast is disabled here, overriding all settings.
        contexts_switch_on: Whether contexts in a traced function enable autocast.
        is_switched_off: Whether this is part of a switched-off function.
        wire: The dtypes of communication of weights and gradients; None: unchanged.
        source: The source of slots; None without one.
        is_first_step: Whether functions without a state use the scales of a first step,
            which are 1.
        step: The known facts of the training step (`_recipe_state/_operands.py`); None
            if there are none.
        gives_step: Whether functions that need the step's number are called again with
            it.
        gives_scale: The same for functions that need the scale of its loss.
        asks_demands: Called with the dtypes that a call demands of its inputs.
        takes_notes: Whether emitted equations carry notes of decisions.
        marks_weights: Whether an equation marks the weight of each quantized product.
        is_repeated: Whether this is a micro-batch: a loop reads each weight again.
    """

    settings: Settings = Settings()
    is_tracing: bool = False
    is_control: bool = False
    contexts_switch_on: bool = False
    is_switched_off: bool = False
    wire: Wire | None = None
    source: Source | None = None
    is_first_step: bool = False
    step: Hashable = None
    gives_step: bool = False
    gives_scale: bool = False
    asks_demands: Callable[[dict[Any, np.dtype]], object] | None = None
    takes_notes: bool = False
    marks_weights: bool = False
    is_repeated: bool = False

    def __hash__(self) -> int:
        """Returns a cached hash: JAX hashes the same few records at each call."""
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        values = (getattr(self, f.name) for f in dataclasses.fields(self))
        return hash(tuple(values))


class Cast(NamedTuple):
    """A cast of the inputs of a function.

    Attributes:
        call: The call that cast them.
        dtype: Their half-precision dtype.
        is_default: Whether this dtype is the default, not set by the user.
    """

    call: str
    dtype: np.dtype
    is_default: bool


# By the `id` of an array, which is stored with its payload, so that the `id` is not
# reused.
Payloads = Mapping[int, tuple[Any, Stored]]


@dataclasses.dataclass(frozen=True)
class Unkeyed:
    """The part of the state that is not in the keys of JAX's trace caches.

    Attributes:
        cast: The cast of the inputs of the running function.
        payloads: The payloads of arrays of weights stored in 8 bits
            (`_stored_weights.py`).
        unused_rules: The rules that matched no operation; None unless notes are taken.
        float16_calls: One entry for each function that computes in float16; None unless
            recorded.
    """

    cast: Cast | None = None
    payloads: Payloads = dataclasses.field(default_factory=dict)
    unused_rules: list[str] | None = None
    float16_calls: list[None] | None = None


_ambient = jax.make_user_context(default_value=Ambient())
_NOTHING = Unkeyed()
_unkeyed = contextvars.ContextVar("mpx", default=_NOTHING)


def ambient() -> Ambient:
    """Returns the current `Ambient`."""
    return _ambient.value


def with_ambient(**fields: Any) -> contextlib.AbstractContextManager[object]:
    """Sets these fields inside; the others are unchanged."""
    return _ambient(dataclasses.replace(_ambient.value, **fields))


def unkeyed() -> Unkeyed:
    """Returns the current `Unkeyed`."""
    return _unkeyed.get()


@contextlib.contextmanager
def with_unkeyed(**fields: Any) -> Iterator[None]:
    """Sets these fields inside; the others are unchanged."""
    token = _unkeyed.set(dataclasses.replace(_unkeyed.get(), **fields))
    try:
        yield
    finally:
        _unkeyed.reset(token)


def trace(func: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """Returns a `jax.make_jaxpr` for functions that are rewritten; allows regions."""

    def make(*args: PyTree) -> PyTree:
        with with_ambient(is_tracing=True), explaining(*_HALF_ONLY):
            return jax.make_jaxpr(func)(*args)

    return make


# The errors of JAX's attention kernel, which supports only half-precision operands, and
# of a machine without cuDNN.
_HALF_ONLY = (
    (NotImplementedError, RuntimeError),
    ("Q must be fp16/bf16", "cuDNN is not detected"),
    "`mpx.autocast` traces a function in its own dtypes, before it casts; "
    '`jax.nn.dot_product_attention(..., implementation="cudnn")` in it raises: '
    "{error} Use `mpx.nn.dot_product_attention(...)` with the same arguments: it "
    "is cast with the rest, and uses cuDNN's kernel if the device has it. Or cast "
    "query, key and value before the call.",
)


@contextlib.contextmanager
def with_settings(settings: Settings) -> Iterator[None]:
    """Sets settings for functions called inside that do not set them themselves.

    Inside a function that is being transformed it also is a region: calls there are
    part of that function.
    """
    around, here = ambient(), settings.for_a_region()
    if here.explicit and around.contexts_switch_on:
        here = here.within(Settings.of(is_enabled=True))
    is_region = around.is_tracing and here.explicit
    inside = region(here) if is_region else contextlib.nullcontext()
    with with_ambient(settings=settings.within(around.settings)), inside:
        yield


@contextlib.contextmanager
def casting_inputs(
    call: str, dtype: np.dtype | None, is_default: bool = False
) -> Iterator[None]:
    """Records that a function is called with inputs that `call` has cast."""
    if dtype is None or not is_half(dtype):
        yield
        return
    with with_unkeyed(cast=Cast(call, dtype, is_default)):
        yield


@contextlib.contextmanager
def noting_float16() -> Iterator[list[None]]:
    """Yields a list that stays empty unless functions called inside use float16."""
    found: list[None] = []
    with with_unkeyed(float16_calls=found):
        yield found


def note_float16() -> None:
    """Records that a function called here computes in float16."""
    found = unkeyed().float16_calls
    if found is not None:
        found.append(None)


def resolved(settings: Settings) -> Settings:
    """Returns the settings of a call in the current context."""
    settings = settings.within(ambient().settings)
    if ambient().is_control:
        settings = dataclasses.replace(settings, is_enabled=False)
    return settings


def settings_of(func: Any) -> Settings | None:
    """Returns the settings of an autocast function; None for other functions."""
    while func is not None:
        mark = getattr(func, MARK, None)
        if mark is not None:
            return resolved(mark.settings)
        is_partial = isinstance(func, functools.partial | eqx.Partial)
        func = func.func if is_partial else getattr(func, "__wrapped__", None)
    return None
