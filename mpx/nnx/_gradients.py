"""The gradient functions of Flax NNX, `blame` and `compare`, by those of trees.

A call with objects becomes one of a pure function of trees (`mpx._nnx_graph`), with two
arguments more: `(fixed, func)` and the objects' state.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from flax import nnx as _nnx
from jaxtyping import PyTree

from .._base.errors import describe
from .._base.typing import DTypeLike, LeafPredicate
from .._base.wraps import wraps
from .._loss_scaling import AbstractLossScaling, NoLossScaling
from .._nnx_graph import Parts, refuse_method, refuse_weights, taken_apart
from .._settings import Policy
from .._step import (
    Accumulation,
    GradientResult,
    Options,
    gradient_function,
    positions_in_call,
    positions_of,
)
from .._tools._blame import BlameReport, StepOf, blamed, refuse_limit, refuse_tracers
from .._tools._watch import Comparison, compare as compare_trees


def grad(
    func: Callable[..., PyTree],
    scaling: AbstractLossScaling | None,
    *,
    argnums: int | _nnx.DiffState | Sequence[int | _nnx.DiffState] = 0,
    has_aux: bool = False,
    use_mixed_precision: bool = True,
    policy: Policy | str | None = None,
    keep: LeafPredicate | None = None,
    accumulate: int | Accumulation = 1,
    accumulate_dtype: DTypeLike | None = None,
    retries: int = 0,
) -> Callable[..., GradientResult]:
    """Returns only the gradient; replaces `nnx.grad`. See `value_and_grad`.

    Returns:
        A function that returns `(scaling, finite, grads)`, or with `has_aux`
        `(scaling, finite, grads, aux)`.

    Examples:
        >>> import jax.numpy as jnp, mpx.nnx
        >>> from flax import nnx
        >>> model = nnx.Param(jnp.array([3.0]))
        >>> square = lambda w: jnp.sum(w[...] ** 2)
        >>> scaling = mpx.DynamicLossScaling(2.0**10)
        >>> mpx.nnx.grad(square, scaling)(model).grads[...]
        Array([6.], dtype=float32)
    """
    options = Options.of(locals())
    return _function_of_objects(
        "`mpx.nnx.grad`", func, scaling, argnums, False, options
    )


def value_and_grad(
    func: Callable[..., PyTree],
    scaling: AbstractLossScaling | None,
    *,
    argnums: int | _nnx.DiffState | Sequence[int | _nnx.DiffState] = 0,
    has_aux: bool = False,
    use_mixed_precision: bool = True,
    policy: Policy | str | None = None,
    keep: LeafPredicate | None = None,
    accumulate: int | Accumulation = 1,
    accumulate_dtype: DTypeLike | None = None,
    retries: int = 0,
) -> Callable[..., GradientResult]:
    """Returns loss and gradient of an NNX model; replaces `nnx.value_and_grad`.

    Changes that the function makes to NNX objects are kept on good steps and undone on
    skipped ones; the page of this module has the rule. The equation is that of
    `mpx.filter_grad`.

    Args:
        func: `func(model, *args, **kwargs)` returns a scalar loss, or `(loss, aux)`.
            NNX objects may be anywhere in its arguments and in aux.
        scaling: The loss scaling. In a jitted function it must be one of its arguments.
        argnums: The arguments to differentiate, as in NNX: positions, or
            `nnx.DiffState` with a position and a filter. A position selects its
            `nnx.Param`.
        has_aux: `func` returns `(loss, aux)`.
        use_mixed_precision: False casts and scales nothing, see `mpx.filter_grad`.
        policy: A policy or its text; its compute dtype replaces
            `mpx.half_precision_datatype()`.
        keep: Leaves for which `keep(path, leaf)` is True are not cast; paths are like
            `args[0].layers[0].kernel`.
        accumulate: A number of micro-batches, or `mpx.Accumulation`. Arrays in NNX
            objects are not split; their state is passed from one micro-batch to the
            next.
        accumulate_dtype: As in `mpx.filter_grad`.
        retries: As in `mpx.filter_grad`. Every attempt starts from the same state.

    Returns:
        A function of the same arguments that returns `(value, scaling, finite, grads)`,
        or with `has_aux` `((value, aux), scaling, finite, grads)`, see
        `mpx.GradientResult`. Gradients are an `nnx.State` (a tuple of them for a
        sequence of `argnums`), unscaled, in the Variables' dtypes, float32 at least.

    Raises:
        TypeError: `scaling` is not a loss scaling, `argnums` is not of NNX's form, the
            function is a bound method, the loss or a differentiated Variable is not
            floating.
        ValueError: The loss is not a scalar, the scaling is a constant of a compiled
            function, or weights are missing, or float16 without a policy that sets it;
            one Variable is differentiated in one place and not in another; the function
            changed the shape or dtype of an array in a module.

    Examples:
        >>> import jax.numpy as jnp, mpx.nnx
        >>> from flax import nnx
        >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
        >>> def loss_fn(model, x):
        ...     return mpx.force_full_precision(jnp.mean, jnp.float32)(model(x))
        >>> step = mpx.nnx.value_and_grad(loss_fn, mpx.DynamicLossScaling())
        >>> value, scaling, finite, grads = step(model, jnp.ones((4, 2)))
        >>> grads["kernel"][...]
        Array([[1.],
               [1.]], dtype=float32)
    """
    options = Options.of(locals())
    call = "`mpx.nnx.value_and_grad`"
    return _function_of_objects(call, func, scaling, argnums, True, options)


def blame(
    func: Callable[..., PyTree],
    scaling: AbstractLossScaling | None,
    *,
    argnums: int | _nnx.DiffState | Sequence[int | _nnx.DiffState] = 0,
    has_aux: bool = False,
    use_mixed_precision: bool = True,
    policy: Policy | str | None = None,
    keep: LeafPredicate | None = None,
    accumulate: int | Accumulation = 1,
    accumulate_dtype: DTypeLike | None = None,
    above: float | None = None,
) -> Callable[..., BlameReport]:
    """Replays a skipped step to find its cause; replaces `mpx.blame`.

    Arguments are those of `value_and_grad`; the objects are unchanged.

    Args:
        func: The loss function.
        scaling: The loss scaling that the step had: `scaling.of_bad_step()`.
        argnums: As in `value_and_grad`, like the options below.
        has_aux: `func` returns `(loss, aux)`.
        use_mixed_precision: False runs in full precision.
        policy: The policy.
        keep: Selects leaves that are not cast.
        accumulate: Micro-batches.
        accumulate_dtype: The dtype in which the gradients of a weight's uses are
            summed.
        above: Values of larger magnitude also count as bad.

    Returns:
        A function of the arguments of `func` that returns a `mpx.reports.BlameReport`.

    Raises:
        TypeError: As `value_and_grad` and `mpx.blame` do.
        ValueError: As `value_and_grad` and `mpx.blame` do.

    Examples:
        >>> import jax.numpy as jnp, mpx.nnx
        >>> from flax import nnx
        >>> model = nnx.Param(jnp.array([0.0]))
        >>> loss = lambda w: jnp.sum(jnp.log(w[...]))
        >>> report = mpx.nnx.blame(loss, mpx.NoLossScaling(), policy="bfloat16")(model)
        >>> report.first.primitive, report.first.reason
        ('log', 'the logarithm of zero')
    """
    call = "`mpx.nnx.blame`"
    options = Options.of(locals())
    filters = checked_filters(call, func, scaling, argnums, True, options)
    refuse_limit(above, call)

    @wraps(func)
    def replay(*args: PyTree, **kwargs: PyTree) -> BlameReport:
        refuse_tracers((scaling, args, kwargs), call)
        with pure_call(call, filters, argnums, options, args, kwargs) as pure:
            step = StepOf(
                func=func,
                scaling=scaling,
                argnums=pure.argnums,
                options=pure.options,
                args=pure.args_with(func),
                kwargs=pure.parts.kwargs,
                count=len(args),
                pure=pure.of,
                args_with=pure.args_with,
            )
            return blamed(step, above)

    return replay


def _function_of_objects(
    call: str,
    func: Callable[..., PyTree],
    scaling: AbstractLossScaling | None,
    argnums: object,
    with_value: bool,
    options: Options,
) -> Callable[..., GradientResult]:
    filters = checked_filters(call, func, scaling, argnums, with_value, options)

    @wraps(func)
    def wrapper(*args: PyTree, **kwargs: PyTree) -> GradientResult:
        with pure_call(call, filters, argnums, options, args, kwargs) as pure:
            transformed = gradient_function(
                call, pure.of(func), scaling, pure.argnums, with_value, pure.options
            )
            result = transformed(*pure.args_with(func), **pure.parts.kwargs)
            return _finished(pure.parts, result, options.has_aux)

    return wrapper


def checked_filters(
    call: str,
    func: Callable[..., PyTree],
    scaling: AbstractLossScaling | None,
    argnums: object,
    with_value: bool,
    options: Options,
) -> dict[int, object]:
    """Returns the filter of each differentiated argument, by its position.

    Raises for invalid options now, not at the first call.
    """
    filters = _filters(argnums, call)
    refuse_method(func, call)
    positions = tuple(filters) if _are_several(argnums) else next(iter(filters))
    gradient_function(call, func, scaling, positions, with_value, options)
    return filters


def _are_several(argnums: object) -> bool:
    return not isinstance(argnums, int | _nnx.DiffState)


@dataclasses.dataclass(frozen=True)
class _PureCall:
    """A call with objects as a pure call of trees.

    Attributes:
        parts: The arguments, taken apart.
        argnums: The differentiated positions.
        options: The options of the gradient function of trees.
        has_aux: Whether the user's function has aux.
        may_repeat: Whether there are micro-batches.
    """

    parts: Parts
    argnums: int | tuple[int, ...]
    options: Options
    has_aux: bool
    may_repeat: bool

    def of(self, func: Callable[..., PyTree]) -> Callable[..., PyTree]:
        """Returns a function of trees that calls `func`."""
        parts = self.parts

        # With the attributes of `func`, which identify an autocast function.
        @wraps(func)
        def pure(*full: PyTree, **kwargs: PyTree) -> PyTree:
            *args, (fixed, func), state = full
            result, state, others = parts.call(
                func, args, kwargs, fixed, state, self.may_repeat
            )
            if not self.has_aux:
                return result, (None, state, others)
            if not isinstance(result, tuple) or len(result) != 2:
                return result  # the engine raises the error
            return result[0], (result[1], state, others)

        return pure

    def args_with(self, func: Callable[..., PyTree]) -> tuple[PyTree, ...]:
        """Returns the arguments of that function."""
        return (*self.parts.args, (self.parts.fixed, func), self.parts.state)


@contextlib.contextmanager
def pure_call(
    call: str,
    filters: dict[int, object],
    argnums: object,
    options: Options,
    args: PyTree,
    kwargs: PyTree,
) -> Iterator[_PureCall]:
    """Takes a call apart; it can be run inside the context only."""
    inside = positions_in_call(tuple(filters), len(args), call)
    wanted = dict(zip(inside, filters.values(), strict=True))
    how = options.accumulate
    how = how if isinstance(how, Accumulation) else Accumulation(how)
    with taken_apart(call, args, kwargs, wanted) as parts:
        for position in inside:
            refuse_weights(parts.args[position], position, call)
        extra = len(args)
        of_trees = dataclasses.replace(
            options,
            has_aux=True,
            keep=_keep(options.keep, extra),
            accumulate=_accumulation(how, parts, extra),
        )
        positions = inside if _are_several(argnums) else inside[0]
        yield _PureCall(parts, positions, of_trees, options.has_aux, how.steps > 1)


def _finished(parts: Parts, result: GradientResult, has_aux: bool) -> GradientResult:
    """Writes changes back to the objects, and returns the result in NNX's form."""
    aux, state, others = result.aux
    finite = None if result._flags is None else result.finite
    aux = parts.write_back(aux, state, others, finite)
    fields = {**result._parts, "grads": parts.gradients(result.grads), "aux": aux}
    if not has_aux:
        del fields["aux"]
    return GradientResult(**fields)


def _keep(keep: LeafPredicate | None, extra: int) -> LeafPredicate | None:
    """Returns the user's predicate for paths of the call with two arguments more."""
    if keep is None:
        return None
    fixed, func = f"args[{extra}][0].", f"args[{extra}][1]"

    def translated(path: str, leaf: object) -> bool:
        path = path.removeprefix(fixed)
        if path.startswith(func):
            path = "func" + path.removeprefix(func)
        return keep(path, leaf)

    return translated


def _accumulation(how: Accumulation, parts: Parts, extra: int) -> Accumulation:
    """Returns the accumulation for the call with two arguments more."""
    whole, new_state = how.whole, how.new_state
    weight: Any = how.weight

    def is_whole(path: str, leaf: object) -> bool:
        if path.startswith(f"args[{extra}]"):
            return True
        return whole is not None and whole(path, leaf)

    def weigh(*full: PyTree, **kwargs: PyTree) -> PyTree:
        *args, (fixed, _), state = full
        return parts.evaluate(weight, args, kwargs, fixed, state)

    return dataclasses.replace(
        how,
        whole=is_whole,
        weight=None if weight is None else weigh,
        new_state=None
        if new_state is None
        else lambda aux: (new_state(aux[0]), aux[1].leaves),
    )


def _filters(argnums: object, call: str) -> dict[int, object]:
    """Returns the filter of each differentiated argument, by its position."""
    items = [argnums] if isinstance(argnums, int | _nnx.DiffState) else argnums
    if not isinstance(items, list | tuple):
        raise TypeError(
            f"`argnums` of {call} must be a position, an `nnx.DiffState`, or a list or "
            f"tuple of these; got {describe(argnums)}."
        )
    states = [
        x if isinstance(x, _nnx.DiffState) else _nnx.DiffState(x, _nnx.Param)
        for x in items
    ]
    positions = positions_of(tuple(state.argnum for state in states), call)
    return dict(zip(positions, (state.filter for state in states), strict=True))


# --- compare --------------------------------------------------------------------------

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
    """Compares two precisions of a function of NNX objects; replaces `mpx.compare`.

    Both start from the same objects, which are unchanged afterwards: statistics and
    random streams too. Gradients are those of each `nnx.Param` of the first argument.

    Args:
        reference: The function to compare with, `reference(model, *args)`.
        func: The function in another precision, of the same arguments.
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
    options = Options(policy=policy, keep=keep)
    given = NoLossScaling() if scaling is None else scaling
    checked_filters(_CALL, reference, given, 0, True, Options(has_aux=has_aux))
    filters = checked_filters(_CALL, func, given, 0, True, options)

    def compared(*args: PyTree, **kwargs: PyTree) -> Comparison:
        with pure_call(_CALL, filters, 0, options, args, kwargs) as pure:

            def of_trees(loss: Callable[..., PyTree]) -> Callable[..., PyTree]:
                call = pure.of(loss)

                # A pure function gets `func` as an argument; here are two functions.
                @wraps(loss)
                def own(*full: PyTree, **kwargs: PyTree) -> PyTree:
                    *args, (fixed, _), state = full
                    return call(*args, (fixed, loss), state, **kwargs)[0]

                return own

            compared_trees = compare_trees(
                of_trees(reference),
                of_trees(func),
                scaling,
                has_aux=has_aux,
                policy=policy,
                keep=pure.options.keep,
                floor=floor,
            )
            return compared_trees(*pure.args_with(func), **pure.parts.kwargs)

    return compared
