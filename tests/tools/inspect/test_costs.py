"""FLOPs, bytes and residuals by hand, and FLOPs against what XLA counts."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpx


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def i32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def c64(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.complex64)


def flops(func, *args):
    return mpx.explain(func)(*args).totals.flops


def conv(x, w, **options):
    numbers = ("NCHW", "OIHW", "NCHW")
    options = {"window_strides": (1, 1), "padding": "VALID"} | options
    return jax.lax.conv_general_dilated(x, w, dimension_numbers=numbers, **options)


def dilated(x, w):
    return conv(x, w, lhs_dilation=(2, 1), padding=((0, 0), (0, 0)))


padded = functools.partial(conv, padding=((1, 1), (1, 1)))
in_groups = functools.partial(conv, feature_group_count=2)
cholesky = functools.partial(jax.lax.linalg.cholesky, symmetrize_input=False)
triangular = functools.partial(jax.lax.linalg.triangular_solve, left_side=True)


def largest(x):
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (2,), (1,), "SAME")


@pytest.mark.parametrize(
    ("func", "args", "expected"),
    [
        (jnp.matmul, (f32(3, 5, 7), f32(3, 7, 2)), 2 * 3 * 5 * 7 * 2),
        (jnp.dot, (f32(7), f32(7)), 2 * 7),
        (jnp.dot, (c64(7), c64(7)), 8 * 7),
        (jnp.dot, (i32(7), i32(7)), 0),
        # 3x3 window over 8x8: 6x6 results.
        (conv, (f32(2, 4, 8, 8), f32(5, 4, 3, 3)), 2 * 2 * 5 * 36 * 4 * 9),
        # With padding 1 the corners have 4 weights, the edges 6, the rest 9.
        (padded, (f32(1, 1, 8, 8), f32(1, 1, 3, 3)), 2 * (4 * 4 + 24 * 6 + 36 * 9)),
        # Two groups: each result sees half of the features.
        (in_groups, (f32(2, 4, 8, 8), f32(6, 2, 3, 3)), 2 * 2 * 6 * 36 * 2 * 9),
        # Every second place of the input is a hole.
        (dilated, (f32(1, 1, 4, 1), f32(1, 1, 2, 1)), 2 * 6),
        (jax.lax.ragged_dot, (f32(6, 3), f32(2, 3, 4), i32(2)), 2 * 6 * 3 * 4),
        (jnp.exp, (f32(3, 4),), 12),
        (lambda x: x.astype(jnp.bfloat16).T.reshape(2, 6), (f32(3, 4),), 0),
        (lambda x: x + 1, (i32(3),), 0),
        (lambda x: x * x, (c64(3),), 12),
        (jnp.sum, (f32(3, 4),), 11),
        (lambda x: jnp.max(x, axis=1), (f32(3, 4),), 9),
        (jnp.cumsum, (f32(5),), 5),
        (jnp.sort, (f32(3, 8),), 3 * 8 * 3),
        (lambda x: x.at[:2].add(1.0), (f32(5),), 2),
        (largest, (f32(6),), 6),
        (lambda x: jnp.fft.fft(x), (c64(2, 8),), 240),
        (lambda x: jnp.fft.rfft(x), (f32(2, 8),), 120),
        (lambda x: jnp.fft.irfft(x), (c64(2, 5),), 120),
        (cholesky, (f32(6, 6),), 72 + 36),  # a select clears the upper triangle
        (triangular, (f32(4, 4), f32(4, 3)), 4 * 4 * 3),
    ],
)
def test_flops_by_hand(func, args, expected):
    assert flops(func, *args) == expected


def test_flops_of_ragged_sums_and_kernels():
    numbers = jax.lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])

    def f(x, y, sizes):
        return jax.lax.ragged_dot_general(x, y, sizes, numbers)

    report = mpx.explain(f)(f32(6, 3), f32(6, 4), i32(2))
    assert report.operations[0].outputs == ("float32[2,3,4]",)
    assert report.totals.flops == 2 * 6 * 3 * 4
    # Kernels count what their author says, or what they do.
    from jax.experimental import pallas as pl

    def kernel(x, y):
        y[...] = jnp.exp(x[...]) * 2.0

    def f(x, **options):
        return pl.pallas_call(kernel, f32(3, 4), grid=(5,), **options)(x)

    assert flops(f, f32(3, 4)) == 5 * (12 + 12)
    estimate = pl.CostEstimate(flops=99, transcendentals=0, bytes_accessed=0)
    assert flops(lambda x: f(x, cost_estimate=estimate), f32(3, 4)) == 99


@pytest.mark.parametrize(
    ("func", "args", "expected"),
    [
        (lambda x: x * x, (f32(5),), 4 * (5 + 5)),
        (lambda x, y: x * y, (f32(5), f32(5)), 4 * 15),
        (lambda x: x.reshape(10), (f32(2, 5),), 0),
        (lambda x: x.astype(jnp.bfloat16), (f32(5),), 5 * 6),
        (lambda x: x[2:4], (f32(100),), 4 * (2 + 2)),
        (jax.random.key_data, (jax.eval_shape(lambda: jax.random.key(0)),), 8 + 8),
        (jnp.conj, (c64(5),), 8 * (5 + 5)),
        (lambda x: x.astype(jnp.int4), (jax.ShapeDtypeStruct((6,), jnp.int8),), 6 + 3),
    ],
)
def test_bytes_by_hand(func, args, expected):
    assert mpx.explain(func)(*args).totals.bytes == expected


def test_bytes_of_updates_and_of_numbers_of_8_bits_that_are_moved():
    update = lambda x, i: jax.lax.dynamic_update_slice(x, jnp.ones(2), (i,))  # noqa: E731
    report = mpx.explain(update)(f32(100), i32())
    (one,) = (o for o in report.operations if o.primitive == "dynamic_update_slice")
    assert one.bytes == 4 * (2 + 2 + 2) + 4  # read, replace, write; the index

    def choose(take, x):
        x = x.astype(jnp.float8_e4m3fn)
        return jnp.where(take, x, jnp.zeros_like(x)).astype(jnp.float32)

    totals = mpx.explain(choose)(jnp.ones(8, bool), jnp.ones(8)).totals
    assert totals.flops == 0 and totals.low_flops_share == 0


def xla_flops(func, *args):
    analysis = jax.jit(func).lower(*args).compile().cost_analysis()
    return analysis["flops"], analysis.get("transcendentals", 0.0)


def mlp(w, x):
    for _ in range(3):
        x = jnp.maximum(x @ w, 0.0)
    return jnp.sum(x * x)


def cnn(w, x):
    return jnp.sum(jax.nn.relu(conv(x, w, padding="SAME", window_strides=(2, 2))))


def attention(w, x):
    scores = jax.nn.softmax((x @ w) @ x.swapaxes(-1, -2))
    return jnp.sum((scores @ x) ** 2)


MODELS = {
    "mlp": (mlp, (f32(128, 128), f32(64, 128)), 0.01, 0.01),
    "cnn": (cnn, (f32(16, 8, 3, 3), f32(4, 8, 32, 32)), 0.01, 0.02),
    "attention": (attention, (f32(64, 64), f32(4, 128, 64)), 0.02, 0.03),
}


@pytest.mark.parametrize("name", MODELS)
def test_totals_are_those_of_xla(name):
    func, args, *tolerances = MODELS[name]
    for one, tolerance in zip((func, jax.grad(func)), tolerances, strict=True):
        # XLA counts exponentials and square roots on an account of their own.
        theirs = sum(xla_flops(one, *args))
        assert flops(one, *args) == pytest.approx(theirs, rel=tolerance)


def test_flops_are_exactly_those_of_xla():
    x, y = f32(16, 8), f32(8, 4)
    for func, args in [
        (jnp.matmul, (x, y)),
        (jnp.add, (x, x)),
        (lambda x: jnp.sum(x), (x,)),
        (lambda x: conv(x, np.ones((1, 1, 3, 3), "f")), (f32(1, 1, 9, 9),)),
    ]:
        assert flops(func, *args) == xla_flops(func, *args)[0]


W = jax.ShapeDtypeStruct((4, 4), jnp.float32)
X = jax.ShapeDtypeStruct((2, 4), jnp.float32)


def residuals(func, *args):
    return mpx.explain(func)(*args).totals.residual_bytes


def sine(w, x):
    return jnp.sum(jnp.sin(x @ w))


def layers(w, x):
    return jax.lax.scan(lambda x, _: (jnp.sin(x @ w), None), x, length=5)[0].sum()


def halved(w, x):
    """Weights cast to half are copies, and so is the input: 32 + 16 bytes."""
    return jnp.sum(x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16))


@pytest.mark.parametrize(
    ("func", "expected"),
    [
        (sine, 32),  # the cosine; the arguments are there anyway
        (lambda w, x: jnp.sum(x @ w), 0),
        (jax.jit(sine), 32),
        (layers, 5 * (32 + 32)),  # of each layer the input and the cosine
        (jax.checkpoint(sine), 0),
        (halved, 16),  # of which the backward pass for the weights reads the input
    ],
)
def test_a_function_and_its_gradient_keep_the_same(func, expected):
    for one in func, jax.grad(func), jax.jit(jax.grad(func)):
        assert residuals(one, W, X) == expected


def test_residuals_of_micro_batches_and_how_they_were_counted():
    def f(w, x):
        grads = jax.lax.map(lambda x: jax.grad(sine)(w, x), x)
        return jnp.sum(grads, axis=0)

    assert residuals(f, W, jax.ShapeDtypeStruct((7, 2, 4), jnp.float32)) == 32

    def f(w, x):
        return jax.lax.while_loop(lambda x: jnp.sum(x) < 1, lambda x: x @ w, x)

    for func, how in (
        (sine, "saved by a gradient of the weights for its backward pass"),
        (jax.grad(sine), "made in the forward pass and read in the backward pass"),
    ):
        assert mpx.explain(func)(W, X).totals.residuals == how
    report = mpx.explain(f)(W, X)
    assert report.totals.residual_bytes is None
    why = "not differentiable: ValueError: Reverse-mode"
    assert report.totals.residuals.startswith(why)
    assert "residuals           ?  not differentiable" in str(report)
