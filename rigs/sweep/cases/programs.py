"""Loops, transforms, and second derivatives around functions of JAX."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from rigs.sweep.cases.table import Table

_LAX = Table("lax", lax)
_call = _LAX.call
_RANGE = np.arange(16, dtype="f4")[:, None]


def _scan(step):
    return lambda a: lax.scan(step, a[0], a[1:])


_call("scan", _scan(lambda s, x: (0.99 * s + 0.01 * x,) * 2), "plain cancelling ties")
_call("scan", _scan(lambda s, x: (s + x,) * 2), "plain cancelling", variant="sum")
_call(
    "scan",
    _scan(lambda s, x: (s + jax.nn.sigmoid(x + 6) * (x - s),) * 2),
    "plain near",
    variant="gate",
)
_call("scan", _scan(lambda s, x: (s * 0.9 + x, None)), "long", variant="carry")
_call(
    "scan",
    lambda a: lax.scan(lambda s, i: (s, jnp.tanh(a[i])), 0, jnp.zeros(4096, int))[1],
    "reads",
    variant="reads",
)
_call(
    "scan",
    lambda a: lax.scan(lambda s, _: (s, s * a[0]), jnp.float32(1), None, 4096)[1],
    "reads",
    variant="constant",
)
_call(
    "scan",
    lambda a, b: lax.scan(
        lambda s, x: ((n := jnp.tanh(s @ b[:16] / 8 + x)), n), a[0], a
    ),
    "plain near",
    arity=2,
    variant="product",
)
_call(
    "while_loop",
    lambda a: lax.while_loop(
        lambda s: jnp.max(jnp.abs(s[0])) > 0.5,
        lambda s: (s[0] * 0.97, s[1] + 1),
        (a, 0),
    ),
    "plain near",
)
_call(
    "while_loop",
    lambda a: lax.while_loop(
        lambda s: s[1] < 5, lambda s: (s[0] + 0.001, s[1] + 1), (a, 0)
    ),
    "cancelling",
)
_call(
    "fori_loop",
    lambda a: lax.fori_loop(0, 64, lambda i, s: s + 1e-3 * jnp.tanh(s), a) - a,
    "plain near",
)
_call(
    "fori_loop",
    lambda a: lax.fori_loop(0, 8, lambda i, s: s * 0.999 + a, a),
    "cancelling plain",
)
_call(
    "fori_loop",
    lambda a: lax.fori_loop(0, 64, lambda i, s: s + a[i], a[0]),
    "cancelling",
    variant="index",
)
_call("map", lambda a: lax.map(jnp.var, a), "cancelling plain")
_call(
    "associative_scan", lambda a: lax.associative_scan(jnp.add, a), "plain cancelling"
)
_call("associative_scan", lambda a: lax.associative_scan(jnp.multiply, a), "near")
_call(
    "associative_scan",
    lambda a, b: lax.associative_scan(
        lambda s, t: (s[0] * t[0], s[1] * t[0] + t[1]), (jax.nn.sigmoid(a + 3), b)
    )[1],
    "plain near",
    arity=2,
    variant="decay",
)
_call(
    "cond", lambda a: lax.cond(a[0, 0] > -10, jnp.var, jnp.sum, a), "cancelling plain"
)
_call("switch", lambda a: lax.switch(1, [jnp.sum, jnp.var], a), "cancelling plain")
_call(
    "cond",
    lambda a: jax.vmap(lambda r: lax.cond(r[0] > 100, jnp.var, jnp.mean, r))(a),
    "cancelling",
    variant="vmap",
)
_call(
    "custom_root",
    lambda a: lax.custom_root(
        lambda s: s**3 - a,
        jnp.ones_like(a),
        lambda f, s: lax.fori_loop(0, 20, lambda i, s: s - f(s) / (3 * s * s), s),
        lambda g, y: y / g(jnp.ones_like(y)),
    ),
    "plain near",
    domain="positive",
)
_call(
    "custom_linear_solve",
    lambda a, b: lax.custom_linear_solve(
        lambda s: a * s, b, lambda f, y: y / a, symmetric=True
    ),
    "plain near",
    arity=2,
    domain="positive",
)

for _name in ("psum", "pmean", "pmax", "pmin", "all_gather"):
    _call(
        _name,
        functools.partial(
            lambda f, a: jax.vmap(lambda r: f(r, "rows"), axis_name="rows")(a),
            getattr(lax, _name),
        ),
        "cancelling plain",
    )
_call(
    "all_to_all",
    lambda a: jax.vmap(lambda r: lax.all_to_all(r, "rows", 0, 0), axis_name="rows")(
        a[:16]
    ),
    "integers",
)

_JAX = Table("transforms", jax)
_call = _JAX.call
_call("vmap", lambda a: jax.vmap(jax.nn.standardize)(a), "cancelling plain")
_call("vmap", lambda a: jax.vmap(lambda r: r[jnp.zeros(600, int)])(a.T).T, "reads")
_call(
    "checkpoint",
    lambda a: jax.checkpoint(lambda s: jnp.var(s, -1))(a),
    "cancelling plain",
)
_call(
    "checkpoint",
    lambda a: jax.checkpoint(lambda s: jax.nn.softmax(s, -1) - s)(a),
    "cancelling plain",
)
_call("jit", lambda a: jax.jit(lambda s: s - jnp.mean(s))(a), "cancelling plain")
_call(
    "grad",
    lambda a: jax.grad(lambda s: jnp.sum(jax.nn.logsumexp(s, -1)))(a),
    "cancelling plain",
)
_call(
    "jvp",
    lambda a, b: jax.jvp(lambda s: jax.nn.softmax(s, -1), (a,), (b,)),
    "plain cancelling",
    arity=2,
)
_call(
    "vjp",
    lambda a, b: jax.vjp(lambda s: jax.nn.softmax(s, -1), a)[1](b),
    "plain cancelling",
    arity=2,
)
_call("linearize", lambda a, b: jax.linearize(jnp.tanh, a)[1](b), "plain", arity=2)
_call("jacfwd", lambda a: jax.vmap(jax.jacfwd(jax.nn.softmax))(a[:8]), "plain near")
_call("jacrev", lambda a: jax.vmap(jax.jacrev(jax.nn.softmax))(a[:8]), "plain near")
_call("hessian", lambda a: jax.vmap(jax.hessian(jax.nn.logsumexp))(a[:8]), "plain near")


def _grad_of_sum(f, a, **options):
    return jax.grad(lambda s: jnp.sum(f(s, **options)))(a)


def _grad_of_last(f, a):
    return jax.grad(lambda s: jnp.sum(f(s) * jnp.arange(16.0)))(a)


_SECOND = {
    "real": "sin cos tanh exp square arctan arcsinh cbrt sinh cosh",
    "positive": "log sqrt reciprocal log1p",
    "open": "arcsin arctanh",
}
_NUMPY, _NN = Table("transforms", jnp), Table("transforms", jax.nn)
_OF = "grad_of_{}"
for _domain, _names in _SECOND.items():
    _NUMPY.each(_names, _grad_of_sum, "plain near", _OF, domain=_domain)
_over_rows = functools.partial(_grad_of_sum, axis=-1)
_NUMPY.each("var std max median", _over_rows, "plain cancelling", _OF)
_NUMPY.each("prod", _over_rows, "near", _OF)
_ACTIVATIONS = "softplus silu gelu sigmoid log_sigmoid mish elu selu squareplus"
_NN.each(_ACTIVATIONS, _grad_of_sum, "plain near", _OF)
_NN.each("softmax log_softmax standardize", _grad_of_last, "plain cancelling", _OF)

# Programs from public bug reports, whose causes the rule of autocast removes.
_PROGRAM = Table("programs", jax)
_call = _PROGRAM.call


def _average(a):
    h = jnp.tanh(a)
    mean = h[0]
    for i in range(1, 32):
        mean = 0.999 * mean + 0.001 * h[i]
    return (mean - h[0]) * 100


def _euler(a):
    state = a
    for _ in range(40):
        state = state - 1e-3 * jax.nn.relu(state)
    return 40 * (state - a)


def _advantages(a):
    v = 30 + a
    deltas = 0.3 + 0.99 * v[1:] - v[:-1]
    return lax.scan(
        lambda s, d: (d + 0.94 * s,) * 2, deltas[0] * 0, deltas, reverse=True
    )[1]


_call("decay_constant", _average, "plain near")
_call("small_steps", _euler, "plain near")
_call("advantages", _advantages, "plain near")
_call("two_terms", lambda a, b: (0.99 * a - b) ** 2, "cancelling", arity=2)
_call("rope", lambda a: jnp.cos(a[:, :1] @ jnp.exp(-_RANGE[:8].T)), "integers")
_call("gate_near_one", lambda a, b: (1 - jax.nn.sigmoid(a + 6)) * b, "plain", arity=2)
_call("ratio_of_large", lambda a, b: a / (400 + 50 * b), "plain", arity=2)
_call(
    "softmax_of_difference",
    lambda a, b: jax.nn.softmax(a - b, -1),
    "cancelling",
    arity=2,
)
_call(
    "distance",
    lambda a, b: jnp.sqrt(jnp.sum((a - b) ** 2, -1) + 1e-6),
    "cancelling plain",
    arity=2,
)
_call("route", lambda a: jnp.argmax(jax.nn.sigmoid(a + 6), -1), "plain")

CASES = [*_LAX.cases, *_JAX.cases, *_NUMPY.cases, *_NN.cases, *_PROGRAM.cases]
