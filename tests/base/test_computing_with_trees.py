"""`jax.tree.map` over PyTrees of mpx: arrays may be moved, and not computed with.

An average of weights (`0.99 * a + 0.01 * b`) computes with every array that it finds,
also with numbers of 8 bits and their scales, and with counters.
"""

import copy
import functools
import itertools
import operator
import pickle

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import mpx

from ..step.cases import same_bits

RECIPE = mpx.DelayedScaling(amax_history_len=2)
QUANTIZERS = {
    "tensor": mpx.quantization.TensorQuantizer(),
    "block": mpx.quantization.BlockQuantizer(),
    "mxfp8": mpx.quantization.MXFP8Quantizer(),
    "nvfp4": mpx.quantization.NVFP4Quantizer(),
}


def array(seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(128, 128)), "float32")


@functools.cache
def stored(seed=0):
    store = lambda m: mpx.quantization.quantize_weights(m, QUANTIZERS["mxfp8"])  # noqa: E731
    return jax.jit(store)({"w": array(seed), "b": jnp.ones(3)})


@functools.cache
def quantized(seed=0, name="tensor"):
    quantize = lambda x: mpx.quantization.quantize(x, QUANTIZERS[name])  # noqa: E731
    return jax.jit(quantize)(array(seed))


@functools.cache
def compressed(seed=0):
    tx = mpx.compress_state(optax.adam(1e-3))
    return jax.jit(tx.update)(array(seed), tx.init(array()), array())[1]


@functools.cache
def with_recipe():
    func = mpx.autocast(lambda w, x: jnp.mean(x @ w), recipe=RECIPE)
    return mpx.init_scaling(func, jnp.ones((16, 16)), jnp.ones((16, 16)))


def average(a, b):
    return 0.99 * a + 0.01 * b


ARITHMETIC = {
    "average": lambda a, b: jax.tree.map(average, a, b),
    "jitted average": jax.jit(lambda a, b: jax.tree.map(average, a, b)),
    "optax": lambda a, b: optax.incremental_update(a, b, 0.01),
    "a sum over two": lambda a, b: jax.tree.map(lambda a, b: (a + b) / 2, a, b),
    "sum and divide": lambda a, b: jax.tree.map(lambda *x: sum(x) / len(x), a, b),
    "twice": lambda a, _: jax.tree.map(lambda a: 2 * a, a),
    "float32": lambda a, _: jax.tree.map(lambda a: a.astype(jnp.float32), a),
    "numpy": lambda a, b: jax.tree.map(average, *jax.device_get((a, b))),
}


MEANINGLESS = "are meaningless alone.*dequantize.*full_weights"


MADE = itertools.cycle([stored, quantized, compressed])


@pytest.mark.parametrize(("name", "make"), [*zip(ARITHMETIC, MADE, strict=False)])
@pytest.mark.third_party  # standard promotion, as users have it
def test_computing_with_parts_of_a_number_is_refused(make, name):
    with pytest.raises(TypeError, match=MEANINGLESS):
        ARITHMETIC[name](make(0), make(1))


COMPUTE = {
    "sum": lambda x: x + 1,
    "product": lambda x: jnp.ones((128, 128)) * x,
    "numpy's": lambda x: np.ones((128, 128)) - x,
    "power": lambda x: x**2,
    "asarray": jnp.asarray,
    "numpy": np.asarray,
    "norm": jnp.linalg.norm,
    "index": lambda x: x[0],
    "at": lambda x: x.at[0].set(1.0),
    "mean": lambda x: x.mean(),
    "cast": lambda x: x.astype(jnp.float32),
    "under jit": jax.jit(lambda x: -x),
}
STORED = r"`mpx.quantization.dequantize_weights\(model\)`"
WHOLE = {
    "stored": (lambda: stored()["w"], STORED),
    "quantized": (quantized, r"Convert it: `dequantize\(\)`"),
    "compressed": (lambda: compressed().inner_state[0].mu, r"`full\(\)`.*full_state"),
}


@pytest.mark.parametrize("kind", WHOLE)
@pytest.mark.parametrize("name", COMPUTE)
@pytest.mark.third_party
def test_what_is_no_array_says_how_to_get_one(kind, name):
    make, match = WHOLE[kind]
    node = make()
    with pytest.raises((TypeError, AttributeError), match=match):
        COMPUTE[name](node)
    assert not hasattr(node, "at") and not hasattr(node, "unknown")


@pytest.mark.parametrize("name", QUANTIZERS)
@pytest.mark.third_party
def test_arrays_of_all_quantizers_are_refused(name):
    with pytest.raises(TypeError, match=MEANINGLESS):
        jax.tree.map(average, quantized(0, name), quantized(1, name))


@pytest.mark.third_party
@pytest.mark.parametrize("compute", [operator.sub, lambda a, _: jnp.float32(2) * a])
def test_what_jax_refuses_by_itself(compute):
    """Booleans have no difference, and 8 bits no common dtype with others."""
    with pytest.raises((TypeError, ValueError), match="bool|8-bit"):
        jax.tree.map(compute, stored(0), stored(1))


def test_an_average_of_the_numbers_is_right():
    a, b = map(mpx.quantization.dequantize_weights, (stored(0), stored(1)))
    expected = 0.99 * a["w"] + 0.01 * b["w"]
    np.testing.assert_allclose(average(a["w"], b["w"]), expected, rtol=1e-6)


def through_scan(tree):
    body = lambda carry, x: (carry, x)  # noqa: E731
    return jax.lax.scan(body, tree, jax.tree.map(lambda x: x[None], tree))[0]


def twice(tree):
    return jax.tree.map(lambda x: jnp.stack([x, x]), tree)


def stacked(tree):
    return jax.tree.map(lambda x: x[1], twice(tree))


def sharded(tree):
    mesh = jax.make_mesh((8,), ("data",))
    spec = lambda x: P("data") if x.ndim and x.shape[0] % 8 == 0 else P()  # noqa: E731
    shardings = jax.tree.map(lambda x: NamedSharding(mesh, spec(x)), tree)
    return jax.device_put(tree, shardings)


def through_orbax(tree, path):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path / "state", tree)
        checkpointer.wait_until_finished()
        like = jax.tree.map(ocp.utils.to_shape_dtype_struct, tree)
        return checkpointer.restore(path / "state", like)


def through_equinox(tree, path):
    eqx.tree_serialise_leaves(path / "state.eqx", tree)
    return eqx.tree_deserialise_leaves(path / "state.eqx", tree)


def donated(tree):
    move = jax.jit(lambda t: t, donate_argnums=0)
    return move(jax.tree.map(jnp.copy, tree))


def where(tree):
    choose = lambda a, b: jnp.where(jnp.array(True), a, b)  # noqa: E731
    return jax.tree.map(choose, tree, stacked(tree))


MOVES = {
    "copied": lambda tree: jax.tree.map(jnp.copy, tree),
    "deepcopied": copy.deepcopy,
    "pickled": lambda tree: pickle.loads(pickle.dumps(tree)),
    "on the host": lambda tree: jax.tree.map(np.asarray, tree),
    "device_put": lambda tree: jax.device_put(tree, jax.devices()[0]),
    "sharded": sharded,
    "jitted": jax.jit(lambda tree: tree),
    "donated": donated,
    "selected": lambda tree: mpx.select_tree(jnp.array(False), stacked(tree), tree),
    "where": where,
    "stacked": stacked,
    "scanned": through_scan,
    "branched": lambda tree: jax.lax.cond(True, lambda t: t, stacked, tree),
    "checkpointed": jax.checkpoint(lambda tree: tree),
    "partitioned": lambda tree: eqx.combine(*eqx.partition(tree, eqx.is_inexact_array)),
    "flattened": lambda tree: jax.tree.unflatten(*jax.tree.flatten(tree)[::-1]),
}
MAKERS = {"stored": stored, "quantized": quantized, "recipe": with_recipe}


@pytest.mark.parametrize(("name", "kind"), [*zip(MOVES, itertools.cycle(MAKERS))])
def test_moving_arrays_changes_nothing(kind, name):
    tree = MAKERS[kind]()
    assert same_bits(MOVES[name](tree), tree)


@pytest.mark.parametrize(
    ("kind", "through"),
    # Equinox's own files do not read formats of 8 bits back.
    [*((kind, through_orbax) for kind in MAKERS), ("recipe", through_equinox)],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning:orbax")
def test_checkpoints_change_nothing(kind, through, tmp_path):
    tree = MAKERS[kind]()
    assert same_bits(through(tree, tmp_path), tree)


@pytest.mark.parametrize("kind", MAKERS)
def test_what_is_asked_of_each_array(kind):
    tree = MAKERS[kind]()
    jax.tree.map(lambda x: x.shape, tree)
    jax.tree.map(lambda x: None, tree)
    jax.tree.map(lambda x: jnp.all(jnp.isfinite(x.astype(jnp.float32))), tree)
    shapes = jax.eval_shape(lambda: tree)
    assert jax.tree.structure(shapes) == jax.tree.structure(tree)
    assert eqx.tree_equal(jax.vmap(lambda t: t)(twice(tree)), twice(tree))


def test_zeros_are_zeros():
    model = mpx.quantization.quantize_weights({"w": array()})
    zeros = jax.tree.map(jnp.zeros_like, model)
    assert not mpx.quantization.dequantize_weights(zeros)["w"].any()


def test_layers_are_stored_and_scanned():
    store, read = mpx.quantization.quantize_weights, mpx.quantization.dequantize_weights
    layers = jnp.stack([array(0), 3 * array(1)])
    several = jax.jit(jax.vmap(store))({"w": layers})
    body = lambda x, layer: (x @ read(layer)["w"], None)  # noqa: E731
    x, _ = jax.lax.scan(body, jnp.eye(128), several)
    each = [jax.jit(read)(jax.jit(store)({"w": w}))["w"] for w in layers]
    np.testing.assert_allclose(x, each[0] @ each[1], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    "make", [mpx.DynamicLossScaling, mpx.NoLossScaling, with_recipe]
)
@pytest.mark.third_party
def test_computing_with_a_loss_scaling_is_refused(make):
    """At its next use, with the counters that it should have had."""
    mean = jax.tree.map(average, make(), make())
    match = "must be an unchanged loss scaling with int32 counters; got float32"
    with pytest.raises(TypeError, match=match):
        mean.adjust(True)
    grad = mpx.filter_grad(lambda w: jnp.sum(w), mean, policy="bfloat16")
    with pytest.raises(TypeError, match=r"`scaling` of `mpx.filter_grad`.*float32"):
        grad(jnp.ones(2))


def test_a_state_of_the_optimizer_may_be_averaged():
    """What stands in for float32 weights are float32 arrays."""
    optimizer = mpx.master_weights(optax.sgd(0.1))
    a, b = (optimizer.init(stored(seed)) for seed in (0, 1))
    mean = jax.tree.map(average, a.masters, b.masters)
    assert mean["w"].dtype == jnp.float32 and np.isfinite(mean["w"]).all()
