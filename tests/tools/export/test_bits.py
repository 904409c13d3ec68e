"""Exported weights: the operands of the products, in every container and layout."""

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import mpx
from mpx.quantization import Role, quantize
from tests.helpers import slow_but
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


@pytest.mark.parametrize("name", RECIPES)
def test_a_reader_of_the_formats_finds_the_numbers_of_mpx(name: str, tmp_path):
    """In layers of a scan, too, of which each has a scale of its own if delayed."""
    recipe, folder = RECIPES[name], tmp_path / "model"
    scaling = cases.scaling_of(layers, recipe, LAYERS)
    found = mpx.export(low(layers, recipe), scaling, folder)(LAYERS, X)
    weights = {f"layers.{i}": w.T for i, w in enumerate(LAYERS["layers"])}
    weights["head"] = LAYERS["head"].T
    assert {one["name"] for one in found.tensors} == weights.keys()
    quantizer = recipe.quantizer(Role.WEIGHT)
    if quantizer is None:
        for key, x in reader.tensors(folder).items():
            np.testing.assert_array_equal(x, np.asarray(weights[key], x.dtype))
        return
    numbers = reader.dequantized(folder)
    arrays, slots = reader.tensors(folder), scales_of(scaling)
    for key, w in weights.items():
        scales = slots.get(key, (None, None))
        if quantizer.block == 128:
            w = jnp.pad(w, [(0, -size % 128) for size in w.shape])
        q = quantize(w, quantizer, scale=scales[1] and float(scales[1]))
        rows, columns = weights[key].shape
        np.testing.assert_array_equal(numbers[key], q.dequantize()[:rows, :columns])
        if scales[0] is not None:
            assert arrays[f"{key}.input_scale"] == np.float32(1) / scales[0]


def scales_of(scaling):
    """The scales of the input and the weight, by the name of the layer."""
    found = {}
    for slot, one in scaling.state_dict().get("slots", {}).items():
        head = np.asarray(one["scale"])
        if "head" in slot:
            found["head"] = head[:2]
        else:
            found |= {f"layers.{i}": x[:2] for i, x in enumerate(head)}
    return found


# --- Containers and layouts -----------------------------------------------------------


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(32)(nn.tanh(nn.Dense(64)(x)))


def attention(model, x):
    q, k, v = (jnp.einsum("sd,dhe->hse", x, model[name]) for name in "qkv")
    scores = jax.nn.softmax(q @ k.mT)
    return jnp.einsum("hse,hed->sd", jnp.einsum("hst,hte->hse", scores, v), model["o"])


def experts(model, x):
    hidden = jnp.tanh(jnp.einsum("ebd,edf->ebf", x, model["up"]))
    return jnp.einsum("ebf,efd->ebd", hidden, model["down"])


def ragged(model, x):
    return jax.lax.ragged_dot(x, model["w"], jnp.array([3, 5], jnp.int32))


def rematerialized(model, x):
    body = jax.checkpoint(lambda x, w: (jnp.tanh(x @ w["a"]) @ w["b"], None))
    return jax.lax.scan(body, x, model)[0]


def unrolled(model, x):
    for i in range(3):
        x = jnp.tanh(x @ model["layers"][i])
    return x @ model["head"]


def convolution(model, x):
    numbers = ("NHWC", "HWIO", "NHWC")
    x = jax.lax.conv_general_dilated(
        x, model, (1, 1), "SAME", dimension_numbers=numbers
    )
    return x


def _equinox():
    model = eqx.nn.MLP(64, 32, 64, 2, key=jax.random.key(0))
    return lambda model, x: jax.vmap(model)(x), model, X, 3


def _linen():
    return Net().apply, Net().init(jax.random.key(0), X), X, 2


def _nnx():
    graph, state = nnx.split(nnx.Linear(64, 32, rngs=nnx.Rngs(0)))
    return lambda state, x: nnx.merge(graph, state)(x), state, X, 1


def _heads():
    shapes = {"q": (64, 4, 32), "k": (64, 4, 32), "v": (64, 4, 32), "o": (4, 32, 64)}
    model = {k: normal(*s, seed=i) for i, (k, s) in enumerate(shapes.items())}
    return attention, model, X, 4


def _experts():
    model = {"up": normal(3, 64, 32), "down": normal(3, 32, 64, seed=1)}
    return experts, model, normal(3, 8, 64, seed=2), 6


def _blocks():
    model = {"a": normal(2, 64, 96), "b": normal(2, 96, 64, seed=1)}
    return rematerialized, model, X, 4


CASES = {
    "plain": lambda: (mlp, MLP, X, 2),
    "equinox": _equinox,
    "linen": _linen,
    "nnx": _nnx,
    "scan": lambda: (layers, LAYERS, X, 4),
    "remat": _blocks,
    "unrolled": lambda: (unrolled, LAYERS, X, 4),
    "heads": _heads,
    "experts": _experts,
    "ragged": lambda: (ragged, {"w": normal(2, 64, 32)}, X, 2),
    "convolution": lambda: (
        convolution,
        normal(3, 3, 32, 16),
        normal(1, 6, 6, 32),
        1,
    ),
    "ensemble": lambda: (jax.vmap(mlp), jax.tree.map(twice, MLP), twice(X), 4),
    "rows": lambda: (lambda w, x: jax.vmap(lambda x: x @ w)(x), MLP["up"], X, 1),
}


def twice(x):
    return jnp.stack([x, 2 * x[::-1]])


PAIRS = [(name, "current") for name in CASES]
PAIRS += [(name, "mxfp8") for name in CASES if name != "convolution"]
QUICK = [(name, "current") for name in ("plain", "scan", "heads", "ragged")]


@pytest.mark.third_party
@pytest.mark.parametrize("name, recipe", slow_but(QUICK, PAIRS))
def test_an_exported_weight_is_an_operand_of_inference(name, recipe, tmp_path):
    func, model, x, count = CASES[name]()
    func = mpx.autocast(func, jnp.bfloat16, recipe=RECIPES[recipe], rules=cases.EVERY)
    operands = cases.multiplied(func, NONE, model, x)
    found = mpx.export(func, NONE, tmp_path / "model")(model, x)
    quantized = [one for one in found.tensors if not one["why"]]
    arrays = reader.tensors(tmp_path / "model")
    assert len(quantized) == count
    for one in quantized:
        x = arrays[one["arrays"]["weight"]].astype(np.float32)
        scale = arrays[one["arrays"]["weight_scale"]]
        if scale.dtype == np.uint8:
            scale = np.repeat(np.exp2(scale.astype(np.float32) - 127), 32, axis=1)
            x = x * scale.reshape(x.shape)
        assert cases.is_operand(x, operands), one["name"]


# --- Logits ---------------------------------------------------------------------------


def layer(arrays, name, x, quantizer, multiply):
    """A layer of an engine that multiplies numbers, and the result by the scales."""
    q = quantize(x, quantizer)
    numbers, scale = jnp.asarray(q.payload, jnp.float32), q.inverse_scale
    weight = arrays[f"{name}.weight"].astype(np.float32)
    scales = scale * arrays[f"{name}.weight_scale"].reshape(1, -1)
    return (multiply(numbers, weight.T) * scales).astype(jnp.bfloat16)


def at_highest(x, w):
    return jax.lax.dot(x, w, precision=jax.lax.Precision.HIGHEST)


@pytest.mark.parametrize("name", ["current", "rows", "int8"])
def test_logits_of_the_file_are_those_of_inference(name: str, tmp_path):
    recipe, folder = RECIPES[name], tmp_path / "model"
    func = low(mlp, recipe)
    expected = jax.jit(mpx.inference(func, NONE))(MLP, X)
    mpx.export(func, NONE, folder)(MLP, X)
    arrays, quantizer = reader.tensors(folder), recipe.quantizer(Role.INPUT)
    for multiply in (at_highest, np.matmul):
        x = X.astype(jnp.bfloat16)
        hidden = jnp.tanh(layer(arrays, "up", x, quantizer, multiply))
        y = layer(arrays, "down", hidden, quantizer, multiply).astype(jnp.float32)
        if multiply is at_highest:
            np.testing.assert_array_equal(y, expected.astype(jnp.float32))
        else:
            limit = 2**-6 * np.abs(y).max()
            np.testing.assert_allclose(y, expected.astype(jnp.float32), 0, limit)
