"""Whole training steps as large models are trained: remat, scan, master weights.

And steps of models of other kinds (`various`). Mean cross entropy, Adam, donated
buffers. Weights are float32, or bfloat16 with float32 masters in the optimizer's state.
Fine-tuned models have their weights in bfloat16 and adapters in float32. Only mpx
checks gradients, which is its default.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

from ..peers import eight_bits, whole_steps as peers
from ..steps import (
    FLOAT32,
    LEARNING_RATE,
    NAIVE as NAIVE_ARM,
    ArrayStep,
    built,
    to_bfloat16,
)
from . import on_tpu, roads
from .arranged import (
    ADAPTERS,
    CastWeights,
    Model,
    Order,
    Sizes,
    adapted_llama,
    gpt,
    half,
    llama,
    mlp,
)
from .various import experts, lstm, resnet, state_space
from .weights import Attention, Weights, by_cudnn, by_slices, random_weights, shapes_of

# Of data: its shape, and what its whole numbers are below; 0 for other numbers.
Part = tuple[tuple[int, ...], int]

NAIVE, FLAX, QWIX = NAIVE_ARM.name, "Flax fp8", "Qwix fp8"
PEERS = (FLAX, QWIX, *eight_bits.PRODUCTS)
# Delayed scaling of a model whose linear layers have their weights in FP8.
STORED = "delayed, FP8 weights"
Kept = Literal["float32", "masters", "frozen", "16 bits", "8 bits", "0 bits"]
# What few bits are kept beside bfloat16 weights; moments are in 8 bits then.
FEW: dict[str, Literal[16, 8, 0]] = {"16 bits": 16, "8 bits": 8, "0 bits": 0}


@dataclasses.dataclass(frozen=True)
class Whole:
    """A model and its data.

    Attributes:
        model: From sizes and the order of blocks to its loss.
        sizes: Of the model.
        order: Of its blocks.
        rows: How many examples.
        context: Tokens of each; 0 where they are vectors or images.
        image: The shape of each image; empty where there is none.
        attention: Of all arms; by default that of the arm, which needs a GPU.
        parts: Of the data, where it is none of these.
        accumulate: In how many micro-batches.
        optimizer: Of a learning rate.
    """

    model: Callable[[Sizes, Order], Model]
    sizes: Sizes
    order: Order = Order()
    rows: int = 8
    context: int = 1024
    image: tuple[int, ...] = ()
    attention: Attention | None = None
    parts: tuple[Part, ...] = ()
    accumulate: int = 1
    optimizer: Callable[[float], optax.GradientTransformation] = optax.adam

    def random_data(self, key: Array) -> Any:
        """Tokens, or rows of numbers or images with labels, or other parts."""
        rows, classes = (self.rows,), self.sizes.classes
        images = (*rows, *(self.image or (self.sizes.width,))), 0
        parts = self.parts or (images, (rows, classes))
        if self.context and not self.parts:
            return jax.random.randint(key, (*rows, self.context + 1), 0, classes)
        return tuple(
            jax.random.randint(key, shape, 0, below)
            if below
            else jax.random.normal(key, shape)
            for shape, below in parts
        )


_LLAMA = Sizes(2048, 5632, 32_000, layers=8, heads=16, kernel=True)
_GPT = Sizes(1536, 6144, 50_304, layers=12, heads=12, kernel=True)
_WIDE = Sizes(4096, 16384, 256, layers=2)
_TINY = Sizes(32, 64, 32, layers=2, heads=4)
_DOTS = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
_IN_SCAN = Order(jax.lax.scan)
_KEPT = Order(remat=False)
_SCAN_KEPT = Order(jax.lax.scan, remat=False)
_GPT_ORDER = Order(jax.lax.scan, policy=_DOTS)


# Shallower: what is counted is how each of a few layers is compiled.
_LLAMA_2, _LLAMA_4 = (dataclasses.replace(_LLAMA, layers=count) for count in (2, 4))
_EXPERTS = Sizes(1024, 2816, 32_000, layers=2, heads=16, kernel=True)
_WITH_SCORES = {
    "Llama of 2": (llama, _LLAMA_2),
    "Llama of 2, no remat": (llama, _LLAMA_2, _KEPT),
    "Llama of 4 in a scan": (llama, _LLAMA_4, _IN_SCAN),
    "GPT of 4": (gpt, dataclasses.replace(_GPT, layers=4), _GPT_ORDER),
    "experts by einsum": (on_tpu.dispatched, _EXPERTS),
    "experts by ragged_dot": (experts, _EXPERTS),
}
_STATES = Sizes(1024, 2048, 16_384, layers=2)
_VIT, _UNET = Sizes(768, 3072, 1000, 3, heads=12), Sizes(512, 0, 1000, 0, heads=8)
_FULL, _HALF = on_tpu.SCORES.values()
_OF_TPUS = {
    f"{model}, scores in {scores}": Whole(*of, attention=attention)
    for model, of in _WITH_SCORES.items()
    for scores, attention in on_tpu.SCORES.items()
} | {
    "Llama of 2, flash attention": Whole(llama, _LLAMA_2, attention=on_tpu.by_pallas),
    "ViT-B": Whole(on_tpu.vit, _VIT, _KEPT, 64, 0, (196, 768), _HALF),
    "U-Net": Whole(on_tpu.unet, _UNET, _KEPT, 16, 0, (64, 64, 4), _FULL),
    "ResNet of 224": Whole(resnet, Sizes(0, 0, 1000, 1), _KEPT, 64, 0, (224, 224, 3)),
    "state space of 2, float32 scan": Whole(on_tpu.float32_scan, _STATES, _KEPT),
    "LSTM of 1024": Whole(lstm, Sizes(1024, 0, 8192, 2), _KEPT, 64, 256),
}
_MOE = Sizes(2048, 4096, 32_000, layers=2, heads=16, kernel=True)
_SSD = Sizes(2048, 4096, 32_000, layers=2, tied=True)
_LONG = dataclasses.replace(_LLAMA, layers=1, classes=128_256, chunks=16)
_IMAGE, _PATCHES, _ENDS = ((16, 64, 64, 4), 0), ((64, 256, 16), 0), ((600_000,), 10**5)
_NODES = ((10**5, 128), 0), ((600_000, 64), 0), _ENDS, _ENDS, ((10**5,), 64)
_EMA = {"optimizer": roads.averaged}
_ROADS = {
    "Llama of 2": Whole(llama, _LLAMA_2),
    "Llama of 2, lookup": Whole(llama, dataclasses.replace(_LLAMA_2, gathers=True)),
    "Llama of 2, micro-batches": Whole(llama, _LLAMA_2, rows=16, accumulate=4),
    "long Llama": Whole(llama, _LONG, Order(), 1, 16_384, attention=roads.by_windows),
    "large experts by einsum": Whole(on_tpu.dispatched, _MOE),
    "large experts by ragged_dot": Whole(experts, _MOE),
    "large U-Net": Whole(
        *(roads.unet, Sizes(320, 0, 0, 0)),
        parts=(_IMAGE, _IMAGE, ((16,), 1000), ((16, 77, 768), 0)),
        attention=_FULL,
        **_EMA,
    ),
    "residual blocks": Whole(
        *(roads.residual_blocks, Sizes(320, 0, 0, 2)),
        parts=(_IMAGE, ((16, 1280), 0)),
        optimizer=optax.sgd,
    ),
    "DiT": Whole(
        *(roads.transformer, Sizes(1152, 4608, 1001, 2, heads=16), _KEPT),
        parts=(_PATCHES, _PATCHES, ((64,), 1000), ((64,), 1001)),
        **_EMA,
    ),
    "SSD": Whole(roads.state_space, _SSD, rows=4, context=2048),
    "large LSTM": Whole(roads.lstm, Sizes(1024, 0, 32_000, 2), rows=64, context=256),
    "graph": Whole(roads.graph, Sizes(256, 0, 64, 3), parts=_NODES),
}
_TEXTS = {"rows": 4, "context": 16}
WHOLE = {
    "Llama": Whole(llama, _LLAMA),
    "Llama, scan": Whole(llama, _LLAMA, _IN_SCAN),
    "Llama, slices": Whole(llama, _LLAMA, Order(by_slices)),
    "Llama, no remat": Whole(llama, _LLAMA, _KEPT),
    "ffn": Whole(mlp, _WIDE, _KEPT, rows=8192, context=0),
    "GPT": Whole(gpt, _GPT, _GPT_ORDER),
    "LoRA": Whole(adapted_llama, _LLAMA, optimizer=optax.adamw),
    # For half precision: small, with attention in plain JAX.
    "small Llama in a scan": Whole(
        llama, Sizes(1024, 2816, 8192, 4, heads=16), _SCAN_KEPT, rows=4
    ),
    "LSTM": Whole(lstm, Sizes(512, 0, 256, 2), rows=64, context=256),
    "state space": Whole(state_space, Sizes(512, 1024, 256, 4), _KEPT),
    "experts": Whole(experts, Sizes(512, 1536, 256, 2, heads=8), _KEPT),
    "ResNet": Whole(
        resnet, Sizes(0, 0, 1000, 1), rows=32, context=0, image=(128, 128, 3)
    ),
    **_OF_TPUS,
    **_ROADS,
    "tiny Llama": Whole(llama, _TINY, **_TEXTS),
    "tiny scan": Whole(llama, _TINY, _IN_SCAN, **_TEXTS),
    "tiny slices": Whole(llama, _TINY, Order(by_slices), **_TEXTS),
    "tiny GPT": Whole(gpt, _TINY, _GPT_ORDER, **_TEXTS),
    "tiny LoRA": Whole(adapted_llama, _TINY, optimizer=optax.adamw, **_TEXTS),
    "tiny ffn": Whole(mlp, _TINY, _KEPT, rows=64, context=0),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A training step to compile.

    Attributes:
        target: A name of `targets.TARGETS`.
        whole: A name of `WHOLE`.
        weights: What is kept of them: `"float32"`, `"masters"` for bfloat16 with
            float32 masters in the optimizer's state, `"frozen"` for bfloat16 of
            which only adapters are trained, or one of `FEW`.
        arm: `NAIVE`, `FLAX`, `QWIX`, one of `peers.eight_bits`, float32, or ours.
        portable: Two blocks, with attention in plain JAX, which lower without cuDNN.
    """

    target: str
    whole: str
    weights: Kept
    arm: str
    portable: bool = False


def build(
    case: Case,
    devices: list[Any] | None = None,
    seed: int | None = None,
    whole: Whole | None = None,
) -> ArrayStep:
    """The step of a case, or of another model; see `steps.built`."""
    whole = whole or WHOLE[case.whole]
    if case.portable:
        layers = min(whole.sizes.layers, 2)
        sizes = dataclasses.replace(whole.sizes, layers=layers)
        attention = whole.attention or _FULL
        whole = dataclasses.replace(whole, sizes=sizes, attention=attention)
    model = whole.model(whole.sizes, whole.order)
    if case.arm == FLAX:
        model = _by_flax(model)
    make = _by_hand if case.arm in (NAIVE, *PEERS) else _by_mpx
    step, first = make(case, model, whole)

    def initial(key: Array) -> tuple[tuple, Any]:
        data = whole.random_data(key)
        parts = _parts(_first_weights(case, model, data, key), case.weights)
        if case.arm == STORED:
            parts = _stored(parts)
        batch = (parts.frozen, data)
        return first(parts, batch), batch

    return built(initial, step, devices, seed)


class _Parts(NamedTuple):
    """Weights, each in one of three trees; the others have None in its place."""

    trained: Any
    scales: Any
    frozen: Any


def _parts(tree: Any, kept: Kept) -> _Parts:
    def is_named(suffixes: tuple[str, ...]) -> Any:
        return jax.tree_util.tree_map_with_path(
            lambda path, _: path[-1].key.endswith(suffixes), tree
        )

    scales, rest = eqx.partition(tree, is_named(peers.SCALES))
    if kept != "frozen":
        return _Parts(rest, scales, jax.tree.map(lambda _: None, tree))
    trained, frozen = eqx.partition(rest, is_named(ADAPTERS))
    return _Parts(trained, scales, frozen)


def _first_weights(case: Case, model: Model, data: Any, key: Array) -> Any:
    """Random weights; matrices in bfloat16, but where they or all are in float32."""
    weights, shapes = random_weights(model, data, key), shapes_of(model, data).tree
    if case.weights == "float32" or case.arm == FLOAT32.name:
        return weights

    def kept(path: Any, weight: Array, shape: Any) -> Array:
        is_adapter = path[-1].key.endswith(ADAPTERS)
        return (
            weight.astype(jnp.bfloat16) if shape.fan_in and not is_adapter else weight
        )

    return jax.tree_util.tree_map_with_path(kept, weights, shapes)


def _stored(parts: _Parts) -> _Parts:
    """Weights of linear layers in FP8; adapters stay as they are."""
    import mpx

    def is_linear(path: str, leaf: Any) -> bool:
        return "block" in path and leaf.ndim > 1

    if jax.tree.leaves(parts.frozen):
        frozen = mpx.quantization.quantize_weights(parts.frozen, where=is_linear)
        return parts._replace(frozen=frozen)
    return parts._replace(
        trained=mpx.quantization.quantize_weights(parts.trained, where=is_linear)
    )


# --- By mpx ---------------------------------------------------------------------------


def _by_mpx(case: Case, model: Model, whole: Whole) -> tuple[Any, Any]:
    """The step, and what makes its first state of weights and a batch."""
    import mpx.nn

    from .. import our_arms

    recipes = our_arms.RECIPES | our_arms.BY_KERNEL
    name = "delayed" if case.arm == STORED else case.arm
    options = {"recipe": recipes[name]} if name in recipes else {}
    # The frozen weights are in the second argument.
    options |= {"weights": (0, 1)} if case.weights == "frozen" else {}
    arm = our_arms.ARMS.get(case.arm) if case.arm.startswith("autocast") else None
    arm = arm or our_arms.ON_TPU.get(case.arm)
    options |= {"residual_stream": "half", "accumulate": whole.accumulate}
    arm = arm or our_arms.autocast_arm(case.arm, **options)
    optimizer = whole.optimizer(LEARNING_RATE)
    if case.weights == "masters" and case.arm != FLOAT32.name:
        optimizer = mpx.master_weights(optimizer)
    elif case.weights in FEW:
        bits = FEW[case.weights]
        optimizer = mpx.master_weights(mpx.compress_state(optimizer), bits=bits)

    def loss(trained: Any, batch: Any) -> Array:
        frozen, data = batch
        tree = eqx.combine(trained, frozen)
        kernel = whole.attention or mpx.nn.dot_product_attention
        return model(Weights(tree, attention=kernel), data)

    def first(parts: _Parts, batch: Any) -> tuple:
        scaling = arm.first_scaling(loss, parts.trained, batch)
        return parts.trained, optimizer.init(parts.trained), scaling

    return arm.make_step(loss, optimizer), first


# --- By hand, by Flax and by Qwix -----------------------------------------------------


def _by_flax(model: Model) -> Model:
    return lambda layers, data: model(peers.ByFlax(layers), data)


def _by_hand(case: Case, model: Model, whole: Whole) -> tuple[Any, Any]:
    """The step, and what makes its first state of weights and a batch."""
    product = {QWIX: peers.by_qwix, **eight_bits.PRODUCTS}.get(case.arm, jnp.matmul)
    optimizer = whole.optimizer(LEARNING_RATE)
    update = _update_masters if case.weights == "masters" else _update

    def loss(trained: Any, scales: Any, batch: Any) -> Array:
        frozen, data = batch
        tree = eqx.combine(trained, scales, frozen)
        layers = CastWeights(tree, product, whole.attention or by_cudnn)
        return model(layers, jax.tree.map(to_bfloat16, data))

    def step(trained: Any, opt_state: Any, scales: Any, batch: Any) -> tuple:
        grad = jax.value_and_grad(loss, argnums=(0, 1))
        if whole.accumulate > 1:
            grad = _in_parts(grad, whole.accumulate)
        # The scales of Flax come as the gradients of themselves.
        value, (grads, scales) = grad(trained, scales, batch)
        trained, opt_state = update(optimizer, trained, opt_state, grads)
        return trained, opt_state, scales, value

    def first(parts: _Parts, batch: Any) -> tuple:
        del batch
        opt_state = optimizer.init(parts.trained)
        if case.weights == "masters":
            masters = jax.tree.map(_to_float32, parts.trained)
            opt_state = optimizer.init(masters), masters
        return parts.trained, opt_state, parts.scales

    return step, first


def _in_parts(grad: Callable[..., Any], count: int) -> Callable[..., Any]:
    """The same in micro-batches: matrices are cast once, and sums are in float32."""

    def summed(trained: Any, scales: Any, batch: Any) -> Any:
        cast = jax.tree.map(lambda leaf: half(leaf, axes=2), trained)
        each = jax.tree.map(lambda x: x.reshape(count, -1, *x.shape[1:]), batch)

        def turn(total: Any, part: Any) -> tuple[Any, None]:
            found = jax.tree.map(_to_float32, grad(cast, scales, part))
            return jax.tree.map(jnp.add, total, found), None

        of = 0.0, (trained, scales)
        zeros = jax.tree.map(lambda one: jnp.zeros(jnp.shape(one)), of)
        total, _ = jax.lax.scan(turn, zeros, each)
        return jax.tree.map(lambda x: x / count, total)

    return summed


def _to_float32(leaf: Array) -> Array:
    return leaf.astype(jnp.float32)


def _update(
    optimizer: optax.GradientTransformation, weights: Any, opt_state: Any, grads: Any
) -> tuple[Any, Any]:
    """Weights and optimizer state after a step."""
    updates, opt_state = optimizer.update(grads, opt_state, weights)
    return optax.apply_updates(weights, updates), opt_state


def _update_masters(
    optimizer: optax.GradientTransformation, weights: Any, opt_state: Any, grads: Any
) -> tuple[Any, Any]:
    """The same; the state has the masters, which the weights are rounded from."""
    opt_state, masters = opt_state
    grads = jax.tree.map(_to_float32, grads)
    masters, opt_state = _update(optimizer, masters, opt_state, grads)
    weights = jax.tree.map(lambda new, old: new.astype(old.dtype), masters, weights)
    return weights, (opt_state, masters)
