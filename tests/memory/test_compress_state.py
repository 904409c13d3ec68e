"""`mpx.compress_state`: what is proved of a state, and steps with it."""

import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
from optax import contrib

import mpx
from mpx._memory._codes import Code, Noise, compressed
from mpx._memory._intervals import kinds_of

from ..helpers import unchecked_annotations
from ..step.cases import same_bits

# Optax's Adam and others mix dtypes.
pytestmark = pytest.mark.third_party


def weights(dtype="float32"):
    key = jax.random.key(0)
    return {"w": (0.1 * jax.random.normal(key, (32, 128))).astype(dtype)}


def gradients(seed=0):
    return {"w": jax.random.normal(jax.random.key(seed + 1), (32, 128))}


def steps(tx, model, state, count=3):
    update = jax.jit(lambda m, s, g: mpx.optimizer_update(m, tx, s, g, True))
    for seed in range(count):
        model, state = update(model, state, gradients(seed))
    return model, state


# Arrays like weights, by the fields of the state: + is never negative, S accumulates, C
# is a copy. Names do not decide: `nu` is signed in SM3, `v` in Adan and not in
# Adafactor, and a factor is a value.
AVERAGES = {"exp_avg": "", "exp_avg_sq": "+", "grad_sum": ""}
KINDS = {
    "adam": (optax.adam, {"mu": "", "nu": "+"}),
    "slow adam": (functools.partial(optax.adam, b2=0.9999), {"mu": "", "nu": "+S"}),
    "ademamix": (contrib.ademamix, {"m1": "", "m2": "S", "nu": "+"}),
    "adan": (optax.adan, {"m": "", "v": "", "n": "+", "g": ""}),
    "adafactor": (optax.adafactor, {"v": "+", "v_row": "+", "v_col": "+"}),
    "sm3": (optax.sm3, {"nu": ""}),
    "adamax": (optax.adamax, {"mu": "", "nu": "+"}),
    "amsgrad": (optax.amsgrad, {"mu": "", "nu": "+", "nu_max": "+"}),
    "adabelief": (optax.adabelief, {"mu": "", "nu": "+"}),
    "adagrad": (optax.adagrad, {"sum_of_squares": "+S"}),
    "adadelta": (optax.adadelta, {"e_g": "+", "e_x": "+"}),
    "lion": (optax.lion, {"mu": ""}),
    "momentum": (functools.partial(optax.sgd, momentum=0.9), {"trace": ""}),
    "yogi": (optax.yogi, {"mu": "", "nu": "S"}),
    "acprop": (contrib.acprop, {"mu": "", "nu": "+"}),
    "adopt": (contrib.adopt, {"mu": "", "nu": "+"}),
    "simplified_ademamix": (contrib.simplified_ademamix, {"m": "", "n": "+"}),
    "dadapt": (contrib.dadapt_adamw, AVERAGES),
    "prodigy": (contrib.prodigy, AVERAGES | {"params0": "SC"}),
    "schedule_free": (contrib.schedule_free_adamw, {"nu": "+", "z": "SC"}),
    "MultiSteps": (
        lambda rate: optax.MultiSteps(optax.adam(rate), 3),
        {"mu": "", "nu": "+", "acc_grads": "S"},
    ),
    "hyperparameters": (
        lambda rate: optax.inject_hyperparams(optax.adamw)(learning_rate=rate),
        {"mu": "", "nu": "+"},
    ),
}


@pytest.mark.parametrize("name", KINDS)
def test_what_is_proved_of_a_state(name):
    make, wanted = KINDS[name]
    tx, model = make(1e-3), weights()
    update = lambda p, s: tx.update(p, s, p)[1]  # noqa: E731
    kinds = kinds_of(tx.init, update, model, tx.init(model))
    is_kind = lambda node: type(node).__name__ == "Kind"  # noqa: E731
    leaves = jax.tree_util.tree_leaves_with_path(kinds, is_leaf=is_kind)
    text = lambda k: "+" * (not k.signed) + "S" * k.accumulates + "C" * k.is_copy  # noqa: E731
    like = [each for each in leaves if getattr(each[0][-1], "key", None) == "w"]
    assert {path[-2].name: text(kind) for path, kind in like} == wanted


def test_a_factor_that_may_be_above_one_proves_nothing():
    def init(params):
        return {"nu": jax.tree.map(jnp.zeros_like, params), "decay": jnp.float32(0.5)}

    def update(params, state):
        decay = 3 * state["decay"]
        nu = decay * state["nu"]["w"] + (1 - decay) * params["w"] ** 2
        return {"nu": {"w": nu}, "decay": state["decay"]}

    kinds = kinds_of(init, update, weights(), init(weights()))
    assert kinds["nu"]["w"].signed and not kinds["decay"].signed


def test_a_function_that_is_called_twice_is_not_taken_for_a_square():
    """The variables of its program are the same in both calls."""
    half = jax.jit(lambda x: 0.5 * x)

    def update(params, state):
        return {"w": half(params["w"]) * half(state["w"])}

    init = lambda params: jax.tree.map(jnp.zeros_like, params)  # noqa: E731
    assert kinds_of(init, update, weights(), init(weights()))["w"].signed


MAKERS = {
    "adamw": optax.adamw,
    "adagrad": optax.adagrad,
    "MultiSteps": lambda rate: optax.MultiSteps(optax.adam(rate), 2),
}


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("moments", ["8bit", "bfloat16"])
def test_steps_follow_those_in_float32(name, moments):
    tx, model = MAKERS[name](1e-2), weights()
    small = mpx.compress_state(tx, moments)
    wanted, _ = steps(tx, model, tx.init(model), 4)
    found, state = steps(small, model, small.init(model), 4)
    moved = np.linalg.norm(np.asarray(wanted["w"] - model["w"]))
    # One weight of 4,096 whose two gradients almost cancel in `MultiSteps` is 0.02.
    assert np.linalg.norm(np.asarray(found["w"] - wanted["w"])) < 0.03 * moved
    full = sum(x.nbytes for x in jax.tree.leaves(tx.init(model)))
    kept = sum(x.nbytes for x in jax.tree.leaves(state))
    assert kept < (0.52 if moments == "bfloat16" or name == "adagrad" else 0.36) * full


def test_a_skipped_step_keeps_all_bits_and_a_restored_run_continues():
    tx, model = mpx.compress_state(optax.adagrad(1e-2)), weights()
    model, state = steps(tx, model, tx.init(model))
    restored = jax.tree.map(jnp.asarray, pickle.loads(pickle.dumps((model, state))))
    assert same_bits(steps(tx, *restored), steps(tx, model, state))
    bad = jax.tree.map(lambda g: g.at[0, 0].set(jnp.nan), gradients())
    assert same_bits(mpx.optimizer_update(model, tx, state, bad, False), (model, state))
    inside = mpx.compress_state(mpx.skip_nonfinite(optax.adagrad(1e-2)))
    model, state = steps(inside, weights(), inside.init(weights()))
    step = jax.jit(lambda m, s: mpx.optimizer_update(m, inside, s, bad, True))
    after, new = step(model, state)
    assert same_bits(after, model) and int(new.step) == int(state.step)
    assert same_bits(new.inner_state.inner_state, state.inner_state.inner_state)
    assert int(new.inner_state.record.skipped) == 1
    # What is not skipped shows in the state.
    tx = mpx.compress_state(optax.adam(1e-3))
    _, state = mpx.optimizer_update(model, tx, tx.init(model), bad, True)
    with pytest.raises(FloatingPointError, match=r"mu\['w'\].arrays\['scales'\]"):
        mpx.guard(state)


def test_a_state_in_full_starts_one_and_comes_back():
    plain = optax.adam(1e-3)
    tx, model = mpx.compress_state(plain), weights()
    model, state = steps(tx, model, tx.init(model))
    full = mpx.full_state(state)
    assert jax.tree.structure(full) == jax.tree.structure(plain.init(model))
    assert same_bits(tx.init(model, full).inner_state, state.inner_state)
    plain.update(gradients(), full, model)
    with pytest.raises(ValueError, match=r"`state` in `init\(params, state\)`"):
        tx.init(model, optax.sgd(0.1, momentum=0.9).init(model))


def test_shards_have_the_same_numbers():
    """Rounding at random, too; arithmetic may differ in its last bit."""
    mesh = Mesh(np.array(jax.devices()), ("d",))
    tx, model = mpx.compress_state(optax.adagrad(1e-2)), weights()
    codes = lambda state: state.inner_state[0].sum_of_squares["w"].codes  # noqa: E731
    wanted, full = steps(tx, model, tx.init(model))
    for spec in (P("d"), P(None, "d")):
        placed = jax.device_put(model, NamedSharding(mesh, spec))
        state = mpx.init_optimizer(tx, placed)
        assert codes(state).sharding.spec == spec
        found, state = steps(tx, placed, state)
        np.testing.assert_allclose(found["w"], wanted["w"], rtol=1e-5, atol=1e-7)
        assert np.mean(np.int32(codes(state)) != np.int32(codes(full))) < 0.02


@pytest.mark.parametrize("spec", [P("d"), P(None, "d"), P(None, ("d", "e"))])
@pytest.mark.parametrize("code", [Code(16), Code(16, False), Code(16, False, True)])
def test_codes_of_shards_are_those_of_the_whole(code, spec):
    """XLA divided by scales in shards, and multiplied by their inverses elsewhere."""
    mesh = jax.make_mesh((4, 2), ("d", "e"), axis_types=(AxisType.Auto,) * 2)
    x = jax.random.normal(jax.random.key(0), (64, 256)) ** 2
    stored = jax.jit(lambda x: compressed(x, code, Noise(jnp.uint32(3), "a")))
    found = stored(jax.device_put(x, NamedSharding(mesh, spec)))
    assert found.codes.sharding.is_equivalent_to(NamedSharding(mesh, spec), 2)
    assert same_bits(found, stored(x))


def test_donation_and_bytes_by_part():
    tx = mpx.master_weights(mpx.compress_state(optax.adam(1e-3)), bits=16)
    model = weights("bfloat16")
    state = jax.jit(tx.init)(model)
    step = lambda m, s: mpx.optimizer_update(m, tx, s, gradients(), True)  # noqa: E731
    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(model, state).compile()
    size = sum(x.nbytes for x in jax.tree.leaves((model, state)))
    assert compiled.memory_analysis().alias_size_in_bytes == size < 6.3 * 32 * 128
    report = mpx.state_bytes(model, jax.eval_shape(tx.init, model))
    sizes = {name: size / report.weights for name, _, size in report.parts}
    assert sizes["weights"] == sizes["low_bits"] == 2
    assert sizes["mu"] == sizes["nu"] == 1 + 1 / 32
    assert 6.06 < report.per_weight < 6.07 and "8 bits, signed" in str(report)
    with pytest.raises(ValueError, match="needs a model with arrays"):
        mpx.state_bytes({}, ())


@pytest.mark.parametrize("make", [optax.adam, optax.adagrad, optax.yogi])
@pytest.mark.parametrize("moments", ["8bit", "bfloat16"])
def test_a_compiled_init_does_its_work_when_it_runs(make, moments):
    """XLA encodes the zeros of `init` number by number while it compiles."""
    tx, model = mpx.compress_state(make(1e-3), moments), weights()
    init = functools.partial(mpx.init_optimizer, tx)
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
    placed = jax.device_put(model, NamedSharding(mesh, P("d")))
    whole = jax.jit(tx.init).lower(model).compile()
    parts = jax.jit(init).lower(placed).compile()
    assert whole.cost_analysis().get("flops", 0) > 4 * 32 * 128
    assert parts.cost_analysis().get("flops", 0) > 4 * 32 * 128 / 8
    assert same_bits(whole(model), tx.init(model))
    for state in (init(placed), parts(placed)):
        assert same_bits(state, tx.init(model))
        (codes, *_) = (x for x in jax.tree.leaves(state) if x.shape == (32, 128))
        assert codes.sharding.shard_shape(codes.shape) == (4, 128)


def test_small_integer_and_wide_arrays_stay():
    is_compressed = lambda x: isinstance(x, mpx.quantization.CompressedArray)  # noqa: E731
    compress = functools.partial(mpx.compress_state, optax.adam(1e-3))
    model = {"w": jnp.ones((32, 128)), "b": jnp.ones(128), "s": jnp.ones(())}
    moment = compress().init(model).inner_state[0].mu
    assert is_compressed(moment["w"]) and moment["w"].shape == (32, 128)
    assert moment["b"].dtype == jnp.float32 and moment["s"].shape == ()
    with pytest.raises(ValueError, match=r"at least one axis; got float32\[\]"):
        compress(where=lambda path, leaf: "nu" in path).init(model)
    only = compress(where=lambda path, leaf: path.endswith("nu['b']"))
    nu = only.init(model).inner_state[0].nu
    assert is_compressed(nu["b"]) and not is_compressed(nu["w"])


def wrong(case):
    tx, model, adam = mpx.compress_state(optax.adam(1e-3)), weights(), optax.adam(1e-3)
    state, halve = tx.init(model), functools.partial(jax.tree.map, lambda x: x / 2)
    halved = lambda: state._replace(inner_state=halve(state.inner_state))  # noqa: E731
    plateau = optax.chain(adam, contrib.reduce_on_plateau())
    calls = {
        "optimizer": lambda: mpx.compress_state("adam"),
        "moments": lambda: mpx.compress_state(adam, "4bit"),
        "state": lambda: tx.update(model, adam.init(model), model),
        "arguments": lambda: mpx.compress_state(plateau).init(model),
        "arithmetic": lambda: halve(state),
        "codes": lambda: tx.update(model, halved(), model),
    }
    calls[case]()


@pytest.mark.parametrize(
    ("case", "error", "match"),
    [
        ("optimizer", TypeError, r"`mpx.compress_state\(optimizer\)` needs an Optax"),
        ("moments", ValueError, "must be one of 8bit, 16bit, bfloat16; got '4bit'"),
        ("state", TypeError, "needs the state from its `init`"),
        ("arguments", ValueError, r"extra_args=\{'value': 0.0\}"),
        ("arithmetic", TypeError, r"mpx.full_state\(opt_state\)"),
        ("codes", ValueError, "are meaningless alone"),
    ],
)
def test_errors(case, error, match):
    with unchecked_annotations(), pytest.raises(error, match=match):
        wrong(case)
