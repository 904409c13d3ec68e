"""Micro-batches: one step over several parts of a batch (row 16)."""

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import mpx

from ..helpers import unchecked_annotations, unscaled
from . import cases
from .cases import FLOAT16, batch, close, control, loss, params, same_bits, total

pytestmark = unscaled
ONE, NONE = jnp.ones(()), mpx.NoLossScaling()


def accumulate(fun, scaling, how, has_aux=False, policy=None, **options):
    return cases.gradient(
        policy, scaling, fun, has_aux=has_aux, accumulate=how, **options
    )


def linear(w, x):
    return total(w * x.sum())


@pytest.mark.parametrize(
    ("steps", "jit", "policy", "tolerance"),
    [
        (1, False, None, 1e-6),
        (1, False, cases.BFLOAT16, 2e-2),
        (1, True, FLOAT16, 3e-3),
        (2, False, FLOAT16, 3e-3),
        (4, True, None, 1e-6),
        (8, True, FLOAT16, 3e-3),
    ],
)
def test_micro_batches_give_what_the_full_batch_does(steps, policy, tolerance, jit):
    def call(w, scaling, x, y):
        return accumulate(loss, scaling, steps, policy=policy)(w, x, y)

    w, (x, y) = params(), batch()
    call = jax.jit(call) if jit else call
    result = call(w, mpx.DynamicLossScaling(2.0**7), x, y)
    found = result.grads, result.value
    close(found, control(loss, w, x, y)[::-1], tolerance)
    assert cases.dtypes(found) == {"float32"}
    assert int(result.scaling.steps) == 1 and bool(result.finite)


def test_weights_give_the_weighted_mean():
    """A mean per token is the mean over all tokens, not the mean of means."""

    def fun(w, x, mask):
        return total((w * x) ** 2 * mask) / total(mask)

    x = jnp.arange(1.0, 9.0)
    mask = jnp.array([1, 1, 1, 0, 0, 0, 1, 0], jnp.float32)
    how = mpx.Accumulation(2, weight=lambda w, x, mask: total(mask))
    result = accumulate(fun, None, how)(jnp.float32(2), x, mask)
    value, grads = control(fun, jnp.float32(2), x, mask)
    close(result.value, value, 1e-6)
    close(result.grads, grads, 1e-6)
    plain = accumulate(fun, None, 2)(jnp.float32(2), x, mask)
    assert abs(float(plain.value) - float(value)) > 1


def test_weights_that_sum_to_zero_are_a_bad_step():
    how = mpx.Accumulation(2, weight=lambda w, x: jnp.float32(0))
    assert not bool(accumulate(linear, NONE, how)(ONE, jnp.ones(4)).finite)


@pytest.mark.parametrize("make", [jax.random.key, jax.random.PRNGKey])
@pytest.mark.parametrize("by_name", [False, True])
def test_each_micro_batch_has_its_own_key(make, by_name):
    def fun(w, x, key):
        noise = jax.random.uniform(key, x.shape)
        return total(w * x.sum()), noise

    key = make(3)
    call = accumulate(fun, None, 3, has_aux=True)
    w, x = jnp.ones(()), jnp.ones(6)
    aux = (call(w, x, key=key) if by_name else call(w, x, key)).aux
    expected = [jax.random.uniform(k, (2,)) for k in jax.random.split(key, 3)]
    assert same_bits(aux, jnp.stack(expected))


def test_aux_is_stacked_by_strides_and_what_is_no_array_comes_once():
    def fun(w, x):
        return linear(w, x), {"x": x, "n": x.sum(), "name": "a", "k": 2, "none": None}

    aux = accumulate(fun, None, 3, has_aux=True)(ONE, jnp.arange(6.0)).aux
    assert aux["x"].tolist() == [[0, 3], [1, 4], [2, 5]]
    assert aux["n"].tolist() == [3, 5, 7]
    assert (aux["name"], aux["k"], aux["none"]) == ("a", 2, None)


def test_scalars_and_named_arrays_are_given_whole():
    def fun(w, x, table, factor):
        assert table.shape == (5, 2) and x.shape == (2,)
        return total(w * x.sum() * factor) + 0 * total(table)

    how = mpx.Accumulation(2, whole=lambda path, leaf: path == "args[2]")
    args = (jnp.ones(()), jnp.arange(4.0), jnp.ones((5, 2)), jnp.float32(2))
    result = accumulate(fun, None, how)(*args)
    assert float(result.grads) == 6.0
    with pytest.raises(ValueError, match=r"float32\[5,2\] at `args\[2\]`.*whole="):
        accumulate(fun, None, 2)(*args)


def test_equinox_state_is_handed_on():
    def fun(model, state, x):
        seen = state.get(model.index)
        state = state.set(model.index, seen * 0.5 + x.sum().astype(jnp.float32))
        return linear(model.weight, x), (seen, state)

    model, state = eqx.nn.make_with_state(cases.Counter)()
    result = accumulate(fun, None, 2, has_aux=True)(model, state, jnp.arange(4.0))
    seen, new = result.aux
    assert seen.tolist() == [0, 2]
    assert float(new.get(model.index)) == 2 * 0.5 + 4


def test_state_of_other_frameworks_is_handed_on():
    def fun(w, state, x):
        new = {"mean": state["mean"] * 0.5 + x.sum().astype(jnp.float32)}
        return linear(w, x), {"state": new, "seen": state["mean"]}

    how = mpx.Accumulation(2, state_argnum=1, new_state=lambda aux: aux["state"])
    call = accumulate(fun, None, how, has_aux=True)
    result = call(ONE, {"mean": jnp.float32(0)}, jnp.arange(4.0))
    assert result.aux["seen"].tolist() == [0, 2]
    assert float(result.aux["state"]["mean"]) == 5


def test_state_must_come_back():
    fun = lambda model, state, x: (linear(model.weight, x), ())  # noqa: E731
    model, state = eqx.nn.make_with_state(cases.Counter)()
    with pytest.raises(ValueError, match="model state must be returned in aux"):
        accumulate(fun, None, 2, has_aux=True)(model, state, jnp.arange(4.0))


@pytest.mark.parametrize("bad", [0, 5])
def test_one_bad_micro_batch_skips_the_whole(bad):
    w, (x, y) = params(), batch()
    scaling = mpx.DynamicLossScaling(2.0**7, period=1)
    call = accumulate(loss, scaling, 4, policy=FLOAT16)
    good, skipped = call(w, x, y), call(w, x.at[bad].set(jnp.inf), y)
    assert float(good.scaling.loss_scale) == 2.0**8
    assert float(skipped.scaling.loss_scale) == 2.0**6
    assert not bool(skipped.finite) and int(skipped.scaling.steps) == 1


def test_gradients_are_summed_in_full_precision():
    """4,096 micro-batches with gradient 1: 2,048 if summed in float16."""
    call = accumulate(linear, NONE, 4096, policy=FLOAT16)
    assert float(call(ONE, jnp.ones(4096)).grads) == 1.0


@pytest.mark.parametrize(("argnums", "positive"), [(1, 1), (-2, 1), ((0, 1), (0, 1))])
def test_differentiated_arguments_are_given_whole(argnums, positive):
    def fun(a, b, x):
        return total(a * b) * total(x)

    a, b, x = jnp.arange(1.0, 4.0), jnp.arange(2.0, 5.0), jnp.arange(4.0)
    how = mpx.Accumulation(2, whole=lambda path, leaf: path == "args[0]")
    result = mpx.grad(fun, mpx.NoLossScaling(), argnums, accumulate=how)(a, b, x)
    grads = jax.grad(fun, positive)(a, b, jnp.float32(3))
    close(result.grads, grads, 1e-6)


@pytest.mark.parametrize("jit", [False, True])
def test_leaks_nothing(checking_leaks, jit):
    def call(w, x, y):
        fun = lambda w, x, y: (loss(w, x, y), {"x": x, "name": "a"})  # noqa: E731
        result = accumulate(fun, None, 2, has_aux=True)(w, x, y)
        return result.grads, result.aux["x"]

    call = jax.jit(call) if jit else call
    grads, x = call(params(), *batch())
    assert x.shape == (2, 4, 3)


@pytest.mark.parametrize(
    ("how", "size", "match"),
    [
        *((2, size, "must divide the first axis") for size in (0, 3, 5)),
        (mpx.Accumulation(2, weight=lambda w, x: x), 4, "one number"),
    ],
)
def test_what_cannot_be_accumulated_is_refused(how, size, match):
    with pytest.raises(ValueError, match=match):
        accumulate(linear, None, how)(ONE, jnp.ones(size))


@pytest.mark.parametrize(
    ("fields", "error", "match"),
    [
        ({"steps": 0}, ValueError, "at least 1"),
        ({"steps": 2.0}, TypeError, "whole number"),
        ({"steps": True}, TypeError, "whole number"),
        ({"state_argnum": 1}, ValueError, "together"),
        ({"axes": 3}, TypeError, "`axes` of `mpx.Accumulation` must be the name"),
        ({"in_order": True}, ValueError, "Pass the mesh axes"),
        ({"steps": 6, "axes": "data", "in_order": True}, ValueError, "power of two"),
        ({"whole": 3}, TypeError, r"`whole`.*function `whole\(path, leaf\)"),
        ({"weight": 2.0}, TypeError, "`weight`.*must be a function.*float 2.0"),
        (
            {"state_argnum": 1, "new_state": "aux"},
            TypeError,
            r"`new_state`.*`new_state\(aux\) -> state`; got str 'aux'",
        ),
        ({"state_argnum": "x", "new_state": abs}, TypeError, "position of an argument"),
        ({"state_argnum": True, "new_state": abs}, TypeError, "got bool True"),
        ({"state_argnum": 1.0, "new_state": abs}, TypeError, "got float 1.0"),
        ({"state_argnum": -1, "new_state": abs}, ValueError, "at least 0.*got -1"),
    ],
)
def test_a_wrong_field_of_an_accumulation_is_named(fields, error, match):
    with unchecked_annotations(), pytest.raises(error, match=match):
        mpx.Accumulation(**{"steps": 2, **fields})


def step_with_state(position, scaling, **options):
    """Accumulates with the state at a position, which its loss returns."""
    how = mpx.Accumulation(2, state_argnum=position, new_state=lambda aux: aux)
    fun = lambda w, x, state: (total(w * x), state)  # noqa: E731
    call = mpx.filter_grad(fun, scaling, has_aux=True, accumulate=how, **options)
    return call(ONE, jnp.ones(4), ONE)


@pytest.mark.parametrize(
    ("position", "match"),
    [
        (7, "`state_argnum=7`.*called with 3 by position"),
        (0, "`state_argnum=0`.*that argument is differentiated"),
        (2, "float32.*float16.*name the leaves of other state in `keep="),
    ],
)
def test_a_state_that_is_not_there_or_was_cast_is_named(position, match):
    """The first was left out in silence."""
    with pytest.raises(ValueError, match=match):
        step_with_state(position, mpx.DynamicLossScaling())


def test_a_state_that_is_kept_has_its_dtype():
    keep = lambda path, leaf: path == "args[2]"  # noqa: E731
    kept = step_with_state(2, mpx.DynamicLossScaling(8.0), keep=keep)
    assert kept.aux.dtype == jnp.float32
