"""Stacks of weights that a program cuts by constants are cast once, before it does."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import mpx

from ..helpers import slow_but
from .counting import named, read_by

LAYERS, WIDTH = 4, 16
X = np.random.default_rng(1).normal(size=(8, WIDTH)).astype(np.float32)
STACK = np.random.default_rng(0).normal(size=(LAYERS, WIDTH, WIDTH)) / 4
STACK = STACK.astype(np.float32)


def layer(x, w):
    return jnp.tanh(x @ w)


def by(cut, layer=layer):
    """A loop in Python over the layers that `cut` cuts out of a stack."""

    def func(stack, x):
        for i in range(LAYERS):
            x = layer(x, cut(stack, i)).astype(np.float32)
        return jnp.sum(jnp.square(x))

    return func


CUTS = {
    "index": lambda w, i: w[i],
    "negative": lambda w, i: w[i - LAYERS],
    "take": lambda w, i: jnp.take(w, i, axis=0),
    "dynamic": lambda w, i: lax.dynamic_index_in_dim(w, i, 0, keepdims=False),
    "array": lambda w, i: w[jnp.int32(i)],
    "at": lambda w, i: w.at[i].get(),
    "split": lambda w, i: jnp.split(w, LAYERS)[i][0],
    "unstack": lambda w, i: jnp.unstack(w)[i],
    "iterate": lambda w, i: list(w)[i],
    "transposed": lambda w, i: w.transpose(2, 0, 1)[:, i].T,
    "reversed": lambda w, i: w[:, :, ::-1][i],
    "merged": lambda w, i: w.reshape(LAYERS, -1)[i].reshape(WIDTH, WIDTH),
    "barrier": lambda w, i: lax.optimization_barrier(w)[i],
    "slice": lambda w, i: lax.squeeze(lax.slice_in_dim(w, i, i + 1), [0]),
    "jit": jax.jit(lambda w, i: w[i], static_argnums=1),
}
# Each use is cast: a number is read twice, none is known, or not all are read.
OTHERS = {
    "twice": lambda w, i: w[i] + w[i].T,
    "shared": lambda w, i: w[i // 2],
    "overlapping": lambda w, i: w[min(i, 2) :][0],
    "a part": lambda w, i: w[:LAYERS, : WIDTH // 2].repeat(2, axis=1)[i],
    "one": lambda w, i: w[1] if i == 1 else jnp.eye(WIDTH, dtype=np.float32),
    "traced": lambda w, i: lax.fori_loop(i, i + 1, lambda i, _: w[i], w[0]),
}


def casts_whole(func, *args, **options):
    casts = named("convert_element_type", mpx.autocast(func, **options), *args)
    return any(e.invars[0].aval.shape == STACK.shape for e in casts)


@pytest.mark.parametrize(
    ("name", "of"),
    [*((name, layer) for name in CUTS), ("index", jax.checkpoint(layer))],
)
def test_a_stack_is_cast_once_before_it_is_cut(name, of):
    func = by(CUTS[name], of)
    assert casts_whole(func, STACK, X)
    assert casts_whole(jax.checkpoint(func), STACK, X)
    assert casts_whole(func, STACK, X, dtype=jnp.float16)


@pytest.mark.parametrize("name", OTHERS)
def test_a_stack_that_is_read_otherwise_is_cast_at_each_use(name):
    assert not casts_whole(by(OTHERS[name]), STACK, X)


def test_a_stack_that_something_reads_in_float32_stays_so():
    indexed = by(CUTS["index"])
    for func in (
        lambda stack, x: indexed(stack, x) + jnp.sum(jnp.square(stack)),
        lambda stack, x: indexed(stack, x) + jnp.sum(jnp.square(stack[0])),
        lambda stack, x: (indexed(stack, x), stack[1]),
    ):
        assert not casts_whole(func, STACK, X)


def test_a_stack_of_stacks_is_cast_once_in_nested_loops():
    def func(stack, x):
        for group in (jax.tree.map(lambda a, i=i: a[i], stack) for i in range(2)):
            for i in range(2):
                w = jax.tree.map(lambda a, i=i: a[i], group)
                x = layer(x, w["w"]) @ w["v"].T
        return jnp.sum(x)

    both = STACK.reshape(2, 2, WIDTH, WIDTH)
    args = {"w": both, "v": both}, X
    found = named("convert_element_type", mpx.autocast(func), *args)
    casts = [e.invars[0].aval.shape for e in found]
    assert casts.count(both.shape) == 2
    assert (WIDTH, WIDTH) not in casts


def test_a_scan_over_groups_that_a_loop_cuts_takes_them_cast():
    def func(stack, x):
        def group(x, ws):
            return functools.reduce(layer, ws, x).astype(np.float32), None

        return jnp.sum(lax.scan(group, x, stack)[0])

    both = STACK.reshape(2, 2, WIDTH, WIDTH)
    (scan,) = named("scan", mpx.autocast(func, target="h100"), both, X)
    assert scan.invars[-1].aval.dtype == jnp.bfloat16


@pytest.mark.parametrize(
    ("name", "dtype"),
    slow_but(
        [("index", "bfloat16"), ("unstack", "float16"), ("reversed", "bfloat16")],
        zip(CUTS, itertools.cycle(["bfloat16", "float16"])),
    ),
)
def test_casting_before_the_cut_changes_no_bit(name, dtype):
    """Of the gradient in float32, either, where each layer is an argument."""

    def apart(layers, x):
        return by(lambda ws, i: CUTS[name](jnp.stack(ws), i))(layers, x)

    func = mpx.autocast(by(CUTS[name]), dtype)
    with jax.disable_jit():
        value, gradient = jax.value_and_grad(func)(STACK, X)
        expected, gradients = jax.value_and_grad(mpx.autocast(apart, dtype))(
            list(jnp.asarray(STACK)), X
        )
    assert gradient.dtype == np.float32
    np.testing.assert_array_equal(value, expected)
    np.testing.assert_array_equal(gradient, jnp.stack(gradients))


def test_gradients_of_a_slice_that_is_used_often_are_summed_in_float32():
    """256 and then 1: bfloat16 would lose the one."""

    def func(stack, x):
        return x[:1] @ stack[0] + 256 * (x[1:] @ stack[0]) + 0 * (x[:1] @ stack[1])

    stack, x = np.ones((2, 1, 1), np.float32), np.ones((2, 1), np.float32)
    gradient = jax.grad(lambda *args: mpx.autocast(func)(*args)[0, 0])(stack, x)
    np.testing.assert_array_equal(gradient.ravel(), [257, 0])


def test_gradients_of_a_cut_stack_travel_in_half_precision():
    dtypes = read_by("pad", jax.grad(mpx.autocast(by(CUTS["index"]))), STACK, X)
    assert dtypes == ["bfloat16"] * LAYERS


def test_a_recipe_quantizes_what_is_cast_before_the_cut():
    """In bfloat16; float16 would lose small weights, and large gradients."""
    recipe = mpx.Float8CurrentScaling()
    func = by(CUTS["index"])
    assert casts_whole(func, STACK, X, recipe=recipe)
    assert not casts_whole(func, STACK, X, dtype=jnp.float16, recipe=recipe)
    cast = mpx.autocast(func, recipe=recipe)
    rounded = jnp.asarray(STACK).astype(jnp.bfloat16).astype(np.float32)
    for of in (cast, jax.grad(cast)):
        np.testing.assert_array_equal(of(STACK, X), of(rounded, X))


@pytest.mark.slow
def test_slices_of_a_stack_have_its_scales_under_delayed_scaling():
    func = mpx.autocast(by(CUTS["index"]), recipe=mpx.DelayedScaling())
    scaling = mpx.init_scaling(func, STACK, X)
    result = mpx.filter_value_and_grad(func, scaling)(jnp.asarray(STACK), X)
    (amaxes,) = result.scaling.amaxes_by_weight().values()
    rounded = jnp.asarray(STACK).astype(jnp.bfloat16).astype(np.float32)
    assert amaxes[1] == np.abs(rounded).max()
