"""The numbers that autocast must reach on a ViT block and a GPT block."""

import jax
import jax.numpy as jnp
import pytest

import mpx
from tests.autocast import blocks
from tests.autocast.counting import count_casts, count_products, relative_error


@pytest.fixture(scope="module")
def vit():
    key = jax.random.key(0)
    return blocks.vit_parameters(key), jax.random.normal(key, (8, 197, 384))


def test_casts_of_a_vit_block(vit):
    assert count_casts(mpx.autocast(blocks.vit_loss), *vit) <= 28
    assert count_casts(jax.grad(mpx.autocast(blocks.vit_loss)), *vit) <= 52


def test_every_product_of_a_vit_block_is_in_half_precision(vit):
    counts = count_products(jax.grad(mpx.autocast(blocks.vit_loss)), *vit)
    assert counts == {("bfloat16", "bfloat16"): 24}


def test_gradient_of_a_vit_block(vit):
    expected = jax.jit(jax.grad(blocks.vit_loss))(*vit)
    got = jax.jit(jax.grad(mpx.autocast(blocks.vit_loss)))(*vit)
    assert relative_error(got, expected) <= 4e-3


def test_loss_and_gradient_of_a_gpt_block():
    key = jax.random.key(0)
    parameters = blocks.gpt_parameters(key)
    tokens = jax.random.randint(key, (8, 257), 0, 8192)
    loss = jax.jit(jax.value_and_grad(blocks.gpt_loss))
    expected, expected_grads = loss(parameters, tokens)
    cast = jax.jit(jax.value_and_grad(mpx.autocast(blocks.gpt_loss)))
    got, grads = cast(parameters, tokens)
    assert abs(got - expected) / expected <= 2e-5
    assert relative_error(grads, expected_grads) <= 1.15e-2


def test_float16_with_loss_scaling(vit):
    def scaled(p, x):
        return mpx.autocast(blocks.vit_loss, jnp.float16)(p, x) * 2.0**12

    expected = jax.jit(jax.grad(blocks.vit_loss))(*vit)
    got = jax.tree.map(lambda g: g / 2.0**12, jax.jit(jax.grad(scaled))(*vit))
    assert relative_error(got, expected) <= 1e-3
