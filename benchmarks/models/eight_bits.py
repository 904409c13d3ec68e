"""Training steps of wide models in 8 bits and less: mpx's arms, and the peers'.

Mean cross entropy, Adam, donated buffers, weights in float32. In every arm gradients
are checked, and a step with one that is not finite is skipped.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

from ..peers import eight_bits as peers
from ..steps import CHECKED, LEARNING_RATE, ArrayStep, built
from .various import CLASSES, bottlenecks, by_einsum, experts
from .weights import Layers, Weights, by_cudnn, random_weights, shapes_of
from .wide import Sizes, ffn, llama

NAIVE = CHECKED.name


@dataclasses.dataclass(frozen=True)
class Workload:
    """A model and its data.

    Attributes:
        title: In words.
        model: From layers, a batch and sizes to the loss.
        sizes: Of the model.
        rows: Numbers of rows, or texts.
        context: Tokens of each text; 0 where rows are vectors.
        image: The shape of each image; empty where there is none.
    """

    title: str
    model: Callable[[Layers, Any, Sizes], Array]
    sizes: Sizes
    rows: int
    context: int = 0
    image: tuple[int, ...] = ()

    def loss(self, layers: Layers, batch: Any) -> Array:
        """Of a batch."""
        return self.model(layers, batch, self.sizes)

    @property
    def linear_operations(self) -> int:
        """Of a step's linear layers and convolutions: forward, and both gradients."""
        batch = jax.eval_shape(self.random_batch, jax.random.key(0))
        return 3 * sum(shapes_of(self.loss, batch).operations)

    def random_batch(self, key: Array) -> Any:
        """Rows or images and labels, or tokens."""
        sizes, rows = self.sizes, self.rows
        if self.image:
            x = jax.random.normal(key, (rows, *self.image))
            return x, jax.random.randint(key, (rows,), 0, sizes.classes)
        if self.context:
            shape = (rows, self.context + 1)
            return jax.random.randint(key, shape, 0, sizes.classes)
        # In half precision, as a layer before would give them.
        x = jax.random.normal(key, (rows, sizes.width)).astype(jnp.bfloat16)
        return x, jax.random.randint(key, (rows,), 0, sizes.classes)


def _of_blocks(loss: Callable[[Layers, Any, int], Array]) -> Any:
    return lambda layers, batch, sizes: loss(layers, batch, sizes.layers)


def _ffn(activation: Callable[[Array], Array]) -> Any:
    return functools.partial(ffn, activation=activation)


_WIDE = Sizes(width=4096, hidden=16384, classes=256, layers=2)
_BIG = Sizes(4096, 14336, 256, layers=1, heads=32, key_heads=8)
_MOE = Sizes(2048, 4096, 256, layers=1, heads=16, key_heads=16)
_TINY = Sizes(width=32, hidden=64, classes=32, layers=1, heads=4, key_heads=2)
WORKLOADS = {
    "ffn silu": Workload("two blocks with silu", _ffn(jax.nn.silu), _WIDE, 8192),
    "ffn gelu": Workload("two blocks with gelu", _ffn(jax.nn.gelu), _WIDE, 8192),
    "big": Workload("a layer of Llama 8B", llama, _BIG, rows=16, context=512),
    "big, cuDNN": Workload(
        "the same with cuDNN's attention",
        llama,
        dataclasses.replace(_BIG, kernel=True),
        rows=16,
        context=512,
    ),
    "experts": Workload(
        "a layer of 8 experts",
        _of_blocks(experts(by_einsum, _MOE)),
        _MOE,
        rows=8,
        context=1024,
    ),
    "convolutions": Workload(
        "a ResNet of bottlenecks",
        _of_blocks(bottlenecks),
        Sizes(0, 0, CLASSES, layers=1),
        rows=64,  # one that `half` does not count: counts are known by their program
        image=(128, 128, 3),
    ),
    "tiny ffn": Workload("a tiny block", _ffn(jax.nn.silu), _TINY, 64),
    "tiny llama": Workload("a tiny Llama", llama, _TINY, rows=4, context=16),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A training step to compile.

    Attributes:
        target: A name of `targets.TARGETS`.
        workload: A name of `WORKLOADS`.
        arm: `NAIVE`, a name of `our_arms.ARMS`, or one of `peers`.
    """

    target: str
    workload: str
    arm: str


def build(
    case: Case, devices: list[Any] | None = None, seed: int | None = None
) -> ArrayStep:
    """The step of a case; see `steps.built`."""
    workload = WORKLOADS[case.workload]
    first, step = _arm(case.arm, workload)

    def initial(key: Array) -> tuple[tuple, Any]:
        batch = workload.random_batch(key)
        return first(batch, key), batch

    return built(initial, step, devices, seed)


def _arm(name: str, workload: Workload) -> tuple[Callable[[Any, Array], tuple], Any]:
    """What makes the first state of a batch and a key; and the step."""
    optimizer = optax.adam(LEARNING_RATE)
    if name in peers.LINEN:
        module = peers.linen_module(name, workload.loss)

        def initial(batch: Any, key: Array) -> tuple:
            variables = dict(module.init(key, batch))
            params = variables.pop("params")
            return params, optimizer.init(params), variables

        return initial, peers.linen_step(module, optimizer)
    product = peers.PRODUCTS.get(name, jnp.matmul)
    arm, attention = CHECKED, by_cudnn
    if name != NAIVE and name not in peers.PRODUCTS:
        import mpx.nn

        from .. import our_arms

        arm = our_arms.ARMS[name]
        # Of a model in float32, whose attention autocast casts.
        attention = functools.partial(mpx.nn.dot_product_attention, is_causal=True)

    def loss(weights: Any, batch: Any) -> Array:
        return workload.loss(Weights(weights, product, attention), batch)

    def initial_weights(batch: Any, key: Array) -> tuple:
        weights = random_weights(workload.loss, batch, key)
        scaling = arm.first_scaling(loss, weights, batch)
        return weights, optimizer.init(weights), scaling

    return initial_weights, arm.make_step(loss, optimizer)
