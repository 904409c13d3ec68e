"""The GPT example: text, model, and short trainings of a very small one."""

import csv
import dataclasses
import itertools
import json
import shutil
import sysconfig
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import mpx
from examples import gpt
from examples.data.text import is_held_out
from examples.gpt import GPT
from examples.precisions import DTYPES, RECIPES
from examples.runs import (
    Display,
    Interrupted,
    RunFolder,
    SetupError,
    read_bad_steps,
)
from examples.runs.checkpoint import Checkpoints
from mpx._program import walk
from tests.helpers import NoFlow

from ..faults import small
from .cases import one_device, read_metrics, stop_before

# Flax and Optax need JAX's own promotion.
pytestmark = pytest.mark.third_party

SMALL = gpt.ModelConfig(context=16, width=8, hidden=16, blocks=2, heads=2, dropout=0.2)
ONE_BLOCK = dataclasses.replace(SMALL, blocks=1)  # what compiles whole trainings
# Starts too high: the first steps overflow.
CHANGES = {"steps": 10, "checkpoint_every": 4, "test_texts": 32, "data_path": None}
CONFIG = dataclasses.replace(small.CONFIG, model=SMALL, **CHANGES)


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    root = tmp_path_factory.mktemp("library")
    for path in Path(sysconfig.get_paths()["stdlib"]).glob("[a-d]*.py"):
        shutil.copyfile(path, root / path.name)
    (root / "test").mkdir()
    (root / "test" / "secret.py").write_text("never seen\n" * 100)
    return root


def test_options():
    config = gpt.parse_config(
        "--steps 7 --scan --remat --model.width 32 --scaling.period 5 --seed 3 "
        "--data-path there --precision bfloat16 --accumulate 2 "
        "--recipe mxfp8 delayed mxfp8".split()
    )
    assert config.scan and config.remat and config.model.width == 32
    assert config.scaling.period == 5
    assert config.precisions == ("bfloat16", "delayed", "mxfp8")
    assert gpt.parse_config(["--recipe", "all"]).precisions == (*DTYPES, *RECIPES)
    assert gpt.parse_config([]) == gpt.Config()
    assert gpt.Config().folder == Path("runs/gpt")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--steps 0", r"`--steps` must be at least 1; got 0"),
        ("--test-texts 0", r"`--test-texts` must be at least 1"),
        ("--model.heads 5", r"`--model.heads` must divide --model.width 96; got 5"),
        ("--model.dropout 1", r"`--model.dropout` must lie in \[0, 1\); got 1"),
        ("--accumulate 3", r"`--accumulate` must divide --batch-size 32; got 3"),
    ],
)
def test_wrong_options_are_named(arguments, message):
    with pytest.raises(SetupError, match=message):
        gpt.parse_config(arguments.split())


def test_no_file_is_on_both_sides(library):
    data = gpt.load_data(dataclasses.replace(CONFIG, data_path=library))
    again = gpt.load_data(dataclasses.replace(CONFIG, data_path=library, seed=1))
    np.testing.assert_array_equal(data.train, again.train)
    np.testing.assert_array_equal(data.test, again.test)
    train, test = data.train.tobytes(), data.test
    assert data.train_files + data.test_files == len(list(library.glob("*.py")))
    assert data.train_files > data.test_files > 0 and test.shape == (32, 17)
    for path in library.glob("*.py"):
        assert (path.read_bytes() in train) == (not is_held_out(Path(path.name)))
    paths = [p for p in sorted(library.glob("*.py")) if is_held_out(Path(p.name))]
    held_out = b"".join(path.read_bytes() + b"\0" for path in paths)
    assert all(text.tobytes() in held_out for text in test)
    assert b"never seen" not in train and len(held_out) == data.test_size


def test_a_batch_is_a_function_of_seed_and_position_and_of_one_size(library):
    config = dataclasses.replace(CONFIG, data_path=library)
    data, again = gpt.load_data(config), gpt.load_data(config)
    for position in (3, 4):
        batch = data.batch(position, size=16, seed=0)
        np.testing.assert_array_equal(batch, again.batch(position, size=16, seed=0))
        assert (batch != data.batch(position, size=16, seed=1)).any()
        assert (batch != data.batch(position + 1, size=16, seed=0)).any()
    text = data.train.tobytes()
    assert batch.shape == (16, 17) and all(row.tobytes() in text for row in batch)
    for size, count in ((16, 2), (20, 1), (48, 1)):
        batches = list(data.test_batches(size))
        assert [len(batch) for batch in batches] == [size] * count
        np.testing.assert_array_equal(batches[0][:16], data.test[:16])


def test_the_standard_library_is_enough_text(tmp_path):
    data = gpt.load_data(gpt.Config())
    assert data.name == "Python's standard library"
    assert len(data.train) > 10**6 and data.test.shape == (1024, 65)
    assert 0.02 < data.test_size / len(data.train) < 0.3
    (tmp_path / "one.py").write_text("pass\n")
    with pytest.raises(SetupError, match=r"too little text: .* `--data-path`"):
        gpt.load_data(dataclasses.replace(CONFIG, data_path=tmp_path))


def texts(seed=0, size=4):
    random = np.random.default_rng(seed)
    return jnp.asarray(random.integers(0, 256, (size, 17)), jnp.uint8)


@pytest.mark.exhaustive
def test_scan_and_remat_change_nothing_but_the_form():
    config = dataclasses.replace(SMALL, dropout=0.0)
    models = {
        (scan, remat): GPT(config, scan=scan, remat=remat, rngs=nnx.Rngs(0))
        for scan, remat in itertools.product((False, True), repeat=2)
    }
    plain = models[False, False]
    blocks = [nnx.state(block) for block in plain.blocks]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *blocks)
    expected = None
    for (scan, _), model in models.items():
        for name in ("embed", "place", "norm", "head"):
            nnx.update(getattr(model, name), nnx.state(getattr(plain, name)))
        if scan:
            nnx.update(model.blocks, stacked)
        grad = nnx.value_and_grad(gpt.loss_and_accuracy, has_aux=True)
        (loss, _), grads = grad(model, texts())
        blocks = grads["blocks"]
        grads["blocks"] = jax.tree.map(lambda x: x[1], blocks) if scan else blocks[1]
        found = [loss, *jax.tree.leaves(grads)]
        expected = expected or found
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_a_byte_does_not_see_what_follows_and_the_test_has_no_dropout():
    model = GPT(SMALL, rngs=nnx.Rngs(0))
    model.eval()
    text = texts()[:, :-1]
    changed = text.at[:, 10:].set(7)
    predict = nnx.jit(lambda model, text: model(text))
    before, after = predict(model, text), predict(model, changed)
    np.testing.assert_allclose(before[:, :10], after[:, :10], atol=1e-5)
    assert not np.allclose(before[:, 10:], after[:, 10:], atol=1e-3)
    # The test is without dropout and leaves the model as it is.
    model = GPT(SMALL, rngs=nnx.Rngs(0))
    dropout = model.blocks[0].dropout
    test = gpt.make_test("bfloat16")
    first, second = (test(model, mpx.NoLossScaling(), texts()) for _ in range(2))
    assert first == second and dropout.deterministic is False
    assert int(dropout.rngs.count[...]) == 0
    model(texts()[:, :-1])
    assert int(dropout.rngs.count[...]) > 0


def products(func, *args):
    """The dtypes of the operands of every matrix product, loops counted in full."""
    jaxpr = jax.make_jaxpr(func)(*args)
    return [
        {variable.aval.dtype.name for variable in visit.equation.invars}
        for visit in walk(jaxpr, [None] * len(jaxpr.in_avals), NoFlow())
        if visit.equation.primitive.name == "dot_general"
        for _ in range(visit.place.executions)
    ]


@pytest.mark.parametrize("options", [{}, {"scan": True, "remat": True}])
def test_all_products_run_in_half_precision(options):
    graphdef, state = nnx.split(GPT(SMALL, rngs=nnx.Rngs(0), **options))

    def gradient(loss):
        def arrays(state, texts):
            model = nnx.merge(graphdef, state, copy=True)
            scaling = mpx.DynamicLossScaling()
            result = mpx.nnx.grad(loss, scaling, has_aux=True)(model, texts)
            return jax.tree.leaves(result.grads)

        return arrays

    forward = 8 * SMALL.blocks + 1
    backward = 2 * forward + (8 * SMALL.blocks if options else 0)
    half = mpx.autocast(gpt.loss_and_accuracy, "bfloat16")
    cast = products(gradient(half), state, texts())
    assert cast == [{"bfloat16"}] * len(cast)
    # Nothing is computed again that remat would not: the last products of a block.
    assert forward + 2 * forward - 2 <= len(cast) <= forward + backward


def train_in(folder, library, precision, should_stop=lambda: False, **changes):
    config = dataclasses.replace(CONFIG, run_dir=folder, data_path=library, **changes)
    data, folder = gpt.load_data(config), RunFolder(config)
    options = {"folder": folder, "should_stop": should_stop}
    return gpt.train(config, precision, data, mesh=one_device(), **options)


def one_block_in(folder, library):
    changes = {"run_dir": folder, "data_path": library, "model": ONE_BLOCK}
    return dataclasses.replace(CONFIG, **changes)


@pytest.fixture(scope="module")
def in_float16(library, tmp_path_factory):
    """A finished run of one block: its folder and its rows."""
    folder = tmp_path_factory.mktemp("float16")
    return folder, train_in(folder, library, "float16", model=ONE_BLOCK)[1]


@pytest.mark.exhaustive
def test_interrupted_and_resumed_equals_uninterrupted(tmp_path, library):
    """Dropout's random streams, and a recipe's scales, are part of a checkpoint."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    options = {"scan": True, "model": ONE_BLOCK}
    result, rows = train_in(whole, library, "delayed", **options)
    with pytest.raises(Interrupted) as stopped:
        train_in(parts, library, "delayed", stop_before(5), **options)
    assert stopped.value.position == 5
    resumed, resumed_rows = train_in(parts, library, "delayed", resume=True, **options)
    assert resumed_rows == rows and [row.step for row in rows] == list(range(1, 11))
    assert (whole / "metrics.csv").read_bytes() == (parts / "metrics.csv").read_bytes()
    assert resumed.test_loss == result.test_loss


@pytest.mark.exhaustive
def test_a_skipped_step_is_made_again_bit_for_bit(in_float16, library):
    """From the checkpoint before it, with dropout's streams and the loss scale."""
    folder, rows = in_float16
    config = one_block_in(folder, library)
    first = [
        row.step
        for before, row in zip([None, *rows], rows, strict=False)
        if not row.finite and (before is None or before.finite)
    ]
    kept = sorted((folder / "bad_steps" / "float16").iterdir())
    assert [p.name for p in kept] == [f"bad_step_{n:06d}" for n in first[-3:]]
    assert first[-1] > config.checkpoint_every
    for number in (first[0], first[-1]):
        (bad,) = read_bad_steps(config, number)
        mesh = one_device()
        nodes, scaling = gpt.state_before(config, gpt.load_data(config), bad, mesh)
        with jax.set_mesh(mesh):
            step = gpt.make_step(config, "float16", mesh)
            _, metrics = step(nodes["model"], nodes["optimizer"], scaling, bad.batch)
        row = rows[number - 1]
        assert not metrics["finite"] and metrics["loss"] == row.loss
        assert metrics["loss_scale"] == row.loss_scale == bad.loss_scale
        assert metrics["skipped"] == row.skipped


@pytest.mark.exhaustive
def test_looking_at_numbers_changes_none(tmp_path, library):
    changes = {"steps": 4, "model": ONE_BLOCK}
    _, rows = train_in(tmp_path / "plain", library, "bfloat16", **changes)
    folder = tmp_path / "watched"
    _, watched = train_in(folder, library, "bfloat16", monitor=2, **changes)
    assert watched == rows
    with (folder / "monitor" / "bfloat16.csv").open(newline="") as file:
        found = list(csv.reader(file))
    assert {row[0] for row in found} == {"0", "2"}
    assert any("head" in row[1] and row[1].endswith("gradient/amax") for row in found)
    assert "tolerate it" in (folder / "monitor" / "bfloat16.txt").read_text()
    assert (folder / "monitor" / "bfloat16.png").stat().st_size > 1000


@pytest.mark.slow
def test_what_a_run_has_not_kept_is_not_made_again(tmp_path, library):
    config = one_block_in(tmp_path, library)
    with pytest.raises(SetupError, match=r"not hold step 7 in all.* none\."):
        read_bad_steps(config, 7)
    options = {"steps": 2, "log_every": 1, "model": ONE_BLOCK}
    train_in(tmp_path, library, "float16", **options)
    with pytest.raises(SetupError, match=r"It holds: float16/bad_step_000001"):
        read_bad_steps(config, 7)
    other = dataclasses.replace(config, learning_rate=1.0)
    with pytest.raises(SetupError, match=r"other options: --learning-rate, --steps\."):
        read_bad_steps(other, 1)
    (tmp_path / "bad_steps" / "float16" / "bad_step_000001" / "batch.npz").unlink()
    with pytest.raises(SetupError, match=r"bad_step_000001 is damaged .* Remove it"):
        read_bad_steps(config, 1)


@pytest.mark.slow
def test_a_poisoned_state_leaves_the_checkpoints_as_they_are(tmp_path):
    config = dataclasses.replace(CONFIG, model=ONE_BLOCK)
    nodes, scaling = gpt.initial_state(config, "float16", texts())
    arrays = gpt.arrays_of(nodes)
    name = next(n for n in arrays if "head.kernel" in n)
    with Checkpoints(tmp_path, config, "float16") as checkpoints:
        checkpoints.save(6, (arrays, scaling))
        bad = arrays | {name: jnp.full_like(arrays[name], jnp.nan)}
        with pytest.raises(FloatingPointError, match=r"head\.kernel"):
            checkpoints.save(9, (bad, scaling))
        assert checkpoints.restore((arrays, scaling))[1] == 6


@pytest.mark.slow
def test_the_whole_job(tmp_path, library, capsys):
    """On all devices, as the command line runs it."""
    model = dataclasses.replace(ONE_BLOCK, dropout=0.0)
    changes = {"run_dir": tmp_path, "data_path": library, "precision": "bfloat16"}
    config = dataclasses.replace(CONFIG, model=model, accumulate=2, **changes)
    gpt.run(config, Display(), types.SimpleNamespace(requested=False))
    printed = capsys.readouterr().out
    for word in (*config.precisions, "bits", "per byte", "curves.png", "held out"):
        assert word in printed
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["finished"]
    assert [r["precision"] for r in results["results"]] == list(config.precisions)
    assert all(r["step_bytes"] > 0 for r in results["results"])
    rows = read_metrics(tmp_path)
    assert [row["step"] for row in rows] == [str(step) for step in range(1, 11)]
    assert float(rows[-1]["loss"]) < float(rows[0]["loss"])
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
