"""Programs that are exported before the size of their batch is known."""

import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import mpx
from mpx._step import _attempt

from ..helpers import slow_but
from .counting import relative_error

OPTIONS = {
    "bfloat16": {},
    "float16, strict": {"dtype": "float16", "strict": True, "residuals": "fast"},
    "Float8CurrentScaling": {"recipe": mpx.Float8CurrentScaling()},
    "MXFP8BlockScaling": {"recipe": mpx.MXFP8BlockScaling()},
    "NVFP4BlockScaling": {"recipe": mpx.NVFP4BlockScaling()},
    "DelayedScaling": {"recipe": mpx.DelayedScaling()},
}
# The others quantize by tensors and by blocks, too.
QUICK = ("float16, strict", "DelayedScaling")
TOKENS, WIDTH = 8, 32


def weights():
    values = np.random.default_rng(0).standard_normal((3, WIDTH, WIDTH), np.float32)
    return dict(zip(("in", "up", "down"), values / 4, strict=True))


def loss(w, x):
    y = x @ w["in"]
    y = y * jax.lax.rsqrt(jnp.mean(y**2, -1, keepdims=True) + 1e-6)
    scores = jax.nn.softmax(jnp.einsum("bqd,bkd->bqk", y, y))
    y = y + jnp.einsum("bqk,bkd->bqd", scores, y)
    return jnp.mean((jax.nn.gelu(y @ w["up"]) @ w["down"]) ** 2)


@pytest.mark.parametrize("name", slow_but(QUICK, OPTIONS))
def test_the_batch_may_be_of_any_size(name):
    func = mpx.autocast(loss, **OPTIONS[name])
    w = weights()
    x = np.random.default_rng(1).standard_normal((5, TOKENS, WIDTH), np.float32)
    scaling = mpx.init_scaling(func, w, x)

    @jax.jit
    def gradient(scaling, w, x):
        return mpx.filter_grad(func, scaling)(w, x).grads

    (batch,) = export.symbolic_shape("batch")
    symbolic = jax.ShapeDtypeStruct((batch, TOKENS, WIDTH), jnp.float32)
    exported = export.export(gradient)(scaling, w, symbolic)
    got = exported.call(scaling, w, x)
    # Stochastic rounding draws other numbers for other shapes, and a symbol is one.
    tolerance = 0.3 if name == "NVFP4BlockScaling" else 2e-2
    assert relative_error(got, gradient(scaling, w, x)) < tolerance


def test_a_gradient_of_any_size_is_checked_on_a_gpu(monkeypatch):
    """As in a process of one device, where rows of large gradients are joined."""
    monkeypatch.setattr(_attempt, "has_one_device", lambda given: True)
    func = mpx.autocast(loss, target="H100")

    @jax.jit
    def gradient(w, x):
        return mpx.value_and_grad(func, mpx.NoLossScaling(), argnums=(0, 1))(w, x)

    (batch,) = export.symbolic_shape("batch")
    symbolic = jax.ShapeDtypeStruct((batch, TOKENS, WIDTH), jnp.float32)
    exported = export.export(gradient, platforms=["cuda"])(weights(), symbolic)
    assert exported.out_avals


def test_a_report_counts_what_is_not_known():
    """With a large number for each such dimension."""
    (batch,) = export.symbolic_shape("batch")
    x = jax.ShapeDtypeStruct((batch, TOKENS, WIDTH), jnp.float32)
    report = mpx.explain(mpx.autocast(loss))(weights(), x)
    products = [o for o in report.operations if o.primitive == "dot_general"]
    assert {o.precision for o in products} == {"bfloat16"}
    assert all(o.flops > 0 for o in products)
    assert np.isfinite(report.totals.bytes)
    assert "batch" in report.table(width=None)


# --- What autocast made goes to other processes: Ray, Dask, joblib, submitit ----------


ROOT = Path(__file__).parents[2]

# In a process of its own: the types that tests check cannot be pickled.
PROGRAM = """
import copy, pickle
import cloudpickle
import jax.numpy as jnp
import mpx


def made():
    def loss(weights, x):
        return jnp.sum(jnp.tanh(x @ weights[0]) @ weights[1])
    return loss


rules = mpx.Rules(mpx.Rule(mpx.Precision.FULL, parameter="*"))
weights, x = [jnp.ones((16, 16)), jnp.ones((16, 4))], jnp.ones((8, 16))
for options in ({}, {"recipe": mpx.Float8CurrentScaling()}, {"rules": rules}):
    func = mpx.autocast(made(), **options)
    expected, scaling = func(weights, x), mpx.init_scaling(func, weights, x)
    for one in (func, mpx.inference(func, scaling), copy.deepcopy(func)):
        assert pickle.loads(cloudpickle.dumps(one))(weights, x) == expected
    gradient = pickle.loads(cloudpickle.dumps(mpx.filter_grad(func, scaling)))
    assert gradient(weights, x).finite
"""


@pytest.mark.slow
def test_what_autocast_made_is_pickled_by_value():
    """Without what has been rewritten, which is found again where it is needed."""
    pytest.importorskip("cloudpickle")
    command = [sys.executable, "-c", PROGRAM]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
