"""`mpx.nn.dot_product_attention` against an oracle of float64, and its edges."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpx.nn

from ..helpers import TOLERANCE, slow_but, unchecked_annotations
from ..low_precision import quantized_products
from .attention_cases import BATCH, CASES, HEADS, KEYS, LENGTH, SIZE
from .cases import kept_arrays

attend = mpx.nn.dot_product_attention


def value_and_gradients(func, arrays, cotangent):
    names = [n for n in ("query", "key", "value", "bias") if n in arrays]
    rest = {name: x for name, x in arrays.items() if name not in names}

    def of(*floats):
        return func(**dict(zip(names, floats, strict=True)), **rest)

    @jax.jit
    def both(*floats):
        out, pullback = jax.vjp(of, *floats)
        return out, pullback(cotangent.astype(out.dtype))

    return both(*(arrays[name] for name in names))


def cotangent_for(dtype, seed=1):
    g = np.random.default_rng(seed).normal(size=(BATCH, LENGTH, HEADS, SIZE))
    return jnp.asarray(g, dtype)


def assert_close(found, exact, tolerance):
    for a, b in zip(found, exact, strict=True):
        size = max(1e-3, float(np.abs(b).max(initial=0)))
        np.testing.assert_allclose(np.asarray(a, np.float64), b, atol=tolerance * size)


# All that a call can say stands in others, too, which meet where it is hard.
SLOW = (
    "plain",
    "groups",
    "causal",
    "mask of keys",
    "blind",
    "blind with a bias",
    "lengths",
    "lengths of queries",
    "causal window",
)
QUICK = [name for name in CASES if name not in SLOW]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *slow_but([(n, "float32") for n in QUICK], [(n, "float32") for n in CASES]),
        ("groups", "float16"),
        ("blind with a bias", "bfloat16"),
        ("lengths", "float16"),
    ],
)
def test_values_and_gradients_are_exact(name, dtype):
    case = CASES[name]
    arrays, g = case.arrays(dtype), cotangent_for(dtype)
    out, rows, gradients = case.exact(arrays, g)
    said = case.said()

    @jax.jit
    def run(arrays):
        found = value_and_gradients(lambda **x: attend(**x, **said), arrays, g)
        return found, attend(**arrays, **said, return_residual=True)

    (found, pulled), (again, found_rows) = run(arrays)
    assert found.dtype == dtype and found_rows.dtype == jnp.float32
    assert_close((found, *pulled), (out, *gradients), TOLERANCE[dtype] * 2)
    assert_close((again,), (out,), TOLERANCE[dtype] * 2)
    lengths = np.full(BATCH, LENGTH) if case.lengths[0] is None else case.lengths[0]
    inside = np.arange(LENGTH) < np.reshape(lengths, (-1, 1))
    found_rows = np.where(inside[..., None], found_rows, 0)
    np.testing.assert_allclose(found_rows, rows, atol=2e-2, rtol=2e-2)


@pytest.mark.third_party  # JAX's attention promotes
@pytest.mark.parametrize("name", slow_but(QUICK, CASES))
def test_what_the_kernel_is_given_means_the_same(name, monkeypatch):
    """Operands made for the kernel, in the hands of `jax.nn`'s own products."""
    dtype = "bfloat16"  # JAX's products of float16 are not for CPUs
    from mpx.nn import _dot_product_attention
    from mpx.nn._attention_kernel import _native, call, prepare
    from mpx.nn._attention_products import within_lengths

    case = CASES[name]
    arrays, g = case.arrays(dtype), cotangent_for(dtype)
    out, _, gradients = case.exact(arrays, g)

    def through_jax(options, x):
        found = call(options, _native(options, x), "xla", prepare(options, x))
        return (within_lengths(found, x.query_lengths),)

    monkeypatch.setattr(_dot_product_attention, "attend", through_jax)
    call_of_case = lambda **arrays: attend(**arrays, **case.said())  # noqa: E731
    found, pulled = value_and_gradients(call_of_case, arrays, g)
    assert_close((found, *pulled), (out, *gradients), TOLERANCE[dtype] * 2)


# --- Edges ----------------------------------------------------------------------------


def test_one_example_without_a_batch():
    arrays = CASES["shared bias"].arrays("float32")
    one = {n: x[0] for n, x in arrays.items()}
    call = jax.jit(lambda x: attend(**x, return_residual=True))
    (expected, rows), (found, found_rows) = call(arrays), call(one)
    np.testing.assert_allclose(found, expected[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found_rows, rows[0], rtol=1e-5)


@pytest.mark.parametrize(
    ("said", "dtype"), [("mask", "float16"), ("lengths", "bfloat16")]
)
def test_a_query_that_sees_nothing_attends_evenly(said, dtype):
    q, k, v = CASES["plain"].arrays(dtype).values()
    more = {"mask": jnp.zeros((1, 1, LENGTH, KEYS), bool)}
    if said == "lengths":
        more = {"key_value_seq_lengths": jnp.zeros(BATCH, jnp.int32)}

    @jax.jit
    def both(*xs):
        out, pullback = jax.vjp(lambda *xs: attend(*xs, **more), *xs)
        return out, pullback(jnp.ones_like(out))

    out, (q_bar, k_bar, v_bar) = both(q, k, v)
    even = jnp.broadcast_to(v.astype("float32").mean(1, keepdims=True), out.shape)
    np.testing.assert_allclose(out.astype("float32"), even, atol=2e-2)
    assert not q_bar.any() and not k_bar.any()
    assert jnp.isfinite(v_bar).all() and v_bar.all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_biases_that_are_all_infinite_give_no_nan(dtype):
    arrays = CASES["plain"].arrays(dtype)
    arrays["bias"] = jnp.full((1, 1, 1, KEYS), -jnp.inf, dtype)
    found, pulled = value_and_gradients(attend, arrays, cotangent_for(dtype))
    assert all(jnp.isfinite(x).all() for x in (found, *pulled))


def test_a_query_that_sees_nothing_does_not_see_the_future():
    q, k, v = CASES["plain"].arrays("float32").values()
    mask = jnp.arange(KEYS).reshape(1, 1, 1, -1) > 3
    out = attend(q, k, v, mask=mask, is_causal=True)
    np.testing.assert_allclose(out[:, 2], v[:, :3].mean(1), rtol=1e-5)


def test_scores_of_float16_do_not_overflow():
    q = jnp.full((1, 2, 1, 8), 300.0, jnp.float16)
    v = jnp.arange(16.0).reshape(1, 2, 1, 8).astype(jnp.float16)
    assert (q[0, 0, 0].astype("float32") ** 2).sum() > 65504
    assert jnp.isinf(q[0, 0, 0] @ q[0, 0, 0])
    loss = lambda q: attend(q, q, v, scale=1.0).astype("float32").sum()  # noqa: E731
    out, gradients = jax.jit(jax.value_and_grad(loss))(q)
    np.testing.assert_allclose(out, 120)
    assert jnp.isfinite(gradients).all()


@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_what_is_not_finite_stays_so(name):
    arrays = CASES["plain"].arrays("bfloat16")
    for number in (jnp.inf, jnp.nan):
        bad = arrays[name].at[0, 1, 1, 1].set(number)
        assert not jnp.isfinite(attend(**arrays | {name: bad})).all()


@pytest.mark.parametrize("dtype", slow_but(["bfloat16"], ["bfloat16", "float32"]))
def test_dropout_drops_probabilities(dtype):
    case, rate, key = CASES["groups"], 0.25, jax.random.key(3)
    arrays, g = case.arrays(dtype), cotangent_for(dtype)
    said = {"dropout_rate": rate, "dropout_key": key}
    found, pulled = value_and_gradients(lambda **x: attend(**x, **said), arrays, g)
    keep = jax.random.bernoulli(key, 1 - rate, (BATCH, HEADS, LENGTH, KEYS))
    out, _, gradients = case.exact(arrays, g, keep=keep, rate=rate)
    assert_close((found, *pulled), (out, *gradients), 2 * TOLERANCE[dtype])
    mapped = jax.vmap(lambda x, k: attend(**x, dropout_rate=rate, dropout_key=k))
    twice = jax.tree.map(lambda x: jnp.stack([x, x]), (arrays, key))
    several = jax.jit(mapped)(*twice)
    assert_close(several, (out, out), 2 * TOLERANCE[dtype])


def test_all_derivatives_without_a_kernel():
    """Forward, backward and both: those of what one would write in JAX."""
    case = CASES["shared bias"]
    arrays, along = case.arrays("float32"), case.arrays("float32", seed=5)

    def written(query, key, value, bias):
        scores = jnp.einsum("btnh,bsnh->bnts", query, key) / SIZE**0.5 + bias
        p = jax.nn.softmax(jnp.where(jnp.tri(LENGTH, dtype=bool), scores, -1e30))
        return jnp.einsum("bnts,bsnh->btnh", p, value)

    def derivatives(func):
        def loss(arrays):
            return jnp.sum(jnp.sin(func(**arrays)))

        def all_of_them(arrays, along):
            forward = jax.jvp(loss, (arrays,), (along,))
            return forward, jax.jvp(jax.grad(loss), (arrays,), (along,))

        return jax.jit(all_of_them)(arrays, along)

    with jax.numpy_rank_promotion("allow"):
        expected = derivatives(written)
    found = derivatives(lambda **x: attend(**x, is_causal=True))
    for a, b in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5 * max(1, float(jnp.abs(b).max())))


def test_probabilities_are_kept_once_in_half_precision():
    q, k, v = CASES["plain"].arrays("bfloat16").values()
    probabilities = BATCH * HEADS * LENGTH * KEYS
    kept = kept_arrays(attend, q, k, v)
    assert [d for d, s in kept if np.prod(s) == probabilities] == ["bfloat16"]
    assert {d for d, _ in kept} == {"bfloat16"}
    dropout = {"dropout_rate": 0.5, "dropout_key": jax.random.key(0)}
    dropped = kept_arrays(lambda *x: attend(*x, **dropout), q, k, v)
    sizes = [d for d, s in dropped if np.prod(s) == probabilities]
    assert sorted(sizes) == ["bfloat16", "bfloat16", "bool"]


# --- Ambient settings -----------------------------------------------------------------


@pytest.mark.slow
def test_the_ambient_dtype_is_computed_in():
    arrays = CASES["causal"].arrays("float32")
    halves = {n: x.astype(jnp.float16) for n, x in arrays.items()}
    with mpx.autocast(dtype=jnp.float16, ambient=True):
        found, kept = attend(**arrays), attend(**halves)
        with mpx.autocast(enabled=False, ambient=True):
            plain = attend(**arrays)
    assert found.dtype == jnp.float32 and kept.dtype == jnp.float16
    np.testing.assert_array_equal(found, attend(**halves).astype(jnp.float32))
    np.testing.assert_array_equal(plain, attend(**arrays))
    with mpx.autocast(target="cpu", ambient=True):
        np.testing.assert_array_equal(attend(**arrays), plain)


def test_an_ambient_recipe_for_attention_quantizes_both_products():
    arrays = CASES["plain"].arrays("bfloat16")
    for fp8_dpa in (True, False):
        recipe = mpx.Float8CurrentScaling(fp8_dpa=fp8_dpa)
        with mpx.autocast(recipe=recipe, ambient=True):
            assert quantized_products(lambda x: attend(**x), arrays) == 2 * fp8_dpa


LOW = mpx.Rules(mpx.Rule(mpx.Precision.LOW, primitive="dot_product_attention"))
CURRENT = mpx.Float8CurrentScaling()


@pytest.mark.parametrize(
    "options",
    [
        {"rules": LOW, "recipe": CURRENT, "strict": False},
        {"recipe": mpx.DelayedScaling(fp8_dpa=True, warm_start=True)},
    ],
)
def test_rules_and_recipes_quantize_both_products_of_attention(options):
    case = CASES["causal"]
    arrays = case.arrays("float32")
    func = mpx.autocast(lambda x: attend(**x, **case.said()), weights=(), **options)
    assert quantized_products(func, arrays) == 2
    found = jax.jit(func)(arrays)
    expected = attend(**arrays, **case.said())
    error = jnp.linalg.norm(found - expected) / jnp.linalg.norm(expected)
    assert 1e-3 < error < 0.1
    gradients = jax.jit(jax.grad(lambda x: func(x).sum()))(arrays)
    assert all(jnp.isfinite(x).all() for x in gradients.values())


# --- Errors ---------------------------------------------------------------------------

X = np.ones((2, 3, 4, 8), np.float32)


def bad(error, match, **options):
    return pytest.param(error, match, options, id=f"{next(iter(options))} {match}")


SHAPE = r"`mask` of .* must have the shape .* = \(2, 4, 3, 3\).*got bool\[2,3\]"
LENGTHS = r"`key_value_seq_lengths` of .*int32\[2\]; got"
INTEGERS = X.astype(int)


@pytest.mark.parametrize(
    ("error", "match", "options"),
    [
        bad(TypeError, "one floating", value=X.astype("float16")),
        bad(TypeError, "one floating", query=INTEGERS, key=INTEGERS, value=INTEGERS),
        bad(ValueError, "needs a `query` of", query=X[0, 0]),
        bad(ValueError, "`value` of .batch, kv_seq", value=X[:, :2]),
        bad(ValueError, "of .batch, q_seq", key=X[..., :4], value=X[..., :4]),
        bad(ValueError, "divide heads", key=X[:, :, :3], value=X[:, :, :3]),
        bad(ValueError, SHAPE, mask=np.ones((2, 3), bool)),
        bad(TypeError, "`mask` of .* must be bool", mask=np.ones((3, 3), np.float32)),
        bad(TypeError, "`bias` of .* must be a float", bias=np.ones((3, 3), bool)),
        bad(ValueError, LENGTHS, key_value_seq_lengths=np.ones(3, np.int32)),
        bad(TypeError, "`scale` of .* must be a Python number", scale=True),
        bad(
            ValueError,
            "`local_window_size` of .*two numbers from 0 on",
            local_window_size=(1, -1),
        ),
        bad(
            ValueError,
            "must be None, 'xla', 'cudnn' or 'pallas'; got 'triton'",
            implementation="triton",
        ),
        bad(ValueError, "at least 0 and below 1", dropout_rate=1.0),
        bad(ValueError, "needs a `dropout_key`", dropout_rate=0.5),
    ],
)
def test_bad_input_of_attention(error, match, options):
    with unchecked_annotations(), pytest.raises(error, match=match):
        attend(**{"query": X, "key": X, "value": X, **options})


def test_a_scale_of_attention_that_is_traced_is_refused():
    match = "`scale` of .* must be a Python number"
    with unchecked_annotations(), pytest.raises(TypeError, match=match):
        jax.jit(lambda s: attend(X, X, X, scale=s))(1.0)
