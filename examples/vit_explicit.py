"""The Vision Transformer of `examples.vit`, with every cast written by hand.

What differs is here and nothing else: the model says what float16 cannot hold, softmax,
the statistics of layer norm and the mean over tokens, with `mpx.force_full_precision`;
the loss does so with cross entropy; and the gradient function casts what goes in.

Run it with `python -m examples.vit_explicit`; the options are those of `examples.vit`.
"""

import dataclasses
import functools
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float

import mpx
from examples import runs, vit
from examples.precisions import Precision
from examples.vit import Batch, Config, Key, Tokens, TrainState

PRESETS = {
    name: dataclasses.replace(preset, style="explicit")
    for name, preset in vit.PRESETS.items()
}


def parse_config(arguments: Sequence[str] | None = None) -> Config:
    config = runs.parse_options(PRESETS, arguments)
    rule = "must be explicit here, see examples.vit"
    runs.require(config.style == "explicit", config, "style", rule)
    rule = "is for examples.vit, which casts by autocast"
    runs.require(not config.recipe, config, "recipe", rule)
    return config


# --- Model ---------------------------------------------------------------------------
def normalize(layer_norm: eqx.nn.LayerNorm, x: Tokens) -> Tokens:
    """Layer norm in float32; the result has the dtype that came in."""
    return jax.vmap(mpx.force_full_precision(layer_norm, x.dtype))(x)


class AttentionBlock(vit.AttentionBlock):
    """Softmax and layer norm in float32."""

    def __call__(self, inputs: Tokens, key: Key = None) -> Tokens:
        normed = normalize(self.layer_norm, inputs)
        dense = (self.dense_qs, self.dense_ks, self.dense_vs)
        q, k, v = (self.split_heads(jax.vmap(layer)(normed)) for layer in dense)
        scores = q @ k.transpose(0, 2, 1) / math.sqrt(q.shape[-1])
        softmax = mpx.force_full_precision(jax.nn.softmax, scores.dtype)
        outputs = softmax(scores, axis=-1) @ v
        outputs = outputs.transpose(1, 0, 2).reshape(inputs.shape)
        outputs = jax.vmap(self.dense_o)(outputs)
        return inputs + self.dropout(outputs, key=key, inference=key is None)


class MLPBlock(vit.MLPBlock):
    """Layer norm in float32."""

    def __call__(self, inputs: Tokens, key: Key = None) -> Tokens:
        normed = normalize(self.layer_norm, inputs)
        outputs = jax.nn.gelu(jax.vmap(self.dense_in)(normed))
        outputs = jax.vmap(self.dense_out)(outputs)
        return inputs + self.dropout(outputs, key=key, inference=key is None)


class VisionTransformer(vit.VisionTransformer):
    """Layer norm and mean in float32. The image has the dtype of the weights."""

    block_types = (AttentionBlock, MLPBlock)

    def pool(self, x: Tokens) -> Float[Array, " width"]:
        x = normalize(self.layer_norm, x)
        return mpx.force_full_precision(jnp.mean, x.dtype)(x, axis=0)


# --- Training step -------------------------------------------------------------------
cross_entropy = mpx.force_full_precision(vit.cross_entropy, "float32")
loss_and_accuracy = functools.partial(
    vit.loss_and_accuracy, cross_entropy=cross_entropy
)


def is_norm(path: str, leaf: Any) -> bool:
    """Weights of layer norm: computed with in float32, so not worth a cast to half."""
    return ".layer_norm." in path


def in_step(precision: Precision) -> tuple[Callable[..., Any], dict[str, Any]]:
    """What the gradient function is given: the loss, and what to cast to."""
    if precision == "float32":
        return loss_and_accuracy, {"use_mixed_precision": False}
    policy = f"params=float32,compute={precision},output=float32"
    return loss_and_accuracy, {"policy": policy, "keep": is_norm}


def make_step(config: Config, precision: Precision, mesh: Mesh) -> Any:
    """The step of `examples.vit`, but for what casts: the gradient function."""
    optimizer = vit.make_optimizer(config)
    loss, options = in_step(precision)

    @eqx.filter_jit(donate="all-except-first")
    def step(batch: Batch, state: TrainState) -> tuple[TrainState, runs.Metrics]:
        model, opt_state, scaling = state
        result = mpx.filter_value_and_grad(
            loss, scaling, has_aux=True, accumulate=config.accumulate, **options
        )(model, batch, vit.key_of(config, scaling))
        state = TrainState(*mpx.optimizer_step(model, optimizer, opt_state, result))
        metrics = runs.metrics_of(result, scaling)
        return eqx.filter_shard((state, metrics), runs.replicated(mesh))

    return step


def in_precision(func: Callable[..., Any], precision: Precision) -> Callable[..., Any]:
    """A function whose inputs are cast, to test the model."""
    return mpx.cast_function(func, precision, "float32")


STYLE = vit.Style(VisionTransformer, in_precision, make_step, in_step)
train = functools.partial(vit.train, style=STYLE)
run = functools.partial(vit.run, style=STYLE)

if __name__ == "__main__":
    sys.exit(
        runs.main(run, parse_config, "examples.vit_explicit", target="train-explicit")
    )
