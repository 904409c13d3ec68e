"""What a recipe counts as a weight: what comes from weights and constants alone."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import mpx

D, ROWS = 32, 64
MASK = jnp.tril(jnp.ones((D, D)))  # as in MADE
ORDER = np.random.default_rng(0).permutation(D)


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape) / np.sqrt(shape[-1])


@jax.custom_vjp
def rounded(w):
    return jnp.round(w * 50) / 50


rounded.defvjp(lambda w: (rounded(w), None), lambda _, g: (g,))


def power_iteration(w):
    def turn(_, u):
        return w @ (w.T @ u) / jnp.linalg.norm(w @ (w.T @ u))

    u = lax.fori_loop(0, 3, turn, jnp.ones(D) / np.sqrt(D))
    return w / jnp.linalg.norm(w.T @ lax.stop_gradient(u))


def best_half(w):
    return jnp.where(jnp.abs(w) >= jnp.sort(jnp.abs(w), axis=None)[D * D // 2], w, 0.0)


def through_int8(w):
    return jnp.round(w * 50).astype(jnp.int8).astype(jnp.float32) / 50


KEY = jax.random.key(7)
FORMS = {
    "mask": lambda w: w * MASK,
    "mask_of_integers": lambda w: w * jnp.tri(D, dtype=jnp.int32).astype(w.dtype),
    "magnitude": lambda w: w * (jnp.abs(w) > 0.1).astype(w.dtype),
    "best_half": best_half,
    "clip": lambda w: jnp.clip(w, -1, 1),
    "int8": lambda w: w + lax.stop_gradient(through_int8(w) - w),
    "eye": lambda w: jnp.eye(D) + w,
    "where": lambda w: jnp.where(MASK > 0, w, 0.0),
    "norm": lambda w: w / jnp.linalg.norm(w, axis=0, keepdims=True),
    "straight_through": lambda w: w + lax.stop_gradient(jnp.round(w * 50) / 50 - w),
    "custom_vjp": rounded,
    "joined": lambda w: jnp.concatenate([w[: D // 2], w[D // 2 :]]) * 2.0,
    "jit": jax.jit(lambda w: w * (jnp.abs(w) > 0.1).astype(w.dtype)),
    "checkpoint": jax.checkpoint(lambda w: jnp.tanh(jnp.clip(w, -1, 1))),
    "transposed": lambda w: (w * MASK).T,
    "cond": lambda w: lax.cond(w[0, 0] > 0, lambda w: w * 2.0, lambda w: w, w),
    "vmap": jax.vmap(lambda row: row / jnp.linalg.norm(row)),
}
# Made by a matmul, a lookup, a loop or noise.
MADE = {
    "low_rank": lambda w: w + w[:, :4] @ w[:4],
    "only_low_rank": lambda w: w[:, :4] @ w[:4],
    "dora": lambda w: (w + w[:, :4] @ w[:4]) / jnp.linalg.norm(w, axis=0)[None],
    "gathered": lambda w: w[:, ORDER],
    "loop": power_iteration,
    "noise": lambda w: w * jax.random.bernoulli(KEY, 0.9, w.shape).astype(w.dtype),
    "scan": lambda w: lax.map(lambda row: row / jnp.linalg.norm(row), w),
}


def loss_of(form, params, x):
    h = jnp.tanh(x @ form(params["a"]))
    return jnp.mean((jnp.tanh(h @ form(params["b"])) @ jnp.ones((D, 4))) ** 2)


def arguments():
    return {"a": normal(0, D, D), "b": normal(1, D, D)}, normal(2, ROWS, D)


def quantized(func, *args):
    """Of each matmul of the function, in order, whether it is quantized."""
    report = mpx.explain(func)(*args)
    found = [o for o in report.operations if o.primitive == "dot_general"]
    return [o.is_low for o in found if o.phase == "forward"]


@pytest.mark.parametrize("name", [*FORMS, *MADE])
@pytest.mark.parametrize(
    "recipe", [mpx.Float8CurrentScaling(), mpx.DelayedScaling()], ids=["now", "state"]
)
def test_a_weight_that_is_computed_is_quantized(name, recipe):
    """Each counted as data, whatever of it passed through integers or truth values."""
    loss = functools.partial(loss_of, {**FORMS, **MADE}[name])
    func, args = mpx.autocast(loss, recipe=recipe), arguments()
    scaling = mpx.init_scaling(func, *args)
    assert sorted(use.parameter for use in scaling.quantized) == ["['a']", "['b']"]
    if recipe.has_state:
        paths = [use.split()[0] for use in scaling.scales_by_weight()]
        assert sorted(paths) == ["['a']", "['b']"]
    result = mpx.filter_grad(func, scaling)(*args)
    exact = jax.grad(loss)(*args)
    for key in exact:
        error = jnp.linalg.norm(result.grads[key] - exact[key])
        assert error < 0.3 * jnp.linalg.norm(exact[key]), key
    assert sum(quantized(func, *args)) == 2


@pytest.mark.parametrize("has_key", [False, True])
def test_noise_makes_no_data_of_a_weight_and_is_data_by_itself(has_key):
    """DropConnect quantizes its weights; latents that are drawn are the input."""

    def drop(params, key, x):
        keep = jax.random.bernoulli(key, 0.9, (D, D)).astype(x.dtype)
        return loss_of(lambda w: w * keep, params, x)

    def drawn(params, key, x):
        return loss_of(lambda w: w, params, jax.random.normal(key, x.shape))

    key = jax.random.key(3) if has_key else jax.random.PRNGKey(3)
    params, x = arguments()
    for loss in drop, drawn:
        func = mpx.autocast(loss, recipe=mpx.Float8CurrentScaling())
        assert quantized(func, params, key, x) == [True, True, False]


def test_pruned_kernels_and_experts_are_weights():
    kernel, image = normal(0, 3, 3, 4, 8), normal(1, 2, 8, 8, 4)
    experts, rows = normal(2, 4, D, D), normal(3, ROWS, D)

    def pruned(w):
        return jnp.clip(w * (jnp.abs(w) > 0.05).astype(w.dtype), -1, 1)

    def convolution(kernel, image):
        numbers = ("NHWC", "HWIO", "NHWC")
        args = image, pruned(kernel), (1, 1), "SAME"
        y = lax.conv_general_dilated(*args, dimension_numbers=numbers)
        return jnp.mean(jnp.tanh(y) ** 2)

    def ragged(experts, rows):
        y = lax.ragged_dot(rows, pruned(experts), jnp.full((4,), ROWS // 4))
        return jnp.mean(jnp.tanh(y) ** 2)

    for func, args in (convolution, (kernel, image)), (ragged, (experts, rows)):
        low = mpx.autocast(func, recipe=mpx.Float8CurrentScaling())
        assert any(o.is_low for o in mpx.explain(low)(*args).operations)


def test_weights_in_integers_are_weights():
    """Dequantized by the program itself, with a scale or a number."""
    params, x = arguments()
    stored = {k: (jnp.round(w * 100).astype(jnp.int8), 0.01) for k, w in params.items()}
    stored = jax.tree.map(jnp.asarray, stored)
    by_scale = lambda w: w[0].astype(jnp.float32) * w[1]  # noqa: E731
    for form in by_scale, lambda w: w[0].astype(jnp.float32) / 100:
        for recipe in mpx.Float8CurrentScaling(), mpx.DelayedScaling():
            made = mpx.autocast(functools.partial(loss_of, form), recipe=recipe)
            assert quantized(made, stored, x) == [True, True, False]
            if form is by_scale and recipe.has_state:
                state = mpx.init_scaling(made, stored, x)
                assert len(state.scales_by_weight()) == 2


def test_a_mask_that_is_passed_selects_or_is_declared():
    """As a number it may as well be an activation; a predicate holds no numbers."""
    params, x = arguments()
    recipe = mpx.Float8CurrentScaling()

    def times(params, mask, x):
        return loss_of(lambda w: w * mask, params, x)

    def where(params, mask, x):
        return loss_of(lambda w: jnp.where(mask > 0, w, 0.0), params, x)

    args = params, MASK, x
    with pytest.raises(ValueError, match="found no weight matmul"):
        mpx.autocast(times, recipe=recipe)(*args)
    for func in (
        mpx.autocast(times, recipe=recipe, weights=(0, 1)),
        mpx.autocast(where, recipe=recipe),
    ):
        assert quantized(func, *args) == [True, True, False]


def test_what_is_computed_from_data_stays_data():
    params, x = arguments()
    labels = jnp.arange(ROWS) % D

    def each(rows, *data):
        def loss(params, *data):
            return loss_of(lambda w: w, params, rows(params, *data))

        func = mpx.autocast(loss, recipe=mpx.Float8CurrentScaling())
        return quantized(func, params, *data)

    def many_hot(params, labels):
        return (labels[:, None] == jnp.arange(D)[None]).astype(jnp.float32)

    def joined(params, x):  # a learned token beside those of the input
        return jnp.concatenate([params["b"][:1], x])

    def positions(params):  # of counts, as sinusoids are
        return jnp.sin(jnp.arange(ROWS * D, dtype=jnp.float32)).reshape(-1, D)

    # Constants have no numbers that change: not quantized.
    assert each(lambda params: x) == [False, True, False]
    assert each(positions) == [True, True, False]
    assert each(many_hot, labels) == [True, True, False]
    assert each(lambda params, i: params["b"][i], labels) == [True, True, False]
    assert each(joined, x) == [True, True, False]
    # Learned queries: a matmul of weights, and then data.
    assert each(lambda params, x: params["b"], x) == [False, True, False]


def test_attention_to_learned_queries_stays_in_half_precision():
    """They are made of weights alone, and multiply keys of the data, by heads."""
    params, x = arguments()
    x = x.reshape(2, ROWS // 2, D)

    def loss(params, x):
        by_head = lambda y: y.reshape(*y.shape[:-1], 4, D // 4)  # noqa: E731
        q, k = by_head(params["b"] @ params["a"]), by_head(x @ params["b"])
        p = jax.nn.softmax(jnp.einsum("qhd,bkhd->bhqk", q, k))
        y = jnp.einsum("bhqk,bkhd->bqhd", p, k).reshape(2, D, D)
        return jnp.mean((jnp.tanh(y @ params["a"]) @ jnp.ones((D, 4))) ** 2)

    func = mpx.autocast(loss, recipe=mpx.Float8CurrentScaling())
    assert quantized(func, params, x) == [False, True, False, False, True, False]


def test_masked_weights_in_a_scan_of_recomputed_layers():
    n = 3
    params = {"w": jnp.stack([normal(i, D, D) for i in range(n)])}
    masks = jnp.stack([MASK, MASK.T, MASK])

    def loss(params, x):
        @jax.checkpoint
        def layer(h, xs):
            w, mask = xs
            return jnp.tanh(h @ (w * mask * (jnp.abs(w) > 0.01).astype(w.dtype))), None

        return jnp.mean(lax.scan(layer, x, (params["w"], masks))[0] @ jnp.ones((D, 4)))

    x = normal(2, ROWS, D)
    func = mpx.autocast(loss, recipe=mpx.DelayedScaling())
    scaling = mpx.init_scaling(func, params, x)
    for _ in range(2):  # the scales of the first step are 1
        result = mpx.filter_grad(func, scaling)(params, x)
        scaling = result.scaling
    (amaxes,) = scaling.amaxes_by_weight().values()
    kept = params["w"] * masks
    kept = jnp.max(jnp.abs(kept), axis=(1, 2))
    assert np.allclose(amaxes[:, 1], kept, rtol=0.01)
    exact = jax.grad(loss)(params, x)["w"]
    assert jnp.linalg.norm(result.grads["w"] - exact) < 0.2 * jnp.linalg.norm(exact)
