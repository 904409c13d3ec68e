"""The state of loss scaling through transforms, copies, files and versions."""

import copy
import functools
import itertools
import pickle

import equinox as eqx
import flax.serialization
import jax
import jax.numpy as jnp
import msgpack
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import mpx
import mpx.compat.flax

from ..helpers import assert_same_bits, unchecked_annotations
from ..step.cases import same_bits


def _dynamic():
    """A state in the middle of a run: no field has its default value."""
    options = {"backoff": 0.5, "max_loss_scaling": 2.0**10, "hysteresis": 2}
    scaling = mpx.DynamicLossScaling(32.0, 0.25, 4.0, 3, **options)
    flags = jnp.array([True, False, True, False])
    for step in "1001011":
        scaling = scaling.adjust(step == "1", places_finite=flags)
    return scaling.adjust(False, loss_finite=False, places_finite=flags).adjust(True)


STATES = {
    "dynamic": _dynamic,
    "dynamic-fresh": mpx.DynamicLossScaling,
    "static": lambda: mpx.StaticLossScaling(3.0).adjust(False).adjust(True),
    "none": lambda: mpx.NoLossScaling().adjust(False),
    "none-skip-false": lambda: mpx.NoLossScaling(skip=False),
    "none-by-loss": lambda: mpx.NoLossScaling(skip="loss").adjust(False),
}


def _through_flatten(scaling, _):
    leaves, tree = jax.tree.flatten(scaling)
    return jax.tree.unflatten(tree, [np.asarray(x) for x in leaves])


def _through_equinox_file(scaling, tmp_path):
    eqx.tree_serialise_leaves(tmp_path / "state.eqx", scaling)
    return eqx.tree_deserialise_leaves(tmp_path / "state.eqx", scaling)


def _through_flax(scaling, _):
    data = flax.serialization.msgpack_serialize(scaling.state_dict())
    return type(scaling).from_state_dict(flax.serialization.msgpack_restore(data))


def _through_flax_bytes(scaling, _):
    mpx.compat.flax.register_serialization()
    data = flax.serialization.to_bytes({"scaling": scaling})
    target = {"scaling": jax.eval_shape(lambda: scaling)}  # only its class is used
    return flax.serialization.from_bytes(target, data)["scaling"]


def _through_orbax(scaling, tmp_path):
    with ocp.StandardCheckpointer() as checkpointer:
        arrays, static = eqx.partition(scaling, eqx.is_array)
        checkpointer.save(tmp_path / "state", arrays)
        checkpointer.wait_until_finished()
        like = jax.tree.map(ocp.utils.to_shape_dtype_struct, arrays)
        return eqx.combine(checkpointer.restore(tmp_path / "state", like), static)


def _through_savez(scaling, tmp_path):
    np.savez(tmp_path / "state.npz", **scaling.state_dict())
    with np.load(tmp_path / "state.npz") as state:
        return type(scaling).from_state_dict(dict(state))


WAYS = {
    "state_dict": lambda s, _: type(s).from_state_dict(s.state_dict()),
    "base_class": lambda s, _: mpx.AbstractLossScaling.from_state_dict(s.state_dict()),
    "pickle": lambda s, _: pickle.loads(pickle.dumps(s)),
    "deepcopy": lambda s, _: copy.deepcopy(s),
    "jit": lambda s, _: jax.jit(lambda s: s)(s),
    "filter_jit": lambda s, _: eqx.filter_jit(lambda s: s)(s),
    "scan": lambda s, _: jax.lax.scan(lambda s, _: (s, None), s, length=3)[0],
    "vmap": lambda s, _: jax.vmap(lambda _: s, out_axes=None)(jnp.zeros(2)),
    "cond": lambda s, _: jax.lax.cond(True, lambda s: s, lambda s: s.adjust(False), s),
    "flatten": _through_flatten,
    "partition": lambda s, _: eqx.combine(*eqx.partition(s, eqx.is_inexact_array)),
    "equinox_file": _through_equinox_file,
    "flax": _through_flax,
    "flax_bytes": _through_flax_bytes,
    "orbax": _through_orbax,
    "savez": _through_savez,
}


@pytest.mark.parametrize(
    ("way", "kind"),
    [
        *((way, "dynamic") for way in WAYS),
        *zip(WAYS, itertools.cycle([*STATES][1:]), strict=False),
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning:orbax")
def test_rows24_26_round_trips_keep_every_field_and_continue(way, kind, tmp_path):
    scaling = STATES[kind]()
    other = WAYS[way](scaling, tmp_path)
    assert type(other) is type(scaling)
    assert_same_bits(other.state_dict(), scaling.state_dict())
    for step in "1101000111":
        scaling, other = scaling.adjust(step == "1"), other.adjust(step == "1")
        assert_same_bits(other.state_dict(), scaling.state_dict())


def test_no_field_of_the_example_has_its_default():
    state, default = _dynamic().state_dict(), mpx.DynamicLossScaling().state_dict()
    same = {k for k in state if np.array_equal(state[k], default[k])}
    record = {f"record.{name}" for name in ("finite", "halted", "skipped_in_a_row")}
    assert same <= record | {"kind", "version", "backoff", "floored"}


def test_deepcopy_shares_no_buffer_and_works_under_jit():
    scaling = _dynamic()
    other = copy.deepcopy(scaling)
    for x, y in zip(jax.tree.leaves(scaling), jax.tree.leaves(other), strict=True):
        assert x.unsafe_buffer_pointer() != y.unsafe_buffer_pointer()
    out = jax.jit(lambda s: copy.deepcopy(s).adjust(True))(scaling)
    assert_same_bits(out.state_dict(), _dynamic().adjust(True).state_dict())


@pytest.mark.parametrize("kind", STATES)
def test_a_state_can_be_donated_from_the_start(kind):
    adjust = lambda scaling: scaling.adjust(True)  # noqa: E731
    donating, given = jax.jit(adjust, donate_argnums=0), jnp.float32(8.0)
    expected = jax.jit(adjust)(STATES[kind]())
    assert_same_bits(donating(STATES[kind]()).state_dict(), expected.state_dict())
    # A scale that the user made survives.
    donating(mpx.DynamicLossScaling(given))
    donating(mpx.StaticLossScaling(given))
    assert float(given) == 8.0


def test_buffers_of_a_fresh_state_are_not_shared():
    leaves = jax.tree.leaves(mpx.DynamicLossScaling())
    assert len({x.unsafe_buffer_pointer() for x in leaves}) == len(leaves)


# Rows 25: states that must be refused.


def _without(key):
    def change(state):
        del state[key]
        return state

    return change


def _with(**values):
    return lambda state: {**state, **values}


COUNTS = "record.steps", "record.skipped", "record.skipped_in_a_row", "floored"


def _flipped(name, bit):
    def change(state):
        bits = np.asarray(state[name]).view(np.uint32) ^ np.uint32(1 << bit)
        return {**state, name: np.asarray(bits.view(state[name].dtype))}

    return change


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda state: {}, r"the keys none"),
        (_without("backoff"), r"missing: `backoff`; unknown: none"),
        (_without("record.steps"), r"missing: `record.steps`"),
        (_without("kind"), r"needs the key `kind`.*`backoff`"),
        (_without("version"), r"cannot read a state with the keys.*`kind`"),
        (_with(scale=1), r"missing: none; unknown: `scale`"),
        (lambda s: {"a": 1, "b": 2}, r"the keys `a`, `b`"),
        (_with(version=99), r"version 99.*newer mpx"),
        (_with(version=-1), r"version -1"),
        (_with(version="one"), r"version one"),
        (_with(version=None), r"version None"),
        (_with(kind="StaticLossScaling"), r"that of 'StaticLossScaling'"),
        (_with(kind="Other"), r"that of 'Other'"),
        (_with(period=np.float32(3)), r"needs int32 for `period`; got float32"),
        (_with(period=3), r"needs int32 for `period`"),
        (_with(loss_scaling=np.float16(8)), r"`loss_scaling`; got float16"),
        (_with(loss_scaling=np.float32(np.nan)), r"min_loss_scaling <= loss_scaling"),
        (_with(loss_scaling=np.float32(np.inf)), r"min_loss_scaling <= loss_scaling"),
        (_with(loss_scaling=np.float32(-8)), r"min_loss_scaling <= loss_scaling"),
        (_with(loss_scaling=np.float32(0)), r"min_loss_scaling <= loss_scaling"),
        (_with(loss_scaling=np.float32(2**11)), r"min_loss_scaling <= loss_scaling"),
        (_with(factor=np.float32(1)), r"`factor`"),
        (_with(backoff=np.float32(1)), r"`backoff`"),
        (_with(period=np.int32(0)), r"`period`"),
        (_with(counter=np.int32(-1)), r"`counter`"),
        (_with(hysteresis=np.int32(0)), r"`hysteresis`"),
        (_with(hysteresis_left=np.int32(-1)), r"`hysteresis_left`"),
        (_with(hysteresis_left=np.int32(2)), r"`hysteresis_left`.*at most.*1; got 2"),
        (_with(**{"record.skipped": np.int32(99)}), r"`skipped`.*0 and `steps`, 9"),
        (_with(**{"record.last_finite": np.int32(99)}), r"`last_finite`.*got 99"),
        (_with(**{"record.skipped_in_a_row": np.int32(9)}), r"`skipped_in_a_row`"),
        (_with(loss_scaling=np.array([8.0, 16.0], np.float32)), "loss_scaling"),
        (_with(**{"record.places": np.zeros(3, np.int32)}), "record.places"),
        # The sign and the largest bit of the exponent.
        *(
            (_flipped(name, bit), "scaling|factor")
            for name in ("loss_scaling", "min_loss_scaling", "factor")
            for bit in (31, 30)
        ),
        *((_flipped(name, 31), name.rpartition(".")[2]) for name in COUNTS),
        (_with(**{"record.bad_losses": np.int32(9)}), r"`bad_losses`.*`skipped`, 4"),
    ],
)
def test_row25_wrong_states_are_refused(change, match):
    with pytest.raises(ValueError, match=match):
        mpx.DynamicLossScaling.from_state_dict(change(_dynamic().state_dict()))


@pytest.mark.parametrize("skip", [1, None, "yes", np.float32(0), np.array([True])])
def test_row25_a_flag_must_be_a_boolean(skip):
    state = {**mpx.NoLossScaling(skip=False).state_dict(), "skip": skip}
    with pytest.raises(ValueError, match="a boolean for `skip`"):
        mpx.NoLossScaling.from_state_dict(state)


@pytest.mark.parametrize("part", [0.3, 0.7, 0.99])
def test_truncated_files_are_refused(part):
    data = flax.serialization.msgpack_serialize(_dynamic().state_dict())
    with pytest.raises((ValueError, msgpack.exceptions.UnpackException)):
        state = flax.serialization.msgpack_restore(data[: int(len(data) * part)])
        mpx.DynamicLossScaling.from_state_dict(state)
    data = pickle.dumps(_dynamic())
    with pytest.raises((ValueError, EOFError, pickle.UnpicklingError)):
        pickle.loads(data[: int(len(data) * part)])


@pytest.mark.parametrize("state", [None, [], 3, "state"])
def test_what_is_no_mapping_is_refused(state):
    match = r"needs the dictionary from `state_dict\(\)`"
    with unchecked_annotations(), pytest.raises(TypeError, match=match):
        mpx.DynamicLossScaling.from_state_dict(state)


PUBLISHED = {"min_loss_scaling": 1.0, "counter": np.int32(5), "factor": 2, "period": 7}


@pytest.mark.parametrize("make", [float, np.float32, jnp.float32])
def test_row25_a_state_of_the_published_mpx_migrates(make):
    old = PUBLISHED | {"loss_scaling": make(64.0), "min_loss_scaling": make(1.0)}
    new = mpx.DynamicLossScaling.from_state_dict(old)
    assert float(new.loss_scale) == 64.0
    assert int(new.counter) == 5 and int(new.period) == 7 and int(new.steps) == 0
    assert float(new.adjust(True).adjust(True).loss_scale) == 128.0
    base = mpx.AbstractLossScaling.from_state_dict(old)
    assert_same_bits(base.state_dict(), new.state_dict())


def test_a_migrated_state_is_checked():
    with pytest.raises(ValueError, match="`loss_scaling`"):
        mpx.DynamicLossScaling.from_state_dict({**PUBLISHED, "loss_scaling": 0.0})
    with pytest.raises(ValueError, match="StaticLossScaling"):
        mpx.StaticLossScaling.from_state_dict({**PUBLISHED, "loss_scaling": 8.0})


# Version 2 counts bad losses, and the places of the last bad step. Version 3 keeps the
# number and the loss scale of that step.
NEW_IN = {
    2: {"record.bad_losses": np.int32(0), "record.places_seen": np.int32(0)},
    3: {"record.last_bad": np.int32(0), "record.bad_scale": np.float32(0)},
}


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("kind", STATES)
def test_row25_a_state_of_an_older_version_migrates(kind, version):
    scaling = STATES[kind]()
    state = scaling.state_dict()
    new = NEW_IN[3] | (NEW_IN[2] if version == 1 else {})
    old = {k: v for k, v in state.items() if k not in new} | {"version": version}
    migrated = type(scaling).from_state_dict(old)
    adjusted = scaling.adjust(True).state_dict()
    assert_same_bits(migrated.adjust(True).state_dict(), {**adjusted, **new})
    if version == 2:
        assert_same_bits(migrated.state_dict(), {**state, **new})
        assert migrated.of_bad_step() is migrated
    del old["record.steps"]
    with pytest.raises(ValueError, match="missing: `record.steps`; unknown: none"):
        type(scaling).from_state_dict(old)


def test_row25_stacked_states_round_trip_and_migrate_from_version_1():
    states = jax.vmap(mpx.DynamicLossScaling)(jnp.array([8.0, 16.0])).state_dict()
    new = NEW_IN[2] | NEW_IN[3]
    old = {k: v for k, v in states.items() if k not in new} | {"version": 1}
    for state in (states, old):
        other = mpx.DynamicLossScaling.from_state_dict(state)
        assert_same_bits(other.state_dict(), states)
        assert other.loss_scaling.tolist() == [8.0, 16.0]


def test_a_bad_step_leaves_its_number_and_its_scale():
    scaling = mpx.DynamicLossScaling(16.0).adjust(True).adjust(False).adjust(False)
    assert int(scaling.record.last_bad) == 3
    assert float(scaling.loss_scale) == 4.0
    assert float(scaling.of_bad_step().loss_scale) == 8.0
    good = scaling.adjust(True)
    assert int(good.record.last_bad) == 3 and float(good.record.bad_scale) == 8.0
    with pytest.raises(ValueError, match="`of_bad_step.*cannot run inside jit"):
        jax.jit(lambda s: s.of_bad_step())(scaling)


LARGEST = 2**31 - 1
COUNTERS = ["steps", "skipped", "skipped_in_a_row", "bad_losses", "last_finite"]


@pytest.mark.parametrize("loss_finite", [True, False])
@pytest.mark.parametrize("finite", [True, False])
def test_counters_stay_at_the_largest_number_and_can_be_read(finite, loss_finite):
    """Of int32; one more would be negative, and the checkpoint refused."""
    scaling = mpx.DynamicLossScaling(1.0)
    full = {f"record.{name}": np.int32(LARGEST) for name in COUNTERS}
    full |= {"counter": np.int32(LARGEST), "floored": np.int32(LARGEST)}
    scaling = type(scaling).from_state_dict({**scaling.state_dict(), **full})
    for _ in range(2):
        scaling = scaling.adjust(finite, loss_finite=loss_finite)
        assert int(scaling.steps) == int(scaling.skipped) == LARGEST
        again = type(scaling).from_state_dict(scaling.state_dict())
        assert_same_bits(again.state_dict(), scaling.state_dict())
    assert int(scaling.last_finite) == int(scaling.bad_losses) == LARGEST
    assert int(scaling.skipped_in_a_row) == (0 if finite else LARGEST)
    if not finite:
        with pytest.raises(FloatingPointError, match=f"step {LARGEST}"):
            mpx.check(scaling)


def test_a_mid_run_checkpoint_gives_the_same_training():
    """Row 26, over whole steps."""

    def loss(w, x):
        return jnp.sum((w * x).astype(jnp.float32) ** 2)

    @jax.jit
    def step(w, scaling, x):
        scaling, finite, grads = mpx.filter_grad(loss, scaling)(w, x)
        return mpx.select_tree(finite, w - 0.01 * grads, w), scaling

    w, scaling = jnp.ones(3), mpx.DynamicLossScaling(2.0**12, period=2)
    xs = [jnp.full(3, x) for x in (1.0, 0.5, jnp.inf, 2.0, 1e5, 1.0, 1.0)]
    for x in xs[:4]:
        w, scaling = step(w, scaling, x)
    other_w, other = pickle.loads(pickle.dumps((w, scaling)))
    for x in xs[4:]:
        w, scaling = step(w, scaling, x)
        other_w, other = step(other_w, other, x)
    assert_same_bits((other_w, other.state_dict()), (w, scaling.state_dict()))
    assert int(scaling.skipped) == 2


@pytest.mark.slow
def test_flax_restores_the_state_of_a_recipe():
    """Its class alone does not know the slots; the target does."""
    mpx.compat.flax.register_serialization()

    @functools.partial(mpx.autocast, recipe=mpx.DelayedScaling(amax_history_len=4))
    def loss(weights, x):
        return jnp.sum(jnp.tanh(x @ weights[0]) @ weights[1])

    weights, x = [jnp.ones((16, 16)), jnp.ones((16, 4))], jnp.ones((8, 16))
    start = mpx.init_scaling(loss, weights, x)
    scaling = mpx.filter_grad(loss, start)(weights, x).scaling
    data = flax.serialization.to_bytes({"scaling": scaling})
    restored = flax.serialization.from_bytes({"scaling": start}, data)["scaling"]
    assert same_bits(restored, scaling) and not same_bits(restored, start)


def test_flax_restores_stored_weights_and_their_masters():
    quantizer = mpx.quantization.MXFP8Quantizer()
    mpx.compat.flax.register_serialization()
    tx = mpx.master_weights(optax.adam(1e-3))
    store = jax.jit(lambda m: mpx.quantization.quantize_weights(m, quantizer))

    def made(scale):
        model = store({"w": scale * jax.random.normal(jax.random.key(0), (32, 32))})
        return {"model": model, "opt_state": tx.init(model)}

    data = flax.serialization.to_bytes(made(3.0))
    assert same_bits(flax.serialization.from_bytes(made(1.0), data), made(3.0))
    other = mpx.quantization.TensorQuantizer(mpx.Format.E5M2)
    other = mpx.quantization.quantize_weights({"w": jnp.ones((32, 32))}, other)
    with pytest.raises(ValueError, match="must be stored as in the state"):
        flax.serialization.from_bytes({**made(1.0), "model": other}, data)
