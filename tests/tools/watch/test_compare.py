"""Two precisions of a loss, layer by layer: `mpx.compare` and `mpx.expect_close`."""

import dataclasses
import functools
import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec as P

import mpx

from ...helpers import slow_but, unchecked_annotations

LAYERS, WIDTH = 4, 16
LOOPED = ["nested scan", "shard_map"]
raises_contract = functools.partial(pytest.raises, mpx.reports.ContractError)
MESH = Mesh(np.array(jax.devices()[:4]), ("data",))


@functools.cache
def weights():
    keys = jax.random.split(jax.random.key(0), LAYERS + 1)
    layers = [{"w": jax.random.normal(k, (WIDTH, WIDTH)) / 4} for k in keys[1:]]
    return {"layers": layers, "head": jax.random.normal(keys[0], (WIDTH, 8)) / 4}


@functools.cache
def data():
    return jax.random.normal(jax.random.key(9), (8, WIDTH))


def layer(h, w, factor=1.0):
    with jax.named_scope("layer"):
        return jnp.tanh((h @ w) * factor)


def unrolled(run, w, x):
    for number, each in enumerate(w["layers"]):
        x = run(x, each["w"], number)
    return x


def scanned(run, w, x):
    stack = jnp.stack([each["w"] for each in w["layers"]])
    turns = (stack, jnp.arange(LAYERS))
    return jax.lax.scan(lambda h, t: (run(h, *t), None), x, turns)[0]


def scanned_twice(run, w, x):
    stack = jnp.stack([each["w"] for each in w["layers"]]).reshape(2, 2, WIDTH, WIDTH)
    turns = (stack, jnp.arange(LAYERS).reshape(2, 2))

    def outer(h, two):
        return jax.lax.scan(lambda h, t: (run(h, *t), None), h, two)[0], None

    return jax.lax.scan(outer, x, turns)[0]


def in_branches(run, w, x):
    other = lambda h, w: jax.tree.map(jnp.negative, h)  # noqa: E731
    for number, each in enumerate(w["layers"]):
        this = lambda h, w, n=number: run(h, w, n)  # noqa: E731
        x = jax.lax.cond(jnp.sum(x**2) >= 0, this, other, x, each["w"])
    return x


def on_devices(run, w, x):
    specs = {"in_specs": (P(), P("data")), "out_specs": P("data")}
    return jax.shard_map(lambda w, x: unrolled(run, w, x), mesh=MESH, **specs)(w, x)


SHAPES = {
    "unrolled": unrolled,
    "scan": scanned,
    "nested scan": scanned_twice,
    "cond": in_branches,
    "shard_map": on_devices,
    "remat": lambda run, w, x: unrolled(jax.checkpoint(run), w, x),
    "remat in scan": lambda run, w, x: scanned(jax.checkpoint(run), w, x),
    "jit": lambda run, w, x: unrolled(jax.jit(run), w, x),
}


def loss_of(shape, planted=None):
    """A loss in which one layer is wrong by a thousandth."""

    def run(h, w, number):
        is_other = number < 0 if planted is None else number == planted
        return layer(h, w, jnp.where(is_other, 1.001, 1.0))

    def loss(w, x):
        return jnp.mean((SHAPES[shape](run, w, x) @ w["head"]) ** 2)

    return loss


@pytest.mark.parametrize("shape", slow_but(LOOPED, [*LOOPED, "cond", "remat in scan"]))
def test_the_first_layer_that_differs_is_the_one_that_was_changed(shape):
    planted = 2
    compare = mpx.compare(loss_of(shape), loss_of(shape, planted), floor=False)
    found = compare(weights(), data())
    layers = [x for x in found.activations if x.where == "layer"]
    assert len(layers) == LAYERS
    for number, each in enumerate(layers):
        assert (each.snr == math.inf) if number < planted else (50 < each.snr < 80)
    # Behind it is the gradient of every weight.
    assert all(20 < x.snr < 75 and x.cosine > 0.999 for x in found.gradients)
    names = {x.name for x in found.gradients}
    assert {"['head']", "['layers'][0]['w']"} <= names


PRECISIONS = {
    "bfloat16": (dict(), 25, 60),
    "float16": (dict(dtype="float16"), 45, 80),
    "current": (dict(recipe=mpx.Float8CurrentScaling()), 8, 32),
}


@pytest.mark.parametrize("name", slow_but(["current"], PRECISIONS))
def test_a_precision_has_the_digits_that_it_has(name):
    options, least, most = PRECISIONS[name]
    loss = loss_of("scan")
    found = mpx.compare(loss, mpx.autocast(loss, **options))(weights(), data())
    assert len(found.activations) == LAYERS + 1
    assert all(least < x.snr < most for x in found)
    assert found.floor is not None and found.floor >= 120
    recipe = " with Float8CurrentScaling" if name == "current" else ""
    assert found.name == f"loss in {options.get('dtype', 'bfloat16')}{recipe}"


@pytest.mark.slow
def test_a_recipe_without_a_step_warns_that_its_scales_are_1():
    loss = loss_of("scan")

    def compared(*scaling, **options):
        func = mpx.autocast(loss, recipe=mpx.DelayedScaling(**options))
        compare = mpx.compare(loss, func, *scaling, floor=False)
        return func, compare(weights(), data())

    with pytest.warns(UserWarning, match="before its first step, or none: its scales"):
        func, new = compared()
    assert new.name == "loss in bfloat16 with DelayedScaling"
    scaling = mpx.init_scaling(func, weights(), data())
    with pytest.warns(UserWarning, match="`mpx.compare.*scales are 1"):
        compared(scaling)
    # As from a run, without a warning.
    run = mpx.filter_value_and_grad(func, scaling)(weights(), data()).scaling
    _, found = compared(run)
    assert min(x.snr for x in found) > 8
    compared(warm_start=True)
    off = mpx.compare(loss, mpx.autocast(loss, enabled=False), floor=False)
    assert off(weights(), data()).name == "loss"


class Attention(eqx.Module):
    """Attention, whose keys have a bias that does nothing."""

    attention: eqx.nn.MultiheadAttention
    head: eqx.nn.Linear

    def __init__(self, key):
        a, b = jax.random.split(key)
        self.attention = eqx.nn.MultiheadAttention(2, 8, use_key_bias=True, key=a)
        self.head = eqx.nn.Linear(8, 4, key=b)

    def __call__(self, x):
        return jax.vmap(self.head)(self.attention(x, x, x))


def attention_loss(model, x):
    return jnp.mean(jax.vmap(model)(x) ** 2), jnp.sum(x)


@pytest.fixture(scope="module")
def compared():
    model = Attention(jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (4, 6, 8))
    half = mpx.autocast(attention_loss)
    return mpx.compare(attention_loss, half, has_aux=True)(model, x)


@pytest.mark.slow
def test_noise_in_float32_is_not_counted_and_the_table_is_100_columns_wide(compared):
    """The gradient of the keys' bias is zero in exact arithmetic."""
    noise = [x.name for x in compared if x.is_noise]
    assert noise == ["attention.key_proj.bias"]
    assert compared.floor >= 120
    assert "attention.key_proj.bias" not in {x.name for x in compared.worst(100)}
    line = next(x for x in str(compared).splitlines() if "key_proj.bias" in x)
    assert "noise" in line
    mpx.expect_close(compared, gradient_snr=25.0)
    lines = str(compared).splitlines()
    assert max(map(len, lines)) <= 100
    assert any(line.startswith("attention.output_proj ") for line in lines)
    assert any("test_compare.py:" in line for line in lines)
    assert max(map(len, compared.text(width=60).splitlines()[4:])) <= 60


def test_records_are_names_and_numbers_and_the_worst_come_first(compared):
    records = compared.records()
    assert all(type(x) is float for x in records.values())
    assert records["gradient/head.weight/cosine"] > 0.999
    assert records["loss/reference"] == compared.losses[0]
    worst = compared.worst(3)
    assert len(worst) == 3
    assert [x.snr for x in worst] == sorted(x.snr for x in worst)
    each = compared.gradients[0]
    assert dataclasses.replace(each, snr=3.0).snr == 3.0
    assert each.kind == "gradient" and each.name in str(each)


def test_a_claim_that_does_not_hold_names_the_layers(compared):
    claims = {"activation_snr": 70.0, "gradient_cosine": 0.9}
    with raises_contract(match=r"`activation_snr`: at least 70.0 dB") as e:
        mpx.expect_close(compared, **claims)
    (violation,) = e.value.violations
    assert "test_compare.py" in str(violation.operations[0])
    snr = [x.snr for x in violation.operations]
    assert snr == sorted(snr) and all(x < 70 for x in snr)
    with raises_contract(match=r"`gradient_cosine`.*\n.*query_proj"):
        mpx.expect_close(compared, gradient_cosine=0.99999999)
    # What is left out breaks no claim.
    with raises_contract(match=r"head\.bias"):
        mpx.expect_close(compared, gradient_snr=500.0)
    with raises_contract() as e:
        mpx.expect_close(compared, gradient_snr=500.0, except_in="head")
    assert "head" not in str(e.value)
    with raises_contract(match="no gradient in common"):
        mpx.expect_close(compared, gradient_snr=1.0, except_in=["head", "attention"])


@pytest.mark.parametrize(
    ("call", "kind", "said"),
    [
        (mpx.expect_close, ValueError, "needs at least one claim"),
        (lambda c: mpx.expect_close(3, gradient_snr=1.0), TypeError, "got int 3"),
        (lambda c: mpx.expect_close(c, gradient_snr="x"), TypeError, "be a number"),
        (lambda c: mpx.compare(jnp.sum, 3), TypeError, "`func` of `mpx.compare"),
        (
            *(lambda c: jax.jit(mpx.compare(jnp.sum, jnp.sum))(jnp.ones(2)), TypeError),
            r"`mpx.compare\(reference, func\)` needs arrays or",
        ),
    ],
)
def test_a_wrong_call_says_what_to_do(compared, call, kind, said):
    with unchecked_annotations(), pytest.raises(kind, match=said):
        call(compared)


def test_numbers_of_closeness_are_those_of_their_equations():
    loss = lambda w, x: jnp.sum(w * x)  # noqa: E731
    other = lambda w, x: loss(w, x + jnp.array([0.0, 0.5, 0.0]))  # noqa: E731
    x = jnp.array([1.0, 2.0, -3.0])
    (gradient,) = mpx.compare(loss, other, floor=False)(jnp.ones(3), x).gradients
    assert gradient.snr == pytest.approx(10 * np.log10(14 / 0.25), abs=1e-4)
    cosine = 15 / np.sqrt(14 * 16.25)
    assert gradient.cosine == pytest.approx(cosine, abs=1e-6)
    other = lambda w, x: loss(w, x * 1.01)  # noqa: E731
    for factor in (1e-30, 1e30):  # as numbers of all sizes
        found = mpx.compare(loss, other, floor=False)(jnp.ones(3), jnp.ones(3) * factor)
        assert found.gradients[0].snr == pytest.approx(40, abs=0.01)


def test_what_is_infinite_in_one_of_them_only_is_broken():
    def loss(w, x):
        with jax.named_scope("masked"):
            h = jnp.where(jnp.arange(4) < 2, w * x, -jnp.inf) * 1.0
        return jnp.sum(jax.nn.softmax(h) * x)

    def overflows(w, x):
        return loss(w, x) * jnp.float32(3e38) * 10

    w, x = jnp.ones(4), jnp.arange(4.0)
    same = mpx.compare(loss, loss, floor=False)(w, x)
    assert all(x.snr == math.inf for x in same)  # a mask of -inf in both
    broken = mpx.compare(loss, overflows, floor=False)(w, x)
    (gradient,) = broken.gradients
    assert gradient.snr == -math.inf and math.isnan(gradient.cosine)
    with raises_contract(match="broken dB"):
        mpx.expect_close(broken, gradient_snr=-1000.0)


def test_a_gradient_of_zero_breaks_no_claim_on_its_cosine():
    loss = lambda w, x: jnp.sum(w["used"] * x)  # noqa: E731
    w = {"used": jnp.ones(3), "unused": jnp.ones(2)}
    found = mpx.compare(loss, loss, floor=False)(w, jnp.ones(3))
    assert math.isnan(next(x.cosine for x in found.gradients if "un" in x.name))
    mpx.expect_close(found, gradient_cosine=0.5, gradient_snr=10.0)


def test_compare_uses_the_loss_scale_and_the_policy_of_a_run():
    """Without one a float16 gradient of 1e-9 would be zero."""
    loss = lambda w, x: jnp.mean((x @ w) ** 2) * 1e-9  # noqa: E731
    w, x = jnp.ones((8, 4)), jnp.ones((2, 8))
    half = mpx.autocast(loss, "float16")
    scalings = map(mpx.StaticLossScaling, (1.0, 2.0**24))
    found = (mpx.compare(loss, half, scaling, floor=False) for scaling in scalings)
    small, large = (compare(w, x) for compare in found)
    assert small.gradients[0].snr < 10 < 50 < large.gradients[0].snr
    # The explicit style is compared by its policy.
    loss = loss_of("unrolled")
    policy = "params=float32,compute=bfloat16,output=float32"
    found = mpx.compare(loss, loss, policy=policy, floor=False)(weights(), data())
    assert all(20 < x.snr < 60 for x in found.gradients)
