"""One training loss in every layout over eight devices, on auto and on explicit axes.

On explicit axes (the default of `jax.make_mesh`) the sharding of an array is part of
its type, and an operation takes only arrays of the mesh that it is traced under.
"""

import functools
import inspect
import itertools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compute_on import compute_on
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P, reshard

import mpx

from .counting import F32, count_products, equations, relative_error

WIDTH, WORDS, BATCH = 16, 32, 16

# How the weights lie; where it is not said, each device has all of them.
LAYOUTS = {
    "data parallel": {},
    "fsdp": dict.fromkeys(("table", "up", "bias", "down", "head"), P("data")),
    "tensor parallel": {"up": P(None, "model"), "bias": P("model"), "down": P("model")},
}
KINDS = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}


@functools.cache
def parameters():
    normal = np.random.default_rng(0).standard_normal
    shapes = {
        "table": (WORDS, WIDTH),
        "up": (WIDTH, 4 * WIDTH),
        "down": (4 * WIDTH, WIDTH),
        "head": (WIDTH, WORDS),
    }
    found = {n: np.float32(normal(s, np.float32) / 4) for n, s in shapes.items()}
    return found | {"bias": np.full(4 * WIDTH, 0.1, np.float32)}


def normalized(x):
    mean = jnp.mean(x, -1, keepdims=True)
    variance = jnp.mean((x - mean) ** 2, -1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(variance + 1e-6)


def logarithms(x, head):
    return jax.nn.log_softmax(normalized(x) @ head)


def loss(p: Any, tokens: Any, layout: str = "", kind: str = "auto") -> Any:
    """A lookup, two layers in a recomputed scan and one outside of it, a softmax."""
    is_explicit = kind == "explicit"
    rows = P("data") if is_explicit else None
    hidden = P("data", "model" if layout == "tensor parallel" else None)
    if is_explicit and layout == "fsdp":
        p = {name: reshard(w, P(*[None] * w.ndim)) for name, w in p.items()}

    def layer(x, _):
        bias = jnp.broadcast_to(
            p["bias"], (BATCH, 4 * WIDTH), out_sharding=hidden if is_explicit else None
        )
        h = jax.nn.gelu(normalized(x) @ p["up"] + bias)
        return x + jnp.einsum("bh,hd->bd", h, p["down"], out_sharding=rows), None

    x = p["table"].at[tokens].get(out_sharding=rows)
    x, _ = jax.lax.scan(jax.checkpoint(layer), x, length=2)
    x, _ = layer(x, None)
    labels = jax.nn.one_hot(tokens, WORDS)
    last = logarithms
    if is_explicit:
        last = jax.sharding.auto_axes(logarithms, out_sharding=P("data", None))
        labels = reshard(labels, P("data", None))
    return -jnp.sum(last(x, p["head"]) * labels) / BATCH


@functools.cache
def tokens():
    # No arrays of JAX, which would belong to the mesh of the test that made them.
    return np.random.default_rng(1).integers(0, WORDS, BATCH, np.int32)


@functools.cache
def reference():
    return jax.jit(jax.grad(loss))(parameters(), tokens())


@pytest.fixture
def placed(layout, kind):
    if len(jax.devices()) < 8:
        pytest.skip("needs eight devices")
    axes = (KINDS[kind],) * 2
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=axes)
    with jax.set_mesh(mesh):
        specs = LAYOUTS[layout]
        weights = {
            name: jax.device_put(w, NamedSharding(mesh, specs.get(name, P())))
            for name, w in parameters().items()
        }
        rows = jax.device_put(tokens(), NamedSharding(mesh, P("data")))
        found = functools.partial(loss, layout=layout, kind=kind)
        yield lambda p, tokens: found(p, tokens), weights, rows


# Each layout on explicit axes, and one on auto; the others find nothing more.
QUICK = (
    ("data parallel", "auto"),
    ("data parallel", "explicit"),
    ("fsdp", "explicit"),
    ("tensor parallel", "explicit"),
)


@pytest.mark.parametrize(
    ("layout", "kind"),
    [
        pytest.param(*pair, marks=() if pair in QUICK else pytest.mark.slow)
        for pair in itertools.product(LAYOUTS, KINDS)
    ],
)
def test_gradients_are_those_of_one_device(layout, kind, placed):
    func, weights, rows = placed
    gradient = jax.grad(mpx.autocast(func))
    got = jax.jit(gradient)(weights, rows)
    assert relative_error(got, reference()) < 1e-2
    assert F32 not in count_products(gradient, weights, rows)
    if kind == "explicit":
        outside = mpx.autocast(jax.grad(func))
        assert F32 not in count_products(outside, weights, rows)
        for name, w in weights.items():
            assert got[name].sharding.is_equivalent_to(w.sharding, w.ndim)


@pytest.mark.parametrize("layout", ["tensor parallel"])
@pytest.mark.parametrize("kind", ["explicit"])
@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "float16", "residuals": "fast"},
        {"residual_stream": "half"},
        pytest.param({"recipe": mpx.Float8CurrentScaling()}, marks=pytest.mark.slow),
        {"recipe": mpx.MXFP8BlockScaling()},
        pytest.param({"recipe": mpx.NVFP4BlockScaling()}, marks=pytest.mark.slow),
    ],
    ids=lambda o: "-".join(
        str(v) if isinstance(v, str) else type(v).__name__ for v in o.values()
    ),
)
def test_explicit_axes_with_every_option(layout, kind, placed, options):
    """Types, which hold the shardings, are those of the plain gradient."""
    func, weights, rows = placed
    got = jax.eval_shape(jax.grad(mpx.autocast(func, **options)), weights, rows)
    assert got == jax.eval_shape(jax.grad(func), weights, rows)


@pytest.mark.parametrize("layout", ["fsdp", "tensor parallel"])
@pytest.mark.parametrize("kind", ["explicit"])
def test_explicit_axes_with_a_state(layout, kind, placed):
    func, weights, rows = placed
    func = mpx.autocast(func, recipe=mpx.DelayedScaling())
    scaling = mpx.init_scaling(func, weights, rows)

    def step(scaling, weights, rows):
        return mpx.filter_grad(func, scaling)(weights, rows).grads

    got = eqx.filter_eval_shape(step, scaling, weights, rows)
    assert got == jax.eval_shape(lambda w: w, weights)


@pytest.mark.skipif(
    "f" in inspect.signature(compute_on).parameters,
    reason="this JAX's `compute_on` is a function, and no context",
)
def test_operations_stay_on_the_device_that_the_program_says():
    """And what is recomputed is not joined across it."""
    x = jnp.linspace(0.0, 1.0, 64).reshape(8, 8)

    def func(x):
        y = jnp.exp(x @ x)
        with compute_on("device_host"):
            z = jnp.tanh(y) * jnp.exp(-y)
        return jnp.sum(jnp.exp(z) + y)

    def placed(func):
        made = jax.make_jaxpr(func)(x)
        return {e.primitive.name for e, _ in equations(made) if e.ctx.compute_type}

    assert {"tanh", "exp", "mul"} <= placed(func)
    assert {"tanh", "exp", "mul"} <= placed(mpx.autocast(func))
    assert "dot_general" not in placed(jax.grad(mpx.autocast(func)))
    error = relative_error(mpx.autocast(func)(x), func(x))
    assert np.isfinite(error) and error < 2e-2
