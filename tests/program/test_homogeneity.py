"""Which programs are proportional to their last input."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from mpx._program import is_proportional

G = jnp.linspace(-2.0, 3.0, 6).reshape(2, 3)
# What a rule has saved.
H = 1.0 + jnp.arange(6.0).reshape(3, 2)


def _rounded(h, g):
    scale = jnp.max(jnp.abs(g)) / 127
    return jnp.round(g / scale) * scale


PROPORTIONAL = {
    "itself": lambda h, g: g,
    "reversed": lambda h, g: -0.5 * g,
    "nothing": lambda h, g: jnp.zeros_like(g),
    "matmul": lambda h, g: (g @ h) @ jnp.exp(h).T,
    "summed": lambda h, g: jnp.cumsum(g, 1).sum(0, keepdims=True) + g[:1],
    "masked": lambda h, g: jnp.where(h.T > 2, g, 0.0),
    "relu": lambda h, g: jax.nn.relu(g) - jnp.abs(g),
    "guided": lambda h, g: jnp.where(g > 0, g, 0),
    "weighted": lambda h, g: g * g / jnp.linalg.norm(g),
    "rounded": _rounded,
    "scattered": lambda h, g: jnp.zeros((4, 3)).at[jnp.array([0, 3])].add(g),
    "gathered": lambda h, g: g[jnp.argsort(h[:2, 0])],
    "sorted": lambda h, g: jnp.sort(g),
    "largest": lambda h, g: jax.lax.top_k(g, 1)[0],
    "scan": lambda h, g: lax.scan(lambda c, x: (c * 0.5 + x, c), g[0], g),
    "solve": lambda h, g: jnp.linalg.solve(jnp.eye(3) * h[0, 0], g.T),
    "while": lambda h, g: lax.fori_loop(
        0, h.shape[0] + jnp.int32(h[0, 0]), lambda i, c: c * 2, g
    ),
    "sign": lambda h, g: lax.cond(jnp.sum(g) > 0, lambda: g, lambda: 2 * g),
    "remat": lambda h, g: jax.checkpoint(lambda g: 2 * g)(g),
    "cast": lambda h, g: g.astype(jnp.float16).astype(jnp.float32),
    "fft": lambda h, g: jnp.fft.ifft(jnp.fft.fft(g)).real,
    "vjp": lambda h, g: jax.vjp(lambda h: jnp.sin(h.T) ** 3, h)[1](g),
    "padded": lambda h, g: jnp.pad(g, 1),
}
OTHERS = {
    "clip": lambda h, g: jnp.clip(g, -1, 1),
    "ones": lambda h, g: jnp.ones_like(g),
    "loss": lambda h, g: g + 1,
    "norm": lambda h, g: g * jnp.minimum(1, 1 / jnp.linalg.norm(g)),
    "eps": lambda h, g: g / jnp.sqrt(jnp.sum(g**2) + 1e-6),
    "unit": lambda h, g: g / jnp.linalg.norm(g),
    "signs": lambda h, g: jnp.sign(g),
    "square": lambda h, g: g**2,
    "tanh": lambda h, g: jnp.tanh(g),
    "finite": lambda h, g: jnp.where(jnp.isfinite(g), g, 0),
    "nan": lambda h, g: jnp.where(jnp.isnan(g), 0, g),
    "replaced": lambda h, g: jnp.nan_to_num(g),
    # The smaller of two proportional numbers is one, but may hide an infinity.
    "quantile": lambda h, g: jnp.minimum(g, jnp.quantile(g, 0.9)),
    "large": lambda h, g: jnp.where(jnp.abs(g) > 1, g, 0),
    "loop": lambda h, g: jax.lax.scan(lambda c, x: (c + x, c), 1.0, g[0]),
    "until": lambda h, g: lax.while_loop(lambda c: jnp.max(c) > 1, lambda c: c / 2, g),
    "size": lambda h, g: lax.cond(jnp.sum(g) > 1, lambda: g, lambda: 2 * g),
    "integers": lambda h, g: g.astype(jnp.int32).astype(jnp.float32),
    "vjp": lambda h, g: jax.vjp(lambda h: jnp.sin(h.T) ** 3, h)[1](jnp.clip(g, 0, 1)),
}


def _is_proportional(function):
    return is_proportional(jax.make_jaxpr(function)(H, G), 1)


@pytest.mark.parametrize("name", PROPORTIONAL)
def test_what_is_proportional_is_known_so_and_is(name):
    function = PROPORTIONAL[name]
    assert _is_proportional(function)
    # The claim itself: a power of two changes nothing else.
    results = function(H, 8 * G), function(H, G)
    for one, other in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(one, 8 * other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_not_proportional_is_not_taken_for_it(name):
    assert not _is_proportional(OTHERS[name])


def test_kernels_are_taken_to_be_linear_and_callbacks():
    def callback(g):
        return jax.pure_callback(np.asarray, jax.ShapeDtypeStruct((2, 3), g.dtype), g)

    assert _is_proportional(lambda h, g: callback(g))
    assert not _is_proportional(lambda h, g: jnp.clip(callback(g), 0, 1))
    assert not _is_proportional(lambda h, g: callback(g + 1))
