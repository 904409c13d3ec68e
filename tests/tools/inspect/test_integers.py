"""Products in half precision that round integers are found."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpx

IDS = jax.ShapeDtypeStruct((8,), jnp.int32)
THETA = jax.ShapeDtypeStruct((2, 3), jnp.float32)


def numbers(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def counts(mask):
    return jnp.tril(jnp.ones((len(mask), len(mask)))) @ mask.astype(jnp.float32)


def prefix_sums(w, mask):
    total = jnp.cumsum(mask.astype(jnp.int32))
    return jnp.stack([total, total], -1).astype(jnp.float32) @ w


def positions_of(size):
    def looked_up(ids):
        positions = jnp.arange(size, dtype=jnp.float32)
        return jax.nn.one_hot(ids, size) @ jnp.stack([positions, positions], -1)

    return looked_up


def grid_of(size, xp=jnp):
    def placed(theta):
        xs, ys = xp.meshgrid(*2 * [xp.arange(size, dtype=np.float32)])
        grid = xp.stack([xs.ravel(), ys.ravel(), xp.ones(size**2, np.float32)])
        return theta @ grid

    return placed


def counted_in_a_loop(w, x):
    def body(carry, _):
        step, y = carry
        return (step + 1, y + (jnp.ones((4, 16)) * step) @ w), None

    return jax.lax.scan(body, (jnp.float32(0), x), length=500)[0][1]


def of_integers(w, x):
    return x.astype(jnp.float32) @ w


def normalized(theta):
    xs = jnp.linspace(-1, 1, 512)
    return theta @ jnp.stack([xs, xs, jnp.ones(512)])


def embedded(table, ids):
    return jax.nn.one_hot(ids, len(table)) @ table


def masked_rows(mask, ids):
    return jax.nn.one_hot(ids, len(mask)) @ mask.astype(jnp.float32)


def attention(q, mask):
    scores = jnp.where(mask, q @ q.T, -1e9)
    return jax.nn.softmax(scores) @ q


def relative(w):
    places = jnp.arange(1000)
    far = jnp.clip(places[:, None] - places[None], -16, 16).astype(jnp.float32)
    return far @ w


def found(func, dtype, *args):
    report = mpx.explain(mpx.autocast(func, dtype))(*args)
    return [o for o in report.findings if "may round integers" in o.finding]


ROUNDED = {
    "counts": (counts, numbers(1000, 4, dtype=bool)),
    "prefix sums": (prefix_sums, numbers(2, 4), numbers(600, dtype=bool)),
    "positions": (positions_of(1000), IDS),
    "grid": (grid_of(512), THETA),
    "grid of NumPy": (grid_of(512, np), THETA),
    "loop": (counted_in_a_loop, numbers(16, 16), numbers(4, 16)),
    "of unknown range": (of_integers, numbers(16, 4), numbers(8, 16, dtype=jnp.int32)),
}
EXACT = {
    "counts": (counts, numbers(256, 4, dtype=bool)),
    "positions": (positions_of(256), IDS),
    "grid": (grid_of(128), THETA),
    "bytes": (of_integers, numbers(16, 4), numbers(8, 16, dtype=jnp.uint8)),
    "clipped": (relative, numbers(1000, 16)),
    "rows of a mask": (masked_rows, numbers(1000, 4, dtype=bool), IDS),
    "embedding": (embedded, numbers(1000, 16), IDS),
    "real grid": (normalized, THETA),
    "masked scores": (attention, numbers(300, 16), numbers(300, 300, dtype=bool)),
}


@pytest.mark.parametrize("case", ROUNDED)
def test_products_that_round_integers_are_found(case):
    func, *args = ROUNDED[case]
    (one,) = found(func, jnp.bfloat16, *args)
    assert one.primitive == "dot_general"
    assert one.finding == "may round integers: bfloat16 holds those up to 256"


@pytest.mark.parametrize("case", EXACT)
def test_products_of_integers_that_are_exact_are_not(case):
    func, *args = EXACT[case]
    assert not found(func, jnp.bfloat16, *args)


def test_float16_holds_integers_up_to_2048():
    assert not found(positions_of(2049), jnp.float16, IDS)
    assert found(positions_of(2050), jnp.float16, IDS)


def test_a_product_in_float32_rounds_none():
    rules = mpx.Rules(mpx.Rule(mpx.Precision.FULL, primitive="dot_general"))

    def both(ids, w):  # something is in half precision
        return positions_of(1000)(ids), jnp.sin(w.astype(jnp.bfloat16))

    report = mpx.explain(mpx.autocast(both, rules=rules))(IDS, numbers(4))
    assert not report.findings


def test_a_cast_by_hand_is_found_too():
    def by_hand(theta):
        grid = jnp.broadcast_to(jnp.arange(512), (3, 512)).astype(jnp.bfloat16)
        return theta.astype(jnp.bfloat16) @ grid

    (one,) = mpx.explain(by_hand)(THETA).findings
    assert "may round integers" in one.finding


def test_what_is_found_is_rounded():
    ids = jnp.array([255, 999])
    exact, rounded = (mpx.autocast(positions_of(n))(ids) for n in (256, 1000))
    assert exact[0, 0] == 255 and rounded[1, 0] != 999
