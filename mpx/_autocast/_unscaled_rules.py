"""Derivative rules that compute with their gradient, and need its true size.

A rule that clips the gradient, adds noise to it, or adds the gradient of another loss,
is not proportional to its input, so the loss scale changes its result. It gets the
gradient without the scale, in float32, and is computed in float32, where no scale is
needed. Its result is scaled again.

The scale comes from a gradient function that provides it on request
(`_recipe_state/_operands.py`), and differentiates by it. The scale is an operand of
each such function here. It counts as differentiated where that gradient function
differentiates, but not where a derivative within the loss does, whose gradients have no
scale.

A gradient that is non-finite at a scale above 1 may be so because of the scale, and a
rule may hide it: it clips infinity, or replaces NaN. Then all its results become NaN,
so that the step is skipped. At a scale of 1 the gradient is left to the rule.
"""

import contextlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.extend.core import ClosedJaxpr, JaxprEqn

from .._base.jax_compat import (
    bind_equation,
    equation_context,
    open_jaxpr,
    own_source_lines,
    place_of,
)
from .._base.tree import finite_by_leaf
from .._base.typing import AnyArray
from .._loss_scaling import StaticLossScaling
from .._program import (
    Frame,
    PrimitiveClass,
    avals,
    is_inexact,
    is_inside,
    is_ours,
    is_proportional,
    program_of,
    run_by,
    widened,
)
from .._recipe_state import StepAsked
from .._settings import ambient
from ._context import FULL
from ._decide import Choice, Reason, noted

_WITH_RULES = ("custom_jvp_call", "custom_vjp_call")


def is_settled(equation: JaxprEqn, unsettled: Callable[..., Any]) -> bool:
    """Returns whether a function's rule is mpx's own, or has its scale handled.

    Args:
        equation: A call of the function.
        unsettled: The function of mpx that represents a user's function.
    """
    info = open_jaxpr(program_of(equation)).debug_info.func_src_info
    code = inspect.unwrap(unsettled).__code__  # types may be checked around it
    place = f"{code.co_filename}:{code.co_firstlineno}"
    name, _, found = info.partition(" at ")
    is_own = is_ours(Frame(found.rpartition(":")[0], 0, 0, name))
    return is_own and found != place


def ask_for_scale(closed: ClosedJaxpr, count: int) -> None:
    """Begins the step again, with its loss scale, if a rule depends on it.

    Args:
        closed: The program of the rule.
        count: The number of gradients, which are its last inputs.

    Raises:
        StepAsked: The rule depends on it, and a gradient function can provide it.
    """
    here = ambient()
    # A trace for another autocast function is rewritten by that function.
    if not here.gives_scale or here.is_tracing or is_proportional(closed, count):
        return
    raise StepAsked


def run_as_written(closed: ClosedJaxpr, arrays: Sequence[AnyArray]) -> list[AnyArray]:
    """Runs a program; the operations of rules keep their own source lines.

    JAX would give them the line of the call, as the rules are traced only now; in a jit
    or a loop it always does so.
    """
    calls = [e for e in closed.eqns if e.primitive.name in _WITH_RULES]
    places = {id(e): place_of(open_jaxpr(program_of(e)))[0] for e in calls}
    own = {call for call, file in places.items() if not is_inside(file)}
    if not own:
        return core.jaxpr_as_fun(closed)(*arrays)

    def bind(equation: JaxprEqn, operands: list[AnyArray]) -> Sequence[AnyArray]:
        with equation_context(equation), contextlib.ExitStack() as stack:
            if id(equation) in own:
                stack.enter_context(own_source_lines())
            return bind_equation(equation, *operands)

    return list(map(run_by(bind, closed, arrays), closed.jaxpr.outvars))


def may_see_scale(equation: JaxprEqn) -> bool:
    """Returns whether a call's rule may not be proportional to its gradient."""
    types = avals(equation.invars)
    active = [i for i, aval in enumerate(types) if is_inexact(aval)]

    def backward(args: list[AnyArray], gradients: list[AnyArray]) -> Any:
        def function(*some: AnyArray) -> list[AnyArray]:
            whole = list(args)
            for i, x in zip(active, some, strict=True):
                whole[i] = x
            results = bind_equation(equation, *whole)
            return [x for x in results if is_inexact(jax.typeof(x))]

        return jax.vjp(function, *(args[i] for i in active))[1](gradients)

    gradients = [a for a in avals(equation.outvars) if is_inexact(a)]
    try:
        closed = jax.make_jaxpr(backward)(types, gradients)
    except Exception:  # it is in a `shard_map`, and uses its axes
        return True
    return not is_proportional(closed, len(gradients))


def unscaled(
    closed: ClosedJaxpr,
    residuals: Sequence[AnyArray],
    gradients: Sequence[AnyArray],
    scale: AnyArray,
) -> list[AnyArray]:
    """Applies a rule to gradients without their scale, and scales the results.

    Args:
        closed: The program of the rule, in declared dtypes.
        residuals: Its first inputs.
        gradients: Its other inputs, scaled.
        scale: The loss scale.

    Returns:
        Its results, in float32 or wider.
    """
    scaling = StaticLossScaling(scale)
    wide = widened(closed)
    choice = Choice(PrimitiveClass.FULL, Reason.UNSCALED, FULL)
    with noted("custom_vjp_call", choice):
        given = [*residuals, *scaling.unscale(list(gradients))]
        pairs = zip(given, wide.in_avals, strict=True)
        arrays = [
            jax.lax.convert_element_type(x, aval.dtype) if is_inexact(aval) else x
            for x, aval in pairs
        ]
        results = scaling.scale(core.jaxpr_as_fun(wide)(*arrays))
        known = [x for x in gradients if is_inexact(jax.typeof(x))]
        are_finite = jnp.all(jnp.stack(list(finite_by_leaf(known))))
        is_right = are_finite | (scale <= 1)
        return [
            jnp.where(is_right, x, np.nan).astype(x.dtype)
            if is_inexact(jax.typeof(x))
            else x
            for x in results
        ]
