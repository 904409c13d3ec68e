"""JAX's attention kernel for TPUs, `jax.experimental.pallas.ops.tpu.flash_attention`.

It computes scores, softmax and the weighted sum of values block by block, on the chip,
so no array has the size of the scores. It has a backward pass, which has no derivative.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array

from .._base.jax_compat import manual_axes
from .._quantize import target_from
from ._attention_products import AttentionOptions, Operands

# Larger blocks read keys and values less often, and keep more sums for backward: causal
# attention of [8, 1024, 16, 128], forward and backward, moves 3.4 GB with blocks of
# 128, 2.0 with 512 and 2.3 with 1024 (libtpu 0.0.42, compiled for v5e, November 2026).
_BLOCKS = (512, 256, 128)
# Shorter scores stay on the chip: attention of [32, 256, 12, 64] moves 0.9 GB with the
# kernel, 0.3 with matmuls; that of [8, 1024, 16, 128] 2.0 and 4.4.
_LONG = 1024


def why_not_on_tpu(options: AttentionOptions, x: Operands) -> str | None:
    """Returns why the kernel cannot be used, or None.

    Args:
        options: The options of attention.
        x: The operands, or their types.
    """
    target = options.target or target_from(None)
    size, lengths = x.query.shape[-1], x.shape[2:]
    if options.implementation not in (None, "pallas"):
        return f'implementation="{options.implementation}"'
    if target.platform != "tpu":
        return f"{target.name} is not a TPU"
    if x.query.dtype != jnp.bfloat16:
        return f"the kernel needs bfloat16, not {x.query.dtype}"
    if len(x.names) > 3 or options.window or options.with_residual:
        return "the kernel has no bias, mask, lengths, window, dropout or row sums"
    if x.key.shape[2] != x.query.shape[2] or 0 in (*x.shape, size):
        return "the kernel needs as many keys and values as queries in each head"
    if any(length % _BLOCKS[-1] for length in lengths) or size % 64:
        return "sequences must be multiples of 128, and the size of a head of 64"
    if options.implementation is None and min(lengths) < _LONG:
        return f"the kernel is for sequences of {_LONG} or more"
    if options.implementation is None and not _is_on_one_device():
        return "XLA does not divide the kernel between devices; `shard_map` does"
    return options.without_kernel or None


def _is_on_one_device() -> bool:
    mesh = jax.sharding.get_abstract_mesh()
    is_divided = set(manual_axes()) == set(mesh.axis_names)
    return is_divided if mesh.axis_names else jax.device_count() == 1


def attend_on_tpu(options: AttentionOptions, *arrays: Array) -> Array:
    """Computes attention of query, key and value by the kernel."""
    # Not at the top: Pallas takes half a second to import.
    from jax.experimental.pallas.ops.tpu import flash_attention as pallas

    lengths = math.gcd(arrays[0].shape[1], arrays[1].shape[1])
    block = next(n for n in _BLOCKS if lengths % n == 0)
    names = pallas.BlockSizes.__dataclass_fields__
    sizes = {name: 1 if name == "block_b" else block for name in names}
    out = pallas.flash_attention(
        *(array.swapaxes(1, 2) for array in arrays),
        causal=options.is_causal,
        sm_scale=options.scale,
        block_sizes=pallas.BlockSizes(**sizes),
    )
    return out.swapaxes(1, 2)
