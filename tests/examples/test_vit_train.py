"""Training, checkpoints and results of the ViT example, with a very small model."""

import contextlib
import dataclasses
import io
import json
import os
import shlex
import shutil
import signal
import subprocess
import types
from pathlib import Path

import equinox as eqx
import jax
import numpy as np
import pytest

from examples import runs, vit, vit_explicit
from examples.runs import Display, Interrupted, RunFolder, SetupError
from examples.runs.checkpoint import Checkpoints, checksum
from examples.runs.digest import digests
from examples.runs.display import describe_bytes, describe_scale

from .cases import (
    late_failures,  # noqa: F401
    read_metrics,
    started,
    stop_before,
    wait_for_rows,
)

# Optax's Adam needs JAX's standard promotion.
pytestmark = pytest.mark.third_party

SMALL = vit.ModelConfig(patch=4, width=8, hidden=8, blocks=1, heads=2, dropout=0.2)
CHANGES = {
    "steps": 10,
    "batch_size": 16,
    "warmup_steps": 2,
    "log_every": 3,
    "clip": 1.0,
}
CHANGES |= {"checkpoint_every": 4, "model": SMALL, "accumulate": 2}
# Starts too high: the first steps overflow.
CHANGES["scaling"] = runs.ScalingConfig(initial=2.0**22, period=3)
CONFIG = dataclasses.replace(vit.PRESETS["digits"], **CHANGES)


def config_in(folder: Path, **changes):
    return dataclasses.replace(CONFIG, run_dir=folder, **changes)


def one_device():
    auto, devices = (jax.sharding.AxisType.Auto,), jax.devices()[:1]
    return jax.make_mesh((1,), ("data",), axis_types=auto, devices=devices)


def train_in(folder: Path, precision, should_stop=lambda: False, **changes):
    config = config_in(folder, **changes)
    options = {"folder": RunFolder(config), "should_stop": should_stop}
    options["mesh"] = one_device()
    return vit.train(config, precision, vit.load_data(config), **options)


def restored(folder: Path, precision, **changes):
    config = config_in(folder, **changes)
    key, shape = jax.random.key(config.seed), (8, 8, 1)
    size = config.batch_size
    batch = {"image": jax.ShapeDtypeStruct((size, *shape), "float32")}
    batch["label"] = jax.ShapeDtypeStruct((size,), "int32")
    model = vit.VisionTransformer(config.model, shape, 10, key)
    like = vit.initial_state(config, precision, model, batch)
    like = eqx.filter_shard(like, runs.replicated(one_device()))
    with Checkpoints(folder, config, precision) as checkpoints:
        return checkpoints.restore(like)


NEVER = types.SimpleNamespace(requested=False)


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """The whole job on one device, as the command line runs it: folder and output."""
    folder, printed = tmp_path_factory.mktemp("job"), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.setattr("examples.runs.data_mesh", one_device)
        vit.run(config_in(folder), Display(), NEVER)
    return folder, printed.getvalue()


@pytest.fixture
def finished(job):
    return job[0]


@pytest.fixture
def copy(finished, tmp_path):
    """Of the finished job, to be damaged."""
    return shutil.copytree(finished, tmp_path / "run")


def record_of(folder):
    return folder / "checkpoints" / "float32" / "10" / "record" / "metadata"


def what_came_out(folder: Path, precision):
    """The result, the rows, and the lines of `metrics.csv` of one precision."""
    run_folder = RunFolder(config_in(folder, resume=True))
    lines = (folder / "metrics.csv").read_text().splitlines()
    lines = [line for line in lines if line.startswith(precision)]
    return run_folder.results[precision], run_folder.history[precision], lines


@pytest.mark.slow
def test_interrupted_and_resumed_equals_uninterrupted(finished, tmp_path):
    result, rows, lines = what_came_out(finished, "float16")
    with pytest.raises(Interrupted) as stopped:
        train_in(tmp_path, "float16", stop_before(5))
    assert stopped.value.position == 5
    resumed, resumed_rows = train_in(tmp_path, "float16", resume=True)
    ends = [digests(restored(f, "float16")) for f in (finished, tmp_path)]
    assert ends[0] == ends[1]
    assert resumed_rows == rows and [row.step for row in rows] == list(range(1, 11))
    assert (tmp_path / "metrics.csv").read_text().splitlines()[1:] == lines
    timeless = [dataclasses.replace(r, step_seconds=0.0) for r in (resumed, result)]
    assert timeless[0] == timeless[1]


@pytest.mark.slow
def test_a_skipped_step_is_made_again_bit_for_bit(finished):
    _, rows, _ = what_came_out(finished, "float16")
    config = config_in(finished)
    last = max((finished / "bad_steps" / "float16").iterdir()).name
    (bad,) = runs.read_bad_steps(config, int(last.removeprefix("bad_step_")))
    assert bad.step > config.checkpoint_every
    mesh = one_device()
    state = vit.state_before(config, vit.load_data(config), bad, mesh=mesh)
    _, metrics = vit.make_step(config, "float16", mesh)(bad.batch, state)
    row = rows[bad.step - 1]
    assert not metrics["finite"] and metrics["loss"] == row.loss
    assert metrics["skipped"] == row.skipped


@pytest.mark.exhaustive
@pytest.mark.parametrize("explicit", [False, True])
def test_a_skipped_step_of_a_run_is_blamed(tmp_path, capsys, monkeypatch, explicit):
    """As the command line does it: a loss scale that starts too high."""
    monkeypatch.setattr("examples.runs.data_mesh", one_device)
    style = vit_explicit.STYLE if explicit else vit.Style()
    changes = {"style": "explicit" if explicit else "autocast", "accumulate": 1}
    config = config_in(tmp_path, precision="float16", steps=2, **changes)
    vit.train(
        config, "float16", vit.load_data(config), style=style, folder=RunFolder(config)
    )
    vit.run(dataclasses.replace(config, blame=1), Display(), NEVER, style=style)
    printed = capsys.readouterr().out
    assert "float16, step 1, loss scale 4.1943e+06" in printed
    assert "First bad value: " in printed and ": scale\n" in printed
    assert "vit.py:" in printed
    (page,) = tmp_path.rglob("blame.html")
    assert "Verdict: scale" in page.read_text()


@pytest.mark.exhaustive
def test_a_run_that_is_killed_before_its_first_checkpoint_starts_anew(
    finished, tmp_path
):
    stop = stop_before(3)

    def kill():
        if stop():
            raise KeyboardInterrupt  # no time to save
        return False

    with pytest.raises(KeyboardInterrupt):
        train_in(tmp_path, "float16", kill)
    assert len(read_metrics(tmp_path)) == 3
    _, resumed_rows = train_in(tmp_path, "float16", resume=True)
    _, rows, lines = what_came_out(finished, "float16")
    assert resumed_rows == rows
    assert (tmp_path / "metrics.csv").read_text().splitlines()[1:] == lines


@pytest.mark.slow
def test_checkpoint_holds_everything_and_results_survive_the_loss_of_metrics(
    finished, copy
):
    state, position = restored(finished, "float16")
    assert position == 10
    assert int(state.scaling.steps) == 10
    _, rows, _ = what_came_out(finished, "float16")
    assert int(state.scaling.skipped) == rows[-1].skipped > 0
    counts = [leaf for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim == 0]
    assert {int(count) for count in counts} == {10 - int(state.scaling.skipped)}
    result, _, _ = what_came_out(finished, "float32")
    (copy / "metrics.csv").unlink()
    resumed, rows = train_in(copy, "float32", resume=True)
    unknown = {"final_loss": None, "step_seconds": None}
    assert rows == [] and resumed == dataclasses.replace(result, **unknown)


def largest_file(folder: Path) -> Path:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return max(files, key=lambda path: path.stat().st_size)


def cut_off(step: Path):
    path = largest_file(step / "state")
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip_bit(step: Path):
    path = largest_file(step / "state")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def lose_record(step: Path):
    (step / "record" / "metadata").write_text("{}")


def lose_state(step: Path):
    shutil.rmtree(step / "state")


@pytest.mark.slow
@pytest.mark.usefixtures("late_failures")
def test_damaged_checkpoint_is_refused(finished, tmp_path):
    for damage in (cut_off, flip_bit, lose_record, lose_state):
        folder = shutil.copytree(finished, tmp_path / damage.__name__)
        damage(folder / "checkpoints" / "float32" / "10")
        match = rf"The checkpoint .*{damage.__name__}/.*float32/10 is damaged or cut "
        match += r"off .* Remove .*float32/10 to continue from step 8"
        with pytest.raises(SetupError, match=match):
            restored(folder, "float32")


@pytest.mark.slow
def test_changed_value_is_named(copy):
    record = json.loads(record_of(copy).read_text())
    name = next(name for name in record["digests"] if "embed.weight" in name)
    record["digests"][name] ^= 1
    record_of(copy).write_text(json.dumps(record))
    with pytest.raises(SetupError, match="its record is not as it was written"):
        restored(copy, "float32")
    record["checksum"] = checksum(record)
    record_of(copy).write_text(json.dumps(record))
    with pytest.raises(SetupError, match=r"state/model.*embed\.weight is not what was"):
        restored(copy, "float32")


@pytest.mark.slow
def test_checkpoint_of_another_version_or_run_is_refused(copy):
    model = dataclasses.replace(CONFIG.model, width=16)
    match = r"of another run: --model.width was 8 and is 16; --seed was 0 and is 3"
    with pytest.raises(SetupError, match=match):
        restored(copy, "float32", seed=3, model=model)
    text = record_of(copy).read_text()
    for version in (1, 99):
        changed = text.replace('"version": 2', f'"version": {version}')
        record_of(copy).write_text(changed)
        with pytest.raises(SetupError, match=f"has version {version}; this program"):
            restored(copy, "float32")


def test_runs_are_not_overwritten_by_accident_and_need_a_checkpoint_to_resume(tmp_path):
    with pytest.raises(SetupError, match=r"`--resume`: .* holds no checkpoints"):
        RunFolder(config_in(tmp_path / "new", resume=True))
    with pytest.raises(SetupError, match="there is no complete checkpoint in"):
        restored(tmp_path / "new", "float32")
    # An unfinished run is not overwritten by accident.
    with pytest.raises(Interrupted):
        train_in(tmp_path, "float32", stop_before(2))
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(SetupError, match="unfinished run.*--resume.*--overwrite"):
        RunFolder(config_in(tmp_path))
    RunFolder(config_in(tmp_path, overwrite=True))
    assert not (tmp_path / "checkpoints").exists()
    assert (tmp_path / "notes.txt").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["results.json", "metrics.csv"])
def test_damaged_records_are_named(copy, name):
    (copy / name).write_text("precision,step\nfloat32,x\n")
    with pytest.raises(SetupError, match=f"{name} is damaged"):
        RunFolder(config_in(copy, resume=True))


ONE_DEVICE = "--xla_force_host_platform_device_count=1"  # the last one counts


@pytest.mark.slow
def test_ctrl_c_leaves_a_valid_checkpoint(tmp_path):
    names = ("patch", "width", "hidden", "blocks", "heads", "dropout")
    options = [
        *"--precision float16 --steps 1000000 --log-every 2 --run-dir".split(),
        str(tmp_path),
        *(f"--model.{name}={getattr(CONFIG.model, name)}" for name in names),
        f"--batch-size={CONFIG.batch_size}",
        f"--warmup-steps={CONFIG.warmup_steps}",
        *(f"--accumulate={CONFIG.accumulate}", f"--clip={CONFIG.clip}"),
        f"--scaling.initial={CONFIG.scaling.initial}",
        f"--scaling.period={CONFIG.scaling.period}",
    ]
    flags = f"{os.environ.get('XLA_FLAGS', '')} {ONE_DEVICE}"
    process = started("vit", *options, stderr=subprocess.PIPE, XLA_FLAGS=flags)
    wait_for_rows(tmp_path / "metrics.csv", 6, process)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 130, errors
    assert "Finishing this step, then saving" in errors
    state, position = restored(tmp_path, "float16", steps=1000000)
    assert f"float16 is saved after step {position}." in output
    assert shlex.join(["examples.vit", *options, "--resume"]) in output
    assert position == int(state.scaling.steps) == len(read_metrics(tmp_path)) >= 6


def test_batch_must_divide_over_devices_and_micro_batches():
    assert runs.data_mesh().size == jax.local_device_count()
    mesh = types.SimpleNamespace(size=8)
    config = dataclasses.replace(CONFIG, batch_size=24, accumulate=2)
    match = r"micro-batches times devices, 2 x 8; got 24. Use 32\."
    with pytest.raises(SetupError, match=match):
        vit.train(config, "float32", vit.load_data(config), mesh=mesh)  # type: ignore


@pytest.mark.slow
def test_micro_batches_train_on_the_whole_batch():
    """The published MPX's example applies the gradient of the last one."""
    model = dataclasses.replace(CONFIG.model, dropout=0.0)
    losses = {}
    for parts in (1, 4):
        config = dataclasses.replace(CONFIG, model=model, accumulate=parts)
        _, rows = vit.train(config, "float32", vit.load_data(config), mesh=one_device())
        losses[parts] = [row.loss for row in rows]
    np.testing.assert_allclose(losses[4], losses[1], rtol=1e-4)


@pytest.mark.slow
def test_runaway_skipping_stops_with_a_diagnosis():
    scaling = dataclasses.replace(CONFIG.scaling, max_skipped_in_a_row=4)
    config = dataclasses.replace(CONFIG, scaling=scaling)
    data = vit.load_data(config)
    broken = data.train.map(lambda batch: {**batch, "image": batch["image"] * np.nan})
    with pytest.raises(FloatingPointError, match="in a row"):
        data = dataclasses.replace(data, train=broken)
        vit.train(config, "float16", data, mesh=one_device())


@pytest.mark.slow
def test_the_whole_job(job, copy):
    folder, printed = copy, job[1]
    config = config_in(folder)
    for precision in config.precisions:
        assert precision in printed
    assert "accuracy" in printed and "curves.png" in printed
    words = " ".join(printed.split())
    assert "a step took, relative to float32: float16 " in words
    results = json.loads((folder / "results.json").read_text())
    assert results["finished"]
    assert [r["precision"] for r in results["results"]] == list(config.precisions)
    assert all(r["step_bytes"] > 0 for r in results["results"])
    rows = read_metrics(folder)
    assert len(rows) == 30
    # Equal batches and models: the first losses differ by rounding only.
    first = [float(row["loss"]) for row in rows[::10]]
    np.testing.assert_allclose(first, first[0], rtol=1e-2)
    assert [float(row["loss_scale"]) for row in rows[::10]] == [1, 2.0**22, 1]
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    # A finished run may be replaced, and resuming it trains nothing.
    vit.run(dataclasses.replace(config, resume=True), Display(), NEVER)
    again = json.loads((folder / "results.json").read_text())
    assert again["results"] == results["results"]
    RunFolder(config)
    assert not (folder / "checkpoints").exists()


@pytest.mark.exhaustive
def test_casts_by_hand_train_the_same_model(tmp_path, capsys):
    config = config_in(tmp_path, style="explicit", accumulate=1)
    vit_explicit.run(config, Display(), NEVER)
    assert "ViT on handwritten digits, explicit" in capsys.readouterr().out
    rows = read_metrics(tmp_path)
    losses = {
        precision: [float(row["loss"]) for row in rows if row["precision"] == precision]
        for precision in config.precisions
    }
    # The first is float32's but for rounding, and the scale starts too high.
    for precision in ("float16", "bfloat16"):
        assert losses[precision][0] != losses["float32"][0]
        first = losses[precision][0], losses["float32"][0]
        np.testing.assert_allclose(*first, rtol=1e-2)
    results = json.loads((tmp_path / "results.json").read_text())
    skipped = {r["precision"]: r["skipped"] for r in results["results"]}
    assert skipped["float32"] == skipped["bfloat16"] == 0 and skipped["float16"] > 0
    with pytest.raises(SetupError, match="--style was explicit and is autocast"):
        restored(tmp_path, "float16", accumulate=1)


@pytest.mark.exhaustive
def test_recipes_train_the_same_model_beside_it(tmp_path, capsys):
    recipes = {"precision": "float32", "recipe": ("delayed", "current")}
    config = config_in(tmp_path, accumulate=1, **recipes)
    vit.run(config, Display(), NEVER)
    printed = capsys.readouterr().out
    assert "delayed" in printed and "current" in printed
    rows = read_metrics(tmp_path)
    first = {row["precision"]: float(row["loss"]) for row in rows if row["step"] == "1"}
    assert list(first) == ["float32", "delayed", "current"]
    np.testing.assert_allclose(list(first.values()), first["float32"], rtol=3e-2)
    assert len(set(first.values())) == 3  # each was rounded in its own way
    state, position = restored(tmp_path, "delayed", accumulate=1)
    scales = state.scaling.scales_by_weight()
    assert position == 10 and len(scales) == 7  # all layers but the last
    for name, scale in scales.items():
        assert np.isfinite(scale).all() and (np.asarray(scale) != 1).all(), name


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_products_are_computed_in_float32_on_a_cpu(dtype):
    """What the note under the table says."""
    if jax.default_backend() != "cpu":
        pytest.skip("the tests run on an accelerator")
    x = jax.ShapeDtypeStruct((64, 64), dtype)
    text = jax.jit(jax.numpy.dot).lower(x, x).compile().as_text()
    (product,) = (line for line in text.splitlines() if " dot(" in line)
    assert "= f32[64,64]" in product


def test_numbers_for_people():
    scales = [describe_scale(s) for s in (1, 2.0**15, 3, 0.5)]
    assert scales == ["1", "2^15", "3", "2^-1"]
    sizes = [describe_bytes(b) for b in (None, 800, 12_300_000, 2.5e9)]
    assert sizes == ["unknown", "0.8 kB", "12.3 MB", "2.5 GB"]
