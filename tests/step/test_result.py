"""What the gradient functions return."""

import pickle

import jax
import jax.numpy as jnp
import pytest

import mpx

from . import cases
from .cases import FLOAT16, FUNCTIONS, batch, gradient, params, same_bits, total


@pytest.mark.parametrize(("has_aux", "jit"), [(False, True), (True, False)])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_unpacks_in_the_papers_order(name, has_aux, jit):
    fun = lambda w: (total(w**2), {"n": w}) if has_aux else total(w**2)  # noqa: E731

    def call(w, scaling):
        policy = mpx.get_policy(FLOAT16)
        return FUNCTIONS[name](fun, scaling, has_aux=has_aux, policy=policy)(w)

    call = jax.jit(call) if jit else call
    result = call(jnp.array([1.0, 2.0]), mpx.DynamicLossScaling(16.0))
    assert isinstance(result, mpx.GradientResult)
    items = list(result)
    if "value" in name:
        first = items.pop(0)
        value = first[0] if has_aux else first
        assert float(value) == 5.0 and result.value is value
        aux = first[1] if has_aux else None
    else:
        aux = items.pop() if has_aux else None
        with pytest.raises(AttributeError, match="filter_value_and_grad"):
            _ = result.value
    scaling, finite, grads = items
    assert scaling is result.scaling and finite is result.finite
    assert grads is result.grads
    assert isinstance(scaling, mpx.DynamicLossScaling) and bool(finite)
    assert same_bits(grads, jnp.array([2.0, 4.0]))
    if has_aux:
        assert aux is result.aux and aux["n"].dtype == jnp.float16
    else:
        with pytest.raises(AttributeError, match="has_aux=True"):
            _ = result.aux
    with pytest.raises(AttributeError, match="no attribute 'gradients'"):
        _ = result.gradients


def test_result_is_a_pytree_and_pickles():
    fun = lambda w: (total(w), w)  # noqa: E731
    step = mpx.filter_value_and_grad(fun, mpx.DynamicLossScaling(), has_aux=True)
    result = step(jnp.ones(2))
    paths = [jax.tree_util.keystr(p) for p, _ in jax.tree.leaves_with_path(result)]
    assert {".value", ".finite", ".grads", ".aux"} <= set(paths)
    for copy in (
        pickle.loads(pickle.dumps(result)),
        jax.tree.map(lambda x: x, result),
        jax.jit(lambda r: r)(result),
    ):
        assert type(copy) is mpx.GradientResult
        assert same_bits(jax.tree.leaves(copy), jax.tree.leaves(result))
        assert same_bits(copy.aux, result.aux)
    assert "value=" in repr(result) and "_flags" not in repr(result)


def test_replace_knows_its_fields():
    result = mpx.filter_grad(total, mpx.DynamicLossScaling())(jnp.ones(2))
    changed = result._replace(grads=jnp.zeros(2))
    assert same_bits(changed.grads, jnp.zeros(2))
    assert same_bits(result.grads, jnp.ones(2))
    with pytest.raises(ValueError, match="gradients"):
        result._replace(gradients=0)


@pytest.mark.parametrize("scaling", [None, mpx.DynamicLossScaling(16.0, period=1)])
def test_without_mixed_precision(scaling):
    w, (x, y) = params(), batch()
    result = gradient(None, scaling)(w, x, y)
    value, expected = cases.control(cases.loss, w, x, y)
    assert same_bits(result.grads, expected) and same_bits(result.value, value)
    if scaling is None:
        assert result.scaling is None
    else:
        assert float(result.scaling.loss_scale) == 16.0
        assert int(result.scaling.steps) == 1


def test_aux_comes_back_as_it_was_returned():
    def fun(w, x):
        aux = {"half": w * 2, "name": "dense", "n": 3, "none": None, "act": jax.nn.relu}
        return total(w * x), {**aux, "int": jnp.arange(3)}

    step = gradient(FLOAT16, mpx.DynamicLossScaling(), fun, has_aux=True)
    aux = step(jnp.ones(2), jnp.ones(2)).aux
    assert aux["half"].dtype == jnp.float16
    assert aux["name"] == "dense" and aux["n"] == 3 and aux["none"] is None
    assert aux["act"] is jax.nn.relu and aux["int"].dtype == jnp.int32
