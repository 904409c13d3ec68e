"""A product in pieces on eight devices is the product on one."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import mpx
from tests.collectives import partitioned
from tests.helpers import slow_but
from tests.quantize.linear_cases import (
    linear_product,
    matrix_product,
    result_and_gradients,
)

# Every piece has another amax, and a whole number of blocks.
X, W, G = (
    np.random.default_rng(seed).standard_normal(shape, np.float32)
    for seed, shape in enumerate(((256, 32), (32, 64), (256, 64)))
)
X *= np.arange(1, 257, dtype=np.float32)[:, None]
G *= np.arange(256, 0, -1, dtype=np.float32)[:, None]
RECIPES = {
    "current": mpx.Float8CurrentScaling(),
    "delayed": mpx.DelayedScaling(),
    "nvfp4": mpx.NVFP4BlockScaling(disable_stochastic_rounding=True),
}


def scales_of(recipe: mpx.quantization.AbstractRecipe) -> jax.Array | None:
    return jnp.zeros(3) if isinstance(recipe, mpx.DelayedScaling) else None


def assert_same(found, alone) -> None:
    for one, other in zip(found, alone, strict=True):
        if other is not None:
            # Sums over devices are in another order.
            atol = 1e-6 * float(np.abs(other).max())
            np.testing.assert_allclose(one, other, rtol=0, atol=atol)


def mesh_of(shape, kind=AxisType.Auto):
    names = ("data", "model")[: len(shape)]
    return jax.make_mesh(shape, names, axis_types=(kind,) * len(shape))


@pytest.mark.parametrize(
    ("recipe_name", "check_vma"),
    [
        ("delayed", False),
        pytest.param("current", True, marks=pytest.mark.slow),
        pytest.param("delayed", True, marks=pytest.mark.slow),
        pytest.param("nvfp4", False, marks=pytest.mark.slow),
    ],
)
def test_shard_map(recipe_name: str, check_vma: bool):
    recipe = RECIPES[recipe_name]
    mesh = mesh_of((4, 2))
    scales = scales_of(recipe)
    product = matrix_product(
        recipe, manual_axes=("data", "model"), sums_over_devices=not check_vma
    )

    def loss(x, w, scales, g):
        """Its gradient by the result is g: one device's share where all add up."""
        y = linear_product(product, x, w, scales)
        return lax.psum((y * g).sum(), ("data", "model")), y

    specs = (P("data"), P(None, "model"), P(), P("data", "model"))
    out = P(), P("data", "model")
    run = jax.shard_map(
        loss, mesh=mesh, in_specs=specs, out_specs=out, check_vma=check_vma
    )
    args = (0, 1) if scales is None else (0, 1, 2)
    step = jax.jit(jax.value_and_grad(run, argnums=args, has_aux=True))
    (_, y), gradients = step(X, W, scales, G)
    plain = dataclasses.replace(product, manual_axes=(), sums_over_devices=False)
    alone = result_and_gradients(plain, X, W, G, scales)
    assert_same((y, *gradients), alone[: 1 + len(gradients)])
    if scales is not None:
        exact = [np.abs(array).max() for array in (X, W, G)]
        np.testing.assert_array_equal(gradients[2], exact)


NVFP4 = mpx.NVFP4BlockScaling()


@pytest.mark.parametrize(
    "recipe", slow_but([RECIPES["current"]], [RECIPES["current"], NVFP4])
)
def test_jit_over_a_mesh(recipe: mpx.quantization.AbstractRecipe):
    rows, whole = (NamedSharding(mesh_of((8,)), spec) for spec in (P("data"), P()))
    product, scales = matrix_product(recipe), scales_of(recipe)
    alone = result_and_gradients(product, X, W, G, scales)
    placed = jax.device_put((X, W, G), (rows, whole, rows))
    found = result_and_gradients(product, *placed, scales)
    assert found[0].sharding.spec[0] == "data"
    assert_same(found, alone)


@pytest.mark.parametrize("recipe_name", slow_but(["delayed"], RECIPES))
def test_explicit_axes(recipe_name: str):
    """Types say where arrays are; gradients are where their primals are."""
    recipe = RECIPES[recipe_name]
    mesh = mesh_of((4, 2), AxisType.Explicit)
    product, scales = matrix_product(recipe), scales_of(recipe)
    alone = result_and_gradients(product, X, W, G, scales)
    specs = P("data"), P(None, "model"), P("data", "model")
    with jax.set_mesh(mesh):
        placed = jax.device_put((X, W, G), specs)
        found = result_and_gradients(product, *placed, scales)
    specs = [P("data", "model"), P("data", None), P(None, "model")]
    assert [jax.typeof(one).sharding.spec for one in found[:3]] == specs
    assert_same(found, alone)


ALL = RECIPES | {
    "float8 blocks": mpx.Float8BlockScaling(),
    "mxfp8": mpx.MXFP8BlockScaling(),
    "nvfp4": NVFP4,
}
BOTH = P(("data", "model"))
LAYOUTS = {  # of rows, and of two weights
    "data parallel": (BOTH, P(), P()),
    "tensor parallel": (P("data"), P(None, "model"), P("model")),
    "fully sharded": (BOTH, BOTH, BOTH),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("recipe_name", slow_but(["nvfp4"], ALL))
def test_no_device_gathers_activations_or_their_gradients(recipe_name, layout):
    """Only weights travel, which are smaller here than what the rows make."""
    mesh, shapes = mesh_of((4, 2)), ((8, 256, 128), (128, 256), (256, 128), (128, 8))
    x, *w = (
        jax.ShapeDtypeStruct(shape, "float32", sharding=NamedSharding(mesh, spec))
        for shape, spec in zip(shapes, (*LAYOUTS[layout], P()), strict=True)
    )

    def loss(w, x):
        return jnp.mean((jnp.tanh(x @ w[0]) @ w[1] @ w[2]) ** 2)

    half = mpx.autocast(loss, recipe=ALL[recipe_name])
    scaling = mpx.init_scaling(half, w, x)
    options = {"devices": 8, "out_shardings": [one.sharding for one in w]}
    step = lambda s, w, x: mpx.grad(half, s)(w, x).grads  # noqa: E731
    sent = partitioned(step, scaling, w, x, **options)
    moved = [m for m in sent if m.kind != "all-reduce"]
    assert max((m.bytes for m in moved), default=0) <= 4 * 256 * 128
    assert bool(moved) is (layout == "fully sharded")
