"""What tests of Pallas kernels share: numbers, meshes, programs, lowering for a B200.

Kernels are interpreted on the CPU, and lowered for CUDA; no GPU has run them.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

import mpx
from mpx._program.equations import equations

filter_deprecation = pytest.mark.filterwarnings(
    "ignore:The Pallas Triton backend is deprecated:DeprecationWarning"
)

# JAX lowers a kernel for the device of the mesh, if the machine has none (0.11 on).
B200 = AbstractMesh((), (), abstract_device=AbstractDevice("NVIDIA B200", None, "gpu"))


def lowered_for_b200(f, *args):
    with jax.sharding.use_abstract_mesh(B200):
        return jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",))


def lowered(f, *args):
    return lowered_for_b200(f, *args).as_text()


@functools.partial(jax.jit, static_argnums=(0, 1))
def wild(shape, dtype=jnp.float32):
    """Numbers of all magnitudes, zeros, an infinity and a NaN."""
    keys = jax.random.split(jax.random.key(0))
    size = jnp.exp(20 * jax.random.normal(keys[0], shape))
    x = (jax.random.normal(keys[1], shape) * size).astype(dtype)
    # The quantizer flushes what is subnormal; a device that casts does not.
    x = jnp.where(jnp.abs(x) < 2.0**-126, 0, x)
    x = x.at[..., 3, 5].set(jnp.inf).at[..., 33, 40].set(jnp.nan)
    return x.at[..., 32:64, 64:].set(0)


def two_axes():
    return jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)


def mesh_of_b200s():
    """Eight of them, to lower `shard_map` for."""
    axes, device = (AxisType.Auto,) * 2, B200.abstract_device
    return AbstractMesh((4, 2), ("a", "b"), axis_types=axes, abstract_device=device)


def dtypes_of_maxima(f, *args):
    """Of what the kernels of a function take maxima."""
    static = tuple(i for i, x in enumerate(args) if not hasattr(x, "shape"))
    jaxpr = jax.make_jaxpr(f, static_argnums=static)(*args)
    calls = [e for e in equations(jaxpr) if e.primitive.name == "pallas_call"]
    assert calls
    return [
        np.dtype(equation.invars[0].aval.dtype)
        for call in calls
        for equation in equations(call.params["jaxpr"])
        if equation.primitive.name == "reduce_max"
    ]


# --- A program under a recipe ---------------------------------------------------------

ALL_LOW = mpx.Rules(mpx.Rule(mpx.Precision.LOW, primitive="dot_general"))


def loss(params, x):
    """Two linear layers, the first with a weight that the program rounds."""
    h = jax.nn.relu(x @ params["up"].astype(x.dtype))
    return jnp.mean((h.astype(jnp.float32) @ params["down"]) ** 2)


def operands(width=96):
    keys = jax.random.split(jax.random.key(1), 3)
    params = {
        "up": jax.random.normal(keys[0], (64, width)),
        "down": jax.random.normal(keys[1], (width, 32)),
    }
    return params, jax.random.normal(keys[2], (128, 64), jnp.bfloat16)


def step(recipe):
    """Its gradient, of which each product is quantized."""
    return jax.value_and_grad(
        mpx.autocast(loss, recipe=recipe, rules=ALL_LOW, target="B200")
    )


def under_scan_vmap_and_remat(recipe):
    """Gradients by all three; lowered for a B200, and run here."""
    params, x = operands()

    def total(params, batches):
        one = jax.checkpoint(lambda x: loss(params, x))
        return jnp.mean(jax.vmap(one)(batches)) + jax.lax.map(one, batches).sum()

    batches = jnp.stack([x, 2 * x])
    gradient = jax.grad(
        mpx.autocast(total, recipe=recipe, rules=ALL_LOW, target="B200")
    )
    lowered(gradient, params, batches)
    return jax.jit(gradient)(params, batches)
