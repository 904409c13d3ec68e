"""Programs that evaluate beside a training: what they compute is what trained.

Each is a function that trains, which gives what it computed on its way, and a function
that computes that alone, under every recipe.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpx

from ..helpers import slow_but
from ..registries import RECIPES

WIDTH, WORDS, LENGTH, ROWS = 32, 16, 4, 4
BATCH = 32


def batch():
    return normal(3, BATCH, WIDTH) * 4


def under_delayed_and(*others):
    """Each program under delayed scaling, and all recipes over the programs."""
    return pytest.mark.parametrize("name", slow_but(["delayed"], ["delayed", *others]))


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape) / np.sqrt(shape[0])


def mlp(seed, *sizes):
    pairs = enumerate(zip(sizes, sizes[1:], strict=False))
    return {f"w{i}": normal(seed + i, *pair) for i, pair in pairs}


def applied(model, x):
    *hidden, last = model.values()
    for w in hidden:
        x = jnp.tanh(x @ w)
    return x @ last


def warm(name):
    """The recipe, whose scales are known at the first step."""
    is_delayed = isinstance(RECIPES[name], mpx.DelayedScaling)
    recipe = mpx.DelayedScaling(amax_history_len=4, warm_start=True)
    return recipe if is_delayed else RECIPES[name]


class Run:
    """A step of training with a recipe, and what is evaluated with its scaling."""

    def __init__(self, name, loss, *args, dtype="bfloat16", **options):
        options = {"dtype": dtype, "recipe": warm(name), **options}
        self.wrap = functools.partial(mpx.autocast, **options)
        func = self.wrap(loss)
        start = mpx.init_scaling(func, *args)

        @jax.jit
        def step(scaling, *args):
            gradient = mpx.filter_value_and_grad(func, scaling, has_aux=True)
            return gradient(*args).scaling

        self.scaling = step(start, *args)
        # What a step computes whose weights are these: by the scales of this one.
        self.aux = self.made(loss)(*args)[1]

    def made(self, func):
        """The function as it is evaluated."""
        return jax.jit(mpx.inference(self.wrap(func), self.scaling))

    def __call__(self, func, *args):
        return self.made(func)(*args)


def cross_entropy(logits, labels):
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1)
    return -jnp.mean(picked)


def gpt(seed=0):
    shapes = {name: (WIDTH, WIDTH) for name in ("q", "k", "v", "out")}
    shapes |= {"up": (WIDTH, 2 * WIDTH), "down": (2 * WIDTH, WIDTH)}
    found = {n: normal(seed + i, *s) for i, (n, s) in enumerate(shapes.items())}
    return found | {"table": normal(9, WORDS, WIDTH), "head": normal(8, WIDTH, WORDS)}


def block(p, x, k, v, mask):
    scores = jnp.einsum("bqd,bkd->bqk", x @ p["q"], k) / np.sqrt(WIDTH)
    attended = jax.nn.softmax(jnp.where(mask, scores, -1e9)) @ v
    x = x + attended @ p["out"]
    return (x + jnp.tanh(x @ p["up"]) @ p["down"]) @ p["head"]


def whole(p, tokens):
    x = p["table"][tokens]
    mask = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))
    return block(p, x, x @ p["k"], x @ p["v"], mask)


def decoded(p, cache, token, place):
    """The logits of one token for each row, and the cache with its key and value."""
    x = p["table"][token][:, None]
    new = x @ p["k"], x @ p["v"]
    put = jax.lax.dynamic_update_slice_in_dim
    cache = [put(c, n, place, 1) for c, n in zip(cache, new, strict=True)]
    return block(p, x, *cache, jnp.arange(LENGTH) <= place)[:, 0], cache


SAMPLED = [("delayed", 1), ("mxfp8", ROWS), ("block", 1), ("current", 1)]


@pytest.mark.parametrize(("name", "rows"), slow_but([], SAMPLED))
def test_a_gpt_samples_with_a_cache_what_it_has_learned(name, rows):
    """Token by token, of one text, too: logits of the whole sequence."""
    tokens = jax.random.randint(jax.random.key(1), (ROWS, LENGTH), 0, WORDS)

    def loss(p, tokens):
        logits = whole(p, tokens)
        return cross_entropy(logits[:, :-1], tokens[:, 1:]), logits

    p = gpt()
    # In float32, so that nothing but the recipes rounds.
    run = Run(name, loss, p, tokens, dtype="float32")
    cache = [jnp.zeros((rows, LENGTH, WIDTH))] * 2
    found, decode = [], run.made(decoded)
    for place in range(LENGTH):
        logits, cache = decode(p, cache, tokens[:rows, place], place)
        found.append(logits)
    error = jnp.abs(jnp.stack(found, 1) - run.aux[:rows]).max() / jnp.abs(run.aux).max()
    # A scale for a whole array is another one where the array has fewer rows.
    by_rows = name in ("mxfp8", "delayed")
    assert error < (1e-5 if by_rows else 0.25)
    accuracy = run(lambda p, t: jnp.argmax(whole(p, t), -1) == t, p, tokens)
    assert np.array_equal(accuracy, jnp.argmax(run.aux, -1) == tokens)


@under_delayed_and("current")
def test_two_losses_on_one_model(name):
    x, model = batch(), {"trunk": mlp(0, WIDTH, WIDTH, WIDTH)}
    model |= {"policy": mlp(4, WIDTH, WIDTH, WORDS), "value": mlp(6, WIDTH, WIDTH, 1)}

    def on_trunk(name, model, x):
        return applied(model[name], jnp.tanh(applied(model["trunk"], x)))

    policy = functools.partial(on_trunk, "policy")
    value = lambda model, x: on_trunk("value", model, x)[:, 0]  # noqa: E731

    def loss(model, x):
        found = policy(model, x), value(model, x)
        mean = cross_entropy(found[0], jnp.zeros(len(x), int))
        return mean + jnp.mean(found[1] ** 2), found

    run = Run(name, loss, model, x)
    assert np.array_equal(run(policy, model, x), run.aux[0])
    assert np.array_equal(run(value, model, x), run.aux[1])


@under_delayed_and("custom")
def test_preferences_against_a_frozen_reference(name):
    """DPO: the reference model answers as the model did before it was trained."""
    x, model = batch(), mlp(0, WIDTH, WIDTH, WIDTH, WORDS)

    def loss(model, reference, x):
        mine, its = applied(model, x), jax.lax.stop_gradient(applied(reference, x))
        margin = (jax.nn.log_softmax(mine) - jax.nn.log_softmax(its))[:, 0]
        return -jnp.mean(jax.nn.log_sigmoid(margin)), (mine, its)

    run = Run(name, loss, model, model, x, weights=(0, 1))
    assert np.allclose(run.aux[0], run.aux[1], atol=2e-2)
    alone = mpx.inference(mpx.autocast(applied, recipe=warm(name)), run.scaling)
    assert np.array_equal(jax.jit(alone)(model, x), run.aux[0])


@under_delayed_and("mxfp8")
def test_a_student_and_an_average_of_its_weights(name):
    """Distillation from a running average, which is evaluated as the student is."""
    x, student = batch(), mlp(0, WIDTH, WIDTH, WIDTH, WORDS)
    teacher = jax.tree.map(lambda w: 0.9 * w, student)

    def loss(student, teacher, x):
        target = jax.lax.stop_gradient(applied(teacher, x))
        logits = applied(student, x)
        return jnp.mean((logits - target) ** 2), logits

    run = Run(name, loss, student, teacher, x, weights=(0, 1))
    alone = mpx.autocast(applied, recipe=warm(name))
    evaluate = jax.jit(mpx.inference(alone, run.scaling))
    assert np.array_equal(evaluate(student, x), run.aux)
    exact = applied(teacher, x)
    error = jnp.abs(evaluate(teacher, x) - exact).max() / jnp.abs(exact).max()
    assert error < (0.5 if name in ("nvfp4", "custom") else 0.15)


@under_delayed_and("block")
def test_a_model_that_adapts_in_an_inner_step(name):
    """MAML: the adapted model is evaluated with the scaling of the outer step."""
    x, model = batch(), mlp(0, WIDTH, WIDTH, WIDTH, WORDS)

    def inner(model, x):
        return jnp.mean(applied(model, x) ** 2)

    def loss(model, x):
        grads = jax.grad(inner)(model, x)
        adapted = jax.tree.map(lambda w, g: w - 0.1 * g, model, grads)
        return inner(adapted, x), applied(model, x)

    run = Run(name, loss, model, x)
    assert np.array_equal(run(applied, model, x), run.aux)


@under_delayed_and("nvfp4")
def test_adapters_that_are_merged(name):
    """LoRA: the merged weights are the base's, and are quantized as it was."""
    x, base = batch(), mlp(0, WIDTH, WIDTH, WIDTH, WORDS)
    adapters = {
        k: {"down": normal(5, w.shape[0], 1), "up": jnp.zeros((1, w.shape[1]))}
        for k, w in base.items()
    }

    def adapted(adapters, base, x):
        added = {k: a["down"] * a["up"] for k, a in adapters.items()}
        return applied(jax.tree.map(jnp.add, base, added), x)

    def loss(adapters, base, x):
        logits = adapted(adapters, base, x)
        return jnp.mean(logits**2), logits

    run = Run(name, loss, adapters, base, x, weights=(0, 1))
    assert np.array_equal(run(adapted, adapters, base, x), run.aux)
