"""The Vision Transformer that is measured: that of the MPX paper, in Equinox.

The model of `examples.vit_explicit` without dropout. Dtypes follow the weights and the
image. Only what float16 cannot hold, softmax, the statistics of layer norm and the mean
over tokens, is computed by `full`: in float32, and handed back in the dtype it came in,
by the `mpx.force_full_precision` of ours or of the published MPX; as it is in the
float32 step, which must not pay for mpx when it is traced.
"""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from .problems import Problem
from .transformers import Full, as_it_is

Tokens = Float[Array, "tokens width"]


class MultiHeadAttentionBlock(eqx.Module):
    """Layer norm, multi-head self-attention, residual connection."""

    dense_qs: eqx.nn.Linear
    dense_ks: eqx.nn.Linear
    dense_vs: eqx.nn.Linear
    dense_o: eqx.nn.Linear
    layer_norm: eqx.nn.LayerNorm
    num_heads: int = eqx.field(static=True)
    full: Full = eqx.field(static=True)

    def __init__(self, sizes: Problem, full: Full, key: PRNGKeyArray):
        width = sizes.width
        q_key, k_key, v_key, o_key = jax.random.split(key, 4)
        self.dense_qs = eqx.nn.Linear(width, width, key=q_key)
        self.dense_ks = eqx.nn.Linear(width, width, key=k_key)
        self.dense_vs = eqx.nn.Linear(width, width, key=v_key)
        self.dense_o = eqx.nn.Linear(width, width, key=o_key)
        self.layer_norm = eqx.nn.LayerNorm(width)
        self.num_heads = sizes.heads
        self.full = full

    def attention(
        self,
        q: Float[Array, "tokens size"],
        k: Float[Array, "tokens size"],
        v: Float[Array, "tokens size"],
    ) -> Float[Array, "tokens size"]:
        """One head: the products in the dtype of `q`, softmax in full precision."""
        scores = q @ k.T / math.sqrt(q.shape[-1])
        scores = self.full(jax.nn.softmax, scores.dtype)(scores, axis=-1)
        return scores @ v

    def __call__(self, inputs: Tokens) -> Tokens:
        normed = jax.vmap(self.full(self.layer_norm, inputs.dtype))(inputs)
        qs = self.split_heads(jax.vmap(self.dense_qs)(normed))
        ks = self.split_heads(jax.vmap(self.dense_ks)(normed))
        vs = self.split_heads(jax.vmap(self.dense_vs)(normed))
        outputs = jax.vmap(self.attention)(qs, ks, vs)
        outputs = outputs.transpose(1, 0, 2).reshape(inputs.shape)
        return inputs + jax.vmap(self.dense_o)(outputs)

    def split_heads(self, x: Tokens) -> Float[Array, "heads tokens size"]:
        return x.reshape(x.shape[0], self.num_heads, -1).transpose(1, 0, 2)


class MLPBlock(eqx.Module):
    """Layer norm, one hidden layer with GELU, residual connection."""

    dense_in: eqx.nn.Linear
    dense_out: eqx.nn.Linear
    layer_norm: eqx.nn.LayerNorm
    full: Full = eqx.field(static=True)

    def __init__(self, sizes: Problem, full: Full, key: PRNGKeyArray):
        in_key, out_key = jax.random.split(key)
        self.dense_in = eqx.nn.Linear(sizes.width, sizes.hidden, key=in_key)
        self.dense_out = eqx.nn.Linear(sizes.hidden, sizes.width, key=out_key)
        self.layer_norm = eqx.nn.LayerNorm(sizes.width)
        self.full = full

    def __call__(self, inputs: Tokens) -> Tokens:
        normed = jax.vmap(self.full(self.layer_norm, inputs.dtype))(inputs)
        outputs = jax.nn.gelu(jax.vmap(self.dense_in)(normed))
        return inputs + jax.vmap(self.dense_out)(outputs)


class VisionTransformer(eqx.Module):
    """Patches, blocks of attention and MLP, mean over tokens, linear classifier."""

    embed: eqx.nn.Linear
    position: Float[Array, "tokens width"]
    blocks: list[MultiHeadAttentionBlock | MLPBlock]
    layer_norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear
    patch: int = eqx.field(static=True)
    full: Full = eqx.field(static=True)

    def __init__(
        self,
        problem: Problem,
        blocks: int,
        key: PRNGKeyArray,
        full: Full = as_it_is,
    ):
        """Draws the initial model.

        Args:
            problem: sizes of the model and of its images.
            blocks: how many there are, each of attention and MLP.
            key: the PRNG key that fixes the initial weights.
            full: what is put around a function that computes in full precision.
        """
        height, width, channels = problem.image_shape
        tokens = (height // problem.patch) * (width // problem.patch)
        embed_key, position_key, head_key, key = jax.random.split(key, 4)
        self.embed = eqx.nn.Linear(
            problem.patch**2 * channels, problem.width, key=embed_key
        )
        # As large as an embedded patch of standardized pixels is: with the usual 0.02 a
        # small data set takes long to learn where a patch is.
        self.position = 0.5 * jax.random.normal(position_key, (tokens, problem.width))
        self.blocks = []
        for block_key in jax.random.split(key, blocks):
            attention_key, mlp_key = jax.random.split(block_key)
            self.blocks.append(MultiHeadAttentionBlock(problem, full, attention_key))
            self.blocks.append(MLPBlock(problem, full, mlp_key))
        self.layer_norm = eqx.nn.LayerNorm(problem.width)
        self.head = eqx.nn.Linear(problem.width, problem.classes, key=head_key)
        self.patch = problem.patch
        self.full = full

    def __call__(
        self, image: Float[Array, "height width channels"]
    ) -> Float[Array, " classes"]:
        """Classifies one image, of the dtype of the weights."""
        x = jax.vmap(self.embed)(self.patches(image)) + self.position
        for block in self.blocks:
            x = block(x)
        x = jax.vmap(self.full(self.layer_norm, x.dtype))(x)
        x = self.full(jnp.mean, x.dtype)(x, axis=0)
        return self.head(x)

    def patches(
        self, image: Float[Array, "height width channels"]
    ) -> Float[Array, "tokens pixels"]:
        """Cuts the image into square patches, row by row, and flattens each."""
        height, width, channels = image.shape
        p = self.patch
        x = image.reshape(height // p, p, width // p, p, channels)
        return x.transpose(0, 2, 1, 3, 4).reshape(-1, p * p * channels)
