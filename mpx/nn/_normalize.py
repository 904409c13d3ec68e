r"""Layer norm and RMS norm.

With $\mu$ and $r = 1 / \sqrt{v + \epsilon}$ of each row, $\hat x = (x - \mu)\, r$ and
$y = w \hat x + b$, the tangent of layer norm is

$$\dot y = w\, r
\big(\dot x - \overline{\dot x} - \hat x\, \overline{\hat x \dot x}\big)
+ \dot w \hat x + \dot b,$$

where the bar is the mean of a row; RMS norm has $\mu = 0$ and no $\overline{\dot x}$.
Kept are the half-precision $x$, the weight, and $\mu$ and $r$ in float32: two numbers
for each row. Gradients of weight and bias are summed in float32.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from .._errors import describe
from .._typing import AnyArray
from ._linear_part import active, from_residuals, widen

_Optional = Float[Array, "..."] | None


def layer_norm(
    x: Float[Array, "..."],
    weight: _Optional = None,
    bias: _Optional = None,
    *,
    axis: int | tuple[int, ...] = -1,
    epsilon: float = 1e-5,
) -> Float[Array, "..."]:
    r"""Layer normalization, computed in float32.

    $$y = w\, \frac{x - \mu}{\sqrt{v + \epsilon}} + b$$

    with the mean $\mu$ and the variance $v$ (in two passes) of each row.

    Args:
        x: What is normalized.
        weight: $w$, of any floating dtype, in the shape of the normalized axes (or any
            that broadcasts to `x` from the right); None for 1.
        bias: $b$, likewise; None for 0.
        axis: The axis or axes that make a row.
        epsilon: $\epsilon$, added to the variance.

    Returns:
        $y$ in the shape and the dtype of `x`, whatever the dtype of weight and bias.

    Raises:
        ValueError: Weight or bias does not broadcast to the shape of `x`.

    Kept for the backward pass: the half-precision `x` and the weight, and two float32
    for each row. Gradients of weight and bias are summed in float32.

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
    r"""Root mean square normalization, computed in float32.

    $$y = w\, \frac{x}{\sqrt{\tfrac1n \sum_i x_i^2 + \epsilon}} + b$$

    Args:
        x: What is normalized.
        weight: $w$, of any floating dtype, in the shape of the normalized axes (or any
            that broadcasts to `x` from the right); None for 1.
        bias: $b$, likewise; None for 0.
        axis: The axis or axes that make a row.
        epsilon: $\epsilon$, added to the mean square.

    Returns:
        $y$ in the shape and the dtype of `x`, whatever the dtype of weight and bias.

    Raises:
        ValueError: Weight or bias does not broadcast to the shape of `x`.

    Kept for the backward pass: the half-precision `x` and the weight, and one float32
    for each row. Gradients of weight and bias are summed in float32.

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
                f"the shape of `x`, {x.shape}; got {describe(parameter)}. Give it the "
                "shape of the axes that are normalized."
            )


def _like(parameter: Array, x: Array) -> Array:
    """A parameter in the dtype that is computed in, with the rank of x."""
    missing = x.ndim - parameter.ndim
    return parameter.astype(x.dtype).reshape((1,) * missing + parameter.shape)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2))
def _normalize(
    axis: int | tuple[int, ...],
    epsilon: float,
    is_centered: bool,
    x: Array,
    weight: AnyArray | None,
    bias: AnyArray | None,
) -> Array:
    return _evaluate(axis, epsilon, is_centered, x, weight, bias)[0]


def _evaluate(
    axis: int | tuple[int, ...],
    epsilon: float,
    is_centered: bool,
    x: Array,
    weight: AnyArray | None,
    bias: AnyArray | None,
) -> tuple[Array, Array | None, Array]:
    """The result, and mean and inverse deviation of each row."""
    wide = widen(x)
    mu = jnp.mean(wide, axis, keepdims=True) if is_centered else None
    if mu is None:
        scatter = jnp.mean(wide * wide, axis, keepdims=True)
    else:
        scatter = jnp.var(wide, axis, keepdims=True)
    r = jax.lax.rsqrt(scatter + epsilon)
    y = (wide if mu is None else wide - mu) * r
    y = y if weight is None else y * _like(weight, wide)
    y = y if bias is None else y + _like(bias, wide)
    return y.astype(x.dtype), mu, r


def _normalize_rule(
    axis: int | tuple[int, ...],
    epsilon: float,
    is_centered: bool,
    primals: PyTree,
    tangents: PyTree,
) -> PyTree:
    x, weight, bias = primals
    y, mu, r = _evaluate(axis, epsilon, is_centered, x, weight, bias)

    def linear_part(residuals: PyTree, dots: PyTree) -> Array:
        x, weight, mu, r = residuals
        x_dot, weight_dot, bias_dot = dots
        wide = widen(x)
        unit = (wide if mu is None else wide - mu) * r
        change = jnp.zeros_like(unit)
        if x_dot is not None:
            dot = widen(x_dot)
            part = dot - unit * jnp.mean(unit * dot, axis, keepdims=True)
            if mu is not None:
                part = part - jnp.mean(dot, axis, keepdims=True)
            part = part * r
            change = part if weight is None else part * _like(weight, wide)
        if weight_dot is not None:
            change = change + unit * _like(weight_dot, wide)
        if bias_dot is not None:
            change = change + _like(bias_dot, wide)
        return change.astype(x.dtype)

    dots = tuple(map(active, tangents))
    return y, from_residuals(linear_part, (x, weight, mu, r), dots)


_normalize.defjvp(_normalize_rule, symbolic_zeros=True)
