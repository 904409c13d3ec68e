"""`quantize` and `quantize_dequantize`: apply a quantizer to an array.

They differ in their derivatives. 8-bit values have no useful tangents (JAX would store
tangents in 8 bits too, without a scale), so differentiating `quantize` raises.
`quantize_dequantize` is *straight-through*: its derivative is that of the identity.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, PyTree

from ..._base.errors import describe
from ..._base.tree import Guard
from .._formats._blocks import LARGEST_SCALE, Axes, resolve_axes
from .._formats._rounding import SMALLEST_FLOAT32, flushed
from ._array import QuantizedArray
from ._kinds import Asked, Quantizer

_WIDE = ("float16", "bfloat16", "float32", "float64")


def quantize(
    x: Array | np.ndarray,
    quantizer: Quantizer,
    *,
    axis: int | Sequence[int] = -1,
    key: Array | None = None,
    scale: Array | float | None = None,
) -> QuantizedArray:
    r"""Quantizes an array to low-precision numbers and their scales.

    The quantizer's docstring has the equations. Finite numbers are scaled in float32,
    rounded to nearest, ties to even, and saturate. An infinity or a NaN becomes NaN,
    with its block if it has one. Numbers subnormal in float32 count as zero, on every
    device. Eager and jitted calls return the same bits.

    Args:
        x: An array of float16, bfloat16, float32 or float64 (rounded to float32 first).
        quantizer: A `mpx.quantization.Quantizer`, such as
            `mpx.quantization.TensorQuantizer()`.
        axis: The axis that blocks are along: the one that the matmul will contract. For
            square blocks a pair, or one axis, which means itself and the last of the
            others. Ignored with one scale for the whole array.
        key: A PRNG key; required for stochastic rounding, unused otherwise.
        scale: The float32 scale of a quantizer without blocks, one number between
            $2^{-126}$ and $2^{126}$; by default it is computed from `x`.

    Returns:
        The `QuantizedArray`, whose `dequantize()` has the shape and dtype of `x`.

    Raises:
        TypeError: `x` is not a floating array of 16 bits or more, or an argument is of
            the wrong kind; or the result is differentiated.
            `mpx.quantization.quantize_dequantize` has a derivative;
            `jax.lax.stop_gradient(x)` removes it.
        ValueError: An axis is not divisible into blocks; a key is missing; or a scale
            is passed to a quantizer of blocks, or is invalid and not traced.

    Examples:
        >>> import jax.numpy as jnp, mpx
        >>> x = jnp.arange(256.0).reshape(4, 64)
        >>> q = mpx.quantization.quantize(x, mpx.quantization.MXFP8Quantizer())
        >>> q.shape, q.payload.dtype, q.nbytes
        ((4, 64), dtype(float8_e4m3fn), 264)
    """
    call = "`mpx.quantization.quantize(x, quantizer, ...)`"
    x, axes, scale = _checked(x, quantizer, axis, key, scale, call)
    quantized = _apply(quantizer, axes, _refuse_derivative(x), scale, key)
    return dataclasses.replace(quantized, guard=Guard(jnp.ones((), bool)))


def quantize_dequantize(
    x: Array | np.ndarray,
    quantizer: Quantizer,
    *,
    axis: int | Sequence[int] = -1,
    key: Array | None = None,
    scale: Array | float | None = None,
) -> Array:
    r"""Quantizes and dequantizes an array, with a straight-through derivative.

    $$y = \mathrm{dequantize}(\mathrm{quantize}(x)), \qquad
    \frac{\partial y}{\partial x} := I, \qquad
    \frac{\partial y}{\partial\,\mathrm{scale}} := 0$$

    Forward and reverse mode work in any order: the second derivative is zero. Saturated
    numbers pass their gradient, too.

    Args:
        x: As in `mpx.quantization.quantize`, like all arguments.
        quantizer: The quantizer.
        axis: The axis that blocks are along.
        key: A PRNG key for stochastic rounding.
        scale: A scale to use instead of the computed one.

    Returns:
        An array in the shape and dtype of `x`.

    Raises:
        TypeError: As `mpx.quantization.quantize`.
        ValueError: As `mpx.quantization.quantize`.

    Examples:
        >>> import jax, jax.numpy as jnp, mpx
        >>> from mpx.quantization import TensorQuantizer, quantize_dequantize
        >>> x = jnp.array([1.0, 0.3, 0.0])
        >>> quantize_dequantize(x, TensorQuantizer()).round(3).tolist()
        [1.0, 0.286..., 0.0]
        >>> f = lambda x: quantize_dequantize(x, TensorQuantizer()).sum()
        >>> jax.grad(f)(x).tolist()
        [1.0, 1.0, 1.0]
    """
    call = "`mpx.quantization.quantize_dequantize(x, quantizer, ...)`"
    x, axes, scale = _checked(x, quantizer, axis, key, scale, call)
    return _straight_through(quantizer, axes, x, scale, key)


def _checked(
    x: Any, quantizer: object, axis: Any, key: object, scale: object, call: str
) -> tuple[Array, Axes, Array | None]:
    if isinstance(x, QuantizedArray):
        raise TypeError(
            f"{call} needs an array; got a `QuantizedArray`. It is already "
            "quantized; `x.dequantize()` returns the array."
        )
    if not isinstance(quantizer, Quantizer):
        raise TypeError(
            f"{call} needs a quantizer such as `mpx.quantization.TensorQuantizer()`; "
            f"got {quantizer!r}. From a recipe, use `recipe.quantizer(role)`."
        )
    dtype = getattr(x, "dtype", None)
    if dtype is None or dtype.name not in _WIDE:
        raise TypeError(
            f"{call} needs an array of {', '.join(_WIDE)}; got {describe(x)}. Cast it "
            "first."
        )
    if quantizer.stochastic_rounding and key is None:
        raise ValueError(
            f"{call} needs a `key` for stochastic rounding, a new one for each call; "
            "got None. Pass `key=jax.random.key(...)`."
        )
    scale = None if scale is None else _scalar(scale, quantizer, call)
    x, axes = jnp.asarray(x), ()
    if quantizer.block_dimensions:
        block, dimensions = quantizer._multiple, quantizer.block_dimensions
        axes = resolve_axes(x.shape, axis, block, dimensions, call)
    return x, axes, scale


def _scalar(scale: Any, quantizer: Quantizer, call: str) -> Array:
    if quantizer.block_dimensions:
        raise ValueError(
            f"`scale` of {call} is only for a quantizer without blocks; got one for "
            f"{quantizer!r}. Omit it: each block computes its own."
        )
    if jnp.shape(scale):
        raise ValueError(
            f"`scale` of {call} must be a scalar; got {describe(scale)}. Use "
            "`jax.vmap` for one scale per row."
        )
    if not isinstance(scale, Tracer):
        with np.errstate(over="ignore"):
            value = np.float32(scale)
        if not SMALLEST_FLOAT32 <= value <= LARGEST_SCALE:
            raise ValueError(
                f"`scale` of {call} must be positive and finite, between 2^-126 and "
                f"2^126; got {scale}. Omit it to compute it from `x`."
            )
    return jnp.asarray(scale, jnp.float32)


def _apply(
    quantizer: Quantizer,
    axes: Axes,
    x: Array,
    scale: Array | None,
    key: Array | None,
) -> QuantizedArray:
    key = key if quantizer.stochastic_rounding else None
    numbers = flushed(x.astype(jnp.float32))
    return quantizer._quantize(numbers, Asked(x.dtype, axes, key, scale))


def _round_trip(quantizer: Quantizer, axes: Axes, *given: Any) -> Array:
    return _apply(quantizer, axes, *given).dequantize()


_straight_through = jax.custom_jvp(_round_trip, nondiff_argnums=(0, 1))


@_straight_through.defjvp
def _straight_through_rule(
    quantizer: Quantizer, axes: Axes, primals: PyTree, tangents: PyTree
) -> tuple[Array, Array]:
    return _straight_through(quantizer, axes, *primals), tangents[0]


@jax.custom_jvp
def _refuse_derivative(x: Array) -> Array:
    return x


@_refuse_derivative.defjvp
def _refuse_derivative_rule(primals: PyTree, tangents: PyTree) -> PyTree:
    raise TypeError(
        "`mpx.quantization.quantize` has no derivative: numbers of 8 bits have no "
        "useful tangents. Use `mpx.quantization.quantize_dequantize`, whose derivative "
        "is the identity's, or quantize `jax.lax.stop_gradient(x)`."
    )
