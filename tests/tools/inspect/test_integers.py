"""Products in half precision that round integers, or are factored, are found."""

import functools
import inspect

import jax
import jax.numpy as jnp
import jax.scipy.linalg as linalg
import numpy as np
import pytest

import mpx

IDS = jax.ShapeDtypeStruct((8,), jnp.int32)
THETA = jax.ShapeDtypeStruct((2, 3), jnp.float32)
TABLE = jax.ShapeDtypeStruct((1000, 16), jnp.float32)


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
    "embedding": (lambda t, ids: jax.nn.one_hot(ids, len(t)) @ t, TABLE, IDS),
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


def test_float16_holds_integers_up_to_2048_and_float32_rounds_none():
    assert not found(positions_of(2049), jnp.float16, IDS)
    assert found(positions_of(2050), jnp.float16, IDS)
    rules = mpx.Rules(mpx.Rule(mpx.Precision.FULL, primitive="dot_general"))

    def both(ids, w):  # something is in half precision
        return positions_of(1000)(ids), jnp.sin(w.astype(jnp.bfloat16))

    report = mpx.explain(mpx.autocast(both, rules=rules))(IDS, numbers(4))
    assert not report.findings


def test_a_cast_by_hand_that_rounds_integers_is_found_too():
    def by_hand(theta):
        grid = jnp.broadcast_to(jnp.arange(512), (3, 512)).astype(jnp.bfloat16)
        return theta.astype(jnp.bfloat16) @ grid

    (one,) = mpx.explain(by_hand)(THETA).findings
    assert "may round integers" in one.finding
    # What is found is rounded.
    ids = jnp.array([255, 999])
    exact, rounded = (mpx.autocast(positions_of(n))(ids) for n in (256, 1000))
    assert exact[0, 0] == 255 and rounded[1, 0] != 999


SIZE = 8
EYE = jnp.eye(SIZE)
X = jax.random.normal(jax.random.key(0), (SIZE, SIZE))


def gram(w, x):
    h = jnp.tanh(x @ w)
    return h @ h.T  # the matrix


def distances(w, x):
    h = jnp.tanh(x @ w)
    squares = jnp.sum(h * h, 1)
    return squares[:, None] + squares[None] - 2 * (h @ h.T)  # the matrix


def in_a_scan(w, x):
    def body(c, _):
        return jnp.linalg.cholesky(gram(c, x) + EYE), None

    return jax.lax.scan(body, w, length=2)[0]


def with_jitter(w, x):
    k = gram(w, x)
    k = k + 1e-3 * jnp.trace(k) * EYE
    i = jnp.arange(SIZE)
    return jnp.linalg.cholesky(k.at[i, i].add(1e-3))


FED = {
    "solve": lambda w, x: jnp.linalg.solve(2 * gram(w, x).T / 3 + EYE, x),
    "inv": lambda w, x: jax.jit(jnp.linalg.inv)(gram(w, x) + EYE),
    "slogdet": lambda w, x: jnp.linalg.slogdet(gram(w, x) + EYE)[1],
    "cho_solve": lambda w, x: linalg.cho_solve(linalg.cho_factor(gram(w, x) + EYE), x),
    "eigh": lambda w, x: jnp.linalg.eigh(gram(w, x))[0],
    "svd": lambda w, x: jnp.linalg.svd(gram(w, x)[None])[1],
    "qr": lambda w, x: jnp.linalg.qr(gram(w, x).reshape(4, 2, 8).reshape(8, 8))[1],
    "triangular": lambda w, x: linalg.solve_triangular(jnp.tril(gram(w, x)), x),
    "of distances": lambda w, x: jnp.linalg.cholesky(jnp.exp(-distances(w, x)) + EYE),
    "jitter": with_jitter,
    "scan": in_a_scan,
}


@pytest.mark.parametrize("func", FED.values(), ids=FED)
def test_a_product_that_is_factored_is_found_with_its_line(func):
    places = {
        f"test_integers.py:{start + i}"
        for source, start in map(inspect.getsourcelines, (gram, distances))
        for i, line in enumerate(source)
        if "# the matrix" in line
    }
    half = mpx.autocast(lambda w, x: jnp.sum(func(w, x)))
    mapped = jax.vmap(half, (None, 0))
    for one in half, jax.grad(half), lambda w, x: mapped(w, x[None]):
        findings = mpx.explain(one)(EYE, X).findings
        assert findings
        assert all("magnifies its rounding" in o.finding for o in findings)
        assert {o.source.split("/")[-1] for o in findings} <= places


def standardized(h):
    h = h - jnp.mean(h, 1, keepdims=True)
    return h * jax.lax.rsqrt(jnp.var(h, 1, keepdims=True) + 1e-3)


def exactly(w, x):
    return jnp.dot(jnp.tanh(x @ w), w, precision="highest")


def diagonal(w):
    return jnp.diag(jax.nn.softplus(jnp.ones((1, SIZE)) @ w)[0])


SAFE = {
    "of a norm": lambda w, x: jnp.linalg.inv(standardized(x @ w) + EYE),
    "of a softmax": lambda w, x: jnp.linalg.inv(jax.nn.softmax(x @ w) + EYE),
    "a right side": lambda w, x: jnp.linalg.solve(w + EYE, x @ w),
    "of a product": lambda w, x: jnp.linalg.inv(exactly(w, x) + EYE),
    "a network's": lambda w, x: jnp.linalg.inv(diagonal(w) + EYE),
    "a weight": lambda w, x: x @ jnp.linalg.inv(w),
}


@pytest.mark.parametrize("func", SAFE.values(), ids=SAFE)
def test_a_product_that_is_no_matrix_of_a_factorization_is_not(func):
    half = mpx.autocast(lambda w, x: jnp.sum(func(w, x)))
    assert not mpx.explain(jax.grad(half))(EYE, X).findings


def likelihood(w, x, y, precision=None):
    """A Gaussian process whose kernel is nearly singular."""
    h = x * w[None]
    kernel = jnp.dot(h, h.T, precision=precision) / 16
    factor = jnp.linalg.cholesky(kernel + 2e-3 * jnp.eye(32))
    return jnp.sum(linalg.solve_triangular(factor, y, lower=True) ** 2)


def test_what_the_finding_says_helps():
    keys = jax.random.split(jax.random.key(0), 3)
    w, x = jax.random.uniform(keys[0], (16,)), jax.random.normal(keys[1], (32, 16))
    y = jax.random.normal(keys[2], (32, 1))
    exact = jax.jit(jax.grad(likelihood))(w, x, y)

    def error_and_findings(rules=None, precision=None):
        func = functools.partial(likelihood, precision=precision)
        func = mpx.autocast(func, rules=rules, weights=0)
        found = jax.jit(jax.grad(func))(w, x, y)
        error = jnp.linalg.norm(found - exact) / jnp.linalg.norm(exact)
        return error, mpx.explain(func)(w, x, y).findings

    error, (finding,) = error_and_findings()
    assert not error < 0.05
    assert finding.finding.startswith("feeds cholesky, which magnifies its rounding")
    rule = mpx.Rule(mpx.Precision.FULL, primitive="dot_general")
    for options in {"rules": mpx.Rules(rule)}, {"precision": "highest"}:
        error, findings = error_and_findings(**options)
        assert error < 1e-3 and not findings
