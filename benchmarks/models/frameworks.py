"""One small transformer of bytes in three frameworks, and its training step.

Causal attention and an MLP in each block, an embedding before and a linear layer for
the logits behind. No line of the models is about precision: that is all in the step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array

import mpx
import mpx.nnx
from examples.gpt import BYTES, GPT, ModelConfig

from ..our_arms import RECIPES
from ..steps import ArrayStep, arrays_only
from . import transformers

SIZE = ModelConfig(context=128, width=256, hidden=1024, blocks=2, heads=4)
BATCH = 8
# What `mpx.autocast(target=...)` calls a target of `targets`.
UNITS = {"h100": "sm_90", "b200": "sm_100", "tpu7x": "tpu7x"}


@dataclasses.dataclass(frozen=True)
class Case:
    """A training step to compile.

    Attributes:
        framework: A name of `FRAMEWORKS`.
        recipe: A name of `our_arms.RECIPES`.
        target: A name of `UNITS`.
        head: Whether the final projection is quantized, which it is not by default.
    """

    framework: str
    recipe: str
    target: str
    head: bool = False


def linear_flops(size: ModelConfig, head: bool) -> int:
    """FLOPs of a step's linear layers: forward, and the gradients of input and weight.

    All have both gradients, since even what comes first, the embedding, is learned.
    """
    width = size.width
    weights = size.blocks * (4 * width * width + 2 * width * size.hidden)
    weights += head * width * BYTES
    return 3 * 2 * BATCH * size.context * weights


class LinenGPT(linen.Module):
    """The transformer for a batch, of Linen's own layers."""

    size: ModelConfig

    @linen.compact
    def __call__(self, texts: Array) -> Array:
        size = self.size
        x = linen.Embed(BYTES, size.width)(texts)
        x = x + linen.Embed(size.context, size.width)(jnp.arange(texts.shape[1]))
        mask = linen.make_causal_mask(texts)
        for _ in range(size.blocks):
            attention = linen.MultiHeadDotProductAttention(size.heads)
            x = x + attention(linen.LayerNorm()(x), mask=mask)
            hidden = linen.gelu(linen.Dense(size.hidden)(linen.LayerNorm()(x)))
            x = x + linen.Dense(size.width)(hidden)
        return linen.Dense(BYTES, use_bias=False, name="head")(linen.LayerNorm()(x))


def cross_entropy(logits: Array, following: Array) -> Array:
    """Mean cross entropy of the next byte."""
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, following)
    return jnp.mean(losses)


def _pure_step(loss: Any, optimizer: Any) -> Callable[..., tuple]:
    def step(model: Any, opt_state: Any, scaling: Any, texts: Any) -> tuple:
        result = mpx.filter_value_and_grad(loss, scaling)(model, texts)
        stepped = mpx.optimizer_step(model, optimizer, opt_state, result)
        return *stepped, result.value

    return step


def equinox(size: ModelConfig) -> tuple[Callable[[Array], Any], Any, str]:
    """What makes the model, its loss and the path of the final projection's weight."""

    def loss(model: transformers.GPT, texts: Array) -> Array:
        return cross_entropy(jax.vmap(model)(texts[:, :-1]), texts[:, 1:])

    def initial(key: Array) -> transformers.GPT:
        return transformers.GPT(
            size.width, size.hidden, size.heads, size.context, size.blocks, key
        )

    return initial, loss, "head.weight"


def flax_linen(size: ModelConfig) -> tuple[Callable[[Array], Any], Any, str]:
    """The same in Linen."""
    module = LinenGPT(size)

    def initial(key: Array) -> Any:
        return module.init(key, jnp.zeros((1, size.context), jnp.int32))

    def loss(variables: Any, texts: Array) -> Array:
        return cross_entropy(module.apply(variables, texts[:, :-1]), texts[:, 1:])

    return initial, loss, "['params']['head']['kernel']"


def flax_nnx(size: ModelConfig) -> tuple[Callable[[Array], Any], Any, str]:
    """The same in NNX: the model of `examples.gpt`."""

    def loss(model: GPT, texts: Array) -> Array:
        return cross_entropy(model(texts[:, :-1]), texts[:, 1:])

    return lambda key: GPT(size, rngs=nnx.Rngs(key)), loss, "head.kernel"


FRAMEWORKS = {"Equinox": equinox, "Flax Linen": flax_linen, "Flax NNX": flax_nnx}


def build(
    case: Case, devices: list[Any] | None = None, size: ModelConfig = SIZE
) -> ArrayStep:
    """The step of a case, with shapes for arguments; see `steps.build`."""
    initial, plain_loss, head = FRAMEWORKS[case.framework](size)
    rules = mpx.Rules(mpx.Rule(mpx.Precision.LOW, parameter=head))
    loss = mpx.autocast(
        plain_loss,
        recipe=RECIPES[case.recipe],
        target=UNITS[case.target],
        rules=rules if case.head else None,
    )
    optimizer = optax.adam(1e-3)
    texts = jax.ShapeDtypeStruct((BATCH, size.context + 1), np.int32)
    key = jax.random.key(0)
    if case.framework == "Flax NNX":
        return _nnx_step(initial, loss, optimizer, key, texts, devices)

    def state_of(key: Array) -> tuple[Any, Any, Any]:
        model = initial(key)
        params = eqx.filter(model, eqx.is_inexact_array)
        return model, optimizer.init(params), mpx.init_scaling(loss, model, texts)

    state = eqx.filter_eval_shape(state_of, key)
    return arrays_only(_pure_step(loss, optimizer), state, texts, devices)


def _nnx_step(
    initial: Callable[[Array], Any],
    loss: Any,
    optimizer: Any,
    key: Array,
    texts: Any,
    devices: list[Any] | None,
) -> ArrayStep:
    def objects(key: Array) -> tuple[Any, nnx.Optimizer]:
        model = initial(key)
        # Nothing is dropped; keys are lowered to other text with a device than without.
        nnx.pop(model, nnx.RngState)
        return model, nnx.Optimizer(model, optimizer, wrt=nnx.Param)

    graph, arrays = nnx.split(nnx.eval_shape(objects, key))

    def step(arrays: Any, scaling: Any, texts: Any) -> tuple:
        model, optimizer = nnx.merge(graph, arrays)
        result = mpx.nnx.value_and_grad(loss, scaling)(model, texts)
        mpx.nnx.update(optimizer, model, result.grads, result.finite)
        return nnx.state((model, optimizer)), result.scaling, result.value

    model, _ = nnx.merge(graph, arrays)
    scaling = eqx.filter_eval_shape(mpx.init_scaling, loss, model, texts)
    return arrays_only(step, (arrays, scaling), texts, devices)
