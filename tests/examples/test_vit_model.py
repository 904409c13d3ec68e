"""The ViT itself: shapes, dtypes, patches."""

import ast
import inspect

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpx
from benchmarks.models import problems
from examples import vit
from examples.vit import ModelConfig
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
    tolerance = 0 if dtype == jnp.float32 else 16 * float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(
        np.asarray(logits, np.float32), expected, atol=tolerance * 4
    )


def test_critical_operations_run_in_full_precision(model):
    half = mpx.cast_to_float16(model)
    jaxpr = jax.make_jaxpr(half)(images(dtype=jnp.float16))

    def dtypes(name):
        found = [e for e, _ in equations(jaxpr) if e.primitive.name == name]
        return [e.outvars[0].aval.dtype.name for e in found]

    assert dtypes("exp") == ["float32"] * CONFIG.blocks
    assert dtypes("rsqrt") == ["float32"] * (2 * CONFIG.blocks + 1)
    assert set(dtypes("dot_general")) == {"float16"}


def test_patches_are_squares_row_by_row(model):
    image = jnp.arange(8 * 4 * 3, dtype=jnp.float32).reshape(8, 4, 3)
    patches = model.patches(image)
    assert patches.shape == (8, 12)
    np.testing.assert_array_equal(patches[3], image[2:4, 2:4].reshape(-1))


@pytest.mark.slow
def test_a_key_turns_dropout_on(model):
    predict = eqx.filter_jit(lambda model, *args: model(*args))
    plain = predict(model, images())
    one, two = (predict(model, images(), jax.random.key(seed)) for seed in (1, 2))
    assert not np.allclose(plain, one) and not np.allclose(one, two)
    np.testing.assert_array_equal(plain, predict(model, images()))


@pytest.mark.slow
def test_every_weight_has_a_gradient(model):
    def loss(model):
        logits = jax.vmap(model)(images(3))
        return cross_entropy(logits, jnp.array([1, 2, 3]))

    grads = eqx.filter_jit(eqx.filter_grad(loss))(model)
    for path, leaf in jax.tree_util.tree_leaves_with_path(grads):
        # Adding a constant to all keys changes no softmax: that gradient is zero.
        if ".dense_ks.bias" not in jax.tree_util.keystr(path):
            assert float(jnp.abs(leaf).max()) > 0, path


def test_cross_entropy_is_full_precision():
    logits = jnp.array([[60000.0, -60000.0], [0.0, 0.0]], jnp.float16)
    value = cross_entropy(logits, jnp.array([1, 0]))
    assert value.dtype == jnp.float32
    np.testing.assert_allclose(value, (2 * 59968 + np.log(2)) / 2, rtol=1e-3)


def test_patch_must_divide_the_image():
    with pytest.raises(ValueError, match="patch 2 and an image of 8x5"):
        VisionTransformer(CONFIG, (8, 5, 1), 10, jax.random.key(0))


def test_the_models_are_one_model():
    """By autocast and by hand."""
    shape, key = (8, 4, 3), jax.random.key(0)
    plain, by_hand = (
        model(CONFIG, shape, 10, key)
        for model in (vit.VisionTransformer, VisionTransformer)
    )
    trees = [eqx.filter(model, eqx.is_array) for model in (plain, by_hand)]
    for (path, a), (other_path, b) in zip(
        *map(jax.tree_util.tree_leaves_with_path, trees), strict=True
    ):
        assert path == other_path
        np.testing.assert_array_equal(a, b)
    predict = eqx.filter_jit(lambda model, *args: model(*args))
    for args in ((images(), None), (images(), jax.random.key(2))):
        found, expected = predict(plain, *args), predict(by_hand, *args)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_the_benchmarks_measure_the_sizes_of_the_examples():
    for name, preset in (("desktop", "cifar100"), ("base", "imagenet")):
        model = vit.PRESETS[preset].model
        found = problems.PROBLEMS[name]
        for size in ("patch", "width", "hidden", "heads"):
            assert getattr(found, size) == getattr(model, size)


def test_the_plain_model_has_no_trace_of_mpx():
    for model in (vit.AttentionBlock, vit.MLPBlock, vit.VisionTransformer):
        tree = ast.parse(inspect.getsource(model))
        names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        assert "jax" in names and "mpx" not in names


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
