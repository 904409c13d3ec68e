"""What recomputing islands changes where gradients of several uses meet: the order.

The programs are drawn at random: products, norms, activations, sums and products of
values that were made before.
"""

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpx

from .counting import relative_error

WIDTH, STEPS = 16, 10
ONE = {
    "softmax": jax.nn.softmax,
    "gelu": jax.nn.gelu,
    "tanh": jnp.tanh,
    "softplus": jax.nn.softplus,
    "rms": lambda x: x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6),
    "bell": lambda x: jnp.exp(-jnp.square(x)),
}
TWO = {"add": jnp.add, "subtract": lambda a, b: a - b / 2, "multiply": jnp.multiply}


def program(seed):
    draw = random.Random(seed)
    steps = [
        (draw.choice(["product", *TWO, *draw.sample(list(ONE), 3)]),)
        + (draw.randrange(i + 1), draw.randrange(i + 1))
        for i in range(STEPS)
    ]

    def loss(w, x):
        values = [x]
        for number, (name, i, j) in enumerate(steps):
            if name == "product":
                values.append(values[i] @ w[number])
            elif name in ONE:
                values.append(ONE[name](values[i]))
            else:
                values.append(TWO[name](values[i], values[j]))
        return sum(jnp.mean((v - goal) ** 2) for v in values[-3:])

    normal = np.random.default_rng(seed).standard_normal
    goal = jnp.asarray(normal((8, WIDTH), np.float32))
    w = jnp.asarray(normal((STEPS, WIDTH, WIDTH), np.float32) / 4)
    return loss, w, jnp.asarray(normal((8, WIDTH), np.float32))


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(s, marks=pytest.mark.slow) for s in range(1, 5))]
)
def test_values_are_the_same_and_gradients_as_near_to_float32(seed):
    loss, w, x = program(seed)
    exact = jax.jit(jax.grad(loss, (0, 1)))(w, x)
    small, fast = (
        jax.value_and_grad(mpx.autocast(loss, residuals=r), (0, 1))(w, x)
        for r in ("small", "fast")
    )
    assert small[0] == fast[0]  # bit for bit
    assert relative_error(small[1], fast[1]) < 1e-2
    errors = [relative_error(gradient, exact) for _, gradient in (small, fast)]
    assert errors[0] < 1.3 * errors[1] + 1e-4
    assert np.isfinite(errors).all()
