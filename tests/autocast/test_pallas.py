"""Pallas kernels for TPUs get in half precision what they only multiply."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu import flash_attention as flash, megablox

import mpx
from mpx._program import distinct_equations

# JAX's own kernels rely on its standard promotion.
pytestmark = pytest.mark.third_party

SIZE, ROWS = 128, 256
WEIGHTS = {
    name: jax.random.normal(key, (SIZE, SIZE)) / 11
    for name, key in zip("qkvo", jax.random.split(jax.random.key(0), 4), strict=True)
}
X = jax.random.normal(jax.random.key(1), (2, ROWS, SIZE))
tpu = functools.partial(mpx.autocast, dtype=jnp.bfloat16, target="tpu v5e")
pallas_call = pl.pallas_call


@pytest.fixture
def interpreted(monkeypatch):
    jax.clear_caches()
    on_cpu = functools.partial(pallas_call, interpret=True)
    monkeypatch.setattr(pl, "pallas_call", on_cpu)
    yield
    jax.clear_caches()


def rope(x):
    angle = jnp.arange(ROWS)[:, None] / jnp.arange(1.0, SIZE // 2 + 1)
    a, b = jnp.split(x, 2, -1)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def attention(weights, x, **options):
    """Attention of one head, whose queries and keys are rotated in float32."""
    q, k, v = ((x @ weights[name])[:, None] for name in "qkv")
    out = flash.flash_attention(rope(q), rope(k), v, causal=True, **options)
    return jnp.mean((out[:, 0] @ weights["o"]) ** 2)


def plain(weights, x):
    q, k, v = ((x @ weights[name])[:, None] for name in "qkv")
    scores = jnp.einsum("bhtd,bhsd->bhts", rope(q), rope(k))
    scores = jnp.where(jnp.tril(jnp.ones((ROWS, ROWS), bool)), scores, -1e30)
    out = jnp.einsum("bhts,bhsd->bhtd", jax.nn.softmax(scores), v)
    return jnp.mean((out[:, 0] @ weights["o"]) ** 2)


def layers(weights, x, count=3):
    def layer(x, _):
        q, k, v = ((x @ weights[name])[:, None] for name in "qkv")
        return x + flash.flash_attention(rope(q), k * 2, v)[:, 0] @ weights["o"], None

    return jnp.mean(lax.scan(jax.checkpoint(layer), x, None, length=count)[0] ** 2)


def kernels_in(func, *args):
    """The dtypes of floating operands and results of the kernels in a program."""
    found = []
    for equation in distinct_equations(jax.make_jaxpr(func)(*args)):
        if equation.primitive.name == "pallas_call":
            ins, outs = (
                [
                    str(v.aval.dtype)
                    for v in vs
                    if jnp.issubdtype(v.aval.dtype, jnp.floating)
                ]
                for vs in (equation.invars, equation.outvars)
            )
            found.append((*ins, "->", *outs))
    return found


H, F = "bfloat16", "float32"
FORWARD = (H, H, H, "->", H, F, F)
BACKWARD = [(H, H, H, F, F, H, F, "->", H, H), (H, H, H, F, F, H, F, "->", H)]


def test_flash_attention_behind_rope_gets_half_precision_each_way():
    grad = jax.grad(tpu(attention))
    assert kernels_in(grad, WEIGHTS, X) == [FORWARD, *BACKWARD]
    ids = flash.SegmentIds(*[jnp.zeros((2, ROWS), jnp.int32)] * 2)
    packed = tpu(functools.partial(attention, segment_ids=ids))
    assert kernels_in(jax.grad(packed), WEIGHTS, X) == [FORWARD, *BACKWARD]
    # A bias that is added stays in float32.
    bias = tpu(functools.partial(attention, ab=jnp.ones((2, 1, ROWS, ROWS))))
    assert kernels_in(bias, WEIGHTS, X) == [(H, H, H, F, "->", H)]
    text = jax.jit(grad).trace(WEIGHTS, X).lower(lowering_platforms=("tpu",)).as_text()
    assert text.count("tpu_custom_call") == 3
    batched = jax.vmap(grad, (None, 0))
    assert kernels_in(batched, WEIGHTS, X[:, None]) == [FORWARD, *BACKWARD]
    # Forward, and again in the backward pass.
    assert kernels_in(jax.grad(tpu(layers)), WEIGHTS, X) == [FORWARD] * 2 + BACKWARD
    twice = jax.grad(lambda x: jnp.sum(jax.grad(tpu(attention), 1)(WEIGHTS, x) ** 2))
    with pytest.raises(NotImplementedError, match="Higher-order AD not supported"):
        twice(X)


@pytest.mark.parametrize(
    "options",
    [
        {"target": "cpu"},
        {"target": "sm_90"},
        {"dtype": jnp.float16},
        {"enabled": False},
        {"rules": mpx.Rules(mpx.Rule(mpx.Precision.DECLARED, primitive="pallas_call"))},
    ],
)
def test_a_kernel_elsewhere_runs_as_written(options):
    (found,) = kernels_in(tpu(attention, **options), WEIGHTS, X)
    assert set(found) == {F, "->"}


def error_of(func, expected):
    found = jax.jit(jax.grad(func))(WEIGHTS, X)
    return {n: jnp.linalg.norm(found[n] - g) for n, g in expected.items()}


def test_gradients_are_as_exact_as_those_of_attention_by_products(interpreted):
    expected = jax.grad(plain)(WEIGHTS, X)
    kernel, products = (
        error_of(tpu(attention), expected),
        error_of(tpu(plain), expected),
    )
    for name, error in products.items():
        assert 0 < kernel[name] < 1.1 * error
    exact = error_of(attention, expected)
    assert all(exact[name] < 1e-3 * error for name, error in products.items())
    broken = {**WEIGHTS, "k": WEIGHTS["k"].at[0, 0].set(jnp.inf)}
    assert jnp.isnan(jax.jit(tpu(attention))(broken, X))


def test_grouped_products_get_half_precision(interpreted):
    def grouped(weights, x):
        rows, sizes = x.reshape(-1, SIZE), jnp.array([200, 312], jnp.int32)
        both = jnp.stack([weights["q"], weights["k"]])
        return jnp.mean(megablox.gmm(rows * 2, both, sizes, interpret=True) ** 2)

    found = kernels_in(jax.grad(tpu(grouped)), WEIGHTS, X)
    # The kernel reads its result again where a group begins within a tile.
    assert [one[:3] for one in found] == [(H, H, "->")] * 3
    expected = jax.grad(grouped)(WEIGHTS, X)["q"]
    difference = jax.jit(jax.grad(tpu(grouped)))(WEIGHTS, X)["q"] - expected
    assert jnp.linalg.norm(difference) < 0.01 * jnp.linalg.norm(expected)


# --- Kernels of this file: product of x and y, to which z is added --------------------


def product(x, y):
    return jnp.dot(x, y, preferred_element_type=jnp.float32)


def whole(x, y, z, out):
    out[...] = product(x[...], y[...]) + z[...]


def scaled(x, y, z, out):
    out[...] = product(x[...] * 2, y[...]) + z[...]


def highest(x, y, z, out):
    out[...] = jnp.dot(x[...], y[...], precision="highest") + z[...]


def both_scaled(x, y, z, out):
    out[...] = product(x[...] * 2, y[...] / 3) + z[...]


def twice(x, y, z, out):
    out[...] = product(x[...], y[...]) + z[...] + x[...]


def again(x, y, z, out):
    out[...] = z[...]
    out[...] += product(x[...], y[...])


def rows_of_8(x, y, z, out):
    @pl.loop(0, ROWS // 8)
    def _(i):
        part = pl.ds(i * 8, 8)
        out[part] = product(x[part], y[...]) + z[part]


def rows_of_16(x, y, z, out):
    @pl.loop(0, ROWS // 16)
    def _(i):
        part = pl.ds(i * 16, 16)
        out[part] = product(x[part], y[...]) + z[part]


def rows_from_3(x, y, z, out):
    @pl.loop(0, 2)
    def _(i):
        part = pl.ds(i * 16 + 3, 16)
        out[part] = product(x[part], y[...]) + z[part]


def one_row(x, y, z, out):
    out[...] = product(x[...], y[...]) + z[...] + product(x[3][None], y[...])
    out[3] = z[3]


def guarded(x, y, z, out):
    def start():
        out[...] = z[...]

    pl.when(pl.program_id(0) == 0)(start)

    @pl.when(pl.program_id(0) >= 0)
    def _():
        out[...] = product(x[...], y[...]) + z[...]


def watched(x, y, z, out):
    n = lax.while_loop(lambda i: x[i, 0] > 9, lambda i: i + 1, 0)
    out[...] = product(x[...], y[...]) + n.astype(F)


def copied(x, y, z, out):
    def inside(scratch, semaphore):
        pltpu.async_copy(x, scratch, semaphore).wait()
        out[...] = product(scratch[...], y[...]) + product(x[...], y[...])

    pl.run_scoped(inside, pltpu.VMEM((ROWS, SIZE), F), pltpu.SemaphoreType.DMA)


KERNELS = {
    whole: (H, H, F, "->", H),
    scaled: (F, H, F, "->", H),
    both_scaled: (F, F, F, "->", H),
    highest: (F, F, F, "->", H),
    twice: (F, H, F, "->", H),
    again: (H, H, F, "->", F),
    rows_of_8: (F, H, F, "->", F),
    rows_of_16: (H, H, F, "->", H),
    rows_from_3: (F, H, F, "->", F),
    one_row: (F, H, F, "->", F),
    guarded: (H, H, F, "->", H),
    watched: (F, H, F, "->", H),
    copied: (F, F, F, "->", F),
}


def called(kernel, **options):
    shape = jax.ShapeDtypeStruct((ROWS, SIZE), jnp.float32)
    call = pl.pallas_call(kernel, shape, grid=(2,), **options)
    return lambda x, y, z: call(x, y, z).astype(jnp.bfloat16)


ARRAYS = X[0], WEIGHTS["q"], X[1]


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.__name__)
def test_only_what_is_multiplied_or_written_is_in_half_precision(kernel):
    assert kernels_in(tpu(called(kernel)), *ARRAYS) == [KERNELS[kernel]]


def test_a_result_that_is_written_over_an_operand_stays_as_it_was():
    func = tpu(called(whole, input_output_aliases={2: 0}))
    assert kernels_in(func, *ARRAYS) == [(F, F, F, "->", F)]


@pytest.mark.parametrize("kernel", [whole, rows_of_16, guarded])
def test_operands_and_results_are_rounded_and_nothing_else(interpreted, kernel):
    # Of integers below 256; what is added to these is rounded off.
    x, z = jnp.round(4 * ARRAYS[0]) + 32, jnp.round(4 * ARRAYS[2])
    y = 2 * jnp.roll(jnp.eye(SIZE), 5, 1)
    found = jax.jit(tpu(called(kernel)))(x + 1 / 64, y * (1 + 1 / 1024), z)
    assert jnp.array_equal(found, 2 * jnp.roll(x, 5, 1) + z)


def test_explain_finds_kernels_that_multiply_float32():
    text = "a Pallas kernel that multiplies float32"
    (wide,) = mpx.explain(tpu(called(both_scaled)))(*ARRAYS).findings
    assert (wide.finding, wide.primitive) == (text, "pallas_call")
    assert not mpx.explain(tpu(called(highest)))(*ARRAYS).findings
    report = mpx.explain(tpu(called(whole)))(*ARRAYS)
    assert not report.findings
    (kernel,) = (o for o in report.operations if o.primitive == "pallas_call")
    assert "only multiplies" in kernel.reason
    assert mpx.explain(mpx.autocast(called(whole)))(*ARRAYS).findings[0].finding == text
