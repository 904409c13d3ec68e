"""Products that are factored or inverted, whose rounding that magnifies, are found."""

import functools
import inspect

import jax
import jax.numpy as jnp
import jax.scipy.linalg as linalg
import pytest

import mpx

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
    def loss(w, x):
        return jnp.sum(func(w, x))

    lines = {
        f"test_factors.py:{start + i}"
        for source, start in map(inspect.getsourcelines, (gram, distances))
        for i, line in enumerate(source)
        if "# the matrix" in line
    }
    half = mpx.autocast(loss)
    mapped = jax.vmap(half, (None, 0))
    for one in half, jax.grad(half), lambda w, x: mapped(w, x[None]):
        findings = mpx.explain(one)(EYE, X).findings
        assert findings
        assert all("magnifies its rounding" in o.finding for o in findings)
        assert {o.source.split("/")[-1] for o in findings} <= lines


def centered(h):
    return h - jnp.mean(h, 1, keepdims=True)


def normalized(h):
    return centered(h) * jax.lax.rsqrt(jnp.var(h, 1, keepdims=True) + 1e-3)


SAFE = {
    "of a norm": lambda w, x: jnp.linalg.inv(normalized(x @ w) + EYE),
    "of a softmax": lambda w, x: jnp.linalg.inv(jax.nn.softmax(x @ w) + EYE),
    "a right side": lambda w, x: jnp.linalg.solve(w + EYE, x @ w),
    "of a product": lambda w, x: jnp.linalg.inv(
        jnp.dot(jnp.tanh(x @ w), w, precision="highest") + EYE
    ),
    "a network's": lambda w, x: jnp.linalg.inv(
        jnp.diag(jax.nn.softplus(jnp.ones((1, SIZE)) @ w)[0]) + EYE
    ),
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
