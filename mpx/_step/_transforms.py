"""The public gradient functions, and their options."""

import contextlib
import dataclasses
import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from .._base.dtypes import float_dtype, half_precision_datatype
from .._base.errors import describe
from .._base.typing import DTypeLike, LeafPredicate
from .._base.wraps import wraps
from .._loss_scaling import AbstractLossScaling, NoLossScaling
from .._settings import (
    MARK,
    Mark,
    Payloads,
    Policy,
    Settings,
    get_policy,
    settings_of,
    with_ambient,
)
from .._stored_weights import StoredWeight, dequantized, reading
from . import _inputs
from ._accumulate import Accumulation
from ._attempt import GradientResult, attempt, decided_by_loss, retried
from ._engine import Problem, as_weights, called, scaled_value_and_grad

# --- Options of gradient functions ----------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Options:
    """The options that all gradient functions share, by their public names."""

    has_aux: bool = False
    use_mixed_precision: bool = True
    policy: Policy | str | None = None
    keep: LeafPredicate | None = None
    accumulate: int | Accumulation = 1
    accumulate_dtype: DTypeLike | None = None
    retries: int = 0

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> Self:
        """Reads the options from a gradient function's arguments, its `locals()`.

        Each function lists its options itself, so that `help`, editors and the
        documentation show them.
        """
        names = (field.name for field in dataclasses.fields(cls))
        return cls(**{name: arguments[name] for name in names if name in arguments})


def problem_builder(
    call: str, func: Callable[..., PyTree], argnums: tuple[int, ...], options: Options
) -> Callable[[int], Problem]:
    """Reads the options now; the half precision datatype is read at each call."""
    if not callable(func):
        raise TypeError(f"{call} needs a function; got {describe(func)}.")
    policy = options.policy
    policy = get_policy(policy) if isinstance(policy, str) else policy
    if policy is not None and not isinstance(policy, Policy):
        raise TypeError(
            f"`policy` of {call} must be a `mpx.Policy` or its text; got "
            f"{describe(policy)}."
        )
    if options.keep is not None and not callable(options.keep):
        raise TypeError(
            f"`keep` of {call} must be a function `keep(path, leaf) -> bool`; got "
            f"{describe(options.keep)}."
        )
    summed = options.accumulate_dtype
    if summed is not None:
        summed = float_dtype(summed, f"`accumulate_dtype` of {call}")
    if settings_of(func) is not None:
        _refuse_casts(options, policy, settings_of(func), call)

    def build(count: int) -> Problem:
        """Returns the problem for a call with `count` positional arguments."""
        # Read at each call, because ambient settings may have changed.
        settings, compute, half = settings_of(func), None, None
        positions = positions_in_call(argnums, count, call)
        if options.use_mixed_precision and settings is None:
            half = half_precision_datatype() if policy is None else policy.compute_dtype
            compute = half = np.dtype(half)
        elif (
            options.use_mixed_precision and settings is not None and settings.is_enabled
        ):
            half = settings.dtype
            _refuse_other_weights(func, settings, positions, call)
        return Problem(
            func=func if options.use_mixed_precision else _control(func),
            call=call,
            has_aux=options.has_aux,
            argnums=positions,
            compute=compute,
            is_default=policy is None,
            half=half,
            keep=options.keep,
            accumulate_dtype=summed,
            allow_float16_weights=policy is not None
            and policy.param_dtype == np.float16,
            wire=policy._wire
            if options.use_mixed_precision and policy is not None
            else None,
            grad_dtype=None if policy is None else policy._grad_dtype,
        )

    return build


def _control(func: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """Returns the function without autocast and recipes."""

    @functools.wraps(func)
    def control(*args: PyTree, **kwargs: PyTree) -> PyTree:
        with with_ambient(is_control=True):
            return func(*args, **kwargs)

    return control


def _refuse_other_weights(
    func: Any, settings: Settings, argnums: tuple[int, ...], call: str
) -> None:
    """Raises if none of the differentiated arguments are weights of the recipe.

    By default the weights are the first argument, which may be the batch.
    """
    mark: Mark | None = getattr(func, MARK, None)
    if mark is None or mark.has_explicit_weights or not settings.recipes:
        return
    if mark.weights and not set(mark.weights) & set(argnums):
        one = argnums[0] if len(argnums) == 1 else argnums
        raise ValueError(
            f"{call} differentiates argument {one}, but the weights of the "
            "function's recipe are argument 0 by default. Set them: "
            f"`mpx.autocast(func, recipe=..., weights={one})`; or `weights=0` for a "
            "gradient with respect to data."
        )


def _refuse_casts(
    options: Options, policy: Policy | None, settings: Any, call: str
) -> None:
    """Raises for options about casts of inputs, if an autocast function casts.

    A policy for communication and gradient dtypes is allowed if its compute dtype is
    the autocast function's.
    """
    if policy is not None and (policy._wire or policy._grad_dtype is not None):
        if settings.is_enabled and policy.compute_dtype != settings.dtype:
            raise ValueError(
                f"`policy` of {call} computes in "
                f"{np.dtype(policy.compute_dtype).name}, but the autocast function "
                f"in {settings.dtype.name}. Use the same dtype in both."
            )
        policy = None
    for name, value in (("policy", policy), ("keep", options.keep)):
        if value is not None:
            raise ValueError(
                f"`{name}` of {call} sets how inputs are cast, but this is an "
                f"autocast function, which casts inside. Omit `{name}`, and pass "
                "options to `mpx.autocast`. (A policy with `grad_dtype`, "
                "`reduce_dtype` or `gather_dtype` is allowed.)"
            )


def positions_of(argnums: Any, call: str) -> tuple[int, ...]:
    positions = argnums if isinstance(argnums, tuple) else (argnums,)
    is_int = all(isinstance(i, int) and not isinstance(i, bool) for i in positions)
    if not is_int or not positions or len(set(positions)) < len(positions):
        raise TypeError(
            f"`argnums` of {call} must be an int or a tuple of different ints; got "
            f"{argnums!r}."
        )
    return positions


def positions_in_call(
    argnums: tuple[int, ...], count: int, call: str
) -> tuple[int, ...]:
    """Returns the non-negative positions in a call with `count` arguments."""
    if any(not -count <= i < count for i in argnums):
        raise TypeError(
            f"{call} differentiates positional arguments {argnums}; the function "
            f"was called with {count}. Pass the model by position."
        )
    return tuple(i % count for i in argnums)


def refuse_retries(retries: object, call: str) -> None:
    if not isinstance(retries, int) or isinstance(retries, bool) or retries < 0:
        raise ValueError(
            f"`retries` of {call} must be a whole number, at least 0; got {retries!r}."
        )


def check_call(
    problem: Problem,
    scaling: AbstractLossScaling | None,
    args: tuple[PyTree, ...],
    kwargs: dict[str, PyTree],
    options: Options,
) -> None:
    """Raises for invalid arguments of a call."""
    call = problem.call
    if "flax.nnx" in sys.modules:
        _inputs.refuse_nnx((args, kwargs), call)
    _inputs.refuse_frozen_scaling(scaling, call)
    _inputs.refuse_no_weights(tuple(args[i] for i in problem.argnums), call)
    if options.use_mixed_precision and not problem.allow_float16_weights:
        _inputs.refuse_half_masters(args, problem.argnums, call)


def used_scaling(
    scaling: AbstractLossScaling | None, mixed: bool
) -> AbstractLossScaling:
    keeps = scaling is not None and (scaling._by_loss or not scaling._is_stateful)
    if scaling is not None and (mixed or keeps):
        return scaling
    return NoLossScaling()


# --- Gradient functions ---------------------------------------------------------------


def filter_grad(
    func: Callable[..., PyTree],
    scaling: AbstractLossScaling | None,
    has_aux: bool = False,
    use_mixed_precision: bool = True,
    *,
    policy: Policy | str | None = None,
    keep: LeafPredicate | None = None,
    accumulate: int | Accumulation = 1,
    accumulate_dtype: DTypeLike | None = None,
    retries: int = 0,
) -> Callable[..., GradientResult]:
    r"""Differentiates a loss in mixed precision; replaces `eqx.filter_grad`.

    $$g = \frac{1}{s} \nabla_w \left[ s \cdot \operatorname{f32}\big(
        f(\operatorname{half}(w), \operatorname{half}(x)) \big) \right]$$

    with respect to the floating arrays in the first argument, except those of 8 bits
    and fewer. Float leaves of all arguments are cast to half precision inside the
    differentiated function. For an autocast function, which casts on its own,
    $\operatorname{half}$ is the identity.

    Args:
        func: `func(model, *args, **kwargs)` returns a scalar loss, or `(loss, aux)`.
        scaling: The loss scaling. In a jitted function it must be one of its arguments.
        has_aux: `func` returns `(loss, aux)`; aux is returned unchanged. False by
            default.
        use_mixed_precision: False casts and scales nothing: a full-precision control
            run with the same control flow. `scaling` (or None) keeps its scale and
            counts.
        policy: A policy or its text; its compute dtype replaces
            `half_precision_datatype()`.
        keep: Leaves for which `keep(path, leaf)` is True are not cast (masks, time
            stamps); paths are like `args[1]['mask']`. Model state is never cast:
            Equinox `State`, Flax's `batch_stats`, Haiku's moving averages.
        accumulate: A number of micro-batches, or `mpx.Accumulation`.
        accumulate_dtype: float32 sums the gradients of a weight that is used several
            times in float32 instead of half precision, at some tracing time.
        retries: Repeats a non-finite step up to this number of times, each time at a
            smaller scale.

    Returns:
        A function of the same arguments that returns `(scaling, finite, grads)` or
        `(scaling, finite, grads, aux)`, see `GradientResult`: the state for the next
        step, whether the loss and all gradients are finite (the loss alone with
        `NoLossScaling(skip="loss")`, always True with `skip=False`), and unscaled
        gradients of the model's structure in float32 (float64 for float64 weights),
        None for what is not differentiated.

    Raises:
        TypeError: `scaling` is not a loss scaling, the loss is not floating-point, or
            an input is a Flax NNX object.
        ValueError: The loss is not a scalar, the scaling is a constant of a compiled
            function, or weights are missing, or float16 without a policy that sets it.

    Examples:
        >>> import jax.numpy as jnp, mpx
        >>> def loss(w, x):
        ...     return mpx.force_full_precision(jnp.mean, jnp.float32)((w * x) ** 2)
        >>> scaling = mpx.DynamicLossScaling(2.0**10)
        >>> w, x = jnp.ones(2), jnp.ones(2)
        >>> scaling, finite, grads = mpx.filter_grad(loss, scaling)(w, x)
        >>> grads
        Array([1., 1.], dtype=float32)
    """
    options = Options.of(locals())
    return gradient_function("`mpx.filter_grad`", func, scaling, None, False, options)


def filter_value_and_grad(
    func: Callable[..., PyTree],
    scaling: AbstractLossScaling | None,
    has_aux: bool = False,
    use_mixed_precision: bool = True,
    *,
    policy: Policy | str | None = None,
    keep: LeafPredicate | None = None,
    accumulate: int | Accumulation = 1,
    accumulate_dtype: DTypeLike | None = None,
    retries: int = 0,
) -> Callable[..., GradientResult]:
    """Returns loss and gradient of a loss function in mixed precision.

    Replaces `eqx.filter_value_and_grad`.

    Arguments, equation and errors are those of `filter_grad`.

    Returns:
        A function that returns `(value, scaling, finite, grads)`, or with `has_aux`
        `((value, aux), scaling, finite, grads)`. `value` is the unscaled loss,
        float32 at least, also on steps that grow the scale or are skipped.

    Examples:
        >>> import jax.numpy as jnp, mpx
        >>> step = mpx.filter_value_and_grad(jnp.sum, mpx.DynamicLossScaling())
        >>> value, scaling, finite, grads = step(jnp.ones(3))
        >>> float(value), bool(finite)
        (3.0, True)
    """
    options = Options.of(locals())
    call = "`mpx.filter_value_and_grad`"
    return gradient_function(call, func, scaling, None, True, options)


def grad(
    fun: Callable[..., PyTree],
    scaling: AbstractLossScaling | None,
    argnums: int | tuple[int, ...] = 0,
    *,
    has_aux: bool = False,
    policy: Policy | str | None = None,
    keep: LeafPredicate | None = None,
    accumulate: int | Accumulation = 1,
    accumulate_dtype: DTypeLike | None = None,
    retries: int = 0,
) -> Callable[..., GradientResult]:
    """Differentiates a plain function in mixed precision; replaces `jax.grad`.

    As `filter_grad`, except that it differentiates the arguments `argnums`, an int or a
    tuple of them. All their leaves must be real or complex floating numbers; otherwise
    it raises `TypeError`, as JAX does.

    Returns:
        A function that returns `(scaling, finite, grads[, aux])`; for a tuple of
        `argnums` the gradients are a tuple.

    Examples:
        >>> import jax.numpy as jnp, mpx
        >>> multiply = lambda a, b: a * b
        >>> scaling = mpx.DynamicLossScaling(2.0**10)
        >>> product = mpx.grad(multiply, scaling, argnums=(0, 1))
        >>> [float(g) for g in product(2.0, 3.0).grads]
        [3.0, 2.0]
    """
    options = Options.of(locals())
    positions_of(argnums, "`mpx.grad`")
    return gradient_function("`mpx.grad`", fun, scaling, argnums, False, options)


def value_and_grad(
    fun: Callable[..., PyTree],
    scaling: AbstractLossScaling | None,
    argnums: int | tuple[int, ...] = 0,
    *,
    has_aux: bool = False,
    policy: Policy | str | None = None,
    keep: LeafPredicate | None = None,
    accumulate: int | Accumulation = 1,
    accumulate_dtype: DTypeLike | None = None,
    retries: int = 0,
) -> Callable[..., GradientResult]:
    """Returns value and gradient of a plain function in mixed precision; see `grad`.

    Returns:
        A function with the results of `filter_value_and_grad`.

    Examples:
        >>> import jax.numpy as jnp, mpx
        >>> step = mpx.value_and_grad(lambda w: w**2, mpx.StaticLossScaling(8.0))
        >>> float(step(3.0).value), float(step(3.0).grads)
        (9.0, 6.0)
    """
    options = Options.of(locals())
    positions_of(argnums, "`mpx.value_and_grad`")
    return gradient_function(
        "`mpx.value_and_grad`", fun, scaling, argnums, True, options
    )


def calculate_scaled_grad(
    func: Callable[..., PyTree],
    scaling: AbstractLossScaling | None,
    has_aux: bool = False,
    use_mixed_precision: bool = True,
) -> Callable[..., PyTree]:
    """Returns the scaled loss and its scaled gradient, for custom training loops.

    Nothing is unscaled, checked or adjusted: sum such gradients over micro-batches,
    then `scaling.unscale`, `mpx.all_finite` and `scaling.adjust`, each once. Arguments
    and errors: see `filter_grad`. With `use_mixed_precision=False` the scale is 1.

    Returns:
        A function that returns `(value, grads)` or `((value, aux), grads)`, both times
        the scale: a value of float32 at least, gradients of the weights' dtypes.

    Examples:
        >>> import jax.numpy as jnp, mpx
        >>> scaling = mpx.StaticLossScaling(8.0)
        >>> value, grads = mpx.calculate_scaled_grad(jnp.sum, scaling)(jnp.ones(2))
        >>> float(value), scaling.unscale(grads)
        (16.0, Array([1., 1.], dtype=float32))
    """
    call = "`mpx.calculate_scaled_grad`"
    options = Options.of(locals())
    _inputs.refuse_unknown_scaling(scaling, call, use_mixed_precision)
    build = problem_builder(call, func, (0,), options)

    @wraps(func)
    def wrapper(*args: PyTree, **kwargs: PyTree) -> PyTree:
        (args, kwargs), payloads = _without_stored((args, kwargs))
        problem = build(len(args))
        check_call(problem, scaling, args, kwargs, options)
        used = used_scaling(scaling, use_mixed_precision)
        if used._tokens():
            raise TypeError(
                f"{call} does not return a scaling, so the recipe's amaxes would be "
                "lost. Use `mpx.filter_value_and_grad(func, scaling)`."
            )
        with reading(payloads):
            problem, found = called(
                problem, used, lambda p: scaled_value_and_grad(p, used, args, kwargs)
            )
        (grads,) = as_weights(problem, found.grads, args)
        value = (found.scaled, found.aux) if has_aux else found.scaled
        return value, grads

    return wrapper


# Nearly every step has one batch: create its settings once.
_ONE_BATCH = Accumulation(1)


def _without_stored(given: PyTree) -> tuple[PyTree, Payloads]:
    """Replaces weights stored in 8 bits by arrays, and returns their payloads."""
    leaves = jax.tree.leaves(given, is_leaf=_is_stored)
    return dequantized(given) if any(map(_is_stored, leaves)) else (given, {})


def _is_stored(node: object) -> bool:
    return isinstance(node, StoredWeight)


def gradient_function(
    call: str,
    func: Callable[..., PyTree],
    scaling: AbstractLossScaling | None,
    argnums: int | tuple[int, ...] | None,
    with_value: bool,
    options: Options,
) -> Callable[..., GradientResult]:
    """Builds a gradient function; `argnums` is None for those that filter."""
    _inputs.refuse_unknown_scaling(scaling, call, options.use_mixed_precision)
    positions = positions_of(0 if argnums is None else argnums, call)
    build = problem_builder(call, func, positions, options)
    how = options.accumulate
    if type(how) is int and how == 1:
        how = _ONE_BATCH
    elif not isinstance(how, Accumulation):
        how = Accumulation(how)
    refuse_retries(options.retries, call)

    @wraps(func)
    def wrapper(*args: PyTree, **kwargs: PyTree) -> GradientResult:
        (args, kwargs), payloads = _without_stored((args, kwargs))
        problem = build(len(args))
        if argnums is not None:
            args = _inputs.as_floating(args, problem.argnums, call)
        check_call(problem, scaling, args, kwargs, options)

        used = used_scaling(scaling, options.use_mixed_precision)
        with reading(payloads) if payloads else contextlib.nullcontext():
            problem, outcome = called(
                problem, used, lambda p: attempt(p, how, used, args, kwargs)
            )
            if used._by_loss:
                outcome = decided_by_loss(outcome)
            if outcome.flags is not None and options.retries:
                used, outcome = retried(
                    functools.partial(attempt, problem, how, args=args, kwargs=kwargs),
                    used,
                    outcome,
                    options.retries,
                )
        loss, aux, grads, flags, amaxes, zeroed = outcome
        used = used._observe(amaxes)
        finite = jnp.asarray(True) if flags is None else jnp.all(flags)
        result = GradientResult(
            **({"value": loss} if with_value else {}),
            scaling=scaling,
            finite=finite,
            grads=grads if isinstance(argnums, tuple) else grads[0],
            **({"aux": aux} if options.has_aux else {}),
            **(
                {"_scaled": used}
                if options.use_mixed_precision
                else {"_counted": scaling}
            ),
            _flags=flags,
            **(zeroed or {}),
        )
        after = result._judged(finite, flags)
        if zeroed:
            after = after._noted(finite & result._zeroed)
        return result._replace(scaling=after)

    return wrapper
