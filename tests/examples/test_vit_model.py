"""The ViT: shapes, dtypes, patches; the command lines of its examples."""

import ast
import dataclasses
import inspect
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpx
from benchmarks.models import problems
from examples import gpt, vit, vit_explicit
from examples.runs import SetupError
from examples.vit import PRESETS, ModelConfig, parse_config
from examples.vit_explicit import VisionTransformer, cross_entropy
from tests.autocast.counting import equations
from tests.helpers import slow_but

CONFIG = ModelConfig(patch=2, width=16, hidden=24, blocks=2, heads=4, dropout=0.5)


@pytest.fixture(scope="module")
def model():
    return VisionTransformer(CONFIG, (8, 4, 3), 10, jax.random.key(0))


def images(count=None, dtype=jnp.float32):
    shape = (8, 4, 3) if count is None else (count, 8, 4, 3)
    return jax.random.normal(jax.random.key(1), shape, jnp.float32).astype(dtype)


@pytest.mark.parametrize("dtype", slow_but([jnp.bfloat16], [jnp.float32, jnp.bfloat16]))
def test_one_model_code_for_every_precision(model, dtype):
    predict = eqx.filter_jit(lambda model, images: jax.vmap(model)(images))
    expected = predict(model, images(5))
    logits = predict(mpx.cast_tree(model, dtype), images(5, dtype))
    assert logits.dtype == dtype and logits.shape == (5, 10)
    atol = 0 if dtype == jnp.float32 else 64 * float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(np.asarray(logits, np.float32), expected, atol=atol)


def test_critical_operations_run_in_full_precision(model):
    half = mpx.cast_to_float16(model)
    jaxpr = jax.make_jaxpr(half)(images(dtype=jnp.float16))

    def dtypes(name):
        found = [e for e, _ in equations(jaxpr) if e.primitive.name == name]
        return [e.outvars[0].aval.dtype.name for e in found]

    assert dtypes("exp") == ["float32"] * CONFIG.blocks
    assert dtypes("rsqrt") == ["float32"] * (2 * CONFIG.blocks + 1)
    assert set(dtypes("dot_general")) == {"float16"}


def test_patches_are_squares_and_cross_entropy_is_full_precision(model):
    image = jnp.arange(8 * 4 * 3, dtype=jnp.float32).reshape(8, 4, 3)
    patches = model.patches(image)
    assert patches.shape == (8, 12)
    np.testing.assert_array_equal(patches[3], image[2:4, 2:4].reshape(-1))
    with pytest.raises(ValueError, match="patch 2 and an image of 8x5"):
        VisionTransformer(CONFIG, (8, 5, 1), 10, jax.random.key(0))
    logits = jnp.array([[60000.0, -60000.0], [0.0, 0.0]], jnp.float16)
    value = cross_entropy(logits, jnp.array([1, 0]))
    assert value.dtype == jnp.float32
    np.testing.assert_allclose(value, (2 * 59968 + np.log(2)) / 2, rtol=1e-3)


@pytest.mark.slow
def test_a_key_turns_dropout_on_and_every_weight_has_a_gradient(model):
    predict = eqx.filter_jit(lambda model, *args: model(*args))
    plain = predict(model, images())
    one, two = (predict(model, images(), jax.random.key(seed)) for seed in (1, 2))
    assert not np.allclose(plain, one) and not np.allclose(one, two)
    np.testing.assert_array_equal(plain, predict(model, images()))

    def loss(model):
        logits = jax.vmap(model)(images(3))
        return cross_entropy(logits, jnp.array([1, 2, 3]))

    grads = eqx.filter_jit(eqx.filter_grad(loss))(model)
    for path, leaf in jax.tree_util.tree_leaves_with_path(grads):
        # Adding a constant to all keys changes no softmax: that gradient is zero.
        if ".dense_ks.bias" not in jax.tree_util.keystr(path):
            assert float(jnp.abs(leaf).max()) > 0, path


def test_the_models_are_one_model(model):
    """By autocast and by hand."""
    plain = vit.VisionTransformer(CONFIG, (8, 4, 3), 10, jax.random.key(0))
    trees = [eqx.filter(one, eqx.is_array) for one in (plain, model)]
    leaves = map(jax.tree_util.tree_leaves_with_path, trees)
    for (path, a), (other_path, b) in zip(*leaves, strict=True):
        assert path == other_path
        np.testing.assert_array_equal(a, b)
    predict = eqx.filter_jit(lambda model, *args: model(*args))
    for args in ((images(), None), (images(), jax.random.key(2))):
        found, expected = predict(plain, *args), predict(model, *args)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_the_benchmarks_measure_the_sizes_of_the_examples():
    for name, preset in (("desktop", "cifar100"), ("base", "imagenet")):
        model = vit.PRESETS[preset].model
        found = problems.PROBLEMS[name]
        for size in ("patch", "width", "hidden", "heads"):
            assert getattr(found, size) == getattr(model, size)


@pytest.mark.parametrize(
    ("model", "framework"),
    [
        (vit.AttentionBlock, "jax"),
        (vit.MLPBlock, "jax"),
        (vit.VisionTransformer, "jax"),
        (gpt.Block, "nnx"),
        (gpt.GPT, "nnx"),
    ],
)
def test_the_plain_models_have_no_trace_of_mpx(model, framework):
    tree = ast.parse(inspect.getsource(model))
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    assert framework in names and "mpx" not in names


@pytest.mark.third_party
def test_autocast_puts_the_products_of_the_plain_model_in_half_precision():
    plain = vit.VisionTransformer(CONFIG, (8, 4, 3), 10, jax.random.key(0))
    arrays, static = eqx.partition(plain, eqx.is_array)

    def predict(arrays, images):
        return jax.vmap(eqx.combine(arrays, static))(images)

    cast = mpx.autocast(predict, "float16")
    lines = str(jax.make_jaxpr(cast)(arrays, images(3))).splitlines()
    casts = [line for line in lines if ":f16[" in line]
    exponentials = [line for line in lines if "= exp " in line]
    assert len(casts) > 8 * CONFIG.blocks and len(exponentials) == CONFIG.blocks
    assert all(":f32[" in line for line in exponentials)
    expected = jax.jit(predict)(arrays, images(3))
    np.testing.assert_allclose(jax.jit(cast)(arrays, images(3)), expected, atol=0.05)


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_are_valid_and_fields_override(preset):
    assert parse_config(["--preset", preset]) == PRESETS[preset]
    config = parse_config(
        f"--precision bfloat16 --preset={preset} --steps 7 --batch-size 32 "
        "--accumulate 4 --clip 0.5 --seed 3 --data-path there --run-dir here "
        "--learning-rate 0.01 --resume --model.width 96 --scaling.period 5".split()
    )
    start, replace = PRESETS[preset], dataclasses.replace
    there, here = Path("there"), Path("here")
    changes = {"steps": 7, "batch_size": 32, "accumulate": 4, "clip": 0.5, "seed": 3}
    changes |= {"precision": "bfloat16", "data_path": there, "run_dir": here}
    changes |= {"learning_rate": 0.01, "resume": True}
    changes |= {"model": replace(start.model, width=96)}
    changes |= {"scaling": replace(start.scaling, period=5)}
    assert config == replace(start, **changes)


def test_default_is_digits_in_all_precisions():
    config = parse_config([])
    assert config.preset == "digits"
    assert config.precisions == ("float32", "float16", "bfloat16")
    assert config.folder == Path("runs/digits")
    explicit = vit_explicit.parse_config([])
    assert explicit == dataclasses.replace(config, style="explicit")
    assert explicit.folder == Path("runs/digits-explicit")
    # The paper's sizes.
    desktop, base = PRESETS["cifar100"].model, PRESETS["imagenet"].model
    sizes = ("patch", "width", "hidden", "blocks", "heads")
    assert [getattr(desktop, s) for s in sizes] == [4, 256, 800, 12, 4]
    assert [getattr(base, s) for s in sizes] == [16, 768, 3072, 12, 12]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--steps 0", r"`--steps` must be at least 1; got 0"),
        ("--batch-size 0", r"`--batch-size` must be at least 1"),
        ("--accumulate 3", r"`--accumulate` must divide --batch-size 64; got 3"),
        ("--clip 0", r"`--clip` must be positive; got 0"),
        ("--learning-rate -1", r"`--learning-rate` must be positive"),
        ("--fold 5", r"`--fold` must be 0, 1, 2, 3 or 4; got 5"),
        ("--model.heads 5", r"`--model.heads` must divide --model.width 64; got 5"),
        ("--scaling.period 0", r"`--scaling\.\*`: `period` of .* got 0"),
        ("--model.dropout 1", r"`--model.dropout` must lie in \[0, 1\); got 1"),
    ],
)
def test_wrong_options_are_named(arguments, message):
    with pytest.raises(SetupError, match=message):
        parse_config(arguments.split())


@pytest.mark.parametrize(
    "text", ["--preset mnist", "--precision int8", "--style magic"]
)
def test_unknown_choices_exit(text, capsys):
    with pytest.raises(SystemExit):
        parse_config(text.split())
    assert text.split()[1] in capsys.readouterr().err


def test_each_script_has_one_style():
    match = r"`--style` must be autocast here, see examples\.vit_explicit; got"
    with pytest.raises(SetupError, match=match):
        parse_config(["--style", "explicit"])
    match = r"`--style` must be explicit here, see examples\.vit; got"
    with pytest.raises(SetupError, match=match):
        vit_explicit.parse_config(["--style", "autocast"])
    match = r"`--recipe` is for examples\.vit, which casts by autocast; got"
    with pytest.raises(SetupError, match=match):
        vit_explicit.parse_config(["--recipe", "mxfp8"])
