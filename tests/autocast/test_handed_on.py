"""What XLA's kernels for GPUs hand on to each other within a region."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.nn import silu

import mpx

from .counting import named, relative_error

HALF = dict(target="H100", residual_stream="half")
ROWS, WIDTH = 64, 32


@functools.cache
def random(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32))


def group_norm(x):
    shape = x.shape
    x = x.reshape(len(x), -1, 4, shape[-1] // 4)
    mean = x.mean((1, 3), keepdims=True)
    return ((x - mean) * lax.rsqrt(x.var((1, 3), keepdims=True) + 1e-5)).reshape(shape)


WEIGHTS = {
    "w": random(WIDTH, WIDTH) / 6,
    "embed": random(WIDTH, WIDTH, seed=1) / 6,
    "scale": 1 + random(1, 1, WIDTH, seed=2) / 9,
    "bias": random(1, 1, WIDTH, seed=3),
    "taps": random(3, 1, 1, WIDTH, seed=4),
    "out": random(WIDTH, WIDTH, seed=5) / 6,
}
X, TIME = random(4, ROWS, WIDTH, seed=6), random(4, WIDTH, seed=7)


def with_embedding(w, x, t):
    h = x @ w["w"] + (t @ w["embed"])[:, None]
    return jnp.mean((silu(group_norm(h) * w["scale"] + w["bias"]) @ w["out"]) ** 2)


def with_shifts(w, x, t):
    u = x @ w["w"]
    u = sum(jnp.roll(u, i, 1) * w["taps"][i] for i in range(3)) + w["bias"]
    u = silu(u)
    return jnp.mean((u @ w["out"] * u) ** 2)


def with_one_bias(w, x, t):
    return jnp.mean((silu(x @ w["w"] + w["bias"]) @ w["out"]) ** 2)


def softmax_of_a_sum(w, x, t):
    scores = x @ w["w"] + (t @ w["embed"])[:, None]
    return jnp.mean((jax.nn.softmax(scores) @ w["out"]) ** 2)


def stream(w, x, t):
    x = x @ w["w"] + w["bias"]
    for _ in range(2):
        x = x + silu(x) @ w["out"]
    return jnp.mean(jnp.square(x))


MODELS = [with_embedding, with_shifts, stream]


def half(func, **options):
    return mpx.autocast(func, jnp.bfloat16, **{**HALF, **options})


def barriers(func):
    """The number of large half-precision arrays behind barriers in a gradient."""
    found = named("optimization_barrier", jax.grad(func), WEIGHTS, X, TIME)
    variables = [v.aval for e in found for v in e.outvars]
    return sum(v.dtype == jnp.bfloat16 and v.size >= X.size for v in variables)


def stored(func, **options):
    """How many more such arrays a program has than one in which nothing is stored."""
    rules = mpx.Rules(mpx.Rule(mpx.Precision.FULL, primitive="reduce_sum"))
    return barriers(half(func, **options)) - barriers(
        half(func, rules=rules, **options)
    )


# A sum or a beginning and its gradient are two; the gradient of an activation is one.
@pytest.mark.parametrize(
    ("func", "in_half", "in_full"),
    [
        (with_embedding, 3, 1),
        (with_shifts, 1, 1),
        (stream, 2, 0),
        (with_one_bias, 0, 0),
        (softmax_of_a_sum, 0, 0),
    ],
)
def test_gpus_store_half_precision_between_kernels(func, in_half, in_full):
    assert stored(func) == in_half
    assert stored(func, residual_stream="full") == in_full


@pytest.mark.parametrize("options", [{"target": "cpu"}, {"target": "tpu v5e"}])
@pytest.mark.parametrize("func", MODELS)
def test_other_devices_and_regions_that_are_off_do_not(func, options):
    assert stored(func, **options) == 0
    assert barriers(half(func, enabled=False)) == 0


def test_an_activation_that_products_read_is_stored_for_all():
    report = mpx.explain(half(with_shifts))(WEIGHTS, X, TIME)
    assert any("several kernels read it" in o.reason for o in report.operations)


@pytest.mark.parametrize("func", [with_embedding, with_shifts])
def test_its_gradients_are_nearer_than_those_of_a_cast_by_hand(func):
    def by_hand(w, x, t):
        return func(*jax.tree.map(lambda a: a.astype(jnp.bfloat16), (w, x, t)))

    def run(f):  # without the digits that XLA may keep where a program rounds
        options: dict[str, str | bool] = {"xla_allow_excess_precision": False}
        lowered = jax.jit(jax.grad(f)).lower(WEIGHTS, X, TIME)
        return lowered.compile(options)(WEIGHTS, X, TIME)["w"]

    ours, theirs = (relative_error(run(f), run(func)) for f in (half(func), by_hand))
    assert ours < 0.9 * theirs


TRANSFORMS = {
    "vmap": lambda f: lambda w, x, t: jax.vmap(lambda x: f(w, x, t))(x[None]).sum(),
    "scan": lambda f: lambda w, x, t: lax.map(lambda x: f(w, x, t), x[None]).sum(),
    "jit": lambda f: jax.checkpoint(jax.jit(f)),
}


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("func", MODELS)
def test_it_is_the_same_in_transforms(func, name):
    expected = jax.grad(half(func))(WEIGHTS, X, TIME)["w"]
    for f in (TRANSFORMS[name](half(func)), half(TRANSFORMS[name](func))):
        assert relative_error(jax.grad(f)(WEIGHTS, X, TIME)["w"], expected) < 0.02


@pytest.mark.parametrize("func", MODELS)
def test_second_derivatives(func):
    def slope(f):
        ones = jax.tree.map(jnp.ones_like, WEIGHTS)
        return jax.jvp(lambda w: jax.grad(f)(w, X, TIME), (WEIGHTS,), (ones,))[1]["w"]

    assert relative_error(slope(half(func)), slope(func)) < 0.05


@pytest.mark.parametrize("func", MODELS)
@pytest.mark.parametrize("value", [jnp.inf, jnp.nan])
def test_what_is_not_finite_is_seen(func, value):
    gradient = jax.grad(half(func))(WEIGHTS, X.at[0, 0, 0].set(value), TIME)
    assert not np.isfinite(gradient["w"]).all()


def test_float64_stays():
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda a: a.astype(jnp.float64), (WEIGHTS, X, TIME))
        assert half(with_embedding)(*wide) == with_embedding(*wide)
