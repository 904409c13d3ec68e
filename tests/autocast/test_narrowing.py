"""Where float32 values are rounded early, because nothing after it would see more."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import mpx
from mpx._program import PRIMITIVES

from .counting import count_casts, given_by, kept_by, named, relative_error

WIDTH = 16


@functools.cache
def random(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32))


def weight_and_rows():
    return random(WIDTH, WIDTH), random(8, WIDTH, seed=1)


def stack_and_rows():
    return random(3, WIDTH, WIDTH) / 4, random(8, WIDTH, seed=1)


def norm(x):
    return x * lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-6)


def pool(x):
    return lax.reduce_window(x, -jnp.inf, lax.max, (2, 1), (2, 1), "SAME")


# --- Picking numbers ------------------------------------------------------------------

PICKS = {
    "abs": jnp.abs,
    "concatenate": lambda x: jnp.concatenate([x, x[:2]]),
    "dynamic_update_slice": lambda x: lax.dynamic_update_slice(x, -x[:2], (3, 0)),
    "max": lambda x: lax.max(x, 0.0),
    "min": lambda x: lax.min(x, 0.0),
    "neg": jnp.negative,
    "pad": lambda x: jnp.pad(x, ((0, 1), (0, 0))),
    "reduce_window_max": pool,
    "reduce_window_min": lambda x: -pool(-x),
    "select_n": lambda x: jnp.where(x > 0.5, x, 0.0),
    "stack": lambda x: jnp.stack([x, x]),
}


@pytest.mark.parametrize("name", sorted(PICKS))
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_what_picks_numbers_may_be_rounded_before_or_after(name, dtype):
    x = random(9, WIDTH).at[0].set(jnp.array([jnp.inf, -jnp.inf, 1e-9, 7e4] * 4))
    x = x.at[1, 0].set(jnp.nan)
    before = PICKS[name](x.astype(dtype).astype(np.float32)).astype(dtype)
    after = PICKS[name](x).astype(dtype)
    # Which numbers a mask picks is no matter of rounding: the mask itself is not.
    if name == "select_n":
        before = jnp.where(x > 0.5, x.astype(dtype), jnp.zeros((), dtype))
    before, after = (np.asarray(y, np.float32) for y in (before, after))
    np.testing.assert_array_equal(before, after)


def test_every_primitive_that_picks_is_tried():
    picking = {name for name, known in PRIMITIVES.items() if known.picks}
    # Those that compare numbers pick only where rounding changes no order.
    compared = {"max", "min", "reduce_window_max", "reduce_window_min"}
    assert picking | compared == set(PICKS)


@pytest.mark.parametrize("pick", [lax.max, lax.min])
def test_what_is_nearly_equal_is_compared_in_float32(pick):
    """Rounded, the two are equal, and each would get half of the gradient."""

    def picked(a, b):
        return jnp.sum(pick(a * 1.0, b * 1.0) @ jnp.ones((WIDTH, 1)))

    a, b = jnp.ones((2, WIDTH)), jnp.full((2, WIDTH), 1.001)
    found = jax.grad(mpx.autocast(picked), argnums=(0, 1))(a, b)
    exact = jax.grad(picked, argnums=(0, 1))(a, b)
    assert all(map(jnp.array_equal, found, exact))


def pooled(w, x):
    return pool(jax.nn.relu(norm(x @ w))) @ w


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_relu_and_pooling_before_a_product_run_in_half(dtype):
    def unpicked(w, x):  # arithmetic in between: computed in float32, and then rounded
        return (pool(jax.nn.relu(norm(x @ w))) * 1.0) @ w

    inputs = weight_and_rows()
    cast, other = (mpx.autocast(func, dtype) for func in (pooled, unpicked))
    assert given_by("reduce_window_max", cast, *inputs) == [dtype]
    assert given_by("max", cast, *inputs) == [dtype]
    assert set(given_by("rsqrt", cast, *inputs)) == {"float32"}
    assert given_by("reduce_window_max", other, *inputs) == ["float32"]
    np.testing.assert_array_equal(cast(*inputs), other(*inputs))


def seen_by_an_exponential(w, x):
    x = jax.nn.relu(norm(x @ w))
    return x @ w, jnp.exp(x)


def in_a_head_of_full_precision(w, x):
    with jax.named_scope("head"):
        return jax.nn.relu(norm(x @ w)) @ w


@pytest.mark.parametrize(
    "func",
    [
        seen_by_an_exponential,
        lambda w, x: (jax.nn.relu(norm(x @ w)) * jnp.exp(x)) @ w,
        lambda w, x: jnp.dot(jax.nn.relu(norm(x @ w)), w, precision="highest"),
        lambda w, x: (jnp.exp(x) + jax.nn.relu(norm(x @ w))) @ w,  # onto a stream
        in_a_head_of_full_precision,
    ],
)
def test_what_may_be_computed_with_is_picked_in_float32(func):
    rule = mpx.Rule(mpx.Precision.FULL, scope="head", primitive="dot_*")
    rules = mpx.Rules(rule) if func is in_a_head_of_full_precision else None
    cast = mpx.autocast(func, rules=rules)
    assert given_by("max", cast, *weight_and_rows()) == ["float32"]


def test_the_sum_of_two_norms_is_rounded_only_in_a_half_stream():
    def func(w, x):
        x = norm(x @ w)
        return jax.nn.relu(x + norm(jnp.tanh(x @ w))) @ w

    for stream, dtype in (("full", "float32"), ("half", "bfloat16")):
        cast = mpx.autocast(func, residual_stream=stream)
        assert given_by("add", cast, *weight_and_rows())[-1] == dtype


# --- What a scan stacks ---------------------------------------------------------------


# For a CPU and jax 0.10 loops keep float32: see `test_wide.py`.
on_gpu = functools.partial(mpx.autocast, target="h100")


def scan_of(func, *args):
    (found,) = named("scan", func, *args)
    return found


def layers(ws, x):
    return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)[0]


def layers_used_twice(ws, x):
    return lax.scan(lambda x, w: (jnp.tanh(x @ w @ w), None), x, ws)[0]


def sum_of(func):
    return lambda *args: jnp.sum(jnp.square(func(*args)))


def test_a_stacked_weight_with_one_use_is_cast_in_front_of_the_loop():
    ws, x = stack_and_rows()
    assert scan_of(on_gpu(layers), ws, x).invars[-1].aval.dtype == jnp.bfloat16
    assert scan_of(on_gpu(layers_used_twice), ws, x).invars[-1].aval.dtype == np.float32
    scans = named("scan", jax.grad(sum_of(on_gpu(layers))), ws, x)
    results = [v.aval for scan in scans for v in scan.outvars]
    stacked = {v.dtype for v in results if v.shape == ws.shape}
    assert stacked == {jnp.dtype(jnp.bfloat16)}


def test_casting_in_front_of_a_loop_changes_no_bit():
    def in_turn(ws, x):  # unrolled, each weight is cast where it is used
        for w in ws:
            x = jnp.tanh(x @ w).astype(np.float32)  # as a carry is
        return x

    funcs = [jax.grad(sum_of(on_gpu(func))) for func in (layers, in_turn)]
    with jax.disable_jit():
        found, expected = (func(*stack_and_rows()) for func in funcs)
    np.testing.assert_array_equal(found, expected)


def test_recipes_get_stacked_weights_in_bfloat16_and_not_in_float16():
    """A loop reads half of the bytes; of float16 the range would not do."""
    for dtype, stacked in (("bfloat16", "bfloat16"), ("float16", "float32")):
        cast = on_gpu(layers, dtype, recipe=mpx.Float8CurrentScaling())
        assert scan_of(cast, *stack_and_rows()).invars[-1].aval.dtype == stacked


def test_what_only_products_take_of_a_scan_is_stacked_in_half():
    def scanned(w, xs):
        return lax.scan(lambda c, x: (c, norm(jnp.tanh(x @ w))), 0.0, xs)[1]

    def seen(w, xs):
        ys = scanned(w, xs)
        return ys @ w, jnp.exp(ys)

    w, xs = random(WIDTH, WIDTH), random(3, 8, WIDTH, seed=1)
    read = on_gpu(lambda w, xs: scanned(w, xs) @ w)
    assert scan_of(read, w, xs).outvars[-1].aval.dtype == jnp.bfloat16
    assert scan_of(on_gpu(seen), w, xs).outvars[-1].aval.dtype == np.float32


# --- What a scan carries --------------------------------------------------------------


def residual_block(x, w):
    return x + jnp.tanh(norm(x) @ w) @ w


def blocks(ws, x):
    return lax.scan(lambda x, w: (residual_block(x, w), None), x, ws)[0]


def checkpointed(ws, x):
    block = jax.checkpoint(residual_block)
    return lax.scan(lambda x, w: (block(x, w), None), x, ws)[0]


def trained(w, xs):
    """Gradient descent: parameters to which something is added, too."""

    def step(w, x):
        return w + -0.1 * jax.grad(lambda w: jnp.sum(jnp.square(x @ w)))(w), None

    return lax.scan(step, w, xs)[0]


def summed(w, xs):
    """A sum over the turns, which nothing else reads."""
    return lax.scan(lambda s, x: (s + jnp.exp(x @ w), None), xs[0], xs)[0]


def summed_losses(w, xs):
    turn = lambda total, x: (total + jnp.mean((x @ w) ** 2), None)  # noqa: E731
    return lax.scan(turn, jnp.zeros(()), xs)[0]


@pytest.mark.parametrize("func", [blocks, checkpointed])
def test_a_half_stream_is_carried_in_half(func):
    ws, x = stack_and_rows()
    for stream, dtype in (("full", np.float32), ("half", jnp.bfloat16)):
        cast = on_gpu(func, residual_stream=stream)
        scan = scan_of(cast, ws, x)
        assert scan.outvars[0].aval.dtype == dtype
        assert cast(ws, x).dtype == np.float32
        exact, found = (jax.grad(sum_of(f))(ws, x) for f in (func, cast))
        assert relative_error(found, exact) < 2e-2


@pytest.mark.parametrize("func", [trained, summed, summed_losses])
def test_what_is_no_stream_is_carried_as_it_was_declared(func):
    w, xs = random(WIDTH, WIDTH), random(3, WIDTH, WIDTH, seed=1)
    scan = scan_of(mpx.autocast(func, residual_stream="half"), w, xs)
    assert scan.outvars[0].aval.dtype == np.float32


def test_a_scan_of_no_turns_gives_what_it_was_given():
    ws, x = random(0, WIDTH, WIDTH), random(8, WIDTH, seed=1)
    cast = mpx.autocast(blocks, residual_stream="half")
    np.testing.assert_array_equal(cast(ws, x), x)


# --- Recurrent cells ------------------------------------------------------------------


def lstm(weights, xs):
    of_input, of_state = weights

    def turn(carry, x):
        h, c = carry
        gates = x @ of_input + h @ of_state
        into, forget, cell, out = jnp.split(gates, 4, axis=-1)
        c = jax.nn.sigmoid(forget) * c + jax.nn.sigmoid(into) * jnp.tanh(cell)
        h = jax.nn.sigmoid(out) * jnp.tanh(c)
        return (h, c), h

    zeros = jnp.zeros((8, WIDTH))
    return lax.scan(turn, (zeros, zeros), xs)[1]


def read_out(weights, xs):
    return jnp.sum(jnp.square(lstm(weights, xs) @ weights[0]))


@functools.cache
def cell_inputs():
    weights = tuple(random(WIDTH, 4 * WIDTH, seed=i) / 4 for i in range(2))
    return weights, random(5, 8, WIDTH, seed=2)


def test_a_recurrent_cell_keeps_its_gates_and_its_state():
    weights, xs = cell_inputs()
    loss = on_gpu(read_out, residuals="small")
    wide = [x for x in kept_by(loss, weights, xs) if x.dtype == np.float32]
    # What each turn begins with.
    assert sum(x.shape == xs.shape for x in wide) == 1
    exact = jax.grad(read_out)(weights, xs)
    assert relative_error(jax.grad(loss)(weights, xs), exact) < 2e-2


@pytest.mark.parametrize("target", ["tpu v5e", "h100"])
def test_loops_keep_little_whatever_is_compiled_for(target):
    def bytes_of(**options):
        loss = mpx.autocast(read_out, target=target, **options)
        kept = kept_by(loss, *cell_inputs())
        return sum(x.size * x.dtype.itemsize for x in kept)

    small, fast = (bytes_of(residuals=kind) for kind in ("small", "fast"))
    is_tpu = target == "tpu v5e"
    assert small == bytes_of(residuals="small" if is_tpu else None) < 0.75 * fast
    assert small <= bytes_of() < fast


# --- What is stored for the users of a value ------------------------------------------


def dtypes_kept(func, *args):
    """The dtypes of the arrays of more than a number that autodiff keeps."""
    pulled = jax.tree.leaves(jax.vjp(func, *args)[1])
    return {str(x.dtype) for x in pulled if x.ndim and jnp.any(x)}


@pytest.fixture
def qk(getkey):
    return tuple(jax.random.normal(getkey(), (2, 4, 8, 16)) for _ in range(2))


@pytest.mark.parametrize(
    ("product", "name", "scale"),
    [
        ("bhqd,bhkd->bhqk", "div", lambda x: x / 3.7),
        (None, "mul", lambda x: x * 0.3),
        ("bhqd,bhkd->bhqk", "mul", lambda x: 0.3 * x),
    ],
)
def test_scores_are_stored_in_half_and_scaled_in_float32(qk, product, name, scale):
    def attended(q, k):
        y = jnp.einsum(product, q, k) if product else q @ k.swapaxes(-1, -2)
        return jax.nn.softmax(scale(y)) @ k

    cast = mpx.autocast(attended, residuals="small")
    assert set(given_by("dot_general", cast, *qk)) == {"bfloat16"}
    assert given_by(name, cast, *qk)[0] == "float32"
    assert given_by("exp", cast, *qk) == ["float32"]
    assert dtypes_kept(cast, *qk) == {"bfloat16"}
    np.testing.assert_allclose(cast(*qk), attended(*qk), atol=2e-2)


def test_a_part_of_a_product_is_stored_in_half():
    """As by a layer that splits one projection into data and rates."""

    def loss(w, x):
        data, rate = jnp.split(x @ w, 2, -1)
        return jnp.sum((jnp.exp(jnp.cumsum(rate, 0)) * data) @ w)

    cast = mpx.autocast(loss, residuals="small")
    args = jnp.ones((16, 32)), jnp.ones((8, 16))
    # The exponential, which is computed in float32, and nothing else.
    assert [str(x.dtype) for x in kept_by(cast, *args)].count("float32") == 1


def test_a_number_below_the_range_of_float16_scales(qk):
    def scaled(q, k):
        return q @ k.swapaxes(-1, -2) * 1e-9

    found = mpx.autocast(scaled, jnp.float16)(*qk)
    assert relative_error(found, scaled(*qk)) < 1e-3


def test_dropout_leaves_a_half_stream_half(getkey):
    drop = eqx.nn.Dropout(0.1)

    def block(w, x, key):
        x = x @ w
        return x + drop(jnp.tanh(x) @ w, key=key)

    w, x = jnp.eye(16), jax.random.normal(getkey(), (8, 16))
    key = getkey()
    cast = mpx.autocast(block, residual_stream="half")
    assert given_by("div", cast, w, x, key) == ["float32"]
    assert given_by("add", cast, w, x, key)[-1] == "bfloat16"
    assert dtypes_kept(lambda w, x: cast(w, x, key), w, x) == {"bfloat16", "bool"}
    np.testing.assert_allclose(cast(w, x, key), block(w, x, key), rtol=2e-2, atol=2e-2)


def test_products_are_scaled_by_numbers_that_half_cannot_hold():
    """Positions behind 256, and a rate near 1."""

    def weighted(x, rate):
        positions = jax.lax.broadcasted_iota(jnp.float32, x.shape, 1)
        return (x @ x) * positions * (1.0 - rate)

    args = jnp.eye(300), 1e-3
    np.testing.assert_array_equal(mpx.autocast(weighted)(*args), weighted(*args))


def test_statistics_of_a_half_stream_are_computed_in_float32(getkey):
    x = jax.random.normal(getkey(), (8, 16))

    def loss(w, x):
        y = x + x @ w
        return jnp.var(y) + jnp.mean(y)

    cast = mpx.autocast(loss, residual_stream="half")
    assert set(given_by("reduce_sum", cast, jnp.eye(16), x)) == {"float32"}
    # w, x for the product and the stream, and the stream for each of the statistics.
    assert count_casts(cast, jnp.eye(16), x) == 5


def test_a_sum_of_losses_is_no_half_stream(getkey):
    x = jax.random.normal(getkey(), (8, 16))

    def loss(w, x):
        y = x @ w
        return jnp.mean(y**2) + jnp.mean(jnp.abs(y))

    args = jnp.eye(16), x
    full, half = (mpx.autocast(loss, residual_stream=s) for s in ("full", "half"))
    assert half(*args) == full(*args)
