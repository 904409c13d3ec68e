"""Linear layers and norms, as functions and as Equinox modules.

Unlike Equinox's own they accept any number of leading axes, and their result has the
input's dtype, whatever that of the weights: float32 weights are cast to the input's
dtype where they are used. So the same layer trains in float32, with half weights
(`mpx.filter_grad` casts them), and with float32 weights and half inputs.
"""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from .._autocast import with_ambient_recipe
from .._base.dtypes import float_dtype
from .._base.errors import describe
from .._base.typing import AnyArray, DTypeLike
from ._recomputed import Keep, add_bias, recomputed, widen

# --- Layer norm and RMS norm ----------------------------------------------------------
#
# Saved for backward: the half-precision x, the weight, and mean and variance of each
# row in float32. Gradients of weight and bias are summed in float32.

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
    """Returns a parameter in the compute dtype `x.dtype`, with the rank of x."""
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


# --- Modules --------------------------------------------------------------------------


class Linear(eqx.Module):
    r"""A linear layer.

    $$y = x\, W^\top + b$$

    The matmul is in the input's dtype, which hardware accumulates in float32; weights
    of another dtype are cast to it. The gradient of $b$ is summed in float32. Saved for
    backward: $x$ and $W$ in the dtype of $x$.

    Attributes:
        weight: $W$, of shape (out_features, in_features), initially uniform between
            $\pm 1/\sqrt{\text{in}}$.
        bias: $b$, of shape (out_features,), initially the same; or None.

    Args:
        in_features: The size of the last axis of the input.
        out_features: The size of the last axis of the result.
        use_bias: Whether there is a bias.
        dtype: The dtype of the parameters.
        key: A PRNG key for the parameters.

    Raises:
        ValueError: A size is not positive; at a call: the input does not match.

    Examples:
        >>> import jax, jax.numpy as jnp, mpx.nn
        >>> linear = mpx.nn.Linear(4, 3, key=jax.random.key(0))
        >>> linear(jnp.ones((2, 5, 4), jnp.bfloat16)).dtype
        dtype(bfloat16)
    """

    weight: Float[Array, "out_features in_features"]
    bias: Float[Array, " out_features"] | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        use_bias: bool = True,
        dtype: DTypeLike = "float32",
        key: PRNGKeyArray,
    ) -> None:
        """Draws the parameters."""
        for name, size in (
            ("in_features", in_features),
            ("out_features", out_features),
        ):
            check_size("Linear", name, size)
        parameters = float_dtype(dtype, "`mpx.nn.Linear(dtype=...)`")
        bound = 1 / math.sqrt(in_features)
        draw = jax.random.uniform
        shape, (weight_key, bias_key) = (out_features,), jax.random.split(key)
        self.weight = draw(weight_key, (*shape, in_features), parameters, -bound, bound)
        self.bias = (
            draw(bias_key, shape, parameters, -bound, bound) if use_bias else None
        )

    @with_ambient_recipe
    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """Applies the layer to the last axis: `... in_features -> ... out_features`."""
        check_last_axis("Linear", x, self.weight.shape[1])
        y = x @ self.weight.astype(x.dtype).T
        return y if self.bias is None else add_bias(y, self.bias)


class LayerNorm(eqx.Module):
    """Layer normalization; see `mpx.nn.layer_norm`.

    Attributes:
        weight: Initially 1, or None.
        bias: Initially 0, or None.
        epsilon: Is added to the variance.

    Args:
        shape: The size of the last axis, or the sizes of the last axes, which make a
            row.
        epsilon: Is added to the variance.
        use_weight: Whether there is a weight.
        use_bias: Whether there is a bias.
        dtype: The dtype of the parameters.

    Raises:
        ValueError: A size is not positive; at a call: the input does not match.

    Examples:
        >>> import jax.numpy as jnp, mpx.nn
        >>> mpx.nn.LayerNorm(2)(jnp.array([[5e4, 6e4]], jnp.float16))
        Array([[-1.,  1.]], dtype=float16)
    """

    weight: Float[Array, "..."] | None
    bias: Float[Array, "..."] | None
    shape: tuple[int, ...] = eqx.field(static=True)
    epsilon: float = eqx.field(static=True)

    def __init__(
        self,
        shape: int | tuple[int, ...],
        *,
        epsilon: float = 1e-5,
        use_weight: bool = True,
        use_bias: bool = True,
        dtype: DTypeLike = "float32",
    ) -> None:
        """Makes the parameters."""
        self.shape = _shape("LayerNorm", shape)
        self.epsilon = epsilon
        parameters = float_dtype(dtype, "`mpx.nn.LayerNorm(dtype=...)`")
        self.weight = jnp.ones(self.shape, parameters) if use_weight else None
        self.bias = jnp.zeros(self.shape, parameters) if use_bias else None

    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """Normalizes the last axes; shape and dtype stay."""
        axes = _last_axes("LayerNorm", x, self.shape)
        return layer_norm(x, self.weight, self.bias, axis=axes, epsilon=self.epsilon)


class RMSNorm(eqx.Module):
    """Root mean square normalization; see `mpx.nn.rms_norm`.

    Attributes:
        weight: Initially 1, or None.
        bias: Initially 0, or None.
        epsilon: Is added to the mean square.

    Args:
        shape: The size of the last axis, or the sizes of the last axes, which make a
            row.
        epsilon: Is added to the mean square.
        use_weight: Whether there is a weight.
        use_bias: Whether there is a bias.
        dtype: The dtype of the parameters.

    Raises:
        ValueError: A size is not positive; at a call: the input does not match.

    Examples:
        >>> import jax.numpy as jnp, mpx.nn
        >>> mpx.nn.RMSNorm(2)(jnp.array([[6e4, -6e4]], jnp.float16))
        Array([[ 1., -1.]], dtype=float16)
    """

    weight: Float[Array, "..."] | None
    bias: Float[Array, "..."] | None
    shape: tuple[int, ...] = eqx.field(static=True)
    epsilon: float = eqx.field(static=True)

    def __init__(
        self,
        shape: int | tuple[int, ...],
        *,
        epsilon: float = 1e-5,
        use_weight: bool = True,
        use_bias: bool = False,
        dtype: DTypeLike = "float32",
    ) -> None:
        """Makes the parameters."""
        self.shape = _shape("RMSNorm", shape)
        self.epsilon = epsilon
        parameters = float_dtype(dtype, "`mpx.nn.RMSNorm(dtype=...)`")
        self.weight = jnp.ones(self.shape, parameters) if use_weight else None
        self.bias = jnp.zeros(self.shape, parameters) if use_bias else None

    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """Normalizes the last axes; shape and dtype stay."""
        axes = _last_axes("RMSNorm", x, self.shape)
        return rms_norm(x, self.weight, self.bias, axis=axes, epsilon=self.epsilon)


def check_size(layer: str, name: str, size: int) -> None:
    """Raises unless a size is positive."""
    if size < 1:
        raise ValueError(
            f"`{name}` of `mpx.nn.{layer}` must be a positive integer; got {size}. "
            "It is the size of an axis."
        )


def check_rate(layer: str, name: str, rate: float) -> None:
    """Raises unless a dropout rate is in [0, 1)."""
    if not 0 <= rate < 1:
        raise ValueError(
            f"`{name}` of `mpx.nn.{layer}` must be at least 0 and below 1; got "
            f"{rate}. 0 disables dropout."
        )


def check_key(layer: str, rate: float, key: PRNGKeyArray | None) -> None:
    """Raises if dropout needs a key and `key` is None."""
    if rate and key is None:
        raise ValueError(
            f"`mpx.nn.{layer}` needs a `key` for dropout at a call; got None. Pass "
            "one, or `inference=True`."
        )


def broadcasts(shape: tuple[int, ...], full: tuple[int, ...]) -> bool:
    """Returns whether each axis of a shape equals that of `full`, or is 1."""
    pairs = zip(shape, full, strict=False)
    return len(shape) == len(full) and all(n in (1, m) for n, m in pairs)


def check_last_axis(layer: str, x: Array, size: int) -> None:
    """Raises unless the last axis of an input has the size of the layer."""
    if x.ndim == 0 or x.shape[-1] != size:
        raise ValueError(
            f"`x` of `mpx.nn.{layer}` must have a last axis of size {size}; got "
            f"{describe(x)}. Make the layer for the size of your input, or move "
            "the axis to the end."
        )


def _shape(layer: str, shape: int | tuple[int, ...]) -> tuple[int, ...]:
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    for size in shape:
        check_size(layer, "shape", size)
    return shape


def _last_axes(layer: str, x: Array, shape: tuple[int, ...]) -> tuple[int, ...]:
    first = x.ndim - len(shape)
    if first < 0 or x.shape[first:] != shape:
        raise ValueError(
            f"`x` of `mpx.nn.{layer}` must have last axes of shape {shape}; got "
            f"{describe(x)}. Make the layer for the shape of your input."
        )
    return tuple(range(-len(shape), 0))
