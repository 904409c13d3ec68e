"""A small problem and small helpers that the tests of gradients share."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import mpx

from ..helpers import HALF, is_same_array

mean = mpx.force_full_precision(jnp.mean, jnp.float32)
total = mpx.force_full_precision(jnp.sum, jnp.float32)

FUNCTIONS = {
    "filter_grad": mpx.filter_grad,
    "filter_value_and_grad": mpx.filter_value_and_grad,
    "grad": mpx.grad,
    "value_and_grad": mpx.value_and_grad,
}

FLOAT16, BFLOAT16 = (f"params=float32,compute={x},output=float32" for x in HALF)


class Counter(eqx.Module):
    """A weight, and a state that Equinox hands on."""

    weight: jax.Array
    index: eqx.nn.StateIndex

    def __init__(self, weight=1.0):
        self.weight = jnp.asarray(weight)
        self.index = eqx.nn.StateIndex(jnp.zeros(()))


def uniform(seed, *shape, low=0.5, high=1.5):
    """Numbers of one size and sign, whose gradients are not subnormal in float16."""
    values = np.random.default_rng(seed).uniform(low, high, shape)
    return jnp.asarray(values, jnp.float32)


def params(width=4, seed=0):
    return {
        "w1": uniform(seed, 3, width, low=0.1, high=0.3),
        "b1": uniform(seed + 1, width),
        "w2": uniform(seed + 2, width, 1),
    }


def batch(size=8, seed=10):
    return uniform(seed, size, 3), -uniform(seed + 1, size, 1)


def loss(params, x, y):
    hidden = jnp.tanh(x @ params["w1"] + params["b1"][None])
    return mean((hidden @ params["w2"] - y) ** 2)


def gradient(policy, scaling, fun=loss, **options):
    """`mpx.filter_value_and_grad`; without a policy in full precision."""
    policy = mpx.get_policy(policy) if isinstance(policy, str) else policy
    return mpx.filter_value_and_grad(
        fun, scaling, use_mixed_precision=policy is not None, policy=policy, **options
    )


def control(fun, *args):
    """Value and gradient in full precision, by JAX alone."""
    return jax.value_and_grad(fun)(*args)


def same_bits(a, b):
    """Whether two trees agree in structure, dtypes, shapes and every bit."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=False)
    same_structure = jax.tree.structure(a) == jax.tree.structure(b)
    return same_structure and all(is_same_array(x, y) for x, y in pairs)


def close(a, b, tolerance):
    """Raises unless each leaf of `a` is near that of `b`, relative to its norm."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        assert np.linalg.norm(x - y) <= tolerance * max(np.linalg.norm(y), 1e-30)


def dtypes(tree):
    return {str(jnp.asarray(x).dtype) for x in jax.tree.leaves(tree)}
