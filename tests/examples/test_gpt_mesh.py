"""The GPT example on any mesh, in one process or two: the same training."""

import dataclasses
import os
import re
import signal
import socket
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from examples import gpt, runs
from examples.runs import Interrupted, SetupError
from tests.helpers import slow_but

from ..faults import small
from .cases import started, stop_before, wait_for_rows

# Flax and Optax need JAX's own promotion.
pytestmark = pytest.mark.third_party

ROOT = Path(__file__).parents[2]
MODEL = gpt.ModelConfig(context=16, width=16, hidden=32, blocks=2, heads=2, dropout=0.2)
SMALL = dataclasses.replace(MODEL, blocks=1)  # what compiles the whole job again
CHANGES = {"steps": 10, "checkpoint_every": 4, "data_path": ROOT / "examples"}
# The first steps overflow.
CHANGES["scaling"] = runs.ScalingConfig(initial=2.0**22, period=3)
CONFIG = dataclasses.replace(small.CONFIG, model=MODEL, **CHANGES)
ALL = {"data": 2, "fsdp": 2, "tensor": 2}


def mesh_of(sizes):
    return runs.make_mesh(sizes, jax.devices()[: int(np.prod([*sizes.values()]))])


def rows_on(sizes, precision, **changes):
    config = dataclasses.replace(CONFIG, **changes)
    return gpt.train(config, precision, gpt.load_data(config), mesh=mesh_of(sizes))[1]


def test_options():
    config = gpt.parse_config("--mesh tensor=2 data=4 --processes 2".split())
    assert config.mesh_sizes == {"tensor": 2, "data": 4}
    assert config.devices_per_process == 4
    assert gpt.parse_config([]).devices_per_process is None
    assert gpt.parse_config(["--processes", "3"]).devices_per_process == 1
    mesh = runs.make_mesh({"tensor": 2, "data": 4}, jax.devices()[:8])
    assert dict(mesh.shape) == {"data": 4, "fsdp": 1, "tensor": 2}
    assert runs.make_mesh().shape["data"] == jax.device_count()


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
        gpt.parse_config(arguments.split())


def test_a_mesh_fits_the_devices_and_the_batch():
    match = r"as many devices as there are, 8; got data=2 x fsdp=3 = 6"
    with pytest.raises(SetupError, match=match):
        runs.make_mesh({"data": 2, "fsdp": 3}, jax.devices()[:8])
    # A batch is shared by all devices but those of `tensor`.
    config = dataclasses.replace(CONFIG, batch_size=4, model=SMALL)
    with pytest.raises(SetupError, match=r"times devices, 1 x 8; got 4. Use 8\."):
        gpt.train(config, "float32", gpt.load_data(config), mesh=mesh_of({"fsdp": 8}))
    runs.require_divisible(config, mesh_of(ALL))
    # Without a mesh nothing is pinned.
    x = np.ones((2, 3), np.float32)
    assert runs.pin(x) is x and runs.pin(x, P("tensor")) is x


@pytest.mark.slow
def test_all_matrices_and_their_moments_are_divided():
    mesh, texts = mesh_of(ALL), np.zeros((16, 17), np.uint8)
    with jax.set_mesh(mesh):
        nodes, _ = gpt.initial_state(CONFIG, "float32", texts)
    arrays = gpt.arrays_of(nodes)
    matrices = [name for name in arrays if re.search(r"kernel|embedding", name)]
    assert len(matrices) == 3 * (6 * MODEL.blocks + 3)
    for name in matrices:
        shard = arrays[name].sharding.shard_shape(arrays[name].shape)
        # `data` divides no weight.
        assert np.prod(shard) == arrays[name].size / 4, name
        weight = "model." + re.sub(r".*(mu|nu|model)\.", "", name)
        assert arrays[name].sharding == arrays[weight].sharding, name
    used = {".".join(n.removesuffix(".value").split(".")[-2:]) for n in arrays}
    assert used >= gpt.LAYOUT.keys()


def gathered(precision):
    config = dataclasses.replace(CONFIG, model=SMALL)
    mesh, texts = mesh_of({"fsdp": 8}), np.zeros((16, 17), np.uint8)
    with jax.set_mesh(mesh):
        nodes, scaling = gpt.initial_state(config, precision, texts)
        scaling = jax.device_put(scaling, runs.replicated(mesh))
        step = gpt.make_step(config, precision, mesh)
        state = nodes["model"], nodes["optimizer"], scaling
        lowered = step.lower(*state, runs.put(texts, mesh))
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


TRAININGS = [
    ({"fsdp": 8}, "float32", {"model": SMALL}),
    (ALL, "float16", {"scan": True, "remat": True, "accumulate": 2}),
    (ALL, "delayed", {"scan": True}),
]


@pytest.mark.parametrize(("sizes", "precision", "options"), slow_but([], TRAININGS))
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
    losses = ([row.loss for row in rows] for rows in (many, one))
    np.testing.assert_allclose(*losses, rtol=limit)
    assert (precision == "float16") == any(not row.finite for row in many)


def options_of(folder, *more):
    model = [
        f"--model.{name}={getattr(SMALL, name)}"
        for name in ("context", "width", "hidden", "blocks", "heads", "dropout")
    ]
    return [
        *"--precision float16 --steps 400 --log-every 2 --checkpoint-every 100".split(),
        *(f"--batch-size={CONFIG.batch_size}", f"--test-texts={CONFIG.test_texts}"),
        *(f"--data-path={CONFIG.data_path}", f"--run-dir={folder}", *model),
        f"--warmup-steps={CONFIG.warmup_steps}",
        f"--scaling.initial={CONFIG.scaling.initial}",
        f"--scaling.period={CONFIG.scaling.period}",
        *more,
    ]


def program(*arguments, **variables):
    # All flags as here, but for the devices: the program says itself how many it has.
    flags = os.environ.get("XLA_FLAGS", "").split()
    flags = " ".join(flag for flag in flags if "device_count" not in flag)
    return started("gpt", *arguments, XLA_FLAGS=flags, **variables)


@pytest.mark.slow
def test_two_processes_stop_together_at_sigterm_and_one_goes_on(tmp_path):
    options = options_of(tmp_path, "--mesh", "data=2", "fsdp=2")
    launcher = program(*options, "--processes", "2")
    metrics = tmp_path / "metrics.csv"
    wait_for_rows(metrics, 4, launcher)
    launcher.send_signal(signal.SIGTERM)
    output, _ = launcher.communicate(timeout=120)
    assert launcher.returncode == 130, output
    (position,) = map(int, re.findall(r"float16 is saved after step (\d+)", output))
    assert 4 <= position < 400
    changes = {"steps": 400, "log_every": 2, "checkpoint_every": 100, "model": SMALL}
    config = dataclasses.replace(CONFIG, run_dir=tmp_path, resume=True, **changes)
    options = {"folder": runs.RunFolder(config), "should_stop": stop_before(3)}
    options["mesh"] = mesh_of({"fsdp": 2})
    with pytest.raises(Interrupted):
        gpt.train(config, "float16", gpt.load_data(config), **options)
    rows = runs.RunFolder(config).history["float16"]
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
    slurm = {"SLURM_JOB_ID": job, "SLURM_STEP_NODELIST": "localhost"}
    slurm["SLURM_NTASKS"] = "2"
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
