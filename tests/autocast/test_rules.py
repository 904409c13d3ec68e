"""Rules: which operations they hold for, and what they do."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpx
from mpx import Precision, Rule, Rules
from mpx._autocast import with_rule

from ..helpers import unchecked_annotations
from . import blocks
from .counting import (
    BF16,
    F32,
    count_products,
    equations,
    given_by,
    read_by,
    relative_error,
)

full = functools.partial(Rule, Precision.FULL)


def model(params, x):
    with jax.named_scope("encoder"):
        with jax.named_scope("layer1"):
            x = jnp.tanh(x @ params["layers"][0]["w"])
        with jax.named_scope("layer2"):
            x = jnp.tanh(x @ params["layers"][1]["w"])
    with jax.named_scope("head"):
        return jax.jit(lambda w, x: jnp.tanh(x @ w))(params["head"], x)


@pytest.fixture
def inputs(getkey):
    layers = [{"w": jax.random.normal(getkey(), (4, 4))} for _ in range(2)]
    params = {"layers": layers, "head": jax.random.normal(getkey(), (4, 4))}
    return params, jax.random.normal(getkey(), (2, 4))


def dtypes_of(rules, args):
    return read_by("dot_general", mpx.autocast(model, rules=rules), *args)


HALF, FULL = "bfloat16", "float32"


@pytest.mark.parametrize(
    ("conditions", "expected"),
    [
        ({"primitive": "dot_general"}, [FULL, FULL, FULL]),
        ({"primitive": "dot*"}, [FULL, FULL, FULL]),
        ({"primitive": ("tan", "dot_general")}, [FULL, FULL, FULL]),
        ({"scope": "encoder"}, [FULL, FULL, HALF]),
        ({"scope": "layer1"}, [FULL, HALF, HALF]),
        ({"scope": "layer?"}, [FULL, FULL, HALF]),
        ({"scope": "encoder/layer2"}, [HALF, FULL, HALF]),
        ({"scope": "*/layer2"}, [HALF, FULL, HALF]),
        ({"scope": "head"}, [HALF, HALF, FULL]),
        ({"parameter": "['layers'][0]*"}, [FULL, HALF, HALF]),
        pytest.param(
            {"parameter": "['layers'][[]1]['w']"},
            [HALF, HALF, HALF],
            marks=pytest.mark.filterwarnings("ignore:.*match no operation"),
        ),
        ({"parameter": "['layers'][?]['w']"}, [FULL, FULL, HALF]),
        ({"parameter": "*head*"}, [HALF, HALF, FULL]),
        ({"when": lambda c: "['head']" in c.parameters}, [HALF, HALF, FULL]),
        ({"scope": "encoder", "parameter": "*[1]*"}, [HALF, FULL, HALF]),
    ],
)
def test_conditions(inputs, conditions, expected):
    rules = Rules(full(**conditions))
    assert dtypes_of(rules, inputs) == expected


@pytest.mark.parametrize(
    ("precision", "expected"),
    [
        (Precision.HALF, HALF),
        (Precision.FULL, FULL),
        (Precision.FOLLOW, FULL),
        (Precision.DECLARED, FULL),
    ],
)
def test_precisions_of_an_elementwise_operation(inputs, precision, expected):
    exp = lambda params, x: jnp.exp(x)  # noqa: E731
    rules = Rules(Rule(precision, primitive="exp"))
    assert read_by("exp", mpx.autocast(exp, rules=rules), *inputs) == [expected]


def test_a_rule_for_products_changes_what_is_rounded_before_them():
    def dtypes(rules):
        cast = mpx.autocast(lambda x: jnp.maximum(jnp.exp(x), 0.0) @ x, rules=rules)
        return given_by("max", cast, jnp.ones((4, 4)))

    assert dtypes(Rules()) == [HALF]
    assert dtypes(Rules(full(primitive="dot_general"))) == [FULL]


def test_what_a_rule_computes_in_half_precision_is_read_so():
    """A scan has as many bytes as one that is cast by hand, gradients included."""

    def dtypes(loss):
        found = equations(jax.make_jaxpr(jax.grad(loss))(jnp.full((64, 8), 0.9)))
        sliced = (e for e, _ in found if e.primitive.name in ("slice", "pad"))
        return {e.outvars[0].aval.dtype.name for e in sliced}

    def loss(x):
        return jnp.sum(jax.lax.associative_scan(jnp.multiply, x @ jnp.eye(8)))

    rules = Rules(Rule(Precision.HALF, primitive=("add", "mul")))
    assert dtypes(mpx.autocast(loss, rules=rules)) == {HALF}
    unsure = Rules(Rule(Precision.HALF, primitive="mul", when=lambda _: True))
    assert FULL in dtypes(mpx.autocast(loss, rules=unsure))


def test_a_rule_does_not_reach_what_a_region_reads():
    """Rounded for a product that runs in float32 after all it would lose."""
    rules = Rules(Rule(Precision.HALF, primitive="mul"))

    def largest(x):
        picked = jnp.maximum(jnp.exp(x), 0.0)
        with mpx.autocast(enabled=False):
            return picked * picked

    x = jnp.linspace(0.1, 0.2, 7)
    found = jax.jit(mpx.autocast(largest, rules=rules))(x)
    np.testing.assert_allclose(found, jnp.exp(x) ** 2, rtol=1e-6)


def test_the_first_rule_that_holds_decides(inputs):
    rules = Rules(Rule(Precision.HALF, scope="layer1"), full(primitive="dot*"))
    assert dtypes_of(rules, inputs) == [HALF, FULL, FULL]


def test_products_in_full_precision_have_no_half_operands_on_the_way_back(inputs):
    rules = Rules(full(scope="head"))
    loss = lambda p, x: jnp.sum(model(p, x))  # noqa: E731
    counts = count_products(jax.grad(mpx.autocast(loss, rules=rules)), *inputs)
    assert set(counts) == {BF16, F32}


def test_a_rule_keeps_autocast_out_of_a_custom_rule(inputs):
    @jax.custom_vjp
    def product(x, w):
        return x @ w

    product.defvjp(lambda x, w: (x @ w, (x, w)), lambda s, g: (g @ s[1].T, s[0].T @ g))
    loss = lambda p, x: jnp.sum(product(x, p["head"]))  # noqa: E731
    rules = Rules(Rule(Precision.DECLARED, primitive="custom_vjp_call"))
    cast = mpx.autocast(loss, rules=rules)
    assert set(count_products(jax.grad(cast), *inputs)) == {F32}
    assert set(count_products(jax.grad(mpx.autocast(loss)), *inputs)) == {BF16}


def test_a_function_may_rewrite_an_equation(inputs):
    seen = []

    def in_float16(candidate, operands):
        seen.append((candidate.primitive, candidate.dtype.name, candidate.line))
        params = {**candidate.equation.params, "preferred_element_type": jnp.float16}
        return [x.astype(jnp.float16) for x in operands], params

    rules = Rules(Rule(in_float16, primitive="dot_general"))
    got = mpx.autocast(model, rules=rules)(*inputs)
    assert got.dtype == jnp.float32
    assert relative_error(got, model(*inputs)) < 1e-2
    assert dtypes_of(rules, inputs) == ["float16"] * 3
    assert seen[0][:2] == ("dot_general", "bfloat16") and "test_rules.py" in seen[0][2]


@pytest.mark.parametrize(
    "rewrite",
    [
        lambda candidate, operands: None,
        lambda candidate, operands: operands,
        lambda candidate, operands: (operands[:1], candidate.equation.params),
        lambda candidate, operands: (operands, None),
    ],
)
def test_a_rewrite_gives_operands_and_parameters(inputs, rewrite):
    rules = Rules(Rule(rewrite, primitive="dot_general"))
    with pytest.raises(TypeError, match="must return operands and.*dot_general; got"):
        mpx.autocast(model, rules=rules)(*inputs)


def of_parameters(change):
    def junk_rule(candidate, operands):
        return operands, change(dict(candidate.equation.params))

    return junk_rule


def of_operands(change):
    def junk_rule(candidate, operands):
        return [change(x) for x in operands], candidate.equation.params

    return junk_rule


@pytest.mark.parametrize("primitive", ["dot_general", "dot_product_attention"])
@pytest.mark.parametrize(
    "rewrite",
    [
        of_parameters(lambda params: {}),
        of_parameters(lambda params: dict.fromkeys(params, "junk")),
        of_parameters(lambda params: None),
        of_operands(lambda x: None),
        of_operands(lambda x: jnp.ones(3)),
        of_operands(lambda x: x[:1]),
    ],
)
def test_what_a_rewrite_makes_and_jax_refuses_names_the_function(primitive, rewrite):
    def attend(w, q):
        return jnp.sum(mpx.nn.dot_product_attention(q @ w, q, q))

    made = mpx.autocast(attend, rules=Rules(Rule(rewrite, primitive=primitive)))
    said = f"function `junk_rule`, the `precision` of a `mpx.Rule`.* {primitive}; got "
    with pytest.raises(TypeError, match=said):
        made(jnp.ones((4, 4)), jnp.ones((2, 8, 2, 4)))


def test_a_rule_that_holds_for_nothing(inputs):
    rules = Rules(full(scope="decoder"))
    half = mpx.autocast(model, rules=rules)
    with pytest.warns(UserWarning, match="no operation: `full for scope deco.*Is a na"):
        jax.jit(half)(*inputs)
    half(*inputs)  # warns once
    with pytest.raises(ValueError, match="match no operation: `full for scope deco"):
        mpx.autocast(model, rules=rules, strict=True)(*inputs)


def test_a_rule_that_holds_for_nothing_may_be_for_another_function(inputs):
    """As in an evaluation without the head, in a region, around calls, or by size."""
    rules = Rules(full(scope="head"))
    other = lambda params, x: x @ params["head"]  # noqa: E731
    mpx.autocast(model, rules=rules)(*inputs)
    mpx.autocast(other, rules=rules)(*inputs)

    rules = Rules(full(scope="nowhere"))
    mpx.autocast(other, rules=rules, enabled=False)(*inputs)
    with mpx.autocast(rules=rules, ambient=True):
        mpx.autocast(other)(*inputs)
    mpx.explain(mpx.autocast(other, rules=rules))(*inputs)  # has a finding
    with_rule(mpx.autocast(other), full(scope="tried"))(*inputs)
    large = lambda c: c.multiplications > 1e9  # noqa: E731
    rules = Rules(full(parameter="*", when=large))
    mpx.autocast(other, rules=rules)(*inputs)
    mpx.autocast(other, rules=Rules(full(primitive="tan")))(*inputs)


def test_rules_are_values():
    rules, other = (Rules(full(primitive="exp")) for _ in range(2))
    assert rules == other and hash(rules) == hash(other)
    with pytest.raises(AttributeError):
        rules.rules = ()


WRONG = {
    TypeError: [
        (lambda: Rule("full", primitive="exp"), "must be a `mpx.Precision`"),
        (lambda: Rule(mpx.DelayedScaling, scope="a"), r"`mpx.DelayedScaling\(\)"),
        (lambda: Rule(jnp.float32, scope="a"), "must be a `mpx.Precision`"),
        (lambda: Rule(None, scope="a"), "got None"),
        (lambda: full(["exp", "log"]), r"tuple.*\['exp', 'lo"),
        (lambda: full(3), "`primitive` of `mpx.Rule`.*int 3"),
        (lambda: full(("exp", 3)), r"got \('exp', 3\)"),
        (lambda: full(scope=["a"]), "`scope`.*must be a text"),
        (lambda: full(scope=("a",)), r"text; got \('a',\)"),
        (lambda: full(parameter=0), "`parameter`.*got int 0"),
        (lambda: full(when=3), "`when` of `mpx.Rule`"),
        (lambda: Rules(Precision.FULL), "needs `mpx.Rule`s"),
        (lambda: Rules(looks_ahead="no"), "`looks_ahead`.*True or False"),
        (lambda: mpx.autocast(model, rules=[]), "must be `mpx.Rules`"),
    ],
    ValueError: [
        (lambda: full(), "`parameter` or `when`. For every"),
        (lambda: full(()), r"must not be empty; got \(\)"),
        (lambda: full(scope=""), "`scope`.*not be empty"),
        (lambda: mpx.autocast(model, residual_stream="bfloat16"), '"blocks" or "half"'),
    ],
}


@pytest.mark.parametrize(
    ("error", "call", "match"),
    [(error, *case) for error, cases in WRONG.items() for case in cases],
)
def test_wrong_rules_are_errors(error, call, match):
    with unchecked_annotations(), pytest.raises(error, match=match):
        call()


def test_weights_may_be_another_argument(inputs):
    params, x = inputs
    cast = functools.partial(mpx.autocast, rules=Rules(full(parameter="*head*")))
    by_name = cast(lambda x, *, params: model(params, x), weights=("params",))
    for func, args, expected in (
        (cast(model, weights=0), (params, x), [HALF, HALF, FULL]),
        (cast(model, weights=1), (params, x), [HALF, HALF, HALF]),
        (cast(lambda x, p: model(p, x), weights=1), (x, params), [HALF, HALF, FULL]),
        (lambda p, x: by_name(x, params=p), (params, x), [HALF, HALF, FULL]),
    ):
        assert read_by("dot_general", func, *args) == expected


def test_a_parameter_is_known_through_scan_and_jit(inputs):
    params, x = inputs
    stacked = jnp.stack([params["head"]] * 3)

    def func(p, x):
        step = lambda c, w: (jnp.tanh(jax.jit(jnp.dot)(c, w.T)), None)  # noqa: E731
        return jax.lax.scan(step, x, p["stack"])[0] @ p["last"]

    args = {"stack": stacked, "last": params["head"]}, x
    rules = Rules(full(parameter="*stack*"))
    counts = count_products(mpx.autocast(func, rules=rules), *args)
    assert counts == {F32: 3, BF16: 1}


@pytest.mark.slow
def test_pytorchs_lists_on_a_vit_block():
    key = jax.random.key(0)
    vit = jax.jit(blocks.vit_parameters)(key), jax.random.normal(key, (8, 197, 384))
    cast = mpx.autocast(blocks.vit_loss, rules=Rules.like_pytorch())
    assert count_products(jax.grad(cast), *vit) == {BF16: 24}
    found, expected = (jax.jit(jax.grad(f))(*vit) for f in (cast, blocks.vit_loss))
    assert relative_error(found, expected) <= 4e-3


def test_pytorchs_lists_let_the_square_root_follow():
    func = lambda x: jnp.sqrt(jnp.abs(x @ x)) @ x  # noqa: E731
    x = jnp.ones((4, 4))

    def dtype(**options):
        (found,) = read_by("sqrt", mpx.autocast(func, **options), x)
        return found

    assert dtype() == "float32" and dtype(rules=Rules.like_pytorch()) == "bfloat16"


@pytest.mark.parametrize("precision", [Precision.HALF, Precision.FULL, Precision.LOW])
def test_a_rule_leaves_a_product_with_float64_as_it_was_written(precision):
    """JAX multiplies bfloat16 with float64 as they are, and float64 comes out."""

    def loss(params, x):
        hidden = jnp.tanh(x.astype(jnp.float32) @ params["narrow"])
        wide = jax.lax.dot(hidden, params["wide"], preferred_element_type=jnp.float64)
        # A sum that is asked for in float64, of what is half.
        half = hidden.astype(jnp.bfloat16)
        square = jax.lax.dot(half, half.T, preferred_element_type=jnp.float64)
        return jnp.mean(wide**2) + jnp.mean(square)

    rule = Rule(precision, primitive="dot_general")
    recipe = mpx.Float8CurrentScaling() if precision is Precision.LOW else None
    with jax.enable_x64(True):
        params = {
            "narrow": jnp.ones((32, 64), jnp.float32) / 64,
            "wide": jnp.ones((64, 16)),
        }
        x = jnp.ones((16, 32), jnp.bfloat16)
        plain, plain_gradients = jax.value_and_grad(loss)(params, x)
        low = mpx.autocast(loss, rules=Rules(rule), recipe=recipe)
        value, gradients = jax.value_and_grad(low)(params, x)
    assert value.dtype == jnp.float64
    assert relative_error(value, plain) < 0.02
    for name, gradient in gradients.items():
        assert gradient.dtype == params[name].dtype
        assert relative_error(gradient, plain_gradients[name]) < 0.05


@pytest.mark.parametrize("primitive", ["gather", "transpose", "slice"])
def test_a_rule_for_what_only_moves_data_holds_for_nothing(primitive):
    """It has no precision of its own: a report says so, and strict mode raises."""

    def func(w, i):
        return jnp.sum((w @ w).T[i][1:])

    rules = Rules(full(primitive=primitive))
    args = jnp.ones((4, 4)), jnp.arange(2)
    report = mpx.explain(mpx.autocast(func, rules=rules))(*args)
    assert f"`full for primitive {primitive}` matched nothing" in str(report)
    with pytest.raises(ValueError, match="match no operation"):
        mpx.autocast(func, rules=rules, strict=True)(*args)
