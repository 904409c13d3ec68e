"""Sums of XLA:CPU, without mpx: what bounds on errors elsewhere rest on.

docs/numerics.md, "On a CPU". XLA with its library of kernels, which is its default, and
without it, which has some versions add up in float32, too.
"""

import jax
import jax.numpy as jnp
import numpy as np

LIBRARY = "xla_cpu_experimental_ynn_fusion_type"
ADDS_UP_IN_BFLOAT16 = ("0.11.", "0.12.")


def error_of_a_gradient(options):
    """The error of a weight's gradient over 8192 tokens, in bfloat16."""
    keys = jax.random.split(jax.random.key(0))
    x = jax.random.normal(keys[0], (8, 1024, 64), jnp.bfloat16)
    g = jax.random.normal(keys[1], (8, 1024, 48), jnp.bfloat16)

    def gradient(x, g):
        (got,) = jax.vjp(lambda w: x @ w, jnp.zeros((64, 48), x.dtype))[1](g)
        return got

    got = np.asarray(jax.jit(gradient, compiler_options=options)(x, g), np.float64)
    x, g = (np.asarray(a, np.float64).reshape(8192, -1) for a in (x, g))
    return np.linalg.norm(got - x.T @ g) / np.linalg.norm(x.T @ g)


def test_products_add_up_in_float32_without_the_library():
    assert error_of_a_gradient({LIBRARY: ""}) <= 2e-3


def test_versions_whose_library_is_left_out():
    error = error_of_a_gradient(None)
    assert (error > 1e-2) == jax.__version__.startswith(ADDS_UP_IN_BFLOAT16), error
