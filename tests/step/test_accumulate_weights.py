"""Micro-batches: which arrays are whole, and errors of those that cannot be cut."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import mpx.nnx

NONE = mpx.NoLossScaling()
PARTS = jax.random.split(jax.random.key(0), 4)
STUDENT = jax.random.normal(PARTS[0], (16, 16)) / 4
TEACHER = {
    "embed": jax.random.normal(PARTS[1], (32, 16)),  # a table of 32 tokens
    "layers": jax.random.normal(PARTS[2], (8, 16, 16)) / 4,  # scanned
    "scale": jnp.float32(1),
}
TOKENS = jax.random.randint(PARTS[3], (64,), 0, 32)


def distill(student, teacher, tokens):
    assert tokens.shape in ((64,), (16,))
    x = teacher["embed"][tokens] * teacher["scale"]
    h, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, teacher["layers"])
    return jnp.mean((x @ student - h) ** 2)


class Distillation(eqx.Module):
    """A loss that is a method: its first argument is the object."""

    factor: float

    @mpx.autocast(weights=(1, 2))
    def of_a_module(self, student, teacher, tokens):
        return self.factor * distill(student, teacher, tokens)


class Plain:
    """The same of an object that is no tree."""

    @mpx.autocast(weights=(1, 2))
    def loss(self, student, teacher, tokens):
        return distill(student, teacher, tokens)


def last(tokens, student, *, teacher):
    return distill(student, teacher, tokens)


@functools.wraps(distill)
def decorated(*args, **kwargs):
    return MARKED(*args, **kwargs)


decorated.__wrapped__ = MARKED = mpx.autocast(distill, weights=(0, 1))
BOUND = mpx.autocast(lambda t, s, x: distill(s, t, x), weights=(0, 1))
BY_NAME = mpx.autocast(last, weights=("student", "teacher"))
FORMS = {
    "positions": (MARKED, (STUDENT, TEACHER, TOKENS), {}),
    "jit": (jax.jit(MARKED), (STUDENT, TEACHER, TOKENS), {}),
    "filter_jit": (eqx.filter_jit(MARKED), (STUDENT, TEACHER, TOKENS), {}),
    "checkpoint": (jax.checkpoint(MARKED), (STUDENT, TEACHER, TOKENS), {}),
    "by_keyword": (MARKED, (STUDENT,), {"teacher": TEACHER, "tokens": TOKENS}),
    "decorator": (decorated, (STUDENT, TEACHER, TOKENS), {}),
    "method": (Plain().loss, (STUDENT, TEACHER, TOKENS), {}),
    "method_jit": (jax.jit(Plain().loss), (STUDENT, TEACHER, TOKENS), {}),
    "module": (Distillation(1.0).of_a_module, (STUDENT, TEACHER, TOKENS), {}),
    "names": (functools.partial(BY_NAME, teacher=TEACHER), (TOKENS, STUDENT), {}),
    "name": (BY_NAME, (TOKENS, STUDENT), {"teacher": TEACHER}),
    "partial": (functools.partial(BOUND, TEACHER), (STUDENT, TOKENS), {}),
}


@pytest.mark.parametrize("form", FORMS)
def test_declared_weights_are_whole(form):
    """A quarter of a frozen teacher was given to each micro-batch, in silence."""
    func, args, kwargs = FORMS[form]
    position = next(i for i, x in enumerate(args) if x is STUDENT)
    once, four = (
        mpx.value_and_grad(func, NONE, position, accumulate=n)(*args, **kwargs)
        for n in (1, 4)
    )
    assert np.isclose(once.value, four.value, rtol=3e-3)
    error = jnp.linalg.norm(four.grads - once.grads) / jnp.linalg.norm(once.grads)
    assert error < 0.01


def once_and_four(grad, func, *args, **kwargs):
    """Gradients of a batch, and of the same in four micro-batches."""
    return [grad(func, NONE, accumulate=n)(*args, **kwargs).grads for n in (1, 4)]


@pytest.mark.parametrize("mixed", [False, True])
def test_declared_weights_are_whole_where_leaves_are_filtered(mixed):
    grad = functools.partial(mpx.filter_grad, use_mixed_precision=mixed)
    once, four = once_and_four(grad, MARKED, STUDENT, TEACHER, TOKENS)
    assert np.allclose(once, four, atol=2e-3 if mixed else 1e-6)


def test_declared_weights_are_whole_on_each_device():
    mesh = jax.make_mesh((2,), ("data",), (jax.sharding.AxisType.Auto,))
    how = mpx.Accumulation(4, axes="data")
    with jax.set_mesh(mesh):
        four = mpx.grad(MARKED, NONE, accumulate=how)(STUDENT, TEACHER, TOKENS)
    once = mpx.grad(MARKED, NONE)(STUDENT, TEACHER, TOKENS)
    assert np.allclose(once.grads, four.grads, atol=2e-3)


def test_declared_weights_are_whole_in_nnx():
    student = nnx.Linear(16, 16, use_bias=False, rngs=nnx.Rngs(0))

    def loss(student, tokens, teacher):
        return distill(student.kernel[...], teacher, tokens)

    func = mpx.autocast(loss, weights=(0, 2))
    for args, kwargs in [((TOKENS, TEACHER), {}), ((TOKENS,), {"teacher": TEACHER})]:
        once, four = once_and_four(mpx.nnx.grad, func, student, *args, **kwargs)
        assert np.allclose(once["kernel"][...], four["kernel"][...], atol=2e-3)


def test_a_frozen_base_in_8_bits_is_whole():
    """As in LoRA: matmuls read the stored values in each micro-batch."""

    def loss(adapter, base, x):
        h = jnp.tanh(x @ base["a"] + (x @ adapter["down"]) @ adapter["up"])
        return jnp.mean((h @ base["b"]) ** 2)

    keys = jax.random.split(jax.random.key(1), 5)
    base = {"a": jax.random.normal(keys[0], (32, 64)) / 6}
    base["b"] = jax.random.normal(keys[1], (64, 16)) / 8
    adapter = {"down": jax.random.normal(keys[2], (32, 2)) / 6}
    adapter["up"] = jax.random.normal(keys[3], (2, 64))
    x = jax.random.normal(keys[4], (32, 32))
    recipe = mpx.Float8CurrentScaling()
    func = mpx.autocast(loss, weights=(0, 1), recipe=recipe)
    stored = mpx.quantization.quantize_weights(base)
    once, four = once_and_four(mpx.filter_grad, func, adapter, stored, x)
    for a, b in zip(jax.tree.leaves(once), jax.tree.leaves(four), strict=True):
        assert jnp.linalg.norm(a - b) < 0.1 * jnp.linalg.norm(a)


def test_a_weight_may_have_a_first_axis_that_nothing_divides():
    func = mpx.autocast(lambda w, table, x: jnp.sum(x @ w + table[:1]), weights=(0, 1))
    grads = mpx.grad(func, NONE, accumulate=4)(
        jnp.ones((3, 3)), jnp.ones((5, 3)), jnp.ones((8, 3))
    ).grads
    assert np.allclose(grads, 2.0)


def test_the_default_of_weights_may_be_the_batch():
    """Of positions only those count that the user passed."""

    def loss(x, w):
        assert x.shape == (2, 3)
        return jnp.sum(x @ w)

    grads = mpx.grad(mpx.autocast(loss), NONE, 1, accumulate=4)
    assert np.allclose(grads(jnp.ones((8, 3)), jnp.ones(3)).grads, 2.0)


def test_first_axes_that_differ_are_refused():
    """Without `weights=` a teacher is one more array of rows."""
    call = mpx.grad(mpx.autocast(distill), NONE, accumulate=4)
    with pytest.raises(ValueError, match="equally long") as found:
        call(STUDENT, TEACHER, TOKENS)
    text = str(found.value)
    for part in (
        "`accumulate=4`",
        "float32[32,16] at `args[1]['embed']`",
        "float32[8,16,16] at `args[1]['layers']`",
        "int32[64] at `args[2]`",
        "whole=",
        "weights=(0, 1)",
    ):
        assert part in text
    assert "['scale']" not in text


def test_many_paths_are_counted():
    arrays = [jnp.ones((8, 2)) for _ in range(6)]
    with pytest.raises(ValueError, match=r"`args\[1\]\[2\]` and 3 more; .*\[4\] at"):
        mpx.grad(lambda w, xs, y: w, NONE, accumulate=2)(1.0, arrays, jnp.ones(4))


def test_keys_scalars_state_and_whole_have_no_first_axis():
    """What is not cut may be of any length."""

    class Counter(eqx.Module):
        index: eqx.nn.StateIndex = eqx.nn.StateIndex(jnp.zeros(3))

    model, state = eqx.nn.make_with_state(Counter)()

    def loss(w, state, x, keys, raw, number, table):
        assert (x.shape, table.shape, raw.shape) == ((2,), (5,), (2,))
        total = jnp.sum(x.astype(jnp.float32)).astype(w.dtype)
        return w * total * number, state

    how = mpx.Accumulation(4, whole=lambda path, leaf: path == "args[6]")
    key = jax.random.key(0)
    args = state, jnp.ones(8), key, jax.random.PRNGKey(0), 2.0, jnp.ones(5)
    fun = mpx.autocast(loss)
    result = mpx.grad(fun, NONE, has_aux=True, accumulate=how)(1.0, *args)
    assert float(result.grads) == 4.0


@pytest.mark.parametrize("axes", [(), "data"])
def test_an_error_in_a_micro_batch_says_so(axes):
    mask = jnp.ones((8, 3))  # closed over: nobody can split it

    loss = mpx.autocast(lambda w, x: jnp.sum(x * mask) * jnp.sum(w))
    gradient = mpx.grad(loss, NONE, accumulate=mpx.Accumulation(4, axes=axes))
    match = r"micro-batch of `accumulate=4`.*float32\[2,3\] at `args\[1\]`.*whole="
    mesh = jax.make_mesh((2,), ("data",), (jax.sharding.AxisType.Auto,))
    with jax.set_mesh(mesh), pytest.raises(TypeError, match=match):
        gradient(jnp.ones(3), jnp.ones((8, 3)))
