"""One decision on several devices and processes (row 31).

Eight virtual CPU devices stand in for a machine with eight accelerators.
"""

import functools
import hashlib
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import mpx

from ..autocast.test_gathers import (
    CONSTRAINT,
    RECIPES,
    RESHARD,
    SHARD_MAP,
    WHOLE,
    arguments,
    loss_in,
    mesh_for,
    whole as matrices,
)
from ..helpers import in_two_processes, slow_but
from .cases import close, loss, params, same_bits, uniform

STEPS, BATCH = 20, 16
# Step, row, value: single examples on single devices, in front, behind, together.
POISON = [(3, 0, np.nan), (7, 15, np.inf), (8, 6, np.nan), (15, 9, -np.inf)]
BAD_STEPS = {4, 8, 9, 16}  # counted from 1
FLOAT16 = mpx.get_policy("params=float32,compute=float16,output=float32")


def data():
    x = np.array(uniform(0, STEPS, BATCH, 3))
    for step, row, value in POISON:
        x[step, row, 1] = value
    return x, -np.asarray(uniform(1, STEPS, BATCH, 1))


def step(w, scaling, x, y, axis=None, **options):
    """One step of gradient descent; over `axis`, gradients are averaged."""
    gradient = mpx.filter_value_and_grad(loss, scaling, policy=FLOAT16, **options)
    result = gradient(w, x, y)
    grads = result.grads
    if axis is not None:
        grads = jax.lax.pmean(grads, axis)
    new = jax.tree.map(lambda w, g: w - 0.02 * g, w, grads)
    return mpx.select_tree(result.finite, new, w), result.scaling, result.finite


def the_same(x):
    """A scalar that all devices have, and not only the first one."""
    (value,) = np.unique([np.asarray(shard.data) for shard in x.addressable_shards])
    return value


def train(run, w=None):
    scaling = mpx.DynamicLossScaling(2.0**6, period=3)
    w = params() if w is None else w
    decisions, scales = [], []
    for x, y in zip(*data(), strict=True):
        w, scaling, finite = run(w, scaling, jnp.asarray(x), jnp.asarray(y))
        decisions.append(bool(the_same(finite)))  # no device decides for itself
        scales.append(float(the_same(scaling.loss_scale)))
    return jax.tree.map(np.asarray, w), decisions, scales, scaling


@functools.cache
def on_one_device():
    return train(jax.jit(step))


def agree(result):
    w, decisions, scales, scaling = result
    expected, expected_decisions, expected_scales, expected_scaling = on_one_device()
    assert decisions == expected_decisions and scales == expected_scales
    assert {i + 1 for i, good in enumerate(decisions) if not good} == BAD_STEPS
    close(w, expected, 1e-3)
    assert int(np.ravel(scaling.skipped)[0]) == int(expected_scaling.skipped) == 4


@pytest.fixture
def mesh():
    if len(jax.devices()) < 8:
        pytest.skip("needs eight devices")
    return Mesh(np.array(jax.devices()[:8]), ("batch",))


@pytest.mark.parametrize("accumulate", [1, 2])
def test_jit_over_a_mesh(mesh, accumulate):
    """Micro-batches are strided: each lies on all devices."""
    sharded, whole = NamedSharding(mesh, P("batch")), NamedSharding(mesh, P())
    run = jax.jit(functools.partial(step, accumulate=accumulate))

    def place(w, scaling, x, y):
        args = jax.device_put((w, scaling), whole), jax.device_put((x, y), sharded)
        return run(*args[0], *args[1])

    agree(train(place))


@pytest.mark.parametrize("check_vma", [False, True])
def test_shard_map(mesh, check_vma):
    """Gradients are averaged by hand.

    With the check of replication, weights that are marked as varying get gradients of
    their own device's rows.
    """

    def inner(w, scaling, x, y):
        local = w
        if check_vma:
            local = jax.tree.map(lambda v: jax.lax.pcast(v, "batch", to="varying"), w)
        result = mpx.filter_grad(loss, scaling, policy=FLOAT16)(local, x, y)
        grads = jax.lax.pmean(result.grads, "batch")
        new = jax.tree.map(lambda w, g: w - 0.02 * g, w, grads)
        return mpx.select_tree(result.finite, new, w), result.scaling, result.finite

    specs = {"in_specs": (P(), P(), P("batch"), P("batch")), "out_specs": P()}
    run = jax.shard_map(inner, mesh=mesh, check_vma=check_vma, **specs)
    agree(train(jax.jit(run)))


@pytest.mark.slow
def test_pmap(mesh):
    local = functools.partial(step, axis="batch")
    run = jax.pmap(local, axis_name="batch", in_axes=(None, None, 0, 0))

    def place(w, scaling, x, y):
        split = lambda v: v.reshape(8, -1, *v.shape[1:])  # noqa: E731
        w, scaling, finite = run(w, scaling, split(x), split(y))
        assert len(np.unique(np.asarray(scaling.skipped))) == 1
        for leaf in jax.tree.leaves(w):
            assert same_bits([leaf[0]] * 8, list(leaf))
        return *jax.tree.map(lambda v: v[0], (w, scaling)), finite

    agree(train(place))


# --- One result on any number of devices ----------------------------------------------

BLOCKS = 8
ORDERED = mpx.Accumulation(BLOCKS, axes="batch", in_order=True)


def layers(w, x, y):
    hidden = jax.nn.gelu(x @ w["a"] + w["b"][None])
    return jnp.mean((hidden @ w["c"] @ w["d"] - y).astype(jnp.float32) ** 2)


def first_layers():
    shapes = {"a": (16, 32), "b": (32,), "c": (32, 32), "d": (32, 16)}
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return {
        name: np.asarray(jax.random.normal(key, shape) * 0.3)
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


ORDERED_ARMS = ("float16", "delayed")  # over two processes


def train_in_order(mesh, arm, is_divided):
    """Three steps with a bad one between them; digests of all arrays of the state."""
    w, options, scaling = first_layers(), {}, mpx.NoLossScaling()
    x, y = (np.array(uniform(i, 3, 64, 16)) for i in range(2))
    x[1, 5, 0] = np.inf
    loss, recipes = layers, {"delayed": mpx.DelayedScaling()}
    recipes["current"] = mpx.Float8CurrentScaling()
    if arm == "float16":
        options["policy"], scaling = FLOAT16, mpx.DynamicLossScaling(2.0**10)
    else:
        loss = mpx.autocast(layers, recipe=recipes.get(arm))
    if arm in recipes:
        scaling = mpx.init_scaling(loss, w, x[0], y[0])
    sharded, whole = NamedSharding(mesh, P("batch")), NamedSharding(mesh, P())
    lies = sharded if is_divided else whole

    @functools.partial(jax.jit, out_shardings=(lies, whole, lies))
    def step(w, scaling, moments, x, y):
        gradient = mpx.filter_grad(loss, scaling, accumulate=ORDERED, **options)
        result = gradient(w, x, y)
        moved = jax.tree.map(lambda m, g: 0.9 * m + g, moments, result.grads)
        new = jax.tree.map(lambda w, m: w - 0.1 * m, w, moved)
        new = mpx.select_tree(result.finite, (new, moved), (w, moments))
        return new[0], result.scaling, new[1]

    def put(tree, sharding):
        def one(leaf):
            make = lambda index: np.asarray(leaf)[index]  # noqa: E731
            return jax.make_array_from_callback(np.shape(leaf), sharding, make)

        return jax.tree.map(one, tree)

    state = put(w, lies), put(scaling, whole), put(jax.tree.map(np.zeros_like, w), lies)
    for rows in zip(x, y, strict=True):
        state = step(*state, *put(rows, sharded))
    gathered = jax.jit(lambda state: state, out_shardings=whole)(state)
    # A digest: what a process prints has to fit into a pipe that nobody reads yet.
    parts = [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(gathered)]
    return [hashlib.sha256(part).hexdigest()[:16] for part in parts]


@functools.cache
def in_order_on(devices, arm, is_divided):
    mesh = Mesh(np.array(jax.devices()[:devices]), ("batch",))
    return train_in_order(mesh, arm, is_divided)


ORDERED_CASES = [
    ("delayed", 8, True),
    ("float16", 2, True),
    ("current", 8, False),
    ("delayed", 1, True),
    ("bfloat16", 4, False),
]


@pytest.mark.parametrize(
    ("arm", "devices", "is_divided"), slow_but(ORDERED_CASES[:1], ORDERED_CASES)
)
def test_a_step_in_order_has_equal_bits_on_any_devices(mesh, devices, is_divided, arm):
    """Data parallel and with divided weights; of weights, moments and the scaling."""
    assert in_order_on(devices, arm, is_divided) == in_order_on(1, arm, False)


# --- Layouts, precisions, and who places arrays -------------------------------------

HOW = (WHOLE, CONSTRAINT, RESHARD, SHARD_MAP)
ARMS = ("delayed", "current", "autocast", "explicit float16")
QUICK = list(zip(HOW, ARMS, strict=True))
OVER_PROCESSES = list(zip(HOW, ARMS[2:] + ARMS[:2], strict=True))


def laid_out(how, arm):
    """How far loss and gradients of a step are from those of one device in float32.

    And whether it is a good step, and one with a NaN in a row.
    """
    mesh = mesh_for(how)
    options, scaling = {}, mpx.NoLossScaling()
    with jax.set_mesh(mesh):
        loss = loss_in(mesh, how, matrices)
        if arm == "explicit float16":
            options["policy"], scaling = FLOAT16, mpx.DynamicLossScaling(2.0**4)
        else:
            loss = mpx.autocast(loss, recipe=RECIPES.get(arm))
        w, x = arguments(mesh)
        if arm == "delayed":
            scaling = mpx.init_scaling(loss, w, x)

        @functools.partial(jax.jit, out_shardings=NamedSharding(mesh, P()))
        def run(scaling, w, x):
            result = mpx.filter_value_and_grad(loss, scaling, **options)(w, x)
            return result.value, result.grads, result.finite

        value, grads, finite = run(scaling, w, x)
        *_, finite_again = run(scaling, *arguments(mesh, last=np.nan))
    expected, expected_grads = laid_out_on_one_device()
    errors = [abs(float(value) / expected - 1)]
    for name, g in expected_grads.items():
        error = np.linalg.norm(np.asarray(grads[name], "f") - g) / np.linalg.norm(g)
        errors.append(float(error))
    return [max(errors), bool(finite), bool(finite_again)]


@functools.cache
def laid_out_on_one_device():
    mesh = Mesh(np.array(jax.local_devices()[:1]), ("data",))
    w, x = arguments(mesh)
    value, grads = jax.jit(jax.value_and_grad(loss_in(mesh, WHOLE, matrices)))(w, x)
    return float(value), jax.tree.map(np.asarray, grads)


def agrees_with_one_device(outcome, arm):
    error, finite, finite_again = outcome
    assert finite and not finite_again
    assert error < (0.1 if arm in RECIPES else 0.01)


@pytest.mark.parametrize(("how", "arm"), slow_but(QUICK[1:], QUICK + OVER_PROCESSES))
def test_every_layout_has_the_gradients_of_one_device(mesh, how, arm):
    agrees_with_one_device(laid_out(how, arm), arm)


@pytest.mark.parametrize("is_divided", [False, True])
@pytest.mark.parametrize(("reduce", "fits"), [("float32", True), ("float16", False)])
def test_one_reduce_dtype_makes_one_decision_on_any_number_of_devices(
    mesh, reduce, fits, is_divided
):
    """Sums of 131,072, which float16 has not: on one device and on eight."""
    low = mpx.autocast(lambda w, x: 128 * jnp.sum(x @ w), dtype="float16")
    policy = f"params=float32,compute=float16,output=float32,reduce={reduce}"
    rows = NamedSharding(mesh, P("batch")) if is_divided else jax.devices()[0]
    x = jax.device_put(jnp.ones((1024, 4)), rows)

    @jax.jit
    def step(w, x):
        return mpx.filter_grad(low, mpx.StaticLossScaling(1.0), policy=policy)(w, x)

    assert bool(step(jnp.ones((4, 4)) / 1e3, x).finite) == fits


# --- Two processes ----------------------------------------------------------------


def work(process, address):
    jax.distributed.initialize(address, 2, process)
    mesh = Mesh(np.array(jax.devices()), ("batch",))
    sharded, whole = NamedSharding(mesh, P("batch")), NamedSharding(mesh, P())
    run = jax.jit(step, out_shardings=whole)
    rows = BATCH // 2
    w = jax.device_put(params(), whole)

    def place(w, scaling, x, y):
        mine = slice(process * rows, (process + 1) * rows)
        put = jax.make_array_from_process_local_data
        parts = [put(sharded, np.asarray(v)[mine]) for v in (x, y)]
        return run(w, scaling, *parts)

    w, decisions, scales, scaling = train(place, w)
    outcome = {k: v.tolist() for k, v in w.items()}
    ordered = {arm: train_in_order(mesh, arm, arm == "delayed") for arm in ORDERED_ARMS}
    laid = {" ".join(case): laid_out(*case) for case in OVER_PROCESSES}
    print(json.dumps([outcome, decisions, scales, int(scaling.skipped), ordered, laid]))


@pytest.fixture(scope="module")
def two_processes():
    """The outcomes of two processes on this machine, with two devices each."""
    module = "tests.step.test_devices"
    code = f"import sys, {module} as t; t.work(int(sys.argv[1]), sys.argv[2])"
    gloo = {"JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo"}
    return in_two_processes("-c", code, devices=2, **gloo)


@pytest.mark.slow
def test_two_processes_agree_with_one(two_processes):
    first, second = two_processes
    assert first == second
    w, decisions, scales, skipped, *_ = first
    expected, expected_decisions, expected_scales, scaling = on_one_device()
    assert decisions == expected_decisions and scales == expected_scales
    assert skipped == int(scaling.skipped)
    close({k: np.asarray(v) for k, v in w.items()}, expected, 1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("arm", ORDERED_ARMS)
def test_a_step_in_order_has_equal_bits_on_two_processes(two_processes, arm):
    for *_, ordered, _ in two_processes:
        assert ordered[arm] == in_order_on(1, arm, False)


@pytest.mark.slow
@pytest.mark.parametrize("case", OVER_PROCESSES, ids=" ".join)
def test_two_processes_have_the_gradients_of_one_device(two_processes, case):
    for *_, laid in two_processes:
        agrees_with_one_device(laid[" ".join(case)], case[1])
