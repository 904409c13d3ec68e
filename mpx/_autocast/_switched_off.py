"""Calling a function that is switched off, `mpx.autocast(func, enabled=False)`.

It is called as it is: nothing is traced, and regions in it have no effect, so that
`enabled=config.mixed` is all that a program needs for its control run. But a region
that says `enabled=True` is the innermost one and wins; then, and only then, the
function is traced and emitted like others.
"""

import contextlib

from jaxtyping import PyTree

from .._ambient_record import ambient, with_ambient
from .._nnx_graph import has_nnx_objects
from .._settings import Settings, region
from .._stored_weights import dequantize_weights
from ._call import Invocation, call_autocast


class _SwitchedOnInside(Exception):
    """A region of a function that is switched off says that it is not."""


def call_switched_off(call: Invocation) -> PyTree:
    """Calls a function as it is."""
    around = ambient()
    if around.source is not None:
        around.source.is_switched_off = True
    func, args, kwargs = dequantize_weights((call.func, call.args, call.kwargs))
    if around.is_tracing:  # an autocast function around it leaves this part alone
        with region(Settings.of(is_enabled=False)):
            return func(*args, **kwargs)
    try:
        with with_ambient(is_switched_off=True):
            return func(*args, **kwargs)
    except _SwitchedOnInside:
        if has_nnx_objects((func, args, kwargs)):
            raise ValueError(
                "`with mpx.autocast(enabled=True)` is not possible inside a "
                "function with `mpx.autocast(..., enabled=False)` that got Flax NNX "
                "objects, which are already changed. Use the same `enabled` for the "
                "region and the function."
            ) from None
    return call_autocast(call._replace(func=func, args=args, kwargs=kwargs))


def is_switched_off() -> bool:
    """Whether what runs here belongs to an autocast function that is switched off."""
    return ambient().is_switched_off and not ambient().is_tracing


def region_of_switched_off(
    settings: Settings,
) -> contextlib.AbstractContextManager[object]:
    """A region in a function that is switched off."""
    says_enabled = "is_enabled" in settings.explicit and settings.is_enabled
    if says_enabled and not ambient().is_control:
        raise _SwitchedOnInside
    return contextlib.nullcontext()
