"""Programs that are exported before the size of their batch is known."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import mpx
from tests.autocast.counting import relative_error
from tests.helpers import slow_but

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
    shape = 5, TOKENS, WIDTH
    w, x = weights(), np.random.default_rng(1).standard_normal(shape, np.float32)
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
