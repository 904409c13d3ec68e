"""Programs of public bug reports whose numbers half precision between products spoils.

Each is held against an interpreter that rounds what products read and give, and nothing
else (`rigs.sweep.ideal`). `python -m rigs.sweep` does it for all functions of JAX.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import mpx
from rigs.sweep.ideal import make_ideal

from ..helpers import slow_but
from ..registries import RECIPES
from .counting import jitted, named, pairs, relative_error

pytestmark = pytest.mark.third_party
HALVES = ("float16", "bfloat16")
SCALE = 2.0**6


def normal(*shape, seed=0):
    return jax.random.normal(jax.random.key(seed), shape)


def uniform(*shape):
    return jax.random.uniform(jax.random.key(0), shape)


def two_terms(p, x):
    """An error of a time reversal and a bias (a sum of two computed values)."""
    a, b, c = jnp.split(x @ p["w"], 3, -1)
    return jnp.mean((0.99 * a - b + 0.1 * c) ** 2)


def near_100():
    a = jnp.round(100 + 10 * normal(64, 8))
    return jnp.concatenate([a, a - 1, normal(64, 8, seed=1)], -1)


def gae_scan(p, x):
    """Advantages (generalized advantage estimation), of values near 30."""
    v = (x @ p["w"])[:, 0]
    deltas = 0.3 + 0.99 * v[1:] - v[:-1]
    turn = lambda a, d: (d + 0.99 * 0.95 * a,) * 2  # noqa: E731
    return jnp.mean(lax.scan(turn, 0.0, deltas, reverse=True)[1] ** 2)


def decay_constant(p, x):
    """A running mean by 0.999, which is 1 in bfloat16."""
    h = jnp.tanh(x @ p["w"])
    mean = h[0]
    for i in range(1, 16):
        mean = 0.999 * mean + 0.001 * h[i]
    return jnp.mean(((mean - h[0]) @ p["v"] * 100) ** 2)


def one_above():
    signs = jnp.where(jnp.arange(16) > 0, -1, 1)[:, None, None]
    return 1 + uniform(16, 32, 8) * signs


def small_steps(p, x):
    """Euler's steps."""
    start = state = x @ p["w"]
    for _ in range(20):
        state = state - 1e-3 * jax.nn.relu(state)
    return jnp.mean((40 * (state - start) @ p["v"]) ** 2)


def det3(p, x):
    """Volumes: the determinant of 3 x 3 matrices is elementwise."""
    m = (x @ p["w"]).reshape(-1, 3, 3)
    return jnp.mean((jnp.linalg.det(m).reshape(-1, 8) @ p["v"]) ** 2)


def gru_update_bias(p, x):
    """A GRU whose update gate begins with a bias of 6."""

    def turn(s, x):
        z, n = jnp.split(x @ p["w"] + s @ p["u"], 2)
        z = jax.nn.sigmoid(z + 6)
        s = (1 - z) * jnp.tanh(n) + z * s
        return s, s

    return jnp.mean((lax.scan(turn, jnp.zeros(8), x)[1] @ p["v"]) ** 2)


def gate_near_one(p, x):
    """A recurrence whose decay is a sigmoid close to 1 (state-spaces/mamba#996)."""
    a = jax.nn.sigmoid(x @ p["a"] + 6.0)
    b = (1 - a) * (x @ p["v"] + 1)
    turn = lambda h, s: (s[0] * h + s[1],) * 2  # noqa: E731
    return jnp.mean((lax.scan(turn, jnp.zeros(16), (a, b))[1] @ p["o"]) ** 2)


def erfcx(p, x):
    return jnp.mean((jax.scipy.special.erfcx(x @ p["w"]) @ p["v"]) ** 2)


def ratio(p, x):
    """A quotient, whose derivative holds the square of a number near 400."""
    a, b = jnp.split(x @ p["w"], 2, -1)
    return jnp.mean((a / b) @ p["v"])


def near_400():
    a, b = normal(64, 8) ** 2 * 100, 400 + 50 * normal(64, 8, seed=1)
    return jnp.concatenate([a, b], -1)


def gather(p, x):
    """One row for 5,000 edges of a graph (apache/mxnet#17703)."""
    table = jnp.tanh(x @ p["w"])
    return jnp.mean(jnp.tanh(table[jnp.zeros(5000, int)] @ p["v"]))


def segment_max(p, x):
    """A maximum over 5,000 equal neighbours."""
    h, segments = jnp.tanh(x @ p["w"]), jnp.where(jnp.arange(5002) < 5000, 0, 1)
    return jnp.sum(jax.ops.segment_max(h, segments, 2) @ p["v"])


def max_ties(p, x):
    """A maximum over 90,000 equal pixels, which float16 cannot count."""
    return jnp.sum(jnp.max(jnp.tanh(x @ p["w"]), axis=0) @ p["v"])


def max_pool_overlap(p, x):
    """One peak that wins 961 windows."""
    h = jnp.tanh(x @ p["w"])[None, :, :, None]
    sizes, strides = (1, 31, 31, 1), (1, 1, 1, 1)
    y = lax.reduce_window(h, -jnp.inf, lax.max, sizes, strides, "SAME")
    return jnp.mean((y[0, :, :, 0] @ p["v"]) ** 2)


def llama_rotary(p, x):
    """Rotary positions whose angles are a product, as Hugging Face writes them."""
    inverse = 1 / 10000 ** (jnp.arange(0, 8, 2) / 8)
    angles = jnp.arange(2048.0)[:, None] @ inverse[None]
    cos, sin = (jnp.tile(f(angles), 2) for f in (jnp.cos, jnp.sin))
    q = x @ p["w"]
    turned = jnp.concatenate([-q[:, 4:], q[:, :4]], -1)
    return jnp.mean(jnp.tanh((q * cos + turned * sin) @ p["v"]) ** 2)


def ode_in_a_scan(p, x):
    """Two derivatives through small steps in a scan."""

    def energy(p, x):
        start = x @ p["w"]
        turn = lambda s, _: (s - 1e-3 * jnp.tanh(s), None)  # noqa: E731
        end = lax.scan(turn, start, length=20)[0]
        return jnp.mean((40 * (end - start) @ p["v"]) ** 2)

    return jnp.sum(jax.grad(energy, argnums=1)(p, x) ** 2) * 1e3


def weights(w=8, scale=1.0, v=None):
    return {"w": jnp.eye(w) * scale, "v": jnp.eye(8) * scale if v is None else v}


def drawn(**shapes):
    return {n: normal(*s, seed=i) / 3 for i, (n, s) in enumerate(shapes.items())}


# What makes the weights and the batch of each.
PROGRAMS = {
    two_terms: lambda: ({"w": jnp.eye(24)}, near_100()),
    gae_scan: lambda: ({"w": jnp.ones((8, 1))}, 4 + normal(256, 8) / 8),
    decay_constant: lambda: ({"w": jnp.eye(8) / 2, "v": jnp.eye(8)}, one_above()),
    small_steps: lambda: (weights(), 1 + uniform(64, 8)),
    det3: lambda: (
        weights(9),
        (normal(512, 1, 3) + 0.1 * normal(512, 3, 3, seed=1)).reshape(512, 9),
    ),
    gru_update_bias: lambda: (
        drawn(w=(8, 16), u=(8, 16), v=(8, 16)),
        1 + normal(500, 8, seed=3) / 3,
    ),
    gate_near_one: lambda: (
        drawn(a=(8, 16), v=(8, 16), o=(16, 8)),
        normal(256, 8, seed=3),
    ),
    erfcx: lambda: (weights(), 2 + 2 * uniform(64, 8)),
    ratio: lambda: (weights(16), near_400()),
    gather: lambda: (weights(scale=1 / 4), jnp.ones((2, 8))),
    segment_max: lambda: (weights(scale=1 / 4), jnp.ones((5002, 8))),
    max_ties: lambda: (weights(v=jnp.ones((8, 4)) / 4), jnp.full((90_000, 8), 0.5)),
    max_pool_overlap: lambda: (
        weights(64, v=jnp.ones((64, 8))),
        jnp.zeros((64, 64)).at[32, 32].set(1.0),
    ),
    llama_rotary: lambda: (weights(v=normal(8, 8, seed=1) / 3), normal(2048, 8)),
    ode_in_a_scan: lambda: (weights(), 1 + normal(64, 8) / 3),
}


@functools.cache
def of(name):
    """The program, and what float32 gives."""
    (loss,) = (f for f in PROGRAMS if f.__name__ == name)
    args = PROGRAMS[loss]()
    return loss, *args, jax.jit(jax.value_and_grad(loss))(*args)


def errors_of_leaves(found, exact):
    return [relative_error(a, b) for a, b in pairs(found, exact)]


def errors(found, exact):
    (value, grads), (right, right_grads) = found, exact
    of_value = float(abs(value - right) / abs(right))
    return [of_value, *errors_of_leaves(grads, right_grads)]


def derived(func, p, x, scale=SCALE):
    value, grads = jax.value_and_grad(lambda p, x: scale * func(p, x))(p, x)
    return value / scale, jax.tree.map(lambda g: g / scale, grads)


# Either dtype of half, in turn.
RUN_IN = list(zip([f.__name__ for f in PROGRAMS], itertools.cycle(HALVES)))
LIKE_ANOTHER = ("small_steps", "gate_near_one", "erfcx", "segment_max")


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(*case, marks=pytest.mark.slow if case[0] in LIKE_ANOTHER else ())
        for case in RUN_IN
    ],
)
def test_errors_are_those_of_rounded_products(name, dtype):
    loss, p, x, exact = of(name)
    found, ideal = (
        errors(jitted(lambda *a, f=f: derived(f(loss, dtype), *a))(p, x), exact)
        for f in (mpx.autocast, make_ideal)
    )
    # A thousandth is less than bfloat16 rounds any product by.
    each = list(zip(found, ideal, strict=True))
    assert all(a <= 3 * b + 1e-3 for a, b in each), each


QUANTIZING = ("current", "delayed", "mxfp8")
# Those whose first product is of a matrix, and none of vectors.
QUANTIZED = ("two_terms", "decay_constant", "erfcx", "det3", "ratio")


@pytest.mark.parametrize(
    ("name", "recipe"),
    slow_but(
        [("decay_constant", "delayed"), ("erfcx", "mxfp8"), ("det3", "current")],
        zip(QUANTIZED, itertools.cycle(QUANTIZING)),
    ),
)
def test_under_a_recipe_too_only_products_are_rounded(name, recipe):
    loss, p, x, exact = of(name)
    made = functools.partial(mpx.autocast, loss, recipe=RECIPES[recipe])
    is_between = lambda c: c.kind.value == "full"  # noqa: E731
    rules = mpx.Rules(mpx.Rule(mpx.Precision.FULL, when=is_between))
    ours, explicit = (
        errors(trained(made(**options), p, x), exact)
        for options in ({}, {"rules": rules})
    )
    assert all(a <= 1.5 * b + 1e-3 for a, b in zip(ours, explicit, strict=True))


def trained(func, p, x):
    """Value and gradients of a second step, for which scales are known."""
    step = jitted(lambda s, p, x: mpx.value_and_grad(func, s)(p, x))
    result = step(step(mpx.init_scaling(func, p, x), p, x).scaling, p, x)
    return result.value, result.grads


@pytest.mark.parametrize("dtype", HALVES)
def test_what_is_compared_is_float32(dtype):
    """Which of 16 experts, whether a detection counts, and the order of scores."""

    def route(w, x):
        scores = jax.nn.sigmoid(x @ w)
        return jnp.argmax(scores, -1), scores > 0.999, jnp.argsort(scores, -1)[:, -1]

    x = 6 + normal(512, 16)
    # What a product gives is rounded by right.
    x = x.astype(dtype).astype(jnp.float32)
    found = mpx.autocast(route, dtype)(jnp.eye(16), x)
    assert all(map(jnp.array_equal, found, route(jnp.eye(16), x)))


@pytest.mark.parametrize("dtype", HALVES)
def test_products_that_sum_one_number_are_none(dtype):
    def products(x, y):
        inner = x[:, None] @ y[None]
        batched = jnp.einsum("bi,bj->bij", inner, inner)
        dense = inner[..., None] @ jnp.full((1, 3), 0.999)
        image = inner[None, :, :, None]
        numbers = ("NHWC", "HWIO", "NHWC")
        one = jnp.full((1, 1, 1, 2), 0.999)
        convolved = lax.conv_general_dilated(
            image, one, (1, 1), "VALID", dimension_numbers=numbers
        )
        two = jnp.concatenate([image, image], -1)
        depthwise = lax.conv_general_dilated(
            two, one, (1, 1), "VALID", dimension_numbers=numbers, feature_group_count=2
        )
        rows = lax.ragged_dot(inner[:, :1], jnp.full((2, 1, 3), 0.999), SIZES)
        return batched, dense, convolved, depthwise, rows

    x, y = 1 + normal(8) / 3, 1 + normal(8, seed=1) / 3
    found, exact = (f(x, y) for f in (mpx.autocast(products, dtype), products))
    for a, b in zip(found, exact, strict=True):
        assert relative_error(a, b) < 1e-6


SIZES = jnp.array([5, 3], jnp.int32)


# --- Many reads of one value ----------------------------------------------------------

READS = 3000


def _in_scan(h, v):
    rows = jnp.linspace(0.5, 1.5, READS)
    return lax.scan(lambda c, r: (c + jnp.sum(h * r @ v) / READS, None), 0.0, rows)[0]


def _in_scan_by_products(h, v):
    turn = lambda c, r: (c + jnp.sum(h @ v) * r / READS, None)  # noqa: E731
    return lax.scan(turn, 0.0, jnp.ones(READS))[0]


def _carried(h, v):
    turn = lambda c, _: ((c[0] + jnp.sum(c[1] @ v) / READS, c[1]), None)  # noqa: E731
    return lax.scan(turn, (0.0, h), length=READS)[0][0]


def _in_remat(h, v):
    turn = jax.checkpoint(lambda c, _: (c + jnp.sum(h @ v) / READS, None))
    return lax.scan(turn, 0.0, length=READS)[0]


def _in_cond(h, v):
    def turn(c, r):
        read = lambda: jnp.sum(h @ v)  # noqa: E731
        return c + lax.cond(r > 0, read, lambda: 0.0) / READS, None

    return lax.scan(turn, 0.0, jnp.ones(READS))[0]


def _of_a_jit(h, v):
    read = jax.jit(lambda h, v: jnp.sum(h @ v))
    return sum(read(h, v) for _ in range(100)) / 100


def _of_a_vmap(h, v):
    return jnp.mean(jax.vmap(lambda r: h * r @ v)(jnp.ones(READS)))


MANY_READS = {
    "scan": _in_scan,
    "scan of products": _in_scan_by_products,
    "carried unchanged": _carried,
    "remat": _in_remat,
    "cond": _in_cond,
    "jit": _of_a_jit,
    "vmap": _of_a_vmap,
    "take": lambda h, v: jnp.mean(jnp.take(h, jnp.zeros(READS, int), 0) @ v),
    "repeat": lambda h, v: jnp.mean(jnp.repeat(h, READS, 0) @ v),
    "nearest resize": lambda h, v: jnp.mean(
        jax.image.resize(h, (4 * READS, 8), "nearest") @ v
    ),
}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(
            name, dtype, marks=pytest.mark.slow if name in ("jit", "vmap") else ()
        )
        for name, dtype in zip(MANY_READS, itertools.cycle(HALVES))
    ],
)
def test_gradients_of_many_reads_are_summed_in_float32(name, dtype):
    read = MANY_READS[name]
    loss = lambda p, x: read(x @ p["w"], p["v"])  # noqa: E731
    p, x = {"w": jnp.eye(8) / 4, "v": jnp.eye(8) / 4}, normal(4, 8)
    exact = jax.grad(loss)(p, x)
    _, found = jax.jit(lambda *a: derived(mpx.autocast(loss, dtype), *a))(p, x)
    assert max(errors_of_leaves(found, exact)) < 0.02


def test_gradients_of_many_reads_on_devices():
    mesh = jax.make_mesh((2,), ("data",), (jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec

    def loss(p, x):
        def local(p, x):
            h = x @ p["w"]
            mean = jnp.mean(jnp.take(h, jnp.zeros(READS, int), 0) @ p["v"])
            return lax.pmean(mean, "data")

        specs = spec(), spec("data")
        return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=spec())(p, x)

    p, x = {"w": jnp.eye(8) / 4, "v": jnp.eye(8) / 4}, normal(4, 8)
    exact, found = (jax.jit(jax.grad(f))(p, x) for f in (loss, mpx.autocast(loss)))
    assert max(errors_of_leaves(found, exact)) < 0.02


def test_a_stream_that_begins_as_a_product_is_float32():
    """Of 64 small steps by a branch none is lost, as from a stream in bfloat16."""

    def loss(p, x):
        stream = x @ p["w"]
        for _ in range(64):
            stream = stream + jnp.tanh(stream @ p["v"])
        return jnp.mean(stream)

    p = {"w": 100 * jnp.eye(8), "v": jnp.eye(8) * 1e-3}
    x = jnp.ones((4, 8))
    full = abs(mpx.autocast(loss)(p, x) / loss(p, x) - 1)
    half = abs(mpx.autocast(loss, residual_stream="half")(p, x) / loss(p, x) - 1)
    assert full < 1e-4 < 1e-2 < half


# --- Half precision of the program's own, other than autocast's -----------------------


def _cast(w, x):
    return jnp.maximum(jnp.exp(x @ w), 0.0).astype(jnp.bfloat16)


def _summed(w, x):
    h = jnp.exp((x @ w).astype(jnp.bfloat16))
    return h + h


def _stacked(w, x):
    turn = lambda c, row: (c, jnp.exp(row @ w))  # noqa: E731
    return lax.scan(turn, 0.0, jnp.stack([x, x]))[1].astype(jnp.bfloat16)


def _branches(w, x):
    y = lax.cond(x[0, 0] > 0, lambda: jnp.exp(x @ w), lambda: x @ w)
    return y.astype(jnp.bfloat16)


def _product(w, x):
    h = jnp.maximum(jnp.exp(x @ w), 0.0)
    return h.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)


def _region(w, x):
    with mpx.autocast(dtype=jnp.bfloat16):
        return jnp.maximum(jnp.exp(x @ w), 0.0) @ w


def _region_inside(w, x):
    with mpx.autocast(dtype=jnp.bfloat16):
        h = jnp.exp(x @ w)
    h = jnp.maximum(h, 0.0)
    with mpx.autocast(dtype=jnp.bfloat16):
        return h @ w


@pytest.mark.parametrize(
    "func", [_cast, _summed, _stacked, _branches, _product, _region, _region_inside]
)
def test_numbers_of_bfloat16_pass_through_float16(func):
    """What the program casts to bfloat16 is not rounded to float16 on its way."""
    w, x = jnp.eye(4) * 10, jnp.full((2, 4), 1.2345)
    written = mpx.autocast(func, enabled=False)
    found, exact = mpx.autocast(func, jnp.float16)(w, x), written(w, x)
    assert found.dtype == exact.dtype
    assert relative_error(found, exact) < 0.1


def test_a_sum_that_the_program_declares_in_float16_keeps_its_digits():
    def func(x):
        h = jnp.exp(x.astype(jnp.float16))
        return h + h

    x = jnp.linspace(0.1, 0.2, 16)
    assert relative_error(mpx.autocast(func)(x), func(x)) < 1e-3


def test_a_scan_stacks_what_the_program_declares_in_half():
    def func(x):
        turn = lambda c, row: (c, jnp.exp(row.astype(jnp.bfloat16)))  # noqa: E731
        return lax.scan(turn, 0.0, x)[1]

    # For a CPU and jax 0.10 float32 is stacked: see `test_wide.py`.
    cast = mpx.autocast(func, target="h100")
    (scan,) = named("scan", cast, jnp.ones((3, 4)))
    assert scan.outvars[-1].aval.dtype == jnp.bfloat16


@pytest.mark.slow
def test_a_long_memory_is_worth_its_float32():
    """A state space model whose gates are near 1, which a naive cast makes 1."""
    w = {"into": normal(32, 96) / 6, "out": normal(32, 32, seed=1) / 6}
    x = normal(4, 256, 32, seed=2)

    def loss(w, x):
        drive, decay, gate = jnp.split(x @ w["into"], 3, -1)
        decay = jax.nn.sigmoid(decay + 6)

        def combine(first, second):
            return first[0] * second[0], second[0] * first[1] + second[1]

        _, states = lax.associative_scan(combine, (decay, (1 - decay) * drive), axis=1)
        y = (states * jax.nn.silu(gate)) @ w["out"]
        return jnp.mean(jnp.square(y.astype(jnp.float32) - 1))

    def naive(w, x):
        w, x = jax.tree.map(lambda x: x.astype(jnp.bfloat16), (w, x))
        return loss(w, x)

    exact = jitted(jax.grad(loss))(w, x)
    ours, cast = (
        relative_error(jitted(jax.grad(f))(w, x), exact)
        for f in (mpx.autocast(loss), naive)
    )
    assert ours < cast / 4
    assert ours < 0.01
