"""Layer norm and RMS norm.

Kept for the backward pass are the half-precision x, the weight, and mean and variance
of each row in float32. Gradients of weight and bias are summed in float32.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from .._errors import describe
from .._typing import AnyArray
from ._recomputed import Keep, recomputed, widen

_Optional = Float[Array, "..."] | None


def layer_norm(
    x: Float[Array, "..."],
    weight: _Optional = None,
    bias: _Optional = None,
    *,
    axis: int | tuple[int, ...] = -1,
    epsilon: float = 1e-5,
) -> Float[Array, "..."]:
    r"""Applies layer normalization, computed in float32.

    $$y = w\, \frac{x - \mu}{\sqrt{v + \epsilon}} + b$$

    with the mean $\mu$ and the variance $v$ (in two passes) of each row.

    Args:
        x: The array to normalize.
        weight: $w$, of any floating dtype, in the shape of the normalized axes (or any
            that broadcasts to `x` from the right); None for 1.
        bias: $b$, likewise; None for 0.
        axis: The axis or axes that make a row.
        epsilon: $\epsilon$, added to the variance.

    Returns:
        $y$ in the shape and the dtype of `x`, whatever the dtype of weight and bias.

    Raises:
        ValueError: Weight or bias does not broadcast to the shape of `x`.

    Saved for backward: the half-precision `x` and the weight, and two float32 for each
    row. Gradients of weight and bias are summed in float32.

    At the edges: a row of equal numbers gives the bias, and the gradient of `x` is
    finite there; a row with `inf` or NaN is NaN.

    Reference: Ba, Kiros, Hinton, Layer Normalization, 2016, equation 4.

    Examples:
        >>> import jax.numpy as jnp, mpx.nn
        >>> mpx.nn.layer_norm(jnp.array([5e4, 6e4], jnp.float16))
        Array([-1.,  1.], dtype=float16)
    """
    x = jnp.asarray(x)
    _check_parameters("layer_norm", x, weight=weight, bias=bias)
    return _normalize(axis, float(epsilon), True, x, weight, bias)


def rms_norm(
    x: Float[Array, "..."],
    weight: _Optional = None,
    bias: _Optional = None,
    *,
    axis: int | tuple[int, ...] = -1,
    epsilon: float = 1e-5,
) -> Float[Array, "..."]:
    r"""Applies root mean square normalization, computed in float32.

    $$y = w\, \frac{x}{\sqrt{\tfrac1n \sum_i x_i^2 + \epsilon}} + b$$

    Args:
        x: The array to normalize.
        weight: $w$, of any floating dtype, in the shape of the normalized axes (or any
            that broadcasts to `x` from the right); None for 1.
        bias: $b$, likewise; None for 0.
        axis: The axis or axes that make a row.
        epsilon: $\epsilon$, added to the mean square.

    Returns:
        $y$ in the shape and the dtype of `x`, whatever the dtype of weight and bias.

    Raises:
        ValueError: Weight or bias does not broadcast to the shape of `x`.

    Saved for backward: the half-precision `x` and the weight, and one float32 for each
    row. Gradients of weight and bias are summed in float32.

    At the edges: a row of zeros gives the bias; a row with `inf` or NaN has NaN.

    Reference: Zhang, Sennrich, Root Mean Square Layer Normalization, 2019, equation 4.

    Examples:
        >>> import jax.numpy as jnp, mpx.nn
        >>> mpx.nn.rms_norm(jnp.array([6e4, -6e4], jnp.float16))
        Array([ 1., -1.], dtype=float16)
    """
    x = jnp.asarray(x)
    _check_parameters("rms_norm", x, weight=weight, bias=bias)
    return _normalize(axis, float(epsilon), False, x, weight, bias)


def _check_parameters(function: str, x: Array, **parameters: AnyArray | None) -> None:
    for name, parameter in parameters.items():
        shape = () if parameter is None else jnp.shape(parameter)
        tail = x.shape[x.ndim - len(shape) :] if len(shape) <= x.ndim else None
        pairs = zip(shape, tail or (), strict=False)
        if tail is None or any(n not in (1, m) for n, m in pairs):
            raise ValueError(
                f"`{name}` of `mpx.nn.{function}(x, weight, bias)` must broadcast to "
                f"the shape of `x`, {x.shape}; got {describe(parameter)}. Use the "
                "shape of the normalized axes."
            )


def _like(parameter: Array, x: Array) -> Array:
    """A parameter in the dtype that is computed in, with the rank of x."""
    missing = x.ndim - parameter.ndim
    return parameter.astype(x.dtype).reshape((1,) * missing + parameter.shape)


def _normalize(
    axis: int | tuple[int, ...],
    epsilon: float,
    is_centered: bool,
    x: Array,
    weight: AnyArray | None,
    bias: AnyArray | None,
) -> Array:
    def evaluate(
        keep: Keep, x: Array, weight: AnyArray | None, bias: AnyArray | None
    ) -> Array:
        centered = wide = widen(x)
        if is_centered:
            centered = wide - keep(jnp.mean(wide, axis, keepdims=True))
        scatter = keep(jnp.mean(jnp.square(centered), axis, keepdims=True))
        y = centered * jax.lax.rsqrt(scatter + epsilon)
        y = y if weight is None else y * _like(weight, wide)
        y = y if bias is None else y + _like(bias, wide)
        return y.astype(x.dtype)

    return recomputed(evaluate, x, weight, bias)
