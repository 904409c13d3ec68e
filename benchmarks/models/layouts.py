"""One transformer in many layouts: how weights and examples lie on several devices.

The model is plain JAX. A layout says how the weights lie, and how they come together
where they are used: by the compiler, by a constraint, by `reshard`, by `all_gather` in
`jax.shard_map`, at its entry, or layer by layer in a scan.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

from ..steps import LEARNING_RATE, ArrayStep, is_array
from .arranged import cross_entropy

WIDTH, HIDDEN, HEADS, BLOCKS = 768, 3072, 12, 2
CONTEXT, BYTES, BATCH = 64, 256, 64
DEVICES = 4
MICRO_BATCHES = 4


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a model lies on the devices.

    Attributes:
        title: In words.
        is_divided: Whether weights lie in pieces, along the axis of the examples.
        gathers: How weights come together: "", "constraint", "reshard", "shard_map"
            (by `all_gather` in it), "entry" (of `shard_map`).
        is_scanned: Whether the blocks are a scan.
        pins: Whether activations are pinned to the axis of the examples.
        accumulate: How many micro-batches there are.
        shares: Whether each device runs its own, and gradients are summed once.
        in_order: Whether they are summed in one order.
    """

    title: str
    is_divided: bool = True
    gathers: str = ""
    is_scanned: bool = False
    pins: bool = False
    accumulate: int = 1
    shares: bool = False
    in_order: bool = False

    @property
    def is_mapped(self) -> bool:
        """Whether the model runs in `jax.shard_map`."""
        return self.gathers in ("shard_map", "entry")

    @property
    def kind(self) -> AxisType:
        """Of the mesh's axis."""
        return AxisType.Explicit if self.gathers == "reshard" else AxisType.Auto

    def spec(self, leaf: Any) -> P:
        """How a weight lies: its first axis that can be divided."""
        if not self.is_divided:
            return P()
        for i in range(1 if self.is_scanned and leaf.ndim > 1 else 0, leaf.ndim):
            if leaf.shape[i] % DEVICES == 0:
                return P(*[None] * i, "data")
        return P()


_ONCE = f"{MICRO_BATCHES} micro-batches on each device, summed once"
_SHARED: dict[str, Any] = {"accumulate": MICRO_BATCHES * DEVICES, "shares": True}
LAYOUTS = {
    "data parallel": Layout("data parallel", is_divided=False),
    "data parallel, shard_map": Layout(
        "data parallel, `shard_map`", is_divided=False, gathers="shard_map"
    ),
    "data parallel, micro-batches": Layout(
        f"data parallel, {MICRO_BATCHES} micro-batches",
        is_divided=False,
        accumulate=MICRO_BATCHES,
    ),
    "data parallel, shared": Layout(
        f"data parallel, {_ONCE}", is_divided=False, **_SHARED
    ),
    "data parallel, in order": Layout(
        "the same, summed in order", is_divided=False, in_order=True, **_SHARED
    ),
    "fsdp, shared": Layout(f"FSDP, {_ONCE}", **_SHARED),
    "fsdp, compiler": Layout("FSDP by the compiler, activations pinned", pins=True),
    "fsdp, constraint": Layout(
        "FSDP, weights constrained at use", gathers="constraint"
    ),
    "fsdp, reshard": Layout("FSDP, explicit axes, `reshard`", gathers="reshard"),
    "fsdp, shard_map": Layout("FSDP, `all_gather` in `shard_map`", gathers="shard_map"),
    "fsdp, entry": Layout("FSDP, `P()` into `shard_map`", gathers="entry"),
    "fsdp, scan": Layout(
        "FSDP, constrained layer by layer in a scan",
        gathers="constraint",
        is_scanned=True,
    ),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A training step to compile.

    Attributes:
        target: A name of `targets.TARGETS`.
        layout: A name of `LAYOUTS`.
        arm: A name of `ARMS` in `counts.wire`.
        devices: How many there are.
    """

    target: str
    layout: str
    arm: str
    devices: int = DEVICES


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How large the model is; tests take a smaller one."""

    width: int = WIDTH
    hidden: int = HIDDEN
    heads: int = HEADS
    blocks: int = BLOCKS
    context: int = CONTEXT
    batch: int = BATCH


def initial(sizes: Sizes, layout: Layout, key: Any) -> Any:
    """Weights: of every block, or stacked for a scan."""
    width, hidden = sizes.width, sizes.hidden
    shapes = {
        "qkv": (width, 3 * width),
        "out": (width, width),
        "up": (width, hidden),
        "down": (hidden, width),
    }
    blocks = []
    for number in range(sizes.blocks):
        keys = jax.random.split(jax.random.fold_in(key, number), len(shapes))
        block = {
            name: jax.random.normal(k, shape) * shape[0] ** -0.5
            for k, (name, shape) in zip(keys, shapes.items(), strict=True)
        }
        biases = {"b_up": jnp.zeros(hidden), "b_down": jnp.zeros(width)}
        norms = {"norm_1": jnp.ones(width), "norm_2": jnp.ones(width)}
        blocks.append({**block, **biases, **norms})
    if layout.is_scanned:
        blocks = jax.tree.map(lambda *leaves: jnp.stack(leaves), *blocks)
    tables = jax.random.normal(key, (2, BYTES, width))
    head = tables[1].T * width**-0.5
    return {"embed": tables[0], "blocks": blocks, "norm": jnp.ones(width), "head": head}


def loss_in(layout: Layout, mesh: Mesh, sizes: Sizes, specs: Any) -> Callable[..., Any]:
    """The mean loss of a batch of texts, in a layout."""
    pin = functools.partial(_pinned, NamedSharding(mesh, P("data")), layout.pins)

    def local(params: Any, texts: Any) -> Any:
        table = _gathered(params["embed"], specs["embed"], layout, mesh)
        x = pin(_looked_up(table, texts[:, :-1], layout, mesh))

        def apply(x: Any, weights: Any, weight_specs: Any) -> Any:
            gather = functools.partial(_gathered, layout=layout, mesh=mesh)
            whole = jax.tree.map(gather, weights, weight_specs)
            return pin(_block(whole, x, sizes.heads))

        blocks, block_specs = params["blocks"], specs["blocks"]
        if layout.is_scanned:
            rest = jax.tree.map(lambda spec: P(*spec[1:]), block_specs)
            x, _ = jax.lax.scan(lambda x, w: (apply(x, w, rest), None), x, blocks)
        else:
            for weights, weight_specs in zip(blocks, block_specs, strict=True):
                x = apply(x, weights, weight_specs)
        scale = _gathered(params["norm"], specs["norm"], layout, mesh)
        head = _gathered(params["head"], specs["head"], layout, mesh)
        logits = ((_norm(x) * scale) @ head).astype(jnp.float32)
        return cross_entropy(logits, texts[:, 1:])

    if not layout.is_mapped:
        return local

    def mapped(params: Any, texts: Any) -> Any:
        def mean(params: Any, texts: Any) -> Any:
            return jax.lax.pmean(local(params, texts), "data")

        in_specs = (P() if layout.gathers == "entry" else specs, P("data"))
        return jax.shard_map(mean, mesh=mesh, in_specs=in_specs, out_specs=P())(
            params, texts
        )

    return mapped


def _looked_up(table: Any, tokens: Any, layout: Layout, mesh: Mesh) -> Any:
    if layout.kind is AxisType.Explicit:
        return table.at[tokens].get(out_sharding=NamedSharding(mesh, P("data")))
    return table[tokens]


def _pinned(sharding: Any, pins: bool, x: Any) -> Any:
    return jax.lax.with_sharding_constraint(x, sharding) if pins else x


def _gathered(leaf: Any, spec: Any, layout: Layout, mesh: Mesh) -> Any:
    """A whole weight."""
    if "data" not in spec or layout.gathers in ("", "entry"):
        return leaf
    if layout.gathers == "reshard":
        return jax.sharding.reshard(leaf, NamedSharding(mesh, P()))
    if layout.gathers == "shard_map":
        return jax.lax.all_gather(leaf, "data", axis=spec.index("data"), tiled=True)
    return jax.lax.with_sharding_constraint(leaf, NamedSharding(mesh, P()))


def _norm(x: Any) -> Any:
    return (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5)


def _block(w: Any, x: Any, heads: int) -> Any:
    batch, length, width = x.shape
    qkv = (_norm(x) * w["norm_1"]) @ w["qkv"]
    q, k, v = (
        part.reshape(batch, length, heads, width // heads)
        for part in jnp.split(qkv, 3, axis=-1)
    )
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * (width // heads) ** -0.5
    y = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)
    x = x + y.reshape(batch, length, width) @ w["out"]
    y = jax.nn.gelu((_norm(x) * w["norm_2"]) @ w["up"] + w["b_up"])
    return x + y @ w["down"] + w["b_down"]


# Of a loss in a layout: what gives a first state, and a gradient.
MakeGradient = Callable[[Any, Layout], tuple[Callable[..., Any], Callable[..., Any]]]


def build(
    make: MakeGradient, layout: Layout, sizes: Sizes, devices: list[Any]
) -> ArrayStep:
    """A step of gradient descent with momentum, its arrays laid out as shapes.

    Args:
        make: `begin, gradient = make(loss, layout)`, where `begin(params, batch)`
            gives the first state and `gradient(state, params, batch)` gives `state,
            finite, grads`.
        layout: How weights lie.
        sizes: How large the model is.
        devices: The devices, which need not be here.
    """
    mesh = Mesh(np.array(devices), ("data",), axis_types=(layout.kind,))
    params = jax.eval_shape(lambda: initial(sizes, layout, jax.random.key(0)))
    specs = jax.tree.map(layout.spec, params)

    def laid(leaf: Any, spec: Any) -> Any:
        sharding = NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    params = jax.tree.map(laid, params, specs)
    shape = (sizes.batch, sizes.context + 1)
    texts = laid(jax.ShapeDtypeStruct(shape, jnp.int32), P("data"))
    loss = loss_in(layout, mesh, sizes, specs)
    optimizer = optax.sgd(LEARNING_RATE, momentum=0.9)
    begin, gradient = make(loss, layout)
    first = eqx.filter_eval_shape(begin, params, texts)
    arrays, static = eqx.partition(first, is_array)
    arrays = jax.tree.map(lambda leaf: laid(leaf, P()), arrays)
    moments = optax.tree.map_params(
        optimizer, laid, jax.eval_shape(optimizer.init, params), specs
    )

    def step(state: Any, batch: Any) -> Any:
        params, moments, arrays = state
        state, finite, grads = gradient(eqx.combine(arrays, static), params, batch)
        updates, new_moments = optimizer.update(grads, moments, params)
        new = optax.apply_updates(params, updates), new_moments
        old = params, moments
        new = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, old)
        return (*new, eqx.filter(state, eqx.is_array)), finite

    state = (params, moments, arrays)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
    out = (shardings, NamedSharding(mesh, P()))
    return ArrayStep(step, state, texts, out_shardings=out)
