"""`freeze`: a function that uses the state of a recipe and does not change it."""

from collections.abc import Callable

from jaxtyping import PyTree

from .._ambient import AmbientRecipe, in_contexts
from .._errors import describe
from .._loss_scaling import AbstractLossScaling
from .._wraps import wraps


def freeze(
    func: Callable[..., PyTree], scaling: AbstractLossScaling
) -> Callable[..., PyTree]:
    """A function with the scales of a training run, to evaluate or to serve.

    A function that `mpx.autocast` made with `mpx.DelayedScaling` computes with scales
    from earlier steps. Outside of a training step it has none; here it gets those of
    the state as it is, and learns nothing. So one line evaluates in every precision:
    where the run has no such recipe, `scaling` holds no such scales, and the function
    is called as it is.

    Args:
        func: The function, or one that calls it.
        scaling: The loss scaling of the run.

    Returns:
        A function of the same arguments and results. Differentiated, it gives gradients
        with these scales; the amaxes are lost.

    Raises:
        TypeError: `func` cannot be called, or `scaling` is no loss scaling.
        ValueError: When called: `func` quantizes by other recipes than that of the
            state, or by one with a state and `scaling` holds none.

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
    if not isinstance(scaling, AbstractLossScaling):
        raise TypeError(
            "`mpx.freeze(func, scaling)` needs the loss scaling of a run; got "
            f"{describe(scaling)}. Without one, call the function as it is."
        )

    @wraps(func)
    def frozen(*args: PyTree, **kwargs: PyTree) -> PyTree:
        try:
            with scaling._provide_frozen():
                return func(*args, **kwargs)
        except AmbientRecipe:
            if not scaling._tokens():
                raise
            with scaling._provide_frozen():
                return in_contexts(func)(*args, **kwargs)

    return frozen
