"""The GPT example on any mesh, in one process or two: the same training."""

import dataclasses
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from examples.gpt import (
    LAYOUT,
    Config,
    ModelConfig,
    arrays_of,
    initial_state,
    load_data,
    make_step,
    parse_config,
    train,
)
from examples.runs import (
    Interrupted,
    RunFolder,
    ScalingConfig,
    SetupError,
    make_mesh,
    pin,
    put,
    replicated,
    require_divisible,
)
from tests.helpers import slow_but

# Flax and Optax need JAX's own promotion.
pytestmark = pytest.mark.third_party

ROOT = Path(__file__).parents[2]
MODEL = ModelConfig(context=16, width=16, hidden=32, blocks=2, heads=2, dropout=0.2)
SMALL = dataclasses.replace(MODEL, blocks=1)  # what compiles the whole job again
CONFIG = Config(
    steps=10,
    batch_size=16,
    warmup_steps=2,
    log_every=3,
    checkpoint_every=4,
    test_texts=16,
    data_path=ROOT / "examples",
    model=MODEL,
    scaling=ScalingConfig(initial=2.0**22, period=3),  # the first steps overflow
)
ALL = {"data": 2, "fsdp": 2, "tensor": 2}


def mesh_of(sizes):
    return make_mesh(sizes, jax.devices()[: int(np.prod([*sizes.values()]))])


def rows_on(sizes, precision, **changes):
    config = dataclasses.replace(CONFIG, **changes)
    return train(config, precision, load_data(config), mesh=mesh_of(sizes))[1]


# --- Options -------------------------------------------------------------------------


def test_options():
    config = parse_config("--mesh tensor=2 data=4 --processes 2".split())
    assert config.mesh_sizes == {"tensor": 2, "data": 4}
    assert config.devices_per_process == 4
    assert parse_config([]).devices_per_process is None
    assert parse_config(["--processes", "3"]).devices_per_process == 1
    mesh = make_mesh({"tensor": 2, "data": 4}, jax.devices()[:8])
    assert dict(mesh.shape) == {"data": 4, "fsdp": 1, "tensor": 2}
    assert make_mesh().shape["data"] == jax.device_count()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--mesh data=2 model=2", r"`--mesh` is made of data=N, .* got model=2"),
        ("--mesh data=2 data=4", r"each at most once, .* got data=4"),
        ("--mesh fsdp=0", r"got fsdp=0"),
        ("--mesh fsdp", r"got fsdp\."),
        ("--processes 0", r"`--processes` must divide the devices of --mesh, 1; got 0"),
        ("--mesh data=4 --processes 3", r"must divide the devices of --mesh, 4; got 3"),
        ("--processes 2 --distributed", r"--distributed joins those that are there"),
        ("--mesh tensor=3", r"`--model.heads` must be a multiple .* tensor, 3; got 4"),
        ("--mesh fsdp=5", r"`--model.width` must be a multiple of .* fsdp, 5; got 96"),
    ],
)
def test_wrong_meshes_are_named(arguments, message):
    with pytest.raises(SetupError, match=message):
        parse_config(arguments.split())


def test_a_mesh_has_as_many_devices_as_there_are():
    with pytest.raises(
        SetupError, match=r"as many devices as there are, 8; got data=2 x fsdp=3 = 6"
    ):
        make_mesh({"data": 2, "fsdp": 3}, jax.devices()[:8])


def test_a_batch_is_shared_by_all_devices_but_those_of_tensor():
    config = dataclasses.replace(CONFIG, batch_size=4, model=SMALL)
    with pytest.raises(SetupError, match=r"times devices, 1 x 8; got 4. Use 8\."):
        train(config, "float32", load_data(config), mesh=mesh_of({"fsdp": 8}))
    require_divisible(config, mesh_of(ALL))


# --- One training --------------------------------------------------------------------


@pytest.mark.slow
def test_all_matrices_and_their_moments_are_divided():
    mesh, texts = mesh_of(ALL), np.zeros((16, 17), np.uint8)
    with jax.set_mesh(mesh):
        nodes, _ = initial_state(CONFIG, "float32", texts)
    arrays = arrays_of(nodes)
    matrices = [name for name in arrays if re.search(r"kernel|embedding", name)]
    assert len(matrices) == 3 * (6 * MODEL.blocks + 3)
    for name in matrices:
        parts = 4  # `data` divides no weight
        shard = arrays[name].sharding.shard_shape(arrays[name].shape)
        assert np.prod(shard) == arrays[name].size / parts, name
        weight = "model." + re.sub(r".*(mu|nu|model)\.", "", name)
        assert arrays[name].sharding == arrays[weight].sharding, name
    used = {".".join(n.removesuffix(".value").split(".")[-2:]) for n in arrays}
    assert used >= LAYOUT.keys()


def gathered(precision):
    """Bytes that the step gathers, by dtype."""
    config = dataclasses.replace(CONFIG, model=SMALL)
    mesh, texts = mesh_of({"fsdp": 8}), np.zeros((16, 17), np.uint8)
    with jax.set_mesh(mesh):
        nodes, scaling = initial_state(config, precision, texts)
        scaling = jax.device_put(scaling, replicated(mesh))
        step = make_step(config, precision, mesh)
        lowered = step.lower(
            nodes["model"], nodes["optimizer"], scaling, put(texts, mesh)
        )
    found = {}
    pattern = r"= (f32|f16)\[([\d,]+)\]\S* all-gather\("
    for dtype, shape in re.findall(pattern, lowered.compile().as_text()):
        count = np.prod([int(size) for size in shape.split(",")])
        found[dtype] = found.get(dtype, 0) + int(count) * {"f32": 4, "f16": 2}[dtype]
    return found


@pytest.mark.exhaustive
def test_weights_are_gathered_in_half_precision():
    """XLA:CPU does it for float16; on accelerators, see benchmarks/NOTES.md."""
    full, half = gathered("float32"), gathered("float16")
    places = 4 * MODEL.context * MODEL.width  # are multiplied by nothing
    assert set(full) == {"f32"} and half["f32"] == places
    assert half["f16"] == (full["f32"] - places) / 2


def test_without_a_mesh_nothing_is_pinned():
    x = np.ones((2, 3), np.float32)
    assert pin(x) is x and pin(x, P("tensor")) is x


@pytest.mark.parametrize(
    ("sizes", "precision", "options"),
    slow_but(
        [],
        [
            ({"fsdp": 8}, "float32", {"model": SMALL}),
            (ALL, "float16", {"scan": True, "remat": True, "accumulate": 2}),
            (ALL, "delayed", {"scan": True}),
        ],
    ),
)
def test_every_mesh_trains_as_any_other(sizes, precision, options):
    """The same decisions, and losses that differ by rounding.

    Gradients that are summed over devices are float32, so that more of float16's fit
    than on one device.
    """
    other = {"data": 2 if precision == "float16" else 1}
    many, one = (rows_on(s, precision, **options) for s in (sizes, other))
    assert [row.finite for row in many] == [row.finite for row in one]
    assert [row.loss_scale for row in many] == [row.loss_scale for row in one]
    limit = 1e-4 if precision == "float32" else 2e-2
    np.testing.assert_allclose(
        [row.loss for row in many], [row.loss for row in one], rtol=limit
    )
    assert (precision == "float16") == any(not row.finite for row in many)


# --- Two processes -------------------------------------------------------------------


def options_of(folder, *more):
    model, scaling = SMALL, CONFIG.scaling
    return (
        f"--precision float16 --steps 400 --batch-size {CONFIG.batch_size} "
        f"--warmup-steps {CONFIG.warmup_steps} --test-texts {CONFIG.test_texts} "
        f"--data-path {CONFIG.data_path} --log-every 2 --checkpoint-every 100 "
        f"--model.context {model.context} --model.width {model.width} --model.hidden "
        f"{model.hidden} --model.blocks {model.blocks} --model.heads {model.heads} "
        f"--model.dropout {model.dropout} --scaling.initial {scaling.initial} "
        f"--scaling.period {scaling.period} --run-dir {folder}"
    ).split() + list(more)


def program(*arguments, **variables):
    hidden = ("MAKELEVEL", "XLA_FLAGS")
    # All flags as here, but for the devices: the program says itself how many it has.
    flags = os.environ.get("XLA_FLAGS", "").split()
    flags = " ".join(flag for flag in flags if "device_count" not in flag)
    return subprocess.Popen(
        [sys.executable, "-m", "examples.gpt", *arguments],
        cwd=ROOT,
        env={k: os.environ[k] for k in os.environ if k not in hidden}
        | {"XLA_FLAGS": flags}
        | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.slow
def test_two_processes_stop_together_at_sigterm_and_one_goes_on(tmp_path):
    options = options_of(tmp_path, "--mesh", "data=2", "fsdp=2")
    launcher = program(*options, "--processes", "2")
    metrics = tmp_path / "metrics.csv"
    for _ in range(1800):
        has_rows = metrics.exists() and len(metrics.read_text().splitlines()) > 4
        if has_rows or launcher.poll() is not None:
            break
        time.sleep(0.1)
    launcher.send_signal(signal.SIGTERM)
    output, _ = launcher.communicate(timeout=120)
    assert launcher.returncode == 130, output
    (position,) = map(int, re.findall(r"float16 is saved after step (\d+)", output))
    assert 4 <= position < 400
    config = dataclasses.replace(
        CONFIG,
        model=SMALL,
        steps=400,
        log_every=2,
        checkpoint_every=100,
        run_dir=tmp_path,
        resume=True,
    )
    calls = iter(range(10**6))
    with pytest.raises(Interrupted):
        train(
            config,
            "float16",
            load_data(config),
            mesh=mesh_of({"fsdp": 2}),
            folder=RunFolder(config),
            should_stop=lambda: next(calls) == 3,
        )
    rows = RunFolder(config).history["float16"]
    assert [row.step for row in rows] == list(range(1, position + 4))
    assert any(not row.finite for row in rows)
    assert any(row.finite for row in rows[position:])


@pytest.mark.exhaustive
def test_processes_that_slurm_started_find_each_other(tmp_path):
    """`jax.distributed.initialize()` alone, told by Slurm's variables."""
    options = options_of(tmp_path, "--mesh", "data=2", "--distributed", "--steps", "3")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        job = str(free.getsockname()[1] % 2**12)  # the port is of the job's number
    slurm = {
        "SLURM_JOB_ID": job,
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_NTASKS": "2",
    }
    processes = [
        program(*options, SLURM_PROCID=index, SLURM_LOCALID=index, **slurm)
        for index in ("0", "1")
    ]
    outputs = [process.communicate(timeout=180)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert ["results" in output for output in outputs] == [True, False]
    assert (tmp_path / "results.json").exists() and "2 x" in outputs[0]


@pytest.mark.exhaustive
def test_an_error_of_all_processes_ends_them(tmp_path):
    launcher = program("--processes", "2", "--data-path", str(tmp_path))
    output, _ = launcher.communicate(timeout=120)
    assert launcher.returncode == 2 and "has too little text" in output
