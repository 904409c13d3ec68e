"""`weights=`: which arguments hold the parameters, however they are passed."""

import re

import jax.numpy as jnp
import pytest

import mpx

from ..helpers import unchecked_annotations

W, X = jnp.ones((32, 32)), jnp.ones((32, 32))
RECIPES = [None, mpx.Float8CurrentScaling()]


def model(x, params):
    return x @ params


def by_name_only(x, *, params):
    return x @ params


def any_arguments(*args, **kwargs):
    return args[0] @ (args[1] if len(args) > 1 else kwargs["params"])


def parameters(func, *args, weights, **kwargs):
    """The weights of the first product, as `mpx.explain` names them."""
    reports = (
        mpx.explain(func, weights=weights)(*args, **kwargs),
        mpx.explain(mpx.autocast(func, weights=weights))(*args, **kwargs),
    )
    products = [
        next(o for o in report.operations if o.primitive == "dot_general")
        for report in reports
    ]
    assert products[0].parameters == products[1].parameters
    return products[0].parameters


@pytest.mark.parametrize("weights", [1, "params", (1, "params")])
def test_an_argument_is_the_same_by_position_and_by_name(weights):
    by_position = parameters(model, X, W, weights=weights)
    by_name = parameters(model, X, params=W, weights=weights)
    assert by_position == ("args[1]",) and by_name == ("kwargs['params']",)
    low = mpx.autocast(model, weights=weights, recipe=mpx.Float8CurrentScaling())
    assert (low(X, W) == low(X, params=W)).all()


def test_the_first_argument_may_be_passed_by_name():
    low = mpx.autocast(lambda w, x: x @ w, recipe=mpx.Float8CurrentScaling())
    assert (low(w=W, x=X) == low(W, X)).all()


def test_a_function_without_a_signature_of_its_own_is_asked_for_its_arguments():
    low = mpx.autocast(any_arguments, weights="params", recipe=RECIPES[1])
    assert low(X, params=W).shape == (32, 32)
    assert mpx.autocast(any_arguments, weights=1, recipe=RECIPES[1])(X, W).size


def test_an_argument_with_a_default_may_be_left_out():
    def with_default(x, params=2.0):
        return x * params

    for weights in (1, "params"):
        assert (mpx.autocast(with_default, weights=weights)(X) == 2).all()


@pytest.mark.parametrize("recipe", RECIPES, ids=["none", "current"])
@pytest.mark.parametrize("weights", [5, "nope", ("params", "nope"), (0, 2)])
@pytest.mark.parametrize("func", [model, any_arguments])
def test_an_argument_that_is_not_there_is_named(weights, recipe, func):
    wrong = weights[-1] if isinstance(weights, tuple) else weights
    match = re.escape(f"`weights={wrong!r}` of `mpx.autocast`") + ".*1 by position"
    with pytest.raises(ValueError, match=match):
        mpx.autocast(func, weights=weights, recipe=recipe)(X, params=W)
    match = re.escape(f"`weights={wrong!r}` of `mpx.explain`") + ".*and `params` by"
    with pytest.raises(ValueError, match=match):
        mpx.explain(func, weights=weights)(X, params=W)
    with pytest.raises(ValueError, match=r"1 by position and `params` by name"):
        mpx.autocast(func, weights=weights, enabled=False)(X, params=W)


def test_arguments_that_have_a_name_only_have_no_position():
    assert mpx.autocast(by_name_only, weights="params")(X, params=W).size
    with pytest.raises(ValueError, match="`weights=1` of `mpx.autocast`"):
        mpx.autocast(by_name_only, weights=1)(X, params=W)


@pytest.mark.parametrize("weights", [True, 1.5, [0], (0, None), jnp.ones(2), {0}])
@pytest.mark.parametrize("transform", [mpx.autocast, mpx.explain])
def test_what_is_neither_position_nor_name_is_named(weights, transform):
    match = rf"`weights` of `mpx.{transform.__name__}` must be the position"
    with unchecked_annotations():
        with pytest.raises(TypeError, match=match):
            transform(model, weights=weights)
        with pytest.raises(TypeError, match="`weights` of `mpx.autocast` must be"):
            mpx.autocast(weights=weights)


def test_positions_are_counted_from_zero():
    for weights in (-1, (0, -2)):
        with pytest.raises(ValueError, match="positions counted from 0.*got -"):
            mpx.autocast(model, weights=weights)


@pytest.mark.parametrize("ambient", [False, True])
def test_a_region_has_no_arguments(ambient):
    def func(x):
        with mpx.autocast(weights=0, ambient=ambient):
            return x @ x

    with pytest.raises(TypeError, match="cannot be said in a region or around calls"):
        mpx.autocast(func)(X)
