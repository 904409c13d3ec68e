"""Bytes of a large model: the arithmetic, a program beside it, and the page."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from benchmarks import at_scale

FLOAT32, BFLOAT16, REDUCED, FP8 = at_scale.PRECISIONS


def test_the_page_has_the_table_as_it_is_computed():
    text = at_scale.PAGE.read_text()
    assert at_scale.render(text) == text
    assert at_scale.render(text.replace("| FP8 | 141.1 |", "| FP8 | 1 |")) == text


def test_the_model_has_the_published_size():
    assert at_scale.Model().weights == pytest.approx(70.6e9, rel=1e-3)
    assert [math.prod(mesh) for mesh in at_scale.MESHES] == [8, 64, 512, 4096, 16384]


@pytest.mark.parametrize("mesh", at_scale.MESHES, ids=str)
def test_precisions_compare_as_their_widths(mesh):
    full, half, reduced, eight = (
        at_scale.bytes_of(mesh, precision) for precision in at_scale.PRECISIONS
    )
    assert (
        half["gathers"] == full["gathers"] / 2
        and 1.9 < half["gathers"] / eight["gathers"] < 2
    )
    assert reduced["reductions"] == half["reductions"] / 2 == full["reductions"] / 2
    assert full["state"] == half["state"] == eight["state"]
    assert eight["wire"] < half["wire"] < full["wire"]
    assert (full["activations"] > 0) == (mesh.tensor > 1)


def test_gathers_are_those_of_a_compiled_program():
    """Two bytes per weight in the page; here four, and once: nothing is remade."""
    devices, width, blocks = 8, 64, 3
    mesh = jax.make_mesh((devices,), ("fsdp",), axis_types=(AxisType.Auto,))
    divided = NamedSharding(mesh, P("fsdp"))
    shape = jax.ShapeDtypeStruct((width, width), jnp.float32, sharding=divided)
    batch = jax.ShapeDtypeStruct((32, width), jnp.float32, sharding=divided)

    def loss(weights, x):
        for weight in weights:
            x = jax.lax.with_sharding_constraint(jnp.tanh(x @ weight), divided)
        return jnp.mean(x**2)

    step = jax.jit(jax.grad(loss), out_shardings=divided)
    text = step.lower([shape] * blocks, batch).compile().as_text()
    found = re.findall(r"= f32\[([\d,]+)\]\S* all-gather\(", text)
    received = sum(
        4 * np.prod([int(size) for size in sizes.split(",")]) for sizes in found
    ) * ((devices - 1) / devices)
    model = at_scale.Model(blocks, width, 0, 1, 0, 0)  # 2 matrices a block: q and o
    counted = at_scale.bytes_of(at_scale.Mesh(1, devices, 1), FLOAT32, model)
    assert received == counted["gathers"] / 2 / 2
