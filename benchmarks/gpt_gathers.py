"""What the GPT example gathers and reduces with `--mesh fsdp=8`, compiled for 8 H100.

`python -m benchmarks.gpt_gathers`, in an environment with `jax[cuda12]` and no GPU. It
prints a row for each precision; benchmarks/NOTES.md has them.
"""

from __future__ import annotations

import collections
import os

from .counter import counter
from .tables import Table

OPERATIONS = {"all-gather": "gathered", "reduce-scatter": "reduced"}
PRECISIONS = ("float32", "bfloat16", "float16", "current", "delayed")
SIZES = {"context": 64, "width": 256, "hidden": 1024, "blocks": 2, "heads": 4}
DEVICES, ROWS = 8, 16


def counts(text: str) -> dict[str, dict[str, int]]:
    """Bytes of weights by what is done with them and by dtype, from compiled text."""
    found = {name: collections.Counter() for name in OPERATIONS.values()}
    for message in counter.messages(text, DEVICES):
        if message.kind in OPERATIONS:
            size = message.times * message.bytes
            found[OPERATIONS[message.kind]][message.dtype] += size
    return {name: dict(counter) for name, counter in found.items()}


def compiled(precision: str) -> str:
    """The training step as the compiler leaves it."""
    import jax
    import numpy as np
    from jax.sharding import NamedSharding

    from examples import gpt, runs

    config = gpt.Config(model=gpt.ModelConfig(**SIZES), batch_size=ROWS)
    here = runs.make_mesh({"fsdp": DEVICES}, jax.devices("cpu")[:DEVICES])
    there = runs.make_mesh(
        {"fsdp": DEVICES},
        counter.compile_only_devices(counter.TARGETS["h100"], DEVICES),
    )
    texts = runs.put(np.zeros((ROWS, SIZES["context"] + 1), np.uint8), here)
    with jax.set_mesh(here):
        nodes, scaling = gpt.initial_state(config, precision, texts)
        scaling = jax.device_put(scaling, runs.replicated(here))

    def moved(x: jax.Array) -> jax.ShapeDtypeStruct:
        spec = x.sharding.spec
        place = NamedSharding(there, spec)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)

    with jax.set_mesh(there):
        arrays = gpt.arrays_of(nodes)
        gpt.put_arrays(nodes, {name: moved(x) for name, x in arrays.items()})
        scaling, texts = jax.tree.map(moved, (scaling, texts))
        step = gpt.make_step(config, precision, there)
        lowered = step.lower(nodes["model"], nodes["optimizer"], scaling, texts)
        return lowered.compile().as_text()


def main() -> None:
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={DEVICES}"
    rows = []
    for precision in PRECISIONS:
        found = counts(compiled(precision))
        cells = []
        for name in OPERATIONS.values():
            by_dtype = sorted(found[name].items(), key=lambda pair: -pair[1])
            parts = ", ".join(f"{dtype} {size / 1e6:.2f}" for dtype, size in by_dtype)
            cells += [parts, f"{sum(found[name].values()) / 1e6:.2f}"]
        rows.append([precision, *cells])
    heads = ["precision", "gathered, MB", "sum", "reduced, MB", "sum"]
    title = "One step of a GPT of 1.73 million weights, 8 H100, `--mesh fsdp=8`"
    print(Table(title, heads, rows).markdown())


if __name__ == "__main__":
    main()
