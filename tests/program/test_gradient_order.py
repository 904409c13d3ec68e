"""Gradients of filters in their own layout, those of a head's weight in time."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import mpx

CURRENT = mpx.Float8CurrentScaling()


def convolved(filters: Any, images: Any) -> Any:
    window = jax.lax.conv_general_dilated(
        images, filters, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    return jnp.mean(jnp.square(window.astype(jnp.float32)))


@functools.cache
def arrays() -> tuple[Any, Any]:
    normal = np.random.default_rng(0).standard_normal
    shapes = (3, 3, 4, 8), (8, 6, 6, 4)
    filters, images = (np.float32(normal(shape)) for shape in shapes)
    return filters, images


def barriers(function: Any, *args: Any) -> list[str]:
    """The lines of its program for CUDA that have a barrier."""
    text = jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    return [line for line in text.splitlines() if "optimization_barrier" in line]


def flattened(function: Any, *args: Any) -> int:
    """How many barriers are on flat filters."""
    return sum("tensor<288xbf16>" in line for line in barriers(function, *args))


def gradient(target: str, **options: Any) -> Any:
    return jax.grad(mpx.autocast(convolved, jnp.bfloat16, target=target, **options))


@pytest.mark.parametrize(
    ("target", "count"), [("H100", 1), ("B200", 1), ("cpu", 0), ("tpu v5e", 0)]
)
def test_the_gradient_of_a_filter_is_flat_behind_a_barrier_on_gpus(target, count):
    assert flattened(gradient(target), *arrays()) == count


def test_a_recipe_does_the_same():
    assert flattened(gradient("H100", recipe=CURRENT), *arrays()) == 1


def test_values_are_those_of_another_device():
    found, expected = (gradient(one)(*arrays()) for one in ("H100", "tpu v5e"))
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("transform", [jax.jacfwd, jax.hessian])
def test_derivatives_of_any_kind_have_the_same_values(transform):
    filters, images = arrays()
    filters, images = filters[:1, :1, :2, :2], images[..., :2]
    found, expected = (
        transform(mpx.autocast(convolved, jnp.bfloat16, target=one))(filters, images)
        for one in ("H100", "tpu v5e")
    )
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_a_batch_of_filters_has_the_same_values():
    filters, images = arrays()
    found, expected = (
        jax.vmap(gradient(one), (0, None))(jnp.stack([filters, filters]), images)
        for one in ("H100", "tpu v5e")
    )
    np.testing.assert_array_equal(found, expected)


def test_filters_that_are_computed_are_left_alone():
    def standardized(filters: Any, images: Any) -> Any:
        mean = jnp.mean(filters, (0, 1, 2), keepdims=True)
        return convolved(filters - mean, images)

    run = jax.grad(mpx.autocast(standardized, jnp.bfloat16, target="H100"))
    assert flattened(run, *arrays()) == 0


def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()[:8]), ("data",))


def test_sharded_filters_are_not_gathered_to_be_flattened():
    specs = P(None, None, None, "data"), P("data")
    sharded = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh(), spec))
        for x, spec in zip(arrays(), specs, strict=True)
    ]
    assert flattened(gradient("H100"), *sharded) == 0


def test_each_device_of_a_shard_map_has_filters_of_its_own():
    run = jax.shard_map(
        lambda *args: jax.lax.psum(gradient("H100")(*args), "data"),
        mesh=mesh(),
        in_specs=(P(), P("data")),
        out_specs=P(),
        check_vma=False,
    )
    assert flattened(run, *arrays()) == 1


def logits_loss(weight: Any, data: Any) -> Any:
    logits = jnp.tanh(data @ jnp.ones((16, 16))) @ weight
    return jnp.mean(jax.nn.logsumexp(logits.astype(jnp.float32), -1))


def ends(target: str, classes: int = 64) -> Any:
    normal = np.random.default_rng(0).standard_normal
    args = np.float32(normal((16, classes))), np.float32(normal((8, 16)))
    return mpx.autocast(logits_loss, jnp.bfloat16, target=target), args


BOTH = "tensor<8x16xbf16>, tensor<16x64xbf16>"


def waiting(function: Any, *args: Any) -> int:
    """How many barriers are on both gradients of the head."""
    return sum(BOTH in line for line in barriers(function, *args))


@pytest.mark.parametrize(("target", "count"), [("H100", 1), ("cpu", 0)])
def test_the_gradient_of_a_heads_weight_is_computed_with_that_of_the_data(
    target, count
):
    loss, args = ends(target)
    assert waiting(jax.grad(loss, argnums=(0, 1)), *args) == count


@pytest.mark.parametrize(("argnums", "classes"), [(1, 64), ((0, 1), 32)])
def test_without_one_of_the_gradients_or_a_large_result_nothing_waits(argnums, classes):
    loss, args = ends("H100", classes)
    assert waiting(jax.grad(loss, argnums=argnums), *args) == 0


def test_behind_a_loop_over_layers_nothing_waits():
    def loss(weight: Any, data: Any) -> Any:
        data, _ = jax.lax.scan(lambda x, _: (jnp.tanh(x), None), data, None, 2)
        return logits_loss(weight, data)

    _, args = ends("H100")
    run = mpx.autocast(loss, jnp.bfloat16, target="H100")
    assert waiting(jax.grad(run, argnums=(0, 1)), *args) == 0


@pytest.mark.parametrize("transform", [jax.grad, jax.jacfwd, jax.hessian])
def test_gradients_of_a_head_have_the_same_values(transform):
    found, expected = (
        transform(loss, argnums=(0, 1))(*args)
        for loss, args in map(ends, ("H100", "tpu v5e"))
    )
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6),
        found,
        expected,
    )


@pytest.mark.parametrize(
    ("recipe", "count"), [(mpx.MXFP8BlockScaling(), 1), (mpx.Float8CurrentScaling(), 0)]
)
def test_blocks_of_a_gradient_do_not_wait_for_the_gradient_of_the_weight(recipe, count):
    """Both are quantized along two axes, and XLA would keep both until the end."""

    def loss(weight: Any, data: Any) -> Any:
        return jnp.sum(jnp.tanh(data @ weight) @ jnp.ones((64, 1)))

    normal = np.random.default_rng(0).standard_normal
    args = np.float32(normal((96, 64))), np.float32(normal((32, 96)))
    half = mpx.autocast(loss, jnp.bfloat16, target="B200", recipe=recipe)
    lines = barriers(jax.grad(half, argnums=(0, 1)), *args)
    assert sum("tensor<96x64xbf16>" in line for line in lines) == count
