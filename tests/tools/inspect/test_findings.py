"""Accidents of hand-written mixed precision are found, with the line that made them."""

import inspect

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpx
from mpx._tools._inspect import _registry

pytestmark = pytest.mark.third_party  # accidents need JAX's standard promotion

HALF = jax.ShapeDtypeStruct((8, 16), jnp.bfloat16)
WEIGHT = jax.ShapeDtypeStruct((16, 16), jnp.bfloat16)
SCALE = jax.ShapeDtypeStruct((16,), jnp.float32)


def line_of(func, text):
    """`file.py:12`, the line of a function's source that holds a text."""
    lines, start = inspect.getsourcelines(func)
    (offset,) = [i for i, line in enumerate(lines) if text in line]
    return f"tests/tools/inspect/test_findings.py:{start + offset}"


def found(func, *args):
    return [(o.finding, o.source) for o in mpx.explain(func)(*args).findings]


class Layer(eqx.Module):
    """A layer whose scale was forgotten when the weights were cast."""

    weight: jax.Array
    scale: jax.Array

    def __call__(self, x):
        x = x * self.scale  # the leak
        return x @ self.weight  # pays for it


def test_a_float32_scale_makes_the_product_float32():
    layer = Layer(WEIGHT, SCALE)
    report = mpx.explain(lambda layer, x: layer(x))(layer, HALF)
    leak = line_of(Layer, "# the leak")
    product, mul = report.findings
    assert product.primitive == "dot_general"
    assert product.finding == "matmul in float32 by bfloat16"
    assert product.source == line_of(Layer, "# pays for it")
    assert f"promoted at {leak} by `scale`, which is float32" in product.reason
    assert product.parameters == ("weight",)
    assert mul.primitive == "mul"
    assert mul.finding == "half precision promoted"
    assert mul.source == leak
    assert mul.reason == "bfloat16 promoted by `scale`, which is float32"
    assert report.totals.findings == 2
    assert f"promoted at {leak}" in str(report)
    # What it promotes in turn is due to the first.
    again = mpx.explain(lambda scale, x: x * (x * scale))(SCALE, HALF)
    first, second = (o.reason for o in again.operations if o.primitive == "mul")
    assert first.startswith("bfloat16 promoted by `") and "promoted at" not in first
    assert second.startswith("promoted at ") and first.partition("by `")[2] in second


def test_a_numpy_scalar_and_a_float32_carry_promote():
    def scaled(x):
        return x * np.float32(2)

    def summed(w, x):
        def body(carry, x):
            return carry + x @ w, None

        return jax.lax.scan(body, jnp.zeros(16), x)[0]

    line = line_of(scaled, "np.float32")
    assert found(scaled, HALF) == [("half precision promoted", line)]
    line = line_of(summed, "carry + x")
    assert found(summed, WEIGHT, HALF) == [("half precision promoted", line)]


def test_the_line_is_found_in_gradients_jit_and_scan():
    def loss(layer, x):
        def body(x, _):
            return layer(x).astype(jnp.bfloat16), None

        return jnp.sum(jax.lax.scan(body, x, length=2)[0])

    layer = Layer(WEIGHT, SCALE)
    findings = mpx.explain(jax.jit(jax.grad(loss)))(layer, HALF).findings
    leak = line_of(Layer, "# the leak")
    kinds = {(o.primitive, o.phase) for o in findings}
    assert {("dot_general", "forward"), ("dot_general", "backward")} <= kinds
    assert ("mul", "forward") in kinds
    products = [o for o in findings if o.primitive == "dot_general"]
    assert [o.executions for o in products] == [2, 2, 2]
    named = [f"promoted at {leak} by `scale`" in o.reason for o in products]
    # For the weight the float32 input is read again, for the input the cotangent is.
    assert named == [True, True, False]


def test_critical_operations_in_half_and_products_in_float32_are_found():
    def f(x):
        return jnp.exp(x) / 2

    assert found(f, HALF) == [("exp in bfloat16", line_of(f, "jnp.exp"))]
    report = mpx.explain(lambda x: x**3)(jax.ShapeDtypeStruct((3,), jnp.float16))
    assert [o.finding for o in report.findings] == ["integer_pow in float16"]
    assert found(lambda x: x**3, HALF) == []  # bfloat16 has the range for it

    def f(w, x, y):
        x = x.astype(jnp.float32)
        return x @ w, y @ y

    y = jax.ShapeDtypeStruct((2, 2), jnp.bfloat16)
    w = jax.ShapeDtypeStruct((16, 16), jnp.float32)
    (product,) = mpx.explain(f)(w, HALF, y).findings
    cast = line_of(f, "x.astype")
    assert product.finding == "matmul in float32"
    assert product.reason == f"cast to float32 at {cast}; `args[0]`, which is float32"


def cast_on_purpose(w, x):
    mean = jnp.mean(x.astype(jnp.float32))
    return (x.astype(jnp.float32) * mean).astype(x.dtype) @ w


@pytest.mark.parametrize(
    ("func", "args"),
    [
        (lambda x: x * 2.0 + 1, [HALF]),  # a Python number does not promote
        (cast_on_purpose, [WEIGHT, HALF]),
        (lambda x: jnp.var(x) + jnp.mean(x, axis=0), [HALF]),  # in float32 inside
        (lambda x: jnp.exp(x @ x), [jax.ShapeDtypeStruct((8, 8), jnp.float32)]),
    ],
)
def test_what_is_no_accident_is_no_finding(func, args):
    assert found(func, *args) == []


def test_float64_under_autocast_is_a_finding_and_no_recipe():
    def loss(w, x):
        hidden = mpx.autocast(lambda x: x @ x, enabled=False)(x)
        return jnp.mean((hidden @ w) ** 2)

    with jax.enable_x64(True):
        w, x = np.ones((16, 16)), jnp.ones((16, 16), jnp.bfloat16)
        for data, dtypes in ((x, "bfloat16 by float64"), (np.ones(x.shape), "float64")):
            report = mpx.explain(mpx.autocast(loss))(w, data)
            (product,) = report.findings
            assert product.finding == f"matmul in {dtypes}"
            assert report.totals.low_flops_share == 0
        assert not mpx.explain(loss)(w, w).findings


def test_a_finding_is_a_function_in_a_list(monkeypatch):
    """The first text of an operation holds; what is said of a program goes over it."""

    def is_wide(seen):
        return "256 numbers" * (seen.equation.outvars[0].aval.size == 256)

    every = (is_wide, *_registry.OF_AN_OPERATION)
    monkeypatch.setattr(_registry, "OF_AN_OPERATION", every)
    monkeypatch.setitem(_registry.OF_A_PROGRAM, "the last", lambda v, _: len(v) - 1)
    program = lambda w: jnp.exp(jnp.sin(w)) + 1  # noqa: E731
    texts = [text for text, _ in found(program, WEIGHT)]
    assert texts == ["256 numbers", "256 numbers", "the last"]
