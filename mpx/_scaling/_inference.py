"""`inference`: a function computed as in the training, whose state stays as it is."""

from collections.abc import Callable

from jaxtyping import PyTree

from .._ambient import AmbientRecipe, in_contexts
from .._errors import describe
from .._loss_scaling import AbstractLossScaling
from .._recipe_state import MissingScales, missing_from
from .._wraps import wraps

_CALL = "`mpx.inference`"


def inference(
    func: Callable[..., PyTree], scaling: AbstractLossScaling
) -> Callable[..., PyTree]:
    """Wraps a function to compute as a training run does, to evaluate or to serve.

    Which matmuls a recipe quantizes depends on the function: its last ones stay in half
    precision, and a function of only the first layers ends with others. Here the same
    uses of the same weights are quantized as in the function passed to
    `mpx.init_scaling`, with `mpx.DelayedScaling` by the scales of the run; the state is
    not updated. So logits, predictions or features equal those of the training's
    forward pass. The same line evaluates in every precision: without a recipe the
    function is called unchanged.

    A weight is identified by its path, and its uses by named scopes and shape, or by
    shape alone where the scopes differ.

    Args:
        func: An autocast function of the same weights with the same recipe, or a
            function that calls one. Its result may differ from that of the training.
        scaling: The scaling of the run, from `mpx.init_scaling`.

    Returns:
        A function of the same arguments and results. Its derivative uses these scales
        and discards the amaxes.

    Raises:
        TypeError: `func` is not callable, or `scaling` is not a loss scaling.
        ValueError: When called: `func` uses other recipes than the state, or a recipe
            with a state and `scaling` contains none, or `func` has none of the state's
            weights.

    Warns:
        UserWarning: The state has scales and no step was made: they are 1.

    Examples:
        >>> import jax, jax.numpy as jnp, mpx
        >>> recipe = mpx.DelayedScaling(warm_start=True)
        >>> def logits(weights, x):
        ...     return jnp.tanh(x @ weights[0]) @ weights[1]
        >>> def loss(weights, x):
        ...     return jnp.mean(logits(weights, x) ** 2)
        >>> weights, x = [jnp.ones((4, 4)), jnp.ones((4, 3))], jnp.ones((2, 4))
        >>> scaling = mpx.init_scaling(mpx.autocast(loss, recipe=recipe), weights, x)
        >>> predict = mpx.autocast(logits, recipe=recipe)
        >>> mpx.inference(predict, scaling)(weights, x).shape
        (2, 3)
    """
    if not callable(func):
        raise TypeError(
            f"`mpx.inference(func, scaling)` needs a function; got {describe(func)}."
        )
    if not isinstance(scaling, AbstractLossScaling):
        raise TypeError(
            "`mpx.inference(func, scaling)` needs the loss scaling of a run; got "
            f"{describe(scaling)}. Without one, call the function directly."
        )

    @wraps(func)
    def frozen(*args: PyTree, **kwargs: PyTree) -> PyTree:
        try:
            with scaling._provide_frozen():
                return func(*args, **kwargs)
        except MissingScales as met:
            if scaling._tokens():
                raise
            raise missing_from(scaling, _CALL, met.recipe, met.where) from met
        except AmbientRecipe as met:
            if not scaling._tokens():
                raise missing_from(scaling, _CALL, met.recipe) from met
            with scaling._provide_frozen():
                return in_contexts(func)(*args, **kwargs)

    return frozen
