"""Scales of a step in one array, and amaxes in parts: as GPUs get them."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpx
from mpx._autocast import _call
from mpx._quantize import amax_in_parts, flushed, largest_magnitude, read_target
from mpx._recipe_state import _operands
from mpx._step._attempt import finite_flags

H100 = read_target("h100", "`target`")
KEYS = iter(jax.random.split(jax.random.key(0), 20))
# More rows than an amax has parts at most, and a number that no power of two divides.
X = jax.random.normal(next(KEYS), (9000, 64))
WEIGHTS = {n: 0.2 * jax.random.normal(next(KEYS), (64, 64)) for n in "qkvol"}
WEIGHTS["blocks"] = 0.2 * jax.random.normal(next(KEYS), (3, 64, 64))


def attention(w, x):
    """Three products that read one array."""
    q, k, v = (x @ w[name] for name in "qkv")
    return x + (jnp.tanh(q * k) + v) @ w["o"]


def twice(w, x):
    return x + jnp.tanh(x @ w["l"]) @ w["l"]


def in_a_loop(w, x):
    return jax.lax.scan(lambda x, _: (jnp.tanh(x @ w["l"]), None), x, length=3)[0]


def stacked(w, x):
    return jax.lax.scan(lambda x, b: (x + jnp.tanh(x @ b), None), x, w["blocks"])[0]


def computed(w, x):
    """The weight's amax is that of what is read, not of the parameter."""
    return x @ jnp.concatenate([0 * w["l"][:32], 3 * w["l"][32:]])


def recomputed(w, x):
    return jax.checkpoint(attention)(w, jax.checkpoint(twice)(w, x))


def everything(w, x):
    for layer in (attention, twice, in_a_loop, stacked, computed, recomputed):
        x = layer(w, x)
    return x


def trained(layer, x=X, steps=4, is_warm=False, **options):
    recipe = mpx.DelayedScaling(amax_history_len=3, warm_start=is_warm)
    func = mpx.autocast(
        lambda w, x: jnp.mean(layer(w, x) ** 2), recipe=recipe, target="h100"
    )
    scaling, optimizer = mpx.init_scaling(func, WEIGHTS, x), optax.sgd(0.1)
    state = WEIGHTS, optimizer.init(WEIGHTS), scaling

    @jax.jit
    def step(weights, opt_state, scaling, x):
        result = mpx.value_and_grad(func, scaling, **options)(weights, x)
        return mpx.optimizer_step(weights, optimizer, opt_state, result)

    for i in range(steps):
        state = step(*state, x.at[7, 7].set(jnp.inf) if i == 2 else x)
    assert int(state[2].skipped) == (steps > 2)
    return state


@pytest.fixture
def one_device(monkeypatch):
    """As if the process had one device; the tests have eight."""
    monkeypatch.setattr(_operands, "has_one_device", lambda given: True)


LAYERS, OPTIONS = (
    (attention, computed, recomputed),
    ({}, {"accumulate": 3}, {"is_warm": True}),
)
FORMS = [(everything, {}), *itertools.product(LAYERS, OPTIONS)]


@pytest.mark.parametrize(
    ("layer", "options"),
    FORMS,
    ids=lambda given: getattr(given, "__name__", str(given)),
)
def test_the_form_changes_no_bit(layer, options, one_device, monkeypatch):
    found = jax.tree.leaves(trained(layer, **options))
    monkeypatch.setattr(_call, "in_one_array", lambda state, *_: state)
    for one, other in zip(
        found, jax.tree.leaves(trained(layer, **options)), strict=True
    ):
        np.testing.assert_array_equal(one, other)


def test_amaxes_of_a_step_are_taken_together(one_device):
    """Of 3 products 3 arrays each: no maximum of them is reduced to a number alone."""
    state = trained(recomputed, steps=0)
    func = mpx.autocast(
        lambda w, x: jnp.mean(recomputed(w, x) ** 2),
        recipe=state[2].scales[0].recipe,
        target="h100",
    )
    step = jax.jit(lambda w, s, x: mpx.value_and_grad(func, s)(w, x).scaling)
    program = step.trace(WEIGHTS, state[2], X[:8192]).lower(
        lowering_platforms=("cuda",)
    )
    wide = r"reduce\(.*maximum.* : \(tensor<(\w+)xf32>.* -> tensor<(\w*)f32>"
    found = {pair for pair in re.findall(wide, program.as_text()) if "x" in pair[0]}
    # Those of data and gradients, and of weights; nothing reads a weight's own.
    assert found - {("64x64", "")} == {("1024x512", "1024x"), ("1024x4", "1024x")}


SHAPES = [(9000, 64), (8192, 8), (1, 70), (4, 4), (127, 129), (0, 8), (3,), ()]


PARTS = [(shape, way) for shape in SHAPES for way in (False, len(shape) == 2)]


@pytest.mark.parametrize(("shape", "by_columns"), dict.fromkeys(PARTS), ids=str)
@pytest.mark.parametrize("bad", [3.0, np.inf, np.nan, 1e-40])
def test_the_largest_part_is_the_amax(shape, bad, by_columns):
    x = np.zeros(shape, np.float32)
    x.reshape(-1)[-1:] = -bad
    parts = amax_in_parts(H100, jnp.asarray(x), 8192, by_columns)
    expected = 0 if bad == 1e-40 or not x.size else bad
    assert 0 < parts.size <= 8192
    np.testing.assert_array_equal(flushed(largest_magnitude(parts)), expected)


@pytest.mark.parametrize("scaling", [mpx.NoLossScaling(), mpx.StaticLossScaling(0.5)])
@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_each_bad_gradient_is_found_among_rows(scaling, bad):
    shapes = [(2048, 128), (5000,), (4097,), (64, 64, 65), (3, 3, 8, 64), (), (0, 8)]
    grads = [
        jnp.ones(shape, dtype) for shape, dtype in zip(shapes, "ffFfefF", strict=True)
    ]
    grads += [jnp.ones(128, jnp.bfloat16)] * 70
    check = jax.jit(finite_flags, static_argnums=3)
    for i, grad in enumerate(grads[:10]):
        worse = grad.at[(-1,) * grad.ndim].set(bad) if grad.size else grad
        given = scaling, jnp.ones(()), [*grads[:i], worse, *grads[i + 1 :]]
        flags = check(*given, True)
        np.testing.assert_array_equal(flags, check(*given, False))
        assert [j for j, flag in enumerate(flags) if not flag] == [i + 1] * bool(
            grad.size
        )
