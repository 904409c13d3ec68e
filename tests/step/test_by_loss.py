"""Steps that are decided by the loss alone: `mpx.NoLossScaling(skip="loss")`."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import mpx
import mpx.nnx

from ..helpers import unchecked_annotations
from .cases import batch, loss, params, same_bits

# Optax's Adam mixes dtypes.
pytestmark = pytest.mark.third_party

BY_LOSS = mpx.NoLossScaling(skip="loss")
ADAM = optax.adam(0.1)


def gradient(fun, scaling, **options):
    return mpx.filter_value_and_grad(mpx.autocast(fun), scaling, **options)


def spoiled(x, bad):
    """Returns `x`; its derivative is infinite where `bad`."""
    m = bad.astype(x.dtype)
    return x + jnp.sqrt(m * (x - jax.lax.stop_gradient(x)) + (1 - m)) - (1 - m)


def curved(w, bad, offset=0.0):
    """A finite loss, whose gradient may have elements that are not."""
    parts = jax.tree.map(lambda w, b: jnp.sum(spoiled(w, b) ** 2), w, bad)
    return sum(jax.tree.leaves(parts)) + offset


def weights(dtype="float32"):
    return {"a": jnp.ones(3, dtype), "b": jnp.full((2, 2), 2.0, dtype)}


def marked(*places):
    """Marks one element of each of these weights."""
    none = jax.tree.map(lambda w: jnp.zeros(w.shape, bool), weights())
    return {k: v.at[(0,) * v.ndim].set(k in places) for k, v in none.items()}


def trained(w, state, scaling, *args, tx=ADAM, **options):
    result = gradient(curved, scaling)(w, *args)
    return (*mpx.optimizer_step(w, tx, state, result, **options), result)


jitted = jax.jit(trained, static_argnames="tx")
differentiated = jax.jit(lambda scaling, *args: gradient(curved, scaling)(*args))


@pytest.mark.parametrize("run", [trained, jitted], ids=["eager", "jit"])
def test_bad_elements_are_set_to_zero_and_counted(run):
    w, state = weights(), ADAM.init(weights())
    good, good_state, _, exact = run(w, state, mpx.NoLossScaling(), marked())
    found, new_state, scaling, result = run(w, state, BY_LOSS, marked("b"))
    assert result.finite and same_bits(result.grads["a"], exact.grads["a"])
    assert result.grads["b"].tolist() == [[0.0, 4.0], [4.0, 4.0]]
    assert found["b"][0, 0] == 2.0 and same_bits(found["a"], good["a"])
    assert same_bits(found["b"][1], good["b"][1])
    assert mpx.all_finite((found, new_state))
    assert same_bits(new_state[0].mu["a"], good_state[0].mu["a"])
    for after in (scaling, result.scaling):
        assert (int(after.zeroed), int(after.skipped), int(after.steps)) == (1, 0, 1)
        assert after.finite
    *_, scaling, _ = run(found, new_state, scaling, marked())
    assert (int(scaling.zeroed), int(scaling.steps)) == (1, 2)
    *_, scaling, _ = run(found, new_state, scaling, marked("a", "b"))
    assert int(scaling.zeroed) == 2


@pytest.mark.parametrize("offset", [np.nan, np.inf])
def test_a_bad_loss_skips_the_step(offset):
    w, state = weights(), ADAM.init(weights())
    *after, scaling, result = jitted(w, state, BY_LOSS, marked("b"), offset)
    assert same_bits(after, [w, state]) and not result.finite
    found = int(scaling.zeroed), int(scaling.skipped), int(scaling.bad_losses)
    assert found == (0, 1, 1)
    assert scaling.record.places.tolist() == [0] + [-1] * 7
    with pytest.raises(FloatingPointError, match="last skipped step: `the loss`"):
        mpx.check(scaling, w, max_skipped_in_a_row=0)


def test_without_bad_numbers_it_is_the_exact_check():
    w, (x, y) = params(), batch()
    runs = []
    for scaling in (mpx.NoLossScaling(), BY_LOSS):

        @jax.jit
        def step(carry, _):
            w, state, scaling = carry
            result = gradient(loss, scaling)(w, x, y)
            return mpx.optimizer_step(w, ADAM, state, result), result.value

        carry, values = jax.lax.scan(step, (w, ADAM.init(w), scaling), length=5)
        runs.append((carry[:2], values, carry[2].record))
    np.testing.assert_array_equal(runs[0][1], runs[1][1])
    assert same_bits(*runs) and int(carry[2].zeroed) == 0


def test_a_result_that_left_its_program_is_counted():
    result = differentiated(BY_LOSS, weights(), marked("a"))
    assert not [
        p for p in jax.tree_util.tree_leaves_with_path(result) if "raw" in str(p)
    ]
    for given in (result, result._replace(grads=result.grads)):
        *_, scaling = mpx.optimizer_step(weights(), ADAM, ADAM.init(weights()), given)
        assert int(scaling.zeroed) == 1
    *kept, scaling = mpx.optimizer_step(
        weights(), ADAM, ADAM.init(weights()), result._replace(finite=False)
    )
    assert same_bits(kept[0], weights())
    assert (int(scaling.zeroed), int(scaling.skipped)) == (0, 1)


def test_other_ways_to_update():
    result = differentiated(BY_LOSS, weights(), marked("a"))
    w, state = mpx.optimizer_update(
        weights(), ADAM, ADAM.init(weights()), result.grads, result.finite
    )
    assert mpx.all_finite((w, state)) and int(result.scaling.zeroed) == 1
    tx = mpx.skip_nonfinite(ADAM)
    *_, (record, _), _, _ = jitted(
        weights(), tx.init(weights()), BY_LOSS, marked("a"), tx=tx
    )
    assert int(record.skipped) == 0


def test_options_of_a_step():
    w, state = weights(), ADAM.init(weights())
    run = lambda s, *a, **k: jax.jit(lambda s: trained(w, state, s, *a, **k))(s)  # noqa: E731
    for check in ("check_gradients", "check_update"):
        *_, scaling, _ = run(BY_LOSS, marked("a"), **{check: True})
        assert (int(scaling.zeroed), int(scaling.skipped)) == (1, 0)
    halt = {"max_skipped_in_a_row": 0}
    *_, halted, _ = run(BY_LOSS, marked("a"), np.nan, **halt)
    after, _, scaling, _ = run(halted, marked("a"), **halt)
    assert halted.record.halted and same_bits(scaling, halted) and same_bits(after, w)


MASTERS = {
    "float32": ("bfloat16", {}),
    "16 bits": ("bfloat16", {"bits": 16}),
    "none": ("bfloat16", {"bits": 0}),
    "stored": ("float32", {}),
}


@pytest.mark.parametrize("name", MASTERS)
def test_masters(name):
    dtype, options = MASTERS[name]
    tx, w = mpx.master_weights(ADAM, **options), weights(dtype)
    if name == "stored":
        w = mpx.quantization.quantize_weights(w)
    state = tx.init(w)
    after, new, scaling, _ = jitted(w, state, BY_LOSS, marked("b"), tx=tx)
    assert int(scaling.zeroed) == 1 and mpx.all_finite((after, new))
    assert np.asarray(mpx.full_weights(after, new)["b"])[0, 0] == 2.0
    *_, scaling, _ = jitted(w, state, BY_LOSS, marked(), tx=tx)
    assert int(scaling.zeroed) == 0


def test_optimizers_without_an_update_for_a_weight():
    def update(grads, state, params=None):
        return {"a": grads["a"], "b": None}, state

    tx = optax.GradientTransformation(lambda w: (), update)
    after, _, scaling, _ = jitted(weights(), (), BY_LOSS, marked("b"), tx=tx)
    assert int(scaling.zeroed) == 1 and same_bits(after["b"], weights()["b"])


def test_micro_batches():
    def fun(w, bad, offset):
        return curved(w, jax.tree.map(lambda b: b[0], bad)) + jnp.sum(offset)

    def step(scaling, bad, offset):
        run = gradient(fun, scaling, accumulate=2)
        result = run(weights(), jax.tree.map(lambda *b: jnp.stack(b), *bad), offset)
        return mpx.optimizer_step(weights(), ADAM, ADAM.init(weights()), result)

    bad, none = marked("b"), jnp.zeros(2)
    after, _, scaling = jax.jit(step)(BY_LOSS, (bad, marked()), none)
    assert int(scaling.zeroed) == 1 and after["b"][0, 0] == 2.0 and after["a"][0] < 1
    after, _, scaling = jax.jit(step)(BY_LOSS, (bad, marked()), none.at[1].set(jnp.nan))
    assert (int(scaling.skipped), int(scaling.zeroed)) == (1, 0)
    assert same_bits(after, weights())


@pytest.mark.parametrize("where", ["mesh", "shard_map", "unchecked", "unsummed"])
def test_devices_agree(where):
    mesh = Mesh(np.array(jax.devices()[:4]), ("d",))
    w, state = jnp.ones(3), ADAM.init(jnp.ones(3))

    def fun(w, bad, x):
        return jnp.sum(jax.vmap(lambda b, x: spoiled(w, b) * x)(bad, x))

    def step(scaling, bad, x):
        result = gradient(fun, scaling)(w, bad, x)
        if where == "unchecked":
            result = result._replace(grads=jax.lax.pmean(result.grads, "d"))
        return mpx.optimizer_step(w, ADAM, state, result)

    if where != "mesh":
        specs = dict(in_specs=(P(), P("d"), P("d")), out_specs=P())
        vma = where == "shard_map"
        step = jax.shard_map(step, mesh=mesh, check_vma=vma, **specs)
    share = lambda a: jax.device_put(a, NamedSharding(mesh, P("d")))  # noqa: E731
    bad, x = jnp.zeros((4, 3), bool), jnp.ones((4, 3))
    for spoil, value, expected in [
        (bad, x, (0, 0)),
        (bad.at[2, 1].set(True), x, (1, 0)),
        (bad.at[2, 1].set(True), x.at[3, 0].set(jnp.nan), (0, 1)),
    ]:
        after, _, scaling = jax.jit(step)(BY_LOSS, share(spoil), share(value))
        assert (int(scaling.zeroed), int(scaling.skipped)) == expected
        alike = scaling if where == "unsummed" else (after, scaling)
        for leaf in jax.tree.leaves(alike):
            first, *rest = (np.asarray(s.data) for s in leaf.addressable_shards)
            assert all(np.array_equal(first, other) for other in rest)
        assert np.isfinite(after).all() and same_bits(after, w) == bool(expected[1])


def test_members_of_a_vmap():
    w, state = weights(), ADAM.init(weights())
    several = jax.tree.map(lambda *b: jnp.stack(b), marked("a"), marked())
    offset = jnp.array([0.0, 0.0])
    one = lambda scaling, bad, offset: trained(w, state, scaling, bad, offset)[:3]  # noqa: E731
    *_, scaling = jax.jit(jax.vmap(one, (None, 0, 0)))(BY_LOSS, several, offset)
    assert scaling.zeroed.tolist() == [1, 0]
    after, _, scaling = jax.vmap(one, (None, 0, 0))(
        BY_LOSS, several, offset.at[0].set(jnp.nan)
    )
    assert scaling.zeroed.tolist() == [0, 0] and scaling.skipped.tolist() == [1, 0]
    assert same_bits(after["a"][0], w["a"])


def test_nnx():
    model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, ADAM, wrt=nnx.Param)
    before = jnp.copy(model.kernel[...])

    @nnx.jit
    def step(model, optimizer, scaling, bad, offset):
        fun = lambda m: jnp.sum(spoiled(m.kernel[...], bad) ** 2) + offset  # noqa: E731
        result = mpx.nnx.value_and_grad(mpx.autocast(fun), scaling)(model)
        mpx.nnx.update(optimizer, model, result.grads, result.finite)
        return result.scaling

    bad = jnp.array([[True], [False]])
    scaling = step(model, optimizer, BY_LOSS, bad, jnp.nan)
    assert same_bits(model.kernel[...], before) and int(scaling.skipped) == 1
    scaling = step(model, optimizer, scaling, bad, 0.0)
    assert int(scaling.zeroed) == 1 and model.kernel[...][0] == before[0]
    assert np.isfinite(model.kernel[...]).all() and model.kernel[...][1] != before[1]


def test_a_nan_of_one_layer_stops_those_before_it():
    """What it misses: with the exact check all steps would be skipped."""
    w = {"first": jnp.ones((2, 2)), "last": jnp.ones((2, 2))}

    def fun(w, x):
        h = spoiled(x @ w["first"], jnp.zeros((3, 2), bool).at[0].set(True))
        return jnp.sum((h @ w["last"]) ** 2)

    step = jax.jit(lambda scaling, *args: gradient(fun, scaling)(*args))
    result = step(BY_LOSS, w, jnp.ones((3, 2)))
    assert not result.grads["first"].any() and result.grads["last"].all()
    assert int(result.scaling.zeroed) == 1
    exact = step(mpx.NoLossScaling(), w, jnp.ones((3, 2)))
    assert not exact.finite


def test_float16_and_recipes_with_a_state_are_refused():
    w, x = jnp.ones((16, 16)), jnp.ones((16, 16))
    product = lambda w, x: jnp.sum(x @ w)  # noqa: E731
    float16 = mpx.autocast(product, jnp.float16)
    explicit = dict(policy=mpx.get_policy("compute=float16,output=float32"))
    total = mpx.force_full_precision(jnp.sum, jnp.float32)
    for fun, options in ((float16, {}), (lambda w, x: total(x @ w), explicit)):
        with pytest.raises(ValueError, match='skip="loss".*float16'):
            mpx.filter_grad(fun, BY_LOSS, **options)(w, x)
    delayed = mpx.autocast(product, recipe=mpx.DelayedScaling())
    scaling = mpx.init_scaling(delayed, w, x).with_loss(BY_LOSS)
    with pytest.raises(ValueError, match=r'skip="loss".*recipe with a state'):
        mpx.filter_grad(delayed, scaling)(w, x)
    current = mpx.autocast(product, recipe=mpx.Float8CurrentScaling())
    assert mpx.filter_grad(current, BY_LOSS)(w, x).finite
    with pytest.raises(ValueError, match="retries"):
        gradient(product, BY_LOSS, retries=1)(w, x)
    for wrong in ("Loss", None, 1, jnp.asarray(True)):
        refused = pytest.raises(TypeError, match='True, False or "loss"')
        with unchecked_annotations(), refused:
            mpx.NoLossScaling(skip=wrong)


def test_states_are_saved_and_other_states_keep_their_structure():
    *_, scaling, _ = jitted(weights(), ADAM.init(weights()), BY_LOSS, marked("a"))
    for read in (
        mpx.NoLossScaling.from_state_dict(scaling.state_dict()),
        pickle.loads(pickle.dumps(scaling)),
    ):
        assert same_bits(read, scaling) and read.skip == "loss"
        assert int(read.zeroed) == 1
    exact = mpx.NoLossScaling()
    assert len(jax.tree.leaves(exact)) == len(jax.tree.leaves(exact.record))
    assert "zeroed" not in exact.state_dict()
    for state in (
        exact.state_dict() | {"skip": "loss"},
        scaling.state_dict() | {"skip": True},
    ):
        with pytest.raises(ValueError, match="zeroed"):
            mpx.NoLossScaling.from_state_dict(state)


def test_tools_see_gradients_as_they_are():
    fun, given = mpx.autocast(curved), (weights(), marked("b"))
    assert "non-finite, loss scale 1: ['b']" in str(mpx.blame(fun, BY_LOSS)(*given))
    found = mpx.compare(curved, fun, BY_LOSS)(*given)
    wanted = mpx.compare(curved, fun, mpx.NoLossScaling())(*given)
    assert str(found.gradients) == str(wanted.gradients)
    w, state = weights(), ADAM.init(weights())
    mpx.guard(jitted(w, state, BY_LOSS, marked("b"))[:3])
