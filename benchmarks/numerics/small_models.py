"""Two small models to train thousands of steps on a CPU, with endless data.

*GPT*: texts of a random grammar, in which each of 64 symbols has four likely
successors. *MLP*: the next byte of the Python standard library's source, of which
nothing is seen twice. In the middle of its training the text becomes lower case: half
of the letters do not occur any more, and their weights get no gradient.
"""

from __future__ import annotations

import dataclasses
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array

_WIDTH, _HIDDEN, _HEADS, _BLOCKS, _BATCH = 64, 256, 4, 2, 8
_SYMBOLS, _CONTEXT = 64, 32
_BYTES, _BEFORE, _EMBEDDED = 128, 16, 32
_KEPT = 4096  # sequences, or bytes, to validate with


@dataclasses.dataclass(frozen=True)
class Task:
    """A model and its data.

    Attributes:
        weights: Makes the initial ones from a key.
        batch: Makes a batch from a key, and the part of the training that is over.
        loss: The loss of weights and a batch.
        validation: Batches to validate with, by name.
    """

    weights: Callable[[Array], Any]
    batch: Callable[[Array, Array], Any]
    loss: Callable[[Any, Any], Array]
    validation: dict[str, Any]


def gpt() -> Task:
    """A GPT and the grammar."""
    random = np.random.default_rng(0)
    logits = random.normal(size=(_SYMBOLS, _SYMBOLS))
    for row in logits:
        row[random.choice(_SYMBOLS, 4, replace=False)] += 4
    logits = jnp.asarray(logits, jnp.float32)

    def draw(key: Array, count: int) -> Array:
        first, rest = jax.random.split(key)
        start = jax.random.randint(first, (count,), 0, _SYMBOLS)

        def follow(symbol: Array, key: Array) -> tuple[Array, Array]:
            return jax.random.categorical(key, logits[symbol]), symbol

        _, symbols = jax.lax.scan(follow, start, jax.random.split(rest, _CONTEXT + 1))
        return symbols.T

    validation = {"": draw(jax.random.key(12345), _KEPT // _CONTEXT)}
    return Task(_gpt_weights, lambda key, _: draw(key, _BATCH), _gpt_loss, validation)


def _gpt_weights(key: Array) -> dict[str, Any]:
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
    return {
        "blocks": blocks,
        "in": dense(_SYMBOLS, _WIDTH),
        "places": dense(_CONTEXT, _WIDTH),
        "out": dense(_WIDTH, _SYMBOLS) / 2,
    }


def _gpt_loss(weights: dict[str, Any], batch: Array) -> Array:
    x = weights["in"][batch[:, :-1]] + weights["places"]
    for block in weights["blocks"]:
        x = _block(block, x)
    logits, labels = x @ weights["out"], batch[:, 1:]
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def _block(block: dict[str, Array], x: Array) -> Array:
    def norm(x: Array, gain: Array) -> Array:
        return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * gain

    shape = (*x.shape[:2], _HEADS, _WIDTH // _HEADS)
    parts = jnp.split(norm(x, block["norms"][0]) @ block["qkv"], 3, axis=-1)
    q, k, v = (part.reshape(shape) for part in parts)
    mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    x = x + mixed.reshape(x.shape) @ block["out"]
    return x + jax.nn.gelu(norm(x, block["norms"][1]) @ block["up"]) @ block["down"]


def mlp() -> Task:
    """An MLP on the bytes before, and a text that becomes lower case."""
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = np.frombuffer(b"".join(p.read_bytes() for p in paths), np.uint8)
    text = text[text < _BYTES]
    is_upper = (text >= ord("A")) & (text <= ord("Z"))
    cases = jnp.asarray(np.stack([text, np.where(is_upper, text + 32, text)]))
    end = len(text) * 9 // 10

    def at(case: Array | int, starts: Array) -> tuple[Array, Array]:
        rows = cases[case, starts[:, None] + jnp.arange(_BEFORE + 1)]
        return rows[:, :-1].astype(jnp.int32), rows[:, -1].astype(jnp.int32)

    def batch(key: Array, done: Array) -> tuple[Array, Array]:
        starts = jax.random.randint(key, (8 * _CONTEXT,), 0, end)
        return at((done >= 0.5).astype(jnp.int32), starts)

    last = jnp.linspace(end + _BEFORE, len(text) - 2 * _BEFORE, _KEPT).astype(jnp.int32)
    validation = {"": at(1, last), "upper case": at(0, last)}
    return Task(_mlp_weights, batch, _mlp_loss, validation)


def _mlp_weights(key: Array) -> dict[str, Array]:
    sizes = [_BEFORE * _EMBEDDED, _HIDDEN, _HIDDEN, _BYTES]
    keys = jax.random.split(key, 4)
    made = {
        f"w{i}": jax.random.normal(keys[i], (a, b)) / a**0.5
        for i, (a, b) in enumerate(zip(sizes, sizes[1:], strict=False))
    }
    return made | {"in": jax.random.normal(keys[3], (_BYTES, _EMBEDDED))}


def _mlp_loss(weights: dict[str, Array], batch: tuple[Array, Array]) -> Array:
    x = weights["in"][batch[0]].reshape(len(batch[0]), -1)
    x = jax.nn.gelu(x @ weights["w0"])
    logits = jax.nn.gelu(x @ weights["w1"]) @ weights["w2"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch[1]).mean()


TASKS = {"GPT": gpt, "MLP": mlp}
