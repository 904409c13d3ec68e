"""Training as users run it: every precision, twenty steps, compiled with full effort.

All other tests have XLA:CPU make less effort (`conftest.py`), to save time. Here it
fuses, and merges, and leaves out what it can, as it does for users.
"""

import functools
import os

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from sklearn.datasets import load_digits

import mpx

from .helpers import slow_but
from .registries import PRECISIONS

pytestmark = pytest.mark.third_party  # Optax's Adam

BATCH, STEPS, WIDTH = 128, 20, 64
# What XLA does by default, where `conftest.py` has it do less.
AS_USERS = {
    "xla_backend_optimization_level": 3,
    "xla_llvm_disable_expensive_passes": False,
}
if "--xla_cpu_use_fusion_emitters=false" in os.environ["XLA_FLAGS"]:
    AS_USERS["xla_cpu_use_fusion_emitters"] = True


@functools.cache
def data():
    """The first batches of the digits: [steps, batch, 64] and [steps, batch]."""
    digits = load_digits()
    chosen = np.random.default_rng(0).permutation(len(digits.data))
    chosen = np.resize(chosen, STEPS * BATCH).reshape(STEPS, BATCH)
    images = (digits.data / 8 - 1).astype(np.float32)
    return jnp.asarray(images[chosen]), jnp.asarray(digits.target[chosen], jnp.int32)


def parameters():
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = {"first": (64, WIDTH), "second": (WIDTH, WIDTH), "last": (WIDTH, 10)}
    return {
        name: jax.random.normal(key, shape) / shape[0] ** 0.5
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def loss(params, images, labels):
    hidden = jax.nn.gelu(images @ params["first"])
    mean = jnp.mean(hidden, -1, keepdims=True)
    hidden = (hidden - mean) / jnp.sqrt(jnp.var(hidden, -1, keepdims=True) + 1e-6)
    hidden = hidden + jax.nn.relu(hidden @ params["second"])
    logits = hidden @ params["last"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def losses(loss):
    optimizer = optax.adam(3e-3)

    def step(state, batch):
        params, optimizer_state, scaling = state
        result = mpx.filter_value_and_grad(loss, scaling)(params, *batch)
        state = mpx.optimizer_step(params, optimizer, optimizer_state, result)
        return state, result.value

    params = parameters()
    images, labels = data()
    scaling = mpx.init_scaling(loss, params, images[0], labels[0])
    state = params, optimizer.init(params), scaling

    def run(state, batches):
        return jax.lax.scan(step, state, batches)

    lowered = jax.jit(run).lower(state, (images, labels))
    state, values = lowered.compile(compiler_options=AS_USERS)(state, (images, labels))
    mpx.check(state[2])
    return np.asarray(values)


@functools.cache
def in_float32():
    return losses(mpx.autocast(loss, enabled=False))


def test_float32_learns():
    values = in_float32()
    assert values[-1] < 0.35 * values[0]


# Delayed scaling is current scaling with a state, and MXFP8 has blocks, too.
@pytest.mark.parametrize("name", slow_but(["float16", "delayed"], PRECISIONS))
def test_every_precision_learns_as_float32_does(name):
    values = losses(mpx.autocast(loss, **PRECISIONS[name]))
    expected = in_float32()
    assert np.isfinite(values).all()
    # Formats of 4 bits learn more slowly; the others stay within a tenth.
    bound = 0.3 if name in ("nvfp4", "custom") else 0.1
    np.testing.assert_allclose(values, expected, atol=bound * expected[0])
    assert values[-1] < 0.5 * values[0]
