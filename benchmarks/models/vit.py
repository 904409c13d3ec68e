"""The Vision Transformer that is measured: that of the MPX paper, in Equinox.

The model of `examples.vit_explicit`, in one file that needs no other: it is loaded with
our `mpx`, with the published MPX (whose package has the same name) and with none at
all. Dtypes follow the weights and the image. Only what float16 cannot hold, softmax,
the statistics of layer norm and the mean over tokens, is computed in float32 by
`mpx.force_full_precision`, the one name of mpx here, and handed back in the dtype it
came in.
"""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

import mpx

from .problems import ModelConfig

Tokens = Float[Array, "tokens width"]


class MultiHeadAttentionBlock(eqx.Module):
    """Layer norm, multi-head self-attention, residual connection."""

    dense_qs: eqx.nn.Linear
    dense_ks: eqx.nn.Linear
    dense_vs: eqx.nn.Linear
    dense_o: eqx.nn.Linear
    layer_norm: eqx.nn.LayerNorm
    dropout: eqx.nn.Dropout
    num_heads: int = eqx.field(static=True)

    def __init__(self, config: ModelConfig, key: PRNGKeyArray):
        width = config.width
        q_key, k_key, v_key, o_key = jax.random.split(key, 4)
        self.dense_qs = eqx.nn.Linear(width, width, key=q_key)
        self.dense_ks = eqx.nn.Linear(width, width, key=k_key)
        self.dense_vs = eqx.nn.Linear(width, width, key=v_key)
        self.dense_o = eqx.nn.Linear(width, width, key=o_key)
        self.layer_norm = eqx.nn.LayerNorm(width)
        self.dropout = eqx.nn.Dropout(config.dropout)
        self.num_heads = config.heads

    @staticmethod
    def attention(
        q: Float[Array, "tokens size"],
        k: Float[Array, "tokens size"],
        v: Float[Array, "tokens size"],
    ) -> Float[Array, "tokens size"]:
        """One head: the products in the dtype of `q`, softmax in full precision."""
        scores = q @ k.T / math.sqrt(q.shape[-1])
        scores = mpx.force_full_precision(jax.nn.softmax, scores.dtype)(scores, axis=-1)
        return scores @ v

    def __call__(self, inputs: Tokens, key: PRNGKeyArray | None = None) -> Tokens:
        normed = jax.vmap(mpx.force_full_precision(self.layer_norm, inputs.dtype))(
            inputs
        )
        qs = self.split_heads(jax.vmap(self.dense_qs)(normed))
        ks = self.split_heads(jax.vmap(self.dense_ks)(normed))
        vs = self.split_heads(jax.vmap(self.dense_vs)(normed))
        outputs = jax.vmap(self.attention)(qs, ks, vs)
        outputs = outputs.transpose(1, 0, 2).reshape(inputs.shape)
        outputs = jax.vmap(self.dense_o)(outputs)
        return inputs + self.dropout(outputs, key=key, inference=key is None)

    def split_heads(self, x: Tokens) -> Float[Array, "heads tokens size"]:
        return x.reshape(x.shape[0], self.num_heads, -1).transpose(1, 0, 2)


class MLPBlock(eqx.Module):
    """Layer norm, one hidden layer with GELU, residual connection."""

    dense_in: eqx.nn.Linear
    dense_out: eqx.nn.Linear
    layer_norm: eqx.nn.LayerNorm
    dropout: eqx.nn.Dropout

    def __init__(self, config: ModelConfig, key: PRNGKeyArray):
        in_key, out_key = jax.random.split(key)
        self.dense_in = eqx.nn.Linear(config.width, config.hidden, key=in_key)
        self.dense_out = eqx.nn.Linear(config.hidden, config.width, key=out_key)
        self.layer_norm = eqx.nn.LayerNorm(config.width)
        self.dropout = eqx.nn.Dropout(config.dropout)

    def __call__(self, inputs: Tokens, key: PRNGKeyArray | None = None) -> Tokens:
        normed = jax.vmap(mpx.force_full_precision(self.layer_norm, inputs.dtype))(
            inputs
        )
        outputs = jax.nn.gelu(jax.vmap(self.dense_in)(normed))
        outputs = jax.vmap(self.dense_out)(outputs)
        return inputs + self.dropout(outputs, key=key, inference=key is None)


class VisionTransformer(eqx.Module):
    """Patches, blocks of attention and MLP, mean over tokens, linear classifier."""

    embed: eqx.nn.Linear
    position: Float[Array, "tokens width"]
    blocks: list[MultiHeadAttentionBlock | MLPBlock]
    layer_norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear
    patch: int = eqx.field(static=True)

    def __init__(
        self,
        config: ModelConfig,
        image_shape: tuple[int, int, int],
        classes: int,
        key: PRNGKeyArray,
    ):
        """Draws the initial model.

        Args:
            config: the shape of the transformer.
            image_shape: height, width and channels of an image. The patch size must
                divide height and width.
            classes: the number of logits.
            key: the PRNG key that fixes the initial weights.
        """
        height, width, channels = image_shape
        if height % config.patch or width % config.patch:
            raise ValueError(
                "`VisionTransformer(config, image_shape, ...)` needs a patch size that "
                f"divides the image; got patch {config.patch} and an image of "
                f"{height}x{width}."
            )
        tokens = (height // config.patch) * (width // config.patch)
        embed_key, position_key, head_key, key = jax.random.split(key, 4)
        self.embed = eqx.nn.Linear(
            config.patch**2 * channels, config.width, key=embed_key
        )
        # As large as an embedded patch of standardized pixels is: with the usual 0.02 a
        # small data set takes long to learn where a patch is.
        self.position = 0.5 * jax.random.normal(position_key, (tokens, config.width))
        self.blocks = []
        for block_key in jax.random.split(key, config.blocks):
            attention_key, mlp_key = jax.random.split(block_key)
            self.blocks.append(MultiHeadAttentionBlock(config, attention_key))
            self.blocks.append(MLPBlock(config, mlp_key))
        self.layer_norm = eqx.nn.LayerNorm(config.width)
        self.head = eqx.nn.Linear(config.width, classes, key=head_key)
        self.patch = config.patch

    def __call__(
        self,
        image: Float[Array, "height width channels"],
        key: PRNGKeyArray | None = None,
    ) -> Float[Array, " classes"]:
        """Classifies one image; a key turns dropout on.

        The dtype of the image must be the dtype of the weights.
        """
        x = jax.vmap(self.embed)(self.patches(image)) + self.position
        keys = [None] * len(self.blocks)
        if key is not None:
            keys = list(jax.random.split(key, len(self.blocks)))
        for block, block_key in zip(self.blocks, keys, strict=True):
            x = block(x, block_key)
        x = jax.vmap(mpx.force_full_precision(self.layer_norm, x.dtype))(x)
        x = mpx.force_full_precision(jnp.mean, x.dtype)(x, axis=0)
        return self.head(x)

    def patches(
        self, image: Float[Array, "height width channels"]
    ) -> Float[Array, "tokens pixels"]:
        """Cuts the image into square patches, row by row, and flattens each."""
        height, width, channels = image.shape
        p = self.patch
        x = image.reshape(height // p, p, width // p, p, channels)
        return x.transpose(0, 2, 1, 3, 4).reshape(-1, p * p * channels)
