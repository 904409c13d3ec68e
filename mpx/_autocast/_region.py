"""Regions: autocast's settings for a part of a program, and around calls.

A region inside of a function that is being transformed is a `jax.named_scope`, whose
text says the setting completely. So it stays on every equation that is traced in it,
through jit, loops, remat and derivative rules, and the innermost one wins. What a scope
cannot hold, `rules=`, cannot be said in a region.

*Ambient* settings hold around calls, for functions that `mpx.autocast` made and that
were not told themselves. They are part of the key of JAX's trace cache, so no function
that was compiled under another setting is used again.
"""

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from ._settings import Settings

_is_tracing = jax.make_user_context(default_value=False)
_ambient = jax.make_user_context(default_value=None)

_TEXT = re.compile(r"mpx\.autocast\((?P<settings>[\w=,]*)\)")


def trace(func: Callable[..., Any]) -> Callable[..., Any]:
    """`jax.make_jaxpr` of what will be rewritten, so that regions may stand in it."""

    def make(*args: Any) -> Any:
        with _is_tracing(True):
            return jax.make_jaxpr(func)(*args)

    return make


def is_tracing() -> bool:
    """Whether what is traced here will be rewritten by autocast."""
    return _is_tracing.value


def region_text(**changes: Any) -> str:
    """The text of a region's scope."""
    parts = ",".join(f"{name}={value}" for name, value in changes.items())
    return f"mpx.autocast({parts})"


def settings_within(settings: Settings, scopes: tuple[str, ...]) -> Settings:
    """The settings that hold within scopes, the outermost first."""
    for scope in scopes:
        found = _TEXT.fullmatch(scope)
        if found is not None:
            settings = _changed(settings, found["settings"])
    return settings


def is_region(scope: str) -> bool:
    """Whether the name of a scope is a region."""
    return _TEXT.fullmatch(scope) is not None


def _changed(settings: Settings, text: str) -> Settings:
    changes: dict[str, Any] = {}
    for part in filter(None, text.split(",")):
        name, value = part.split("=")
        if name == "dtype":
            changes["dtype"] = jnp.dtype(value)
        elif name == "residual_stream":
            changes["residual_stream"] = value
        elif name == "enabled":
            changes["is_enabled"] = value == "True"
    return dataclasses.replace(settings, **changes)


def region(told: dict[str, Any]) -> contextlib.AbstractContextManager[Any]:
    """A region with the settings that it was told."""
    names = {"is_enabled": "enabled"}
    return jax.named_scope(
        region_text(**{names.get(name, name): value for name, value in told.items()})
    )


@contextlib.contextmanager
def ambient_with(told: dict[str, Any]) -> Iterator[None]:
    """Settings for functions that are called inside and were not told themselves."""
    present = ambient_settings() | told
    with _ambient(tuple(sorted(present.items(), key=lambda item: item[0]))):
        yield


def ambient_settings() -> dict[str, Any]:
    """The ambient settings that hold here."""
    return dict(_ambient.value or ())
