"""One attempt at one batch: cast, run, scale, differentiate, unscale."""

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from .._dtypes import full_precision_of
from .._errors import describe
from .._loss_scaling import AbstractLossScaling
from .._master import NO_MASTER, call_with_masters
from .._tree import is_trainable
from .._typing import FloatScalar, LeafPredicate
from ._inputs import cast_inputs


@dataclasses.dataclass(frozen=True)
class Problem:
    """What is to be differentiated, and how.

    Attributes:
        func: The function.
        call: The public call to name in an error.
        has_aux: Whether `func` returns `(loss, aux)`.
        argnums: The positions that are differentiated.
        compute: The dtype that inputs are cast to, or None.
        keep: Says which leaves are not cast.
        accumulate_dtype: The dtype that gradients are summed in, see `_master`.
        allow_float16_weights: Whether weights may be float16.
    """

    func: Callable[..., Any]
    call: str
    has_aux: bool
    argnums: tuple[int, ...]
    compute: np.dtype | None
    keep: LeafPredicate | None
    accumulate_dtype: np.dtype | None
    allow_float16_weights: bool


def scaled_value_and_grad(
    problem: Problem, scaling: AbstractLossScaling, args: Any, kwargs: Any
) -> tuple[FloatScalar, FloatScalar, Any, tuple[PyTree, ...]]:
    """Differentiates the scaled loss.

    Returns:
        The scaled loss, the unscaled loss (both float32 at least), aux as the function
        returned it, and the scaled gradients in the weights' dtypes, one for each of
        `problem.argnums`.
    """

    def scaled_loss(weights: Any, others: Any) -> Any:
        args, kwargs = _merge(problem, weights, others)
        loss, aux = _loss_and_aux(problem, _run(problem, args, kwargs))
        return scaling.scale(loss), (loss, aux)

    weights = tuple(args[i] for i in problem.argnums)
    weights, fixed = eqx.partition(weights, is_trainable)
    others = [None if i in problem.argnums else arg for i, arg in enumerate(args)]
    differentiate = eqx.filter_value_and_grad(scaled_loss, has_aux=True)
    (scaled, (loss, aux)), grads = differentiate(weights, (fixed, others, kwargs))
    return scaled, loss, aux, grads


def value_and_grad(
    problem: Problem, scaling: AbstractLossScaling, args: Any, kwargs: Any
) -> tuple[FloatScalar, Any, tuple[PyTree, ...]]:
    """The unscaled loss, aux, and the unscaled gradients, float32 at least."""
    _, loss, aux, grads = scaled_value_and_grad(problem, scaling, args, kwargs)
    return loss, aux, scaling.unscale(grads)


def _merge(problem: Problem, weights: Any, others: Any) -> tuple[Any, Any]:
    fixed, args, kwargs = others
    args, weights = list(args), eqx.combine(weights, fixed)
    for position, weight in zip(problem.argnums, weights, strict=True):
        args[position] = weight
    return tuple(args), kwargs


def _run(problem: Problem, args: Any, kwargs: Any) -> Any:
    if problem.compute is None:
        return problem.func(*args, **kwargs)
    cast_args, cast_kwargs, func = cast_inputs(
        problem.func, args, kwargs, problem.compute, problem.keep
    )
    if problem.accumulate_dtype is None:
        return func(*cast_args, **cast_kwargs)
    masters = tuple(
        arg if i in problem.argnums else jax.tree.map(lambda _: NO_MASTER, arg)
        for i, arg in enumerate(args)
    )
    return call_with_masters(
        func, cast_args, cast_kwargs, masters, problem.accumulate_dtype
    )


def _loss_and_aux(problem: Problem, result: Any) -> tuple[Array, Any]:
    if not problem.has_aux:
        return _loss(problem, result), None
    if not isinstance(result, tuple) or len(result) != 2:
        raise TypeError(
            f"With `has_aux=True` the function given to {problem.call} must return "
            f"`(loss, aux)`; got {_describe_result(result)}. Return both, or leave "
            "`has_aux` out."
        )
    return _loss(problem, result[0]), result[1]


def _loss(problem: Problem, value: Any) -> Array:
    call = f"The function given to {problem.call}"
    if isinstance(value, float):
        value = jnp.asarray(value)
    is_array = isinstance(value, jax.Array | np.ndarray | np.generic)
    if not is_array or not jnp.issubdtype(value.dtype, jnp.floating):
        remedy = "Return a real number"
        if isinstance(value, tuple):
            remedy = "For `(loss, aux)` say `has_aux=True`"
        elif value is None:
            remedy = "Is a `return` missing?"
        elif is_array and jnp.issubdtype(value.dtype, jnp.complexfloating):
            remedy = "Take its real part or its absolute value"
        raise TypeError(
            f"{call} must return a floating scalar; got {_describe_result(value)}. "
            f"{remedy.removesuffix('.')}{'' if remedy.endswith('?') else '.'}"
        )
    if value.shape != ():
        raise ValueError(
            f"{call} must return a scalar loss; got {describe(value)}. Reduce it, in "
            "full precision: `mpx.force_full_precision(jnp.mean, jnp.float32)(losses)`."
        )
    return jnp.asarray(value).astype(full_precision_of(value.dtype))


def _describe_result(value: Any) -> str:
    if isinstance(value, tuple | list):
        inner = ", ".join(describe(item) for item in value)
        return f"a {type(value).__name__} of ({inner})"
    return describe(value)
