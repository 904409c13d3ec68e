"""What `mpx.nn` promises: its names, and what is kept for the backward pass.

The bytes are those of the table of docs/layers.md.
"""

import itertools
import math
import re
import subprocess
import sys
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import jaxtyping
import optax
import pytest

import mpx.nn

from ..helpers import HALF
from .cases import FUNCTIONS, WHERE, kept_arrays

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "layers.md"
LABELS = jnp.zeros(64, jnp.int32)
ROWS, COLUMNS = 4, 8
in_half = pytest.mark.parametrize("dtype", HALF)


def test_every_name_is_on_its_page_and_nothing_else():
    page = (ROOT / "docs" / "api" / "nn.md").read_text(encoding="utf-8")
    documented = set(re.findall(r"^::: mpx\.nn\.(\w+)$", page, flags=re.MULTILINE))
    names = {name for name in dir(mpx.nn) if not name.startswith("_")}
    assert documented == {n for n in names if getattr(mpx.nn, n) is not jaxtyping}
    assert {"softmax", "TransformerLayer"} <= documented


def test_it_is_imported_on_demand_and_starts_no_backend():
    code = (
        "import os, sys; os.environ['JAX_PLATFORMS'] = 'no_such_platform'\n"
        "import mpx; assert 'mpx.nn' not in sys.modules\n"
        "import mpx.nn\n"
        "assert not {'optax', 'flax'} & set(sys.modules)"
    )
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def big_and_small(kept):
    big = [x for x in kept if x[1] == (ROWS, COLUMNS)]
    return big, [x for x in kept if x not in big]


@in_half
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_keep_one_half_array_and_float32_rows(name, dtype):
    case = FUNCTIONS[name]
    mine, other = case.pair(axis=-1)
    x = jnp.ones((ROWS, COLUMNS), dtype)
    big, small = big_and_small(kept_arrays(mine, x))
    expected = 0 if name == "mean" else 1
    assert big == [(dtype, (ROWS, COLUMNS))] * expected
    assert small == [("float32", (ROWS, 1))] * case.rows
    # And casting, which is what one would write, keeps float32: the test can fail.
    if name != "mean":
        by_cast = kept_arrays(mpx.cast_function(other, "float32", dtype), x)
        assert ("float32", (ROWS, COLUMNS)) in by_cast
        forced = kept_arrays(mpx.force_full_precision(other, dtype), x)
        assert ("float32", (ROWS, COLUMNS)) not in forced


@in_half
@pytest.mark.parametrize("name", [n for n, c in FUNCTIONS.items() if c.with_where])
def test_masks_are_kept_as_they_are(name, dtype):
    mine, _ = FUNCTIONS[name].pair(axis=-1, where=WHERE[None])
    big, _ = big_and_small(kept_arrays(mine, jnp.ones((ROWS, COLUMNS), dtype)))
    assert {x[0] for x in big} <= {dtype, "bool"}


TRANSFORMS = {
    "jit": jax.jit,
    "vmap": jax.vmap,
    "remat": jax.checkpoint,
    "scan": lambda f: lambda x: jax.lax.scan(lambda c, x: (c, f(x)), 0, x)[1],
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize(
    ("name", "dtype"),
    [*zip((name for name in FUNCTIONS if name != "mean"), itertools.cycle(HALF))],
)
def test_no_transform_makes_it_keep_float32(name, dtype, transform):
    mine, _ = FUNCTIONS[name].pair(axis=-1)
    shape = (3, ROWS, COLUMNS)
    kept = kept_arrays(TRANSFORMS[transform](mine), jnp.ones(shape, dtype))
    assert [x for x in kept if x[1] == shape] == [(dtype, shape)]


@in_half
def test_norms_with_parameters_keep_half(dtype):
    x, w = jnp.ones((ROWS, COLUMNS), dtype), jnp.ones(COLUMNS)
    big, small = big_and_small(kept_arrays(mpx.nn.layer_norm, x, w, w))
    assert big == [(dtype, x.shape)]
    assert set(small) == {("float32", (ROWS, 1)), ("float32", w.shape)}


@pytest.mark.parametrize(("dtype", "smoothing"), [("float16", 0.0), ("bfloat16", 0.1)])
def test_cross_entropy_keeps_half(dtype, smoothing):
    logits = jnp.ones((ROWS, COLUMNS), dtype)
    rows = [("float32", (ROWS, 1))] * 2
    labels = jnp.zeros(ROWS, jnp.int32)

    def loss(x, labels):
        return mpx.nn.cross_entropy(x, labels, label_smoothing=smoothing)

    kept = kept_arrays(lambda x: loss(x, labels), logits)
    assert kept == sorted([(dtype, logits.shape), ("int32", (ROWS,)), *rows])
    kept = kept_arrays(loss, logits, jax.nn.one_hot(labels, COLUMNS, dtype=dtype))
    assert kept == sorted([(dtype, logits.shape)] * 2 + rows)


def test_half_probabilities_of_float32_scores():
    softmax = lambda x: mpx.nn.softmax(x, dtype="bfloat16")  # noqa: E731
    kept = kept_arrays(softmax, jnp.ones((ROWS, COLUMNS)))
    assert kept == [("bfloat16", (ROWS, COLUMNS))]


# --- The table of docs/layers.md ------------------------------------------------------


def bytes_saved(f, *args):
    return sum(math.prod(s) * jnp.dtype(d).itemsize for d, s in kept_arrays(f, *args))


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
