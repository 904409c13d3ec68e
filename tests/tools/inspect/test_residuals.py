"""Bytes that autodiff keeps, by hand."""

import jax
import jax.numpy as jnp
import pytest

import mpx

W = jax.ShapeDtypeStruct((4, 4), jnp.float32)
X = jax.ShapeDtypeStruct((2, 4), jnp.float32)


def residuals(func, *args):
    return mpx.explain(func)(*args).totals.residual_bytes


def sine(w, x):
    return jnp.sum(jnp.sin(x @ w))


def layers(w, x):
    return jax.lax.scan(lambda x, _: (jnp.sin(x @ w), None), x, length=5)[0].sum()


@pytest.mark.parametrize(
    ("func", "expected"),
    [
        (sine, 32),  # the cosine; the arguments are there anyway
        (lambda w, x: jnp.sum(x @ w), 0),
        (jax.jit(sine), 32),
        (layers, 5 * (32 + 32)),  # of each layer the input and the cosine
        (jax.checkpoint(sine), 0),
        # Weights cast to half are copies, and so is the input: 32 + 16 bytes.
        (
            lambda w, x: jnp.sum(x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)),
            16,  # of which the backward pass for the weights reads the input
        ),
    ],
)
def test_a_function_and_its_gradient_keep_the_same(func, expected):
    assert residuals(func, W, X) == expected
    assert residuals(jax.grad(func), W, X) == expected
    assert residuals(jax.jit(jax.grad(func)), W, X) == expected


def test_micro_batches_do_not_add_up():
    def f(w, x):
        grads = jax.lax.map(lambda x: jax.grad(sine)(w, x), x)
        return jnp.sum(grads, axis=0)

    assert residuals(f, W, jax.ShapeDtypeStruct((7, 2, 4), jnp.float32)) == 32


def test_it_is_said_how_they_were_counted():
    assert mpx.explain(sine)(W, X).totals.residuals == (
        "saved by a gradient of the weights for its backward pass"
    )
    assert mpx.explain(jax.grad(sine))(W, X).totals.residuals == (
        "made in the forward pass and read in the backward pass"
    )


def test_a_function_that_has_no_gradient_says_why():
    def f(w, x):
        return jax.lax.while_loop(lambda x: jnp.sum(x) < 1, lambda x: x @ w, x)

    totals = mpx.explain(f)(W, X).totals
    assert totals.residual_bytes is None
    assert totals.residuals.startswith("not differentiable: ValueError: Reverse-mode")
    assert "residuals           ?  not differentiable" in str(mpx.explain(f)(W, X))
