"""How far is a model's gradient from float32's, by its depth and residual stream?

Question: what does a residual stream in half precision cost, which is the default for
TPUs, beside one in float32 and beside the cast that many write by hand?

A block is a transformer's, causal, in a scan; *steps of 0.01* are `x + 0.01 tanh(x) w`.
The error is the norm of the difference over the norm of float32's gradient. Compiled
for a CPU, without the digits that XLA may keep where a program rounds.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from typing import Any

from ..results import Results
from ..tables import Goal, Table
from .errors import distance

NAIVE = "naive cast"
STREAMS = {"mpx, full": "full", "mpx, half": "half", "mpx, TPU's default": None}
ARMS = (NAIVE, *STREAMS)
MODELS = {"2": 2, "12": 12, "100": 100, "300": 300, "300 steps of 0.01": 300}
SEEDS = 3
WIDTH, HEADS, TOKENS, ROWS, WORDS = 128, 4, 64, 4, 256


def parameters(layers: int, seed: int) -> dict[str, Any]:
    """Weights of a model, normal, smaller where the stream is added to."""
    import jax

    keys = iter(jax.random.split(jax.random.key(seed), 6))

    def normal(rows: int, columns: int, small: float = 1.0) -> Any:
        scale = small / rows**0.5
        return scale * jax.random.normal(next(keys), (layers, rows, columns))

    last = (2 * layers) ** -0.5
    return {
        "table": 0.3 * jax.random.normal(next(keys), (WORDS, WIDTH)),
        "qkv": normal(WIDTH, 3 * WIDTH),
        "out": normal(WIDTH, WIDTH, last),
        "up": normal(WIDTH, 4 * WIDTH),
        "down": normal(4 * WIDTH, WIDTH, last),
    }


def loss_of(model: str, cast: Callable[[Any], Any]) -> Callable[..., Any]:
    """A loss of weights and words; `cast` is applied to weights."""
    import jax
    import jax.numpy as jnp

    def norm(x: Any) -> Any:
        wide = x.astype(jnp.float32)
        size = jnp.mean(wide * wide, -1, keepdims=True)
        return (wide * jax.lax.rsqrt(size + 1e-5)).astype(x.dtype)

    def block(x: Any, w: dict[str, Any]) -> Any:
        qkv = (norm(x) @ cast(w["qkv"])).reshape(ROWS, TOKENS, 3 * HEADS, -1)
        q, k, v = jnp.split(qkv, 3, 2)
        scores = jnp.einsum("bthd,bshd->bhts", q, k).astype(jnp.float32)
        causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))
        scores = jnp.where(causal, scores / q.shape[-1] ** 0.5, -1e30)
        mixed = jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores).astype(v.dtype), v)
        x = x + mixed.reshape(x.shape) @ cast(w["out"])
        return x + jax.nn.gelu(norm(x) @ cast(w["up"])) @ cast(w["down"])

    def step(x: Any, w: dict[str, Any]) -> Any:
        return x + 0.01 * (jnp.tanh(x) @ cast(w["qkv"][:, :WIDTH]))

    turn = step if "steps" in model else block

    def loss(weights: dict[str, Any], words: Any) -> Any:
        layers = {name: w for name, w in weights.items() if name != "table"}
        table = cast(weights["table"])
        x, _ = jax.lax.scan(lambda x, w: (turn(x, w), None), table[words], layers)
        logits = (norm(x) @ table.T).astype(jnp.float32)
        picked = jnp.take_along_axis(jax.nn.log_softmax(logits), words[..., None], -1)
        return -jnp.mean(picked)

    return loss


def measure(request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields one answer per model and seed; runs in a worker."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    import mpx

    for model, layers in MODELS.items():
        plain = loss_of(model, lambda w: w)
        losses = {NAIVE: loss_of(model, lambda w: w.astype(jnp.bfloat16))}
        for arm, stream in STREAMS.items():
            losses[arm] = mpx.autocast(plain, target="tpu v5e", residual_stream=stream)
        words = jax.random.randint(jax.random.key(100), (ROWS, TOKENS), 0, WORDS)
        shapes = jax.eval_shape(lambda: parameters(layers, 0)), words  # noqa: B023
        options: dict[str, Any] = {"xla_allow_excess_precision": False}
        compiled = {
            arm: jax.jit(jax.grad(loss)).lower(*shapes).compile(options)
            for arm, loss in {"exact": plain, **losses}.items()
        }
        for seed in range(SEEDS):
            weights = parameters(layers, seed)
            flat = {
                arm: np.concatenate(
                    [np.ravel(x) for x in jax.tree.leaves(run(weights, words))]
                )
                for arm, run in compiled.items()
            }
            for arm in ARMS:
                error = distance(flat[arm], flat["exact"])
                yield {
                    "run": {"arm": arm, "model": model, "seed": seed, "error": error}
                }


def errors_of(found: Results, arm: str, model: str) -> list[float]:
    """One number per seed."""
    return [r["error"] for r in found.records if (r["arm"], r["model"]) == (arm, model)]


def tables(found: Results) -> Iterator[Table]:
    """Errors by arm and depth."""
    rows = [
        [arm]
        + [
            f"{100 * statistics.fmean(errors_of(found, arm, model)):.2f}"
            for model in MODELS
        ]
        for arm in ARMS
    ]
    seeds = len({r["seed"] for r in found.records})
    yield Table(
        f"Gradient error in percent, by layers, mean over {seeds} seeds",
        ["residual stream", *MODELS],
        rows,
    )


def goals(found: Results) -> Iterator[Goal]:
    """The default for TPUs is as near to float32 as the naive cast, within a tenth."""
    for model in MODELS:
        ours, theirs = (
            statistics.fmean(errors_of(found, arm, model)) for arm in (ARMS[-1], NAIVE)
        )
        text = f"{model}: {100 * ours:.2f}%, the naive cast {100 * theirs:.2f}%"
        yield Goal(text, ours <= 1.1 * theirs)
