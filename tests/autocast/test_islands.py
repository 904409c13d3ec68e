"""What autocast computes again for the backward pass, and what is kept instead."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core
from jax.sharding import AxisType, PartitionSpec as P

import mpx
from mpx._program import Island, measured_bytes, parts
from mpx._program.remat import kept_bytes

from ..helpers import slow_but
from .blocks import block, layer_norm, vit_parameters
from .counting import (
    count_products,
    equations,
    kept_by,
    nested_equations,
    pairs,
    primitives,
    relative_error,
)

ROWS, WIDTH = 32, 64
SIZE = ROWS * WIDTH


def normed(x):
    return layer_norm({"scale": jnp.full(WIDTH, 1.5), "bias": jnp.ones(WIDTH)}, x)


def rms(x):
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-6)


def masked_softmax(x):
    mask = jnp.arange(ROWS)[:, None] >= jnp.arange(WIDTH)[None]
    return jax.nn.softmax(jnp.where(mask, x, -1e30))


def dropped_gelu(x):
    kept = jax.random.bernoulli(jax.random.key(0), 0.9, x.shape)
    return jnp.where(kept, jax.nn.gelu(x) / 0.9, 0)


ISLANDS = {
    "softmax": jax.nn.softmax,
    "softmax with a mask": masked_softmax,
    "log_softmax": jax.nn.log_softmax,
    "layer norm": normed,
    "root mean square": rms,
    "gelu": jax.nn.gelu,
    "exact gelu": functools.partial(jax.nn.gelu, approximate=False),
    "silu": jax.nn.silu,
    "squared and scaled": lambda x: jnp.square(jnp.tanh(x)) * x,
    "dropout after gelu": dropped_gelu,
}
QUICK = ("softmax with a mask", "layer norm", "dropout after gelu")
on_every_island = pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(name, dtype, marks=() if name in QUICK else pytest.mark.slow)
        for name, dtype in zip(ISLANDS, itertools.cycle(["float16", "bfloat16"]))
    ],
)


@functools.cache
def weights():
    normal = np.random.default_rng(1).standard_normal
    return tuple(jnp.asarray(w / 8) for w in normal((2, WIDTH, WIDTH), np.float32))


def between_products(island):
    def loss(weights, x):
        x = island(x @ weights[0]) @ weights[1]
        return jnp.sum(x * jnp.cos(jnp.arange(1.0, SIZE + 1).reshape(x.shape)))

    return loss


X = np.random.default_rng(2).standard_normal((ROWS, WIDTH), np.float32)


def residuals_of(func, *args):
    return [x for x in kept_by(func, *args) if x.size >= SIZE]


def small_and_fast(loss, *options):
    return [mpx.autocast(loss, *options, residuals=r) for r in ("small", "fast")]


def size_of(arrays):
    return sum(x.size * x.dtype.itemsize for x in arrays)


def remats(func, *args):
    jaxpr = jax.make_jaxpr(func)(*args)
    return [e for e, _ in equations(jaxpr) if "policy" in e.params]


def same(a, b):
    return all(np.array_equal(x, y, equal_nan=True) for x, y in pairs(a, b))


def near(a, b):
    """As far apart as rounding in another order puts them."""
    np.testing.assert_allclose(a, b, rtol=1e-2, atol=1e-2 * np.max(np.abs(b)))


@on_every_island
def test_an_island_is_recomputed_bit_for_bit_and_keeps_no_float32(name, dtype):
    """Without a compiler, which may fuse the one otherwise than the other."""
    loss = between_products(ISLANDS[name])
    small, fast = small_and_fast(loss, dtype)
    derived = [jax.value_and_grad(f, (0, 1))(weights(), X) for f in (small, fast)]
    assert same(*derived)
    default = mpx.autocast(loss, dtype)
    assert remats(jax.grad(default), weights(), X)
    assert not remats(jax.grad(fast), weights(), X)
    # The last product's result is multiplied by numbers of its size.
    kept = residuals_of(default, weights(), X)
    dtypes = [x.dtype.name for x in kept]
    assert dtypes.count("float32") <= 1 + dtypes.count("bool")
    assert size_of(kept) < size_of(residuals_of(fast, weights(), X))


def recomputation(island):
    loss = mpx.autocast(between_products(island))
    (found,) = remats(jax.grad(loss), weights(), X)
    return found, [e for e, _ in equations(found.params["jaxpr"])]


@pytest.mark.parametrize("island", [rms, normed], ids=["rms", "layer norm"])
def test_a_norm_keeps_means_and_roots_behind_a_barrier(island):
    found, inside = recomputation(island)
    assert found.params["prevent_cse"]
    assert "rsqrt" not in {e.primitive.name for e in inside}


def batch_normed(x):
    apart = x - jnp.mean(x, 0, keepdims=True)
    return apart * jax.lax.rsqrt(jnp.mean(jnp.square(apart), 0, keepdims=True) + 1e-6)


@pytest.mark.parametrize(
    ("island", "is_apart"), [(normed, True), (batch_normed, False)]
)
def test_sums_over_a_batch_are_held_apart_by_no_barrier(island, is_apart):
    small, fast = small_and_fast(between_products(island))
    (found,) = remats(small, weights(), X)
    assert found.params["prevent_cse"] == is_apart
    near(*(jax.grad(f)(weights(), X)[0] for f in (small, fast)))


@pytest.mark.parametrize("name", ["softmax", "gelu", "silu", "dropout after gelu"])
def test_what_keeps_no_sums_is_kept_apart_by_a_number(name):
    """An array behind a barrier is written down, whatever comes before and after."""
    found, inside = recomputation(ISLANDS[name])
    barriers = [e for e in inside if e.primitive.name == "optimization_barrier"]
    assert not found.params["prevent_cse"]
    assert [e.outvars[0].aval.shape for e in barriers] == [()]
    computed_once = {"reduce_max", "exp"} if name == "softmax" else set()
    assert computed_once <= {e.primitive.name for e in inside}


@pytest.mark.slow
def test_what_takes_many_kernels_waits_for_the_gradients():
    """Else all layers compute their scans again before the first one is needed."""

    def scanned(x):
        def combine(first, second):
            return first[0] * second[0], second[0] * first[1] + second[1]

        decay = jax.nn.sigmoid(x)
        return jax.lax.associative_scan(combine, (decay, (1 - decay) * x))[1]

    (found,) = remats(jax.grad(mpx.autocast(between_products(scanned))), weights(), X)
    # Factors and the gradient, but not the product from which it is recomputed.
    *_, product, gradient = zip(found.invars, found.params["prevent_cse"], strict=True)
    assert product[0].aval.dtype == gradient[0].aval.dtype == jnp.bfloat16
    assert (product[1], gradient[1]) == (False, True)

    # And a second derivative goes through the barrier.
    def second(func):
        gradient = jax.grad(func)
        return jax.jvp(lambda w: gradient(w, X), (weights(),), (weights(),))[1]

    small, fast = map(second, small_and_fast(between_products(scanned)))
    for one, other in zip(small, fast, strict=True):
        assert jnp.allclose(one, other, rtol=0.05, atol=0.02 * jnp.abs(other).max())


def test_a_region_may_give_integers_and_booleans_too():
    def loss(weights, x):
        y = jax.nn.gelu(x @ weights[0])
        ranks = jnp.cumsum((y > 0.5).astype(jnp.int32), axis=1)  # ends the region
        first = jax.lax.sort(y > 0)
        return jnp.sum(jnp.where(first, (y @ weights[1]) * ranks.astype(y.dtype), 0))

    for transform in (jax.grad, lambda f: lambda w, x: jax.jvp(f, (w, x), (w, x))):
        assert same(*(transform(f)(weights(), X) for f in small_and_fast(loss)))
    (found,) = remats(jax.grad(mpx.autocast(loss)), weights(), X)
    assert not found.params["prevent_cse"]


@pytest.mark.parametrize("name", ISLANDS)
def test_the_count_by_primitives_decides_as_autodiff_would(name):
    x = jnp.ones((ROWS, WIDTH), jnp.bfloat16)

    def island(x):
        return ISLANDS[name](x.astype(jnp.float32)).astype(jnp.bfloat16)

    jaxpr = jax.make_jaxpr(island)(x)
    counted, needed = kept_bytes(jaxpr.jaxpr, (False,))
    measured = measured_bytes(island, [jax.typeof(x)], (False,))
    assert needed in (2 * SIZE, 3 * SIZE)  # with a boolean mask
    assert 0.4 <= counted / measured <= 2.5
    assert needed <= 0.75 * counted and needed <= 0.75 * measured


def test_what_is_kept_anyway_does_not_count():
    def island(scale, x):
        return (jnp.exp(x) * scale).astype(jnp.bfloat16)

    types = [jax.ShapeDtypeStruct((SIZE,), jnp.float32)] * 2
    jaxpr = jax.make_jaxpr(island)(*types).jaxpr
    assert kept_bytes(jaxpr, (False, False)) == (8 * SIZE, 8 * SIZE)
    assert kept_bytes(jaxpr, (True, False)) == (4 * SIZE, 4 * SIZE)
    assert measured_bytes(island, types, (True, False)) == 4 * SIZE


def in_a_fast_region(x):
    with mpx.autocast(residuals="fast"):
        return normed(x)


@pytest.mark.parametrize(
    "loss",
    [
        between_products(lambda x: x + 1),
        between_products(lambda x: jnp.where(jnp.arange(WIDTH) > 3, x, 0.0)),
        between_products(lambda x: jax.nn.relu(x)),
        between_products(lambda x: x.reshape(WIDTH, ROWS).T / 3),
        between_products(in_a_fast_region),
        jax.grad(between_products(normed)),
    ],
)
def test_an_island_that_keeps_little_or_is_not_to_be_recomputed_is_not(loss):
    assert not remats(mpx.autocast(loss), weights(), X)


def test_what_is_written_in_half_precision_is_recomputed_too():
    def island(x):
        return jnp.exp(x.astype(jnp.bfloat16)).astype(jnp.float32)

    def written_in_half(weights, x):
        x, (first, second) = x.astype(jnp.bfloat16), mpx.cast_tree(weights, "bfloat16")
        return jnp.sum((jnp.exp(x @ first) @ second).astype(jnp.float32))

    for loss in (between_products(island), written_in_half):
        assert len(remats(jax.grad(mpx.autocast(loss)), weights(), X)) == 1


def test_a_long_computation_is_not_repeated():
    def island(x, count):
        for _ in range(count):
            x = jnp.sin(x)
        return x

    for count, found in ((20, True), (400, False)):
        loss = between_products(functools.partial(island, count=count))
        assert bool(remats(jax.grad(mpx.autocast(loss)), weights(), X)) == found


# --- Where islands are ----------------------------------------------------------------


def divided(func, *args, fixed=(), may_join=lambda equation: True):
    jaxpr = jax.make_jaxpr(func)(*args).jaxpr
    return parts(jaxpr, [jaxpr.invars[i] for i in fixed], may_join), jaxpr


def names(found):
    return [
        {e.primitive.name for e in part.equations}
        if isinstance(part, Island)
        else part.primitive.name
        for part in found
    ]


def test_no_path_leaves_an_island_and_comes_back():
    def func(x, w):
        y = jnp.exp(x)
        return jnp.sin(y) + (y @ w)  # the sum needs the product

    found, jaxpr = divided(func, X, weights()[0], fixed=(1,))
    assert names(found) == [{"exp", "sin"}, "dot_general", {"add"}]
    done = set(jaxpr.invars)
    for part in found:
        made = (part,) if not isinstance(part, Island) else part.equations
        for equation in made:
            atoms = [a for a in equation.invars if not isinstance(a, core.Literal)]
            assert done.issuperset(atoms)
            done.update(equation.outvars)
    assert done.issuperset(jaxpr.outvars)


@pytest.mark.parametrize(
    "end",
    [
        lambda x: checkpoint_name(x, "mine"),
        jax.lax.sort,
        lambda x: jnp.cumsum(x, axis=0),
        jax.lax.optimization_barrier,
    ],
)
def test_ends_of_islands(end):
    found, _ = divided(lambda x: jnp.sin(end(jnp.exp(x))), X)
    assert [isinstance(part, Island) for part in found] == [True, False, True]


def test_what_weights_become_is_in_no_island_but_copied_into_it():
    def func(x, w):
        return jnp.exp(x) * jnp.broadcast_to(jnp.tanh(w), x.shape)

    found, _ = divided(func, X, weights()[0][0], fixed=(1,))
    (island,) = found
    assert {"tanh", "exp", "mul"} <= {e.primitive.name for e in island.equations}
    assert sorted(v.aval.shape for v in island.inputs) == [X.shape, (WIDTH,)]


def test_effects_stay_in_their_order(capfd):
    def loss(x):
        jax.debug.print("first", ordered=True)
        y = jnp.exp(x)
        jax.debug.print("second {}", y[0, 0], ordered=True)
        return jnp.sin(y)

    found, _ = divided(loss, X)
    assert [isinstance(part, Island) for part in found] == [False, True, False]
    mpx.autocast(loss)(X)
    jax.effects_barrier()
    assert capfd.readouterr().out.startswith("first\nsecond ")


def test_no_path_of_effects_leaves_an_island_and_comes_back():
    @jax.jit
    def layer(w, x):
        y = x @ w
        jax.debug.print("{}", y[0, 0])
        return y

    def loss(w, x):
        skipped = jnp.tanh(x @ w)
        y = layer(w, skipped)
        z = layer(w, x)  # prints after the other, and is added to what went into it
        return jnp.sum(y) + jnp.sum(jnp.sin(skipped + z))

    w = weights()[0]
    found, jaxpr = divided(loss, w, X, fixed=(0,))
    inside = [part.equations for part in found if isinstance(part, Island)]
    alone = [part for part in found if not isinstance(part, Island)]
    assert len(alone) + sum(map(len, inside)) == len(jaxpr.eqns)
    exact, rounded = (jax.grad(f)(w, X) for f in (loss, mpx.autocast(loss)))
    assert relative_error(rounded, exact) < 2e-2


def test_a_batch_that_the_function_closes_over_is_data():
    loss = between_products(normed)
    assert remats(mpx.autocast(lambda w: loss(w, X)), weights())


def test_what_is_not_worth_its_while_is_emitted_once():
    def loss(w, x):
        floor = jnp.tanh(w[:1])
        first, second = jnp.maximum(x @ w, floor), jnp.maximum(-x @ w, floor)
        return jnp.sum(first) + jnp.sum(second)

    assert primitives(mpx.autocast(loss), weights()[0], X).count("tanh") == 1


def test_islands_that_differ_by_one_bit_are_not_equal():
    ends = (1.0, float(np.nextafter(np.float32(1), np.float32(2))))

    def loss(w, x, ends):
        x = x @ w
        return [jnp.exp(jnp.square(x)) * end for end in ends]

    func = mpx.autocast(functools.partial(loss, ends=ends), residuals="small")
    literals = {
        float(a.val)
        for e, _ in equations(jax.make_jaxpr(func)(weights()[0], X))
        for a in e.invars
        if isinstance(a, core.Literal)
    }
    assert literals.issuperset(np.float32(ends))


def test_equal_layers_are_emitted_once():
    layers = [vit_parameters(k, 96) for k in jax.random.split(jax.random.key(3), 4)]
    x = jax.ShapeDtypeStruct((2, 8, 96), jnp.float32)

    def loss(layers, x):
        for layer in layers:
            x = block(layer, x)
        return jnp.sum(x)

    found = remats(mpx.autocast(loss), layers, x)
    assert len(found) >= 4 * 2  # two norms of each
    # The first norm's input is an argument, not a stream.
    assert len({id(e.params["jaxpr"]) for e in found}) <= 3
    found = remats(jax.grad(mpx.autocast(loss)), layers, x)
    assert len(found) >= 4 * 4  # and softmax and gelu


# --- In every place -------------------------------------------------------------------


def stack(residuals, is_scan):
    def loss(layers, x):
        def turn(x, layer):
            return block(layer, x, causal=True), None

        if is_scan:
            x, _ = jax.lax.scan(turn, x, layers)
        else:
            for i in range(3):
                x, _ = turn(x, jax.tree.map(lambda leaf: leaf[i], layers))  # noqa: B023
        return jnp.mean(jnp.square(x))

    return mpx.autocast(loss, residuals=residuals)


@functools.cache
def stacked():
    keys = jax.random.split(jax.random.key(4), 3)
    layers = jax.jit(jax.vmap(lambda key: vit_parameters(key, 96)))(keys)
    return layers, jax.random.normal(jax.random.key(5), (2, 128, 96))


@pytest.mark.slow
@pytest.mark.parametrize("scan", [False, True], ids=["in a row", "scanned"])
def test_a_stack_of_blocks_keeps_half_precision_and_its_stream(scan):
    layers, x = stacked()
    found = {}
    for residuals in ("small", "fast"):
        loss = stack(residuals, scan)
        compiled = jax.jit(jax.value_and_grad(loss)).lower(layers, x).compile()
        found[residuals] = compiled(layers, x)
        found[residuals, "memory"] = compiled.memory_analysis().temp_size_in_bytes
        found[residuals, "products"] = count_products(jax.grad(loss), layers, x)
        found[residuals, "bytes"] = size_of(
            x for x in residuals_of(loss, layers, x) if x.dtype != np.bool_
        )
    assert found["small", "products"] == found["fast", "products"]
    assert found["small", "bytes"] < 0.75 * found["fast", "bytes"]
    assert relative_error(found["small"], found["fast"]) < 5e-3
    assert scan or found["small", "memory"] < 0.95 * found["fast", "memory"]


TRANSFORMS = {
    "jit": lambda f: jax.jit(jax.grad(f)),
    "vmap": lambda f: jax.vmap(jax.grad(f), (None, 0)),
    "checkpoint around it": lambda f: jax.grad(jax.checkpoint(f)),
    "forward mode": lambda f: lambda w, x: jax.jvp(f, (w, x), (w, x)),
    "forward over reverse": lambda f: lambda w, x: jax.jvp(jax.grad(f), (w, x), (w, x)),
    "reverse over reverse": lambda f: jax.grad(
        lambda w, x: sum(jnp.sum(g**2) for g in jax.tree.leaves(jax.grad(f)(w, x)))
    ),
    "linearize": lambda f: lambda w, x: jax.linearize(f, w, x)[1](w, x),
}


ONE_OF_EACH = ("vmap", "checkpoint around it", "forward over reverse")


@pytest.mark.parametrize(
    ("island", "name"),
    [
        *slow_but(
            [("layer norm", name) for name in ONE_OF_EACH],
            [("layer norm", name) for name in TRANSFORMS],
        ),
        # An island with a key is transformed like another one.
        ("dropout after gelu", "vmap"),
        ("dropout after gelu", "reverse over reverse"),
    ],
)
def test_under_transforms(name, island):
    x = np.stack([X, 2 * X]) if name == "vmap" else X
    small, fast = small_and_fast(between_products(ISLANDS[island]))
    way = TRANSFORMS[name]
    jax.tree.map(near, way(small)(weights(), x), way(fast)(weights(), x))


def test_islands_of_programs_over_devices():
    loss = between_products(normed)
    expected = jax.jit(jax.grad(mpx.autocast(loss, residuals="fast")))(weights(), X)

    def mesh(kind):
        return jax.make_mesh((8,), ("data",), axis_types=(kind,))

    def mean(weights, x):
        return jax.lax.pmean(loss(weights, x), "data")

    def check(func, x):
        assert remats(func, weights(), x)
        jax.tree.map(near, jax.jit(jax.grad(func))(weights(), x), expected)

    specs = {"in_specs": (P(), P("data")), "out_specs": P()}
    split = functools.partial(jax.shard_map, mesh=mesh(AxisType.Auto), **specs)
    for func in (mpx.autocast(split(mean)), split(mpx.autocast(mean))):
        check(func, np.tile(X, (8, 1)))
    # Where types say how arrays are sharded.
    explicit = mesh(AxisType.Explicit)
    with jax.set_mesh(explicit):
        x = jax.device_put(X, jax.NamedSharding(explicit, P("data")))
        check(mpx.autocast(loss), x)


# --- With the user's own --------------------------------------------------------------


def test_nothing_is_recomputed_within_what_the_user_recomputes():
    loss = between_products(lambda x: jax.checkpoint(normed)(x))
    found = remats(mpx.autocast(loss), weights(), X)
    assert len(found) == 1 and found[0].params["policy"] is None


def test_a_policy_of_names_keeps_what_it_names():
    def island(x):
        return jnp.sin(checkpoint_name(normed(x), "norm"))

    loss = between_products(island)
    policy = jax.checkpoint_policies.save_only_these_names("norm")
    kept = residuals_of(jax.checkpoint(mpx.autocast(loss), policy=policy), weights(), X)
    none = residuals_of(jax.checkpoint(mpx.autocast(loss)), weights(), X)
    assert len(kept) == len(none) + 1
    small, fast = small_and_fast(loss)
    products = [count_products(jax.grad(f), weights(), X) for f in (small, fast)]
    assert products[0] == products[1]


@pytest.mark.parametrize("said", ["in_shardings", "out_shardings", "donate_argnums"])
def test_a_jit_that_says_where_its_arrays_lie_is_called_once(said):
    """Or that it overwrites one, which is not there when all is recomputed."""
    mesh = jax.make_mesh((2,), ("i",), devices=jax.devices()[:2])
    place = jax.NamedSharding(mesh, P("i"))
    placed = jax.jit(rms, **{said: 0 if said == "donate_argnums" else place})
    for island, is_repeated in ((jax.jit(rms), True), (placed, False)):
        low = mpx.autocast(between_products(island))
        jaxpr = jax.make_jaxpr(low)(weights(), X)
        calls = [w for e, _, w in nested_equations(jaxpr) if "name" in e.params]
        assert list(map(bool, calls)) == [is_repeated]


@pytest.mark.parametrize("target", ["tpu v5e", "h100", "cpu"])
def test_islands_are_recomputed_whatever_is_compiled_for(target):
    loss = between_products(normed)
    small = None if target != "tpu v5e" else "small"  # there in loops only, by default
    assert remats(mpx.autocast(loss, target=target, residuals=small), weights(), X)
    assert not remats(mpx.autocast(loss, target=target, residuals="fast"), weights(), X)


# --- Shown ----------------------------------------------------------------------------


def test_explain_shows_islands_with_their_bytes():
    loss = mpx.autocast(between_products(normed))
    report = mpx.explain(jax.grad(loss))(weights(), X)
    (island,) = [i for i in report.islands if "rsqrt" in i.primitives]
    assert island.bytes_before >= 2 * 4 * SIZE
    assert island.bytes_after <= 2 * SIZE + 4 * 4 * ROWS
    assert "normed" in island.where or "layer_norm" in island.where
    assert island.source
    assert "recomputed" in report.table()
    assert "islands recomputed" in report.to_html()
    assert mpx.reports.Report.from_json(report.to_json()) == report
    kept = mpx.explain(jax.grad(loss), residuals="fast")(weights(), X)
    assert kept.totals.residual_bytes is not None
    plain = mpx.autocast(between_products(normed), residuals="fast")
    fast = mpx.explain(jax.grad(plain))(weights(), X)
    assert fast.islands == ()
    saved = fast.totals.residual_bytes - report.totals.residual_bytes
    assert saved >= 0.9 * (island.bytes_before - island.bytes_after)


def test_explain_tells_islands_apart_that_save_the_same():
    def loss(weights, x):
        x = normed(normed(x @ weights[0]) @ weights[1])
        return jnp.sum((x @ weights[0]) ** 2)

    report = mpx.explain(jax.grad(mpx.autocast(loss)))(weights(), X)
    one, other = [i for i in report.islands if "rsqrt" in i.primitives]
    assert one == other


def test_an_equal_island_of_another_program_has_readers_of_its_own():
    """Who reads what it gives is said by the plan of the program that it stands in."""

    def layer():
        def g(w, v, x):
            y = jax.nn.softmax(x @ w).astype(jnp.bfloat16)
            product, wide = y @ v.astype(y.dtype), y.astype(jnp.float32)
            return jnp.sum(product, dtype=jnp.float32) + jnp.sum(
                jax.lax.sort(y).astype(jnp.float32) + jax.lax.cumsum(wide)
            )

        return jax.jit(g)

    first, second = layer(), layer()
    function = mpx.autocast(lambda *args: first(*args) + second(*args))
    program = jax.make_jaxpr(function)(*[jnp.ones((64, 64))] * 3)
    jits = [e for e in program.eqns if e.params.get("name") == "g"]
    one, other = (str(e.params["jaxpr"]) for e in jits)
    assert one == other
