"""A state in few bits from a file: as it was, or not at all."""

import importlib
import itertools
import pickle

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import mpx
from mpx._memory import CompressedArray
from mpx._memory._small_weights import SmallWeightsState

from ..step.cases import same_bits

pytestmark = [
    pytest.mark.third_party,
    pytest.mark.filterwarnings("ignore::DeprecationWarning:orbax"),
]
MOMENTS = ("8bit", "16bit", "bfloat16")


def weights(dtype="float32"):
    return {"w": jax.random.normal(jax.random.key(0), (64, 128)).astype(dtype)}


def of_moments(moments):
    tx = mpx.compress_state(optax.adam(1e-3), moments)
    return tx.update(weights(), tx.init(weights()), weights())[1]


def of_bits(bits):
    tx = mpx.master_weights(optax.sgd(1e-3), bits=bits)
    return tx.init(weights("bfloat16"), *[weights()] * bool(bits))


def of_both(bits):
    tx = mpx.master_weights(mpx.compress_state(optax.adagrad(1e-2)), bits=bits)
    model = weights("bfloat16")
    return tx.update(weights(), tx.init(model), model)[1]


def through_orbax(path, state, like):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path / "state", state)
        checkpointer.wait_until_finished()
        return checkpointer.restore(path / "state", like)


def through_equinox(path, state, like):
    eqx.tree_serialise_leaves(path / "state.eqx", state)
    return eqx.tree_deserialise_leaves(path / "state.eqx", like)


def by_a_map(path, state, like):
    return jax.tree.map(lambda x, y: x.astype(y.dtype), state, like)


BY_ORBAX = [(of_moments, a, b) for a, b in itertools.permutations(MOMENTS, 2)]
BY_ORBAX += [(of_bits, a, b) for a, b in [(16, 8), (8, 16), (8, 0)]]
OTHERWISE = [(of_moments, "16bit", "8bit"), (of_bits, 8, 16)]
OTHER_BITS = [(through_orbax, *case) for case in BY_ORBAX]
OTHER_BITS += [(w, *c) for w in (through_equinox, by_a_map) for c in OTHERWISE]


@pytest.mark.parametrize(("through", "make", "before", "after"), OTHER_BITS)
def test_codes_are_not_restored_as_those_of_other_bits(
    make, before, after, through, tmp_path
):
    """Orbax casts integers to the dtype of the template."""
    with pytest.raises((ValueError, RuntimeError)):
        through(tmp_path, make(before), make(after))


def test_a_sign_that_is_proved_otherwise_does_not_fit_either(tmp_path):
    """Code of unsigned numbers that a later version, or option, stores with a sign."""
    state = of_moments("8bit")
    (first, *rest) = state.inner_state
    codes, code = first.nu["w"].codes.astype("int8"), first.mu["w"].code
    nu = {"w": CompressedArray(codes, first.nu["w"].scales, code)}
    other = state._replace(inner_state=(first._replace(nu=nu), *rest))
    with pytest.raises(ValueError, match="codes_uint8"):
        through_orbax(tmp_path, state, other)


@pytest.mark.parametrize(
    ("make", "kind"), [(of_both, 8), *((of_moments, kind) for kind in MOMENTS)]
)
def test_what_fits_is_restored_bit_for_bit(make, kind, tmp_path):
    state = make(kind)
    like = jax.eval_shape(lambda: state)
    assert same_bits(through_orbax(tmp_path, state, like), state)


@pytest.mark.parametrize("moments", MOMENTS)
def test_arrays_that_were_pickled_without_names_are_read(moments):
    state = of_moments(moments)
    array = state.inner_state[0].mu["w"]
    old = eqx.tree_at(lambda x: x, array, array)  # another object
    vars(old).clear()
    vars(old).update(codes=array.codes, scales=array.scales, code=array.code)
    assert same_bits(pickle.loads(pickle.dumps(old)), array)


def test_low_bits_without_a_name_are_refused_with_a_way_out():
    tx, model = mpx.master_weights(optax.sgd(1e-3), bits=8), weights("bfloat16")
    state = tx.init(model, weights())
    old = SmallWeightsState(state.low_bits["int8"], state.inner_state, state.step)
    match = r"one key 'int8'; got \['w'\].*`state._replace\(low_bits=\{'int8': "
    with pytest.raises(ValueError, match=match):
        tx.update(weights(), old, model)
    named = old._replace(low_bits={"int8": old.low_bits})
    assert same_bits(tx.update(weights(), named, model)[1].step, state.step + 1)


def codes_under_nnx(tx, dtype):
    """Dtypes of the codes after steps; NNX keeps them in dictionaries, by names."""
    nnx = pytest.importorskip("flax.nnx")
    update = importlib.import_module("mpx.nnx").update
    layer = nnx.Linear(32, 128, rngs=nnx.Rngs(0), param_dtype=dtype)
    optimizer = nnx.Optimizer(layer, tx, wrt=nnx.Param)
    loss = lambda layer: jnp.sum(layer(jnp.ones((3, 32))) ** 2)  # noqa: E731
    for _ in range(2):
        grads = nnx.grad(loss)(layer)
        update(optimizer, layer, grads, True)
        optimizer.update(layer, grads)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(nnx.state(layer)))
    found = {}
    for path, x in jax.tree_util.tree_leaves_with_path(nnx.state(optimizer)):
        if x.shape == (32, 128):
            text = jax.tree_util.keystr(path)
            name = next(n for n in NAMES if f"'{n}'" in text)
            found[name] = x.dtype.name
            assert f"codes_{x.dtype}" in text or name == "low_bits"
    return found


NAMES = ("mu", "nu", "low_bits", "sum_of_squares")


@pytest.mark.parametrize("moments", MOMENTS)
def test_nnx_keeps_what_codes_are(moments):
    tx = mpx.compress_state(optax.adam(1e-2), moments)
    found = codes_under_nnx(mpx.master_weights(tx, bits=8), jnp.bfloat16)
    wanted = {"8bit": ("int8", "uint8"), "16bit": ("int16", "uint16")}
    mu, nu = wanted.get(moments, ("bfloat16",) * 2)
    assert found == {"mu": mu, "nu": nu, "low_bits": "int8"}
    found = codes_under_nnx(mpx.compress_state(optax.adagrad(1e-2)), jnp.float32)
    assert found == {"sum_of_squares": "uint16"}
