"""Settings: the options of autocast, and how they reach each equation.

`Settings` is the only carrier of options. Ambient contexts, the options of the
transform, regions, and rules that name a recipe each set some of them; in this order,
the later one wins. The settings that apply to an equation are in its `Place`
(`_autocast/_context.py`).

*Ambient* settings apply to calls of autocast functions that do not set the option
themselves. They are part of the key of JAX's trace cache, so a function compiled under
other settings is not reused.

A *region* inside a function that is being transformed is a named scope with settings.
So every equation that is traced in it keeps them, through jit, loops, remat and
derivative rules, and the innermost region wins.
"""

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr
from jaxtyping import PyTree

from .._base.errors import describe, listing
from .._base.jax_compat import scope_names
from .._program import data_of, data_scope, distinct_equations
from .._quantize import AbstractRecipe, Target, target_from
from ._policy import Wire
from ._rules import Rules

# The arguments of a function that contain its parameters: positions and names. An
# argument may be passed by position in one call and by name in the next.
Weights = tuple[int | str, ...]


@dataclasses.dataclass(frozen=True)
class Settings:
    """The options of autocast; hashable, part of the keys of caches.

    Attributes:
        dtype: The half-precision dtype.
        residual_stream: "full", "blocks" or "half"; None if not set.
        residuals: "small", "loops" or "fast"; None if not set.
        is_enabled: Whether anything is cast.
        rules: The user's rules.
        is_strict: Whether autocast raises for what it otherwise only reports.
        recipe: How weight matmuls are quantized; None if they are not.
        target: The device to compile for; None if not set.
        wire: The dtypes of communication of weights and gradients; None: those of the
            program.
        explicit: The names of the options that were set; the others are defaults.
    """

    dtype: np.dtype = np.dtype(jnp.bfloat16)
    residual_stream: str | None = None
    residuals: str | None = None
    is_enabled: bool = True
    rules: Rules = Rules()
    is_strict: bool = False
    recipe: AbstractRecipe | None = None
    target: Target | None = None
    wire: Wire | None = None
    explicit: frozenset[str] = frozenset()

    @classmethod
    def of(cls, **options: Any) -> "Settings":
        """Returns settings of which only these are explicit."""
        return cls(**options, explicit=frozenset(options))

    def within(self, outer: "Settings") -> "Settings":
        """Returns these settings where explicit, and the outer ones elsewhere."""
        return dataclasses.replace(
            outer, **self.explicit_values(), explicit=outer.explicit | self.explicit
        )

    def at(self, scopes: tuple[str, ...]) -> "Settings":
        """Returns the settings inside scopes, outermost first; some are regions."""
        settings = self
        for scope in scopes:
            # Without a region, returns the very same object (`Place.inside`).
            region = data_of(scope, Settings)
            if region is not None:
                settings = dataclasses.replace(settings, **region.explicit_values())
        return settings

    @property
    def has_half_stream(self) -> bool:
        """Whether a residual stream may be in half precision."""
        return self.residual_stream in ("half", "blocks")

    @property
    def device(self) -> Target:
        """What programs are compiled for: `target`, or what they would run on."""
        return self.target or target_from(None)

    @property
    def recipes(self) -> tuple[AbstractRecipe, ...]:
        """The recipe, and those of rules."""
        own = () if self.recipe is None else (self.recipe,)
        return (*own, *self.rules._recipes) if self.rules.rules else own

    @property
    def not_of_regions(self) -> list[str]:
        """The names of explicit settings that apply only to a whole function."""
        names = ("rules", "is_strict", "target")
        return [name for name in names if name in self.explicit]

    def for_a_region(self) -> "Settings":
        """Returns the explicit settings that can apply to a part of a program."""
        given = self.explicit_values()
        for name in self.not_of_regions:
            del given[name]
        return Settings.of(**given)

    def explicit_values(self) -> dict[str, Any]:
        """Returns the explicit settings, by name."""
        names = [f.name for f in dataclasses.fields(self) if f.name in self.explicit]
        return {name: getattr(self, name) for name in names}

    def __str__(self) -> str:
        """Returns the explicit settings as a scope's name, without slashes."""
        given = self.explicit_values()
        texts = (f"{_NAMES.get(k, k)}={v}".replace("/", "|") for k, v in given.items())
        return f"mpx.autocast({','.join(texts)})"


# Options whose public names differ from their fields.
_NAMES = {"is_enabled": "enabled", "is_strict": "strict"}


def region(settings: Settings) -> contextlib.AbstractContextManager[object]:
    """Opens a region with these explicit settings."""
    return data_scope(str(settings), settings)


def recipes_in(jaxpr: Jaxpr) -> set[AbstractRecipe]:
    """Returns the recipes of the regions in a program."""
    found = [
        data_of(scope, Settings)
        for equation in distinct_equations(jaxpr)
        for scope in scope_names(equation)
    ]
    return {s.recipe for s in found if s is not None and s.recipe is not None}


# --- The mark of autocast functions ---------------------------------------------------

# The attribute that has the mark.
MARK = "__mpx_autocast__"


class Mark(NamedTuple):
    """How autocast made a function. JAX's transforms copy the mark to their results.

    Attributes:
        made: The autocast function.
        func: The original function.
        settings: The options of autocast.
        weights: Positions and names of the arguments that contain parameters.
        has_explicit_weights: Whether the user passed `weights`.
        again: Wraps another function in the same way.
    """

    made: Callable[..., PyTree]
    func: Callable[..., PyTree]
    settings: Settings
    weights: Weights
    has_explicit_weights: bool
    again: Callable[[Callable[..., PyTree]], Callable[..., PyTree]]


def unwrapped(
    func: Callable[..., PyTree],
) -> tuple[
    Callable[..., PyTree], Callable[[Callable[..., PyTree]], Callable[..., PyTree]]
]:
    """Returns the wrapped function and how to wrap it again; others unchanged.

    For code that inspects a callable PyTree: its arrays are not in the wrapper.
    """
    mark = getattr(func, MARK, None)
    # `jax.jit` of an autocast function also has its mark, copied by JAX; it must not be
    # unwrapped.
    if mark is None or mark.made is not func:
        return func, lambda same: same
    return mark.func, mark.again


def weights_of(func: object) -> Weights:
    """Returns the arguments that contain parameters; by default the first."""
    mark = getattr(func, MARK, None)
    return (0,) if mark is None else mark.weights


# --- The arguments that contain parameters --------------------------------------------


def read_weights(weights: Any, call: str) -> Weights | None:
    """Checks the option `weights`, as far as possible without a function."""
    if weights is None:
        return None
    places = weights if isinstance(weights, tuple) else (weights,)
    for place in places:
        if not isinstance(place, int | str) or isinstance(place, bool):
            raise TypeError(
                f"`weights` of {call} must be the position or name of the argument "
                f"with the parameters, or a tuple of these; got {describe(place)}."
            )
        if isinstance(place, int) and place < 0:
            raise ValueError(
                f"`weights` of {call} must be positions from 0, the first argument, "
                f"or names; got {place}."
            )
    return places


def weights_in_call(
    func: Callable[..., PyTree],
    weights: Weights,
    args: tuple[PyTree, ...],
    kwargs: Mapping[str, PyTree],
    call: str,
) -> Weights:
    """Returns positions and names of a call's arguments that contain parameters.

    Args:
        func: The function that is called.
        weights: The arguments that contain parameters.
        args: Its arguments.
        kwargs: Its keyword arguments.
        call: The public function, for messages.

    Returns:
        For each of `weights` the position, if it is passed by position, or the name.

    Raises:
        ValueError: There is no such argument.
    """
    is_named = [isinstance(w, str) and w in kwargs for w in weights]
    is_plain = [isinstance(w, int) and w < len(args) for w in weights]
    if all(a or b for a, b in zip(is_named, is_plain, strict=True)):
        return weights  # the usual case, without reading the signature
    return _found_by_signature(func, weights, args, kwargs, call)


def _found_by_signature(
    func: Callable[..., PyTree],
    weights: Weights,
    args: tuple[PyTree, ...],
    kwargs: Mapping[str, PyTree],
    call: str,
) -> Weights:
    """Implements `weights_in_call` if some are not passed the way they are named."""
    ordered, others = parameters_of(func)
    found = []
    for place in weights:
        here = place
        if isinstance(place, int) and len(args) <= place < len(ordered):
            here = ordered[place]
        elif place in ordered and ordered.index(place) < len(args):
            here = ordered.index(place)
        is_known = here in kwargs or here in ordered or here in others
        # The first argument is the default, also of functions without one.
        if not is_known and not (isinstance(here, int) and here < max(len(args), 1)):
            raise ValueError(
                f"`weights={place!r}` of {call} must be an argument of the function; "
                f"got a call with {len(args)} by position and "
                f"{listing(kwargs) or 'none'} by name."
            )
        found.append(here)
    return tuple(found)


def parameters_of(func: Callable[..., PyTree]) -> tuple[list[str], set[str]]:
    """Returns names of parameters with a position, and of those without one."""
    try:
        parameters = inspect.signature(func).parameters.values()
    except (TypeError, ValueError):  # C functions have no signature
        return [], set()
    kind = inspect.Parameter
    in_order = kind.POSITIONAL_ONLY, kind.POSITIONAL_OR_KEYWORD
    return (
        [x.name for x in parameters if x.kind in in_order],
        {x.name for x in parameters if x.kind is kind.KEYWORD_ONLY},
    )
