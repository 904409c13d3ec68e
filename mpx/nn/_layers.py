"""Linear layers and norms as Equinox modules.

Unlike Equinox's own they take any number of leading axes, and their result has the
dtype of the input, whatever that of the weights: float32 weights are cast to the
input's dtype where they are used. So the same layer trains in float32, with half
weights (`mpx.filter_grad` casts them), and with float32 weights and half inputs.
"""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from .._ambient import with_ambient_recipe
from .._dtypes import float_dtype
from .._errors import describe
from .._typing import DTypeLike
from ._elementwise import add_bias
from ._normalize import layer_norm, rms_norm


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
    """Raises unless a rate of dropout lies in [0, 1)."""
    if not 0 <= rate < 1:
        raise ValueError(
            f"`{name}` of `mpx.nn.{layer}` must be at least 0 and below 1; got "
            f"{rate}. 0 disables dropout."
        )


def check_key(layer: str, rate: float, key: PRNGKeyArray | None) -> None:
    """Raises where something is to be dropped, and no key says what."""
    if rate and key is None:
        raise ValueError(
            f"`mpx.nn.{layer}` needs a `key` for dropout at a call; got None. Pass "
            "one, or `inference=True`."
        )


def broadcasts(shape: tuple[int, ...], full: tuple[int, ...]) -> bool:
    """Whether each axis of a shape is that of another one, or 1."""
    pairs = zip(shape, full, strict=False)
    return len(shape) == len(full) and all(n in (1, m) for n, m in pairs)


def check_last_axis(layer: str, x: Array, size: int) -> None:
    """Raises unless the last axis of an input has the size that a layer is for."""
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
