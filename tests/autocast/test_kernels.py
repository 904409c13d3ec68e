"""Attention by JAX's call of cuDNN, which takes half precision only."""

import collections
import itertools
import re

import jax
import jax.numpy as jnp
import pytest

import mpx

BATCH, LENGTH, HEADS, SIZE = 2, 64, 4, 64
SHAPE = jax.ShapeDtypeStruct
DATA = SHAPE((BATCH, LENGTH, HEADS * SIZE), jnp.float32)
LENGTHS = SHAPE((BATCH,), jnp.int32)
BIAS = SHAPE((1, HEADS, LENGTH, LENGTH), jnp.float32)
MASK = SHAPE((BATCH, 1, LENGTH, LENGTH), jnp.bool_)
KEY_LENGTHS = "key_value_seq_lengths"
CALLS = {
    "plain": ({}, {}, HEADS),
    "causal": ({"is_causal": True}, {}, HEADS),
    "window": ({"is_causal": True, "local_window_size": (16, 0)}, {}, HEADS),
    "residual": ({"return_residual": True}, {}, HEADS),
    "bias": ({}, {"bias": BIAS}, HEADS),
    "mask": ({}, {"mask": MASK}, HEADS),
    "grouped heads": ({}, {}, 2),
    "lengths": ({}, dict.fromkeys(("query_seq_lengths", KEY_LENGTHS), LENGTHS), HEADS),
}
RECIPES = [None, mpx.Float8CurrentScaling(), mpx.Float8CurrentScaling(fp8_dpa=True)]


def step_of(dtype, options, arrays, heads):
    def loss(weights, x, arrays):
        def projected(name):
            return (x @ weights[name]).reshape(BATCH, LENGTH, -1, SIZE).astype(dtype)

        if "bias" in arrays:
            arrays = {"bias": arrays["bias"].astype(dtype)}
        found = jax.nn.dot_product_attention(
            *map(projected, "qkv"), **arrays, **options, implementation="cudnn"
        )
        found = found if isinstance(found, tuple) else (found,)
        return sum(jnp.mean(x.astype(jnp.float32) ** 2) for x in found)

    widths = {"q": HEADS, "k": heads, "v": heads}
    whole = {n: SHAPE((HEADS * SIZE, c * SIZE), jnp.float32) for n, c in widths.items()}
    return loss, (whole, DATA, arrays)


def kernels_in(func, args):
    """The calls of cuDNN in a program lowered for CUDA, and the dtypes of operands."""
    lowered = jax.jit(func).trace(*args).lower(lowering_platforms=("cuda",))
    calls = re.findall(r"@__cudnn\$fmha(\w+)\(.*?: \((.*?)\) ->", lowered.as_text())
    names = collections.Counter(name for name, _ in calls)
    dtypes = [re.findall(r"(\w+)>", operands)[:3] for _, operands in calls]
    return names, dtypes


@pytest.fixture(autouse=True)
def has_cudnn(monkeypatch):
    module = "jax._src.cudnn.fused_attention_stablehlo"
    monkeypatch.setattr(f"{module}.check_cudnn_version", lambda: 91000)


@pytest.mark.parametrize(("call", "recipe"), [*zip(CALLS, itertools.cycle(RECIPES))])
def test_attention_in_half_precision_stays_one_kernel_each_way(call, recipe):
    loss, args = step_of(jnp.bfloat16, *CALLS[call])
    expected = kernels_in(jax.grad(loss), args)
    assert sorted(expected[0].values()) == [1, 1]
    func = mpx.autocast(loss, jnp.bfloat16, recipe=recipe)
    assert kernels_in(jax.grad(func), args) == expected


@pytest.mark.parametrize(
    ("dtype", "compute"), [(jnp.bfloat16, jnp.float16), (jnp.float16, jnp.bfloat16)]
)
def test_kernel_computes_in_the_dtype_of_its_operands(dtype, compute):
    loss, args = step_of(dtype, *CALLS["bias"])
    expected = kernels_in(jax.grad(loss), args)
    assert kernels_in(jax.grad(mpx.autocast(loss, compute)), args) == expected


def test_explain_shows_the_kernel_as_a_product_in_half_precision():
    loss, args = step_of(jnp.bfloat16, *CALLS["plain"])
    report = mpx.explain(jax.grad(mpx.autocast(loss, jnp.bfloat16)))(*args)
    found = {o.primitive: o for o in report.operations if "attention" in o.primitive}
    forward = found["dot_product_attention_fwd_wrapper"]
    assert (forward.precision, len(found)) == ("bfloat16", 2)
    assert not report.findings
