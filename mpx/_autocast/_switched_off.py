"""Calling a function that is switched off, `mpx.autocast(func, enabled=False)`.

It is called as it is: nothing is traced, and regions in it have no effect, so that
`enabled=config.mixed` is all that a program needs for its control run. But a region
that says `enabled=True` is the innermost one and wins; then, and only then, the
function is traced and emitted like others.
"""

import contextlib
from collections.abc import Callable

import jax
from jaxtyping import PyTree

from .._nnx_graph import has_nnx_objects
from .._recipe_state import note_switched_off
from .._settings import Settings, Weights, is_tracing, is_under_control, region
from .._stored_weights import dequantize_weights
from ._call import call_autocast
from ._context import Programs

_is_off = jax.make_user_context(default_value=False)


class _SwitchedOnInside(Exception):
    """A region of a function that is switched off says that it is not."""


def call_switched_off(
    settings: Settings,
    weights: Weights,
    programs: Programs,
    func: Callable[..., PyTree],
    args: tuple[PyTree, ...],
    kwargs: dict[str, PyTree],
) -> PyTree:
    """Calls a function as it is; see `call_autocast` for the arguments."""
    note_switched_off()
    func, args, kwargs = dequantize_weights((func, args, kwargs))
    if is_tracing():  # of an autocast function around it, which leaves this part alone
        with region(Settings.of(is_enabled=False)):
            return func(*args, **kwargs)
    try:
        with _is_off(True):
            return func(*args, **kwargs)
    except _SwitchedOnInside:
        if has_nnx_objects((func, args, kwargs)):
            raise ValueError(
                "`with mpx.autocast(enabled=True)` stands in a function that "
                "`mpx.autocast(..., enabled=False)` switched off and that was given "
                "Flax NNX objects, which have been changed by now. Switch the region "
                "and the function on and off together."
            ) from None
    return call_autocast(settings, weights, programs, func, args, kwargs)


def is_switched_off() -> bool:
    """Whether what runs here belongs to an autocast function that is switched off."""
    return _is_off.value and not is_tracing()


def region_of_switched_off(
    settings: Settings,
) -> contextlib.AbstractContextManager[object]:
    """A region in a function that is switched off."""
    if "is_enabled" in settings.said and settings.is_enabled and not is_under_control():
        raise _SwitchedOnInside
    return contextlib.nullcontext()
