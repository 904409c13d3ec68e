"""Ambient recipes for layers: each applies the transform to its own call.

A layer of `mpx.nn` that is called in `with mpx.autocast(recipe=..., ambient=True)`
quantizes the products of its weights, without anybody transforming it. Inside of a
function that autocast is tracing it does nothing of its own: what holds there, regions
included, is decided for the whole function.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from .._dtypes import is_half
from .._quantize import DelayedScaling
from ._call import call_autocast
from ._region import ambient_settings, is_tracing
from ._settings import Settings, new_programs


def with_ambient_recipe(method: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a layer obey the ambient recipe.

    Args:
        method: What a layer is called by; its first argument is the layer, which holds
            the weights, its second the input.

    Returns:
        The method, with the products of the layer's weights quantized where there is an
        ambient recipe. Half precision inputs are computed with in their own dtype, as
        without a recipe, others in that of the ambient settings.

    Raises:
        ValueError: When called: the recipe has a state, or finds nothing to quantize.
    """
    programs = new_programs()

    @functools.wraps(method)
    def call(self: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        told = {} if is_tracing() else ambient_settings()
        if told.get("recipe") is None or not told.get("is_enabled", True):
            return method(self, x, *args, **kwargs)
        dtype = getattr(x, "dtype", None)
        if dtype is not None and is_half(dtype):
            told["dtype"] = np.dtype(dtype)
        settings = Settings(**{"dtype": jnp.dtype(jnp.bfloat16), **told})
        _refuse_state(settings, type(self).__name__)
        arguments = self, x, *args
        return call_autocast(settings, (0,), programs, method, arguments, kwargs)

    return call


def call_with_ambient(func: Callable[..., Any], *args: Any) -> Any:
    """Calls a function without weights under the ambient settings.

    Args:
        func: The function, which holds a `FusedOperation`.
        *args: What it is called with.

    Returns:
        What it returns: computed in the ambient dtype, if one was said, and quantized
        by a recipe that is for products of data with data.
    """
    told = {} if is_tracing() else ambient_settings()
    recipe = told.get("recipe")
    if not told:
        return func(*args)
    if recipe is not None and not recipe.fp8_dpa:
        recipe = told["recipe"] = None
    is_enabled = told.get("is_enabled", True) and (
        "dtype" in told or recipe is not None
    )
    told = {"dtype": jnp.dtype(jnp.bfloat16), **told, "is_enabled": is_enabled}
    return call_autocast(Settings(**told), (), new_programs(), func, args, {})


def _refuse_state(settings: Settings, layer: str) -> None:
    recipes = settings.recipe, *settings.rules.recipes
    if not any(isinstance(recipe, DelayedScaling) for recipe in recipes):
        return
    raise ValueError(
        f"`mpx.DelayedScaling` has a state for each weight of a model; `mpx.nn.{layer}`"
        ", called on its own in `mpx.autocast(recipe=..., ambient=True)`, knows only "
        "itself. Transform the function that the gradients are taken of: `loss = "
        "mpx.autocast(loss)` with `scaling = mpx.init_scaling(loss, model, ...)`. "
        "Ambient settings in it and around it stay as they are. Or take a recipe "
        "without a state, such as `mpx.Float8CurrentScaling()`."
    )
