"""Faults that a recipe makes, by a product that quantizes to zero, are named.

Each is finite in bfloat16 and in float32. Together they are many, and each compiles
several programs: one of each kind runs always, the rest before a release.
"""

import itertools

import jax.numpy as jnp
import pytest

import mpx

from ...registries import RECIPES
from . import breaks
from .plants import line_of

TARGETS = [
    (breaks.attention, "current", "H100"),
    (breaks.quotient, "mxfp8", "B200"),
    (breaks.rule, "current", "TPU v7x"),
]
CASES = [*itertools.product(breaks.FAULTS, RECIPES, [None]), *TARGETS]
QUICK = [(breaks.mean_of_some, "current", None)]
SLOW = [(breaks.attention, "nvfp4", None), TARGETS[0]]


def _marks(case):
    if case in QUICK:
        return ()
    return (pytest.mark.slow,) if case in SLOW else (pytest.mark.exhaustive,)


@pytest.mark.parametrize(
    ("fault", "recipe", "target"),
    [pytest.param(*case, marks=_marks(case)) for case in CASES],
    ids=lambda part: getattr(part, "__name__", part),
)
def test_what_a_recipe_breaks_is_named(fault, recipe, target):
    w, x = breaks.weights_of([fault]), breaks.batch()
    loss = breaks.loss_of([fault])
    loss = mpx.autocast(loss, recipe=RECIPES[recipe], target=target)
    scaling = mpx.init_scaling(loss, w, x)
    report = mpx.blame(loss, scaling)(w, x)
    first = report.first
    assert report.verdict is mpx.reports.Verdict.PRECISION
    assert first.line == line_of(fault, "# here")
    assert first.primitive not in ("constant", "input")


def equal_products(w, x):
    h = x @ w["first"]
    h = h @ w["second"]  # here
    return jnp.mean(h.astype(jnp.float32))


@pytest.mark.slow
def test_of_products_of_one_shape_the_one_that_overflows_is_named():
    w = {"first": jnp.eye(32), "second": jnp.full((32, 32), 100.0)}
    loss = mpx.autocast(equal_products, "float16", recipe=RECIPES["current"])
    x = jnp.full((32, 32), 100.0)
    scaling = mpx.init_scaling(loss, w, x).with_loss(mpx.StaticLossScaling(1.0))
    first = mpx.blame(loss, scaling)(w, x).first
    assert first.line == line_of(equal_products, "# here")
    assert first.primitive == "dot_general" and first.parameters == ("['second']",)
