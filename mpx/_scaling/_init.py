"""`init_scaling`: the state of a training step that a function's precision needs."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from .._autocast import collecting, is_marked, settings_of
from .._errors import describe
from .._jaxpr import NoFlow, walk
from .._loss_scaling import AbstractLossScaling, DynamicLossScaling, NoLossScaling
from ._recipe_scaling import RecipeScaling

_ARRAYS = jax.Array | np.ndarray | np.generic


def init_scaling(
    func: Callable[..., Any], *args: Any, **kwargs: Any
) -> AbstractLossScaling:
    r"""The state that a training step of a function needs, to begin training with.

    Gradients below $2^{-24}$ are zero in float16, so a function that computes anything
    in float16 gets `DynamicLossScaling()`. bfloat16 has the range of float32 and gets
    `NoLossScaling()`, as does float32.

    A recipe with a state, `mpx.DelayedScaling`, needs scales for each product: with one
    in the function, the loss scaling comes inside of a `RecipeScaling`.

    The function is traced, with the arguments as they are; nothing is computed. One
    that `mpx.autocast` made has said what it computes in, any other shows it. What the
    gradient
    functions do in the explicit style, casting its inputs, is not part of the function:
    for that style choose the scaling yourself.

    Args:
        func: The function that will be differentiated.
        *args: Its arguments; `jax.ShapeDtypeStruct` will do for arrays.
        **kwargs: Its keyword arguments.

    Returns:
        A new loss scaling; a `RecipeScaling` if there is a recipe with a state.

    Raises:
        TypeError: `func` cannot be called.

    Examples:
        >>> import jax, jax.numpy as jnp, mpx
        >>> loss = mpx.autocast(lambda w, x: jnp.mean(x @ w), jnp.float16)
        >>> w = jax.ShapeDtypeStruct((4, 2), "float32")
        >>> x = jax.ShapeDtypeStruct((3, 4), "float32")
        >>> type(mpx.init_scaling(loss, w, x)).__name__
        'DynamicLossScaling'
        >>> type(mpx.init_scaling(mpx.autocast(loss.__wrapped__), w, x)).__name__
        'NoLossScaling'
    """
    if not callable(func):
        raise TypeError(
            "`mpx.init_scaling(func, *args)` needs the function that will be "
            f"differentiated; got {describe(func)}."
        )
    with collecting() as found:
        jaxpr, count = _traced(func, args, kwargs)
    settings = settings_of(func)
    if settings is not None:
        needs_scaling = settings.dtype == np.float16
    else:
        needs_scaling = _computes_in_float16(jaxpr, count)
    loss = DynamicLossScaling() if needs_scaling else NoLossScaling()
    if not found.requests:
        return loss
    _refuse_repetition(jaxpr, count, found.calls)
    return RecipeScaling._new(loss, found.requests, found.calls)


def _refuse_repetition(jaxpr: Any, count: int, calls: int) -> None:
    """Raises where JAX would add up the amaxes of calls that were traced once.

    These are calls in a loop, and several calls of one jitted function.
    """
    visits = walk(jaxpr, [None] * count, NoFlow())
    places = [visit.place for visit in visits if is_marked(visit.equation)]
    for place in places:
        loops = [x for x in place.inside if x.startswith(("scan", "while"))]
        if loops:
            raise ValueError(
                "A function that `mpx.autocast` made with `mpx.DelayedScaling` is "
                f"called in the {loops[-1]}, which would add up the amaxes of all "
                "turns where their maximum is needed. Put `mpx.autocast` around the "
                "function that holds the loop."
            )
    if len(places) > calls:
        raise ValueError(
            "A function that `mpx.autocast` made with `mpx.DelayedScaling` is called "
            f"{len(places)} times and traced {calls} times, because `jax.jit` around "
            "it keeps what it has traced; the amaxes of such calls would be added up. "
            "Put `mpx.autocast` or `jax.jit` around the function that makes the calls."
        )


def _traced(func: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, int]:
    """The program of a function, and how many inputs it has."""
    leaves, treedef = jax.tree.flatten((func, args, kwargs))
    is_array = [isinstance(x, _ARRAYS | jax.ShapeDtypeStruct) for x in leaves]

    def flat(*arrays: Any) -> list[Any]:
        given = iter(arrays)
        full = [next(given) if a else x for x, a in zip(leaves, is_array, strict=True)]
        func, args, kwargs = jax.tree.unflatten(treedef, full)
        out = func(*args, **kwargs)
        return [x for x in jax.tree.leaves(out) if isinstance(x, _ARRAYS)]

    arrays = [x for x, a in zip(leaves, is_array, strict=True) if a]
    return jax.make_jaxpr(flat)(*arrays), len(arrays)


def _computes_in_float16(jaxpr: Any, count: int) -> bool:
    return any(
        getattr(variable.aval, "dtype", None) == np.float16
        for visit in walk(jaxpr, [None] * count, NoFlow())
        for variable in visit.equation.outvars
    )
