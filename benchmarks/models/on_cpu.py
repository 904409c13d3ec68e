"""Steps that are timed on a CPU, with the arms of either environment.

Functions of their layers (`weights`), so that every arm runs the same lines. Norms,
softmax and losses are written in float32, as in `arranged`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import flax.linen as linen
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

from ..steps import LEARNING_RATE, Arm, ArrayStep, built as build, known_arms
from .arranged import Model, Sizes, cross_entropy, embed, gpt_block, layer_norm
from .various import lstm_layer
from .weights import Layers, Weights, random_weights

FLAX = "Flax bfloat16"
# So large that what a step changes is the gradient.
_HUGE = 2.0**30

# --- Models: from sizes to the loss ---------------------------------------------------


def mlp(sizes: Any) -> Model:
    """Mean squared error of layers with gelu between them."""

    def loss(layers: Layers, batch: Any) -> Array:
        x, wanted = batch
        for index in range(sizes.layers - 1):
            x = jax.nn.gelu(layers.dense(f"layer{index}", x, sizes.width))
        x = layers.dense("last", x, sizes.width)
        return jnp.mean(jnp.square(x.astype(jnp.float32) - wanted))

    return loss


def gpt(sizes: Any) -> Model:
    """Cross entropy of the next token."""

    def loss(layers: Layers, tokens: Array) -> Array:
        x = _blocks(layers, embed(layers, tokens, sizes), sizes, is_causal=True)
        return cross_entropy(layers.dense("head", x, sizes.classes), tokens[:, 1:])

    return loss


def vit(sizes: Any) -> Model:
    """Cross entropy of classes, by the mean over patches."""

    def loss(layers: Layers, batch: Any) -> Array:
        x, labels = batch
        x = layers.dense("embed", x, sizes.width)
        x = jnp.mean(_blocks(layers, x, sizes, is_causal=False), 1)
        return cross_entropy(layers.dense("head", x, sizes.classes), labels)

    return loss


def _blocks(layers: Layers, x: Array, sizes: Any, is_causal: bool) -> Array:
    of = Sizes(sizes.width, sizes.hidden, sizes.classes, sizes.layers, sizes.heads)
    for index in range(of.layers):
        x = gpt_block(layers.at(f"block{index}"), x, of, is_causal)
    return x


def resnet(sizes: Any) -> Model:
    """Cross entropy of classes, by stages of one block, each twice as wide."""

    def block(layers: Layers, x: Array, channels: int, stride: int) -> Array:
        inner = layers.convolve("conv1", x, channels, 3, stride)
        inner = jax.nn.relu(layer_norm(layers, "norm", inner))
        inner = layers.convolve("conv2", inner, channels, 3)
        return jax.nn.relu(inner + layers.convolve("around", x, channels, 1, stride))

    def loss(layers: Layers, batch: Any) -> Array:
        x, labels = batch
        x = layers.convolve("in", x, sizes.width, 3)
        for stage in range(sizes.layers):
            part, channels = layers.at(f"stage{stage}"), sizes.width * 2**stage
            x = block(part, x, channels, 2 if stage else 1)
        x = jnp.mean(x, (1, 2))
        return cross_entropy(layers.dense("head", x, sizes.classes), labels)

    return loss


def lstm(sizes: Any, layer: Callable[[Any, Array], Array] = lstm_layer) -> Model:
    """Cross entropy of a class at each step."""

    def loss(layers: Layers, batch: Any) -> Array:
        x, labels = batch
        x = layer(layers.at("layer"), x)
        return cross_entropy(layers.dense("head", x, sizes.classes), labels)

    return loss


MODELS = {"mlp": mlp, "gpt": gpt, "vit": vit, "resnet": resnet, "lstm": lstm}


def random_data(sizes: Any, key: Array) -> Any:
    """Tokens, or numbers with what is wanted of them."""
    if sizes.model == "gpt":
        shape = (sizes.rows, sizes.tokens + 1)
        return jax.random.randint(key, shape, 0, sizes.classes)
    shape = {
        "mlp": (sizes.rows, sizes.width),
        "vit": (sizes.rows, sizes.tokens, sizes.patch),
        "resnet": (sizes.rows, sizes.tokens, sizes.tokens, 3),
        "lstm": (sizes.tokens, sizes.rows, sizes.width),
    }[sizes.model]
    first, second = jax.random.split(key)
    x = jax.random.normal(first, shape)
    if sizes.model == "mlp":
        return x, jax.random.normal(second, shape)
    labels = shape[:2] if sizes.model == "lstm" else shape[:1]
    return x, jax.random.randint(second, labels, 0, sizes.classes)


# --- Flax -----------------------------------------------------------------------------


class ByFlax(Weights):
    """Layers of Flax with `dtype=bfloat16`, and weights as they have them."""

    def weight(self, name: str, *shape: int) -> Array:
        found = self.tree[name]
        return found.astype(jnp.bfloat16) if found.ndim > 1 else found

    def dense(self, name: str, x: Array, features: int) -> Array:
        layer = linen.Dense(features, use_bias=False, dtype=jnp.bfloat16)
        return _applied(layer, {"kernel": self.tree[name]}, x)

    def convolve(
        self, name: str, x: Array, channels: int, window: int, stride: int = 1
    ) -> Array:
        layer = linen.Conv(
            *(channels, (window, window), (stride, stride)),
            use_bias=False,
            dtype=jnp.bfloat16,
        )
        return _applied(layer, {"kernel": self.tree[name]}, x)


def lstm_by_flax(layers: ByFlax, x: Array) -> Array:
    """Flax's own layer with the weights of `lstm_layer`."""
    parts = {}
    of_input, of_state, bias = (
        jnp.split(layers.tree[name], 4, axis=-1) for name in ("input", "state", "bias")
    )
    for index, gate in enumerate("ifgo"):
        parts[f"i{gate}"] = {"kernel": of_input[index]}
        parts[f"h{gate}"] = {"kernel": of_state[index], "bias": bias[index]}
    cell = linen.OptimizedLSTMCell(x.shape[-1], dtype=jnp.bfloat16)
    return _applied(linen.RNN(cell, time_major=True), {"cell": parts}, x)


def _applied(layer: linen.Module, weights: Any, x: Array) -> Array:
    return jnp.asarray(layer.apply({"params": weights}, x))


# --- Steps ----------------------------------------------------------------------------


# Seconds of a step.
SLOWEST_S = 20.0
# Scales of delayed scaling are right one layer after the other.
_FIRST = {"mpx delayed": 4}


def built(sizes: Any, names: list[str]) -> Iterator[tuple[str, Any, float]]:
    """Of each arm: its name, what runs a step, and its gradients' error.

    The error is relative to the gradients of the first arm, over all weights. What is
    too slow to be repeated has None, and the seconds of a step.
    """
    arms, exact = known_arms("ON_CPU"), None
    for name in names:
        loss = loss_of(sizes, is_flax=name == FLAX)
        made = _made(sizes, arms[names[0] if name == FLAX else name], loss)
        function = made.jitted().lower(made.state, made.batch).compile()
        data, rate = made.batch
        # First steps that change nothing but the scales.
        state, seconds, count = made.state, 0.0, 0
        while count < _FIRST.get(name, 1) and seconds <= SLOWEST_S:
            start, count = time.perf_counter(), count + 1
            state, _ = jax.block_until_ready(function(state, (data, 0 * rate)))
            seconds = time.perf_counter() - start
        if seconds > SLOWEST_S:
            yield name, None, seconds
            continue
        kept = jax.tree.map(jnp.copy, state)
        changed, _ = function(state, (data, _HUGE + 0 * rate))
        gradients = jax.tree.map(lambda a, b: (a - b) / _HUGE, kept[0], changed[0])
        exact = gradients if exact is None else exact
        difference = jax.tree.map(jnp.subtract, gradients, exact)
        error = float(optax.tree.norm(difference) / optax.tree.norm(exact))
        yield name, _running(function, kept, made.batch), error


def loss_of(sizes: Any, is_flax: bool) -> Callable[[Any, Any], Array]:
    """The loss of weights and a batch."""
    options = {"layer": lstm_by_flax} if is_flax and sizes.model == "lstm" else {}
    model = MODELS[sizes.model](sizes, **options)
    layers = ByFlax if is_flax else Weights
    return lambda tree, data: model(layers(tree), data)


def _running(function: Any, state: Any, batch: Any) -> Callable[[], None]:
    """What runs a step and waits for it."""

    def run() -> None:
        nonlocal state
        state, _ = jax.block_until_ready(function(state, batch))

    return run


def _made(sizes: Any, arm: Arm, loss: Any) -> ArrayStep:
    """The step, whose batch has the learning rate."""

    def initial(key: Array) -> tuple[tuple, Any]:
        data = random_data(sizes, key)
        tree = random_weights(MODELS[sizes.model](sizes), data, key)
        scaling = arm.first_scaling(loss, tree, data)
        state = tree, optax.sgd(LEARNING_RATE).init(tree), scaling
        return state, (data, jnp.float32(LEARNING_RATE))

    def step(tree: Any, opt_state: Any, scaling: Any, batch: Any) -> tuple:
        data, rate = batch
        return arm.make_step(loss, optax.sgd(rate))(tree, opt_state, scaling, data)

    return build(initial, step, seed=0)
