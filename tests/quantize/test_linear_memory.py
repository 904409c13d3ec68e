"""What a quantized product keeps for its backward pass: quantized operands only."""

import jax
import jax.numpy as jnp
import pytest

import mpx
from tests.quantize.linear_cases import linear_product, matrix_product

ROWS, DEPTH, COLUMNS = 512, 256, 384
HALF_BYTES = 2 * (ROWS * DEPTH + DEPTH * COLUMNS)


def kept_bytes(recipe: mpx.quantization.AbstractRecipe) -> int:
    product = matrix_product(recipe, "bfloat16")
    is_delayed = isinstance(recipe, mpx.DelayedScaling)
    scales = jax.ShapeDtypeStruct((3,), jnp.float32) if is_delayed else None
    x = jax.ShapeDtypeStruct((ROWS, DEPTH), jnp.bfloat16)
    w = jax.ShapeDtypeStruct((DEPTH, COLUMNS), jnp.float32)

    def backward(x, w, scales):
        f = lambda *a: linear_product(product, *a)  # noqa: E731
        return jax.vjp(f, x, w, scales)[1]

    leaves = jax.tree.leaves(jax.eval_shape(backward, x, w, scales))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)


@pytest.mark.parametrize(
    ("recipe", "share"),
    [
        (mpx.Float8CurrentScaling(), 0.501),
        (mpx.DelayedScaling(), 0.501),
        (mpx.Float8BlockScaling(), 0.515),
        (mpx.MXFP8BlockScaling(), 0.516),
        (mpx.NVFP4BlockScaling(), 0.282),
        (mpx.Float8CurrentScaling(backward_override="dequantized"), 0.501),
        (mpx.NVFP4BlockScaling(backward_override="dequantized"), 0.282),
        (mpx.Float8CurrentScaling(backward_override="high_precision"), 1.0),
    ],
    ids=str,
)
def test_the_bytes_kept_against_those_of_bfloat16(recipe, share: float):
    found = kept_bytes(recipe) / HALF_BYTES
    assert 0.98 * share - 0.01 <= found <= share
