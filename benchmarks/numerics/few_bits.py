"""What do moments in 8 bits cost a training? Twelve optimizers, a GPT and a ViT.

Question: how far is the final validation loss with `mpx.compress_state` from that of
the optimizer itself?

A pair is one seed: the same initial weights and the same batches. The ten seeds of an
arm are one program, by `jax.vmap`. The text is drawn from a random grammar, the images
are scikit-learn's digits. Computed in float32, so that moments are the only difference.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array
from optax import contrib

from ..results import Results
from ..tables import Goal, Table
from .interval import mean_interval

SEEDS, STEPS = 10, 150
LIMIT, WITHIN = 0.05, 11  # percent, and of so many optimizers
# From a factor of the learning rate, which the ViT has smaller.
OPTIMIZERS: dict[str, Callable[[float], Any]] = {
    "adam": lambda r: optax.adam(3e-3 * r),
    "adamw": lambda r: optax.adamw(3e-3 * r),
    "lamb": lambda r: optax.lamb(1e-2 * r),
    "lion": lambda r: optax.lion(1e-3 * r),
    "adafactor": lambda r: optax.adafactor(1e-2 * r),
    "rmsprop": lambda r: optax.rmsprop(1e-3 * r),
    "adabelief": lambda r: optax.adabelief(3e-3 * r),
    "nadam": lambda r: optax.nadam(3e-3 * r),
    "sgd, momentum": lambda r: optax.sgd(0.1 * r, momentum=0.9),
    "schedule_free": lambda r: contrib.schedule_free_adamw(5e-3 * r, warmup_steps=10),
    "muon": lambda r: contrib.muon(1e-2 * r),
    "adagrad": lambda r: optax.adagrad(3e-2 * r),
}
_FACTORS = {"GPT": 1.0, "ViT": 0.3}
RUNS = [(model, name) for name in OPTIMIZERS for model in _FACTORS]
_WIDTH, _HIDDEN, _HEADS, _BLOCKS, _BATCH, _VALIDATION = 64, 256, 4, 2, 8, 64
_SYMBOLS, _CONTEXT = 64, 32


TRAINS = True


def requests(options: Any, found: Results) -> list[dict[str, Any]]:
    """One, for all."""
    del options, found
    return [{"runs": RUNS, "steps": STEPS}]


def measure(request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields one answer for the seeds of an arm; runs in a worker."""
    import mpx

    for model, name in request["runs"]:
        for arm, wrap in (("float32", lambda tx: tx), ("8 bits", mpx.compress_state)):
            start = time.perf_counter()
            losses = _train(
                model, wrap(OPTIMIZERS[name](_FACTORS[model])), request["steps"]
            )
            seconds = round(time.perf_counter() - start, 1)
            run = {"model": model, "optimizer": name, "arm": arm, "seconds": seconds}
            yield {"run": {**run, "steps": request["steps"], "losses": losses}}


def _train(model: str, optimizer: Any, steps: int) -> list[float]:
    """The validation losses of all seeds."""
    batch_of, validation = _text() if model == "GPT" else _images()
    loss = functools.partial(_loss, model)

    def run(seed: Array) -> Array:
        weights = _weights(model, jax.random.key(seed))

        def step(carry: Any, number: Array) -> tuple[Any, None]:
            weights, state = carry
            batch = batch_of(jax.random.fold_in(jax.random.key(seed + 1000), number))
            grads = jax.grad(loss)(weights, batch)
            updates, state = optimizer.update(grads, state, weights)
            return (optax.apply_updates(weights, updates), state), None

        begin = weights, optimizer.init(weights)
        (weights, _), _ = jax.lax.scan(step, begin, jnp.arange(steps))
        return loss(weights, validation)

    found = jax.jit(jax.vmap(run))(jnp.arange(SEEDS))
    return [round(float(x), 6) for x in found]


def _text() -> tuple[Callable[[Array], Any], Any]:
    """Texts of a grammar in which each symbol has four likely successors."""
    random = np.random.default_rng(0)
    logits = random.normal(size=(_SYMBOLS, _SYMBOLS))
    for row in logits:
        row[random.choice(_SYMBOLS, 4, replace=False)] += 4
    logits = jnp.asarray(logits, jnp.float32)

    def draw(key: Array, count: int = _BATCH) -> Array:
        first, rest = jax.random.split(key)
        start = jax.random.randint(first, (count,), 0, _SYMBOLS)

        def follow(symbol: Array, key: Array) -> tuple[Array, Array]:
            return jax.random.categorical(key, logits[symbol]), symbol

        _, symbols = jax.lax.scan(follow, start, jax.random.split(rest, _CONTEXT + 1))
        return symbols.T

    return draw, draw(jax.random.key(12345), _VALIDATION)


def _images() -> tuple[Callable[[Array], Any], Any]:
    """Digits of 8 x 8, as sixteen patches of 2 x 2."""
    from sklearn import datasets

    images, labels = datasets.load_digits(return_X_y=True)
    patches = images.reshape(-1, 4, 2, 4, 2).transpose(0, 1, 3, 2, 4)
    x = jnp.asarray(patches.reshape(-1, 16, 4) / 16, jnp.float32)
    y = jnp.asarray(labels, jnp.int32)
    count = len(y) - 256

    def draw(key: Array) -> tuple[Array, Array]:
        places = jax.random.randint(key, (2 * _BATCH,), 0, count)
        return x[places], y[places]

    return draw, (x[count:], y[count:])


def _weights(model: str, key: Array) -> dict[str, Any]:
    keys = iter(jax.random.split(key, 32))

    def dense(rows: int, columns: int) -> Array:
        return jax.random.normal(next(keys), (rows, columns)) / rows**0.5

    blocks = [
        {
            "qkv": dense(_WIDTH, 3 * _WIDTH),
            "out": dense(_WIDTH, _WIDTH) / 2,
            "up": dense(_WIDTH, _HIDDEN),
            "down": dense(_HIDDEN, _WIDTH) / 2,
            "norms": jnp.ones((2, _WIDTH)),
        }
        for _ in range(_BLOCKS)
    ]
    inputs, outputs, places = (
        (_SYMBOLS, _SYMBOLS, _CONTEXT) if model == "GPT" else (4, 10, 16)
    )
    return {
        "blocks": blocks,
        "in": dense(inputs, _WIDTH),
        "places": dense(places, _WIDTH),
        "out": dense(_WIDTH, outputs) / 2,
    }


def _loss(model: str, weights: dict[str, Any], batch: Any) -> Array:
    if model == "GPT":
        x, labels = weights["in"][batch[:, :-1]], batch[:, 1:]
    else:
        x, labels = batch[0] @ weights["in"], batch[1]
    x = x + weights["places"]
    for block in weights["blocks"]:
        x = _block(block, x, is_causal=model == "GPT")
    x = x if model == "GPT" else x.mean(1)
    logits = x @ weights["out"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def _block(block: dict[str, Array], x: Array, is_causal: bool) -> Array:
    def norm(x: Array, gain: Array) -> Array:
        return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * gain

    shape = (*x.shape[:2], _HEADS, _WIDTH // _HEADS)
    parts = jnp.split(norm(x, block["norms"][0]) @ block["qkv"], 3, axis=-1)
    q, k, v = (part.reshape(shape) for part in parts)
    mixed = jax.nn.dot_product_attention(q, k, v, is_causal=is_causal)
    x = x + mixed.reshape(x.shape) @ block["out"]
    return x + jax.nn.gelu(norm(x, block["norms"][1]) @ block["up"]) @ block["down"]


def _gaps(found: Results) -> dict[tuple[str, str], list[float]]:
    """The loss over that in float32 in percent, for each seed."""
    losses = {
        (r["optimizer"], r["model"], r["arm"]): r["losses"] for r in found.records
    }
    return {
        (name, model): [
            100 * (new / old - 1)
            for new, old in zip(
                losses[name, model, "8 bits"],
                losses[name, model, "float32"],
                strict=True,
            )
        ]
        for model, name in RUNS
        if (name, model, "8 bits") in losses
    }


def tables(found: Results) -> Iterator[Table]:
    """A row for each optimizer."""
    rows = []
    for (name, model), gaps in _gaps(found).items():
        interval = mean_interval(gaps)
        base = [
            statistics.fmean(r["losses"])
            for r in found.records
            if (r["optimizer"], r["model"], r["arm"]) == (name, model, "float32")
        ]
        ends = f"[{interval.low:+.3f}%, {interval.high:+.3f}%]"
        rows.append([name, model, f"{base[0]:.4f}", f"{interval.mean:+.3f}%", ends])
    yield Table(
        f"Final validation loss with moments in 8 bits, {SEEDS} paired seeds of "
        f"{STEPS} steps",
        "optimizer | model | loss in float32 | gap of 8 bits | 95% interval",
        rows,
        [
            "Lower is better. Adagrad's sums are in 16 bits, rounded randomly. An "
            "interval wider than 0.05%, as of most ViTs, tells no more."
        ],
    )


def goals(found: Results) -> Iterator[Goal]:
    """The gap is within noise, or at most `LIMIT`, in both models."""
    met = dict.fromkeys(OPTIMIZERS, True)
    for (name, _), gaps in _gaps(found).items():
        interval = mean_interval(gaps)
        met[name] &= interval.low <= LIMIT
    worse = [name for name, is_met in met.items() if not is_met]
    text = f"8 bits train within noise or {LIMIT}% of float32: {len(met) - len(worse)}"
    yield Goal(
        f"{text} of {len(met)} optimizers, at least {WITHIN}; worse: {worse or 'none'}",
        len(met) - len(worse) >= WITHIN,
    )
