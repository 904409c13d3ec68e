"""Pipeline and experts: collectives that you write, in the dtype that you give them."""

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import mpx

n = jax.device_count()
mesh = jax.make_mesh((n,), ("i",), axis_types=(AxisType.Auto,))
parts = NamedSharding(mesh, P("i"))


@jax.jit
def pipelined(w, x):
    return mpx.value_and_grad(mpx.autocast(pipeline), mpx.NoLossScaling())(w, x)


@jax.jit
def routed(w, x):
    return mpx.value_and_grad(mpx.autocast(experts), mpx.NoLossScaling())(w, x)


def stages(w, x):  # one stage; x: (micro-batches, rows, width), the same everywhere
    stage, w = jax.lax.axis_index("i"), w[0]
    ring = [(k, (k + 1) % n) for k in range(n)]

    def tick(arrived, t):
        now = jnp.where(stage == 0, x[jnp.minimum(t, len(x) - 1)], arrived)
        now = jnp.tanh(now @ w).astype(jnp.bfloat16)
        return jax.lax.ppermute(now, "i", ring), now

    x = x.astype(jnp.bfloat16)
    start = jax.lax.pcast(jnp.zeros_like(x[0]), "i", to="varying")
    _, results = jax.lax.scan(tick, start, jnp.arange(len(x) + n - 1))
    squares = results[n - 1 :].astype(jnp.float32) ** 2
    return jax.lax.psum(jnp.where(stage == n - 1, jnp.mean(squares), 0.0), "i")


def tokens_to_experts(w, x):  # one expert; this device's tokens, 1/n for each expert
    x = x.reshape(n, -1, x.shape[-1]).astype(jnp.bfloat16)
    y = jax.nn.relu(jax.lax.all_to_all(x, "i", 0, 0) @ w[0]).astype(jnp.bfloat16)
    back = jax.lax.all_to_all(y, "i", 0, 0)
    return jax.lax.pmean(jnp.mean(back.astype(jnp.float32) ** 2), "i")


pipeline = jax.shard_map(stages, mesh=mesh, in_specs=(P("i"), P()), out_specs=P())
experts = jax.shard_map(
    tokens_to_experts, mesh=mesh, in_specs=(P("i"), P("i")), out_specs=P()
)
w = jax.device_put(jnp.stack([jnp.eye(8)] * n), parts)  # a stage or expert per device
micro = jax.random.normal(jax.random.key(2), (4, 2, 8))
tokens = jax.device_put(jax.random.normal(jax.random.key(3), (n * n, 8)), parts)
for name, result in ("pipeline", pipelined(w, micro)), ("experts", routed(w, tokens)):
    assert result.finite and result.grads.sharding.spec == P("i")  # its own each
    print(f"loss {result.value:.3f}, {name}")
expected = micro
for _ in range(n):
    expected = jnp.tanh(expected)
assert abs(pipelined(w, micro).value - jnp.mean(expected**2)) < 1e-2
