"""Sums that JAX computes in the dtype of their terms: sparse products, axes of `vmap`.

Of equal numbers a sum stops at 256 of them in bfloat16, and at 2048 in float16.
"""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import sparse
from jax.sharding import AxisType, PartitionSpec as P

import mpx
from mpx._program.equations import equations

from .counting import pairs, read_by

DTYPES = ("bfloat16", "float16")


def error(found, exact):
    norm, both = jnp.linalg.norm, pairs(found, exact)
    return max(float(norm(a - b) / norm(b)) for a, b in both)


def derived(func, *args):
    return jax.value_and_grad(func, tuple(range(len(args))))(*args)


# --- Products of sparse matrices ------------------------------------------------------

MANY = 4096
FORMATS = ("BCOO", "BCSR", "COO", "CSR")


def hub(layout):
    """A matrix of ones in its first row and its first column."""
    rows = jnp.concatenate([jnp.zeros(MANY, int), jnp.arange(1, MANY)])
    columns = jnp.concatenate([jnp.arange(MANY), jnp.zeros(MANY - 1, int)])
    starts = jnp.concatenate([jnp.zeros(1, int), MANY + jnp.arange(MANY)])
    ones, shape = jnp.ones(2 * MANY - 1), (MANY, MANY)
    if layout == "BCOO":
        return sparse.BCOO((ones, jnp.stack([rows, columns], 1)), shape=shape)
    if layout == "COO":
        return sparse.COO((ones, rows, columns), shape=shape)
    return getattr(sparse, layout)((ones, columns, starts), shape=shape)


@pytest.mark.parametrize("columns", [(3,), ()])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", FORMATS)
def test_a_sparse_product_and_its_derivative_sum_in_float32(layout, dtype, columns):
    matrix = hub(layout)

    def loss(w, x):
        h = x @ w
        return jnp.sum(jnp.tanh(matrix @ h / 8)) / MANY + jnp.mean(h)

    w, x = jnp.full((4, *columns), 1 / 512), jnp.ones((MANY, 4))
    func = mpx.autocast(loss, dtype)
    assert error(derived(func, w, x), derived(loss, w, x)) < 0.01
    (name,) = {e.primitive.name for e in equations(jax.make_jaxpr(loss)(w, x))} & {
        *("bcoo_dot_general", "bcsr_dot_general"),
        *("coo_matmat", "coo_matvec", "csr_matmat", "csr_matvec"),
    }
    (product,) = [o for o in mpx.explain(func)(w, x).operations if o.primitive == name]
    assert (product.precision, product.rule) == ("float32", "half")
    # It reads and gives half precision, as a dense one does.
    multiply = mpx.autocast(lambda h: matrix @ h, dtype)
    ones = jnp.ones((MANY, *columns))
    assert (multiply(ones + 2.0**-12) == matrix @ ones).all()


def of_documents(w, data, indices, labels):
    """Sparse features: each document has word 0, whose gradient is a sum over all."""
    documents = sparse.BCOO((data, indices), shape=(labels.size, 50))
    z = jnp.tanh(documents @ w).sum(1)
    return jnp.mean(jnp.logaddexp(0.0, z) - labels * z)


def in_scan(f):
    def scanned(w, *parts):
        step = lambda total, parts: (total + f(w, *parts), None)  # noqa: E731
        return jax.lax.scan(step, 0.0, [x[None] for x in parts])[0]

    return scanned


def in_vmap(f):
    def mapped(w, *parts):
        return jax.vmap(f, (None, 0, 0, 0))(w, *(x[None] for x in parts))[0]

    return mapped


@pytest.mark.parametrize("inside", [jax.jit, jax.checkpoint, in_scan, in_vmap])
def test_gradients_of_weights_and_of_the_numbers_of_a_sparse_matrix(inside):
    keys = jax.random.split(jax.random.key(0), 3)
    words = jax.random.randint(keys[0], (MANY, 3), 1, 50)
    words = jnp.concatenate([jnp.zeros((MANY, 1), int), words], 1).ravel()
    indices = jnp.stack([jnp.repeat(jnp.arange(MANY), 4), words], 1)
    labels = jax.random.bernoulli(keys[1], 0.3, (MANY,)).astype(float)
    w, data = jax.random.normal(keys[2], (50, 8)) * 0.3, jnp.ones(4 * MANY)

    def gradients(f):
        return jax.grad(f, (0, 1))(w, data, indices, labels)

    exact = gradients(of_documents)
    for func in mpx.autocast(inside(of_documents)), inside(mpx.autocast(of_documents)):
        assert error(gradients(func), exact) < 0.01


def test_a_sparse_product_keeps_half_precision_for_its_backward_pass():
    matrix, x, w = hub("BCOO"), jnp.ones((MANY, 4)), jnp.ones((4, 8))

    def loss(data, w):
        mixed = sparse.BCOO((data * 0.5, matrix.indices), shape=matrix.shape)
        return jnp.sum(jnp.tanh(mixed @ jnp.tanh(x @ w)))

    report = mpx.explain(jax.grad(mpx.autocast(loss), (0, 1)))(matrix.data, w)
    # Numbers of the matrix, the first product before and behind tanh, and the result.
    numbers = matrix.nse + 3 * MANY * 8 + x.size + w.size
    assert report.totals.residual_bytes <= 2 * numbers + matrix.indices.nbytes


def test_a_sparse_product_has_rules_a_derivative_forward_and_infinities():
    matrix, h = hub("BCOO"), jnp.full((MANY, 1), 60.02)
    multiply = matrix.__matmul__

    tangent = jax.jvp(mpx.autocast(multiply), (h,), (h,))[1]
    assert error(tangent, multiply(h)) < 0.01
    full = mpx.Rules(mpx.Rule(mpx.Precision.FULL, primitive="bcoo_dot_general"))
    assert (mpx.autocast(multiply, rules=full)(h) == multiply(h)).all()
    assert jnp.isinf(mpx.autocast(multiply, "float16")(h)[0])  # 245,842
    assert jnp.isnan(mpx.autocast(multiply)(h * jnp.nan)).all()


# --- Axes of `jax.vmap` ---------------------------------------------------------------

ROWS = 1024


def variance(w, x):
    h = x @ w
    return jax.lax.pmean(h * h, "batch") - jax.lax.pmean(h, "batch") ** 2


def variances(w, x):
    h = x @ w
    return jnp.mean(h * h, 0) - jnp.mean(h, 0) ** 2


def scattered(w, x):  # to each example a sum over all
    h = jnp.broadcast_to((x @ w)[None], (ROWS, 8))
    mean = jax.lax.psum_scatter(h, "batch") / ROWS
    return jax.lax.psum_scatter(h * h, "batch") / ROWS - mean**2


def scattering(w, x):
    return jnp.broadcast_to(variances(w, x)[None], (ROWS, 8))


def gathered(w, x):  # each example reads those of all
    h = x @ w
    every = jax.lax.all_gather(h, "batch")
    return jnp.mean(jnp.sin(every * x[0]), 0)


def gathering(w, x):
    h = x @ w
    return jnp.mean(jnp.sin(h[None] * x[:, None, :1]), 1)


def passed_on(w, x):  # `ppermute` and `pmax` add nothing up
    h = x @ w
    other = jax.lax.ppermute(h, "batch", [(i, (i + 1) % ROWS) for i in range(ROWS)])
    return other * jax.lax.pmax(jax.lax.stop_gradient(h), "batch")


def passing_on(w, x):
    h = x @ w
    return jnp.roll(h, 1, 0) * jnp.max(jax.lax.stop_gradient(h), 0, keepdims=True)


NAMED = {variance: variances, scattered: scattering, gathered: gathering}
NAMED[passed_on] = passing_on


def over_examples(func):
    return jax.vmap(func, (None, 0), axis_name="batch")


@pytest.fixture
def weight_and_examples():
    keys = jax.random.split(jax.random.key(0))
    w = jnp.eye(8) / 4 + jax.random.normal(keys[1], (8, 8)) * 0.03
    return w, 1 + 0.1 * jax.random.normal(keys[0], (ROWS, 8))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("func", NAMED, ids=lambda f: f.__name__)
def test_a_sum_over_an_axis_of_vmap_is_that_of_an_array(
    func, dtype, weight_and_examples
):
    def loss(f):
        return lambda w, x: jnp.mean(jnp.log(jnp.abs(f(w, x))))

    plain = derived(loss(NAMED[func]), *weight_and_examples)
    wanted = derived(loss(mpx.autocast(NAMED[func], dtype)), *weight_and_examples)
    bound = 2 * error(wanted, plain) + 1e-3
    outside = loss(mpx.autocast(over_examples(func), dtype))
    inside = loss(over_examples(mpx.autocast(func, dtype)))
    for one in outside, inside:
        found = jax.jit(functools.partial(derived, one))(*weight_and_examples)
        assert error(found, plain) <= bound


def test_a_sum_over_an_axis_of_vmap_goes_beyond_float16():
    func = mpx.autocast(lambda x: jax.lax.pmean(x @ x, "batch"), "float16")
    x = jnp.full((ROWS, 8), 5.0)  # 200 each
    assert (jax.vmap(func, axis_name="batch")(x) == 200).all()
    under_scan = mpx.autocast(
        lambda x: jax.lax.scan(lambda c, x: (c, func(x)), 0, x[None])[1], "float16"
    )
    assert (jax.vmap(under_scan, axis_name="batch")(x) == 200).all()


def test_the_derivative_of_a_gather_over_an_axis_of_vmap_sums_in_float32():
    """XLA:CPU sums half precision in float32 by itself, others need not."""
    gradient = jax.grad(lambda w, x: jnp.sum(mpx.autocast(gathered)(w, x)))
    found = []

    def look(w, x):
        found[:] = read_by("reduce_scatter", gradient, w, x)
        return x

    over_examples(look)(jnp.eye(8), jnp.ones((ROWS, 8)))
    assert found == ["float32"]


def test_sums_over_devices_travel_as_they_come():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    w, x = jnp.eye(8), jnp.ones((16, 8))

    def split(f, check_vma=False):
        specs = {"in_specs": P("data"), "out_specs": P()}
        return jax.shard_map(f, mesh=mesh, check_vma=check_vma, **specs)

    def dtypes(program, primitive="psum"):
        return read_by(primitive, program, x)

    def over(axes, out=0):
        f = lambda x: jax.lax.psum(x @ w, axes)  # noqa: E731
        return jax.vmap(mpx.autocast(f), out_axes=out, axis_name="batch")

    assert dtypes(split(over("data"))) == ["bfloat16"]
    assert dtypes(split(over("batch", None))) == ["float32"]
    # What is left to send is small.
    assert dtypes(split(over(("batch", "data"), None))) == ["float32"]
    assert split(over(("batch", "data"), None))(x)[0] == 16
    # Devices within an axis of `vmap`, and `jit` around all.
    within = jax.vmap(split(lambda x: jax.lax.psum(x @ w, "data")), axis_name="batch")
    assert dtypes(mpx.autocast(lambda x: within(x[None]))) == ["bfloat16"]
    for checked in True, False:
        sums = split(lambda x: jax.lax.psum(x @ w, "data"), check_vma=checked)
        found = mpx.autocast(jax.jit(sums))
        assert dtypes(found, "psum_invariant" if checked else "psum") == ["bfloat16"]


def test_a_named_sum_in_half_precision_is_found():
    mean = lambda x: jax.lax.pmean(x, "batch")  # noqa: E731
    half = jax.ShapeDtypeStruct((ROWS, 8), jnp.bfloat16)
    report = mpx.explain(jax.vmap(mean, axis_name="batch"))(half)
    assert [o.finding for o in report.findings] == ["psum in bfloat16"]
    under_autocast = mpx.explain(mpx.autocast(jax.vmap(mean, axis_name="batch")))(half)
    assert not under_autocast.findings
    (total,) = [o for o in under_autocast.operations if o.primitive == "psum"]
    assert total.reason.endswith("it sums over an axis of `jax.vmap`")


def test_a_sparse_product_in_half_precision_is_found():
    matrix = hub("BCOO")
    data = matrix.data.astype(jnp.bfloat16)

    def multiply(h):
        return sparse.BCOO((data, matrix.indices), shape=matrix.shape) @ h

    h = jax.ShapeDtypeStruct((MANY, 4), jnp.bfloat16)
    found = [o.finding for o in mpx.explain(multiply)(h).findings]
    assert found == ["bcoo_dot_general in bfloat16"]
    assert not mpx.explain(mpx.autocast(multiply))(h).findings
