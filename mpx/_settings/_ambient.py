"""What holds around a call and stands in no signature: one record, set and read here.

`Ambient` is part of the keys of JAX's trace caches: a function that was traced under
one record is traced anew under another. So what changes an emitted program is a field
of it, is hashable, and equals what it was if nothing is to be traced anew. `Unkeyed` is
in no key: it holds lists that grow, and what only goes along with arrays of this call.

Each call of autocast reads both once, where it begins, and asks nobody else whether
somebody takes notes, sends weights, or gives a state: what is not in use is not met.

Sharp edge: both are restored as a whole. Contexts have to end in the order in which
they began, last first, as `with` blocks do.
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
from .._quantize import QuantizedArray
from ._policy import Wire
from ._settings import MARK, Settings, region


@runtime_checkable
class Source(Protocol):
    """Where autocast functions have the slots of recipes from (`_recipe_state`).

    Attributes:
        is_switched_off: Whether a function was called that is switched off.
    """

    is_switched_off: bool

    def take(self) -> Any:
        """What one more call is given."""


@dataclasses.dataclass(frozen=True)
class Ambient:
    """What JAX's trace caches know of.

    Attributes:
        settings: Settings for functions that were not told themselves.
        is_tracing: Whether what is traced here will be rewritten by autocast.
        is_control: Whether autocast does nothing here, whatever it is told.
        contexts_switch_on: Whether contexts in a traced function switch autocast on.
        is_switched_off: Whether this belongs to a function that is switched off.
        wire: In what dtypes weights and gradients travel; None: as it is written.
        source: Where slots come from; None: from nowhere.
        is_first_step: Whether those who are given no state take the scales of a first
            step, which are 1.
        step: What is known of the training step (`_recipe_state/_operands.py`); None
        where
            nothing is.
        gives_step: Whether those who ask for its number are called again, and given it.
        gives_scale: Whether those who ask for the scale of its loss are.
        asks_demands: To whom a call says what is wanted of its inputs.
        takes_notes: Whether what is emitted carries notes of what was decided.
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

    def __hash__(self) -> int:
        """JAX asks at each call of a compiled function, of the same few records."""
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        values = (getattr(self, f.name) for f in dataclasses.fields(self))
        return hash(tuple(values))


class Cast(NamedTuple):
    """A cast of the inputs of a function.

    Attributes:
        call: The call that has cast them.
        dtype: The half precision dtype that they have now.
        is_default: Whether nobody asked for this dtype.
    """

    call: str
    dtype: np.dtype
    is_default: bool


# By the `id` of an array, which is kept with its payload, so that nobody else has it.
Payloads = Mapping[int, tuple[Any, QuantizedArray]]


@dataclasses.dataclass(frozen=True)
class Unkeyed:
    """What JAX's trace caches do not know of.

    Attributes:
        cast: The cast of the inputs of what runs here.
        payloads: Which arrays stand for weights in 8 bits (`_stored_weights.py`).
        unused_rules: The rules that held for no operation, while somebody takes notes.
        float16_calls: Something for each function that computes in float16, while
            somebody asks.
    """

    cast: Cast | None = None
    payloads: Payloads = dataclasses.field(default_factory=dict)
    unused_rules: list[str] | None = None
    float16_calls: list[None] | None = None


_ambient = jax.make_user_context(default_value=Ambient())
_NOTHING = Unkeyed()
_unkeyed = contextvars.ContextVar("mpx", default=_NOTHING)


def ambient() -> Ambient:
    """What holds here."""
    return _ambient.value


def with_ambient(**fields: Any) -> contextlib.AbstractContextManager[object]:
    """Inside, these fields hold, and the others as here."""
    return _ambient(dataclasses.replace(_ambient.value, **fields))


def unkeyed() -> Unkeyed:
    """What holds here and is in no key."""
    return _unkeyed.get()


@contextlib.contextmanager
def with_unkeyed(**fields: Any) -> Iterator[None]:
    """Inside, these fields hold, and the others as here."""
    token = _unkeyed.set(dataclasses.replace(_unkeyed.get(), **fields))
    try:
        yield
    finally:
        _unkeyed.reset(token)


def trace(func: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """`jax.make_jaxpr` of what will be rewritten, so that regions may stand in it."""

    def make(*args: PyTree) -> PyTree:
        with with_ambient(is_tracing=True), explaining(*_HALF_ONLY):
            return jax.make_jaxpr(func)(*args)

    return make


# What JAX says of its kernel of attention, which is half only: of operands, and where
# there is no cuDNN.
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
    """Settings for functions that are called inside and were not told themselves.

    Inside of a function that is being transformed it is a region, too: what is called
    there belongs to that function.
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
    """Says that a function is being called with inputs that `call` has cast."""
    if dtype is None or not is_half(dtype):
        yield
        return
    with with_unkeyed(cast=Cast(call, dtype, is_default)):
        yield


@contextlib.contextmanager
def noting_float16() -> Iterator[list[None]]:
    """Gives a list that is empty unless functions called inside compute in float16."""
    found: list[None] = []
    with with_unkeyed(float16_calls=found):
        yield found


def note_float16() -> None:
    """What is called here computes in float16."""
    found = unkeyed().float16_calls
    if found is not None:
        found.append(None)


def resolved(settings: Settings) -> Settings:
    """The settings of a call here and now."""
    settings = settings.within(ambient().settings)
    if ambient().is_control:
        settings = dataclasses.replace(settings, is_enabled=False)
    return settings


def settings_of(func: Any) -> Settings | None:
    """What the transform that made a function was told; None for other functions."""
    while func is not None:
        mark = getattr(func, MARK, None)
        if mark is not None:
            return resolved(mark.settings)
        is_partial = isinstance(func, functools.partial | eqx.Partial)
        func = func.func if is_partial else getattr(func, "__wrapped__", None)
    return None
