"""A policy of `jax.checkpoint` saves of quantized products what it saves of others."""

import itertools
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import Saveable, checkpoint_name

import mpx

from ..helpers import slow_but
from .counting import kept_by

ROWS, WIDTH, HIDDEN = 32, 64, 128
POLICIES = jax.checkpoint_policies
DOTS = POLICIES.dots_with_no_batch_dims_saveable
NOTHING = POLICIES.nothing_saveable

RECIPES = {
    "current, H100": (mpx.Float8CurrentScaling(), "H100"),
    "delayed, H100": (mpx.DelayedScaling(), "H100"),
    "delayed, v5e": (mpx.DelayedScaling(), "tpu v5e"),
    "MXFP8, B200": (mpx.MXFP8BlockScaling(), "B200"),
    "NVFP4, B200": (mpx.NVFP4BlockScaling(), "B200"),
}


def block(w, x):
    hidden = checkpoint_name(jnp.tanh(x @ w["up"]), "hidden")
    return x + jnp.tanh(hidden @ w["down"])


def with_policy(policy):
    return jax.checkpoint(block, policy=policy)


def nested(outer, inner):
    return jax.checkpoint(with_policy(inner), policy=outer)


WAYS = {
    "dots": with_policy(DOTS),
    "every dot": with_policy(POLICIES.dots_saveable),
    "everything": with_policy(POLICIES.everything_saveable),
    "nothing": with_policy(NOTHING),
    "a name": with_policy(POLICIES.save_only_these_names("hidden")),
    "all but a name": with_policy(POLICIES.save_anything_except_these_names("hidden")),
    "a name or dots": with_policy(
        POLICIES.save_from_both_policies(DOTS, POLICIES.save_only_these_names("hidden"))
    ),
    "dots in nothing": nested(NOTHING, DOTS),
    "nothing in dots": nested(DOTS, NOTHING),
    "dots in dots": nested(DOTS, DOTS),
    "no policy": jax.checkpoint(block),
    "dots in no policy": nested(None, DOTS),
}

# Where everything is saved, that is what the backward pass reads: operands in FP8. And
# an inner policy that saves nothing hides products from the outer one.
_OTHERWISE = ("everything", "all but a name", "nothing in dots")
ALIKE = [way for way in WAYS if way not in _OTHERWISE]


def given():
    keys = jax.random.split(jax.random.key(0), 4)
    w = {
        "up": 0.1 * jax.random.normal(keys[0], (2, WIDTH, HIDDEN)),
        "down": 0.1 * jax.random.normal(keys[1], (2, HIDDEN, WIDTH)),
        "head": jax.random.normal(keys[2], (WIDTH, 8)),
    }
    return w, jax.random.normal(keys[3], (ROWS, WIDTH))


def loss_of(block, is_scan=False):
    def loss(w, x):
        head, w = w["head"], {name: w[name] for name in ("up", "down")}
        if is_scan:
            x, _ = lax.scan(lambda x, w: (block(w, x), None), x, w)
        else:
            for index in range(2):
                x = block(jax.tree.map(lambda a, i=index: a[i], w), x)
        return jnp.mean((x @ head) ** 2)

    return loss


def assert_same_gradient(layer, recipe, target):
    """Fails unless gradients are those of layers without a policy, bit for bit."""
    w, x = given()
    grads = []
    for one in (loss_of(layer), loss_of(block)):
        low = mpx.autocast(one, jnp.bfloat16, recipe=recipe, target=target)
        gradient = mpx.filter_grad(low, mpx.init_scaling(low, w, x))
        grads.append(gradient(w, x).grads)
    jax.tree.map(np.testing.assert_array_equal, *grads)


def kept(loss, recipe=None, target=None):
    """How many arrays of HIDDEN columns wait for the backward pass, by dtype."""
    low = mpx.autocast(loss, jnp.bfloat16, recipe=recipe, target=target)
    leaves = [a for a in kept_by(low, *given()) if a.shape[-2:] == (ROWS, HIDDEN)]
    return Counter(str(a.dtype) for a in leaves)


@pytest.mark.parametrize(
    ("way", "is_scan"), [*zip(ALIKE, itertools.cycle([False, True])), ("dots", True)]
)
def test_what_is_saved_is_what_is_saved_without_a_recipe(way, is_scan):
    loss = loss_of(WAYS[way], is_scan)
    recipe, target = RECIPES["current, H100"]
    assert kept(loss, recipe, target) == kept(loss, target=target)


@pytest.mark.parametrize("recipe", [r for r in RECIPES if "delayed" not in r])
def test_of_no_device_a_product_is_saved_in_float32(recipe):
    """Before its scales it is one, and where it is emulated."""
    assert kept(loss_of(with_policy(DOTS)), *RECIPES[recipe]) == {"bfloat16": 2}


@pytest.mark.parametrize(
    ("recipe", "way"),
    slow_but(
        [],
        itertools.product(
            ["current, H100", "delayed, v5e"], ["dots", "everything", "dots in nothing"]
        ),
    ),
)
def test_gradients_are_those_without_a_policy(recipe, way):
    assert_same_gradient(WAYS[way], *RECIPES[recipe])


@pytest.mark.exhaustive
@pytest.mark.parametrize("recipe", ["delayed, H100", "MXFP8, B200"])
def test_gradients_are_those_without_a_policy_in_every_way(recipe):
    for one in WAYS.values():
        assert_same_gradient(one, *RECIPES[recipe])


@pytest.mark.slow
def test_gradients_of_what_is_sent_to_the_host_are_those_without_a_policy():
    policy = POLICIES.offload_dot_with_no_batch_dims("device", "pinned_host")
    assert_same_gradient(with_policy(policy), *RECIPES["current, H100"])


@pytest.mark.parametrize("yes", [True, Saveable])
def test_a_policy_of_ones_own_is_asked_as_by_jax(yes):
    asked = []

    def policy(primitive, *operands, **params):
        if primitive.name == "dot_general":
            asked.append((operands[0].shape, params["dimension_numbers"]))
            return yes if operands[1].shape == (WIDTH, HIDDEN) else False
        return False

    loss = loss_of(with_policy(policy))
    recipe = RECIPES["current, H100"]
    assert kept(loss, *recipe) == {"bfloat16": 2}
    assert ((ROWS, WIDTH), (((1,), (0,)), ((), ()))) in asked


def test_a_policy_that_answers_nonsense_is_refused_by_jax():
    loss = loss_of(with_policy(lambda *_, **__: "yes"))
    recipe, target = RECIPES["current, H100"]
    with pytest.raises(TypeError, match="remat policy should be a bool"):
        kept(loss, recipe, target)


# --- Bytes that linear layers keep under a recipe: quantized operands -----------------


TOKENS, NARROW, BROAD, BLOCKS = 256, 128, 256, 3
X = jax.ShapeDtypeStruct((TOKENS, NARROW), jnp.float32)
BLOCK = {
    "in": jax.ShapeDtypeStruct((NARROW, BROAD), jnp.float32),
    "out": jax.ShapeDtypeStruct((BROAD, NARROW), jnp.float32),
}
LIMITS = [
    (mpx.Float8CurrentScaling(), 0.51),
    (mpx.DelayedScaling(amax_history_len=4), 0.51),
    (mpx.Float8BlockScaling(), 0.52),
    (mpx.MXFP8BlockScaling(), 0.52),
    (mpx.NVFP4BlockScaling(), 0.30),
    (mpx.Float8CurrentScaling(backward_override="dequantized"), 0.51),
    (mpx.NVFP4BlockScaling(backward_override="dequantized"), 0.30),
    (mpx.Float8CurrentScaling(backward_override="high_precision"), 1.0),
]
# The last product, too, which recipes leave alone.
EVERY = mpx.Rules(mpx.Rule(mpx.Precision.LOW, primitive="dot_general"))
HALF_BYTES = 2 * (TOKENS * (NARROW + BROAD) + 2 * NARROW * BROAD)


def payload(recipe):
    """The share of the numbers alone, to which scales come."""
    return 0.25 if isinstance(recipe, mpx.NVFP4BlockScaling) else 0.5


def linear_block(weights, x):
    return (x @ weights["in"]) @ weights["out"]


def scanned(weights, x):
    def body(x, weights):
        return linear_block(weights, x), None

    return jax.lax.scan(body, x, weights)[0]


def bytes_of_vjp(recipe):
    """Of two layers: all that `jax.vjp` keeps."""
    func = mpx.autocast(linear_block, recipe=recipe, rules=EVERY if recipe else None)
    func = mpx.inference(func, mpx.init_scaling(func, BLOCK, X))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in kept_by(func, BLOCK, X))


def bytes_of_step(recipe, target=None):
    """Of three pairs of layers in a scan: what a training step keeps."""
    loss = mpx.autocast(
        lambda weights, x: jnp.sum(scanned(weights, x)),
        recipe=recipe,
        rules=EVERY if recipe else None,
        target=target,
    )
    stacked = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((BLOCKS, *leaf.shape), leaf.dtype), BLOCK
    )

    def step(weights, scaling, x):
        return mpx.filter_value_and_grad(loss, scaling)(weights, x)

    scaling = mpx.init_scaling(loss, stacked, X)
    return mpx.explain(step)(stacked, scaling, X).totals.residual_bytes


def test_linear_layers_in_bfloat16_keep_operands_of_two_bytes():
    assert bytes_of_vjp(None) == HALF_BYTES
    loss = 4  # which the backward pass waits for
    # For a CPU and jax 0.10 loops keep float32: see `test_wide.py`.
    assert bytes_of_step(None, "h100") == BLOCKS * HALF_BYTES + loss


@pytest.mark.filterwarnings("ignore:.*before its first step")
@pytest.mark.parametrize(("recipe", "limit"), LIMITS, ids=str)
def test_linear_layers_under_a_recipe_keep_quantized_operands(recipe, limit):
    share = bytes_of_vjp(recipe) / HALF_BYTES
    assert payload(recipe) < share <= limit


@pytest.mark.parametrize(("recipe", "limit"), LIMITS[:2], ids=str)
def test_linear_layers_in_a_scan_of_a_step_keep_quantized_operands(recipe, limit):
    share = bytes_of_step(recipe) / (BLOCKS * HALF_BYTES)
    assert payload(recipe) < share <= limit
