"""Programs over eight devices, with named axes, and kernels of their own."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from .program import KERNEL, drawn, mean_square, near_one, program

WIDTH = 16


def mesh(kind):
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind, kind))


weights_and_batch = drawn((2, WIDTH, WIDTH), (8, WIDTH))


@program(args=weights_and_batch, loss_of=near_one)
def sharding_constraint(w, x):
    devices = mesh(AxisType.Auto)

    def place(x, *spec):
        return lax.with_sharding_constraint(x, NamedSharding(devices, P(*spec)))

    hidden = place(jax.nn.gelu(place(x, "data") @ w[0]), "data", "model")
    return place(hidden @ w[1], "data")


@program(args=weights_and_batch)
def shard_map(w, x):
    """Tensor parallel in one axis, data parallel in the other, a ring beside them."""

    @functools.partial(
        jax.shard_map,
        mesh=mesh(AxisType.Auto),
        in_specs=(P(None, "model"), P("model"), P("data")),
        out_specs=(P(), P("data"), P("data")),
    )
    def layer(up, down, x):
        y = lax.psum(jax.nn.gelu(x @ up) @ down, "model")
        ring = lax.ppermute(y, "data", [(i, (i + 1) % 4) for i in range(4)])
        loss = lax.pmean(near_one(y + 0.5 * ring), "data")
        return loss, y, lax.axis_index("data")[None]

    total, y, place = layer(w[0], w[1], x)
    return total, (y, place)


@program(context=lambda: jax.set_mesh(mesh(AxisType.Explicit)))
def explicit_mesh(key):
    """Shardings are part of the types."""
    w, x = weights_and_batch(key)
    up = jax.device_put(w[0], P(None, "model"))
    down = jax.device_put(w[1], P("model", None))
    x = jax.device_put(x, P("data", None))

    def loss(weights, x):
        hidden = jax.nn.gelu(x @ weights[0])
        y = jnp.matmul(hidden, weights[1], out_sharding=P("data", None))
        y = jax.sharding.reshard(y, P(None, None))
        return mean_square(y - 1), y

    return loss, ((up, down), x)


@program(args=weights_and_batch)
def pmean_under_vmap(w, x):
    @functools.partial(jax.vmap, in_axes=(None, 0), axis_name="batch")
    def of_one(w, x):
        y = x @ w[0]
        centered = y - lax.pmean(y, "batch")
        variance = lax.pmean(jnp.square(centered), "batch")
        y = centered * lax.rsqrt(variance + 1e-5) @ w[1]
        total = lax.psum(y, "batch")
        rows = lax.all_gather(y, "batch")
        top = lax.pmax(lax.stop_gradient(y), "batch")
        return y, jax.nn.relu(y - top / 2) + total / len(rows)

    y, pooled = of_one(w, x)
    return near_one(y) + mean_square(pooled), (y, pooled)


def multiply_kernel(x_ref, w_ref, y_ref):
    y_ref[...] = jnp.dot(x_ref[...], w_ref[...])


@jax.custom_vjp
def pallas_matmul(x, w):
    shape = jax.ShapeDtypeStruct((x.shape[0], w.shape[1]), jnp.float32)
    return pl.pallas_call(multiply_kernel, out_shape=shape, interpret=True)(x, w)


pallas_matmul.defvjp(
    lambda x, w: (pallas_matmul(x, w), (x, w)),
    lambda saved, g: (pallas_matmul(g, saved[1].T), pallas_matmul(saved[0].T, g)),
)


@program(KERNEL, args=weights_and_batch, loss_of=near_one)
def pallas(w, x):
    return pallas_matmul(jax.nn.gelu(x @ w[0]), w[1])
