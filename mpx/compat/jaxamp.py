"""jaxamp's names and signatures on top of mpx: `import mpx.compat.jaxamp as jaxamp`.

Everything that `jaxamp` 0.0.4 exports is here. Differences, each a fixed defect of the
original:

- `amp` works on the present JAX, and transforms the bodies of jit, scan, while, cond,
  remat, shard_map and functions with custom derivative rules. The original casts
  nothing in them.
- The loss is multiplied by the scale in float32 at least, not in its own dtype.
- The scale stays positive and finite. A NaN in aux does not count as overflow. Complex
  numbers are not made real. Each default state has its own buffers.
- A state from outside the function that JAX traces, which would be a constant, is an
  error.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.extend import core
from jaxtyping import PyTree

from .._autocast import autocast
from .._base.dtypes import float_dtype, is_half
from .._base.errors import describe
from .._base.tree import all_finite, is_float_leaf
from .._base.typing import AnyArray, BoolLike, DTypeLike
from .._loss_scaling import StaticLossScaling
from .._program import PrimitiveClass, aval_of, properties
from .._settings import Candidate, Precision, Rule, Rules
from .._step import is_frozen, tried_again

# --- Casting by a policy --------------------------------------------------------------
#
# A policy is a dictionary. Its keys are primitives (`jax.lax.dot_general_p`) and names
# of scopes (`jax.named_scope`), its values are functions that cast the operands of one
# operation. For each operation the outermost scope in the policy applies, then the
# primitive, then the key `"amp_default"`.
#
# Programs within the program (jit, scan, cond, remat, custom rules) are transformed,
# too, unless the policy excludes them: `{jax.lax.scan_p: use_original_precision}`.
# Operations that only move data, and casts that the program contains, run in the
# precision of their operands.

PolicyFunction = Callable[..., tuple[Sequence[Any], Mapping[str, Any]]]


def use_original_precision(
    compute_dtype: object,
    original_dtypes: Sequence[Any],
    *invars: object,
    **bind_params: object,
) -> tuple[list[Any], dict[str, Any]]:
    """Casts operands to the dtypes of the original program, as a policy function."""
    cast = [_cast(x, dtype) for x, dtype in zip(invars, original_dtypes, strict=True)]
    return cast, bind_params


def use_compute_precision(
    compute_dtype: Any,
    original_dtypes: Sequence[Any],
    *invars: object,
    **bind_params: object,
) -> tuple[list[Any], dict[str, Any]]:
    """Casts operands to `compute_dtype`, as a policy function.

    It casts float operands and parameters, and sets `preferred_element_type` if all
    operands are floats. Integers, keys and complex numbers are unchanged; jaxamp makes
    complex numbers real.
    """
    params = {name: _cast(value, compute_dtype) for name, value in bind_params.items()}
    if "preferred_element_type" in params and all(map(is_float_leaf, invars)):
        params["preferred_element_type"] = np.dtype(compute_dtype)
    return [_cast(x, compute_dtype) for x in invars], params


def _use_float32(_: object, *args: Any, **params: object) -> Any:
    return use_compute_precision(jnp.float32, *args, **params)


def _cast(value: PyTree, dtype: DTypeLike) -> PyTree:
    if not is_float_leaf(value) or not jnp.issubdtype(dtype, jnp.floating):
        return value
    return value if value.dtype == dtype else lax.convert_element_type(value, dtype)


_LOW = (lax.add_p, lax.sub_p, lax.dot_general_p, lax.conv_general_dilated_p)
_HIGH = (lax.exp_p, lax.log_p, lax.mul_p, lax.div_p)

default_amp_policy: dict[Any, PolicyFunction] = {
    **dict.fromkeys(_LOW, use_compute_precision),
    "amp_default": use_original_precision,
    "amp_stop": use_original_precision,
    **dict.fromkeys(_HIGH, _use_float32),
}


def amp_stop(f: Callable[..., PyTree] | None = None) -> Any:
    """Switches the default policy's casts off, for a region or a function.

    Args:
        f: The function; None returns a context manager.

    Returns:
        The function, or the context manager.

    Examples:
        >>> import jax, jax.numpy as jnp, mpx.compat.jaxamp as jaxamp
        >>> def f(x):
        ...     with jaxamp.amp_stop():
        ...         return x @ x
        >>> "f16" in str(jax.make_jaxpr(jaxamp.amp(f))(jnp.ones((2, 2))))
        False
    """
    scope = jax.named_scope("amp_stop")
    return scope if f is None else scope(f)


def amp(
    sentinal: Callable[..., PyTree] | None = None,
    *,
    compute_dtype: Any = jnp.float16,
    amp_policy: Mapping[Any, PolicyFunction] = default_amp_policy,
) -> Callable[..., PyTree]:
    """Wraps a function to run in mixed precision, operation by operation, by a policy.

    Args:
        sentinal: The function, of any PyTrees; None returns a decorator. (The name is
            jaxamp's.)
        compute_dtype: The floating dtype that is passed to policy functions.
        amp_policy: Policy functions by primitive or by name of a scope. Each is called
            as `f(compute_dtype, original_dtypes, *invars, **bind_params)` and returns
            the operands and the parameters to use.

    Returns:
        A function of the same arguments, whose results keep their dtypes.

    Raises:
        TypeError: The function is not callable, `compute_dtype` is not floating, or the
            policy is not a mapping from primitives and strings to functions.
        ValueError: The policy casts the operands of an equation that contains a
            program.

    Examples:
        >>> import jax, jax.numpy as jnp, mpx.compat.jaxamp as jaxamp
        >>> product = jaxamp.amp(jax.jit(jnp.dot))
        >>> jax.make_jaxpr(product)(jnp.ones((2, 2)), jnp.ones((2, 2))).out_avals
        [ShapedArray(float32[2,2])]
    """
    call = "`mpx.compat.jaxamp.amp`"
    dtype = float_dtype(compute_dtype, f"`compute_dtype` of {call}")
    _refuse_policy(amp_policy, call)
    if sentinal is None:
        return functools.partial(amp, compute_dtype=dtype, amp_policy=amp_policy)
    if not callable(sentinal):
        raise TypeError(f"{call} needs a function; got {describe(sentinal)}.")

    # Policy functions get the user's dtype; autocast itself needs one of two.
    half = dtype if is_half(dtype) else np.dtype(jnp.float16)
    return autocast(sentinal, half, rules=_rules(amp_policy, dtype))


def _rules(policy: Mapping[Any, PolicyFunction], dtype: object) -> Rules:
    """Returns one rule for all operations, and those that exclude whole programs."""

    def rewrite(
        candidate: Candidate, operands: list[AnyArray]
    ) -> tuple[Sequence[AnyArray], dict[str, Any]]:
        equation = candidate.equation
        keys = (*candidate.scopes, equation.primitive, "amp_default")
        key = next((key for key in keys if key in policy), None)
        function = use_original_precision if key is None else policy[key]
        original = [aval_of(atom).dtype for atom in equation.invars]
        cast, params = function(dtype, original, *operands, **equation.params)
        return cast, dict(params)

    whole = tuple(
        key.name
        for key, function in policy.items()
        if _holds_program(key) and function is use_original_precision
    )
    left_alone = (Rule(Precision.DECLARED, primitive=whole),) if whole else ()
    return Rules(*left_alone, Rule(rewrite, primitive="*"))


def _holds_program(key: Any) -> bool:
    is_scope = isinstance(key, str)
    return not is_scope and properties(key.name).kind is PrimitiveClass.RECURSE


def _refuse_policy(policy: object, call: str) -> None:
    if not isinstance(policy, Mapping):
        raise TypeError(
            f"`amp_policy` of {call} must be a dictionary; got {describe(policy)}."
        )
    for key, function in policy.items():
        if not isinstance(key, str | core.Primitive) or not callable(function):
            raise TypeError(
                f"`amp_policy` of {call} must map primitives (`jax.lax.add_p`) and "
                f"names of scopes to policy functions; got {key!r}: {function!r}."
            )
        if _holds_program(key) and function is not use_original_precision:
            raise ValueError(
                f"`amp_policy` of {call} must not cast the operands of `{key}`: it "
                "contains a program with fixed dtypes, which `amp` transforms. Omit "
                "it, or use `use_original_precision`."
            )


# --- Dynamic loss scaling -------------------------------------------------------------
#
# The state is a tuple of five fields and is passed by the keyword argument
# `dynamic_scaler_state`. Timing is jaxamp's: the scale grows at the good step *after*
# `patience` good ones, one step later than with `mpx.DynamicLossScaling`.

_FRESH = object()  # marks a default: None may be a leaf that a tree map returned


class _Fields(NamedTuple):
    patience: Any
    adjust_factor: Any
    scaler: Any
    count: Any
    total_resets: Any


class DynamicScalerState(_Fields):
    """The state of jaxamp's loss scaling. Its fields are its arguments, all optional.

    Attributes:
        patience: Good steps to wait before the scale grows.
        adjust_factor: The factor by which the scale grows, and the divisor by which it
            falls.
        scaler: The scale. Its dtype is kept.
        count: Good steps since the scale last changed.
        total_resets: The number of times it fell.

    Raises:
        ValueError: A field is invalid: a scale that is not positive and finite, a
            factor of at most 1, a negative count.

    Defaults are arrays made for each state, so that a state can be donated; in jaxamp
    all default states share their buffers.

    Examples:
        >>> import mpx.compat.jaxamp as jaxamp
        >>> float(jaxamp.DynamicScalerState(scaler=8.0).scaler)
        8.0
    """

    __slots__ = ()

    def __new__(
        cls,
        patience: object = _FRESH,
        adjust_factor: object = _FRESH,
        scaler: object = _FRESH,
        count: object = _FRESH,
        total_resets: object = _FRESH,
    ) -> "DynamicScalerState":
        """Makes the defaults and raises for invalid values."""
        given = (patience, adjust_factor, scaler, count, total_resets)
        return super().__new__(cls, *map(_field, cls._fields, given))


# By field: the default, its dtype, and an exclusive lower bound; None allows 0.
_FIELDS: dict[str, tuple[float, Any, int | None]] = {
    "patience": (2000, jnp.int32, None),
    "adjust_factor": (2.0, jnp.float32, 1),
    "scaler": (2.0**15, jnp.float32, 0),
    "count": (0, jnp.int32, None),
    "total_resets": (0, jnp.int32, None),
}


def _field(name: str, value: object) -> object:
    """Returns a field's given value, or its default."""
    default, dtype, least = _FIELDS[name]
    if value is _FRESH:
        return jnp.array(default, dtype)
    # JAX puts placeholders into trees; only numbers are checked.
    kinds = int | float | np.ndarray | np.generic | jax.Array
    if not isinstance(value, kinds) or isinstance(value, Tracer):
        return value
    x = np.asarray(value).astype(np.float64)
    is_valid = x >= 0 if least is None else (x > least) & (x < np.inf)
    if isinstance(value, bool) or not np.all(is_valid):
        above = f"larger than {least}" if least else "positive"
        must = "at least 0" if least is None else f"{above} and finite"
        raise ValueError(
            f"`{name}` of `mpx.compat.jaxamp.DynamicScalerState` must be {must}; got "
            f"{value}."
        )
    return value


def default_unscale_fn(results: PyTree, state: DynamicScalerState) -> PyTree:
    """Divides every float or complex leaf by the scale, in float32 at least."""
    return StaticLossScaling(state.scaler).unscale(results)


def default_scale_fn(result: PyTree, state: DynamicScalerState) -> PyTree:
    """Multiplies a value, or the value of `(value, aux)`, by the scale.

    The product is in float32 at least: jaxamp's is in the value's own dtype, and a
    float16 loss above 2 overflows with the default scale.
    """
    if eqx.is_array_like(result):
        return StaticLossScaling(state.scaler).scale(result)
    if not isinstance(result, tuple) or len(result) != 2:
        raise TypeError(
            "A function under `mpx.compat.jaxamp.dynamic_scale_tx` must return a value "
            f"or a pair `(value, aux)`; got {describe(result)}. Pass `scale_fn` for "
            "other results."
        )
    return StaticLossScaling(state.scaler).scale(result[0]), result[1]


def dynamic_scale_tx(
    transform: Callable[..., PyTree],
    redo_on_nan: int = 0,
    unscale_fn: Callable[[Any, DynamicScalerState], Any] = default_unscale_fn,
    scale_fn: Callable[[Any, DynamicScalerState], Any] = default_scale_fn,
) -> Callable[..., PyTree]:
    """Adds dynamic loss scaling to any transform that differentiates.

    Args:
        transform: A transform such as `jax.grad`, called with a function of keyword
            arguments, too.
        redo_on_nan: The number of times that a non-finite step is repeated, each time
            with a smaller scale.
        unscale_fn: Unscales the result of the transformed function.
        scale_fn: Scales the result of the function.

    Returns:
        `transform` for functions whose result is scaled. The functions that it returns
        take the keyword `dynamic_scaler_state` and return `(next_state, results)`.

    Raises:
        TypeError: At the call, `dynamic_scaler_state` is not a `DynamicScalerState`.
        ValueError: At the call, the state comes from outside the function that JAX is
            tracing, so it would be a constant.

    The scale stays positive and finite: it falls to the smallest normal number of its
    dtype, or 2^-126, and rises to the largest power of two, or 2^126.
    """

    def unscale(results: PyTree, state: DynamicScalerState) -> tuple[PyTree, PyTree]:
        unscaled = unscale_fn(results, state)
        return unscaled, unscaled

    return _scaled_transform(transform, redo_on_nan, unscale, scale_fn)


def dynamic_scale_grad(
    fun: Callable[..., PyTree],
    *,
    has_aux: bool = False,
    redo_on_nan: int = 0,
    filter: bool = True,
    **kwargs: PyTree,
) -> Callable[..., PyTree]:
    """Differentiates as `jax.grad` does, with dynamic loss scaling.

    Args:
        fun: The function, which returns a scalar, or `(scalar, aux)` with `has_aux`.
        has_aux: As in `jax.grad`.
        redo_on_nan: The number of times that a non-finite step is repeated.
        filter: Differentiates with `equinox.filter_grad`; with `jax.grad` if False.
        **kwargs: Passed on to that transform.

    Returns:
        A function with the further keyword `dynamic_scaler_state`, that returns
        `(next_state, grads)`, or `(next_state, (grads, aux))` with `has_aux`.

    A NaN in aux does not count as overflow; in jaxamp it does.

    Examples:
        >>> import jax.numpy as jnp, mpx.compat.jaxamp as jaxamp
        >>> grad = jaxamp.dynamic_scale_grad(lambda w: jnp.sum(w**2))
        >>> state, grads = grad(
        ...     jnp.ones(2), dynamic_scaler_state=jaxamp.DynamicScalerState()
        ... )
        >>> grads, int(state.count)
        (Array([2., 2.], dtype=float32), 1)
    """
    transform = eqx.filter_grad if filter else jax.grad

    def unscale(results: PyTree, state: DynamicScalerState) -> tuple[PyTree, PyTree]:
        grads, *aux = results if has_aux else (results,)
        grads = default_unscale_fn(grads, state)
        return (grads, *aux) if has_aux else grads, grads

    scaled = _scaled_transform(transform, redo_on_nan, unscale, default_scale_fn)
    return scaled(fun, has_aux=has_aux, **kwargs)


def dynamic_scale_value_and_grad(
    fun: Callable[..., PyTree],
    *,
    has_aux: bool = False,
    redo_on_nan: int = 10,
    filter: bool = True,
    **kwargs: PyTree,
) -> Callable[..., PyTree]:
    """Differentiates as `jax.value_and_grad`, with dynamic loss scaling.

    See `dynamic_scale_grad`.

    Returns:
        A function that returns `(next_state, (value, grads))`, or
        `(next_state, ((value, aux), grads))` with `has_aux`. The value is unscaled,
        float32 at least.
    """
    transform = eqx.filter_value_and_grad if filter else jax.value_and_grad

    def unscale(results: PyTree, state: DynamicScalerState) -> tuple[PyTree, PyTree]:
        first, grads = results
        value, *aux = first if has_aux else (first,)
        value, grads = numbers = default_unscale_fn((value, grads), state)
        return ((value, *aux) if has_aux else value, grads), numbers

    scaled = _scaled_transform(transform, redo_on_nan, unscale, default_scale_fn)
    return scaled(fun, has_aux=has_aux, **kwargs)


def _scaled_transform(
    transform: Callable[..., PyTree],
    redo_on_nan: int,
    unscale: Callable[[PyTree, DynamicScalerState], tuple[PyTree, PyTree]],
    scale: Callable[[PyTree, DynamicScalerState], PyTree],
) -> Callable[..., PyTree]:
    """Implements `dynamic_scale_tx`; `unscale` also returns the part to check."""
    if isinstance(redo_on_nan, bool) or not isinstance(redo_on_nan, int | np.integer):
        raise TypeError(
            "`redo_on_nan` of `mpx.compat.jaxamp` must be a whole number; got "
            f"{describe(redo_on_nan)}."
        )

    def scaled_transform(
        fun: Callable[..., PyTree], *args: PyTree, **kwargs: PyTree
    ) -> PyTree:
        @functools.wraps(fun, updated=())
        def scaled_fun(*f_args: PyTree, _dynamic_scaler_state: Any, **f_kwargs: PyTree):
            return scale(fun(*f_args, **f_kwargs), _dynamic_scaler_state)

        transformed = transform(scaled_fun, *args, **kwargs)

        def once(state: DynamicScalerState, f_args: PyTree, f_kwargs: PyTree) -> PyTree:
            results = transformed(*f_args, _dynamic_scaler_state=state, **f_kwargs)
            results, judged = unscale(results, state)
            finite = all_finite(judged)
            return _adjusted(state, finite), (results, finite)

        @functools.wraps(fun, updated=())
        def wrapper(
            *f_args: PyTree, dynamic_scaler_state: object, **f_kwargs: PyTree
        ) -> PyTree:
            state = _read(dynamic_scaler_state)
            again = functools.partial(once, f_args=f_args, f_kwargs=f_kwargs)
            state, found = again(state)
            if redo_on_nan > 0:
                state, found = tried_again(
                    again, lambda found: ~found[1], state, found, redo_on_nan
                )
            return state, found[0]

        return wrapper

    return scaled_transform


def _read(state: object) -> DynamicScalerState:
    """Returns the state as arrays, whatever numbers it was made of."""
    if not isinstance(state, DynamicScalerState):
        raise TypeError(
            "`dynamic_scaler_state` must be a `mpx.compat.jaxamp.DynamicScalerState`; "
            f"got {describe(state)}."
        )
    if is_frozen(state.count):
        raise ValueError(
            "`dynamic_scaler_state` comes from outside the function that JAX is "
            "tracing (jit, scan, ...); it would be a constant. Pass it to that "
            "function as an argument and return the new one."
        )
    dtype = state.scaler.dtype if eqx.is_inexact_array(state.scaler) else jnp.float32
    pairs = zip(state, (jnp.int32, dtype, dtype, jnp.int32, jnp.int32), strict=True)
    return DynamicScalerState(*(jnp.asarray(x).astype(to) for x, to in pairs))


def _adjusted(state: DynamicScalerState, finite: BoolLike) -> DynamicScalerState:
    select, zero = jax.lax.select, jnp.zeros((), jnp.int32)
    limits = jnp.finfo(state.scaler.dtype)
    # The inverse of the scale must be a normal number, too.
    largest = min(2.0 ** np.floor(np.log2(float(limits.max))), 2.0**126)
    smallest = max(float(limits.smallest_normal), 2.0**-126)
    grows = state.count >= state.patience
    grown = jnp.minimum(state.scaler * state.adjust_factor, largest)
    fallen = jnp.maximum(state.scaler / state.adjust_factor, smallest)
    return DynamicScalerState(
        state.patience,
        state.adjust_factor,
        select(finite, select(grows, grown, state.scaler), fallen),
        select(finite & ~grows, state.count + 1, zero),
        select(finite, state.total_resets, state.total_resets + 1),
    )


# The release of jaxamp whose names these are.
__version__ = "0.0.4"
