"""Amaxes of weights: of the parameter where a step begins, or of what is read."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpx

RECIPE = mpx.DelayedScaling(amax_history_len=2)
KEYS = jax.random.split(jax.random.key(0), 3)
WEIGHT = tuple(mpx.quantization.Role).index(mpx.quantization.Role.WEIGHT)
X = jax.random.normal(KEYS[0], (8, 128))
W = 3 * jax.random.normal(KEYS[1], (128, 128)).at[0, 0].set(7.0)
HEAD = jax.random.normal(KEYS[2], (128, 4))


def plain(model, x):
    return jnp.mean((jnp.tanh(x @ model["w"]) @ model["head"]) ** 2)


def turned(model, x):
    return plain({**model, "w": model["w"].T.reshape(128, 128)}, x)


def halves(model, x):
    """A product of the smaller half alone, whose amax is its own."""
    h = jnp.tanh(x @ model["w"][:, 64:])
    return jnp.mean((h @ model["head"][64:]) ** 2)


def computed(model, x):
    """What is read is computed of the parameter: twice as large."""
    return plain({**model, "w": model["w"] * 2}, x)


def cast(model, x):
    return plain({**model, "w": model["w"].astype(jnp.bfloat16).astype(jnp.float32)}, x)


def stacked(model, x):
    layer = jax.checkpoint(lambda x, w: (jnp.tanh(x @ w), None))
    x, _ = jax.lax.scan(layer, x, model["w"])
    return jnp.mean((x @ model["head"]) ** 2)


def stacked_and_flipped(model, x):
    return stacked({**model, "w": jnp.flip(model["w"], 0)}, x)


def program(loss, model, recipe=RECIPE):
    func = mpx.autocast(loss, "bfloat16", recipe=recipe)
    step = jax.jit(lambda m, scaling, x: mpx.value_and_grad(func, scaling)(m, x))
    return step, mpx.init_scaling(func, model, X)


def stepped(loss, model, recipe=RECIPE):
    step, scaling = program(loss, model, recipe)
    return step(model, scaling, X)


def learned(loss, model, recipe=RECIPE):
    """The amaxes of weights that a step learns; those of scans by layer."""
    (scales,) = stepped(loss, model, recipe).scaling.scales
    return np.asarray(scales.amax_history[..., WEIGHT, :].max(-1))


MODEL = {"w": W, "head": HEAD}
LARGEST = float(jnp.max(jnp.abs(W)))
EXPECTED = {
    plain: [LARGEST],
    turned: [LARGEST],
    computed: [2 * LARGEST],
    cast: [float(jnp.max(jnp.abs(W.astype(jnp.bfloat16))).astype(jnp.float32))],
    halves: [float(jnp.max(jnp.abs(W[:, 64:])))],
}


@pytest.mark.parametrize(
    ("loss", "wrap"), [*zip(EXPECTED, itertools.cycle([jax.checkpoint, lambda f: f]))]
)
def test_a_step_learns_the_amax_of_what_is_quantized(loss, wrap):
    found = learned(wrap(loss), MODEL)
    is_rounded = loss is cast  # the parameter's amax stands for that of its rounding
    assert found.ravel() == pytest.approx(EXPECTED[loss], rel=2**-8 * is_rounded)


@pytest.mark.parametrize(
    ("loss", "expected", "error"),
    [(stacked, [1, 5, 0.1], 1e-6), (stacked_and_flipped, [0.1, 5, 1], 2**-8)],
)
def test_each_layer_of_a_scan_has_the_amax_of_what_it_reads(loss, expected, error):
    found = learned(loss, {"w": jnp.stack([W, 5 * W, 0.1 * W]), "head": HEAD})
    expected = [LARGEST * factor for factor in expected]
    assert found.ravel().tolist() == pytest.approx(expected, rel=error)


@pytest.mark.parametrize("join", ["concatenate", "update"])
def test_a_weight_with_numbers_of_another_one_has_the_amax_of_both(join):
    def mixed(model, x):
        first, second = model["w"], model["other"][:, :64]
        if join == "concatenate":
            whole = jnp.concatenate([first[:, :64], second], axis=1)
        else:
            whole = jax.lax.dynamic_update_slice(first, second, (0, 64))
        return plain({"w": whole, "head": model["head"]}, x)

    found = learned(mixed, {"w": W, "other": 9 * W, "head": HEAD})
    assert 9 * LARGEST in found.ravel().tolist()


def test_a_weight_that_is_not_finite_is_a_bad_step():
    step, scaling = program(jax.checkpoint(plain), MODEL)
    for bad in (np.inf, np.nan):
        result = step({"w": W.at[3, 5].set(bad), "head": HEAD}, scaling, X)
        assert not result.finite
        same = jax.tree.map(np.array_equal, result.scaling.scales, scaling.scales)
        assert jax.tree.all(same)


@pytest.mark.slow
def test_a_first_step_that_starts_warm_scales_by_the_weight_at_hand():
    recipe = mpx.DelayedScaling(warm_start=True)
    model = {"w": 1e-4 * W, "head": HEAD}
    recipes = recipe, mpx.Float8CurrentScaling()
    values = [stepped(plain, model, recipe=one).value for one in recipes]
    np.testing.assert_allclose(*values, rtol=1e-5)
    found = learned(plain, model, recipe=recipe).tolist()
    assert found == pytest.approx([1e-4 * LARGEST], rel=1e-6)


def test_the_amax_is_not_taken_again_under_checkpoint():
    """There it would be a pass over the weight, in each step."""

    def sums_and_maxima(loss):
        step, scaling = program(jax.checkpoint(loss), MODEL)
        return step.lower(MODEL, scaling, X).compile().as_text().count(" reduce(")

    assert sums_and_maxima(plain) < sums_and_maxima(computed)
