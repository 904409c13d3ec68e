"""Every tool under every recipe, for the CPU, an H100 and a TPU.

The same program holds the forms of a product for several devices, and what a tool says
of it must be true on each. All of them run here, where products are emulated.
"""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

import mpx
from mpx._quantize import target_from
from mpx._tools._counter import TARGETS as CHIPS
from mpx._tools._counter._targets import why_missing

RECIPES = {
    "none": None,
    "current": mpx.Float8CurrentScaling(),
    "delayed": mpx.DelayedScaling(warm_start=True),
    "MXFP8": mpx.MXFP8BlockScaling(),
    "NVFP4": mpx.NVFP4BlockScaling(),
}
TARGETS = ("cpu", "H100", "TPU v5e")
# Without a recipe the program is the same for all targets.
CASES = [("none", "cpu"), *itertools.product(list(RECIPES)[1:], TARGETS)]
# Each recipe and each target once.
FEW = [("none", "TPU v5e"), ("current", "H100"), ("delayed", "TPU v5e")]
FEW += [("MXFP8", "cpu"), ("NVFP4", "H100")]
ROWS, INPUTS, HIDDEN, OUTPUTS = 32, 64, 48, 16


@functools.cache
def arguments():
    keys = jax.random.split(jax.random.key(0), 3)
    w = {
        "first": 0.1 * jax.random.normal(keys[0], (INPUTS, HIDDEN)),
        "last": jax.random.normal(keys[1], (HIDDEN, OUTPUTS)),
    }
    return w, 1.3 * jax.random.normal(keys[2], (ROWS, INPUTS))


def loss(w, x):
    """Recipes quantize the first product, and leave the last one in half precision."""
    with jax.named_scope("first"):
        h = jnp.tanh(x @ w["first"])
    with jax.named_scope("last"):
        return jnp.mean((h @ w["last"]) ** 2)


def low(func, recipe, target, **options):
    options |= {} if recipe == "none" else {"recipe": RECIPES[recipe]}
    return mpx.autocast(func, target=target, **options)


def step_of(func, recipe):
    gradient = lambda w, x, scaling: mpx.filter_value_and_grad(func, scaling)(w, x)  # noqa: E731
    if recipe == "delayed":
        return gradient, mpx.init_scaling(func, *arguments())
    return gradient, mpx.NoLossScaling()


def by_hand():
    w, x = jax.tree.map(lambda a: np.asarray(a, np.float64), arguments())
    h = np.tanh(x @ w["first"])
    y = h @ w["last"]
    last = 2 * y / y.size
    gradients = {"first": last @ w["last"].T * (1 - h**2), "last": last}
    kinds = {"input": {"first": x, "last": h}, "weight": w, "gradient": gradients}
    return {f"['{k}']/{kind}": a[k] for k in w for kind, a in kinds.items()}


def in_e4m3(x):
    """Numbers rounded to E4M3 with one scale for the array."""
    scale = 448 / np.abs(x).max()
    rounded = (x * scale).astype(np.float32).astype(ml_dtypes.float8_e4m3fn)
    return rounded.astype(np.float64) / scale


def snr(x, y):
    """Signal to noise of `y` in the place of `x`, in dB."""
    return 10 * math.log10(np.sum(x**2) / np.sum((x - y) ** 2))


# How far gradients may be off: what was quantized before them has noise.
NOISE = {"none": 0.03, "current": 0.15, "delayed": 0.15, "MXFP8": 0.15, "NVFP4": 0.4}


@pytest.mark.parametrize(("recipe", "target"), CASES)
def test_monitor_counts_what_was_there_before_it_was_quantized(recipe, target):
    func, known = low(loss, recipe, target), by_hand()
    step, scaling = step_of(func, recipe)
    if target != "H100" and recipe not in ("none", "delayed"):  # the half is enough
        step = lambda w, x, _: func(w, x)  # noqa: E731
        known = {n: x for n, x in known.items() if "gradient" not in n}
    asked = mpx.quantization.TensorQuantizer()
    _, seen = mpx.monitor(step, asked, sample=1)(*arguments(), scaling)
    rows = {row.name: row for row in seen.rows}
    assert rows.keys() == known.keys() and not seen.uncounted
    for name, x in known.items():
        row, is_given = rows[name], "weight" in name or name == "['first']/input"
        noise = 0.01 if is_given else NOISE[recipe]
        assert row.dtype in ("bfloat16", "float32") and row.size == x.size
        assert row.amax == pytest.approx(np.abs(x).max(), rel=noise)
        assert row.rms == pytest.approx(np.sqrt(np.mean(x**2)), rel=noise)
        found = row.formats["E4M3 tensor"]
        assert found.snr == pytest.approx(snr(x, in_e4m3(x)), abs=1.0)
        assert found.above == 0


UNITS = {
    ("none", "cpu"): "bfloat16",
    ("current", "H100"): "float8_e4m3fn",
    ("delayed", "H100"): "float8_e4m3fn",
}


@pytest.mark.parametrize(("recipe", "target"), CASES)
def test_explain_knows_the_dtype_and_the_share_of_a_product(recipe, target):
    step, scaling = step_of(low(loss, recipe, target), recipe)
    report = mpx.explain(step)(*arguments(), scaling)
    products = [x for x in report.operations if x.primitive == "dot_general"]
    first, last = [x for x in products if x.phase == "forward"]
    assert first.flops == 2 * ROWS * INPUTS * HIDDEN
    assert last.flops == 2 * ROWS * HIDDEN * OUTPUTS
    assert first.flops / (first.flops + last.flops) == 0.8
    is_wide = target == "cpu" and not target_from(target).wants_cpu_form
    elsewhere = "float32" if is_wide else "bfloat16"
    dtype = UNITS.get((recipe, target), elsewhere)
    assert first.precision == dtype and first.is_low == (recipe != "none")
    assert all(kind.startswith(f"{dtype}[") for kind in first.inputs[:2])
    assert last.precision == "bfloat16" and not last.is_low


@pytest.mark.parametrize(("recipe", "target"), FEW)
def test_compare_finds_the_noise_that_a_recipe_has(recipe, target):
    # If it is saved, the slope of tanh is the last operation of its layer.
    func = low(loss, recipe, target, residuals="small")
    scaling = mpx.init_scaling(func, *arguments())
    found = mpx.compare(loss, func, scaling, floor=False)(*arguments())
    exact = float(loss(*arguments()))
    assert found.losses == pytest.approx((exact, exact), rel=NOISE[recipe])
    (first,) = [x for x in found.activations if x.where == "first"]
    if recipe in ("current", "delayed"):
        pair = arguments()[0]["first"], arguments()[1]
        w, x = (in_e4m3(np.asarray(a, np.float64)) for a in pair)
        known = snr(by_hand()["['last']/input"], np.tanh(x @ w))
        assert first.snr == pytest.approx(known, abs=1.0)
    else:
        least, most = {"none": (40, 60), "MXFP8": (24, 32), "NVFP4": (12, 20)}[recipe]
        assert least < first.snr < most
    assert {x.name for x in found.gradients} == {"['first']", "['last']"}
    assert all(x.cosine > 0.95 for x in found.gradients)


@pytest.mark.parametrize(("recipe", "target"), FEW)
def test_blame_names_the_planted_line_and_check_the_weight(recipe, target):
    def planted(w, x):
        with jax.named_scope("planted"):
            h = jnp.exp(1e3 * jnp.tanh(x @ w["first"]))
        return jnp.mean((h @ w["last"]) ** 2)

    func = low(planted, recipe, target)
    step, scaling = step_of(func, recipe)
    result = step(*arguments(), scaling)
    assert not result.finite
    with pytest.raises(FloatingPointError, match=r"\['first'\]"):
        mpx.check(result.scaling, result.grads, max_skipped_in_a_row=0)
    first = mpx.blame(func, result.scaling.of_bad_step())(*arguments()).first
    assert first is not None
    assert first.primitive == "exp" and first.scope == "planted"
    number = planted.__code__.co_firstlineno + 2
    assert first.line.endswith(f"test_on_targets.py:{number}")


@pytest.mark.slow
@pytest.mark.third_party  # Optax computes with JAX's own promotion
def test_forecast_counts_the_bytes_of_a_step():
    if (reason := why_missing(CHIPS["v5e"])) is not None:
        pytest.skip(reason)
    shapes = jax.eval_shape(arguments)
    asked = {"bfloat16": {}, "NVFP4": {"recipe": RECIPES["NVFP4"]}}
    optimizer = optax.adam(1e-3)
    report = mpx.forecast(loss, optimizer, targets="TPU v5e", precisions=asked)(*shapes)
    assert [one.precision for one in report.estimates] == list(asked)
    numbers = INPUTS * HIDDEN + HIDDEN * OUTPUTS
    for one in report.estimates:
        assert one.target == "v5e"
        # Weights, two moments and the count of steps; nothing is multiplied in 8 bits.
        assert one.memory_by_part["weights"] == 4 * numbers
        assert one.memory_by_part["optimizer"] == 8 * numbers + 4
        assert not {"8 bits", "4 bits"} & set(one.flops)
