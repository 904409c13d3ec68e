"""FLOPs and bytes by hand, and against what XLA counts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpx


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def flops(func, *args):
    return mpx.explain(func)(*args).totals.flops


def conv(x, w, **options):
    numbers = ("NCHW", "OIHW", "NCHW")
    options = {"window_strides": (1, 1), "padding": "VALID"} | options
    return jax.lax.conv_general_dilated(x, w, dimension_numbers=numbers, **options)


@pytest.mark.parametrize(
    ("func", "args", "expected"),
    [
        (jnp.matmul, (f32(3, 5, 7), f32(3, 7, 2)), 2 * 3 * 5 * 7 * 2),
        (jnp.dot, (f32(7), f32(7)), 2 * 7),
        (jnp.dot, [jax.ShapeDtypeStruct((7,), jnp.complex64)] * 2, 8 * 7),
        (jnp.dot, [jax.ShapeDtypeStruct((7,), jnp.int32)] * 2, 0),
        # 3x3 window over 8x8: 6x6 results.
        (conv, (f32(2, 4, 8, 8), f32(5, 4, 3, 3)), 2 * 2 * 5 * 36 * 4 * 9),
        # With padding 1 the corners have 4 weights, the edges 6, the rest 9.
        (
            lambda x, w: conv(x, w, padding=((1, 1), (1, 1))),
            (f32(1, 1, 8, 8), f32(1, 1, 3, 3)),
            2 * (4 * 4 + 24 * 6 + 36 * 9),
        ),
        # Two groups: each result sees half of the features.
        (
            lambda x, w: conv(x, w, feature_group_count=2),
            (f32(2, 4, 8, 8), f32(6, 2, 3, 3)),
            2 * 2 * 6 * 36 * 2 * 9,
        ),
        # Every second place of the input is a hole.
        (
            lambda x, w: conv(x, w, lhs_dilation=(2, 1), padding=((0, 0), (0, 0))),
            (f32(1, 1, 4, 1), f32(1, 1, 2, 1)),
            2 * 6,
        ),
        (
            jax.lax.ragged_dot,
            (f32(6, 3), f32(2, 3, 4), jax.ShapeDtypeStruct((2,), jnp.int32)),
            2 * 6 * 3 * 4,
        ),
        (jnp.exp, (f32(3, 4),), 12),
        (lambda x: x.astype(jnp.bfloat16).T.reshape(2, 6), (f32(3, 4),), 0),
        (lambda x: x + 1, (jax.ShapeDtypeStruct((3,), jnp.int32),), 0),
        (lambda x: x * x, (jax.ShapeDtypeStruct((3,), jnp.complex64),), 12),
        (jnp.sum, (f32(3, 4),), 11),
        (lambda x: jnp.max(x, axis=1), (f32(3, 4),), 9),
        (jnp.cumsum, (f32(5),), 5),
        (jnp.sort, (f32(3, 8),), 3 * 8 * 3),
        (lambda x: x.at[:2].add(1.0), (f32(5),), 2),
        (
            lambda x: jax.lax.reduce_window(
                x, -jnp.inf, jax.lax.max, (2,), (1,), "SAME"
            ),
            (f32(6),),
            6,
        ),
        (lambda x: jnp.fft.fft(x), (jax.ShapeDtypeStruct((2, 8), jnp.complex64),), 240),
        (lambda x: jnp.fft.rfft(x), (f32(2, 8),), 120),
        (
            lambda x: jnp.fft.irfft(x),
            (jax.ShapeDtypeStruct((2, 5), jnp.complex64),),
            120,
        ),
        (
            lambda a: jax.lax.linalg.cholesky(a, symmetrize_input=False),
            (f32(6, 6),),
            72 + 36,  # and a select, which clears the upper triangle
        ),
        (
            lambda a, b: jax.lax.linalg.triangular_solve(a, b, left_side=True),
            (f32(4, 4), f32(4, 3)),
            4 * 4 * 3,
        ),
    ],
)
def test_flops_by_hand(func, args, expected):
    assert flops(func, *args) == expected


def test_the_sum_of_a_ragged_product_may_be_ragged():
    numbers = jax.lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((0,), (0,)), ((), ())),
        lhs_ragged_dimensions=[0],
        rhs_group_dimensions=[],
    )

    def f(x, y, sizes):
        return jax.lax.ragged_dot_general(x, y, sizes, numbers)

    sizes = jax.ShapeDtypeStruct((2,), jnp.int32)
    report = mpx.explain(f)(f32(6, 3), f32(6, 4), sizes)
    assert report.operations[0].outputs == ("float32[2,3,4]",)
    assert report.totals.flops == 2 * 6 * 3 * 4


def test_kernels_count_what_their_author_says_or_what_they_do():
    from jax.experimental import pallas as pl

    def kernel(x, y):
        y[...] = jnp.exp(x[...]) * 2.0

    def f(x, **options):
        return pl.pallas_call(
            kernel, jax.ShapeDtypeStruct((3, 4), jnp.float32), grid=(5,), **options
        )(x)

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
        (jnp.conj, (jax.ShapeDtypeStruct((5,), jnp.complex64),), 8 * (5 + 5)),
        (lambda x: x.astype(jnp.int4), (jax.ShapeDtypeStruct((6,), jnp.int8),), 6 + 3),
        (
            lambda x, i: jax.lax.dynamic_update_slice(x, jnp.ones(2), (i,)),
            (f32(100), jax.ShapeDtypeStruct((), jnp.int32)),
            None,
        ),
    ],
)
def test_bytes_by_hand(func, args, expected):
    report = mpx.explain(func)(*args)
    if expected is None:
        (update,) = (
            o for o in report.operations if o.primitive == "dynamic_update_slice"
        )
        assert update.bytes == 4 * (2 + 2 + 2) + 4  # read, replace, write; the index
    else:
        assert report.totals.bytes == expected


# --- Against XLA ---------------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("func", "args", "tolerance"),
    [
        (mlp, (f32(128, 128), f32(64, 128)), 0.01),
        (jax.grad(mlp), (f32(128, 128), f32(64, 128)), 0.01),
        (cnn, (f32(16, 8, 3, 3), f32(4, 8, 32, 32)), 0.01),
        (jax.grad(cnn), (f32(16, 8, 3, 3), f32(4, 8, 32, 32)), 0.02),
        (attention, (f32(64, 64), f32(4, 128, 64)), 0.02),
        (jax.grad(attention), (f32(64, 64), f32(4, 128, 64)), 0.03),
    ],
    ids=["mlp", "mlp grad", "cnn", "cnn grad", "attention", "attention grad"],
)
def test_totals_are_those_of_xla(func, args, tolerance):
    ours = flops(func, *args)
    # XLA counts exponentials and square roots on an account of their own.
    theirs = sum(xla_flops(func, *args))
    assert ours == pytest.approx(theirs, rel=tolerance)


def test_single_operations_are_exactly_those_of_xla():
    x, y = f32(16, 8), f32(8, 4)
    for func, args in [
        (jnp.matmul, (x, y)),
        (jnp.add, (x, x)),
        (lambda x: jnp.sum(x), (x,)),
        (lambda x: conv(x, np.ones((1, 1, 3, 3), "f")), (f32(1, 1, 9, 9),)),
    ]:
        assert flops(func, *args) == xla_flops(func, *args)[0]


def test_numbers_of_8_bits_are_moved_by_what_is_no_product():
    def choose(take, x):
        x = x.astype(jnp.float8_e4m3fn)
        return jnp.where(take, x, jnp.zeros_like(x)).astype(jnp.float32)

    totals = mpx.explain(choose)(jnp.ones(8, bool), jnp.ones(8)).totals
    assert totals.flops == 0 and totals.low_flops_share == 0
