"""`mpx.import_weights`: training goes on, and what is wrong with files is said."""

import functools
import json
import os
import subprocess
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import mpx
from mpx.quantization import StoredWeight, dequantize_weights, quantize_weights
from tests.helpers import assert_same_bits, slow_but
from tests.step.cases import same_bits
from tests.tools.export import cases, reader
from tests.tools.export.cases import (
    LAYERS,
    MLP,
    NONE,
    RECIPES,
    X,
    layers,
    low,
    mlp,
    normal,
)

TX = mpx.master_weights(optax.adam(1e-2))


def trained(model, state, count):
    func = mpx.autocast(cases.loss, jnp.bfloat16, recipe=cases.FP8, rules=cases.EVERY)

    @jax.jit
    def step(scaling, model, state, i):
        result = mpx.filter_value_and_grad(func, scaling)(model, X + i / 100)
        return mpx.optimizer_step(model, TX, state, result)[:2]

    for i in range(count):
        model, state = step(NONE, model, state, jnp.float32(i))
    return model, state


STEPS = slow_but([3], [3, 100])


@pytest.mark.third_party
@pytest.mark.parametrize("steps", STEPS)
def test_stored_weights_train_on_as_without_files(steps: int, tmp_path):
    model = quantize_weights(MLP)
    model, state = trained(model, TX.init(model, MLP), 3)
    mpx.export(low(mlp), NONE, tmp_path / "model")(model, X)
    found = mpx.import_weights(tmp_path / "model", model)
    assert_same_bits(dequantize_weights(found), dequantize_weights(model))
    assert_same_bits(jax.tree.leaves(found), jax.tree.leaves(model))
    assert same_bits(trained(found, state, steps), trained(model, state, steps))


@pytest.mark.third_party
@pytest.mark.parametrize("steps", STEPS)
def test_a_bfloat16_model_trains_on_from_its_masters(steps: int, tmp_path):
    """The files have fewer bits than the model; the optimizer's state has them all."""
    model = jax.tree.map(lambda x: x.astype(jnp.bfloat16), MLP)
    model, state = trained(model, TX.init(model, MLP), 3)
    mpx.export(low(mlp), NONE, tmp_path / "model")(model, X)
    found = dequantize_weights(mpx.import_weights(tmp_path / "model", model))
    assert not same_bits(found, model)
    again = mpx.full_weights(found, state)
    again = jax.tree.map(lambda x, like: x.astype(like.dtype), again, model)
    assert same_bits(trained(again, state, steps), trained(model, state, steps))
    # Without the masters they restart from the files: the nearest numbers in FP8.
    restarted, _ = trained(found, state, 1)
    assert not same_bits(restarted, trained(model, state, 1)[0])


def test_values_come_back_as_they_are_in_the_files(tmp_path):
    """In every layout; `like` gives dtypes, and may be of types alone."""
    model = {**LAYERS, "scale": jnp.float32(1.5), "steps": jnp.arange(3), "n": 3}
    model |= {"key": jax.random.key(0), "unread": normal(3, 5)}
    for name in ("mxfp8", "nvfp4", "int8", "blocks", "rows", "current"):
        folder = tmp_path / name
        mpx.export(low(layers, RECIPES[name]), NONE, folder)(model, X)
        like = eqx.filter_eval_shape(lambda x: x, model)
        like["key"] = model["key"]
        found = mpx.import_weights(folder, like)
        numbers, whole = reader.dequantized(folder), dequantize_weights(found)
        assert_same_bits(whole["head"], jnp.asarray(numbers["head"].T))
        rows = np.stack([numbers[f"layers.{i}"].T for i in range(3)])
        assert_same_bits(whole["layers"], jnp.asarray(rows))
        for key in ("scale", "steps", "n", "key", "unread"):
            assert same_bits(found[key], model[key])
        assert isinstance(found["head"], StoredWeight) == (name == "current")


def test_imported_weights_are_multiplied_as_they_were_exported(tmp_path):
    func = low(mlp)
    expected = mpx.inference(func, NONE)(MLP, X)
    mpx.export(func, NONE, tmp_path / "one")(MLP, X)
    found = mpx.import_weights(tmp_path / "one", MLP)
    assert_same_bits(mpx.inference(func, NONE)(found, X), expected)
    mpx.export(func, NONE, tmp_path / "two")(found, X)
    one, two = (reader.tensors(tmp_path / name) for name in ("one", "two"))
    assert_same_bits(two, one)


def test_a_large_model_is_written_one_weight_after_the_other(tmp_path):
    """In a process of its own: 12 tensors of 38 MB take at most two of them.

    XLA of JAX 0.12 also copies the layer that it slices.
    """
    command = [sys.executable, "-m", "tests.tools.export.large", str(tmp_path)]
    run = functools.partial(subprocess.run, check=True, stdout=-1, text=True)
    output = run(command, env={**os.environ, "XLA_FLAGS": ""}).stdout
    tensors = 2 if jax.__version_info__ < (0, 11) else 4
    assert int(output.split()[-1]) < tensors * 38 + 45  # with what compiling takes
    found = reader.tensors(tmp_path / "large")  # and its index
    assert len(found) == 2 * 11 + 1  # the last one is in half precision
    assert len(list((tmp_path / "large").glob("*.safetensors"))) > 2


def test_sharded_weights_give_the_same_files_and_come_back_sharded(tmp_path):
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
    specs = {"layers": P(None, None, "d"), "head": P("d", None)}
    sharded = {
        key: jax.device_put(x, NamedSharding(mesh, specs[key]))
        for key, x in LAYERS.items()
    }
    func = low(layers, RECIPES["rows"])
    for name, model in (("whole", LAYERS), ("sharded", sharded)):
        mpx.export(func, NONE, tmp_path / name, shard_bytes=5_000)(model, X)
    one, two = (reader.tensors(tmp_path / name) for name in ("whole", "sharded"))
    assert_same_bits(one, two)
    found = mpx.import_weights(tmp_path / "sharded", sharded)
    for key, x in sharded.items():
        assert found[key].sharding == x.sharding


# --- Files that are not those of this model -------------------------------------------


@pytest.fixture
def folder(tmp_path):
    mpx.export(low(mlp), NONE, tmp_path / "model", shard_bytes=5_000)(MLP, X)
    return tmp_path / "model"


def changed(folder, change):
    manifest = json.loads((folder / "mpx.json").read_text())
    change(manifest)
    (folder / "mpx.json").write_text(json.dumps(manifest))


def first(folder):
    return min(folder.glob("*.safetensors"))


def renamed(folder):
    text = first(folder).read_bytes()
    first(folder).write_bytes(text.replace(b'"down.', b'"dawn.'))


DAMAGES = {
    "needs a folder that `mpx.export` wrote": lambda f: (f / "mpx.json").unlink(),
    "version 7 is unknown": lambda f: changed(f, lambda m: m.update(version=7)),
    "00001.* is damaged": lambda f: first(f).write_bytes(first(f).read_bytes()[:-10]),
    r"down\.weight.* is in no file": lambda f: first(f).unlink(),
    r"down\.weight.* in no file": renamed,
}


@pytest.mark.parametrize("match", DAMAGES)
def test_damaged_files_are_refused(match: str, folder):
    DAMAGES[match](folder)
    with pytest.raises(ValueError, match=match):
        mpx.import_weights(folder, MLP)


OTHERS = {
    r"`\['up'\]` is float32\[64,95\], and \(64, 96\) in the files": normal(64, 95),
    r"`\['up'\]` is float32\[96,64\], and \(64, 96\) in the files": normal(96, 64),
    r"`\['up'\]\['bias'\]` is float32\[3\], and absent": {"bias": normal(3)},
    r"it has no `\['up'\]`": None,
}


@pytest.mark.parametrize("match", OTHERS)
def test_another_model_is_refused(match: str, folder):
    with pytest.raises(ValueError, match=match):
        mpx.import_weights(folder, {**MLP, "up": OTHERS[match]})


def test_layers_along_another_axis_come_back(tmp_path):
    def func(model, x):
        pairs = model["layers"], model["scale"].T  # [64, 3]
        x, _ = jax.lax.scan(
            lambda x, w: (jnp.tanh(x @ w[0]) * w[1][None], None), x, pairs
        )
        return x

    model = {"layers": LAYERS["layers"], "scale": normal(64, 3)}
    mpx.export(low(func), NONE, tmp_path / "model")(model, X)
    found = mpx.import_weights(tmp_path / "model", model)
    np.testing.assert_array_equal(found["scale"], model["scale"])
