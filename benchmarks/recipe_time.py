"""The time of an MLP block under recipes, where a GPU is.

Question: how much faster are forward and backward of two large linear layers under a
recipe than under autocast in bfloat16?

All arms alternate in one process, as in `step_time`: random numbers, a warm-up, chains
of steps between two looks at the clock. Every arm has float32 weights, input in
bfloat16, `gelu` in between, and gives the gradients of weights and input: an offset
that is learned stands for what comes before the block. No optimizer runs, and no step
is checked or skipped.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator
from typing import Any

from .results import Results
from .tables import Goal, Table, ratio

BASE = "bfloat16"
ARMS = (BASE, "delayed", "current")
SHAPE = {"tokens": 16384, "width": 4096, "hidden": 16384}
CHAIN = 10
# What Transformer Engine's guide says of a model of 5B parameters on an H200.
LIMITS = {"delayed": 1.69, "current": 1.57}
DEVICE = "H200"


def measure(request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields the device, then one answer per round; runs in a worker.

    Args:
        request: `platform` (`"gpu"`; `"cpu"` in tests), `rounds`, `chain`, `shape`.
    """
    import jax

    from benchmarks.step_time import alternate, find_device, start

    device = find_device(request["platform"])
    yield {"device": None if device is None else device.device_kind}
    if device is None:
        return
    with jax.default_device(device):
        running = {arm: start(build(arm, **request["shape"])) for arm in ARMS}
        yield from alternate(running, request["rounds"], request["chain"])


def build(
    arm: str, tokens: int, width: int, hidden: int, target: str | None = None
) -> Any:
    """Forward and backward of the block, as a step without an optimizer.

    Args:
        arm: One of `ARMS`.
        tokens: Rows of the input.
        width: Features of input and output.
        hidden: Features in between.
        target: That of `mpx.autocast`; the device at hand by default.
    """
    import equinox as eqx
    import jax
    import jax.numpy as jnp

    import mpx
    from benchmarks.recipe_models import RECIPES
    from benchmarks.steps import arrays_only

    keys = jax.random.split(jax.random.key(0), 4)
    weights = {
        "offset": jnp.zeros(width),
        "in": jax.random.normal(keys[0], (width, hidden)) / width**0.5,
        "out": jax.random.normal(keys[1], (hidden, width)) / hidden**0.5,
    }
    x, gradient = (
        jax.random.normal(k, (tokens, width), jnp.bfloat16) for k in keys[2:]
    )

    def plain_loss(weights: Any, x: Any, gradient: Any) -> Any:
        x = x + weights["offset"].astype(x.dtype)
        y = jax.nn.gelu(x @ weights["in"].astype(x.dtype))
        y = y @ weights["out"].astype(x.dtype)
        return jnp.sum((y * gradient.astype(y.dtype)).astype(jnp.float32))

    options: dict[str, Any] = {}
    if arm != BASE:
        # The last product before a loss is one of the block's own here.
        rule = mpx.Rule(mpx.Precision.LOW, primitive="dot_general")
        options = {"recipe": RECIPES[arm], "rules": mpx.Rules(rule)}
    loss = mpx.autocast(plain_loss, jnp.bfloat16, target=target, **options)
    scaling: Any = mpx.NoLossScaling(skip=False)
    found = mpx.init_scaling(loss, weights, x, gradient)
    if isinstance(found, mpx.RecipeScaling):
        scaling = eqx.tree_at(lambda s: s.loss, found, scaling)

    def step(weights: Any, scaling: Any, batch: Any) -> tuple:
        result = mpx.filter_value_and_grad(loss, scaling)(weights, *batch)
        return weights, result.scaling, (result.value, result.grads)

    return arrays_only(step, (weights, scaling), (x, gradient), None)


def records(answers: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """A record per arm with all its samples, in the order of the rounds."""
    rounds = [answer["round"] for answer in answers]
    return [
        {
            "arm": column[0]["arm"],
            **SHAPE,
            "seconds": [round(sample["seconds"], 7) for sample in column],
        }
        for column in zip(*rounds, strict=True)
    ]


def speedup(found: Results, arm: str) -> float:
    """The median over the rounds of the time in bfloat16 to that of an arm."""
    seconds = {record["arm"]: record["seconds"] for record in found.records}
    pairs = zip(seconds[BASE], seconds[arm], strict=True)
    return statistics.median(base / one for base, one in pairs)


def tables(found: Results) -> list[Table]:
    """A row per arm."""
    flops = 3 * 2 * 2 * SHAPE["tokens"] * SHAPE["width"] * SHAPE["hidden"]
    rows = []
    for record in found.records:
        seconds = statistics.median(record["seconds"])
        rows.append(
            [
                record["arm"],
                f"{1000 * seconds:.2f}",
                f"{flops / seconds / 1e12:.0f}",
                ratio(speedup(found, record["arm"])),
            ]
        )
    return [
        Table(
            title="Forward and backward of an MLP block, "
            f"{SHAPE['width']} to {SHAPE['hidden']} to {SHAPE['width']}, "
            f"{SHAPE['tokens']} tokens, {found.device}",
            columns=["arm", "ms", "TFLOP/s", f"{BASE} to arm"],
            rows=rows,
            notes=[f"Medians of alternating rounds of {CHAIN} steps."],
        )
    ]


def goals(found: Results) -> list[Goal]:
    """As much faster as Transformer Engine, on the GPU that it says it of."""
    if DEVICE not in found.device:
        return []
    made = []
    for arm, limit in LIMITS.items():
        value = speedup(found, arm)
        text = f"MLP block, {BASE} to {arm}, at least {limit}: {ratio(value)}"
        made.append(Goal(text, value >= limit))
    return made
