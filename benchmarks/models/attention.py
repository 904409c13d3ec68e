"""Steps whose attention is written in different ways, ready to be compiled.

A GPT of plain matrices, whose attention is a function that a case names; and attention
alone, for each thing that a call can say.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import mpx
import mpx.nn

from ..our_arms import ARMS
from ..steps import LEARNING_RATE, Arm, ArrayStep, arrays_only

WIDTH, HEADS, LAYERS, WORDS = 768, 12, 4, 256


@dataclasses.dataclass(frozen=True)
class Case:
    """A step to compile.

    Attributes:
        target: A name of `targets.TARGETS`.
        model: "gpt", or a name of `CALLS`.
        attention: A name of `ATTENTION`; of calls "mpx.nn" or "products".
        arm: The name of an arm; of calls "autocast bfloat16".
        context: The length of the sequences.
        batch: How many there are.
    """

    target: str
    model: str
    attention: str
    arm: str
    context: int
    batch: int


def build(fields: dict[str, Any], devices: list[Any] | None = None) -> ArrayStep:
    """The step of a case, with shapes for arguments; see `steps.build`."""
    case = Case(**fields)
    return _gpt(case, devices) if case.model == "gpt" else _call(case, devices)


# --- A GPT ----------------------------------------------------------------------------


def _written(query: Any, key: Any, value: Any, full: Any) -> Any:
    """Attention as one writes it, with softmax in full precision for casts by hand."""
    length = query.shape[1]
    scores = jnp.einsum("btnh,bsnh->bnts", query, key) / math.sqrt(query.shape[-1])
    mask = jnp.tril(jnp.ones((1, 1, length, length), bool))
    scores = jnp.where(mask, scores, jnp.finfo(scores.dtype).min)
    p = full(jax.nn.softmax, query.dtype)(scores)
    return jnp.einsum("bnts,bsnh->btnh", p, value)


def _through(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return lambda q, k, v, full: function(q, k, v, is_causal=True, **options)


ATTENTION = {
    "written in JAX": _written,
    "jax.nn": _through(jax.nn.dot_product_attention),
    "jax.nn, cudnn": _through(jax.nn.dot_product_attention, implementation="cudnn"),
    "mpx.nn": _through(mpx.nn.dot_product_attention),
}


class _Block(eqx.Module):
    norms: jax.Array
    mixing: jax.Array
    output: jax.Array
    wide: jax.Array
    narrow: jax.Array

    def __init__(self, key: Any) -> None:
        keys = jax.random.split(key, 4)

        def matrix(key: Any, rows: int, columns: int) -> jax.Array:
            return jax.random.normal(key, (rows, columns)) / math.sqrt(rows)

        self.norms = jnp.ones((2, WIDTH))
        self.mixing = matrix(keys[0], WIDTH, 3 * WIDTH)
        self.output = matrix(keys[1], WIDTH, WIDTH)
        self.wide = matrix(keys[2], WIDTH, 4 * WIDTH)
        self.narrow = matrix(keys[3], 4 * WIDTH, WIDTH)

    def __call__(self, x: Any, attend: Callable[..., Any], full: Any) -> Any:
        batch, length, _ = x.shape
        y = full(_norm, x.dtype)(x, self.norms[0]) @ self.mixing
        parts = jnp.split(y, 3, axis=-1)
        heads = (p.reshape(batch, length, HEADS, -1) for p in parts)
        x = x + attend(*heads, full).reshape(x.shape) @ self.output
        y = full(_norm, x.dtype)(x, self.norms[1]) @ self.wide
        return x + jax.nn.gelu(y) @ self.narrow


def _norm(x: Any, scale: Any) -> Any:
    mean = jnp.mean(x, axis=-1, keepdims=True)
    variance = jnp.var(x, axis=-1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(variance + 1e-6) * scale


class _GPT(eqx.Module):
    words: jax.Array
    places: jax.Array
    blocks: list[_Block]
    head: jax.Array

    def __init__(self, context: int, key: Any) -> None:
        keys = jax.random.split(key, LAYERS + 3)
        self.words = jax.random.normal(keys[0], (WORDS, WIDTH))
        self.places = jax.random.normal(keys[1], (context, WIDTH))
        self.blocks = [_Block(key) for key in keys[3:]]
        self.head = jax.random.normal(keys[2], (WIDTH, WORDS)) / math.sqrt(WIDTH)

    def __call__(self, texts: Any, attend: Callable[..., Any], full: Any) -> Any:
        x = self.words[texts] + self.places
        for block in self.blocks:
            x = block(x, attend, full)
        return x @ self.head


def _gpt(case: Case, devices: list[Any] | None) -> ArrayStep:
    arm: Arm = ARMS[case.arm]
    optimizer = optax.adam(LEARNING_RATE)
    attend = ATTENTION[case.attention]
    full = mpx.force_full_precision if arm.uses_mpx else lambda func, dtype: func

    def loss(model: Any, texts: Any) -> jax.Array:
        logits = model(texts[:, :-1], attend, full).astype(jnp.float32)
        found = optax.softmax_cross_entropy_with_integer_labels(logits, texts[:, 1:])
        return jnp.mean(found)

    def initial(key: Any) -> tuple[Any, Any, Any]:
        model = _GPT(case.context, key)
        params = eqx.filter(model, eqx.is_inexact_array)
        scaling = arm.first_scaling(loss, model, jnp.zeros(batch.shape, batch.dtype))
        return model, optimizer.init(params), scaling

    batch = jax.ShapeDtypeStruct((case.batch, case.context + 1), np.int32)
    state = eqx.filter_eval_shape(initial, jax.random.key(0))
    return arrays_only(arm.make_step(loss, optimizer), state, batch, devices)


# --- Attention alone ------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Call:
    """What a call of attention says.

    Attributes:
        title: The same in words.
        options: Arguments that are no arrays.
        arrays: Shapes of arrays, of "B", "T" and numbers, and their dtypes, by name.
        groups: How many heads keys and values have.
        rate: The rate of dropout.
    """

    title: str
    options: Any = ()
    arrays: Any = ()
    groups: int = HEADS
    rate: float = 0.0


_CAUSAL = (("is_causal", True),)
CALLS = {
    "plain": Call("nothing else"),
    "causal": Call("`is_causal`", _CAUSAL),
    "groups": Call("4 groups of keys and values, `is_causal`", _CAUSAL, groups=4),
    "mask": Call("a mask of keys", arrays=(("mask", ("B", 1, 1, "T"), "bool"),)),
    "bias": Call("a bias", arrays=(("bias", (1, HEADS, "T", "T"), "float32"),)),
    "lengths": Call(
        "lengths of keys, `is_causal`",
        _CAUSAL,
        (("key_value_seq_lengths", ("B",), "int32"),),
    ),
    "window": Call(
        "a window of 128, `is_causal`", (*_CAUSAL, ("local_window_size", 128))
    ),
    "dropout": Call("dropout, `is_causal`", _CAUSAL, rate=0.1),
}


def _call(case: Case, devices: list[Any] | None) -> ArrayStep:
    call, sizes = CALLS[case.model], {"B": case.batch, "T": case.context}
    implementation = {"mpx.nn": None, "products": "xla"}[case.attention]

    def struct(shape: Any, dtype: str) -> Any:
        return jax.ShapeDtypeStruct([sizes.get(n, n) for n in shape], dtype)

    size = WIDTH // HEADS
    shapes = {"query": HEADS, "key": call.groups, "value": call.groups}
    floats = {n: struct(("B", "T", h, size), "float32") for n, h in shapes.items()}
    given = {name: struct(*rest) for name, *rest in call.arrays}
    if "bias" in given:
        floats["bias"] = given.pop("bias")

    def loss(floats: Any, given: Any) -> jax.Array:
        options = dict(call.options)
        if call.rate:
            options["dropout_rate"] = call.rate
            options["dropout_key"] = jax.random.key(0)
        out = mpx.nn.dot_product_attention(
            **floats, **given, **options, implementation=implementation
        )
        return jnp.sum(out * out)

    def step(floats: Any, given: Any) -> tuple[Any, jax.Array]:
        value, grads = jax.value_and_grad(mpx.autocast(loss))(floats, given)
        return grads, value

    return arrays_only(step, (floats,), given, devices)
