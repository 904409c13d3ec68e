"""Training states with a loss scaling through `flax.serialization`, in bytes."""

import subprocess
import sys
from typing import Any

import flax.linen as linen
import flax.serialization as serialization
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training import train_state

import mpx.compat.flax

from ..helpers import assert_same_bits, unchecked_annotations

pytestmark = pytest.mark.third_party  # Flax and Optax


@pytest.fixture(autouse=True)
def _registered():
    mpx.compat.flax.register_serialization()


def bad_and_good(scaling):
    """A state in mid-run, whose record remembers where a bad step was bad."""
    scaling = scaling.adjust(False, places_finite=jnp.array([True, False]))
    return scaling.adjust(True)


class FlaxState(train_state.TrainState):
    scaling: Any


@flax.struct.dataclass
class Small:
    weight: Any
    scaling: Any


def flax_train_state(scaling):
    model = linen.Dense(2)
    params = model.init(jax.random.key(0), jnp.ones((1, 3)))["params"]
    return FlaxState.create(
        apply_fn=model.apply, params=params, tx=optax.adam(0.1), scaling=scaling
    )


CONTAINERS = {
    "dictionary": lambda s: {"step": jnp.int32(3), "scaling": s},
    "nested": lambda s: {"a": [jnp.ones(2), (s, {"b": s})]},
    "dataclass": lambda s: Small(jnp.ones(2), s),
    "train_state": flax_train_state,
}
SCALINGS = {
    "dynamic": lambda: bad_and_good(mpx.DynamicLossScaling(2.0**7, period=3)),
    "static": lambda: bad_and_good(mpx.StaticLossScaling(3.0)),
    "none": lambda: bad_and_good(mpx.NoLossScaling()),
    "no_skip": lambda: mpx.NoLossScaling(skip=False),
    "stacked": lambda: jax.vmap(mpx.DynamicLossScaling)(jnp.array([8.0, 16.0])),
}


@pytest.mark.parametrize("kind", SCALINGS)
@pytest.mark.parametrize("container", CONTAINERS)
def test_round_trip_of_a_training_state(container, kind):
    scaling = SCALINGS[kind]()
    state = CONTAINERS[container](scaling)
    fresh = CONTAINERS[container](type(scaling)(*([1.0] if kind == "static" else [])))
    restored = serialization.from_bytes(fresh, serialization.to_bytes(state))
    if container == "train_state":
        assert type(restored) is FlaxState
        # What Flax keeps from the target: functions, compared by identity.
        assert restored.tx is fresh.tx and restored.apply_fn is fresh.apply_fn
        restored = restored.replace(tx=state.tx, apply_fn=state.apply_fn)
    assert_same_bits(restored, state)


@pytest.mark.parametrize("moments", ["8bit", "16bit", "bfloat16"])
def test_a_state_in_few_bits_comes_back_bit_for_bit(moments):
    params = {"w": jnp.ones((128, 128), jnp.bfloat16), "b": jnp.ones(3)}
    optimizer = mpx.compress_state(optax.adam(1e-3), moments)
    grads = jax.tree.map(lambda x: 0.3 * x, params)
    _, state = optimizer.update(grads, optimizer.init(params), params)
    fresh = optimizer.init(params)
    restored = serialization.from_bytes(fresh, serialization.to_bytes(state))
    assert_same_bits(restored, state)
    other = {"8bit": "bfloat16"}.get(moments, "8bit")
    other = mpx.compress_state(optax.adam(1e-3), other).init(params)
    with pytest.raises(ValueError, match=r"compress_state\(optimizer\).init"):
        serialization.from_bytes(other, serialization.to_bytes(state))


def test_a_restored_run_continues_bit_for_bit():
    total = mpx.force_full_precision(jnp.sum, jnp.float32)

    @jax.jit
    def run(state, x):
        loss = lambda params: total(state.apply_fn({"params": params}, x) ** 2)  # noqa: E731
        result = mpx.grad(loss, state.scaling)(state.params)
        params, opt_state, scaling = mpx.optimizer_step(
            state.params, state.tx, state.opt_state, result
        )
        return state.replace(params=params, opt_state=opt_state, scaling=scaling)

    state = flax_train_state(mpx.DynamicLossScaling(2.0**4, period=2))
    xs = [jnp.full((1, 3), x) for x in (1.0, np.nan, 0.5, 2.0, np.inf, 1.0)]
    for x in xs[:3]:
        state = run(state, x)
    other = serialization.from_bytes(state, serialization.to_bytes(state))
    for x in xs[3:]:
        state, other = run(state, x), run(other, x)
    assert_same_bits(other, state)
    assert int(other.scaling.skipped) == 2


def test_the_state_of_skip_nonfinite():
    optimizer = mpx.skip_nonfinite(optax.adam(0.1))
    state = optimizer.init(jnp.ones(2))
    _, state = optimizer.update(jnp.array([1.0, jnp.nan]), state, jnp.ones(2))
    data = serialization.to_bytes(state)
    assert_same_bits(serialization.from_bytes(optimizer.init(jnp.ones(2)), data), state)
    assert int(state.record.skipped) == 1


def damaged(**changes):
    """The bytes of a training state whose loss scaling or record was changed."""
    state = serialization.to_state_dict(
        {"scaling": mpx.DynamicLossScaling(), "record": mpx.reports.StepRecord()}
    )
    for name, (key, value) in changes.items():
        state[name][key] = value
        if value is None:
            del state[name][key]
    return serialization.msgpack_serialize(state)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"scaling": ("period", None)}, "missing: `period`; unknown: none"),
        ({"scaling": ("extra", 1)}, "missing: none; unknown: `extra`"),
        ({"scaling": ("version", 99)}, "version 99"),
        ({"scaling": ("kind", "NoLossScaling")}, "that of 'NoLossScaling'"),
        ({"scaling": ("loss_scaling", np.float32(-1))}, "`min_loss_scaling <= "),
        ({"scaling": ("period", np.float32(2))}, "int32 for `period`; got float32"),
        ({"record": ("steps", None)}, "missing: `steps`"),
        ({"record": ("skipped", np.int32(-1))}, "at least 0; got `skipped` -1"),
        ({"record": ("places", np.zeros(3, np.int32))}, r"int32\[8\] for `places`"),
        ({"record": ("kind", "NoLossScaling")}, "a `mpx.reports.StepRecord`; got"),
        ({"record": ("version", 4)}, "version 4"),
    ],
)
def test_a_wrong_state_raises_the_errors_of_the_library(changes, match):
    target = {"scaling": mpx.DynamicLossScaling(), "record": mpx.reports.StepRecord()}
    serialization.from_bytes(target, damaged())
    with pytest.raises(ValueError, match=match):
        serialization.from_bytes(target, damaged(**changes))


@pytest.mark.parametrize("value", [None, 3, "state", [1]])
@pytest.mark.parametrize("kind", [mpx.DynamicLossScaling, mpx.reports.StepRecord])
def test_what_is_no_state_is_refused(kind, value):
    with unchecked_annotations(), pytest.raises(TypeError, match="needs.*got"):
        serialization.from_state_dict(kind(), value)


def test_the_class_of_the_target_is_asked_for():
    data = serialization.to_bytes(mpx.NoLossScaling())
    with pytest.raises(ValueError, match="got that of 'NoLossScaling'"):
        serialization.from_bytes(mpx.DynamicLossScaling(), data)


# In programs of their own: what Flax was told once, it keeps.
BEFORE_AND_AFTER = """
import mpx, mpx.compat.flax
from flax.serialization import from_bytes, is_serializable, to_bytes

kinds = [mpx.DynamicLossScaling, mpx.NoLossScaling, mpx.reports.StepRecord]
assert not any(map(is_serializable, kinds))
mpx.compat.flax.register_serialization()
assert all(map(is_serializable, kinds))
"""
DEFINED_LATER = """
import equinox as eqx
mpx.compat.flax.register_serialization()
class Doubling(mpx.DynamicLossScaling):
    pass
assert not is_serializable(Doubling)
mpx.compat.flax.register_serialization()
scaling = Doubling(8.0)
restored = from_bytes({"scaling": Doubling()}, to_bytes({"scaling": scaling}))
assert type(restored["scaling"]) is Doubling
assert eqx.tree_equal(restored["scaling"], scaling)
"""


WITHOUT_THE_CALL = """
import sys
import jax, jax.numpy as jnp, mpx, optax

weights, tx = {"w": jnp.ones((64, 128))}, mpx.compress_state(optax.adam(1e-3))
tx.init(weights)
mpx.quantization.quantize_weights(weights)
assert "flax" not in sys.modules
from flax.serialization import from_bytes, to_bytes
state, stored = tx.init(weights), mpx.quantization.quantize_weights(weights)
_, state = tx.update(weights, state, weights)
saved = {"state": state, "weights": stored}
like = {"state": tx.init(weights), "weights": stored}
restored = from_bytes(like, to_bytes(saved))
assert jax.tree.structure(restored) == jax.tree.structure(saved)
same = jax.tree.map(lambda x, y: bool((x == y).all()), restored, saved)
assert all(jax.tree.leaves(same))
"""


@pytest.mark.parametrize("code", [BEFORE_AND_AFTER + DEFINED_LATER, WITHOUT_THE_CALL])
def test_classes_are_registered_by_the_call_and_not_before(code):
    """Arrays with scales also where they are made, if Flax is there."""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
