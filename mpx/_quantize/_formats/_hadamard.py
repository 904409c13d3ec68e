"""The random Hadamard transform: spreads an outlier over its block.

A block of 16 values with one large value quantizes badly in 4 bits: the scale follows
the large one and the others become zero. Multiplying by an orthogonal matrix of entries
+-1/4 spreads the energy over the block. If both operands of a matmul are transformed
along the contracted axis, the result is unchanged.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jaxtyping import Array, Float32

from ..._base.errors import describe
from ._blocks import resolve_axes, split

BLOCK = 16
# Any fixed choice works if both operands share it. These signs are not a column of
# Sylvester's matrix, so a constant block does not concentrate in one value.
_SIGNS = (1, 1, -1, 1, -1, -1, 1, 1, 1, -1, -1, -1, 1, -1, 1, 1)


def hadamard_transform(
    x: Array,
    *,
    axis: int = -1,
    signs: Array | np.ndarray | Sequence[int] | None = None,
    inverse: bool = False,
) -> Array:
    r"""Multiplies blocks of 16 numbers by an orthogonal matrix.

    $$y = x\,H, \qquad H = \tfrac{1}{4}\,\mathrm{diag}(s)\,H_{16}, \qquad H H^T = I$$

    where $H_{16}$ is Sylvester's Hadamard matrix, whose entries are 1 and -1. The
    inverse is $x = y\,H^T$. It preserves matmuls: $(a H)(b H)^T = a b^T$.

    Computed in float32 by additions in a fixed order, so that every device gives the
    same bits; differentiable.

    Args:
        x: A floating array `[..., n, ...]`, n a multiple of 16.
        axis: The axis of length n that blocks are along: the contracted one.
        signs: 16 numbers 1 or -1; by default a fixed choice, the same for every call.
        inverse: Multiplies by the transpose instead.

    Returns:
        The transformed array, in the shape and dtype of `x`. A block that contains an
        infinity or a NaN has no finite number afterwards; a sum beyond the range of the
        dtype is infinite.

    Raises:
        TypeError: `x` or `signs` is not of the kind above.
        ValueError: The axis does not exist or its length is not a multiple of 16; or a
            sign is neither 1 nor -1 and not traced.

    Source: NVIDIA, Pretraining Large Language Models with NVFP4 (arXiv:2509.25149),
    section 4.2; the signs are mpx's own.

    Examples:
        >>> import jax.numpy as jnp, mpx
        >>> from mpx.quantization import hadamard_transform
        >>> outlier = jnp.zeros(16).at[3].set(8.0)
        >>> y = hadamard_transform(outlier)
        >>> float(jnp.abs(y).max())
        2.0
        >>> bool((hadamard_transform(y, inverse=True) == outlier).all())
        True
    """
    call = "`mpx.quantization.hadamard_transform(x, axis=...)`"
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"{call} needs a floating array; got {x.dtype}{[*x.shape]}.")
    (axis,) = resolve_axes(x.shape, axis, BLOCK, 1, call)
    chosen = np.array(_SIGNS) if signs is None else checked_signs(signs, call)
    blocks = jnp.moveaxis(x, axis, -1).astype(jnp.float32)
    moved = blocks.shape
    # The axes in front stay separate. Merged with the blocks' axis, rows sharded over
    # devices would lose their sharding, and XLA would gather all of them on each
    # device.
    blocks = split(blocks, (-1,), BLOCK)
    chosen = jnp.asarray(chosen, jnp.float32)
    chosen = lax.broadcast_in_dim(chosen, (1,) * x.ndim + (BLOCK,), (x.ndim,))
    y = _sylvester(blocks) * chosen if inverse else _sylvester(blocks * chosen)
    return jnp.moveaxis(y.reshape(moved), -1, axis).astype(x.dtype)


def checked_signs(signs: object, call: str) -> Any:
    """Returns signs as an array; raises unless they are 16 numbers, each 1 or -1.

    Traced values are not checked.
    """
    if isinstance(signs, Tracer):
        shape, is_number = signs.shape, not jnp.issubdtype(signs.dtype, np.bool_)
    else:
        signs = np.asarray(signs)
        shape, is_number = signs.shape, signs.dtype.kind in "iuf"
    if shape != (BLOCK,) or not is_number:
        raise TypeError(f"`signs` of {call} must be 16 numbers; got {describe(signs)}.")
    if not isinstance(signs, Tracer) and not (np.abs(signs) == 1).all():
        raise ValueError(
            f"`signs` of {call} must be 1 or -1, or the transform would not preserve "
            f"matmuls; got {signs.tolist()}."
        )
    return signs


def rotation(signs: tuple[int, ...] | None = None) -> Float32[Array, "16 16"]:
    """Returns the matrix H of the transform."""
    signs = _SIGNS if signs is None else signs
    signs_by_row = jnp.asarray(signs, jnp.float32)[:, None]
    return signs_by_row * _sylvester(jnp.eye(BLOCK, dtype=jnp.float32))


def signs_of(signs: tuple[int, ...] | None = None) -> int:
    """Returns the signs of the transform as bits, 1 for -1, the first one lowest."""
    signs = _SIGNS if signs is None else signs
    return sum(1 << place for place, sign in enumerate(signs) if sign < 0)


def _sylvester(blocks: Array) -> Array:
    """Multiplies rows of 16 by Sylvester's matrix over 4, in 4 rounds of sums."""
    lead = blocks.shape[:-1]
    signs = jnp.array([1.0, -1.0], blocks.dtype)
    signs = signs.reshape(*(1 for _ in lead), 1, 2, 1)
    distance = 1
    while distance < BLOCK:
        pairs = blocks.reshape(*lead, BLOCK // (2 * distance), 2, distance)
        # left + right and left - right, without an array for either half.
        pairs = lax.rev(pairs, (pairs.ndim - 2,)) + pairs * signs
        blocks = pairs.reshape(*lead, BLOCK)
        distance *= 2
    return blocks * 0.25
