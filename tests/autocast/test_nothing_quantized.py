"""The error of a recipe that quantizes nothing: the reasons that the program has."""

import jax
import jax.numpy as jnp
import pytest

import mpx

CURRENT = mpx.Float8CurrentScaling()
ARGUMENTS = jnp.ones((32, 32)), jnp.ones((8, 32))


@jax.custom_vjp
def _doubled(w, x):
    return 2 * (x @ w)


_doubled.defvjp(lambda w, x: (_doubled(w, x), None), lambda _, g: (g, g))
WIDE = jnp.ones((4, 4096))


@pytest.mark.parametrize(
    ("func", "match"),
    [
        (
            lambda w, x: jnp.matmul(x, w, precision="highest"),
            r"1 of 1: the program sets the precision .*_quantized.py:\d+\): omit `prec",
        ),
        (
            lambda w, x: jnp.tanh(x @ x.T) @ x @ x.T,
            r"3 of 3: an activation matmul .*computed from the arrays of argument `0`",
        ),
        (lambda w, x: x[0] @ w, "1 of 1: a matmul with a vector .*put `jax.vmap`"),
        (lambda w, x: x + jnp.sum(w @ w), "1 of 1: a matmul of weights only .*closes"),
        (_doubled, "1 of 1: a function with a custom derivative rule .*outside of it"),
        (lambda w, x: x[:, :4] @ WIDE * w[0, 0], "1 of 1: an activation matmul"),
        (lambda w, x: x[:, :4] @ jnp.tile(w[:4], 512), "its weight is too small to"),
        (lambda w, x: jnp.sum(x) * jnp.sum(w), "There is no matmul or convolution"),
        (
            lambda w, x: jnp.tanh(jnp.matmul(x, w, precision="highest")) @ x.T,
            "among 2 matmuls. 1 of 2: the program .* 1 of 2: an activation matmul",
        ),
    ],
)
def test_the_error_has_the_reasons_of_the_program(func, match):
    w, x = ARGUMENTS
    with pytest.raises(ValueError, match=match):
        jax.eval_shape(mpx.autocast(func, recipe=CURRENT), w, x)


def test_the_error_names_regions_rules_and_few_lines():
    w, x = ARGUMENTS

    def switched_off(w, x):
        with mpx.autocast(enabled=False):
            return x @ w

    def many(w, x):
        for factor in range(5):
            x = jnp.tanh(x @ x.T * factor) @ x
        return x

    with pytest.raises(ValueError, match="1 of 1: a region with .*omit `enabled=F"):
        mpx.autocast(switched_off, recipe=CURRENT)(w, x)
    half = mpx.Rules(mpx.Rule(mpx.Precision.HALF, primitive="dot_general"))
    with pytest.raises(ValueError, match="1 of 1: a rule of the user's.*change the"):
        mpx.autocast(lambda w, x: x @ w, recipe=CURRENT, rules=half)(w, x)
    with pytest.raises(ValueError, match="10 of 10: an activation") as found:
        mpx.autocast(many, recipe=CURRENT)(w, x)
    assert len(str(found.value)) < 700
