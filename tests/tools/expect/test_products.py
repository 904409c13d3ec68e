"""Contracts on the products of a step: their dtypes, FLOPs, scopes and source lines."""

import functools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import mpx

from .cases import (
    BF16,
    BODY,
    DATA,
    F32,
    HALF,
    HEAD,
    WEIGHTS,
    broken,
    mesh_of_eight,
    shaped,
    train,
)


def test_products_that_are_not():
    (violation,), text = broken(train, WEIGHTS, DATA, products=HALF)
    assert violation.claim == "products"
    assert len(violation.operations) == 3
    assert sum(x.flops for x in violation.operations) == HEAD
    assert all(x.dtypes == ("float32", "float32") for x in violation.operations)
    assert all("head" in x.op_name for x in violation.operations)
    assert f"{BODY:,} of {BODY + HEAD:,}" in text
    assert "dot: float32[32,16] x float32[16,4] -> float32[32,4], 4,096 FLOPs" in text
    assert re.search(r"in `jit\(train\)/jvp\(head\)/dot_general`, at .*\.py:\d+", text)
    # Source lines are those of the user.
    cases = Path(__file__).with_name("cases.py")
    lines = cases.read_text(encoding="utf-8").splitlines()
    for operation in violation.operations:
        file, _, line = operation.source.rpartition(":")
        assert file == str(cases)
        assert 'h.astype(F32) @ w["out"]' in lines[int(line) - 1]


def test_a_share_of_the_products():
    mpx.expect(train, WEIGHTS, DATA, products=(BF16, "f32"))
    share = BODY / (BODY + HEAD)
    mpx.expect(train, WEIGHTS, DATA, products=HALF, products_share=share - 1e-6)
    broken(train, WEIGHTS, DATA, products=HALF, products_share=share + 1e-6)
    # Loops count by their trips.
    claims = {"products": "float32", "products_except": ["head", "body"]}
    (violation,), _ = broken(train, WEIGHTS, DATA, **claims)
    assert [x.times for x in violation.operations] == [3, 3, 3]
    assert sum(x.flops for x in violation.operations) == 9 * 2 * 32 * 16 * 16


@pytest.mark.parametrize(
    "scope", ["head", "train/head", "h*d", lambda x: x.flops < HEAD]
)
def test_products_except_a_scope(scope):
    mpx.expect(train, WEIGHTS, DATA, products="bfloat16", products_except=scope)


@pytest.mark.parametrize("scope", ["hea", "body", "dot_general"])
def test_scopes_are_whole_names(scope):
    broken(train, WEIGHTS, DATA, products=HALF, products_except=scope)


def test_paths_of_scopes():
    def nested(x):
        with jax.named_scope("a"), jax.named_scope("b"):
            return x @ x

    step, x = jax.jit(nested), shaped(4, 4)
    for path in ("a", "b", "a/b"):
        _, text = broken(step, x, products=HALF, products_except=path)
        assert "program contains no matmul" in text
    _, text = broken(step, x, products=HALF, products_except="b/a")
    assert "program contains no matmul" not in text


def with_derivative(f):
    wrapped = jax.custom_vjp(f)
    wrapped.defvjp(lambda x: (f(x), x), lambda x, g: (g,))
    return wrapped


CONTAINERS = {
    "jit": lambda f: lambda x: jax.jit(f)(x),
    "checkpoint": jax.checkpoint,
    "cond": lambda f: lambda x: jax.lax.cond(x[0, 0] > 0, f, lambda x: x, x),
    "switch": lambda f: lambda x: jax.lax.switch(1, [lambda x: x, f], x),
    "fori": lambda f: lambda x: jax.lax.fori_loop(0, 1, lambda _, x: f(x), x),
    "while": lambda f: lambda x: jax.lax.while_loop(lambda x: x[0, 0] > 0, f, x),
    "custom_vjp": lambda f: with_derivative(f),
    "shard_map": lambda f: jax.shard_map(
        f, mesh=mesh_of_eight(), in_specs=P(), out_specs=P(), check_vma=False
    ),
    "vmap": lambda f: lambda x: jax.vmap(f)(x[None])[0],
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_products_inside_of_everything(name):
    def product(x):
        with jax.named_scope("deep"):
            return x @ x

    step = jax.jit(CONTAINERS[name](product))
    (violation,), _ = broken(step, shaped(4, 4), products=HALF)
    assert [x.flops for x in violation.operations] == [2 * 4**3]
    assert violation.operations[0].is_within("deep")


def convolve(x, kernel, **options):
    return jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", **options)


LAST = ("NHWC", "HWIO", "NHWC")
in_groups = functools.partial(convolve, feature_group_count=4)
features_last = functools.partial(convolve, dimension_numbers=LAST)


@pytest.mark.parametrize(
    ("step", "args", "flops"),
    [
        (jnp.dot, [(4,), (4,)], 8),
        (jnp.matmul, [(5, 4, 3), (5, 3, 2)], 2 * 5 * 4 * 3 * 2),
        (convolve, [(2, 3, 8, 8), (5, 3, 3, 3)], 2 * (2 * 5 * 64) * 27),
        (in_groups, [(2, 4, 8, 8), (8, 1, 3, 3)], 2 * (2 * 8 * 64) * 9),
        (features_last, [(2, 8, 8, 3), (3, 3, 3, 5)], 2 * (2 * 5 * 64) * 27),
    ],
)
def test_flops(step, args, flops):
    (violation,), _ = broken(jax.jit(step), *(shaped(*a) for a in args), products=BF16)
    assert [x.flops for x in violation.operations] == [flops]


def test_products_in_eight_bits_in_integers_and_by_autocast():
    def products(a, b, n):
        a, b = a.astype(jnp.float8_e4m3fn), b.astype(jnp.float8_e5m2)
        return jax.lax.dot(a, b, preferred_element_type=F32), n @ n

    args = shaped(4, 4), shaped(4, 4), shaped(4, 4, dtype=jnp.int32)
    step = jax.jit(products)
    mpx.expect(step, *args, products=("float8_e4m3fn", jnp.float8_e5m2))
    (violation,), _ = broken(step, *args, products="float8_e4m3fn")
    assert violation.operations[0].dtypes == ("float8_e4m3fn", "float8_e5m2")

    # Autocast keeps its promise.
    def loss(w, x):
        with jax.named_scope("head"):
            return jnp.sum(jnp.tanh(x @ w["in"]) @ w["in"].T)

    step = jax.jit(jax.grad(mpx.autocast(loss, "bfloat16")))
    mpx.expect(step, WEIGHTS, DATA, products="bfloat16")
    broken(jax.jit(jax.grad(loss)), WEIGHTS, DATA, products="bfloat16")


def test_a_program_without_products_breaks_the_claim():
    for claim in ({"products": HALF}, {"product_calls": "__cublas*"}):
        _, text = broken(jax.jit(jnp.sin), shaped(3), **claim)
        assert "no matmul" in text
