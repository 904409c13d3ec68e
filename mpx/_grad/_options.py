"""What a gradient function is asked for: options read, and wrong ones refused."""

import dataclasses
import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any, Self

import numpy as np
from jaxtyping import PyTree

from .._ambient_record import settings_of, with_ambient
from .._dtypes import float_dtype, half_precision_datatype
from .._errors import describe
from .._loss_scaling import AbstractLossScaling, NoLossScaling
from .._policy import Policy, get_policy
from .._settings import MARK, Mark, Settings
from .._typing import DTypeLike, LeafPredicate
from . import _inputs
from ._accumulate import Accumulation
from ._engine import Problem


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
        """Reads them from the arguments of a gradient function: its `locals()`.

        Each function lists its options itself, so that `help`, editors and the
        documentation show them.
        """
        names = (field.name for field in dataclasses.fields(cls))
        return cls(**{name: arguments[name] for name in names if name in arguments})


def problem_builder(
    call: str,
    func: Callable[..., PyTree],
    argnums: tuple[int, ...],
    options: Options,
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
        """The problem for a call with `count` positional arguments."""
        # Asked for at each call: what is ambient may have changed.
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
    """A function as it would be without autocast and recipes."""

    @functools.wraps(func)
    def control(*args: PyTree, **kwargs: PyTree) -> PyTree:
        with with_ambient(is_control=True):
            return func(*args, **kwargs)

    return control


def _refuse_other_weights(
    func: Any, settings: Settings, argnums: tuple[int, ...], call: str
) -> None:
    """Raises where what is differentiated is none of what a recipe takes for weights.

    The default is the first argument, which may as well be the batch.
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
    """Raises for options that say how inputs are cast, where none are.

    A policy that says what travels and what comes back is welcome, if it means the
    precision that autocast computes in.
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
    """The positions in a call with `count` arguments, counted from the front."""
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
    """Refuses what can be wrong about the arguments of a call."""
    call = problem.call
    if "flax.nnx" in sys.modules:
        _inputs.refuse_nnx((args, kwargs), call)
    _inputs.refuse_frozen_scaling(scaling, call)
    weights = tuple(args[i] for i in problem.argnums)
    _inputs.refuse_no_weights(weights, call)
    if options.use_mixed_precision and not problem.allow_float16_weights:
        _inputs.refuse_half_masters(args, problem.argnums, call)


def used_scaling(
    scaling: AbstractLossScaling | None, mixed: bool
) -> AbstractLossScaling:
    if scaling is not None and (mixed or not scaling._is_stateful):
        return scaling
    return NoLossScaling()
