"""`init_scaling`: the state of a training step that a function's precision needs."""

from collections.abc import Callable

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr
from jaxtyping import PyTree

from .._ambient import AmbientRecipe, in_contexts
from .._ambient_record import settings_of
from .._autocast import is_marked
from .._dtypes import half_precision_datatype
from .._errors import describe
from .._loss_scaling import AbstractLossScaling, DynamicLossScaling, NoLossScaling
from .._policy import Policy, get_policy
from .._program import Call, distinct_equations, is_array_or_type, sub_jaxprs
from .._recipe_state import StateRequests, collecting_requests
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
        compute = None  # autocast functions in it want their inputs as they are
    needs_scaling = compute == np.float16 or _computes_in_float16(jaxpr)
    loss = DynamicLossScaling() if needs_scaling else NoLossScaling()
    if not found.quantized:
        return loss
    if found.requests:
        _refuse_repetition(jaxpr, found.calls)
    return RecipeScaling._new(loss, found)


def _compute_dtype(policy: object, is_autocast: bool) -> np.dtype:
    """What the gradient functions cast inputs to."""
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
    """Raises where JAX would add up the amaxes of calls that were traced once.

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
    """For each call of a function that autocast made: its innermost loop, or "".

    Args:
        jaxpr: The program with the calls.
        known: The answers for programs within, each asked once, by their `id`.
    """
    # The outermost program holds those within it, so ids stay apart.
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
    """What a function asks for, and its program."""
    call = Call(func, args, kwargs, is_array_or_type)
    with collecting_requests() as found:
        return found, jax.make_jaxpr(call)(*call.arrays)


def _computes_in_float16(jaxpr: ClosedJaxpr) -> bool:
    return any(
        getattr(variable.aval, "dtype", None) == np.float16
        for equation in distinct_equations(jaxpr)
        for variable in equation.outvars
    )
