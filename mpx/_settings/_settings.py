"""Settings: the options of autocast, and how they reach each equation.

`Settings` is the only carrier. Ambient contexts, the options of the transform, regions
and rules that name a recipe each set some of them; in this order, the later one wins.
The settings that apply to an equation are in its `Place`.

*Ambient* settings apply around calls, to autocast functions that do not set the option
themselves. They are part of the key of JAX's trace cache, so a function that was
compiled under other settings is not used again.

A *region* inside of a function that is being transformed is a named scope that carries
settings. So they stay on every equation that is traced in it, through jit, loops, remat
and derivative rules, and the innermost one wins.
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
from .._quantize import AbstractRecipe, Target
from ._policy import Wire
from ._rules import Rules

# Which arguments of a function hold its parameters: positions and names. One may be
# passed by position in one call and by name in the next.
Weights = tuple[int | str, ...]


@dataclasses.dataclass(frozen=True)
class Settings:
    """The options of autocast; hashable, part of the keys of caches.

    Attributes:
        dtype: The half precision dtype.
        residual_stream: "full" or "half".
        residuals: "small" or "fast"; None if not set.
        is_enabled: Whether anything is cast at all.
        rules: The user's rules.
        is_strict: Whether what happens by accident is an error.
        recipe: How products of weights are quantized; None if they are not.
        target: The device that is compiled for; None if not set.
        wire: In what dtypes weights and gradients travel between devices; None: as the
            program has it.
        explicit: The names of those that were set; the others are defaults.
    """

    dtype: np.dtype = np.dtype(jnp.bfloat16)
    residual_stream: str = "full"
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
        """Settings of which only these are explicit."""
        return cls(**options, explicit=frozenset(options))

    def within(self, outer: "Settings") -> "Settings":
        """These settings where they are explicit, and those around them elsewhere."""
        return dataclasses.replace(
            outer, **self.explicit_values(), explicit=outer.explicit | self.explicit
        )

    def at(self, scopes: tuple[str, ...]) -> "Settings":
        """The settings inside of scopes, the outermost first, some of them regions."""
        settings = self
        for scope in scopes:
            # Where there is none, the very same object comes back (`Place.inside`).
            region = data_of(scope, Settings)
            if region is not None:
                settings = dataclasses.replace(settings, **region.explicit_values())
        return settings

    @property
    def recipes(self) -> tuple[AbstractRecipe, ...]:
        """The recipe, and those that rules name."""
        own = () if self.recipe is None else (self.recipe,)
        return (*own, *self.rules._recipes) if self.rules.rules else own

    @property
    def not_of_regions(self) -> list[str]:
        """The names of explicit settings that only a whole function can have."""
        names = ("rules", "is_strict", "target")
        return [name for name in names if name in self.explicit]

    def for_a_region(self) -> "Settings":
        """Those that a part of a program can have."""
        given = self.explicit_values()
        for name in self.not_of_regions:
            del given[name]
        return Settings.of(**given)

    def explicit_values(self) -> dict[str, Any]:
        """The explicit settings, by name."""
        names = [f.name for f in dataclasses.fields(self) if f.name in self.explicit]
        return {name: getattr(self, name) for name in names}

    def __str__(self) -> str:
        """The explicit settings as the name of a scope, in which slashes separate."""
        given = self.explicit_values()
        texts = (f"{_NAMES.get(k, k)}={v}".replace("/", "|") for k, v in given.items())
        return f"mpx.autocast({','.join(texts)})"


# The names of options that are not those of their fields.
_NAMES = {"is_enabled": "enabled", "is_strict": "strict"}


def region(settings: Settings) -> contextlib.AbstractContextManager[object]:
    """A region with these explicit settings."""
    return data_scope(str(settings), settings)


def recipes_in(jaxpr: Jaxpr) -> set[AbstractRecipe]:
    """The recipes of the regions in a program."""
    found = [
        data_of(scope, Settings)
        for equation in distinct_equations(jaxpr)
        for scope in scope_names(equation)
    ]
    return {s.recipe for s in found if s is not None and s.recipe is not None}


# --- Functions that autocast made -----------------------------------------------------

# The attribute by which such a function is known.
MARK = "__mpx_autocast__"


class Mark(NamedTuple):
    """What autocast made a function of. JAX's transforms copy it to what they make.

    Attributes:
        made: The function that autocast made.
        func: What it was made of.
        settings: The options of autocast.
        weights: Positions and names of the arguments that hold parameters.
        has_explicit_weights: Whether the user passed `weights`.
        again: Makes another function in the same way.
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
    """What autocast wrapped, and how to wrap it again; other functions as they are.

    For those who look into a callable PyTree: its arrays are not in the wrapper's.
    """
    mark = getattr(func, MARK, None)
    # JAX copies the attributes of a function to what it makes of it: `jax.jit` of an
    # autocast function has its mark, and is not to be taken apart.
    if mark is None or mark.made is not func:
        return func, lambda same: same
    return mark.func, mark.again


def weights_of(func: object) -> Weights:
    """The arguments that hold a function's parameters: by default the first."""
    mark = getattr(func, MARK, None)
    return (0,) if mark is None else mark.weights


# --- Which arguments hold parameters --------------------------------------------------


def read_weights(weights: Any, call: str) -> Weights | None:
    """The option `weights`, checked as far as is possible without a function."""
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
    """Positions and names of a call's arguments that hold parameters.

    Args:
        func: The function that is called.
        weights: Which of its arguments hold parameters.
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
        return weights  # as in nearly all calls, without a look at the signature
    return _found_by_signature(func, weights, args, kwargs, call)


def _found_by_signature(
    func: Callable[..., PyTree],
    weights: Weights,
    args: tuple[PyTree, ...],
    kwargs: Mapping[str, PyTree],
    call: str,
) -> Weights:
    """`weights_in_call` where some are passed in another way than they are named."""
    ordered, others = parameters_of(func)
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
                f"`weights={place!r}` of {call} must be an argument of the function; "
                f"got a call with {len(args)} by position and "
                f"{listing(kwargs) or 'none'} by name."
            )
        found.append(here)
    return tuple(found)


def parameters_of(func: Callable[..., PyTree]) -> tuple[list[str], set[str]]:
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
