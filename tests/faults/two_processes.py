"""What each of two processes does: a step with NaN in the rows of one device of one.

Run as `python -m tests.faults.two_processes INDEX ADDRESS`; prints JSON.
"""

import json
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import mpx

ROWS, WIDTH = 8, 16


def loss(weights: Any, x: Any, y: Any) -> Any:
    hidden = jax.nn.relu(x @ weights["first"])
    return jnp.mean((hidden @ weights["last"] - y) ** 2)


PRECISIONS: dict[str, Any] = {
    "float16": {"dtype": jnp.float16},
    "bfloat16": {"dtype": jnp.bfloat16},
    "delayed": {"recipe": mpx.DelayedScaling(amax_history_len=4)},
    "current": {"recipe": mpx.Float8CurrentScaling()},
}


def bits(tree: Any) -> list[bytes]:
    """What the devices of this process hold, each of them."""
    return [
        np.asarray(shard.data).tobytes()
        for leaf in jax.tree.leaves(tree)
        for shard in leaf.addressable_shards
    ]


def steps(precision: str, mesh: Any) -> dict[str, Any]:
    fsdp, whole = NamedSharding(mesh, P("fsdp")), NamedSharding(mesh, P())
    func = mpx.autocast(loss, **PRECISIONS[precision])
    optimizer = optax.adamw(1e-2)

    def weights() -> Any:
        pairs = zip(("first", "last"), jax.random.split(jax.random.key(0)), strict=True)
        return {name: jax.random.normal(key, (WIDTH, WIDTH)) / 8 for name, key in pairs}

    w = jax.jit(weights, out_shardings=fsdp)()
    opt_state = mpx.init_optimizer(optimizer, w)
    batch = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
    scaling = mpx.init_scaling(func, w, batch, batch)
    scaling = jax.jit(lambda: scaling, out_shardings=whole)()

    @jax.jit
    def step(w: Any, opt_state: Any, scaling: Any, x: Any) -> Any:
        result = mpx.value_and_grad(func, scaling)(w, x, x)
        return mpx.optimizer_step(w, optimizer, opt_state, result), result.finite

    def data(bad_row: int) -> Any:
        x = np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype(np.float32)
        if bad_row >= 0:
            x[bad_row, 0] = np.nan
        return jax.make_array_from_callback(x.shape, fsdp, lambda index: x[index])

    state, found = (w, opt_state, scaling), []
    for bad_row in (-1, ROWS - 1, 0, -1):
        before = bits(state[:2])
        state, finite = step(*state, data(bad_row))
        flags = {bool(np.asarray(shard.data)) for shard in finite.addressable_shards}
        found.append((sorted(flags), bits(state[:2]) == before))
    return {"steps": found, "skipped": int(state[2].skipped)}


def main() -> None:
    index, address = int(sys.argv[1]), sys.argv[2]
    jax.distributed.initialize(address, 2, index)
    mesh = jax.make_mesh((jax.device_count(),), ("fsdp",), (AxisType.Auto,))
    print(json.dumps({name: steps(name, mesh) for name in PRECISIONS}))


if __name__ == "__main__":
    main()
