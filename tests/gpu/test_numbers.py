"""What a GPU computes: codes, products on its units, gradients in half precision.

The CPU of the same process is the other side of every comparison.
"""

import zlib

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import mpx
from tests.registries import QUANTIZERS, RECIPES

pytestmark = [pytest.mark.gpu, pytest.mark.third_party]  # ranks are promoted


def on_both(func, *operands):
    """The results of a jitted function, here and on the CPU, as NumPy arrays."""
    found = []
    for device in (jax.devices()[0], jax.devices("cpu")[0]):
        with jax.default_device(device):  # a recipe asks which units it has
            result = jax.jit(func)(*jax.device_put(operands, device))
        found.append([np.asarray(leaf) for leaf in jax.tree.leaves(result)])
    return found


def normal(shape, *, seed=0, dtype=np.float32, spread=0.0):
    """Random numbers; with a spread, over that many powers of two."""
    random = np.random.default_rng(seed)
    numbers = random.standard_normal(shape)
    return (numbers * 2.0 ** (spread * random.uniform(-1, 1, shape))).astype(dtype)


@pytest.mark.parametrize("half", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2"])
def test_casts_to_a_format_are_those_of_a_cpu(name, half):
    """Of every number of 16 bits, or of 65,536 of 32."""
    codes = np.arange(2**16, dtype=np.uint32)
    if half == "float32":
        numbers = ((codes << 16) | (codes * 40503 & 0xFFFF)).view(np.float32)
    else:
        numbers = codes.astype(np.uint16).view(np.dtype(getattr(ml_dtypes, half, half)))
    numbers = numbers[~np.isnan(numbers.astype(np.float32))]

    def cast(x):
        return x.astype(name).astype(jnp.float32)

    here, there = on_both(cast, numbers)
    np.testing.assert_array_equal(here[0], there[0])


@pytest.mark.parametrize("name", QUANTIZERS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_quantizer_gives_the_codes_and_scales_of_a_cpu(name, dtype):
    x = normal((128, 256), seed=zlib.crc32(name.encode()), spread=12.0)
    x[0], x[1, :8], x[2] = 0.0, 1e-30, -0.0

    def quantized(x):
        return mpx.quantization.quantize(x.astype(dtype), QUANTIZERS[name])

    for here, there in zip(*on_both(quantized, x), strict=True):
        assert here.tobytes() == there.tobytes()


def layers(recipe):
    """Loss and gradients of two layers under a recipe, with a scaling to run them."""

    def plain(weights, x):
        y = jax.nn.gelu(x @ weights["in"] + weights["bias"])
        return jnp.sum((y @ weights["out"]).astype(jnp.float32) ** 2) / x.shape[0]

    rule = mpx.Rule(mpx.Precision.LOW, primitive="dot_general")
    loss = mpx.autocast(plain, jnp.bfloat16, recipe=recipe, rules=mpx.Rules(rule))
    weights = {
        "in": normal((64, 128), seed=1) / 8,
        "bias": normal((128,), seed=2) / 8,
        "out": normal((128, 64), seed=3) / 11,
    }
    x = normal((32, 64), seed=4)

    def step(weights, scaling, x):
        result = mpx.filter_value_and_grad(loss, scaling)(weights, x)
        return result.value, result.grads, result.scaling

    return step, weights, mpx.init_scaling(loss, weights, x), x


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_gives_the_gradients_of_a_cpu(name):
    """Which has the products of the same operands, with sums in float32."""
    step, weights, scaling, x = layers(RECIPES[name])

    def two(weights, scaling, x):
        _, _, scaling = step(weights, scaling, x)
        value, grads, _ = step(weights, scaling, x)
        return value, grads

    for here, there in zip(*on_both(two, weights, scaling, x), strict=True):
        assert np.all(np.isfinite(here))
        error = np.linalg.norm(here - there) / np.linalg.norm(there)
        # NVFP4's stochastic rounding turns a last digit into another code.
        assert error < (0.1 if name == "nvfp4" else 0.02)


@pytest.mark.parametrize(
    ("name", "needed", "call"),
    [
        ("delayed", 8.9, "__cublas$lt$matmul$f8"),
        ("current", 8.9, "__cublas$lt$matmul$f8"),
        ("mxfp8", 10.0, "__cudnn$blockScaledDot"),
        ("nvfp4", 10.0, "__cudnn$blockScaledDot"),
    ],
)
def test_a_recipe_runs_on_the_units_where_there_are_some(name, needed, call):
    capability = float(getattr(jax.devices()[0], "compute_capability", 0))
    claim = "required_calls" if capability >= needed else "forbidden_calls"
    step, weights, scaling, x = layers(RECIPES[name])
    mpx.expect(jax.jit(step), weights, scaling, x, **{claim: call})


@pytest.mark.parametrize("activation", ["gelu", "silu", "relu"])
@pytest.mark.parametrize("name", ["delayed", "current"])
def test_layers_without_a_bias_run(name, activation):
    def plain(weights, x):
        y = getattr(jax.nn, activation)(x @ weights[0]) @ weights[1]
        return jnp.sum(y.astype(jnp.float32) ** 2)

    rule = mpx.Rule(mpx.Precision.LOW, primitive="dot_general")
    loss = mpx.autocast(
        plain, jnp.bfloat16, recipe=RECIPES[name], rules=mpx.Rules(rule)
    )
    weights = (normal((64, 128)) / 8, normal((128, 64), seed=1) / 11)
    x = normal((32, 64), seed=2)
    scaling = mpx.init_scaling(loss, weights, x)

    @jax.jit
    def gradients(weights, scaling, x):
        return mpx.filter_value_and_grad(loss, scaling)(weights, x).grads

    grads = gradients(weights, scaling, x)
    assert all(map(jnp.any, grads)) and mpx.all_finite(grads)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_autocast_is_as_exact_as_a_naive_cast(dtype):
    """Norm, softmax and two layers, against float32 in the highest precision."""

    def plain(weights, x):
        mean = jnp.mean(x, -1, keepdims=True)
        x = (x - mean) / jnp.sqrt(jnp.var(x, -1, keepdims=True) + 1e-6)
        x = jax.nn.softmax(x @ weights[0], -1) @ weights[1]
        return jnp.mean(x.astype(jnp.float32) ** 2)

    weights = (normal((256, 512)) / 4, normal((512, 256), seed=1))
    x = normal((128, 256), seed=2) + 3

    def naive(weights, x):
        cast = [w.astype(dtype) for w in weights]
        return 1024.0 * plain(cast, x.astype(dtype))

    with jax.default_matmul_precision("highest"):
        exact = jax.jit(jax.grad(plain))(weights, x)
    errors = {}
    scaled = mpx.autocast(lambda w, x: 1024.0 * plain(w, x), dtype)
    for name, func in (("autocast", scaled), ("naive", naive)):
        found = jax.jit(jax.grad(func))(weights, x)
        errors[name] = max(
            float(jnp.linalg.norm(a / 1024.0 - b) / jnp.linalg.norm(b))
            for a, b in zip(found, exact, strict=True)
        )
    assert errors["autocast"] <= 1.1 * errors["naive"] < 0.2


def test_stochastic_rounding_draws_the_same_codes_as_on_a_cpu():
    quantizer = mpx.quantization.NVFP4Quantizer(stochastic_rounding=True)
    x = normal((64, 128), spread=6.0)

    def quantized(x, key):
        found = mpx.quantization.quantize(
            x, quantizer, key=jax.random.wrap_key_data(key)
        )
        return found.dequantize()

    keys = [jax.random.key_data(jax.random.key(seed)) for seed in (0, 1)]
    sides = [on_both(quantized, x, np.asarray(key)) for key in keys]
    for (here,), (there,) in sides:
        np.testing.assert_array_equal(here, there)
    assert np.any(sides[0][0][0] != sides[1][0][0])
