"""One try of a step: differentiates, checks and unscales, and retries on overflow.

The check comes before the gradients, also for the compiler. If XLA may fuse the
optimizer into the backward pass, it keeps activations for longer: 10% more memory for a
Vision Transformer's step on an H100. So the scale to divide gradients by depends on the
check (`_known_after`), and nothing can use a gradient earlier. Every gradient is read
for the check, and again by the optimizer.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, PyTree

from .._base.dtypes import dtype_of_gradient, full_precision_of
from .._base.jax_compat import has_one_device, manual_axes, stack, varying_axes
from .._base.tree import Filled, bool_scalar, finite_by_leaf, select_tree
from .._base.typing import BoolLike, BoolScalar, LossScalar
from .._loss_scaling import AbstractLossScaling, NoLossScaling, StaticLossScaling
from .._quantize import target_from
from .._settings import cast_leaf, settings_of
from ._accumulate import Accumulation, accumulated
from ._devices import ON_ITS_OWN, accumulated_on_devices
from ._engine import Problem, as_weights, scaled_value_and_grad


class Outcome(NamedTuple):
    """The outcome of a try.

    Attributes:
        loss: The unscaled loss, float32 at least.
        aux: The function's second result.
        grads: The unscaled gradients, one tree for each differentiated argument.
        flags: Whether the loss, each gradient, and everything checked later are finite;
            None if unchecked.
        amaxes: The amaxes of the recipes in the function, one array for each recipe.
        zeroed: Parts of the result, if the loss alone decides: whether elements of
            gradients were set to zero, and the leaves before.
    """

    loss: LossScalar
    aux: PyTree
    grads: tuple[PyTree, ...]
    flags: Bool[Array, " n"] | None
    amaxes: tuple[Array, ...]
    zeroed: dict[str, PyTree] | None = None


def attempt(
    problem: Problem,
    how: Accumulation,
    scaling: AbstractLossScaling,
    args: PyTree,
    kwargs: PyTree,
) -> Outcome:
    """Runs a step with a scaling, over micro-batches if there are several."""
    is_checked = scaling._is_stateful and not scaling._by_loss
    if how.axes or how.steps > 1:
        inner = problem
        if how.axes:
            inner = dataclasses.replace(problem, wire=ON_ITS_OWN)

        def one(scaling: AbstractLossScaling, part: PyTree, kwargs: PyTree) -> PyTree:
            found = scaled_value_and_grad(inner, scaling, part, kwargs, True)
            grads = scaling.unscale(as_weights(inner, found.grads, args))
            return found.loss, found.aux, grads, found.amaxes

        if how.axes:
            found = accumulated_on_devices(how, one, problem, scaling, args, kwargs)
        else:
            run = functools.partial(one, scaling)
            found = accumulated(how, run, problem, args, kwargs)
        loss, aux, grads, amaxes = found
        if not is_checked:
            return Outcome(loss, aux, grads, None, amaxes)
        flags = finite_flags(NoLossScaling(), loss, grads, _joins(problem, args))
        return Outcome(loss, aux, grads, flags, amaxes)
    found = scaled_value_and_grad(problem, scaling, args, kwargs)
    grads = as_weights(problem, found.grads, args)
    if not is_checked:
        unscaled = _returned(problem, scaling.unscale(grads))
        return Outcome(found.loss, found.aux, unscaled, None, found.amaxes)
    flags = finite_flags(scaling, found.loss, found.grads, _joins(problem, args))
    unscaled = _returned(problem, _known_after(flags, scaling).unscale(grads))
    return Outcome(found.loss, found.aux, unscaled, flags, found.amaxes)


def decided_by_loss(outcome: Outcome) -> Outcome:
    """Checks the loss alone, and sets elements of gradients that are bad to zero."""
    raw = jax.tree.leaves(outcome.grads)
    flags = finite_flags(NoLossScaling(), outcome.loss, [0.0] * len(raw))
    grads = jax.tree.map(lambda g: jnp.where(jnp.isfinite(g), g, 0), outcome.grads)
    is_zeroed = ~jnp.all(finite_flags(NoLossScaling(), jnp.zeros(()), raw))
    parts = {"_zeroed": is_zeroed, "_raw": raw}
    return outcome._replace(grads=grads, flags=flags, zeroed=parts)


def _returned(problem: Problem, grads: PyTree) -> PyTree:
    """Casts gradients to the dtype of the policy."""
    asked = problem.grad_dtype
    if asked is None:
        return grads
    return jax.tree.map(lambda g: g.astype(dtype_of_gradient(g.dtype, asked)), grads)


def retried(
    attempt: Callable[[AbstractLossScaling], Outcome],
    scaling: AbstractLossScaling,
    outcome: Outcome,
    retries: int,
) -> tuple[AbstractLossScaling, Outcome]:
    """Retries a non-finite step at smaller scales.

    A step with a non-finite loss is not retried: the loss does not depend on the scale.

    Returns:
        The scaling of the last try, and its outcome.
    """

    def is_bad(outcome: Any) -> Array:
        # The first flag is that of the loss.
        return ~jnp.all(outcome.flags) & outcome.flags[0]

    def again(scaling: AbstractLossScaling) -> PyTree:
        lower = scaling._backed_off()
        return lower, attempt(lower)

    return tried_again(again, is_bad, scaling, outcome, retries)


def tried_again(
    again: Callable[[Any], PyTree],
    is_bad: Callable[[Any], Array],
    state: PyTree,
    result: PyTree,
    times: int,
) -> PyTree:
    """Retries while the result is bad, and returns the last state and result.

    Args:
        again: `again(state)` returns the next state and result.
        is_bad: Returns whether a result is bad.
        state: The state of the first try.
        result: The result of the first try.
        times: The maximum number of retries.
    """
    # A loop carries only arrays; the rest of aux is the same at every scale.
    arrays, static = eqx.partition(result, eqx.is_array)

    def goes_on(carry: PyTree) -> Array:
        _, arrays, tries = carry
        return is_bad(arrays) & (tries < times)

    def body(carry: PyTree) -> PyTree:
        state, result = again(carry[0])
        return state, eqx.filter(result, eqx.is_array), carry[2] + 1

    start = (state, arrays, jnp.zeros((), jnp.int32))
    state, arrays, _ = jax.lax.while_loop(goes_on, body, start)
    return state, eqx.combine(arrays, static)


def _known_after(
    flags: Bool[Array, " n"], scaling: AbstractLossScaling
) -> StaticLossScaling:
    """Returns the same scale to unscale with, as a value that depends on the flags.

    The maximum is always 1, which XLA does not detect. A barrier would have the same
    effect and cost memory: 7 % more for the paper's ViT, 12 blocks, compiled for an
    H100 (jax 0.10.2, November 2026; see `python -m benchmarks residuals`).
    """
    one = jax.lax.max(jnp.all(flags).astype(jnp.float32), np.float32(1))
    return StaticLossScaling(scaling.loss_scale * one)


# --- Finiteness of a try --------------------------------------------------------------


def finite_flags(
    scaling: AbstractLossScaling, loss: LossScalar, grads: PyTree, joins: bool = False
) -> Bool[Array, " n"]:
    r"""Returns whether the loss and each gradient, divided by the scale, are finite.

    $$|g| \le m \cdot \min(s, 1)$$

    with the largest number $m$ of its dtype: dividing by a scale below 1 can make a
    finite gradient overflow. The test needs no division, which saves tracing and
    lowering one multiplication per gradient.

    Gradients in float16 only need to be finite, since they are below 2^16. With them,
    no step counts as finite at a scale below 2^-111.

    Args:
        scaling: The loss scaling that gradients are still scaled by.
        loss: The unscaled loss.
        grads: The gradients.
        joins: Whether to check rows of large gradients, and all their rows together.

    Returns:
        One flag for the loss, one for each gradient, and one for the rest, in the order
        of names in reports. All devices agree on them.
    """
    leaves = jax.tree.leaves(grads)
    (is_finite,), rest = finite_by_leaf(loss), jnp.asarray(True)
    if scaling._is_one:
        check = _is_finite
    else:
        # Below 1, slightly smaller, because 1 / s is rounded.
        scale = scaling.loss_scale
        reach = jax.lax.select(scale < 1, scale * (1 - 2.0**-20), jnp.ones_like(scale))
        limits = Filled(lambda dtype: reach.astype(dtype) * jnp.finfo(dtype).max)
        check = functools.partial(_is_within, limits=limits)
        if any(grad.dtype == np.float16 for grad in leaves):
            rest = scale >= 2.0**-111
    flags = _joined(
        [_by_rows(check, x) for x in leaves] if joins else map(check, leaves)
    )
    return agreed(stack([is_finite, *flags, rest]))


# On a GPU the check of a large array takes two kernels. The last ones of up to 64
# arrays, over the results for up to 4096 rows of each, are one kernel. Small arrays are
# checked where they are made: together, XLA would keep what biases' gradients are sums
# of (76 of 753 MB of a small ViT).
_ROWS, _TOGETHER = 4096, 64


def _by_rows(check: Callable[[Array], BoolScalar], x: Array) -> Bool[Array, "..."]:
    """Checks the rows of an array; all of it if the compiler may store it otherwise."""
    # The length of an axis may be a symbol.
    rows = math.gcd(x.size, _ROWS) if isinstance(x.size, int) else 0
    if rows < 64 or x.ndim > 3 or x.size <= _ROWS:
        return check(x)
    flags = jax.vmap(check)(x.reshape(rows, -1))
    return jnp.pad(flags, (0, _ROWS - rows), constant_values=True)


def _joined(flags: Iterable[Array]) -> list[BoolScalar]:
    """Joins the flags of rows, for all arrays at once."""
    flags = list(flags)
    rows = [i for i, x in enumerate(flags) if x.ndim]
    for some in (rows[i : i + _TOGETHER] for i in range(0, len(rows), _TOGETHER)):
        stacked = jax.lax.optimization_barrier(jnp.stack([flags[i] for i in some]))
        for i, flag in zip(some, jax.lax.reduce_and(stacked, axes=(1,)), strict=True):
            flags[i] = flag
    return flags


def _joins(problem: Problem, args: PyTree) -> bool:
    settings = settings_of(problem.func)
    target = target_from(None) if settings is None else settings.device
    return target.platform == "cuda" and has_one_device(args)


def _is_finite(grad: Array | float) -> BoolScalar:
    return finite_by_leaf(grad)[0]


def _is_within(grad: Array, limits: Filled) -> BoolScalar:
    if grad.dtype == np.float16:
        return _is_finite(grad)
    if jnp.issubdtype(grad.dtype, jnp.complexfloating):
        return _is_within(grad.real, limits) & _is_within(grad.imag, limits)
    wide = cast_leaf(grad, full_precision_of(grad.dtype))
    flags = jax.lax.le(jax.lax.abs(wide), limits.like(wide))
    return jax.lax.reduce_and(flags, axes=tuple(range(grad.ndim)))


def agreed(flags: Bool[Array, " n"]) -> Bool[Array, " n"]:
    """Returns the flags, agreed on by all devices."""
    axes = manual_axes()
    if axes and varying_axes(jax.lax.axis_index(axes[0])):
        # `check_vma=True`: devices agree on flags that do not vary, and JAX 0.12 only
        # accepts axes of one kind.
        axes = tuple(axis for axis in axes if axis in varying_axes(flags))
    if not axes:
        return flags
    return jax.lax.pmin(flags.astype(jnp.int32), axes).astype(bool)


# --- The result of a gradient function: a tuple in the paper's order, with names ------


class GradientResult(tuple):
    """The result of a gradient function; unpacks like the tuple of the paper.

    | function | unpacks to |
    |---|---|
    | `filter_grad`, `grad` | `scaling, finite, grads` |
    | the same with `has_aux=True` | `scaling, finite, grads, aux` |
    | `filter_value_and_grad`, `value_and_grad` | `value, scaling, finite, grads` |
    | the same with `has_aux=True` | `(value, aux), scaling, finite, grads` |

    It is a PyTree. For `mpx.optimizer_step`, which may check the step again, it also
    contains the previous state, and which leaves were finite.

    Attributes:
        value: The unscaled loss, float32 at least; only from functions that return it.
        aux: The second result of the loss function; only with `has_aux=True`.
        scaling: The loss scaling for the next step.
        finite: Whether loss and gradients are finite, a boolean scalar array; with
            `NoLossScaling(skip="loss")`, whether the loss is.
        grads: The unscaled gradients, float32 at least; meaningless where `finite` is
            False.
    """

    _fields: tuple[str, ...]
    _parts: dict[str, Any]

    def __new__(cls, **parts: object) -> "GradientResult":
        has_value, has_aux = "value" in parts, "aux" in parts
        common = (parts["scaling"], parts["finite"], parts["grads"])
        if has_value and has_aux:
            items = ((parts["value"], parts["aux"]), *common)
        elif has_value:
            items = (parts["value"], *common)
        else:
            items = (*common, parts["aux"]) if has_aux else common
        self = super().__new__(cls, items)
        self._parts = parts
        self._fields = tuple(name for name in parts if not name.startswith("_"))
        return self

    def __getattr__(self, name: str) -> PyTree:
        # Only called for missing attributes. During copying or unpickling there are no
        # parts yet, and reading `self._parts` would recurse.
        parts = self.__dict__.get("_parts", {})
        if name in parts:
            return parts[name]
        if name == "value":
            raise AttributeError(
                "This result has no `value`; use `mpx.filter_value_and_grad` (or "
                "`mpx.value_and_grad`) instead of `mpx.filter_grad`."
            )
        if name == "aux":
            raise AttributeError(
                "This result has no `aux`; build the gradient function with "
                "`has_aux=True`."
            )
        raise AttributeError(f"`mpx.GradientResult` has no attribute {name!r}.")

    def _replace(self, **changes: Any) -> "GradientResult":
        """Returns a copy with other parts, like a named tuple.

        `finite=False` skips a finite step: weights and optimizer state stay unchanged,
        and the scaling counts a skipped step without its overflow or amaxes. A
        non-finite step stays non-finite.
        """
        unknown = changes.keys() - self._parts.keys()
        if unknown:
            raise ValueError(
                f"`_replace` needs fields of {', '.join(self._fields)}; got "
                f"{sorted(unknown)}."
            )
        parts = {**self._parts, **changes}
        if "grads" in changes:
            parts.pop("_raw", None)
        if "finite" in changes:
            wanted = bool_scalar(changes["finite"], "`finite` of `result._replace`")
            parts["_aside"] = self._parts.get("_aside", False) | (self.finite & ~wanted)
            parts["finite"] = self.finite & wanted
            if "scaling" not in changes:
                parts["scaling"] = _aside(parts["_aside"], self._before, self.scaling)
        return GradientResult(**parts)

    def _judged(self, finite: BoolLike, flags: object) -> Any:
        """Returns the scaling after this step, given whether it is finite."""
        before = self._before
        if before is None:
            return None
        if "_counted" in self._parts:
            # Full precision: count steps, without using or changing the scale.
            after = before._counted(finite, flags)
        else:
            after = before.adjust(finite, places_finite=flags)
        return _aside(self._parts.get("_aside", False), before, after)

    @property
    def _before(self) -> Any:
        """The scaling before this step."""
        return self._parts["_counted" if "_counted" in self._parts else "_scaled"]

    def __repr__(self) -> str:
        inner = ", ".join(f"{name}={self._parts[name]!r}" for name in self._fields)
        return f"GradientResult({inner})"

    # A tuple would be rebuilt from its items, which have no names.
    def __reduce__(self) -> tuple:
        return _unflatten, (tuple(self._parts), tuple(self._parts.values()))


def _aside(is_aside: Any, before: Any, after: Any) -> Any:
    """Returns the scaling after this step, which the user may have skipped."""
    if is_aside is False or before is None:
        return after
    return select_tree(is_aside, before._set_aside(), after)


def _flatten_with_keys(
    result: GradientResult,
) -> tuple[list[tuple[object, PyTree]], tuple[str, ...]]:
    # Elsewhere, gradients before elements were set to zero would be kept beside them.
    parts = {name: part for name, part in result._parts.items() if name != "_raw"}
    return [(jax.tree_util.GetAttrKey(k), v) for k, v in parts.items()], tuple(parts)


def _unflatten(names: tuple[str, ...], children: Iterable[PyTree]) -> GradientResult:
    return GradientResult(**dict(zip(names, children, strict=True)))


jax.tree_util.register_pytree_with_keys(GradientResult, _flatten_with_keys, _unflatten)
