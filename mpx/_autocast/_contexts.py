"""Ambient recipes for layers: each layer applies the transform to its own call.

A layer of `mpx.nn` that is called in `with mpx.autocast(recipe=..., ambient=True)`
quantizes the products of its weights, even in an untransformed function. Inside a
function that autocast is tracing it does nothing itself: the settings there, regions
included, are applied to the whole function.

A recipe with a state needs to know which weight of the model a layer's weight is. Only
a gradient function knows it. So the layer raises `AmbientRecipe`, and `in_contexts`
makes the function one that autocast traces as a whole, and that the contexts switch on.
Outside of a gradient function the error reaches the user, with the code to write.
"""

import dataclasses
import functools
from collections.abc import Callable

import equinox as eqx
import jax
import numpy as np
from jaxtyping import PyTree

from .._base.dtypes import is_half
from .._base.wraps import wraps
from .._settings import Settings, ambient, unkeyed, with_ambient
from ._call import Invocation, call_autocast
from ._context import Programs
from ._transform import is_switched_off


class AmbientRecipe(ValueError):
    """An ambient recipe needs the function around the layer to be transformed.

    Attributes:
        recipe: The name of the recipe with a state, for which the layer needs help; ""
            if none has a state.
    """

    def __init__(self, message: str, recipe: str) -> None:
        super().__init__(message)
        self.recipe = recipe


def with_ambient_recipe(method: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """Makes a layer obey the ambient recipe.

    Args:
        method: The method that calls the layer; its first argument is the layer, which
            holds the weights, its second the input.

    Returns:
        The method, with the products of the layer's weights quantized under an ambient
        recipe. Half-precision inputs are computed with in their own dtype, as without a
        recipe, others in the ambient dtype.

    Raises:
        ValueError: When called: the recipe has a state, or finds nothing to quantize.
    """
    # One store for all calls, so that JAX finds programs that it has compiled.
    programs = Programs()

    @functools.wraps(method)
    def call(self: object, x: object, *args: PyTree, **kwargs: PyTree) -> PyTree:
        settings = _here()
        if settings.recipe is None or not settings.is_enabled:
            return method(self, x, *args, **kwargs)
        _ask_for_help(settings, type(self).__name__)
        dtype = getattr(x, "dtype", None)
        if dtype is not None and is_half(dtype):
            settings = dataclasses.replace(settings, dtype=np.dtype(dtype))
        given = method, (self, x, *args), kwargs
        # The end of a layer is not that of the model: it has no output layer.
        return call_autocast(Invocation(settings, (0,), programs, *given, False))

    return call


def call_with_ambient(func: Callable[..., PyTree], *args: PyTree) -> PyTree:
    """Calls a function without weights under the ambient settings.

    Args:
        func: The function, which contains a `FusedOperation`.
        *args: Its arguments.

    Returns:
        Its result, computed in the ambient dtype if one is set, and quantized if the
        recipe is for activation matmuls.
    """
    settings = _here()
    if not settings.explicit:
        return func(*args)
    recipe = settings.recipe
    if recipe is not None and not recipe.fp8_dpa:
        recipe = None
    is_asked_for = "dtype" in settings.explicit or recipe is not None
    settings = dataclasses.replace(
        settings, recipe=recipe, is_enabled=settings.is_enabled and is_asked_for
    )
    return call_autocast(Invocation(settings, (), Programs(), func, args, {}))


def in_contexts(func: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """Returns a function that autocast traces, and that ambient contexts switch on.

    Outside of them it runs as written. Inside, all weight matmuls are quantized, the
    output layer too, as by layers on their own.
    """
    programs = Programs()
    weights = () if any(map(eqx.is_array, jax.tree.leaves(func))) else (0,)

    @wraps(func)
    def wrapper(*args: PyTree, **kwargs: PyTree) -> PyTree:
        settings = ambient().settings
        is_enabled = settings.is_enabled and settings.recipe is not None
        settings = dataclasses.replace(settings, is_enabled=is_enabled)
        with with_ambient(contexts_switch_on=True):
            given = func, args, kwargs
            return call_autocast(Invocation(settings, weights, programs, *given, False))

    return wrapper


def _here() -> Settings:
    """Returns the ambient settings for a layer's own call.

    They are the defaults in a function that autocast is tracing. They are switched off
    in a function that is switched off, and in a full-precision reference run.
    """
    around = ambient()
    settings = Settings() if around.is_tracing else around.settings
    is_explicit = "is_enabled" in settings.explicit
    is_on = settings.is_enabled if is_explicit else not is_switched_off()
    return dataclasses.replace(settings, is_enabled=is_on and not around.is_control)


def _ask_for_help(settings: Settings, layer: str) -> None:
    names = [type(r).__name__ for r in settings.recipes if r.has_state]
    recipe, cast = next(iter(names), ""), unkeyed().cast
    if not recipe and (cast is None or not cast.is_default):
        return
    raise AmbientRecipe(
        f"`mpx.{recipe}` has a state for each weight of a model, but "
        f"`mpx.nn.{layer}` in `with mpx.autocast(recipe=..., ambient=True)` has only "
        "its own. If `loss(model, ...)` calls it, write\n"
        "    scaling = mpx.init_scaling(loss, model, ...)\n"
        "    result = mpx.filter_value_and_grad(loss, scaling)(model, ...)\n"
        "instead of `jax.value_and_grad(loss)(model, ...)`, and to evaluate\n"
        "    mpx.inference(loss, scaling)(model, ...)\n"
        "each in the same contexts as now; the new state is `result.scaling`. Or "
        "use a recipe without a state: `mpx.Float8CurrentScaling()`.",
        recipe,
    )
