"""`init_scaling` creates the state of a training step; `inference` only reads it."""

from collections.abc import Callable

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr
from jaxtyping import PyTree

from .._autocast import AmbientRecipe, in_contexts, is_marked
from .._base.dtypes import half_precision_datatype
from .._base.errors import describe
from .._base.wraps import wraps
from .._loss_scaling import AbstractLossScaling, DynamicLossScaling, NoLossScaling
from .._program import Call, distinct_equations, is_array_or_type, sub_jaxprs
from .._recipe_state import (
    MissingScales,
    StateRequests,
    collecting_requests,
    missing_from,
)
from .._settings import Policy, get_policy, settings_of
from ._recipe_scaling import RecipeScaling


def init_scaling(
    func: Callable[..., PyTree],
    *args: PyTree,
    policy: Policy | str | None = None,
    **kwargs: PyTree,
) -> AbstractLossScaling:
    r"""Creates the initial loss-scaling state for a function.

    Gradients below $2^{-24}$ are zero in float16, so if anything is computed in float16
    the scaling is `DynamicLossScaling()`. bfloat16 has the range of float32 and gets
    `NoLossScaling()`, as does float32. A recipe with a state, `mpx.DelayedScaling`,
    needs scales for each matmul: if the function uses one, the loss scaling is returned
    inside a `RecipeScaling`.

    The precision is the one that the gradient functions compute in:

    - An autocast function sets it. Disabled, `enabled=False`, it is float32.
    - Any other function is in the explicit style. The gradient functions cast its
      inputs to the compute dtype of `policy`, or else to
      `mpx.half_precision_datatype()`, float16 by default.
    - Anything that the function, a region in it, or an autocast function inside
      computes in float16 counts, too.

    The function is traced with the unchanged arguments; nothing is computed.

    Args:
        func: The function that will be differentiated.
        *args: Its arguments; `jax.ShapeDtypeStruct` is enough for arrays.
        policy: The policy that will be passed to the gradient function, if any. (Bind a
            keyword of this name of `func` itself first: `functools.partial`.)
        **kwargs: Its keyword arguments.

    Returns:
        A new loss scaling; a `RecipeScaling` if there is a recipe with a state.

    Raises:
        TypeError: `func` is not callable, or `policy` is invalid.
        ValueError: `policy` is passed for an autocast function.

    Examples:
        >>> import jax, jax.numpy as jnp, mpx
        >>> loss = lambda w, x: jnp.mean(x @ w)
        >>> w = jax.ShapeDtypeStruct((4, 2), "float32")
        >>> x = jax.ShapeDtypeStruct((3, 4), "float32")
        >>> type(mpx.init_scaling(mpx.autocast(loss, jnp.float16), w, x)).__name__
        'DynamicLossScaling'
        >>> type(mpx.init_scaling(mpx.autocast(loss), w, x)).__name__
        'NoLossScaling'
        >>> type(mpx.init_scaling(loss, w, x)).__name__  # will be cast to float16
        'DynamicLossScaling'
    """
    if not callable(func):
        raise TypeError(
            "`mpx.init_scaling(func, *args)` needs the function that will be "
            f"differentiated; got {describe(func)}."
        )
    settings = settings_of(func)
    compute = _compute_dtype(policy, settings is not None)
    try:
        found, jaxpr = _traced(func, args, kwargs)
    except AmbientRecipe:
        found, jaxpr = _traced(in_contexts(func), args, kwargs)
    if settings is not None:
        compute = settings.dtype if settings.is_enabled else None
    elif found.calls or found.is_switched_off:
        compute = None  # autocast functions inside take uncast inputs
    needs_scaling = compute == np.float16 or _computes_in_float16(jaxpr)
    loss = DynamicLossScaling() if needs_scaling else NoLossScaling()
    if not found.quantized:
        return loss
    if found.requests:
        _refuse_repetition(jaxpr, found.calls)
    return RecipeScaling._new(loss, found)


def _compute_dtype(policy: object, is_autocast: bool) -> np.dtype:
    """Returns the dtype that the gradient functions cast inputs to."""
    call = "`policy` of `mpx.init_scaling`"
    if policy is None:
        return np.dtype(half_precision_datatype())
    policy = get_policy(policy) if isinstance(policy, str) else policy
    if not isinstance(policy, Policy):
        raise TypeError(
            f"{call} must be the `mpx.Policy` passed to the gradient function, or "
            f"its text; got {describe(policy)}. Bind a keyword of this name of the "
            "function itself first: `functools.partial(func, policy=...)`."
        )
    if is_autocast:
        raise ValueError(
            f"{call} sets how inputs are cast, but this is an autocast function, "
            "which casts inside. Omit it."
        )
    return np.dtype(policy.compute_dtype)


def _refuse_repetition(jaxpr: ClosedJaxpr, calls: int) -> None:
    """Raises if JAX would sum the amaxes of calls that were traced once.

    These are calls in a loop, and several calls of one jitted function.
    """
    loops = _loops_around_calls(jaxpr.jaxpr, {})
    for loop in filter(None, loops):
        raise ValueError(
            "An autocast function with `mpx.DelayedScaling` is called in the "
            f"{loop}, which would sum the amaxes of all iterations instead of taking "
            "their maximum. Put `mpx.autocast` around the function that contains "
            "the loop."
        )
    if len(loops) > calls:
        raise ValueError(
            f"An autocast function with `mpx.DelayedScaling` is called {len(loops)} "
            f"times but traced {calls} times, because `jax.jit` around it caches the "
            "trace; the amaxes of such calls would be summed. Put `mpx.autocast` or "
            "`jax.jit` around the function that makes the calls."
        )


def _loops_around_calls(jaxpr: Jaxpr, known: dict[int, list[str]]) -> list[str]:
    """Returns the innermost loop, or "", for each call of an autocast function.

    Args:
        jaxpr: The program with the calls.
        known: The results for nested programs by `id`, each computed once.
    """
    # The outermost program keeps all nested ones alive, so ids stay unique.
    if id(jaxpr) not in known:
        found: list[str] = []
        for equation in jaxpr.eqns:
            name = equation.primitive.name
            around = name if name in ("scan", "while") else ""
            if is_marked(equation):
                found.append("")
            for sub in sub_jaxprs(equation):
                inner = _loops_around_calls(sub.jaxpr, known)
                found += [loop or around for loop in inner]
        known[id(jaxpr)] = found
    return known[id(jaxpr)]


def _traced(
    func: Callable[..., PyTree], args: PyTree, kwargs: PyTree
) -> tuple[StateRequests, ClosedJaxpr]:
    """Returns the state that a function requests, and its program."""
    call = Call(func, args, kwargs, is_array_or_type)
    with collecting_requests() as found:
        return found, jax.make_jaxpr(call)(*call.arrays)


def _computes_in_float16(jaxpr: ClosedJaxpr) -> bool:
    return any(
        getattr(variable.aval, "dtype", None) == np.float16
        for equation in distinct_equations(jaxpr)
        for variable in equation.outvars
    )


# --- Inference: the forward pass of the training, without updating the state ----------

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
