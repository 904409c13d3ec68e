"""The public transform: a function whose operations run in suitable precision.

`mpx.autocast` has three uses: with a function, it is a transform; without, a decorator,
or a region of a program that is being transformed.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NoReturn

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from .._base.dtypes import float_dtype, is_half
from .._base.errors import describe
from .._base.typing import DTypeLike
from .._base.wraps import wraps
from .._nnx_graph import has_nnx_objects
from .._quantize import AbstractRecipe, target_from
from .._settings import (
    MARK,
    Cast,
    Mark,
    Rule,
    Rules,
    Settings,
    Weights,
    ambient,
    as_written,
    is_recipe_class,
    read_switch,
    read_weights,
    region,
    resolved,
    unkeyed,
    weights_in_call,
    with_ambient,
    with_settings,
)
from .._stored_weights import dequantize_weights
from ._call import Invocation, call_autocast, call_recomputing
from ._context import Programs, is_tpu
from ._decide import expect_unused

# --- Functions that are switched off, `mpx.autocast(func, enabled=False)` -------------
#
# Such a function is called unchanged: nothing is traced, and regions in it have no
# effect, so a program needs only `enabled=config.mixed` for its baseline. But a region
# with `enabled=True` is the innermost one and wins; only then is the function traced
# and emitted like others.


class _SwitchedOnInside(Exception):
    """A region with `enabled=True` is in a function that is switched off."""


def call_switched_off(call: Invocation) -> PyTree:
    """Calls a function that is switched off."""
    around = ambient()
    if around.source is not None:
        around.source.is_switched_off = True
    func, args, kwargs = dequantize_weights((call.func, call.args, call.kwargs))
    if around.is_tracing:  # an autocast function around it leaves this part alone
        with region(Settings.of(is_enabled=False)):
            return func(*args, **kwargs)
    try:
        with with_ambient(is_switched_off=True):
            return func(*args, **kwargs)
    except _SwitchedOnInside:
        if has_nnx_objects((func, args, kwargs)):
            raise ValueError(
                "`with mpx.autocast(enabled=True)` is not possible inside a "
                "function with `mpx.autocast(..., enabled=False)` that got Flax NNX "
                "objects, which are already changed. Use the same `enabled` for the "
                "region and the function."
            ) from None
    return call_autocast(call._replace(func=func, args=args, kwargs=kwargs))


def is_switched_off() -> bool:
    """Returns whether the running code is in an autocast function that is off."""
    return ambient().is_switched_off and not ambient().is_tracing


def region_of_switched_off(
    settings: Settings,
) -> contextlib.AbstractContextManager[object]:
    """Returns the context of a region in a function that is switched off."""
    says_enabled = "is_enabled" in settings.explicit and settings.is_enabled
    if says_enabled and not ambient().is_control:
        raise _SwitchedOnInside
    return contextlib.nullcontext()


# --- The transform --------------------------------------------------------------------
_CALL = "`mpx.autocast`"


class _Unset:
    """The default of `recipe`, since None switches recipes off."""

    def __repr__(self) -> str:
        return "unset"


_UNSET = _Unset()


def autocast(
    func: Callable[..., PyTree] | None = None,
    dtype: DTypeLike | None = None,
    *,
    rules: Rules | None = None,
    residual_stream: str | None = None,
    residuals: str | None = None,
    weights: int | str | tuple[int | str, ...] | None = None,
    recipe: AbstractRecipe | None | _Unset = _UNSET,
    target: str | None = None,
    strict: bool | None = None,
    enabled: bool | None = None,
    ambient: bool = False,
) -> Any:
    """Runs a function in mixed precision, chosen operation by operation.

    Matmuls and convolutions read and return half precision, everything between them
    computes in float32, and data movement keeps the precision of its input. This
    applies everywhere in the program: inside jit, scan, while, cond, remat, shard_map,
    vmap and functions with custom derivative rules.

    Inputs, weights and results keep their dtypes. Weights are cast where they are used,
    so gradients are summed and returned in float32. float64, complex numbers and 8-bit
    formats are never changed. Half precision that the program itself chose is kept.

    Without a function it returns a decorator, `@mpx.autocast(dtype=...)`, or a region:

        with mpx.autocast(enabled=False):
            y = jnp.linalg.norm(x @ w)

    A region applies to what is traced in its body, inside a function that is being
    transformed; the innermost region wins. `with mpx.autocast(..., ambient=True)` is
    for code around calls: its settings apply to autocast functions called inside, for
    each option that they do not set themselves. Of nested transforms the inner one
    wins.

    Args:
        func: The function, or a callable PyTree such as an Equinox module, of any
            PyTrees.
        dtype: float16, or bfloat16 (the default). float16 overflows above 65504 and
            needs dynamic loss scaling. float32 is for recipes: weight matmuls in 8
            bits, and everything else in full precision.
        rules: Overrides the precision of single operations; see `mpx.Rules`. Regions do
            not take it.
        residual_stream: "full" (the default) keeps the sum that residual blocks add to
            in float32; "half" saves memory and loses precision. "blocks" is "half"
            where blocks add the result of a matmul, with a bias or dropped out, and
            "full" where they scale it, `x + dt * f(x)`: the default of bfloat16 on
            TPUs. In bfloat16 on TPUs scores are also scaled and masked in half
            precision where a softmax reads them, without another rounding.
        residuals: "small" (the default) recomputes softmax, norms, gelu and the like in
            the backward pass from their half-precision inputs instead of saving float32
            residuals. Values are the same; gradients differ only by the order in which
            those of several uses are summed. "fast" saves what JAX saves. "loops" is
            "small" in loops and "fast" outside: the default for TPUs, whose compiler
            recomputes cheap operations itself, but not in loops.
        recipe: Quantizes weight matmuls to 8 bits or fewer in the forward and backward
            pass: `mpx.Float8CurrentScaling()`, `mpx.DelayedScaling()`, ... By default
            nothing is quantized. Attention's activation matmuls and the output layer
            (LM head) stay in half precision unless rules change that. An explicit None,
            in a region or under an ambient recipe, switches the recipe off.
        target: The device that is compiled for, by default the one of this process:
            "H100", "sm_90", "tpu v5e", "cpu", in upper or lower case, with spaces,
            hyphens or neither. It decides which hardware units a recipe runs on.
        weights: The position or name of the argument that contains the parameters, or
            several of them, passed by position or by name. Recipes quantize parameters,
            and rules select by them. The arrays of `func` itself are always parameters.
            By default no argument contains more if `func` has any, otherwise the first
            one does.
        strict: True raises an error for what is otherwise only reported: a primitive
            containing a program that autocast does not enter, a rule that matches no
            operation, a recipe that the device has no hardware units for.
        enabled: False leaves the program in the precision it was written in, as a
            switch: `enabled=config.mixed`. Gradient functions cast nothing for such a
            function either. Autocast functions and regions inside that set
            `enabled=True` are not switched off.
        ambient: Whether the settings apply to functions called in the body of `with`,
            False by default.

    Returns:
        A function of the same arguments that returns what `func` returns, in the same
        dtypes. It traces `func` at each call, with arrays in its arguments traced as
        under `jax.jit`; wrap it in `jax.jit` to trace once. Without `func`, a decorator
        that is also a context manager.

    Raises:
        TypeError: `func` is not callable or is a dtype, or an option is of the wrong
            kind.
        ValueError: `dtype`, `residual_stream` or `residuals` is not one of the values
            above; a region is entered where nothing is being transformed; under
            `strict`, any of its cases; the inputs of a call were cast by
            `mpx.filter_grad` or the like; a recipe finds nothing to quantize, is
            applied to a derivative, or has a state and is called without one.
        NotImplementedError: Under `strict`, a primitive is unknown to mpx.

    Examples:
        >>> import jax, jax.numpy as jnp, mpx
        >>> w, x = jnp.ones((8, 4)), jnp.ones((2, 8))
        >>> print(jax.make_jaxpr(mpx.autocast(jnp.dot, target="h100"))(x, w))
        { lambda ; a:f32[2,8] b:f32[8,4]. let
            c:bf16[2,8] = convert_element_type[new_dtype=bfloat16 weak_type=False] a
            d:bf16[8,4] = convert_element_type[new_dtype=bfloat16 weak_type=False] b
            e:bf16[2,4] = dot_general[
              dimension_numbers=(([1], [0]), ([], []))
              preferred_element_type=bfloat16
            ] c d
            f:f32[2,4] = convert_element_type[new_dtype=float32 weak_type=False] e
          in (f,) }
        >>> @mpx.autocast(dtype=jnp.float16)
        ... def loss(w, x):
        ...     with mpx.autocast(enabled=False):
        ...         scores = x @ w  # in float32
        ...     return jnp.mean(jax.nn.softmax(scores) @ w.T)
        >>> jax.grad(loss)(w, x).dtype
        dtype('float32')
    """
    _refuse_other_things(func)
    _refuse_recipe(dtype, "a dtype")
    options: dict[str, Any] = {}
    if dtype is not None:
        options["dtype"] = _computing_dtype(dtype)
    if rules is not None:
        options["rules"] = _checked_rules(rules)
    if residual_stream is not None:
        words = ("full", "blocks", "half")
        options["residual_stream"] = _one_of("residual_stream", residual_stream, words)
    if residuals is not None:
        words = ("small", "loops", "fast")
        options["residuals"] = _one_of("residuals", residuals, words)
    if strict is not None:
        options["is_strict"] = read_switch("strict", strict, _CALL)
    if enabled is not None:
        options["is_enabled"] = read_switch("enabled", enabled, _CALL)
    ambient = read_switch("ambient", ambient, _CALL)
    if not isinstance(recipe, _Unset):
        options["recipe"] = _checked_recipe(recipe)
    if target is not None:
        options["target"] = target_from(target)
    deferred = _Deferred(Settings.of(**options), read_weights(weights, _CALL), ambient)
    return deferred if func is None else deferred(func)


# --- Reading options ------------------------------------------------------------------


def _refuse_other_things(func: object) -> None:
    """Raises if something else is passed in the place of the function."""
    name = _dtype_name(func)
    if name is not None:
        raise TypeError(
            f"{_CALL} needs a function first; got the dtype {name}. As a decorator, "
            f"pass keywords only: `@mpx.autocast(dtype=jnp.{name})`."
        )
    _refuse_recipe(func, "a function")


def _refuse_recipe(value: object, option: str) -> None:
    """Raises if a recipe, or its class, is passed where another option belongs."""
    if isinstance(value, AbstractRecipe) or is_recipe_class(value):
        raise TypeError(
            f"{_CALL} needs {option} here; got {describe(value)}. Pass a recipe by "
            f"name: `mpx.autocast(func, recipe={as_written(value)})`."
        )


def _checked_recipe(recipe: object) -> AbstractRecipe | None:
    if recipe is None or isinstance(recipe, AbstractRecipe):
        return recipe
    if is_recipe_class(recipe):
        raise TypeError(
            f"`recipe` of {_CALL} must be a recipe, not its class; got "
            f"{describe(recipe)}. Call it: `recipe={as_written(recipe)}`."
        )
    raise TypeError(
        f"`recipe` of {_CALL} must be a recipe such as "
        f"`mpx.Float8CurrentScaling()`, or None; got {describe(recipe)}."
    )


def _checked_rules(rules: object) -> Rules:
    if isinstance(rules, Rules):
        return rules
    raise TypeError(
        f"`rules` of {_CALL} must be `mpx.Rules`; got {describe(rules)}. Combine "
        "rules: `mpx.Rules(mpx.Rule(...), ...)`."
    )


def _one_of(option: str, value: str, words: tuple[str, ...]) -> str:
    """Returns the value of an option if it is one of some words, else raises."""
    if value not in words:
        *firsts, last = (f'"{word}"' for word in words)
        raise ValueError(
            f"`{option}` of {_CALL} must be {', '.join(firsts)} or {last}; got "
            f"{describe(value)}."
        )
    return value


def _dtype_name(value: object) -> str | None:
    """Returns the name of a dtype, which is callable, and None for other objects."""
    if not isinstance(value, np.dtype | str | type):
        return None  # an instance may be a layer with an attribute `dtype`
    try:
        found = jnp.dtype(value)
    except TypeError:
        return None
    return None if found.kind == "O" else found.name


def _computing_dtype(dtype: DTypeLike) -> np.dtype:
    found = float_dtype(dtype, _CALL)
    if not is_half(found) and found != np.float32:
        raise ValueError(
            f"`dtype` of {_CALL} must be float16 or bfloat16, or with recipes "
            f"float32; got {found.name}. For full precision call the function "
            "without it, or set `enabled=False`."
        )
    return found


# --- The returned functions -----------------------------------------------------------


class _Deferred(contextlib.ContextDecorator):
    """`mpx.autocast` without a function: a decorator and a context manager."""

    def __init__(
        self, settings: Settings, weights: Weights | None, ambient: bool
    ) -> None:
        self._settings = settings
        self._weights = weights
        self._ambient = ambient
        self._entered: list[contextlib.AbstractContextManager[object]] = []

    def __call__(self, func: Callable[..., PyTree]) -> Callable[..., PyTree]:
        _refuse_other_things(func)
        if not callable(func):
            raise TypeError(f"{_CALL} needs a function; got {describe(func)}.")
        if self._ambient:
            raise TypeError(
                f"`ambient=True` of {_CALL} is only for `with mpx.autocast(..., "
                "ambient=True):` around calls; got a function. Pass only one of "
                "them."
            )
        weights, is_explicit = self._weights, self._weights is not None
        if weights is None:
            weights = () if any(map(eqx.is_array, jax.tree.leaves(func))) else (0,)
        return _wrapped(func, self._settings, weights, is_explicit)

    def __enter__(self) -> None:
        if self._weights is not None:
            raise TypeError(
                f"`weights` of {_CALL} selects the argument with the parameters, and "
                "cannot be set in a region or around calls. Pass it to the "
                "transform: `mpx.autocast(func, weights=...)`."
            )
        context = with_settings(self._settings) if self._ambient else self._region()
        context.__enter__()
        # A stack: an object may be entered again inside its own `with`.
        self._entered.append(context)

    def __exit__(self, *exception: Any) -> None:
        self._entered.pop().__exit__(*exception)

    def _region(self) -> contextlib.AbstractContextManager[object]:
        whole = self._settings.not_of_regions
        if whole:
            raise TypeError(
                f"`{whole[0].removeprefix('is_')}` of {_CALL} cannot be set in a "
                "region. Pass it to the transform; use `mpx.Rule(scope=...)` for "
                "one part of a program."
            )
        if is_switched_off():
            return region_of_switched_off(self._settings)
        if not ambient().is_tracing:
            raise ValueError(
                "`with mpx.autocast(...)` must be inside a function that "
                "`mpx.autocast` is transforming; here none is, and it would do "
                "nothing. Transform the function around it, `mpx.autocast(func)`, "
                "or set `ambient=True` around calls of such functions."
            )
        return region(self._settings)


def _wrapped(
    func: Callable[..., PyTree], options: Settings, weights: Weights, is_explicit: bool
) -> Callable[..., PyTree]:
    # One store for all calls, so that JAX finds programs that it has compiled.
    programs = Programs()

    @wraps(func)
    def wrapper(*args: PyTree, **kwargs: PyTree) -> PyTree:
        settings = resolved(options)
        cast = unkeyed().cast
        if cast is not None:
            _refuse_cast_inputs(cast)
        places = weights_in_call(func, weights, args, kwargs, _CALL)
        settings = dataclasses.replace(
            settings, residuals=_residuals(settings), residual_stream=_stream(settings)
        )
        call = Invocation(settings, places, programs, func, args, kwargs)
        return call_autocast(call) if settings.is_enabled else call_switched_off(call)

    given = {"options": options, "weights": weights, "is_explicit": is_explicit}
    again = functools.partial(_wrapped, **given)
    setattr(wrapper, MARK, Mark(wrapper, func, options, weights, is_explicit, again))
    if isinstance(func, eqx.Module):
        wrapper.__name__ = type(func).__name__
    return wrapper


def with_rule(func: Callable[..., PyTree], rule: Rule) -> Callable[..., PyTree]:
    """Returns an autocast function again, with a rule before all its others."""
    expect_unused(rule)
    rules = getattr(func, MARK).settings.rules
    first = Rules(rule, *rules.rules, looks_ahead=rules.looks_ahead)
    return _made_again(func, rules=first)


def with_dtype(func: Callable[..., PyTree], dtype: np.dtype) -> Callable[..., PyTree]:
    """Returns an autocast function again, in another half-precision dtype."""
    return _made_again(func, dtype=dtype)


def _made_again(func: Callable[..., PyTree], **options: Any) -> Callable[..., PyTree]:
    mark: Mark = getattr(func, MARK)
    changed = Settings.of(**options).within(mark.settings)
    return _wrapped(mark.func, changed, mark.weights, mark.has_explicit_weights)


def recomputing(func: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """Returns a function as written, whose derivative saves as little as autocast's."""

    @wraps(func)
    def wrapper(*args: PyTree, **kwargs: PyTree) -> PyTree:
        return call_recomputing(_residuals(resolved(Settings())), func, args, kwargs)

    return wrapper


def ambient_residuals() -> str:
    """Returns the active `residuals` outside autocast."""
    return _residuals(resolved(Settings()))


def _residuals(settings: Settings) -> str:
    """Returns the `residuals` of the settings, or the default."""
    if settings.residuals:
        return settings.residuals
    if settings.dtype == np.float32:
        return "fast"  # there is no half-precision value to recompute from
    return "loops" if is_tpu(settings) else "small"


def _stream(settings: Settings) -> str:
    """Returns the `residual_stream` of the settings, or the default."""
    if settings.residual_stream:
        return settings.residual_stream
    return "blocks" if settings.dtype == jnp.bfloat16 and is_tpu(settings) else "full"


def _refuse_cast_inputs(cast: Cast) -> NoReturn:
    """Raises, as a gradient function has cast the inputs that autocast would cast."""
    call, dtype, _ = cast
    raise ValueError(
        f"An autocast function needs uncast inputs; {call} has cast them to "
        f"{dtype.name}, because it did not detect the autocast function, perhaps "
        f"inside a lambda. Pass the autocast function itself to {call}, put "
        "`mpx.autocast` around the outermost function, or disable the cast of "
        'inputs: `policy="full"`.'
    )
