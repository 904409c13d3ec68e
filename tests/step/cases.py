"""A small problem and small helpers that the tests of gradients share."""

import jax
import jax.numpy as jnp
import numpy as np

import mpx

mean = mpx.force_full_precision(jnp.mean, jnp.float32)
total = mpx.force_full_precision(jnp.sum, jnp.float32)

FUNCTIONS = {
    "filter_grad": mpx.filter_grad,
    "filter_value_and_grad": mpx.filter_value_and_grad,
    "grad": mpx.grad,
    "value_and_grad": mpx.value_and_grad,
}

# (name of a policy or None for full precision, dtype the function computes in)
PRECISIONS = [
    (None, jnp.float32),
    ("params=float32,compute=bfloat16,output=float32", jnp.bfloat16),
    ("params=float32,compute=float16,output=float32", jnp.float16),
]
FLOAT16 = PRECISIONS[2][0]
BFLOAT16 = PRECISIONS[1][0]


def uniform(seed, *shape, low=0.5, high=1.5):
    """Numbers of one size and sign, whose gradients are not subnormal in float16."""
    values = np.random.default_rng(seed).uniform(low, high, shape)
    return jnp.asarray(values, jnp.float32)


def params(width=4, seed=0):
    """The weights of a perceptron."""
    return {
        "w1": uniform(seed, 3, width, low=0.1, high=0.3),
        "b1": uniform(seed + 1, width),
        "w2": uniform(seed + 2, width, 1),
    }


def batch(size=8, seed=10):
    """Inputs and targets."""
    return uniform(seed, size, 3), -uniform(seed + 1, size, 1)


def loss(params, x, y):
    """The mean squared error of the perceptron."""
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
    if jax.tree.structure(a) != jax.tree.structure(b):
        return False
    return all(
        np.asarray(x).dtype == np.asarray(y).dtype
        and np.asarray(x).shape == np.asarray(y).shape
        and np.asarray(x).tobytes() == np.asarray(y).tobytes()
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


def close(a, b, tolerance):
    """Raises unless each leaf of `a` is near that of `b`, relative to its norm."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        assert np.linalg.norm(x - y) <= tolerance * max(np.linalg.norm(y), 1e-30)


def dtypes(tree):
    """The dtypes of all leaves, as a set of names."""
    return {str(jnp.asarray(x).dtype) for x in jax.tree.leaves(tree)}
