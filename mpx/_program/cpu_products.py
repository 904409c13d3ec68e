"""Multiplies and convolves bfloat16 in the form that a CPU has fast units for.

Such a matmul or convolution has its own primitive, because JAX's derivative must not
see the float32 result: it would multiply float32 by bfloat16. The primitive has the
name, parameters and type of JAX's, and is lowered to JAX's except on CPUs. So code that
tests the name treats both alike, and policies of `jax.checkpoint` receive JAX's.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.extend.core import JaxprEqn, Primitive
from jax.extend.core.primitives import conv_general_dilated_p, dot_general_p
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array

from .._base.jax_compat import (
    answer_policies_for,
    bind_equation,
    layouts_are_said,
    permuted_sharding,
)
from .._base.typing import AnyArray
from .equations import run_by

# --- Matmuls in the form for CPUs -----------------------------------------------------
#
# XLA multiplies bfloat16 by a library (YNNPACK) that uses these units, with float32
# sums, if the result is float32 and the left operand's contracted axes are its last. A
# transposed copy does not help: XLA folds the transpose into the matmul, which then
# does not use the library. It becomes a slow loop, which sums in bfloat16 if the result
# is bfloat16 (since jaxlib 0.11), or fails: a float32 result is then not implemented
# (0.10). So the left operand is transposed and its layout constrained: XLA folds
# nothing into that, at no cost (jaxlib 0.10.2 to 0.12.0.1, November 2026).

DimensionNumbers = tuple[
    tuple[tuple[int, ...], tuple[int, ...]], tuple[tuple[int, ...], tuple[int, ...]]
]


def multiply_in_order(
    left: jax.Array,
    right: jax.Array,
    dimension_numbers: DimensionNumbers,
    precision: Any,
    out_sharding: Any = None,
    *,
    says_layout: bool,
) -> jax.Array:
    """Returns the matmul of two bfloat16 operands in float32, in the form for CPUs.

    That of two int8 operands in int32.

    Args:
        left: The left operand.
        right: The right operand.
        dimension_numbers: As of `jax.lax.dot_general`, like the next two.
        precision: The precision of the matmul.
        out_sharding: The sharding of the result.
        says_layout: Whether layouts of operands can be constrained.
    """
    (lc, rc), (lb, rb) = dimension_numbers
    pairs = sorted(zip(lc, rc, strict=True))
    free = [axis for axis in range(left.ndim) if axis not in (*lc, *lb)]
    if pairs and free:
        if free[-1] > pairs[0][0]:
            left = left.transpose(*lb, *free, *(axis for axis, _ in pairs))
            lb = tuple(range(len(lb)))
            lc = tuple(range(len(lb) + len(free), left.ndim))
            rc = tuple(axis for _, axis in pairs)
        left, right = _in_order(left, says_layout), _in_order(right, says_layout)
    return lax.dot_general(
        left,
        right,
        ((lc, rc), (lb, rb)),
        precision=precision,
        preferred_element_type=_wide(left),
        out_sharding=out_sharding,
    )


def _wide(x: AnyArray) -> np.dtype:
    return _INT32 if x.dtype == _INT8 else _FLOAT32


def _in_order(x: jax.Array, says_layout: bool) -> jax.Array:
    """Returns the array, protected from folding its transpose into a matmul."""
    if says_layout:
        return with_layout_constraint(x, Layout(tuple(range(x.ndim))))
    # A barrier may cost a pass; a barrier of bfloat16 would be a pass of float32.
    unsigned = np.dtype(f"uint{8 * x.dtype.itemsize}")
    bits = lax.optimization_barrier(lax.bitcast_convert_type(x, unsigned))
    return lax.bitcast_convert_type(bits, x.dtype)


# --- Convolutions as matmuls, where a CPU computes these faster -----------------------
#
# XLA's CPU compiler has fast units for matmuls, but not for convolutions. A convolution
# is a sum of matmuls, one for each position of its window:
#
# y[b, o, n] = sum over k, c of x[b, o * stride + k * dilation, c] * w[k, c, n]
#
# or one matmul for each position of its result, of which a weight's gradient has few;
# or a single one, if windows touch and do not overlap. Which forms are faster was
# measured: benchmarks/NOTES.md, "Convolutions on a CPU".

Multiply = Callable[[Array, Array, DimensionNumbers], Array]

# The most matmuls that a convolution may become, and their least sizes.
# unsure: six shapes on one shared Xeon; the limits are between them (64 lost, 256 won)
_MOST_PRODUCTS = 9
_LEAST_FEATURES = 128  # of a window that overlaps the next
_LEAST_SIDE = 64  # of a weight's gradient
_LEAST_SUM = 16


class _Form(NamedTuple):
    """A convolution with its axes in order.

    Attributes:
        x: The padded input, `[batch, *places, channels]`.
        w: The window, `[*places, channels, features]`.
        strides: The window's strides, one per dimension.
        holes: The window's dilation, one per dimension.
        places: The spatial shape of the result.
    """

    x: Array
    w: Array
    strides: tuple[int, ...]
    holes: tuple[int, ...]
    places: tuple[int, ...]

    @property
    def window(self) -> tuple[int, ...]:
        """The spatial shape of the window."""
        return self.w.shape[:-2]


def convolve_to_float32(
    x: Array,
    w: Array,
    *,
    window_strides: Sequence[int],
    padding: Sequence[tuple[int, int]],
    lhs_dilation: Sequence[int],
    rhs_dilation: Sequence[int],
    dimension_numbers: Any,
    feature_group_count: int,
    batch_group_count: int,
    multiply: Multiply,
) -> Array | None:
    """Computes a bfloat16 convolution as matmuls with float32 results.

    Args:
        x: The input.
        w: The window.
        window_strides: As of `jax.lax.conv_general_dilated`, like the next six.
        padding: Low and high padding of each dimension of the input.
        lhs_dilation: Dilation of the input.
        rhs_dilation: Dilation of the window.
        dimension_numbers: The order of axes.
        feature_group_count: Groups of features.
        batch_group_count: Groups of the batch.
        multiply: A function of two operands and dimension numbers.

    Returns:
        The result; None where a convolution is as fast, or not known to be slower.
    """
    if feature_group_count != 1 or batch_group_count != 1 or not window_strides:
        return None
    numbers = dimension_numbers
    batch, channels, *places = numbers.lhs_spec
    features, inputs, *window = numbers.rhs_spec
    x = x.transpose(batch, *places, channels)
    w = w.transpose(*window, inputs, features)
    sizes = (*x.shape, *w.shape)
    # A size may be symbolic, in an exported program.
    if 0 in sizes or not all(isinstance(size, int) for size in sizes):
        return None
    padded = [
        (low, high, hole - 1)
        for (low, high), hole in zip(padding, lhs_dilation, strict=True)
    ]
    y = None
    if set(rhs_dilation) == {1}:
        y = _scattered(x, w, padded, window_strides, multiply)
    if y is None:
        y = _gathered(x, w, padded, window_strides, rhs_dilation, multiply)
    if y is None:
        return None
    order = [0] * y.ndim
    for axis, place in enumerate((numbers.out_spec[0], *numbers.out_spec[2:])):
        order[place] = axis
    order[numbers.out_spec[1]] = y.ndim - 1
    return y.transpose(order)


def _scattered(
    x: Array,
    w: Array,
    padded: Sequence[tuple[int, int, int]],
    strides: Sequence[int],
    multiply: Multiply,
) -> Array | None:
    """Convolves a dilated input: multiplies each input position, then moves results.

    This is the gradient of an input for windows of one position, or for windows that
    touch: the dilation equals the window, so each position of the result is the product
    of one position of the input and one of the window.
    """
    window = w.shape[:-2]
    if set(window) == {1} == set(strides) and w.shape[-2] >= _LEAST_SUM:
        y = _over_channels(multiply, x, w.reshape(w.shape[-2:]))
        return lax.pad(y, jnp.zeros((), y.dtype), [(0, 0, 0), *padded, (0, 0, 0)])
    holes = tuple(hole + 1 for _, _, hole in padded)
    if holes != window or set(strides) != {1} or w.shape[-2] < _LEAST_SUM:
        return None
    y = _over_channels(multiply, x, jnp.flip(w, range(len(window))), w.ndim - 2)
    # [batch, *places, *window, features] to [batch, place, window, ..., features]
    count = len(window)
    pairs = [axis for i in range(count) for axis in (1 + i, 1 + count + i)]
    y = y.transpose(0, *pairs, y.ndim - 1)
    sizes = [n * k for n, k in zip(x.shape[1:-1], window, strict=True)]
    y = y.reshape(x.shape[0], *sizes, w.shape[-1])
    # Without padding, the first position is multiplied by the last one of the window.
    ends = [
        (low - (k - 1), high - (k - 1), 0)
        for (low, high, _), k in zip(padded, window, strict=True)
    ]
    return lax.pad(y, jnp.zeros((), y.dtype), [(0, 0, 0), *ends, (0, 0, 0)])


def _gathered(
    x: Array,
    w: Array,
    padded: Sequence[tuple[int, int, int]],
    strides: Sequence[int],
    holes: Sequence[int],
    multiply: Multiply,
) -> Array | None:
    if any(hole for _, _, hole in padded):
        return None
    x = lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), *padded, (0, 0, 0)])
    reach = [(k - 1) * d + 1 for k, d in zip(w.shape[:-2], holes, strict=True)]
    places = [
        (n - r) // s + 1 for n, r, s in zip(x.shape[1:-1], reach, strides, strict=True)
    ]
    if min(places) < 1:
        return None
    form = _Form(x, w, tuple(strides), tuple(holes), tuple(places))
    windows, results = math.prod(form.window), math.prod(places)
    sum_length, sides = w.shape[-2], min(x.shape[0], w.shape[-1])
    if windows == 1:
        return _by_window(form, multiply) if sum_length >= _LEAST_SUM else None
    if results == 1 and sides >= _LEAST_SUM:
        return _by_place(form, multiply)
    if form.window == form.strides and set(holes) == {1}:
        is_long = windows * sum_length >= _LEAST_SUM
        return _in_one(form, places, form.window, 2, multiply) if is_long else None
    if form.places == form.holes and set(strides) == {1}:
        # Such windows' weight gradient: dilation equals the result's shape.
        return _in_one(form, form.window, holes, 1, multiply)
    if results <= _MOST_PRODUCTS and sides >= _LEAST_SIDE:
        return _by_place(form, multiply)
    if windows <= _MOST_PRODUCTS and sum_length >= _LEAST_FEATURES:
        return _by_window(form, multiply)
    return None


def _in_one(
    form: _Form,
    outer: Sequence[int],
    inner: Sequence[int],
    first: int,
    multiply: Multiply,
) -> Array:
    """Convolves by one matmul: each dimension of the input is cut into two axes.

    Args:
        form: The convolution.
        outer: The sizes of the first axis of each two.
        inner: Those of the second one.
        first: The first axis that meets the window: 2 if inner axes do, 1 if outer.
        multiply: A function of two operands and dimension numbers.
    """
    x = form.x
    ends = [n * k for n, k in zip(outer, inner, strict=True)]
    pairs = zip(ends, x.shape[1:-1], strict=True)
    short = [(0, max(0, end - n), 0) for end, n in pairs]
    if any(high for _, high, _ in short):
        x = lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), *short, (0, 0, 0)])
    x = x[(slice(None), *(slice(end) for end in ends))]
    cut = [n for pair in zip(outer, inner, strict=True) for n in pair]
    x = x.reshape(x.shape[0], *cut, x.shape[-1])
    met = (*range(first, x.ndim - 1, 2), x.ndim - 1)
    return multiply(x, form.w, ((met, tuple(range(len(met)))), ((), ())))


def _by_window(form: _Form, multiply: Multiply) -> Array:
    """Adds one matmul for each position of the window."""
    total: Any = 0
    for place in itertools.product(*map(range, form.window)):
        firsts = [i * d for i, d in zip(place, form.holes, strict=True)]
        x = _sliced(form.x, firsts, form.places, form.strides)
        total = total + _over_channels(multiply, x, form.w[place])
    return total


def _by_place(form: _Form, multiply: Multiply) -> Array:
    """Stacks one matmul for each position of the result."""
    window = form.window
    numbers = tuple(range(1, form.x.ndim)), tuple(range(form.w.ndim - 1))
    results = []
    for place in itertools.product(*map(range, form.places)):
        firsts = [i * s for i, s in zip(place, form.strides, strict=True)]
        x = _sliced(form.x, firsts, window, form.holes)
        results.append(multiply(x, form.w, (numbers, ((), ()))))
    y = jnp.stack(results, 1)
    return y.reshape(y.shape[0], *form.places, y.shape[-1])


def _sliced(
    x: Array, firsts: Sequence[int], counts: Sequence[int], steps: Sequence[int]
) -> Array:
    parts = [
        slice(first, first + (count - 1) * step + 1, step)
        for first, count, step in zip(firsts, counts, steps, strict=True)
    ]
    return x[(slice(None), *parts)]


def _over_channels(multiply: Multiply, x: Array, w: Array, inputs: int = 0) -> Array:
    """Multiplies over the channels, the last axis of `x`."""
    return multiply(x, w, (((x.ndim - 1,), (inputs,)), ((), ())))


# --- Replacing JAX's matmuls and convolutions -----------------------------------------

_BFLOAT16, _FLOAT32 = np.dtype("bfloat16"), np.dtype("float32")
_INT8, _INT32 = np.dtype("int8"), np.dtype("int32")


def in_cpu_form(equation: JaxprEqn, arrays: Sequence[AnyArray]) -> JaxprEqn:
    """Returns a matmul's equation, in the form for CPUs if it is of bfloat16."""
    twin = _TWINS.get(equation.primitive)
    is_taken = twin is not None and all(x.dtype == _BFLOAT16 for x in arrays)
    return equation.replace(primitive=twin) if is_taken else equation


def multiply_wide(
    left: AnyArray, right: AnyArray, dimension_numbers: DimensionNumbers
) -> Array:
    """Returns the matmul of two bfloat16 operands in float32, in the form for CPUs.

    That of two int8 operands in int32. Dimension numbers are as of
    `jax.lax.dot_general`. It must not be differentiated.
    """

    def product(left: AnyArray, right: AnyArray) -> Array:
        return lax.dot_general(
            left, right, dimension_numbers, preferred_element_type=_wide(left)
        )

    return _replayed(_TWINS[dot_general_p], dot_general_p, product, left, right)


def _dot_general(says_layout: bool, left: Array, right: Array, **params: Any) -> Array:
    if not _is_taken(left, right, params):
        return dot_general_p.bind(left, right, **params)
    dtype = params.pop("preferred_element_type") or _BFLOAT16
    wide = multiply_in_order(left, right, **params, says_layout=says_layout)
    return lax.convert_element_type(wide, dtype)


def _convolution(says_layout: bool, left: Array, right: Array, **params: Any) -> Array:
    wide = None
    # Newer versions of JAX have a parameter for the sharding of the result.
    if _is_taken(left, right, params) and params.get("out_sharding") is None:
        others = ("preferred_element_type", "out_sharding", "precision")
        rest = {name: value for name, value in params.items() if name not in others}
        multiply = functools.partial(
            multiply_in_order, precision=params["precision"], says_layout=says_layout
        )
        wide = convolve_to_float32(left, right, **rest, multiply=multiply)
    if wide is None:
        return conv_general_dilated_p.bind(left, right, **params)
    return lax.convert_element_type(wide, params["preferred_element_type"] or _BFLOAT16)


def _is_taken(left: Array, right: Array, params: dict[str, Any]) -> bool:
    """Returns whether a matmul is of bfloat16 or int8, without a requested algorithm.

    An emitted program may be rewritten in another dtype, as any program.
    """
    algorithms = lax.DotAlgorithm | lax.DotAlgorithmPreset
    kinds = {_BFLOAT16: (None, _BFLOAT16, _FLOAT32), _INT8: (_INT32,)}
    known = kinds.get(left.dtype, ()) if left.dtype == right.dtype else ()
    is_known = params["preferred_element_type"] in known
    return is_known and not isinstance(params["precision"], algorithms)


# --- Matmuls with a factor ------------------------------------------------------------
#
# $$y = \operatorname{half}(c \, \operatorname{f32}(a b))$$
#
# The factor of attention's scores, in front of the one rounding of the matmul. So is
# that of each derivative: the cotangent of $a$ is $\operatorname{half}(c
# \operatorname{f32}(\bar y b^T))$.


@functools.cache
def _with_factor(factor: float) -> Primitive:
    def multiply(
        product: Callable[..., Array], left: Array, right: Array, **params: Any
    ) -> Array:
        dtype = params["preferred_element_type"] or left.dtype
        is_half = dtype == left.dtype == right.dtype == _BFLOAT16
        if is_half and abs(math.frexp(factor)[0]) != 0.5:
            params["preferred_element_type"] = _FLOAT32
        result = product(left, right, **params)
        return (result * jnp.asarray(factor, result.dtype)).astype(dtype)

    def on_cpu(says_layout: bool, *operands: Array, **params: Any) -> Array:
        form = functools.partial(_dot_general, says_layout)
        return multiply(form, *operands, **params)

    return _twin(dot_general_p, on_cpu, functools.partial(multiply, dot_general_p.bind))


def with_factor(equation: JaxprEqn, factor: float) -> JaxprEqn:
    """Returns a matmul's equation, times a number before its result is rounded."""
    return equation.replace(primitive=_with_factor(factor))


# --- Primitives that differ from JAX's in their lowering ------------------------------


def _twin(
    original: Primitive,
    on_cpu: Callable[..., Array],
    elsewhere: Callable[..., Array] | None = None,
) -> Primitive:
    """Creates a primitive that differs from another one in its lowering.

    Args:
        original: The other one: bilinear, with one result.
        on_cpu: Computes the result on a CPU, given whether layouts can be constrained,
            and all operands and parameters.
        elsewhere: Computes it on other devices, given operands and parameters; by
            default the other primitive does.
    """
    is_for_cpus = original is dot_general_p and elsewhere is None
    twin = Primitive(original.name)
    twin.def_effectful_abstract_eval(original.abstract_eval)

    @twin.def_impl
    def _(*operands: Any, **params: Any) -> Any:
        with jax.disable_jit(False):
            return _compiled(twin, tuple(params.items()))(*operands)

    ad.defbilinear(
        twin,
        lambda g, x, y, **params: _transposed(twin, original, 0, g, y, x.aval, params),
        lambda g, x, y, **params: (
            _cotangent_of_right(twin, g, x, y.aval, params)
            if is_for_cpus
            else _transposed(twin, original, 1, g, x, y.aval, params)
        ),
    )

    def batched(axis: Any, operands: Any, axes: Any, **params: Any) -> Any:
        found = []

        def by_rule(*operands: Any) -> Any:
            rule = batching.fancy_primitive_batchers[original]
            result, result_axis = rule(axis, operands, axes, **params)
            found.append(result_axis)
            return result

        return _replayed(twin, original, by_rule, *operands), found[0]

    batching.fancy_primitive_batchers[twin] = batched
    lower = functools.partial(mlir.lower_fun, multiple_results=False)

    def lower_on_cpu(context: Any, *operands: Any, **params: Any) -> Any:
        form = functools.partial(on_cpu, layouts_are_said(context))
        return lower(form)(context, *operands, **params)

    mlir.register_lowering(twin, lower(elsewhere or original.bind))
    mlir.register_lowering(twin, lower_on_cpu, platform="cpu")
    answer_policies_for(twin, original)
    return twin


@functools.lru_cache(maxsize=1024)
def _compiled(twin: Primitive, params: tuple[tuple[str, Any], ...]) -> Any:
    return jax.jit(functools.partial(twin.bind, **dict(params)))


def _transposed(
    twin: Primitive,
    original: Primitive,
    position: int,
    g: Array,
    other: Array,
    aval: Any,
    params: dict[str, Any],
) -> Array:
    """Returns an operand's cotangent, from the result's and the other operand."""

    def by_rule(g: Array, other: Array) -> Array:
        def product(x: Array) -> Array:
            operands = (x, other) if position == 0 else (other, x)
            return original.bind(*operands, **params)

        return jax.linear_transpose(product, aval)(g)[0]

    return _replayed(twin, original, by_rule, g, other)


def _replayed(
    twin: Primitive, original: Primitive, rule: Callable[..., Array], *operands: Array
) -> Array:
    """Evaluates a rule, replacing each of JAX's primitives in it by its twin."""

    def bind(equation: JaxprEqn, operands: list[Any]) -> list[Any]:
        if equation.primitive is original:
            equation = equation.replace(primitive=twin)
        return bind_equation(equation, *operands)

    closed = jax.make_jaxpr(rule)(*operands)
    return run_by(bind, closed, operands)(closed.jaxpr.outvars[0])


def _cotangent_of_right(
    twin: Primitive, g: Array, left: Array, right: Any, params: dict[str, Any]
) -> Array:
    """Returns the cotangent of the right operand, as `left` by `g`.

    JAX multiplies `g` by the left operand and transposes the result. For a weight that
    would be a separate pass, because a rounding is between it and the matmul.
    """
    (lc, rc), (lb, rb) = params["dimension_numbers"]
    kept = [i for i in range(left.ndim) if i not in (*lc, *lb)]
    of_g = range(len(lb), len(lb) + len(kept))
    # The result has batch axes, contracted axes in the order of `left`, and kept axes.
    contracted = [rc[i] for i in np.argsort(lc)]
    rest = [i for i in range(right.ndim) if i not in (*rc, *rb)]
    order = [*rb, *contracted, *rest]

    def product(left: Array, g: Array) -> Array:
        return lax.dot_general(
            left,
            g,
            ((kept, of_g), (lb, range(len(lb)))),
            precision=params["precision"],
            preferred_element_type=right.dtype,
            out_sharding=permuted_sharding(right, order),
        )

    found = _replayed(twin, dot_general_p, product, left, g)
    return lax.transpose(found, tuple(np.argsort(order)))


_TWINS = {
    dot_general_p: _twin(dot_general_p, _dot_general),
    conv_general_dilated_p: _twin(conv_general_dilated_p, _convolution),
}
