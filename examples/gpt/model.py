"""A GPT of bytes in Flax NNX: plain code, of Flax's own layers.

Nothing here is about precision: all is float32, until `mpx.autocast` decides otherwise
from outside. `scan` stacks the blocks' weights and runs one block in a loop, which
compiles faster; `remat` computes a block's activations again for the backward pass,
which needs less memory.
"""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, UInt8

from .config import ModelConfig

BYTES = 256

Tokens = Float[Array, "batch tokens width"]
Mask = Bool[Array, "#batch 1 tokens tokens"]


class Block(nnx.Module):
    """Causal self-attention, then an MLP, each behind a layer norm and a residual."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        width = config.width
        self.attention_norm = nnx.LayerNorm(width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            config.heads, width, decode=False, rngs=rngs
        )
        self.mlp_norm = nnx.LayerNorm(width, rngs=rngs)
        self.dense_in = nnx.Linear(width, config.hidden, rngs=rngs)
        self.dense_out = nnx.Linear(config.hidden, width, rngs=rngs)
        self.dropout = nnx.Dropout(config.dropout, rngs=rngs)

    def __call__(self, x: Tokens, mask: Mask) -> Tokens:
        x = x + self.dropout(self.attention(self.attention_norm(x), mask=mask))
        hidden = nnx.gelu(self.dense_in(self.mlp_norm(x)))
        return x + self.dropout(self.dense_out(hidden))


class GPT(nnx.Module):
    """Embedded bytes and places, blocks, a linear layer for the logits."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        scan: bool = False,
        remat: bool = False,
        rngs: nnx.Rngs,
    ):
        """Draws the initial model.

        Args:
            config: the shape of the transformer.
            scan: whether the blocks are one loop.
            remat: whether activations are computed again.
            rngs: the random streams that fix weights and dropout.
        """
        # As large as what the blocks add at first: with the usual 0.02 a short run does
        # not get beyond pairs of bytes.
        normal = nnx.initializers.normal
        self.embed = nnx.Embed(
            BYTES, config.width, embedding_init=normal(1.0), rngs=rngs
        )
        self.place = nnx.Embed(
            config.context, config.width, embedding_init=normal(0.5), rngs=rngs
        )
        if scan:
            stacked = nnx.split_rngs(splits=config.blocks)(
                nnx.vmap(lambda rngs: Block(config, rngs))
            )
            self.blocks: Any = stacked(rngs)
        else:
            self.blocks = nnx.List(Block(config, rngs) for _ in range(config.blocks))
        self.norm = nnx.LayerNorm(config.width, rngs=rngs)
        self.head = nnx.Linear(config.width, BYTES, use_bias=False, rngs=rngs)
        self.scan = scan
        self.remat = remat

    def __call__(
        self, text: UInt8[Array, "batch tokens"]
    ) -> Float[Array, "batch tokens bytes"]:
        """The logits of the byte that follows each byte of a text."""
        x = self.embed(text) + self.place(jnp.arange(text.shape[1]))
        mask = nnx.make_causal_mask(text)
        x = self.run_blocks(x, mask)
        return self.head(self.norm(x))

    def run_blocks(self, x: Tokens, mask: Mask) -> Tokens:
        def run(x: Tokens, block: Block, mask: Mask) -> Tokens:
            return block(x, mask)

        if self.remat:
            run = nnx.remat(run)
        if self.scan:
            carry = nnx.Carry
            return nnx.scan(run, in_axes=(carry, 0, None), out_axes=carry)(
                x, self.blocks, mask
            )
        for block in self.blocks:
            x = run(x, block, mask)
        return x
