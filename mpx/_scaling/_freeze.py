"""`freeze`: a function that uses the state of a recipe and does not change it."""

from collections.abc import Callable
from typing import Any

from .._autocast import (
    AmbientRecipe,
    Provision,
    State,
    brief,
    in_contexts,
    providing,
)
from .._errors import describe
from .._wraps import wraps
from ._recipe_scaling import RecipeScaling


def freeze(func: Callable[..., Any], scaling: Any) -> Callable[..., Any]:
    """A function with the scales of a training run, to evaluate or to serve.

    A function that `mpx.autocast` made with `mpx.DelayedScaling` computes with scales
    from earlier steps. Outside of a training step it has none; here it gets those of
    the state as it is, and learns nothing.

    Args:
        func: The function, or one that calls it.
        scaling: The `mpx.RecipeScaling` of the run.

    Returns:
        A function of the same arguments and results. Differentiated, it gives gradients
        with these scales; the amaxes are lost.

    Raises:
        TypeError: `func` cannot be called, or `scaling` holds no state of recipes.
        ValueError: When called: `func` quantizes by other recipes than that of the
            state.

    Examples:
        >>> import jax, jax.numpy as jnp, mpx
        >>> layer = mpx.autocast(jnp.dot, recipe=mpx.DelayedScaling(), weights=1)
        >>> x, w = jnp.ones((2, 4)), jnp.ones((4, 3))
        >>> scaling = mpx.init_scaling(layer, x, w)
        >>> mpx.freeze(layer, scaling)(x, w).shape
        (2, 3)
    """
    if not callable(func):
        raise TypeError(
            f"`mpx.freeze(func, scaling)` needs a function; got {describe(func)}."
        )
    if not isinstance(scaling, RecipeScaling):
        raise TypeError(
            "`mpx.freeze(func, scaling)` needs the `mpx.RecipeScaling` of a run; got "
            f"{describe(scaling)}. A function whose recipe has no state needs no "
            "freezing: call it as it is."
        )

    def call(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        state = State(scaling._tokens(), scaling._recipes())
        with providing(state, scaling.calls) as provision:
            result = func(*args, **kwargs)
        _refuse_another_recipe(provision, scaling)
        return result

    @wraps(func)
    def frozen(*args: Any, **kwargs: Any) -> Any:
        try:
            return call(func, args, kwargs)
        except AmbientRecipe:
            return call(in_contexts(func), args, kwargs)

    return frozen


def _refuse_another_recipe(provision: Provision, scaling: RecipeScaling) -> None:
    made_for = {state.recipe for state in scaling.scales}
    if provision.used and not provision.used & made_for:
        one, other = (
            ", ".join(f"`{brief(recipe)}`" for recipe in recipes)
            for recipes in (made_for, provision.used)
        )
        raise ValueError(
            f"`mpx.freeze(func, scaling)` was given a state of {one}, and `func` "
            f"quantizes by {other}. Give it the function of the run; one whose recipe "
            "has no state is called as it is."
        )
