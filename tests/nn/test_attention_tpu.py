"""Attention by JAX's Pallas kernel for TPUs."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas
from jax.sharding import Mesh, PartitionSpec as P

import mpx
from mpx.nn import dot_product_attention

# JAX's own kernel relies on its standard promotion.
pytestmark = pytest.mark.third_party

FACTORS = [
    jax.random.normal(key, (2, 256, 2, 64)) * 2
    for key in jax.random.split(jax.random.key(0), 3)
]
LONG = [jax.ShapeDtypeStruct((2, 1024, 2, 64), jnp.float32)] * 3
by_kernel = functools.partial(dot_product_attention, implementation="pallas")
by_products = functools.partial(dot_product_attention, implementation="xla")
tpu = functools.partial(mpx.autocast, dtype=jnp.bfloat16, target="tpu v5e")


@pytest.fixture
def interpreted(monkeypatch):
    jax.clear_caches()
    on_cpu = functools.partial(pallas.pallas_call, interpret=True)
    monkeypatch.setattr(pallas, "pallas_call", on_cpu)
    yield
    jax.clear_caches()


def loss(attend, *factors, **options):
    return jnp.mean(attend(*factors, **options) ** 2)


def has_kernel(attend, *factors, **options):
    func = tpu(functools.partial(attend, **options))
    return "pallas_call" in str(jax.make_jaxpr(func)(*factors))


@pytest.mark.parametrize("is_causal", [False, True])
def test_values_and_gradients_are_those_of_attention(interpreted, is_causal):
    def results(attend, wrap=tpu):
        func = functools.partial(loss, attend, is_causal=is_causal)
        return jax.jit(jax.value_and_grad(wrap(func), (0, 1, 2)))(*FACTORS)

    value, exact = results(by_products, lambda func: func)
    _, products = results(by_products)
    found, grads = results(by_kernel)
    assert abs(found - value) < 2e-3 * value
    for one, other, expected in zip(grads, products, exact, strict=True):
        error, known = (jnp.linalg.norm(g - expected) for g in (one, other))
        assert 0 < error < 1.2 * known


@pytest.mark.parametrize("lengths", [(128, 256), (256, 128)])
def test_causal_attention_of_other_lengths(interpreted, lengths):
    q, k, v = (x[:, :n] for x, n in zip(FACTORS, (*lengths, lengths[1]), strict=True))
    found, known = (
        tpu(functools.partial(attend, is_causal=True))(q, k, v)
        for attend in (by_kernel, by_products)
    )
    assert jnp.linalg.norm(found - known) < 5e-3 * jnp.linalg.norm(known)


def test_batches_and_second_derivatives(interpreted):
    func, reference = (
        tpu(functools.partial(loss, f, is_causal=True))
        for f in (by_kernel, by_products)
    )

    def second(func):
        def norm(*factors):
            return sum(jnp.sum(g**2) for g in jax.grad(func, (0, 1, 2))(*factors))

        return jax.jit(jax.grad(norm, 1))(*FACTORS)

    expected = second(reference)
    assert jnp.linalg.norm(second(func) - expected) < 0.1 * jnp.linalg.norm(expected)
    batches = [jnp.stack([x, -2 * x]) for x in FACTORS]
    one = jax.grad(func)(*(x[1] for x in batches))
    mapped = jax.vmap(jax.grad(func))(*batches)[1]
    assert jnp.linalg.norm(mapped - one) < 0.02 * jnp.linalg.norm(one)
    broken = FACTORS[0].at[0, 0, 0, 0].set(jnp.nan)
    assert jnp.isnan(func(broken, *FACTORS[1:]))
    with pytest.raises(TypeError, match="has no forward-mode derivative"):
        jax.jvp(func, FACTORS, FACTORS)


def test_the_kernel_is_one_call_each_way_and_an_explicit_choice():
    grad = jax.grad(tpu(functools.partial(loss, by_kernel)), (0, 1, 2))
    text = jax.jit(grad).trace(*FACTORS).lower(lowering_platforms=("tpu",)).as_text()
    assert text.count("tpu_custom_call") == 3
    report = mpx.explain(tpu(by_kernel))(*FACTORS)
    assert any("one Pallas kernel on TPUs" in o.reason for o in report.operations)
    for target in ("cpu", "h100"):
        with pytest.raises(ValueError, match=f"cannot be used: {target}.* not a TPU"):
            tpu(by_kernel, target=target)(*FACTORS)


REFUSED = {
    "float16": ({"dtype": jnp.float16}, {}, "bfloat16"),
    "bias": ({}, {"bias": jnp.zeros((256, 256))}, "no bias"),
    "mask": ({}, {"mask": jnp.ones((256, 256), bool)}, "no bias, mask"),
    "window": ({}, {"local_window_size": 3}, "window"),
    "lengths": ({}, {"key_value_seq_lengths": jnp.array([3, 0])}, "lengths"),
    "row sums": ({}, {"return_residual": True}, "row sums"),
    "dropout": ({}, {"dropout_rate": 0.5, "dropout_key": jax.random.key(0)}, "dropout"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_kernel_does_not_do_is_refused(case):
    settings, options, reason = REFUSED[case]
    func = tpu(functools.partial(by_kernel, **options), **settings)
    with pytest.raises(ValueError, match=f"cannot be used: .*{reason}"):
        func(*FACTORS)


@pytest.mark.parametrize(
    ("query", "key"),
    [
        ((2, 256, 4, 64), (2, 256, 2, 64)),
        ((2, 200, 2, 64), (2, 200, 2, 64)),
        ((2, 256, 2, 40), (2, 256, 2, 40)),
        ((2, 256, 2, 64), (2, 0, 2, 64)),
    ],
)
def test_shapes_that_the_kernel_does_not_take_are_refused(query, key):
    arrays = [jax.ShapeDtypeStruct(s, jnp.float32) for s in (query, key, key)]
    with pytest.raises(ValueError, match="cannot be used|heads"):
        jax.eval_shape(tpu(by_kernel), *arrays)


def test_by_default_it_is_for_long_sequences_on_one_device(monkeypatch):
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    assert has_kernel(dot_product_attention, *LONG)
    assert not has_kernel(dot_product_attention, *FACTORS)
    assert not has_kernel(dot_product_attention, *LONG, local_window_size=5)
    assert "pallas_call" not in str(jax.make_jaxpr(dot_product_attention)(*LONG))
    monkeypatch.setattr(jax, "device_count", lambda: 4)
    assert not has_kernel(dot_product_attention, *LONG)
    mesh = Mesh(jax.devices()[:1], "d")
    spec = P("d")
    divided = jax.shard_map(
        dot_product_attention, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False
    )
    assert has_kernel(divided, *LONG)
