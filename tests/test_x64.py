"""With `jax_enable_x64`: what is float32 computes in no float64, and float64 trains.

JAX's defaults are 64 bits wide then: an array that mpx makes without a dtype, such as
`jnp.eye(16)`, would carry all that it meets into float64.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpx
from mpx._program.equations import equations
from tests.helpers import slow_but
from tests.registries import PRECISIONS

pytestmark = pytest.mark.third_party  # Optax's Adam


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


def block(params, x):
    h = mpx.nn.rms_norm(x, params["scale"])
    heads = (*x.shape[:-1], 2, 8)
    q, k, v = ((h @ params[name]).reshape(heads) for name in "qkv")
    lengths = jnp.full(x.shape[0], x.shape[1], jnp.int32)
    h = mpx.nn.dot_product_attention(
        q,
        k,
        v,
        is_causal=True,
        query_seq_lengths=lengths,
        key_value_seq_lengths=lengths,
    )
    x = x + h.reshape(x.shape)
    return x + jax.nn.gelu(x @ params["up"]) @ params["down"]


def loss(params, x, labels):
    x, _ = jax.lax.scan(lambda x, layer: (block(layer, x), None), x, params["layers"])
    return jnp.mean(mpx.nn.cross_entropy(x @ params["head"], labels))


def problem(dtype):
    shapes = dict.fromkeys("qkv", (2, 16, 16))
    shapes |= {"scale": (2, 16), "up": (2, 16, 32), "down": (2, 32, 16)}
    rng = np.random.default_rng(0)
    draw = lambda shape: jnp.asarray(rng.normal(size=shape) / 4, dtype)  # noqa: E731
    params = {"layers": {name: draw(shape) for name, shape in shapes.items()}}
    params["head"] = draw((16, 8))
    return params, draw((2, 16, 16)), jnp.zeros((2, 16), jnp.int64)


def training_step(half):
    optimizer = optax.adam(1e-2)

    def step(params, scaling, x, labels):
        result = mpx.value_and_grad(half, scaling)(params, x, labels)
        state = optimizer.init(params)
        return mpx.optimizer_step(params, optimizer, state, result), result.value

    return step


def arrays_of_float64(f, *args):
    """Where they are made; Optax has scalars of its own."""
    return {
        (equation.primitive.name, variable.aval.shape)
        for equation in equations(jax.make_jaxpr(f)(*args))
        for variable in equation.outvars
        if variable.aval.dtype == jnp.float64 and variable.aval.shape
    }


ALL = [*PRECISIONS, "nvfp4, B200"]


@pytest.mark.parametrize("precision", slow_but(["delayed", "nvfp4"], ALL))
def test_a_float32_step_makes_no_array_of_float64(precision):
    name, *target = precision.split(", ")
    options = {**PRECISIONS[name], "target": target[0] if target else None}
    args = problem(jnp.float32)
    half = mpx.autocast(loss, **options)
    scaling = mpx.init_scaling(half, *args)
    found = arrays_of_float64(training_step(half), args[0], scaling, *args[1:])
    assert found == set()


@pytest.mark.slow
def test_a_float64_model_trains_in_float64():
    """Autocast leaves float64 as it is; the loss and the weights keep their digits."""
    args = problem(jnp.float64)
    half = mpx.autocast(loss, "float16")
    scaling = mpx.init_scaling(half, *args)
    step = jax.jit(training_step(half))
    (params, _, scaling), value = step(args[0], scaling, *args[1:])
    plain, gradients = jax.jit(jax.value_and_grad(loss))(*args)
    assert value.dtype == jnp.float64
    assert abs(value - plain) < 1e-12
    assert {x.dtype for x in jax.tree.leaves(params)} == {np.dtype("float64")}
    assert int(scaling.skipped) == 0
    again = jax.jit(lambda s, *args: mpx.value_and_grad(half, s)(*args))(scaling, *args)
    pairs = zip(*map(jax.tree.leaves, (again.grads, gradients)), strict=True)
    for ours, theirs in pairs:
        np.testing.assert_allclose(ours, theirs, rtol=1e-10)


def test_a_recipe_without_a_product_that_it_may_quantize_says_so():
    args = problem(jnp.float64)
    quantized = mpx.autocast(loss, recipe=mpx.MXFP8BlockScaling())
    with pytest.raises(ValueError, match="6 of 6: no float16, bfloat16 or float32"):
        quantized(*args)


@pytest.mark.slow
def test_attention_compares_positions_with_lengths_of_32_bits():
    """Under strict promotion int64 positions and int32 lengths cannot meet."""
    x, lengths = jnp.ones((2, 8, 2, 4), jnp.float32), jnp.array([3, 8], jnp.int32)
    attend = functools.partial(mpx.nn.dot_product_attention, is_causal=True)
    with jax.numpy_dtype_promotion("strict"):
        of = {"query_seq_lengths": lengths, "key_value_seq_lengths": lengths}
        found = attend(x, x, x, **of)
    assert found.dtype == jnp.float32
    assert jnp.all(found[0, :3] == 1) and jnp.all(found[0, 3:] == 0)
