"""One decision on several devices and processes (row 31).

Eight virtual CPU devices stand in for a machine with eight accelerators.
"""

import functools
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import mpx

from .grad.cases import close, loss, params, same_bits, uniform

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


def step(w, scaling, x, y, axis=None):
    """One step of gradient descent; over `axis`, gradients are averaged."""
    result = mpx.filter_value_and_grad(loss, scaling, policy=FLOAT16)(w, x, y)
    grads = result.grads
    if axis is not None:
        grads = jax.lax.pmean(grads, axis)
    new = jax.tree.map(lambda w, g: w - 0.02 * g, w, grads)
    return mpx.select_tree(result.finite, new, w), result.scaling, result.finite


def on_all_devices(x):
    """The different values of a scalar, on all devices and not only on the first."""
    return np.unique([np.asarray(shard.data) for shard in x.addressable_shards])


def train(run, w=None):
    scaling = mpx.DynamicLossScaling(2.0**6, period=3)
    w = params() if w is None else w
    decisions, scales = [], []
    for x, y in zip(*data(), strict=True):
        w, scaling, finite = run(w, scaling, jnp.asarray(x), jnp.asarray(y))
        flags = on_all_devices(finite)
        assert flags.size == 1  # no device decides for itself
        decisions.append(bool(flags[0]))
        values = on_all_devices(scaling.loss_scale)
        assert values.size == 1
        scales.append(float(values[0]))
    return jax.tree.map(np.asarray, w), decisions, scales, scaling


@functools.cache
def on_one_device():
    return train(jax.jit(step))


def agree(result):
    """The weights are near, all decisions and scales are equal."""
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


def test_jit_over_a_mesh(mesh):
    sharded, whole = NamedSharding(mesh, P("batch")), NamedSharding(mesh, P())
    run = jax.jit(step)

    def place(w, scaling, x, y):
        args = jax.device_put((w, scaling), whole), jax.device_put((x, y), sharded)
        return run(*args[0], *args[1])

    agree(train(place))


def test_jit_over_a_mesh_with_micro_batches(mesh):
    """Strided micro-batches: each lies on all devices."""

    @jax.jit
    def run(w, scaling, x, y):
        call = mpx.filter_grad(loss, scaling, policy=FLOAT16, accumulate=2)
        result = call(w, x, y)
        new = jax.tree.map(lambda w, g: w - 0.02 * g, w, result.grads)
        w = mpx.select_tree(result.finite, new, w)
        return w, result.scaling, result.finite

    sharded = NamedSharding(mesh, P("batch"))
    agree(train(lambda w, s, x, y: run(w, s, *jax.device_put((x, y), sharded))))


def test_shard_map(mesh):
    """Without the check of replication, gradients are averaged by hand."""
    run = jax.shard_map(
        functools.partial(step, axis="batch"),
        mesh=mesh,
        in_specs=(P(), P(), P("batch"), P("batch")),
        out_specs=(P(), P(), P()),
        check_vma=False,
    )
    agree(train(jax.jit(run)))


def test_shard_map_with_checked_replication(mesh):
    """Weights that are marked as varying get gradients of their own device's rows."""

    def inner(w, scaling, x, y):
        local = jax.tree.map(lambda v: jax.lax.pcast(v, "batch", to="varying"), w)
        result = mpx.filter_grad(loss, scaling, policy=FLOAT16)(local, x, y)
        grads = jax.lax.pmean(result.grads, "batch")
        new = jax.tree.map(lambda w, g: w - 0.02 * g, w, grads)
        return (
            mpx.select_tree(result.finite, new, w),
            result.scaling,
            result.finite,
        )

    run = jax.shard_map(
        inner,
        mesh=mesh,
        in_specs=(P(), P(), P("batch"), P("batch")),
        out_specs=(P(), P(), P()),
        check_vma=True,
    )
    agree(train(jax.jit(run)))


def test_pmap():
    if len(jax.devices()) < 8:
        pytest.skip("needs eight devices")
    local = functools.partial(step, axis="batch")
    run = jax.pmap(local, axis_name="batch", in_axes=(None, None, 0, 0))

    def place(w, scaling, x, y):
        split = lambda v: v.reshape(8, -1, *v.shape[1:])  # noqa: E731
        w, scaling, finite = run(w, scaling, split(x), split(y))
        assert len(np.unique(np.asarray(scaling.skipped))) == 1
        for leaf in jax.tree.leaves(w):
            assert same_bits([leaf[0]] * 8, list(leaf))
        first = lambda v: v[0]  # noqa: E731
        return jax.tree.map(first, w), jax.tree.map(first, scaling), finite

    agree(train(place))


BLOCKS = 8


def train_in_blocks(devices):
    """Twenty steps on so many devices; gradients of 8 blocks are summed in order."""
    mesh = Mesh(np.array(jax.devices()[:devices]), ("batch",))

    def inner(w, scaling, x, y):
        def block(_, rows):
            result = mpx.filter_grad(loss, scaling, policy=FLOAT16)(w, *rows)
            return None, (result.grads, result.finite)

        split = lambda v: v.reshape(BLOCKS // devices, -1, v.shape[-1])  # noqa: E731
        _, (grads, finite) = jax.lax.scan(block, None, (split(x), split(y)))
        # float32 before the sum over devices, and not a half precision number in it.
        assert {v.dtype for v in jax.tree.leaves(grads)} == {np.dtype("float32")}
        grads, finite = jax.lax.all_gather((grads, finite), "batch", tiled=True)
        finite = finite.all()
        new = jax.tree.map(
            lambda w, g: w - 0.02 / BLOCKS * functools.reduce(jnp.add, list(g)),
            w,
            grads,
        )
        return mpx.select_tree(finite, new, w), scaling.adjust(finite), finite

    run = jax.shard_map(
        inner,
        mesh=mesh,
        in_specs=(P(), P(), P("batch"), P("batch")),
        out_specs=(P(), P(), P()),
        check_vma=False,
    )
    return train(jax.jit(run))


@pytest.mark.parametrize("devices", [2, 4, 8])
def test_an_ordered_sum_gives_equal_bits_on_any_number_of_devices(mesh, devices):
    """Elsewhere gradients are summed over devices in half precision, up to 1e-2 off."""
    w, decisions, scales, scaling = train_in_blocks(devices)
    expected, expected_decisions, expected_scales, expected_scaling = in_blocks_on_one()
    assert same_bits(w, expected)
    assert decisions == expected_decisions and scales == expected_scales
    assert same_bits(scaling.skipped, expected_scaling.skipped)
    close(w, on_one_device()[0], 1e-3)


@functools.cache
def in_blocks_on_one():
    return train_in_blocks(1)


# --- Two processes ----------------------------------------------------------------


def work(process, address):
    """What each of two processes does; the first prints the outcome."""
    jax.distributed.initialize(address, 2, process)
    mesh = Mesh(np.array(jax.devices()), ("batch",))
    sharded, whole = NamedSharding(mesh, P("batch")), NamedSharding(mesh, P())
    run = jax.jit(step, out_shardings=whole)
    rows = BATCH // 2
    w = jax.device_put(params(), whole)

    def place(w, scaling, x, y):
        mine = slice(process * rows, (process + 1) * rows)
        parts = [
            jax.make_array_from_process_local_data(sharded, np.asarray(v)[mine])
            for v in (x, y)
        ]
        return run(w, scaling, *parts)

    w, decisions, scales, scaling = train(place, w)
    outcome = {k: v.tolist() for k, v in w.items()}
    print(json.dumps([outcome, decisions, scales, int(scaling.skipped)]))


@pytest.fixture(scope="module")
def two_processes():
    """The outcomes of two processes on this machine, with two devices each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
    }
    code = "import sys, tests.test_devices as t; t.work(int(sys.argv[1]), sys.argv[2])"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(i), address],
            cwd=Path(__file__).parents[1],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=180) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, errors) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, errors[-3000:]
    return [json.loads(out.splitlines()[-1]) for out, _ in outputs]


def test_two_processes_agree_with_one(two_processes):
    first, second = two_processes
    assert first == second
    w, decisions, scales, skipped = first
    expected, expected_decisions, expected_scales, scaling = on_one_device()
    assert decisions == expected_decisions and scales == expected_scales
    assert skipped == int(scaling.skipped)
    close({k: np.asarray(v) for k, v in w.items()}, expected, 1e-3)
