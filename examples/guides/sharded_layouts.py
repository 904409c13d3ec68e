"""Layouts: data, FSDP, tensor and sequence parallel differ only in shardings."""

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import mpx

n = jax.device_count()
mesh = jax.make_mesh((n,), ("i",), axis_types=(AxisType.Auto,))
optimizer = optax.adamw(1e-3)


def put(x, *spec):
    return jax.device_put(x, NamedSharding(mesh, P(*spec)))


@mpx.autocast(dtype=jnp.bfloat16)
def loss(w, x):
    y = jax.nn.relu(x @ w["first"]) @ w["last"]
    # Long activations: a norm works on single tokens, so each device has some of them.
    y = jax.lax.with_sharding_constraint(y, NamedSharding(mesh, P(None, "i")))
    y = y / jnp.sqrt(jnp.mean(y**2, axis=-1, keepdims=True) + 1e-6)
    return jnp.mean((y - x) ** 2)


@jax.jit
def step(w, opt_state, scaling, x):
    result = mpx.value_and_grad(loss, scaling)(w, x)
    return *mpx.optimizer_step(w, optimizer, opt_state, result), result.value


first, last = jax.random.normal(jax.random.key(0), (2, 8 * n, 8 * n)) / 8
x = jax.random.normal(jax.random.key(1), (n, 4 * n, 8 * n))  # (batch, tokens, width)
layouts = {  # of the first weight, the last one, and the batch
    "one device": (P(), P(), P()),
    "data parallel": (P(), P(), P("i")),
    "FSDP": (P("i"), P("i"), P("i")),
    "tensor parallel": (P(None, "i"), P("i"), P()),
}
losses = []
for name, (of_first, of_last, of_batch) in layouts.items():
    w = {"first": put(first, *of_first), "last": put(last, *of_last)}
    opt_state = mpx.init_optimizer(optimizer, w)
    scaling = mpx.init_scaling(loss, w, x)
    batch = put(x, *of_batch)
    w, opt_state, scaling, value = step(w, opt_state, scaling, batch)
    losses.append(float(value))
    assert abs(losses[-1] / losses[0] - 1) < 1e-2 and int(scaling.skipped) == 0
    # A NaN on one device: no weight changes, on any.
    before = jax.device_get(w)
    bad = batch.at[-1, -1, 0].set(jnp.nan)
    w, opt_state, scaling, value = step(w, opt_state, scaling, bad)
    same = jax.tree.map(lambda a, b: bool((a == b).all()), before, jax.device_get(w))
    assert all(jax.tree.leaves(same)) and int(scaling.skipped) == 1
    print(f"loss {losses[-1]:.4f}, {name}")
