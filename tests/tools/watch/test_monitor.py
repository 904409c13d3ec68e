"""How large the numbers of a step are: `mpx.monitor`."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, PartitionSpec as P

import mpx
from mpx._tools._watch._monitor_report import _readable
from mpx._tools._watch._statistics import (
    asked_formats,
    counts,
    round_to,
    tensor_statistics,
)
from mpx.quantization import (
    Quantizer,
    RecipeByLeg,
    Role,
    TensorQuantizer,
    quantize_dequantize,
)

from ...helpers import slow_but, unchecked_annotations
from .test_compare import LAYERS, SHAPES, WIDTH, data, weights

# Optax computes with JAX's own promotion.
pytestmark = pytest.mark.third_party

monitor = functools.partial(mpx.monitor, sample=1)
FORMATS = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float4_e2m1fn")
CURRENT, NVFP4 = mpx.Float8CurrentScaling(), mpx.NVFP4BlockScaling()


@functools.cache
def numbers():
    """Numbers over the ranges of all formats, and what is at their edges."""
    random = np.random.default_rng(0)
    spread = random.normal(size=4000) * 2.0 ** random.integers(-30, 20, 4000)
    edges = [0, 448, 449, 464, 465, 57344, 61439, 65504, 65519, 65520, 6, 7, 2.0**-9]
    edges += [2.0**-10, 1.5 * 2.0**-10, 2.0**-24, 2.0**-25, 1.1 * 2.0**-25, 1e30, 3e38]
    return np.array([*spread, *edges, *(-x for x in edges)], np.float32)


@pytest.mark.parametrize(
    "name", slow_but(["float16", "float8_e4m3fn", "float4_e2m1fn"], FORMATS)
)
def test_rounding_is_that_of_a_cast(name):
    (asked,) = asked_formats(name)
    x, dtype = numbers(), jnp.dtype(name)
    about = ml_dtypes.finfo(dtype)
    largest, normal = float(about.max), float(about.smallest_normal)
    # Formats of few bits saturate.
    given = np.clip(x, -largest, largest) if "float16" != name else x
    with np.errstate(over="ignore"):
        cast = given.astype(dtype).astype(np.float32)

    @jax.jit
    def sums(x):
        return jax.tree.map(jnp.sum, asked.kept(x, Role.INPUT, -1))

    kept = sums(x)
    assert kept.above == np.sum(np.abs(x) > largest)
    assert kept.flushed == np.sum((x != 0) & (cast == 0))
    assert kept.below == np.sum((x != 0) & (np.abs(x) < normal))
    within = x[np.abs(x) <= min(largest, 1e15)]
    lost = np.sum(np.abs(within - within.astype(dtype).astype(np.float64)))
    assert sums(within).lost == pytest.approx(lost, rel=1e-5)


@pytest.mark.parametrize("kind", Role)
@pytest.mark.parametrize("size", [1e30, 1e-30, 1.0, 1e-20, 1e8])
def test_rms_and_noise_hold_numbers_whose_squares_float32_does_not(size, kind):
    """The noise of FP8 with a scale is 31 dB, of bfloat16 55 dB."""
    x = np.asarray(jax.random.normal(jax.random.key(0), (64, 32))) * np.float32(size)
    found = statistics_of(x, ("float16", "bfloat16", TensorQuantizer()), kind)
    wide = x.astype(np.float64)
    assert found.rms == pytest.approx(np.sqrt(np.mean(wide**2)), rel=1e-4)
    assert found.amax == np.abs(x).max()
    noise = np.sum((wide - wide.astype("bfloat16").astype(np.float64)) ** 2)
    snr = 10 * np.log10(np.sum(wide**2) / noise)
    assert found.formats["bfloat16"].snr == pytest.approx(snr, abs=0.1)
    assert 53 < found.formats["bfloat16"].snr < 57
    assert 29 < found.formats["E4M3 tensor"].snr < 33
    half = found.formats["float16"].snr
    assert half == {1e30: -math.inf, 1e-30: 0.0}.get(size, half)


def test_turns_of_a_loop_of_other_sizes_are_one_norm():
    w = jnp.array([1e30, 1.0, 1e-30])[:, None, None] * jnp.ones((3, 4, 4))
    loss = lambda w, x: jax.lax.map(lambda w: x @ w, w)  # noqa: E731
    _, seen = monitor(loss, "bfloat16")(w, jnp.eye(4))
    (row,) = [row for row in seen.rows if row.kind == "weight"]
    assert row.rms == pytest.approx(1e30 / 3**0.5, rel=1e-5)
    assert [turn.rms for turn in row.turns] == pytest.approx([1e30, 1.0, 1e-30])


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_half_precision_is_rounded_bit_for_bit(wrap):
    sizes = jnp.abs(numbers())
    for dtype in map(jnp.dtype, ("float16", "bfloat16")):
        with np.errstate(over="ignore"):
            wanted = np.asarray(sizes).astype(dtype).astype(np.float32)
        rounded = wrap(lambda x, dtype=dtype: round_to(x, dtype))(sizes)
        np.testing.assert_array_equal(np.asarray(rounded), wanted)


def statistics_of(x, formats, kind=Role.INPUT):
    asked = asked_formats(formats)
    counted = np.asarray(jax.jit(lambda x: counts(x, kind, -1, asked))(x))
    found = tensor_statistics(counted, "layer", kind, "float32", asked)
    assert found is not None
    return found


def test_what_is_counted_is_what_the_words_say():
    x = jnp.array([0.0, 0.0, 1.0, -3.0, 1e-9, 1e6, jnp.nan, -jnp.inf])
    found = statistics_of(x, "float16")
    assert found.amax == 1e6 and found.zeros == 0.25 and found.broken == 2
    assert found.rms == pytest.approx(np.sqrt((1 + 9 + 1e12) / 8), rel=1e-6)
    half = found.formats["float16"]
    # Of the six that are not zero.
    assert (half.above, half.flushed, half.below) == pytest.approx((1 / 6,) * 3)
    assert half.snr == -math.inf  # 1e6 is infinite in float16


ASKED = [
    (CURRENT, Role.INPUT, 25, 33),
    (CURRENT, Role.GRADIENT, 25, 33),
    (mpx.DelayedScaling(), Role.WEIGHT, 25, 33),
    (mpx.Float8BlockScaling(), Role.WEIGHT, 25, 34),
    (mpx.MXFP8BlockScaling(), Role.INPUT, 25, 33),
    (mpx.Float8RowwiseScaling(), Role.INPUT, 25, 33),
    (mpx.Int8CurrentScaling(), Role.GRADIENT, 41, 45),
    (NVFP4, Role.WEIGHT, 15, 24),
    (NVFP4, Role.GRADIENT, 15, 24),
]


def test_each_quantized_leg_is_counted_along_the_axis_that_it_contracts():
    rows = mpx.Int8CurrentScaling()
    recipe = RecipeByLeg(dgrad=CURRENT, wgrad=rows)
    x = jax.random.normal(jax.random.key(0), (64, 32)) * jnp.arange(1.0, 33) ** 4

    def snr_along(axis):
        y = quantize_dequantize(x, rows.quantizer(Role.INPUT), axis=axis)
        return 10 * np.log10(jnp.sum(x**2) / jnp.sum((x - y) ** 2))

    assert snr_along(-2) > snr_along(-1) + 1
    for kind, seen in ((Role.INPUT, "wgrad"), (Role.WEIGHT, "dgrad")):
        found = statistics_of(x, recipe, kind).formats
        assert list(found) == ["RecipeByLeg dgrad", "RecipeByLeg wgrad"]
        snr = {name.split()[1]: one.snr for name, one in found.items()}
        assert [leg for leg in snr if snr[leg] < math.inf] == [seen]
    found = statistics_of(x, recipe, Role.GRADIENT).formats
    assert 25 < found["RecipeByLeg dgrad"].snr < 35
    for kind in (Role.INPUT, Role.GRADIENT):
        wgrad = statistics_of(x, recipe, kind).formats["RecipeByLeg wgrad"]
        assert wgrad.snr == pytest.approx(float(snr_along(-2)), abs=0.01)
    # Equal legs are one format.
    (found,) = asked_formats(RecipeByLeg(forward=rows, dgrad=rows, wgrad=rows))
    assert found.name == "RecipeByLeg"


def test_what_a_constant_scale_saturates_is_above():
    x = jnp.array([1.0, 200.0, 1e-9, 0.0])
    found = statistics_of(x, Quantizer(scale_from=4.0)).formats["E4M3 tensor"]
    assert (found.above, found.below) == pytest.approx((1 / 3, 1 / 3))


def test_legs_of_a_step_are_counted():
    recipe = RecipeByLeg(wgrad=mpx.Int8CurrentScaling())
    loss = mpx.autocast(
        lambda w, x: jnp.sum(jnp.tanh(jnp.tanh(x @ w) @ w)), recipe=recipe
    )
    w, x = jnp.eye(32), jax.random.normal(jax.random.key(0), (16, 32))
    _, seen = monitor(jax.grad(loss), recipe, sample=1)(w, x)
    found = {row.kind: row.formats["RecipeByLeg wgrad"].snr for row in seen.rows[:2]}
    assert 30 < found["input"] < 50 and found["weight"] == math.inf


@pytest.mark.parametrize(
    ("recipe", "kind", "least", "most"), slow_but(ASKED[:4], ASKED)
)
def test_a_recipe_is_asked_with_the_scales_that_it_finds(recipe, kind, least, most):
    # No multiple of any block; far from the range of the format.
    x = jax.random.normal(jax.random.key(0), (7, 3, 200)) * 1e-6
    (found,) = statistics_of(x, recipe, kind).formats.values()
    assert least < found.snr < most and found.above == 0
    quantizer = recipe.quantizer(kind)
    if quantizer.block_dimensions < 2:
        quantizer = dataclasses.replace(quantizer, stochastic_rounding=False)
        padded = jnp.pad(x, ((0, 0), (0, 0), (0, 56)))
        y = mpx.quantization.quantize_dequantize(padded, quantizer)[..., :200]
        noise = jnp.sum(((x - y) * 1e6) ** 2)
        snr = 10 * jnp.log10(jnp.sum((x * 1e6) ** 2) / noise)
        assert found.snr == pytest.approx(float(snr), abs=0.01)


def loss_in(shape, w, x):
    def run(h, w, number):
        with jax.named_scope("layer"):
            return jnp.tanh(h @ w + jnp.where(number < 0, 1.0, 0.0))

    return jnp.mean((SHAPES[shape](run, w, x) @ w["head"]) ** 2)


def plain_operands(w, x):
    """The inputs, weights and gradients of all layers, by hand."""
    layers = [each["w"] for each in w["layers"]]

    def forward(zeros):
        h, inputs = x, []
        for weight, zero in zip(layers, zeros, strict=True):
            inputs.append(h)
            h = jnp.tanh(h @ weight + zero)
        return jnp.mean((h @ w["head"]) ** 2), inputs

    zeros = [jnp.zeros((8, WIDTH))] * LAYERS
    gradients, inputs = jax.grad(forward, has_aux=True)(zeros)
    return inputs, layers, gradients


@pytest.mark.parametrize(
    "shape",
    slow_but(["scan", "remat in scan"], sorted(set(SHAPES) - {"shard_map", "cond"})),
)
def test_each_operand_is_counted_once_wherever_it_stands(shape):
    w, x = weights(), data()
    gradient = functools.partial(jax.value_and_grad(functools.partial(loss_in, shape)))
    result, seen = monitor(gradient, "float16")(w, x)
    plain = jax.jit(gradient)(w, x)
    near = functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=1e-7)
    jax.tree.map(near, result, plain)
    wanted = plain_operands(w, x)
    rows = [row for row in seen.rows if "head" not in row.layer]
    for kind, arrays in zip(Role, wanted, strict=True):
        of_kind = [row for row in rows if row.kind == kind.value]
        turns = [t for row in of_kind for t in (row.turns or (row,))]
        amaxes = sorted(t.amax for t in turns)
        expected = sorted(float(jnp.abs(a).max()) for a in arrays)
        np.testing.assert_allclose(amaxes, expected, rtol=1e-5, err_msg=kind.value)
        size = sum(row.size for row in of_kind)
        assert size == sum(a.size for a in arrays)


def test_layers_are_named_by_their_weights():
    w, x = weights(), data()
    gradient = jax.grad(functools.partial(loss_in, "unrolled"))
    _, seen = monitor(gradient, "float16")(w, x)
    names = {row.name for row in seen.rows}
    layers = [f"['layers'][{i}]['w']" for i in range(LAYERS)]
    layers.append("['head']")
    assert names == {f"{layer}/{k.value}" for layer in layers for k in Role}
    assert seen["['head']/weight"].amax == float(jnp.abs(w["head"]).max())


@pytest.mark.slow
def test_weights_are_the_first_argument_with_floating_arrays():
    w, x = weights(), data()
    loss = functools.partial(loss_in, "unrolled")

    def step(loss, key, weights, x):  # a function, and then a key
        return jax.grad(loss)(weights, x)

    _, plain = monitor(jax.grad(loss), "float16")(w, x)
    key = jax.random.key(0)
    calls = [
        monitor(step, "float16")(loss, key, w, x),
        monitor(step, "float16", weights=2)(loss, key, w, x),
        monitor(step, "float16", weights="weights")(loss, key, w, x),
        monitor(step, "float16")(loss, key, weights=w, x=x),
        monitor(step, "float16")(loss, np.arange(2), *jax.tree.map(np.asarray, (w, x))),
    ]
    for _, seen in calls:
        assert {row.name for row in seen.rows} == {row.name for row in plain.rows}
        assert seen.advice() == plain.advice()
    _, seen = monitor(step, "float16", weights="x")(loss, key, w, x)
    assert "['head']/weight" not in {row.name for row in seen.rows}


def test_devices_are_counted_together():
    w, x = weights(), data()
    names = ("shard_map", "unrolled")
    shared, alone = (jax.grad(functools.partial(loss_in, name)) for name in names)
    seen = monitor(shared, "float16")(w, x)[1]
    for row in monitor(alone, "float16")(w, x)[1].rows:
        if row.kind == "input":
            assert seen[row.name].amax == pytest.approx(row.amax, rel=1e-6)
            assert seen[row.name].size == row.size


def test_arrays_over_a_mesh_are_counted_as_whole():
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
    w, x = weights(), data()
    put = jax.NamedSharding
    w_many = jax.tree.map(lambda a: jax.device_put(a, put(mesh, P(None, "model"))), w)
    x_many = jax.device_put(x, put(mesh, P("data")))
    watch = monitor(jax.grad(functools.partial(loss_in, "scan")), "float16")
    (_, one), (_, many) = watch(w, x), watch(w_many, x_many)
    assert [row.name for row in one.rows] == [row.name for row in many.rows]
    for a, b in zip(one.rows, many.rows, strict=True):
        assert a.size == b.size and a.amax == pytest.approx(b.amax, rel=1e-5)


def test_branches_that_are_not_taken_and_turns_of_while_loops():
    def loss(w, x, taken):
        h = jax.lax.cond(taken, lambda h: h @ w["a"], lambda h: h @ w["b"] * 100, x)
        return jnp.sum(h @ w["head"])

    keys = jax.random.split(jax.random.key(0), 4)
    pairs = zip(("a", "b", "head"), keys, strict=False)
    w = {n: jax.random.normal(k, (8, 8)) for n, k in pairs}
    x = jax.random.normal(keys[3], (4, 8))
    watch = monitor(loss, "float16")
    for taken, factor, name in ((True, 1, "a"), (False, 100, "b")):
        _, seen = watch(w, x, jnp.asarray(taken))
        inputs = [row for row in seen.rows if row.kind == "input"]
        amax = float(jnp.abs(x @ w[name]).max()) * factor
        assert seen["['head']/input"].amax == pytest.approx(amax, rel=1e-5)
        assert sum(row.size for row in inputs) == 2 * x.size

    # Turns of a while loop are counted together.
    def grow(w, x):
        return jax.lax.while_loop(lambda h: jnp.max(h) < 100, lambda h: h @ w, x)

    w, x = jnp.eye(4) * 3, jnp.ones((2, 4))
    result, seen = monitor(grow, "float16")(w, x)
    row = next(row for row in seen.rows if row.kind == "input")
    assert float(jnp.max(result)) == 243 and row.amax == 81
    assert row.size == 5 * x.size and row.turns == ()


@pytest.mark.slow
def test_a_while_loop_that_ends_for_each_example_apart_is_looked_into():
    def grow(w, x, limit, key):
        turn = lambda state: (state[0] @ w, jax.random.split(state[1])[0])  # noqa: E731
        return jax.lax.while_loop(lambda s: jnp.max(s[0]) < limit, turn, (x, key))

    many = jax.vmap(grow, (None, 0, 0, 0))
    keys = jax.random.split(jax.random.key(0), 3)
    args = (2 * jnp.eye(4), jnp.ones((3, 2, 4)), jnp.array([3.0, 9.0, 33.0]), keys)
    (result, keys), seen = monitor(many, "float16")(*args)
    wanted, wanted_keys = many(*args)
    np.testing.assert_array_equal(result, wanted)
    assert (keys == wanted_keys).all()
    assert [row.kind for row in seen.rows] == ["input", "weight"]
    assert seen.rows[0].amax == 32.0


@pytest.mark.slow
def test_operands_are_seen_before_a_recipe_quantizes_them():
    """So what is counted is what the recipe's own amaxes say."""
    w, x = weights(), data()
    loss = mpx.autocast(functools.partial(loss_in, "scan"), recipe=mpx.DelayedScaling())
    scaling = mpx.init_scaling(loss, w, x)
    optimizer = optax.sgd(1e-3)

    @jax.jit
    def step(w, opt_state, scaling, x):
        result = mpx.value_and_grad(loss, scaling)(w, x)
        return mpx.optimizer_step(w, optimizer, opt_state, result)

    state = (w, optimizer.init(w), scaling)
    watch = monitor(step, ("float16", mpx.Float8CurrentScaling()))
    (_, _, after), seen = watch(*state, x)
    slots = {k: v for k, v in seen.recipe_amaxes.items() if "head" not in k}
    found = np.array([v for v in slots.values()]).max(axis=0)
    for kind, amax in zip(("input", "weight", "gradient"), found, strict=True):
        rows = [r for r in seen.rows if r.kind == kind and "head" not in r.layer]
        # Which are those of bfloat16.
        assert max(r.amax for r in rows) == pytest.approx(amax, rel=4e-3)
        assert all(r.formats["Float8CurrentScaling"].snr < 35 for r in rows)
    ends = after, step(*state, x)[2]
    np.testing.assert_array_equal(*(end.scales[0].amax_history for end in ends))
    # Amaxes of a recipe are free.
    loss = mpx.autocast(lambda w, x: jnp.sum(x @ w), recipe=mpx.DelayedScaling())
    w, x = jnp.full((8, 4), 0.5), jnp.full((2, 8), 3.0)
    scaling = mpx.init_scaling(loss, w, x)
    assert all(np.all(a == 0) for a in scaling.amaxes_by_weight().values())
    scaling = mpx.value_and_grad(loss, scaling)(w, x).scaling
    (amaxes,) = scaling.amaxes_by_weight().values()
    assert amaxes.tolist() == [3.0, 0.5, 1.0]


@pytest.fixture(scope="module")
def seen():
    """A step in float16 with a layer that overflows E4M3, and one that underflows."""

    def loss(w, x):
        h = jnp.tanh(x @ w["small"])
        return jnp.mean((h @ w["large"]).astype(jnp.float32) ** 2)

    k = jax.random.split(jax.random.key(0), 3)
    w = {"small": jax.random.normal(k[0], (16, 16)) * 1e-4}
    w["large"] = jax.random.normal(k[1], (16, 8)) * 1e3
    half = mpx.autocast(loss, "float16")
    scaling = mpx.StaticLossScaling(1.0)

    def gradient(w, scaling, x):
        return mpx.value_and_grad(half, scaling)(w, x).grads

    formats = ("float16", "float8_e4m3fn", mpx.MXFP8BlockScaling())
    x = jax.random.normal(k[2], (32, 16))
    return monitor(gradient, formats)(w, scaling, x)[1]


@pytest.mark.slow
def test_advice_names_layers_formats_and_reasons(seen):
    advice = "\n".join(seen.advice())
    assert "E4M3 is too little for large: " in advice
    assert "E4M3 is too little for small: " in advice
    assert "of its weights are beyond it" in advice
    assert "of its weights become zero" in advice
    assert "MXFP8BlockScaling: 2 of 2 layers tolerate it" in advice


def test_advice_on_layers_in_the_format_and_on_numbers_near_the_largest():
    def loss(w, x):
        x = jnp.tanh(x @ w["wide"])
        with mpx.autocast(dtype="bfloat16"):
            return jnp.mean(jnp.tanh(x @ w["half"]) ** 2)

    w = {name: jnp.eye(WIDTH) for name in ("wide", "half")}
    rules = mpx.Rules(mpx.Rule(mpx.Precision.FULL, parameter="['wide']"))
    gradient = jax.grad(mpx.autocast(loss, rules=rules))
    _, seen = monitor(gradient, ("float16", "bfloat16", "float8_e5m2"))(w, data())
    assert seen.advice()[-2:] == (
        "float16: 2 of 2 layers tolerate it",
        "bfloat16: 1 of 1 layers tolerate it; 1 compute in it or in fewer bits",
    )
    assert all(row.formats["float16"].snr > 60 for row in seen.rows)
    # Numbers near the largest need a higher precision.
    w, x = jnp.full((4, 4), 1e4), jnp.full((2, 4), 3e4)
    loss = lambda w, x: jnp.sum((x * 2) @ (w * 1e-4))  # noqa: E731
    half = mpx.autocast(loss, "float16")
    _, found = monitor(half, "float16")(w, x)
    assert any("inputs up to 6e+04 are near the largest" in a for a in found.advice())
    broken = monitor(half, "float16")(w, x.at[0, 0].set(jnp.nan))[1]
    assert any("1 of its inputs are NaN or infinite" in a for a in broken.advice())


def test_the_table_is_100_columns_wide_has_whole_names_and_records_are_numbers(seen):
    lines = str(seen).splitlines()
    assert max(map(len, lines)) <= 100
    assert any(line.startswith("small/gradient ") for line in lines)
    assert max(map(len, seen.text(80).splitlines())) <= 80
    records = seen.records()
    assert all(type(value) is float for value in records.values())
    names = {"['small']/weight/amax", "['large']/gradient/float16/flushed"}
    assert names <= set(records)
    # Names in the table are whole.
    names = ["['attn']['value']['kernel'].value", ".attn.value.kernel", ".layers.value"]
    wanted = ["attn.value.kernel", "attn.value.kernel", "layers.value"]
    for name, want in zip(names, wanted, strict=True):
        for end in ("", "/input", " #2/input"):
            assert _readable(name + end) == want + end

    def loss(w, x):
        return jnp.sum(x @ w["attn"]["value"]["kernel"])

    w = {"attn": {"value": {"kernel": jnp.ones((4, 2))}}}
    _, seen = monitor(loss, "float16")(w, jnp.ones((3, 4)))
    assert "attn.value.kernel/weight" in seen.text()


def test_monitor_leaves_the_step_alone_and_compiles_once_for_each_form_of_arguments():
    w, x = weights(), data()
    step = jax.jit(jax.grad(functools.partial(loss_in, "scan")))
    before = step.lower(w, x).as_text()
    monitor(step, "float16")(w, x)
    assert step.lower(w, x).as_text() == before
    fresh = jax.jit(jax.grad(functools.partial(loss_in, "scan")))
    assert fresh.lower(w, x).as_text() == before
    traces = []

    def loss(w, x, factor=1.0):
        traces.append(factor)
        return jnp.sum(x @ w) * factor

    watch = monitor(loss, "float16")
    w, x = jnp.ones((4, 4)), jnp.ones((2, 4))
    for factor in (1.0, 1.0, 2.0, 1.0):
        result, _ = watch(w, x, factor=factor)
        assert result == 32 * factor
    watch(w, jnp.ones((3, 4)))
    assert len(traces) == 3


TWICE = ("float16", jnp.float16)
ones = functools.partial(jnp.ones, 3)


@pytest.mark.parametrize(
    ("call", "kind", "said"),
    [
        (lambda: monitor(3), TypeError, "`mpx.monitor.func.` needs .*; got int 3"),
        (lambda: monitor(jnp.sum, "int8"), TypeError, "`formats` of .*'int8'"),
        (lambda: mpx.monitor(len, sample=0), ValueError, "`sample` of .* got int 0"),
        (lambda: monitor(jnp.sum, mpx.Format.INT8), TypeError, "`mpx.Int8CurrentSc"),
        (lambda: monitor(jnp.sum, 7), TypeError, "`formats` of .* got int 7"),
        (lambda: monitor(len, TWICE), ValueError, "different; got float16, float16"),
        (lambda: monitor(jnp.sum, "float16")(ones()), ValueError, "found no matmul"),
        (
            *(lambda: jax.jit(monitor(jnp.dot, "float16"))(ones(), ones()), TypeError),
            r"`mpx.monitor\(func\)\(\*args\)` needs arrays or",
        ),
    ],
)
def test_a_wrong_call_says_what_to_do(call, kind, said):
    with unchecked_annotations(), pytest.raises(kind, match=said):
        call()


def test_a_sample_is_one_row_in_so_many_and_weights_are_whole():
    w, x = jnp.ones((8, 4)), jnp.ones((3, 32, 8))
    x = x.at[:, 5].set(100.0).at[:, 8].set(7.0)
    loss = lambda w, x: jnp.sum(jnp.einsum("btc,cd->btd", x, w))  # noqa: E731
    _, seen = mpx.monitor(jax.grad(loss), "float16", sample=4)(w, x)
    sizes = {row.kind: row.size for row in seen.rows}
    assert sizes["input"] == 3 * 8 * 8 and seen.rows[0].amax == 7.0
    assert sizes["weight"] == w.size


def image_of(history, *args, **options):
    (image,) = mpx.reports.heat_map(history, *args, **options).axes[0].get_images()
    return image


def test_turns_over_stacked_weights_are_rows_of_a_heat_map_and_others_are_not():
    w, x = jnp.array([1.0, 2.0, 4.0])[:, None, None] * jnp.eye(4), jnp.ones((2, 4))

    def layers(w, x):
        return jax.lax.scan(lambda h, w: (h @ w, None), x, w)[0]

    _, seen = monitor(layers, "float16")(w, x)
    for kind, wanted in (("input", [0.0, 0.0, 1.0]), ("weight", [0.0, 1.0, 2.0])):
        image = image_of({0: seen}, kind=kind)
        assert image.get_array()[:, 0].tolist() == wanted
        names = [text.get_text() for text in image.axes.get_yticklabels()]
        assert names == [f"{seen.rows[0].layer} iteration {i}" for i in range(3)]

    def over_time(w, x):
        return jax.lax.scan(lambda h, _: (h @ w, None), x, length=5)[0]

    _, seen = monitor(over_time, "float16")(w[0], x)
    assert image_of({0: seen}, kind="input").get_array().shape == (1, 1)


@pytest.mark.slow
def test_a_run_is_a_heat_map_of_layers_by_steps(tmp_path):
    w, x = weights(), data()
    watch = monitor(jax.grad(functools.partial(loss_in, "scan")), "float16")
    history = {step: watch(w, x * 2.0**step)[1] for step in (0, 10, 20)}
    for measure, format in (("snr", "float16"), ("amax", None)):
        image = image_of(history, measure, format, kind="input")
        assert image.get_array().shape == (LAYERS + 1, 3)
        labels = [text.get_text() for text in image.axes.get_xticklabels()]
        assert labels == ["0", "10", "20"]
        image.figure.savefig(tmp_path / "picture.png")
    first = np.log2(float(jnp.abs(x).max()))
    np.testing.assert_allclose(image.get_array()[0, 0], first, rtol=1e-6)


def test_a_heat_map_of_nothing_says_what_there_is_and_shares_begin_at_zero(seen):
    for options, said in (
        ({"measure": "size"}, "`measure` of .* got str 'size'"),
        ({"measure": "snr"}, "`format` of .*`float16`; got None"),
        ({"kind": "weights"}, "of the kind 'weights'"),
    ):
        with pytest.raises(ValueError, match=said):
            mpx.reports.heat_map({0: seen}, **options)
    for measure in ("zeros", "flushed"):
        image = image_of({0: seen}, measure, "float16", kind="input")
        low, high = image.get_clim()
        assert low == 0 and 0 < high <= 1


def square_weights():
    keys = jax.random.split(jax.random.key(1), 4)
    a, b, c = (0.15 * jax.random.normal(k, (64, 64)) for k in keys[:3])
    x = 3 * jax.random.normal(keys[3], (32, 64))
    return {"a": a, "b": b, "c": c, "s": jnp.stack([a, b])}, x


def in_cond(w, x):
    return jax.lax.cond(x[0, 0] < 100, lambda h: jnp.tanh(h @ w["a"]), lambda h: h, x)


def in_two_conds(w, x):
    """The second one is not taken: its zeros do not hide what the first one counted."""
    taken = in_cond(w, x)
    other = lambda h: jnp.tanh(h @ w["b"])  # noqa: E731
    return taken + jax.lax.cond(x[0, 0] > 100, other, lambda h: h, x)


def layer_of(h, w):
    return jnp.tanh(h @ w), None


def in_scan_of_one_weight(w, x):
    """JAX quantizes it in front of the loop."""
    return jax.lax.scan(lambda h, _: layer_of(h, w["a"]), x, None, 2)[0]


INNER = {
    "cond": in_cond,
    "two conds": in_two_conds,
    "scan": lambda w, x: jax.lax.scan(layer_of, x, w["s"])[0],
    "scan of one weight": in_scan_of_one_weight,
    "products that follow": lambda w, x: (x @ w["a"]) @ w["b"],
    "a part": lambda w, x: jnp.tanh(x @ w["s"][1]),
}
IN = [
    ("cond", CURRENT, "H100"),
    ("two conds", CURRENT, "TPU v5e"),
    ("scan", CURRENT, "H100"),
    ("scan of one weight", NVFP4, "B200"),
    ("products that follow", CURRENT, "H100"),
    ("a part", NVFP4, "cpu"),
]


@pytest.mark.parametrize(("inner", "recipe", "target"), slow_but([IN[0], IN[3]], IN))
def test_what_a_recipe_quantizes_is_counted_as_it_was(inner, recipe, target):
    def loss(w, x):
        return jnp.mean((INNER[inner](w, x) @ w["c"]) ** 2)

    def rows(**options):
        func = mpx.autocast(loss, **options)
        _, seen = monitor(jax.grad(func), "float16")(*square_weights())
        assert not seen.uncounted
        return {row.name.replace("/linear", ""): row for row in seen.rows}

    half, found = rows(), rows(recipe=recipe, target=target)
    kept = {n for n in half if "gradient" not in n}
    assert kept == {n for n in found if "gradient" not in n}
    assert len(half) == len(found)
    for name in kept:
        a, b = half[name], found[name]
        assert b.dtype in ("bfloat16", "float32") and b.size == a.size
        assert b.rms == pytest.approx(a.rms, rel=0.01 if "weight" in name else 0.1)


def test_a_weight_that_is_computed_and_quantized_outside_of_devices_is_named():
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = {"in_specs": (P("d"), P()), "out_specs": P("d")}
    inner = jax.shard_map(lambda h, w: jnp.tanh(h @ w), mesh=mesh, **specs)

    def loss(w, x):
        scaled = w["a"] / jnp.linalg.norm(w["a"])
        h = jax.lax.scan(lambda h, _: (inner(h, scaled), None), x, None, 2)[0]
        return jnp.mean((h @ w["c"]) ** 2)

    low = mpx.autocast(loss, recipe=CURRENT, target="H100")
    _, seen = monitor(jax.grad(low), "float16")(*square_weights())
    assert all(row.dtype in ("bfloat16", "float32") for row in seen.rows)
    (name,) = seen.uncounted
    assert name.endswith("/input")
    assert any(x.startswith("not counted, as") and name in x for x in seen.advice())


def test_products_with_scales_are_counted():
    """Those of Blackwell, in the branch for CUDA; nothing runs them here."""
    func = lambda a, scales: jax.nn.scaled_matmul(a, a, scales, scales)  # noqa: E731
    a = jax.ShapeDtypeStruct((1, 32, 64), jnp.float8_e4m3fn)
    scales = jax.ShapeDtypeStruct((1, 32, 2), jnp.float8_e8m0fnu)
    traced = monitor(func, "float16").trace(a, scales)  # pyright: ignore
    (result, *_), counted = traced.out_info
    assert result.shape == (1, 32, 32) and len(counted) == 1


def test_advice_knows_the_bits_and_the_range_of_every_dtype():
    with jax.enable_x64(True):
        x = jnp.full((4, 4), 1e3, jnp.float64)
        _, seen = monitor(lambda w, x: x @ w, ("float16", "bfloat16"))(x, x)
        assert "float16: 1 of 1 layers tolerate it" in seen.advice()
    w, x = jnp.full((4, 4), 500.0), jnp.ones((2, 4))
    _, seen = monitor(jax.grad(lambda w, x: 500 * jnp.sum(x @ w)))(w, x)
    above = {row.kind: row.formats["HYBRID"].above for row in seen.rows}
    assert above["weight"] == 1.0  # E4M3 ends at 448
    assert above["gradient"] == 0.0  # E5M2, which recipes have for them, at 57344
