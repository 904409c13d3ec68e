"""One array that several products read is quantized once, under delayed scaling too."""

import re

import jax
import jax.numpy as jnp
import pytest

import mpx

TOKENS, WIDTH = 64, 32
RECIPE = mpx.DelayedScaling(amax_history_len=4)
WEIGHTS = {"query": 1.0, "key": 2.0, "value": 4.0}


def attention(weights, x):
    """Queries, keys and values of one array, which nobody else reads."""
    query, key, value = (x @ weights[name] for name in WEIGHTS)
    return jnp.tanh(query * key) * value


def loss(weights, x):
    return jnp.sum(attention(weights, jnp.tanh(x)) @ weights["out"])


@pytest.fixture(scope="module")
def inputs():
    keys = jax.random.split(jax.random.key(0), 5)
    scales = {**WEIGHTS, "out": 1.0}
    weights = {
        name: scale * jax.random.normal(key, (WIDTH, WIDTH)) / 8
        for key, (name, scale) in zip(keys, scales.items(), strict=False)
    }
    return weights, jax.random.normal(keys[4], (TOKENS, WIDTH))


def compiled_step(func, recipe, *args):
    func = mpx.autocast(func, recipe=recipe)

    @jax.jit
    def step(scaling, *args):
        return mpx.filter_value_and_grad(func, scaling)(*args)

    scaling = mpx.init_scaling(func, *args)
    return step.lower(scaling, *args).compile(), scaling


def copies(compiled, shape):
    """How often an array of a shape is rounded to 8 bits; a CPU makes integers."""
    dims = ",".join(map(str, shape))
    text = compiled.as_text()
    return len(re.findall(rf"= (?:u8|f8e\w+)\[{dims}\]\S* convert\(", text))


@pytest.mark.slow
def test_queries_keys_and_values_read_one_copy(inputs):
    delayed, _ = compiled_step(loss, RECIPE, *inputs)
    current, _ = compiled_step(loss, mpx.Float8CurrentScaling(), *inputs)
    assert copies(delayed, (TOKENS, WIDTH)) == copies(current, (TOKENS, WIDTH)) > 0


def test_each_weight_learns_the_amax_of_what_it_reads(inputs):
    weights, x = inputs
    compiled, scaling = compiled_step(loss, RECIPE, weights, x)
    result = compiled(scaling, weights, x)
    after = result.scaling.scales_by_weight()
    rows = {name: after[slot] for name in WEIGHTS for slot in after if name in slot}
    largest = float(jnp.max(jnp.abs(jnp.tanh(x))))
    for name in WEIGHTS:
        assert rows[name][0] == pytest.approx(448 / largest, 1e-2)
        of_weight = float(jnp.max(jnp.abs(weights[name])))
        assert rows[name][1] == pytest.approx(448 / of_weight, 1e-5)


def test_a_reader_without_a_derivative_does_not_spoil_the_scale(inputs):
    def with_probe(weights, x):
        x = 100 * jnp.tanh(x)
        probe = jax.lax.stop_gradient(jnp.tanh(x @ weights["query"]))
        hidden = jnp.tanh(x @ weights["key"]) + 0 * probe
        return jnp.sum(hidden @ weights["out"])

    weights, x = inputs
    compiled, scaling = compiled_step(with_probe, RECIPE, weights, x)
    after = compiled(scaling, weights, x).scaling.scales_by_weight()
    # No amax comes back from the probe, which takes the scales of the moment.
    assert not any("query" in slot for slot in after)
    (trained,) = (row for slot, row in after.items() if "key" in slot)
    assert trained[0] < 10
