"""Rotary positions."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from ._recomputed import linear, widen


def rotate(
    x: Float[Array, "batch seq heads size"], base: float
) -> Float[Array, "batch seq heads size"]:
    r"""Rotary positions: turns pairs of channels by angles that grow with the position.

    $$\begin{pmatrix} y_i \\ y_{i + d/2} \end{pmatrix} =
    \begin{pmatrix} \cos t\theta_i & -\sin t\theta_i \\
    \sin t\theta_i & \cos t\theta_i \end{pmatrix}
    \begin{pmatrix} x_i \\ x_{i + d/2} \end{pmatrix}, \qquad
    \theta_i = \text{base}^{-2i/d}$$

    Angles, sines and cosines are float32; kept for the backward pass is nothing of the
    size of x. Reference: Su et al., RoFormer, 2021, equation 34.
    """
    length, half = x.shape[1], x.shape[-1] // 2
    dtype = widen(x[:0]).dtype
    rates = base ** (-jnp.arange(half, dtype=dtype) / half)
    angles = jnp.arange(length, dtype=dtype)[:, None] * rates[None, :]

    def evaluate(turns: tuple[Array, Array], x: Array) -> Array:
        cos, sin = (turn[None, :, None, :] for turn in turns)
        first, second = jnp.split(widen(x), 2, axis=-1)
        turned = first * cos - second * sin, second * cos + first * sin
        return jnp.concatenate(turned, -1).astype(x.dtype)

    return linear(evaluate, (jnp.cos(angles), jnp.sin(angles)), x)
