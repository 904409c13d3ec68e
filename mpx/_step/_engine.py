"""One batch: casts, runs, scales and differentiates."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from .._autocast import (
    NO_MASTER,
    AmbientRecipe,
    call_as_written,
    call_with_masters,
    in_contexts,
    noted_scaling,
)
from .._base.dtypes import full_precision_of, is_half
from .._base.errors import describe, warn_user
from .._base.jax_compat import is_on_a_mesh, manual_axes, spans_devices, varying_axes
from .._base.tree import is_float_leaf, is_trainable
from .._base.typing import AnyArray, LeafPredicate, LossScalar
from .._loss_scaling import AbstractLossScaling
from .._recipe_state import (
    MissingScales,
    StepAsked,
    at_step,
    is_random,
    missing_from,
)
from .._settings import (
    Wire,
    cast_leaf,
    casting_inputs,
    note_float16,
    noting_float16,
    settings_of,
    unkeyed,
    with_ambient,
)
from .._stored_weights import standing_for
from ._inputs import cast_inputs

_FLOAT32 = np.dtype(np.float32)


@dataclasses.dataclass(frozen=True)
class Problem:
    """A function to differentiate, and how.

    Attributes:
        func: The function.
        call: The public call to name in an error.
        has_aux: Whether `func` returns `(loss, aux)`.
        argnums: The positions to differentiate.
        compute: The dtype that inputs are cast to, or None.
        is_default: Whether this dtype is the default.
        half: The compute dtype, if known.
        keep: Returns whether a leaf is not cast.
        accumulate_dtype: The dtype in which gradients of a weight's uses are summed.
        allow_float16_weights: Whether weights may be float16.
        wire: The dtypes for communicating weights and gradients; None on one device.
        grad_dtype: The dtype of returned gradients; None means full precision.
    """

    func: Callable[..., PyTree]
    call: str
    has_aux: bool
    argnums: tuple[int, ...]
    compute: np.dtype | None
    is_default: bool
    half: np.dtype | None
    keep: LeafPredicate | None
    accumulate_dtype: np.dtype | None
    allow_float16_weights: bool
    wire: Wire | None = None
    grad_dtype: np.dtype | None = None

    @property
    def casts_before(self) -> np.dtype | None:
        """The dtype to cast inputs to before differentiating; gradients are cast back.

        It is bit-identical to a cast inside the differentiated function, whose
        derivative is the cast back, and saves differentiating and transposing a cast of
        every leaf. Only masters that sum gradients need the cast inside.
        """
        return self.compute if self.accumulate_dtype is None else None


class Differentiated(NamedTuple):
    """The results of differentiating the scaled loss.

    Attributes:
        scaled: The scaled loss, float32 at least.
        loss: The unscaled loss.
        aux: The function's second result.
        grads: The scaled gradients, one for each of `problem.argnums`, in the dtypes in
            which they were computed; `as_weights` casts them.
        amaxes: The amaxes of the recipes in the function, one array for each recipe.
    """

    scaled: LossScalar
    loss: LossScalar
    aux: PyTree
    grads: tuple[PyTree, ...]
    amaxes: tuple[Array, ...]


Result = TypeVar("Result")


def called(
    problem: Problem,
    scaling: AbstractLossScaling,
    differentiate: Callable[[Problem], Result],
) -> tuple[Problem, Result]:
    """Differentiates a problem, adapted to the recipes in its function.

    If the function reaches an ambient recipe, in a layer of `mpx.nn`, its precision is
    that of the layers: inputs are not cast by default. For a recipe with a state,
    autocast traces the function, to find the weights.

    Warns of float16 without loss scaling.

    Args:
        problem: The problem.
        scaling: The loss scaling.
        differentiate: Differentiates a problem.

    Returns:
        The adapted problem, and the result.

    Raises:
        ValueError: A recipe of the function has a state that `scaling` does not
            contain.
    """
    with noting_float16() as notes:
        try:
            result = differentiate(problem)
        except AmbientRecipe as met:
            if met.recipe and not scaling._tokens():
                raise missing_from(scaling, problem.call, met.recipe) from met
            func = in_contexts(problem.func) if met.recipe else problem.func
            half = None if problem.is_default else problem.compute
            problem = dataclasses.replace(problem, func=func, compute=half, half=half)
            result = differentiate(problem)
        except MissingScales as met:
            if scaling._tokens():
                raise
            where = problem.call, met.recipe, met.where
            raise missing_from(scaling, *where) from met
    if scaling._by_loss and (notes or problem.half == np.float16 or scaling._tokens()):
        where = "a recipe with a state" if scaling._tokens() else "float16"
        raise ValueError(
            f"`scaling` of {problem.call} checks only the loss, "
            f'`mpx.NoLossScaling(skip="loss")`, but computes with {where}, where a '
            "finite loss may have infinite gradients. Use the scaling that "
            "`mpx.init_scaling(func, *args)` returns."
        )
    if scaling._is_one and (notes or problem.half == np.float16):
        _warn_of_float16(problem.call)
    return problem, result


def _warn_of_float16(call: str) -> None:
    """Warns of float16 without loss scaling."""
    warn_user(
        f"{call} computes in float16 with `mpx.NoLossScaling`: gradients below 6e-8 "
        "silently become zero. Use `mpx.DynamicLossScaling()`; "
        "`mpx.init_scaling(func, *args)` returns what a function needs. Or compute "
        'in bfloat16: `mpx.autocast(func)`, or `policy="bfloat16"` in the explicit '
        "style. For a scale of 1 pass `mpx.StaticLossScaling(1.0)`."
    )


def scaled_value_and_grad(
    problem: Problem,
    scaling: AbstractLossScaling,
    args: PyTree,
    kwargs: PyTree,
    is_repeated: bool = False,
) -> Differentiated:
    """Differentiates the scaled loss, perhaps of one of several micro-batches."""
    settings = settings_of(problem.func)
    problem = _as_travelling(problem, args, kwargs)
    differentiate = functools.partial(_differentiated, problem, scaling, args, kwargs)
    recipes = () if settings is None else settings.recipes
    scale = None if scaling._is_one else scaling.loss_scale
    given = dict(wire=problem.wire, step=None, gives_step=True, is_repeated=is_repeated)
    # One context for forward and backward pass, which share cached traces.
    if not (recipes and is_random(recipes)):
        with with_ambient(**given, gives_scale=scale is not None):
            try:
                return differentiate(None, contextlib.nullcontext)
            except StepAsked:  # by a recipe or a rule inside, not in `recipes`
                pass
    with with_ambient(**given, gives_scale=False):
        return at_step(scaling.record.steps, functools.partial(differentiate, scale))


def _as_travelling(problem: Problem, args: PyTree, kwargs: PyTree) -> Problem:
    """Returns the problem with dtypes of communication, if there are several devices.

    By default sums over devices are float32. The explicit style casts weights before
    the function runs, so their gradients would be summed in half precision: the casts
    are then moved to each use. In `shard_map` without `check_vma` the caller sums, so
    nothing changes.
    """
    wire = problem.wire
    if wire is not None and wire.is_alone:
        return problem
    if wire is None:
        leaves = jax.tree.leaves((args, kwargs))
        if not is_on_a_mesh() and not any(map(spans_devices, leaves)):
            return problem
        wire = Wire(_FLOAT32)
    is_cast = problem.compute is not None and is_half(problem.compute)
    if is_cast and problem.accumulate_dtype is None:
        axes = manual_axes()
        if axes and not problem.wire and not varying_axes(jax.lax.axis_index(axes[0])):
            return problem
        problem = dataclasses.replace(problem, accumulate_dtype=_FLOAT32)
    return dataclasses.replace(problem, wire=wire)


def _differentiated(
    problem: Problem,
    scaling: AbstractLossScaling,
    args: PyTree,
    kwargs: PyTree,
    scale: AnyArray | None,
    in_step: Callable[[Any], contextlib.AbstractContextManager[object]],
) -> Differentiated:
    func = problem.func
    if problem.casts_before is not None:
        args, kwargs, func = cast_inputs(
            func, args, kwargs, problem.casts_before, problem.keep
        )
    if not scaling._is_one:
        func = functools.partial(call_as_written, func)
    weights = tuple(args[i] for i in problem.argnums)
    weights, fixed = eqx.partition(weights, is_trainable)
    outside = weights
    if problem.accumulate_dtype is not None:
        # A sum may exceed the range of half-precision weights.
        weights = jax.tree.map(
            lambda w: cast_leaf(w, full_precision_of(w.dtype)), weights
        )

    # JAX records the call stack at each of the user's operations, at a cost per frame,
    # so there are as few frames as possible between here and the function.
    def scaled_loss(weights: PyTree, tokens: PyTree, scale: PyTree) -> PyTree:
        full = list(args)
        for i, weight in zip(problem.argnums, eqx.combine(weights, fixed), strict=True):
            full[i] = weight
        casting = casting_inputs(problem.call, problem.compute, problem.is_default)
        stored = contextlib.nullcontext()
        if unkeyed().payloads:
            stored = standing_for(weights, outside)
        with casting, provide(tokens), in_step(scale), stored:
            if problem.accumulate_dtype is not None:
                result = _call_with_masters(problem, full, kwargs, args)
            else:
                result = func(*full, **kwargs)
        loss, aux = _loss_and_aux(problem, result)
        loss = _computed_first(loss)
        if scaling._is_one:
            return scaling.scale(loss), (loss, aux)
        with noted_scaling():
            return scaling.scale(loss), (loss, aux)

    tokens, provide = scaling._tokens(), scaling._provide
    # Also by the scales of recipes, whose derivative is the amaxes (`_recipe_state`),
    # and by the loss scale, so that rules detect the derivative that they are part of.
    differentiate = jax.value_and_grad(scaled_loss, argnums=(0, 1, 2), has_aux=True)
    (scaled, (loss, aux)), (grads, amaxes, _) = differentiate(weights, tokens, scale)
    return Differentiated(scaled, loss, aux, grads, scaling._gathered(amaxes))


@jax.custom_vjp
def _computed_first(loss: Array) -> Array:
    """Returns a loss that is computed before the backward pass begins.

    The loss is not read until the end of the step. XLA (jaxlib 0.10.2, 2026-11) would
    compute it then, and keep its inputs, the logits, for the whole backward pass.
    """
    return loss


def _keep_loss(loss: Array) -> tuple[Array, Array]:
    return loss, loss


def _begin(loss: Array, cotangent: Array) -> tuple[Array]:
    return (jax.lax.optimization_barrier((cotangent, loss))[0],)


_computed_first.defvjp(_keep_loss, _begin)


def as_weights(
    problem: Problem, grads: tuple[PyTree, ...], args: PyTree
) -> tuple[PyTree, ...]:
    """Casts gradients to the dtypes of the weights, which are among the arguments."""
    if problem.casts_before is None:
        return grads

    def cast(grad: AnyArray | None, weight: AnyArray) -> AnyArray | None:
        # Sums over devices are float32, also for half-precision weights.
        is_wider = grad is None or grad.dtype.itemsize > weight.dtype.itemsize
        return grad if is_wider else cast_leaf(grad, weight.dtype)

    return jax.tree.map(
        cast,
        grads,
        tuple(args[i] for i in problem.argnums),
        is_leaf=lambda grad: grad is None,
    )


def _call_with_masters(
    problem: Problem, args: PyTree, kwargs: PyTree, declared: PyTree
) -> PyTree:
    """Calls the function with cast inputs; weights are cast at each use.

    Args:
        problem: The problem.
        args: The arguments, with weights in full precision.
        kwargs: The keyword arguments.
        declared: The arguments in the dtypes for the function.
    """
    given = jax.tree.map(
        lambda x, like: cast_leaf(x, like.dtype) if is_float_leaf(like) else x,
        tuple(args),
        declared,
    )
    if problem.compute is None or problem.accumulate_dtype is None:
        return call_as_written(problem.func, *given, **kwargs)
    cast_args, cast_kwargs, func = cast_inputs(
        problem.func, given, kwargs, problem.compute, problem.keep
    )
    masters = tuple(
        arg if i in problem.argnums else jax.tree.map(lambda _: NO_MASTER, arg)
        for i, arg in enumerate(args)
    )
    return call_with_masters(
        func, cast_args, cast_kwargs, masters, problem.accumulate_dtype
    )


def _loss_and_aux(problem: Problem, result: PyTree) -> tuple[Array, PyTree]:
    if not problem.has_aux:
        return _loss(problem, result), None
    if not isinstance(result, tuple) or len(result) != 2:
        raise TypeError(
            f"With `has_aux=True` the function passed to {problem.call} must return "
            f"`(loss, aux)`; got {_describe_result(result)}. Return both, or omit "
            "`has_aux`."
        )
    return _loss(problem, result[0]), result[1]


def _loss(problem: Problem, value: object) -> Array:
    if isinstance(value, float):
        value = jnp.asarray(value)
    is_array = isinstance(value, jax.Array | np.ndarray | np.generic)
    if not is_array or not jnp.issubdtype(value.dtype, jnp.floating) or value.shape:
        raise _no_loss(problem, value, is_array)
    if value.dtype == np.float16:
        note_float16()
    wide = value.dtype if value.dtype == np.float64 else _FLOAT32
    return jnp.asarray(value).astype(wide)


def _no_loss(problem: Problem, value: Any, is_array: bool) -> Exception:
    """Returns the error for a result that is not a loss."""
    call = f"The function passed to {problem.call}"
    if is_array and jnp.issubdtype(value.dtype, jnp.floating):
        reduce = "in full precision: `mpx.force_full_precision(jnp.mean, jnp.float32)"
        if problem.compute is None:  # autocast sums in float32
            reduce = "for example by `jnp.mean"
        return ValueError(
            f"{call} must return a scalar loss; got {describe(value)}. Reduce it, "
            f"{reduce}(losses)`."
        )
    remedy = "Return a real number"
    if isinstance(value, tuple):
        remedy = "For `(loss, aux)` set `has_aux=True`"
    elif value is None:
        remedy = "Is a `return` missing?"
    elif is_array and jnp.issubdtype(value.dtype, jnp.complexfloating):
        remedy = "Return its real part or its absolute value"
    return TypeError(
        f"{call} must return a floating scalar; got {_describe_result(value)}. "
        f"{remedy.removesuffix('.')}{'' if remedy.endswith('?') else '.'}"
    )


def _describe_result(value: object) -> str:
    if isinstance(value, tuple | list):
        inner = ", ".join(describe(item) for item in value)
        return f"a {type(value).__name__} of ({inner})"
    return describe(value)
