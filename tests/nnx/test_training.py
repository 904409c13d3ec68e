"""A training step with `mpx.nnx` against the same step with NNX alone."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import mpx
import mpx.nnx

from ..helpers import slow_but, unscaled
from .cases import (
    BFLOAT16,
    FLOAT16,
    MODELS,
    Normed,
    Tied,
    assert_equal,
    batch,
    compiled,
    full_step,
    loss_fn,
    make,
    mean,
    mpx_step,
    numbers,
    plain_step,
)

# Flax and Optax need JAX's own promotion.
pytestmark = [pytest.mark.third_party, unscaled]

# One function object, so that what it has compiled is there for other tests.
PLAIN_STEP = nnx.jit(plain_step)
PLAIN_GRADIENT = nnx.jit(nnx.value_and_grad(loss_fn, has_aux=True))
FULL = {"use_mixed_precision": False}


def trained(step, name, scaling=None, steps=3):
    model, optimizer = make(name)
    out = None
    for seed in range(steps):
        out = step(model, optimizer, scaling, *batch(seed))
        scaling = out[3]
    return nnx.state((model, optimizer)), out[:3], scaling


@pytest.mark.slow
def test_good_steps_are_those_of_nnx_bit_for_bit():
    """Eagerly, where the compiler cannot reorder: also statistics and streams."""
    expected = trained(plain_step, "normed")
    got = trained(full_step, "normed", mpx.NoLossScaling())
    assert_equal(got[:2], expected[:2])
    start = nnx.state(make("normed"))
    before, after = numbers(start), numbers(got[0])
    changed = [p for p in before if before[p].tobytes() != after[p].tobytes()]
    for name in ("'step'", "'count'", "'var'"):
        assert any(name in path for path in changed)


@pytest.mark.parametrize("name", slow_but(["normed", "scanned"], MODELS))
def test_good_steps_are_those_of_nnx_under_jit(name):
    expected = trained(PLAIN_STEP, name)
    got = trained(nnx.jit(full_step), name, mpx.NoLossScaling())
    assert_equal(got[:2], expected[:2], tolerance=1e-5)
    assert int(got[2].steps) == 3


@pytest.mark.parametrize(
    ("name", "policy"),
    slow_but(
        [("normed", BFLOAT16), ("tied", FLOAT16)],
        zip(MODELS, (BFLOAT16, FLOAT16, FLOAT16, BFLOAT16), strict=True),
    ),
)
def test_half_precision_is_near_and_keeps_dtypes(name, policy):
    scaling, tolerance = mpx.NoLossScaling(), 0.1
    if policy == FLOAT16:
        scaling, tolerance = mpx.DynamicLossScaling(2.0**10), 0.02

    def step(*args):
        return mpx_step(*args, policy=policy)

    expected, (_, _, expected_grads), _ = trained(PLAIN_STEP, name, steps=1)
    state, (_, _, grads), after = trained(nnx.jit(step), name, scaling, steps=1)
    assert int(after.skipped) == 0 and int(after.steps) == 1
    assert_equal(grads, expected_grads, tolerance)
    # Statistics and streams; Adam turns tiny gradients into steps of one size.
    rest = [nnx.filter_state(tree[0], nnx.Not(nnx.Param)) for tree in (state, expected)]
    assert_equal(*rest, tolerance)
    assert numbers(state).keys() == numbers(expected).keys()


def test_what_is_cast_and_what_is_not():
    model = Normed(nnx.Rngs(0))
    seen = {}

    def loss(model, x, seed):
        seen.update({k: v.dtype for k, v in numbers_traced(nnx.state(model)).items()})
        seen["x"], seen["seed"] = x.dtype, seed.dtype
        return mean(model.head.kernel[...])

    scaling = mpx.NoLossScaling()
    gradient = compiled(mpx.nnx.value_and_grad, loss, scaling, policy=FLOAT16)
    gradient(model, np.ones((2, 4), np.float32), np.zeros(2, np.int32))
    half, full = np.float16, np.float32
    for name in ("['layers'][0]['kernel'].value", "['norm']['scale'].value"):
        assert seen[name] == half
    assert seen["['mask']"] == seen["x"] == half
    assert seen["['norm']['mean'].value"] == seen["['norm']['var'].value"] == full
    assert seen["['calls'].value"] == seen["seed"] == np.int32
    weights = jax.tree.leaves(nnx.state(model, nnx.Param))
    assert {x.dtype for x in (*weights, model.mask)} == {np.dtype(full)}


def numbers_traced(tree):
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}


def test_keep_has_the_paths_of_the_user():
    teacher, model = Tied(nnx.Rngs(1)), Normed(nnx.Rngs(0))
    asked, seen = set(), {}

    def keep(path, leaf):
        asked.add(path)
        return path in ("args[0].head.kernel", "kwargs['teacher'].head.bias")

    def loss(model, x, *, teacher):
        seen["kept"] = model.head.kernel[...].dtype, teacher.head.bias[...].dtype
        seen["cast"] = model.head.bias[...].dtype, teacher.head.kernel[...].dtype
        return mean(model(x)) + mean(teacher(x))

    options = {"policy": FLOAT16, "keep": keep}
    gradient = compiled(mpx.nnx.grad, loss, mpx.NoLossScaling(), **options)
    gradient(model, np.ones((2, 4), np.float32), teacher=teacher)
    assert seen["kept"] == (np.float32, np.float32)
    assert seen["cast"] == (np.float16, np.float16)
    names = {"args[0].layers[0].kernel", "args[0].mask", "args[1]"}
    assert names | {"kwargs['teacher'].first.kernel"} <= asked
    assert not any("norm.mean" in path for path in asked)


@pytest.mark.parametrize(
    "argnums",
    [
        pytest.param(1, marks=pytest.mark.slow),
        nnx.DiffState(0, nnx.PathContains("kernel")),
        [nnx.DiffState(1, nnx.Any(nnx.PathContains("bias"), nnx.BatchStat)), 0, 2],
    ],
)
def test_argnums_are_those_of_nnx(argnums):
    def loss(encoder, decoder, x):
        return mean(encoder(x) * decoder(x)), x

    def models():
        return Normed(nnx.Rngs(0)), Normed(nnx.Rngs(1)), batch(0)[0]

    a, b = models(), models()
    expected = nnx.value_and_grad(loss, argnums=argnums, has_aux=True)(*a)
    options = {"argnums": argnums, "has_aux": True, **FULL}
    result = mpx.nnx.value_and_grad(loss, mpx.NoLossScaling(), **options)(*b)
    assert type(result.grads) is type(expected[1])
    assert_equal((result[0], result.grads), expected)
    assert_equal(nnx.state(a[:2]), nnx.state(b[:2]))


@pytest.mark.slow
def test_a_variable_and_a_tree_of_modules_can_be_differentiated():
    weight = nnx.Variable(jnp.arange(1.0, 4.0))
    square = lambda w: jnp.sum(w[...] ** 2)  # noqa: E731
    result = mpx.nnx.value_and_grad(square, mpx.NoLossScaling(), **FULL)(weight)
    np.testing.assert_array_equal(result.grads[...], 2 * jnp.arange(1.0, 4.0))

    def loss(parts, x):
        return mean(parts["a"](x)) * parts["scale"] + mean(parts["b"](x))

    parts = {"a": Tied(nnx.Rngs(0)), "b": Tied(nnx.Rngs(1)), "scale": jnp.float32(2)}
    x, _ = batch(0)
    expected = nnx.grad(loss)(parts, x)
    got = mpx.nnx.grad(loss, mpx.NoLossScaling(), **FULL)(parts, x)
    assert_equal(got.grads, expected)


def test_structure_attributes_and_aux_are_those_of_nnx():
    class Changing(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(4, 4, rngs=rngs)
            self.old = nnx.Variable(jnp.ones(2))
            self.mode = "train"

    def loss(model, x):
        y = model.linear(x)
        model.hidden = nnx.Intermediate(y)
        model.mode = "changed"
        model.other = nnx.Linear(4, 1, rngs=nnx.Rngs(3))
        del model.old
        model.linear.bias[...] = model.linear.bias[...] + 1
        return mean(y), (model, y, model.linear)

    x, _ = batch(0)
    a, b = Changing(nnx.Rngs(0)), Changing(nnx.Rngs(0))
    (_, aux), _ = nnx.value_and_grad(loss, has_aux=True)(a, x)
    options = {"has_aux": True, **FULL}
    result = mpx.nnx.value_and_grad(loss, mpx.NoLossScaling(), **options)(b, x)
    assert aux[0] is a and aux[2] is a.linear
    assert result.aux[0] is b and result.aux[2] is b.linear
    assert b.mode == "changed" and not hasattr(b, "old")
    assert b.linear.bias[...][0] == 1
    assert_equal(nnx.state(b), nnx.state(a))


def test_accumulation_carries_the_state_through_the_micro_batches():
    """As forward passes one after another, on rows 0, n, 2n, ..., then 1, n + 1, ..."""
    (a, _), (b, _) = make("normed"), make("normed")
    x, y = batch(0)
    parts = [PLAIN_GRADIENT(a, x[i::4], y[i::4]) for i in range(4)]
    options = {"has_aux": True, "accumulate": 4, **FULL}
    gradient = compiled(mpx.nnx.value_and_grad, loss_fn, mpx.NoLossScaling(), **options)
    result = gradient(b, x, y)
    parts = [(value, grads) for (value, _), grads in parts]
    expected = jax.tree.map(lambda *p: np.mean(p, 0, np.float32), *parts)
    assert_equal((result.value, result.grads), expected, 1e-5)
    assert_equal(nnx.state(b), nnx.state(a), 1e-5)
    assert int(b.calls[...]) == 4 and result.aux.shape == (4, 2, 1)


def test_accumulation_weighs_and_keeps_arrays_whole():
    model, _ = make("tied")
    x, _ = batch(0)

    def loss(model, x, table):
        return jnp.mean(model(x)) * jnp.sum(table)

    def weight(model, x, table):
        return jnp.sum(x**2) + model.head.bias[...][0]

    how = mpx.Accumulation(2, whole=lambda path, leaf: path == "args[2]", weight=weight)
    table = jnp.arange(3.0)
    options = {"accumulate": how, **FULL}
    gradient = compiled(mpx.nnx.value_and_grad, loss, mpx.NoLossScaling(), **options)
    result = gradient(model, x, table)
    plain = nnx.jit(nnx.value_and_grad(loss))
    parts = [plain(model, x[i::2], table) for i in range(2)]
    weights = [float(weight(model, x[i::2], table)) for i in range(2)]
    value = sum(w * p[0] for w, p in zip(weights, parts, strict=True)) / sum(weights)
    np.testing.assert_allclose(result.value, value, rtol=1e-6)


@pytest.mark.parametrize("options", [{"accumulate_dtype": "float32"}, {"retries": 20}])
def test_options_of_the_gradient_functions(options):
    """A scale that is too high is lowered; the state is that of one forward pass."""
    (a, _), (b, _) = make("normed"), make("normed")
    (_, _), expected = PLAIN_GRADIENT(a, *batch(0))
    scaling = mpx.DynamicLossScaling(2.0**24, max_loss_scaling=2.0**24)
    if "retries" not in options:
        scaling = mpx.DynamicLossScaling(8.0)
    options |= {"has_aux": True, "policy": FLOAT16}
    result = compiled(mpx.nnx.grad, loss_fn, scaling, **options)(b, *batch(0))
    assert bool(result.finite) and float(result.scaling.loss_scale) <= 2.0**18
    assert_equal(result.grads, expected, 0.02)
    rest = [nnx.state(model, nnx.Not(nnx.Param)) for model in (b, a)]
    assert_equal(*rest, 0.02)
    assert int(b.calls[...]) == 1


@pytest.mark.slow
def test_a_loop_of_steps_and_devices():
    xs, ys = (jnp.stack(x) for x in zip(*map(batch, range(4)), strict=True))

    def loop(model, optimizer, scaling):
        @nnx.scan(in_axes=(nnx.Carry, 0, 0), out_axes=(nnx.Carry, 0))
        def one(carry, x, y):
            model, optimizer, scaling = carry
            value, _, _, scaling = full_step(model, optimizer, scaling, x, y)
            return (model, optimizer, scaling), value

        (model, optimizer, scaling), values = one((model, optimizer, scaling), xs, ys)
        return scaling, values

    (a, optimizer_a), (b, optimizer_b) = make("normed"), make("normed")
    scaling, values = nnx.jit(loop)(b, optimizer_b, mpx.NoLossScaling())
    batches = zip(xs, ys, strict=True)
    expected = [PLAIN_STEP(a, optimizer_a, None, x, y)[0] for x, y in batches]
    np.testing.assert_allclose(values, jnp.stack(expected), rtol=1e-5)
    assert_equal(nnx.state((b, optimizer_b)), nnx.state((a, optimizer_a)), 1e-4)
    assert int(scaling.steps) == 4

    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    over = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    (a, optimizer_a), (b, optimizer_b) = make("normed"), make("normed")
    state = jax.device_put(nnx.state((b, optimizer_b)), everywhere)
    nnx.update((b, optimizer_b), state)
    divided = jax.device_put(batch(0), over)
    nnx.jit(full_step)(b, optimizer_b, mpx.NoLossScaling(), *divided)
    PLAIN_STEP(a, optimizer_a, None, *batch(0))
    assert_equal(nnx.state((b, optimizer_b)), nnx.state((a, optimizer_a)), 1e-4)


ON_DEMAND = """
import sys
import mpx
assert not any(name.split(".")[0] in ("flax", "optax") for name in sys.modules)
assert "mpx.nnx" not in sys.modules
assert callable(mpx.nnx.value_and_grad)
import mpx.nnx as again
assert again is mpx.nnx and "flax.nnx" in sys.modules
"""


def test_the_adapter_is_imported_on_demand():
    subprocess.run([sys.executable, "-c", ON_DEMAND], check=True)


@pytest.mark.parametrize("dtype", [None, jnp.float16])
def test_batch_norm_keeps_full_statistics_and_its_dtype(dtype):
    """By itself it computes in the dtype of its statistics; `dtype` says otherwise."""

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(4, 8, rngs=rngs)
            self.norm = nnx.BatchNorm(8, momentum=0.999, dtype=dtype, rngs=rngs)

        def __call__(self, x):
            return self.norm(self.linear(x))

    seen = {}

    def loss(model, x):
        y = model(x)
        seen["dtype"] = y.dtype
        return mean(y**2)

    (a, b), (x, _) = (Model(nnx.Rngs(0)) for _ in range(2)), batch(0)
    for model in (a, b):
        # A step is 1/1000 of it, which half precision would lose.
        model.norm.mean[...] = jnp.full(8, 1 / 3)
    compiled(mpx.nnx.grad, loss, mpx.NoLossScaling(), policy=FLOAT16)(a, x)
    assert seen["dtype"] == (np.float32 if dtype is None else np.float16)
    nnx.jit(nnx.grad(loss))(b, x)
    assert a.norm.mean[...].dtype == a.norm.var[...].dtype == np.float32
    np.testing.assert_allclose(a.norm.mean[...], b.norm.mean[...], rtol=1e-5)
    np.testing.assert_allclose(a.norm.var[...], b.norm.var[...], rtol=1e-5)
