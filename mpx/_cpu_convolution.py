"""Convolutions of bfloat16 as products, where a CPU computes these faster.

XLA's CPU compiler has no units for convolutions, but for products. A convolution is a
sum of products, one for each place of its window:

    y[b, o, n] = sum over k, c of x[b, o * stride + k * dilation, c] * w[k, c, n]

or one product for each place of its result, which are few in the gradient of a weight;
or a single one, where windows touch and do not overlap. Which forms win was measured:
benchmarks/NOTES.md, "Convolutions on a CPU".
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from ._cpu_form import DimensionNumbers

Multiply = Callable[[Array, Array, DimensionNumbers], Array]

# The most products that a convolution becomes, and how many numbers they must sum.
_MOST_PRODUCTS = 9
_LEAST_FEATURES = 128  # of a window that overlaps the next
_LEAST_SIDE = 64  # of a weight's gradient
_LEAST_SUM = 16


class _Form(NamedTuple):
    """A convolution whose axes are in order.

    Attributes:
        x: The input, `[batch, *places, channels]`, padded.
        w: The window, `[*places, channels, features]`.
        strides: Of the window, for each dimension.
        holes: In the window: its dilation.
        places: How many the result has, for each dimension.
    """

    x: Array
    w: Array
    strides: tuple[int, ...]
    holes: tuple[int, ...]
    places: tuple[int, ...]

    @property
    def window(self) -> tuple[int, ...]:
        """How many places the window has, for each dimension."""
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
    """A convolution of bfloat16 as products with float32 results.

    Args:
        x: The input.
        w: The window.
        window_strides: The others are as of `jax.lax.conv_general_dilated`.
        padding: Of the input, what is given.
        lhs_dilation: Holes in the input.
        rhs_dilation: Holes in the window.
        dimension_numbers: Which axis is which.
        feature_group_count: Groups.
        batch_group_count: Groups of the batch.
        multiply: What multiplies, given two operands and dimension numbers.

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
    # A size may be a symbol, in a program that is exported.
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
    """A convolution whose input has holes, each place multiplied before it is moved.

    It is the gradient of an input, of windows of one place, or of windows that touch:
    there are as many holes as places of the window, so each place of the result is the
    product of one place of the input and one of the window.
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
    # With no padding at all the first place sees the last of the window.
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
        return _of_patches(form, multiply) if is_long else None
    if form.places == form.holes and set(strides) == {1}:
        return _of_places_apart(form, multiply)
    if results <= _MOST_PRODUCTS and sides >= _LEAST_SIDE:
        return _by_place(form, multiply)
    if windows <= _MOST_PRODUCTS and sum_length >= _LEAST_FEATURES:
        return _by_window(form, multiply)
    return None


def _of_patches(form: _Form, multiply: Multiply) -> Array:
    """Windows that touch: their places are an axis each."""
    x, count = form.x, len(form.window)
    ends = [n * k for n, k in zip(form.places, form.window, strict=True)]
    x = x[(slice(None), *(slice(end) for end in ends))]
    pairs = [n for pair in zip(form.places, form.window, strict=True) for n in pair]
    x = x.reshape(x.shape[0], *pairs, x.shape[-1])
    inside = [2 + 2 * i for i in range(count)]
    numbers = (*inside, x.ndim - 1), tuple(range(count + 1))
    return multiply(x, form.w, (numbers, ((), ())))


def _of_places_apart(form: _Form, multiply: Multiply) -> Array:
    """The gradient of the weight of such windows: holes as wide as the result."""
    x, count = form.x, len(form.window)
    ends = [n * k for n, k in zip(form.holes, form.window, strict=True)]
    short = [
        (0, max(0, end - n), 0) for end, n in zip(ends, x.shape[1:-1], strict=True)
    ]
    x = lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), *short, (0, 0, 0)])
    x = x[(slice(None), *(slice(end) for end in ends))]
    pairs = [n for pair in zip(form.window, form.holes, strict=True) for n in pair]
    x = x.reshape(x.shape[0], *pairs, x.shape[-1])
    outside = [1 + 2 * i for i in range(count)]
    numbers = (*outside, x.ndim - 1), tuple(range(count + 1))
    return multiply(x, form.w, (numbers, ((), ())))


def _by_window(form: _Form, multiply: Multiply) -> Array:
    """One product for each place of the window."""
    total: Any = 0
    for place in itertools.product(*map(range, form.window)):
        firsts = [i * d for i, d in zip(place, form.holes, strict=True)]
        x = _sliced(form.x, firsts, form.places, form.strides)
        total = total + _over_channels(multiply, x, form.w[place])
    return total


def _by_place(form: _Form, multiply: Multiply) -> Array:
    """One product for each place of the result."""
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
    """A product over the channels, which are the last axis of `x`."""
    return multiply(x, w, (((x.ndim - 1,), (inputs,)), ((), ())))
