"""Regions: autocast's settings for a part of a program, and around calls.

A region inside of a function that is being transformed is a `jax.named_scope`, whose
name, a text, carries the settings. So it stays on every equation that is traced in it,
through jit, loops, remat and derivative rules, and the innermost one wins.

*Ambient* settings hold around calls, for functions that `mpx.autocast` made and that
were not told themselves. They are part of the key of JAX's trace cache, so no function
that was compiled under another setting is used again.
"""

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax

from ._half_only import explaining_half_only
from ._settings import Settings

_is_tracing = jax.make_user_context(default_value=False)
_ambient = jax.make_user_context(default_value=None)
_is_control = jax.make_user_context(default_value=False)
_contexts_switch_on = jax.make_user_context(default_value=False)


class _Region(str):
    """The name of a region's scope: a text for whoever reads it, and the settings."""

    options: dict[str, Any]

    def __new__(cls, options: dict[str, Any]) -> "_Region":
        parts = ",".join(f"{_NAMES.get(k, k)}={_text(v)}" for k, v in options.items())
        self = super().__new__(cls, f"mpx.autocast({parts})")
        self.options = options
        return self


# What a setting is called where it is said.
_NAMES = {"is_enabled": "enabled"}
# Settings that hold for a whole function.
NOT_OF_REGIONS = ("rules", "is_strict", "target")


def _text(value: Any) -> str:
    # A slash would part the name of a scope.
    return str(value).replace("/", "|")


def trace(func: Callable[..., Any]) -> Callable[..., Any]:
    """`jax.make_jaxpr` of what will be rewritten, so that regions may stand in it."""

    def make(*args: Any) -> Any:
        with _is_tracing(True), explaining_half_only():
            return jax.make_jaxpr(func)(*args)

    return make


def is_tracing() -> bool:
    """Whether what is traced here will be rewritten by autocast."""
    return _is_tracing.value


def settings_within(settings: Settings, scopes: tuple[str, ...]) -> Settings:
    """The settings that hold within scopes, the outermost first."""
    for scope in scopes:
        if isinstance(scope, _Region):
            settings = dataclasses.replace(settings, **scope.options)
    return settings


def is_region(scope: str) -> bool:
    """Whether the name of a scope is a region."""
    return isinstance(scope, _Region)


def options_of(scope: str) -> dict[str, Any]:
    """The settings that a scope says, if it is a region."""
    return scope.options if isinstance(scope, _Region) else {}


def region(options: dict[str, Any]) -> contextlib.AbstractContextManager[Any]:
    """A region with the settings that it was told."""
    return jax.named_scope(_Region(options))


@contextlib.contextmanager
def ambient_with(options: dict[str, Any]) -> Iterator[None]:
    """Settings for functions that are called inside and were not told themselves.

    Inside of a function that is being transformed it is a region, too: what is called
    there belongs to that function.
    """
    present = ambient_settings() | options
    here = {k: v for k, v in options.items() if k not in NOT_OF_REGIONS}
    if here and _contexts_switch_on.value:
        here = {"is_enabled": True, **here}
    around = region(here) if is_tracing() and here else contextlib.nullcontext()
    with _ambient(tuple(sorted(present.items(), key=lambda item: item[0]))), around:
        yield


def ambient_settings() -> dict[str, Any]:
    """The ambient settings that hold here."""
    return dict(_ambient.value or ())


def under_control() -> contextlib.AbstractContextManager[Any]:
    """A run in full precision, to compare with: autocast does nothing inside."""
    return _is_control(True)


def is_under_control() -> bool:
    """Whether autocast does nothing here, whatever it is told."""
    return _is_control.value


def contexts_switch_on() -> contextlib.AbstractContextManager[Any]:
    """Ambient contexts inside of a function that is traced switch autocast on.

    So they do around layers of `mpx.nn` in a function that nobody transforms.
    """
    return _contexts_switch_on(True)


_float16_calls: contextvars.ContextVar[list[None] | None] = contextvars.ContextVar(
    "float16_calls", default=None
)


@contextlib.contextmanager
def noting_float16() -> Iterator[list[None]]:
    """Gives a list that is empty unless functions called inside compute in float16."""
    found: list[None] = []
    token = _float16_calls.set(found)
    try:
        yield found
    finally:
        _float16_calls.reset(token)


def note_float16() -> None:
    """What is called here computes in float16."""
    found = _float16_calls.get()
    if found is not None:
        found.append(None)
