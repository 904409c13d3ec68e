"""Exports a large model in a process of its own; prints the memory it took, in MB."""

import pathlib
import sys

import jax
import jax.numpy as jnp

import mpx


def status(key: str) -> int:
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) // 1024 for line in lines if line.startswith(key))


def forward(model, x):
    x, _ = jax.lax.scan(lambda x, w: (x @ w, None), x, model["layers"])
    for w in model["more"]:
        x = x @ w
    return x


def is_shape(x) -> bool:
    return isinstance(x, tuple)


def export(size: int, name: str) -> None:
    shapes = {"layers": (6, size, size), "more": [(size, size)] * 6}
    ones = jax.jit(lambda: jax.tree.map(jnp.ones, shapes, is_leaf=is_shape))
    model = jax.block_until_ready(ones())  # and nothing beside it
    func = mpx.autocast(forward, jnp.bfloat16, recipe=mpx.Float8CurrentScaling())
    path = pathlib.Path(sys.argv[1], name)
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # VmHWM from here on
    before = status("VmRSS")
    writes = mpx.export(func, mpx.NoLossScaling(), path, shard_bytes=10_000_000)
    writes(model, jax.ShapeDtypeStruct((8, size), jnp.float32))
    print(status("VmHWM") - before)


if __name__ == "__main__":
    export(32, "small")
    export(3072, "large")
