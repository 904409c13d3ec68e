"""A constant that is not finite is there on purpose: what is made of it is named."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import mpx
from mpx._tools._blame._blame import _each_once

from .plants import line_of

W = jnp.eye(4)


def blamed(loss, *args):
    blame = mpx.blame(loss, mpx.NoLossScaling(), use_mixed_precision=False)
    return blame(W, *args)


def masked(w, x, rows):
    h = jnp.where(rows[:, None], x @ w, -jnp.inf)  # the mask
    return jnp.mean(jax.nn.softmax(h) @ x)  # here


def online(w, x, rows):
    """A maximum that begins at -inf, of scores of which rows are masked."""
    scores = jnp.where(rows[:, None], x @ w, -jnp.inf)  # the mask

    def body(state, score):
        most, total = state
        new = jnp.maximum(most, score)
        old = jnp.exp(most - new) * total  # here
        return (new, old + jnp.exp(score - new)), None

    first = jnp.full(4, -jnp.inf), jnp.zeros(4)
    return jnp.sum(jnp.log(jax.lax.scan(body, first, scores.T)[0][1]))


def labels(w, x, rows):
    h = jnp.where(rows[None], x @ w, -jnp.inf)  # the mask
    return -jnp.mean(rows.astype(x.dtype)[None] * jax.nn.log_softmax(h))  # here


@pytest.mark.parametrize("loss", [masked, online, labels])
def test_what_makes_nan_of_a_mask_is_named_and_the_mask_beside_it(loss):
    first = blamed(loss, jnp.ones((4, 4)), jnp.arange(4) > 0).first
    assert first.line == line_of(loss, "# here") and "nan" in first.kind
    assert first.made_by == "select_n" and first.made_at == line_of(loss, "# the mask")
    wanted = "zero times infinity" if loss is labels else "infinity minus infinity"
    assert first.reason == wanted
    assert first.inside == (("scan, iteration 0 of 4",) if loss is online else ())


def chosen(w, x, large):
    h = (x @ w) ** large  # here
    return jnp.mean(jnp.tanh(h) * jnp.where(jnp.max(h) < jnp.inf, 1.0, jnp.nan))


def chosen_branch(w, x, large):
    h = (x @ w) ** large  # here
    is_finite = jnp.max(h) < jnp.inf
    return jnp.mean(jnp.tanh(h)) * jax.lax.cond(is_finite, lambda: 1.0, lambda: jnp.nan)


def clipped(w, x, large):
    h = jnp.clip(x @ w, -jnp.inf, jnp.inf)
    return jnp.mean(h**large)  # here


@pytest.mark.parametrize("loss", [chosen, chosen_branch, clipped])
def test_what_is_compared_is_named_and_not_the_constant_that_is_chosen(loss):
    first = blamed(loss, jnp.full((4, 4), 1e30), 2.0).first
    assert first.primitive == "pow" and first.line == line_of(loss, "# here")
    assert first.reason.startswith("the result does not fit in float32")


def wrong_condition(w, x, large):
    return jnp.mean(jnp.where(x > large, x @ w, jnp.nan))  # here


def wrong_branch(w, x, large):
    given = jax.lax.cond(jnp.sum(x) > large, lambda: 1.0, lambda: jnp.nan)  # here
    return jnp.mean(x @ w) * given


def added(w, x, large):
    return jnp.mean(x @ w + jnp.inf) * large  # here


def test_a_constant_that_makes_the_result_bad_is_named():
    for loss, *wanted in (
        (wrong_condition, "select_n", "nan"),
        (wrong_branch, "constant", "nan"),
        (added, "constant", "inf"),
    ):
        first = blamed(loss, jnp.ones((4, 4)), 99.0).first
        assert [first.primitive, first.kind] == wanted
        assert first.line == line_of(loss, "# here")


def test_masks_of_300_layers_do_not_hide_what_is_behind_them():
    def loss(w, x):
        def layer(h, place):
            seen = jnp.where(jnp.tri(4, dtype=bool), h @ w, -jnp.inf)
            h = jax.nn.softmax(seen) / jnp.where(place == 200, 0.0, 1.0)
            return h, None

        return jnp.mean(jax.lax.scan(layer, x, jnp.arange(300))[0])

    first = blamed(loss, jnp.ones((4, 4))).first
    assert first.inside == ("scan, iteration 200 of 300",)
    assert (first.primitive, first.reason) == ("div", "a division by zero")


def test_barriers_of_single_operands_and_constants_that_are_only_compared():
    loss = lambda w, x: jnp.mean(jnp.where(jnp.max(x) < jnp.inf, x @ w, 0.0))  # noqa: E731
    blame = mpx.blame(loss, mpx.NoLossScaling(), use_mixed_precision=False, above=1e3)
    assert blame(W, jnp.ones((4, 4))).first is None

    # A checkpoint with a barrier for one operand only.
    def loss(w, x):
        inner = jax.checkpoint(lambda h, w: jnp.log(h @ w), prevent_cse=(True, False))
        return jnp.mean(inner(x, w))

    first = blamed(loss, jnp.zeros((4, 4))).first
    assert (first.primitive, first.reason) == ("log", "the logarithm of zero")


def test_without_lines_an_operation_is_not_taken_for_what_a_constant_makes():
    report = blamed(lambda w: jnp.sum(1 / (w * 0.0)))
    assert report.first is not None
    division = dataclasses.replace(report.first, line="", made_at="")
    constant = dataclasses.replace(division, primitive="constant")
    assert _each_once([constant, division]) == (constant, division)
