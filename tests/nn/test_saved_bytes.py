"""The table of docs/layers.md: bytes that functions save for the backward pass."""

import re
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest

import mpx
import mpx.nn

PAGE = Path(__file__).parents[2] / "docs" / "layers.md"
LABELS = jnp.zeros(64, jnp.int32)


def bytes_saved(f, *args):
    """Bytes of all arrays that the pullback of a function holds."""
    leaves = jax.eval_shape(lambda *a: jax.tree.leaves(jax.vjp(f, *a)[1]), *args)
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)


def equinox_norm(norm):
    return jax.vmap(norm(512, use_weight=False, use_bias=False))


@pytest.mark.third_party
@pytest.mark.parametrize(
    ("name", "ours", "full"),
    [
        ("softmax", mpx.nn.softmax, lambda x: jax.nn.softmax(x)),
        ("log_softmax", mpx.nn.log_softmax, lambda x: jax.nn.log_softmax(x)),
        ("layer_norm", mpx.nn.layer_norm, equinox_norm(eqx.nn.LayerNorm)),
        ("rms_norm", mpx.nn.rms_norm, equinox_norm(eqx.nn.RMSNorm)),
        (
            "cross_entropy",
            lambda x: mpx.nn.cross_entropy(x, LABELS),
            lambda x: optax.softmax_cross_entropy_with_integer_labels(x, LABELS),
        ),
    ],
)
def test_the_page_shows_the_bytes_that_are_saved(name, ours, full):
    x = jnp.ones((64, 512), jnp.bfloat16)
    forced = mpx.force_full_precision(full, jnp.bfloat16)
    cast = mpx.cast_function(full, "float32", jnp.bfloat16)
    saved = [bytes_saved(f, x) for f in (ours, forced, cast)]
    (row,) = re.findall(rf"^\| `{name}` \|(.*)$", PAGE.read_text("utf-8"), re.MULTILINE)
    cells = [cell.strip().replace(",", "") for cell in row.split("|")]
    assert [str(number) for number in saved] == cells[:3]
    assert max(saved[:2]) < 1.02 * x.nbytes and saved[2] > 1.9 * saved[1]
