"""Which arguments of a function hold its parameters: as a user says it, and in a call.

`weights=` of `mpx.autocast` and `mpx.explain` is positions and names. An argument may
be passed by position in one call and by name in the next, so both are looked up in the
signature of the function, if it has one.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from .._errors import describe, listing

Weights = tuple[int | str, ...]


def read_weights(weights: Any, call: str) -> Weights | None:
    """What a user said, checked as far as it can be without a function."""
    if weights is None:
        return None
    places = weights if isinstance(weights, tuple) else (weights,)
    for place in places:
        if not isinstance(place, int | str) or isinstance(place, bool):
            raise TypeError(
                f"`weights` of {call} must be the position of the argument that holds "
                f"the parameters, its name, or a tuple of such; got {describe(place)}."
            )
        if isinstance(place, int) and place < 0:
            raise ValueError(
                f"`weights` of {call} are positions counted from 0, the first "
                f"argument, or names; got {place}."
            )
    return places


def weights_in_call(
    func: Callable[..., Any],
    weights: Weights,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    call: str,
) -> Weights:
    """Positions and names of a call's arguments that hold parameters.

    Args:
        func: The function that is called.
        weights: What was said of it.
        args: Its arguments.
        kwargs: Its keyword arguments.
        call: The public function that was told, for messages.

    Returns:
        For each of `weights` the position, if it is passed by position, or the name.

    Raises:
        ValueError: There is no such argument.
    """
    is_named = [isinstance(w, str) and w in kwargs for w in weights]
    is_plain = [isinstance(w, int) and w < len(args) for w in weights]
    if all(a or b for a, b in zip(is_named, is_plain, strict=True)):
        return weights  # as in nearly all calls, without a look at the signature
    ordered, others = _parameters(func)
    found = []
    for place in weights:
        here = place
        if isinstance(place, int) and len(args) <= place < len(ordered):
            here = ordered[place]
        elif place in ordered and ordered.index(place) < len(args):
            here = ordered.index(place)
        is_known = here in kwargs or here in ordered or here in others
        # The first argument is the default, also of functions that have none.
        if not is_known and not (isinstance(here, int) and here < max(len(args), 1)):
            raise ValueError(
                f"`weights={place!r}` of {call} must say an argument of the function; "
                f"it was called with {len(args)} by position and "
                f"{listing(kwargs) or 'none'} by name."
            )
        found.append(here)
    return tuple(found)


def _parameters(func: Callable[..., Any]) -> tuple[list[str], set[str]]:
    """Names of the parameters that have a position, and of those that have none."""
    try:
        parameters = inspect.signature(func).parameters.values()
    except (TypeError, ValueError):  # a function of C has no signature
        return [], set()
    kind = inspect.Parameter
    in_order = kind.POSITIONAL_ONLY, kind.POSITIONAL_OR_KEYWORD
    return (
        [x.name for x in parameters if x.kind in in_order],
        {x.name for x in parameters if x.kind is kind.KEYWORD_ONLY},
    )
