"""Random rounding of a state: whose noise it is, in ensembles and in shards."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import mpx

from ..step.cases import same_bits

pytestmark = pytest.mark.third_party


def weights(shape=(64, 128), seed=0):
    return jax.random.normal(jax.random.key(seed), shape)


def mesh():
    return jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))


def correlation(a, b):
    return np.corrcoef(np.ravel(a), np.ravel(b))[0, 1]


@pytest.mark.parametrize("bits", [8, 0])
def test_members_of_an_ensemble_round_their_weights_each_in_its_own_way(bits):
    """All numbers of the second are twice as large: by one noise, so are its errors."""
    tx = mpx.master_weights(optax.sgd(1e-3), bits=bits)
    model = weights().astype(jnp.bfloat16)
    both = jnp.stack([model, 2 * model])
    grads = jnp.stack([weights(seed=1), 2 * weights(seed=1)])

    @jax.vmap
    def step(model, grads):
        updates, state = tx.update(grads, tx.init(model), model)
        return mpx.full_weights(optax.apply_updates(model, updates), state)

    wanted = both.astype(jnp.float32) - 1e-3 * grads
    first, second = step(both, grads) - wanted
    assert abs(correlation(first, second)) < 0.1
    updates, state = tx.update(grads[1], tx.init(both[1]), both[1])
    alone = mpx.full_weights(optax.apply_updates(both[1], updates), state)
    assert same_bits(step(both, grads)[1], alone)


def test_members_of_an_ensemble_round_their_moments_each_in_its_own_way():
    tx = mpx.compress_state(optax.adagrad(1e-2))
    both = jnp.stack([weights(), 2 * weights()])
    grads = jnp.stack([weights(seed=1), 2 * weights(seed=1)])
    states = jax.vmap(tx.init)(both)
    _, states = jax.vmap(tx.update)(grads, states, both)
    found = jax.vmap(lambda s: mpx.full_state(s)[0].sum_of_squares)(states)
    first, second = found - (0.1 + grads**2)
    assert abs(correlation(first, second / 4)) < 0.2


def test_the_first_number_of_steps_is_that_of_the_weights():
    """However they are sharded and whether `init` is compiled."""
    tx = mpx.compress_state(optax.adagrad(1e-2))
    model = {"a": weights(), "b": weights()}
    step = tx.init(model).step
    placed = jax.device_put(model, NamedSharding(mesh(), P(None, "d")))
    assert jax.jit(tx.init)(model).step == step
    assert mpx.init_optimizer(tx, placed).step == step
    assert jax.jit(functools.partial(mpx.init_optimizer, tx))(placed).step == step
    others = [{**model, "a": 2 * weights()}, {**model, "b": -weights()}]
    assert len({int(tx.init(m).step) for m in (model, *others)}) == 3


def specs(state, spec):
    return jax.tree.map(lambda x: spec if x.ndim == 2 else P(), state)


def in_shards(function, spec, state):
    """`init` or `update` inside `shard_map`, for a state of this structure."""
    outs = specs(state, spec)
    ends = spec, outs
    if function.__name__ == "update":
        ends = (spec, outs, spec), (spec, outs)
    options = {"in_specs": ends[0], "out_specs": ends[1]}
    return jax.jit(jax.shard_map(function, mesh=mesh(), **options))


@pytest.mark.parametrize("make", [optax.adam, optax.adagrad])
@pytest.mark.parametrize(
    ("shape", "spec"), [((64, 128), P("d")), ((32, 1024), P(None, "d"))]
)
def test_init_in_shards_is_init_of_the_whole(make, shape, spec):
    """An array of 4,096 numbers or more is compressed, however small its shards are."""
    tx, model = mpx.compress_state(make(1e-2)), weights(shape)
    wanted = tx.init(model)
    found = in_shards(tx.init, spec, wanted)(model)
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    assert same_bits(found.inner_state, wanted.inner_state)
    small = in_shards(tx.init, spec, tx.init(weights((32, 64))))(weights((32, 64)))
    assert not any(x.dtype.itemsize < 4 for x in jax.tree.leaves(small.inner_state))


@pytest.mark.parametrize("make", [optax.adam, optax.adagrad])
def test_update_in_shards_is_update_of_the_whole_but_for_its_noise(make):
    tx, model = mpx.compress_state(make(1e-2)), weights()
    state = tx.init(model)
    update = in_shards(tx.update, P("d"), state)
    updates, found = update(weights(seed=1), state, model)
    wanted, whole = jax.jit(tx.update)(weights(seed=1), state, model)
    np.testing.assert_allclose(updates, wanted, rtol=1e-5, atol=1e-8)
    for one, other in zip(*map(jax.tree.leaves, (found, whole)), strict=True):
        if one.shape == model.shape:
            assert np.max(np.abs(np.int32(one) - np.int32(other))) <= 1


def test_shards_draw_their_own_noise():
    """Eight shards with the same numbers."""
    tx = mpx.compress_state(optax.adagrad(1e-2))
    model, grads = (jnp.tile(weights((8, 128), seed), (8, 1)) for seed in (0, 1))
    state = tx.init(model)
    _, state = in_shards(tx.update, P("d"), state)(grads, state, model)
    error = mpx.full_state(state)[0].sum_of_squares - (0.1 + grads**2)
    first, *others = np.split(np.asarray(error), 8)
    # Two draws for a number with a part p between two codes agree in p^2 + (1 - p)^2.
    assert all(0.6 < np.mean(first == other) < 0.73 for other in others)
    small = mpx.master_weights(optax.sgd(1e-3), bits=0)
    half = model.astype(jnp.bfloat16)

    def step(grads, model):
        updates, _ = small.update(grads, small.init(model), model)
        return optax.apply_updates(model, updates)

    new = jax.jit(jax.shard_map(step, mesh=mesh(), in_specs=P("d"), out_specs=P("d")))
    first, *others = np.split(np.float32(new(grads, half)), 8)
    assert all(np.mean(first != other) > 0.05 for other in others)


def test_blocks_that_shards_cut_are_refused():
    """(8, 386) has four blocks along its rows, the last of two numbers."""
    two = jax.make_mesh((2,), ("d",), (AxisType.Auto,), devices=jax.devices()[:2])
    tx, model = mpx.compress_state(optax.adam(1e-2)), weights((32, 386))
    state, spec = tx.init(model), P(None, "d")
    outs = specs(state, spec)
    ends = {"in_specs": (spec, outs, spec), "out_specs": (spec, outs)}
    update = jax.shard_map(tx.update, mesh=two, **ends)
    with pytest.raises(ValueError, match="shards must contain whole blocks"):
        jax.jit(update)(model, state, model)
    full = lambda w: mpx.full_state(tx.init(w))[0].mu  # noqa: E731
    inside = jax.shard_map(full, mesh=two, in_specs=spec, out_specs=spec)
    assert not np.any(jax.jit(inside)(model))
    # And `init_optimizer` divides no scales of such blocks.
    placed = mpx.init_optimizer(tx, jax.device_put(model, NamedSharding(two, spec)))
    mu = placed.inner_state[0].mu
    assert mu.codes.sharding.spec == spec and mu.scales.sharding.is_fully_replicated
