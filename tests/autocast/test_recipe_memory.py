"""What linear layers keep for the backward pass under a recipe: quantized operands.

Through all of `mpx.autocast`, against the same layers under autocast in bfloat16. The
layers stand in a row without a nonlinearity, which would keep something of its own.
"""

import jax
import jax.numpy as jnp
import pytest

import mpx

TOKENS, WIDTH, HIDDEN, BLOCKS = 256, 128, 256, 3
X = jax.ShapeDtypeStruct((TOKENS, WIDTH), jnp.float32)
BLOCK = {
    "in": jax.ShapeDtypeStruct((WIDTH, HIDDEN), jnp.float32),
    "out": jax.ShapeDtypeStruct((HIDDEN, WIDTH), jnp.float32),
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
HALF_BYTES = 2 * (TOKENS * (WIDTH + HIDDEN) + 2 * WIDTH * HIDDEN)


def payload(recipe):
    """The share of the numbers alone, to which scales come."""
    return 0.25 if isinstance(recipe, mpx.NVFP4BlockScaling) else 0.5


def block(weights, x):
    return (x @ weights["in"]) @ weights["out"]


def scanned(weights, x):
    def body(x, weights):
        return block(weights, x), None

    return jax.lax.scan(body, x, weights)[0]


def bytes_of_vjp(recipe):
    """Of two layers: all that `jax.vjp` keeps."""
    func = mpx.autocast(block, recipe=recipe, rules=EVERY if recipe else None)
    func = mpx.inference(func, mpx.init_scaling(func, BLOCK, X))
    kept = jax.eval_shape(lambda *args: jax.vjp(func, *args)[1], BLOCK, X)
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(kept))


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


def test_in_bfloat16_they_keep_operands_of_two_bytes():
    assert bytes_of_vjp(None) == HALF_BYTES
    loss = 4  # which the backward pass waits for
    # For a CPU and jax 0.10 loops keep float32: see `test_wide.py`.
    assert bytes_of_step(None, "h100") == BLOCKS * HALF_BYTES + loss


@pytest.mark.filterwarnings("ignore:.*before its first step")
@pytest.mark.parametrize(("recipe", "limit"), LIMITS, ids=str)
def test_under_a_recipe_they_keep_quantized_operands(recipe, limit):
    share = bytes_of_vjp(recipe) / HALF_BYTES
    assert payload(recipe) < share <= limit


@pytest.mark.parametrize(("recipe", "limit"), LIMITS[:2], ids=str)
def test_so_do_layers_in_a_scan_of_a_training_step(recipe, limit):
    share = bytes_of_step(recipe) / (BLOCKS * HALF_BYTES)
    assert payload(recipe) < share <= limit
