"""`compare`: two precisions of a loss of NNX objects, which stay unchanged."""

from collections.abc import Callable

from jaxtyping import PyTree

from .._grad import Options
from .._loss_scaling import AbstractLossScaling, NoLossScaling
from .._policy import Policy
from .._typing import LeafPredicate
from .._watch import Comparison, compare as compare_trees
from .._wraps import wraps
from ._gradients import checked_filters, pure_call

_CALL = "`mpx.nnx.compare`"


def compare(
    reference: Callable[..., PyTree],
    func: Callable[..., PyTree],
    scaling: AbstractLossScaling | None = None,
    has_aux: bool = False,
    *,
    policy: Policy | str | None = None,
    keep: LeafPredicate | None = None,
    floor: bool = True,
) -> Callable[..., Comparison]:
    """Compares two precisions of a loss of NNX objects; replaces `mpx.compare`.

    Both start from the same objects, which are unchanged afterwards: statistics and
    random streams too. Gradients are those of each `nnx.Param` of the first argument.

    Args:
        reference: The loss to compare with, `reference(model, *args)`.
        func: The loss in another precision, of the same arguments.
        scaling: The loss scaling of `func`, as in `mpx.compare`.
        has_aux: Both return `(loss, aux)`.
        policy: The policy of a `func` in the explicit style.
        keep: Selects leaves that are not cast.
        floor: False omits the floor.

    Returns:
        A function of the arguments of both that returns a `mpx.reports.Comparison`.

    Raises:
        TypeError: As `value_and_grad` and `mpx.compare` do.
        ValueError: As `value_and_grad` and `mpx.compare` do.

    Examples:
        >>> import jax.numpy as jnp, mpx.nnx
        >>> from flax import nnx
        >>> model = nnx.Linear(4, 2, rngs=nnx.Rngs(0))
        >>> loss = lambda model, x: jnp.mean(model(x) ** 2)
        >>> found = mpx.nnx.compare(loss, mpx.autocast(loss))(model, jnp.ones((3, 4)))
        >>> [gradient.name for gradient in found.gradients]
        ['bias', 'kernel']
    """
    options = Options(has_aux=has_aux, policy=policy, keep=keep)
    given = NoLossScaling() if scaling is None else scaling
    checked_filters(_CALL, reference, given, 0, True, Options(has_aux=has_aux))
    filters = checked_filters(_CALL, func, given, 0, True, options)

    def compared(*args: PyTree, **kwargs: PyTree) -> Comparison:
        with pure_call(_CALL, filters, 0, options, args, kwargs) as pure:

            def of_trees(loss: Callable[..., PyTree]) -> Callable[..., PyTree]:
                call = pure.of(loss)

                # The function is among the arguments of a pure one; here are two.
                @wraps(loss)
                def own(*full: PyTree, **kwargs: PyTree) -> PyTree:
                    *args, (fixed, _), state = full
                    return call(*args, (fixed, loss), state, **kwargs)

                return own

            compared_trees = compare_trees(
                of_trees(reference),
                of_trees(func),
                scaling,
                has_aux=True,
                policy=policy,
                keep=pure.options.keep,
                floor=floor,
            )
            return compared_trees(*pure.args_with(func), **pure.parts.kwargs)

    return compared
