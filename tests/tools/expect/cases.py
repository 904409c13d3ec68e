"""A step, and small helpers, that the tests of contracts share."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import mpx

BF16, F32 = jnp.bfloat16, jnp.float32
HALF = ("float16", "bfloat16")


def mesh_of_eight():
    return Mesh(np.array(jax.devices()), ("d",))


def shaped(*shape, dtype=F32):
    return jax.ShapeDtypeStruct(shape, dtype)


def broken(program, *args, **claims):
    with pytest.raises(mpx.reports.ContractError) as caught:
        mpx.expect(program, *args, **claims)
    return caught.value.violations, str(caught.value)


def model(w, x):
    """A body in bfloat16, three scanned layers, and a float32 head."""
    with jax.named_scope("body"):
        h = jnp.tanh(x.astype(BF16) @ w["in"].astype(BF16))

    def layer(h, u):
        with jax.named_scope("layer"):
            return jnp.tanh(h @ u.astype(BF16)), None

    h, _ = jax.lax.scan(layer, h, w["layers"])
    with jax.named_scope("head"):
        return jnp.sum((h.astype(F32) @ w["out"]) ** 2)


@jax.jit
def train(w, x):
    return jax.tree.map(lambda w, g: w - g, w, jax.grad(model)(w, x))


WEIGHTS = {"in": shaped(8, 16), "layers": shaped(3, 16, 16), "out": shaped(16, 4)}
DATA = shaped(32, 8)
# 2mnk a product: the first layer has two (its input has no gradient), others three.
BODY = 2 * (2 * 32 * 8 * 16) + 3 * 3 * (2 * 32 * 16 * 16)
HEAD = 3 * (2 * 32 * 16 * 4)
