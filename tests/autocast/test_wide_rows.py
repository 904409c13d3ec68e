"""Sums over wide rows are given to the second computation of a cross entropy."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import mpx

from ..helpers import slow_but
from .counting import equations

ROWS, CLASSES = 4, 4096


def cross_entropy(w, x, labels):
    logits = x @ w
    losses = optax.softmax_cross_entropy_with_integer_labels(
        logits.astype(jnp.float32), labels
    )
    return jnp.mean(losses)


def smoothed(w, x, labels):
    """With more that reads the logits than a label."""
    logits = (x @ w).astype(jnp.float32)
    log = jax.nn.log_softmax(logits)
    kept = -jnp.take_along_axis(log, labels[:, None], -1).mean()
    return kept - 0.1 * log.mean() + 1e-3 * jnp.square(jax.nn.logsumexp(logits)).mean()


def given(classes=CLASSES):
    keys = jax.random.split(jax.random.key(0), 3)
    w = jax.random.normal(keys[0], (16, classes))
    x = jax.random.normal(keys[1], (ROWS, 16))
    return w, x, jax.random.randint(keys[2], (ROWS,), 0, classes)


def sums_of_exponentials(func, *args):
    program = [e for e, _ in equations(jax.make_jaxpr(jax.grad(func))(*args))]
    wide = [
        e
        for e in program
        if e.primitive.name == "exp" and e.outvars[0].aval.size >= ROWS * 4096
    ]
    read = {e.outvars[0] for e in wide}
    sums = [
        e for e in program if e.primitive.name == "reduce_sum" and e.invars[0] in read
    ]
    return len(wide), len(sums)


def test_the_sum_is_taken_once():
    # The exponentials twice, for the sum and for the derivative.
    assert sums_of_exponentials(mpx.autocast(cross_entropy), *given()) == (2, 1)


def test_what_is_one_kernel_with_its_derivative_is_computed_again_whole():
    narrow = given(classes=4095)
    jaxpr = jax.make_jaxpr(jax.grad(mpx.autocast(cross_entropy)))(*narrow)
    sums = [e for e, _ in equations(jaxpr) if e.primitive.name == "reduce_sum"]
    assert sum(e.invars[0].aval.shape == (ROWS, 4095) for e in sums) >= 2


def gradient(loss, kind, args):
    """The gradient of the weights, by way of one of JAX's transformations."""
    w, x, labels = args
    if kind == "vmap":
        rows = x[:, None], labels[:, None]
        every = jax.vmap(loss, (None, 0, 0))
        return jax.grad(lambda w: every(w, *rows).mean())(w)
    if kind == "scan":
        parts = x.reshape(2, 2, 16), labels.reshape(2, 2)

        def total(w):
            def turn(kept, part):
                return kept + loss(w, *part), None

            return lax.scan(turn, 0.0, parts)[0] / 2

        return jax.grad(total)(w)
    loss = jax.checkpoint(loss) if kind == "checkpoint" else loss
    return (jax.jit(jax.grad(loss)) if kind == "jit" else jax.grad(loss))(*args)


KINDS = ("plain", "jit", "vmap", "scan", "checkpoint")
CASES = list(zip(KINDS, itertools.cycle([smoothed, cross_entropy])))


@pytest.mark.parametrize(("kind", "loss"), slow_but([CASES[1], CASES[4]], CASES))
def test_gradients_are_right(kind, loss):
    args = given()
    ours = gradient(mpx.autocast(loss, jnp.bfloat16), kind, args)
    theirs = jax.grad(loss)(*args)
    # Logits up to 16 are rounded to eight bits; and a gradient of the logits sums to
    # zero over the classes, so one of the weights does, if the sum is theirs.
    assert jnp.linalg.norm(ours - theirs) < 0.04 * jnp.linalg.norm(theirs)
    assert jnp.all(jnp.abs(ours.sum(1)) < 0.05 * jnp.abs(theirs).sum(1))


@pytest.mark.parametrize("loss", slow_but([cross_entropy], [cross_entropy, smoothed]))
def test_second_derivatives(loss):
    """The known sum moves with what it is a sum of, once."""
    w, *rest = given()
    direction = jax.random.normal(jax.random.key(1), w.shape)

    def along(func):
        inner = jax.grad(lambda w: jnp.vdot(jax.grad(func)(w, *rest), direction))
        return inner(w)

    ours = along(mpx.autocast(loss))
    theirs = along(loss)
    error = jnp.linalg.norm(ours - theirs) / jnp.linalg.norm(theirs)
    assert error < 0.03  # what half precision leaves of it
    plain = along(mpx.autocast(loss, residuals="fast"))
    np.testing.assert_allclose(ours, plain, rtol=1e-2, atol=1e-5)


@pytest.mark.parametrize("number", [jnp.inf, jnp.nan])
def test_a_logit_that_is_not_finite(number):
    """The gradients are those of a program that keeps everything, bit for bit NaN."""
    w, x, labels = given()
    w = w.at[0, 3].set(number)
    ours = jax.grad(mpx.autocast(cross_entropy))(w, x, labels)
    theirs = jax.grad(mpx.autocast(cross_entropy, residuals="fast"))(w, x, labels)
    np.testing.assert_array_equal(jnp.isnan(ours), jnp.isnan(theirs))


def test_logits_that_are_stored_rounded_have_their_own_sum():
    """Exponentials of rounded logits would not add up to the sum of the exact ones."""

    def loss(w, x, labels):
        a, b = jnp.split(x, 2, 1)
        logits = a @ w[:8] + b @ w[8:]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return jnp.mean(losses)

    w, x, labels = given()
    w, x = w.at[0].set(300), x.at[:, 0].set(1)  # rounded to 1 or 2 in bfloat16
    ours = jax.grad(mpx.autocast(loss, jnp.bfloat16))(w, x, labels)
    # A gradient of the logits sums to zero over the classes, so one of the weights.
    assert jnp.all(jnp.abs(ours.sum(1)) < 0.02 * jnp.abs(ours).sum(1))
