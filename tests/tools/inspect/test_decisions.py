"""What autocast decided is in the report, wherever an autocast function is called."""

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import mpx

W = jax.ShapeDtypeStruct((4, 4), jnp.float32)
X = jax.ShapeDtypeStruct((2, 4), jnp.float32)


def loss(w, x):
    with jax.named_scope("mlp"):
        x = jnp.tanh(x @ w)
    return jnp.mean(jnp.exp(x))


def decisions(report, primitive, phase="forward"):
    return [
        (o.precision, o.rule, o.reason)
        for o in report.operations
        if o.primitive == primitive and o.phase == phase
    ]


def of_product(report, phase="forward"):
    return decisions(report, "dot_general", phase)


PRODUCT = ("bfloat16", "half", "a matmul or convolution")


def test_rule_and_reason():
    report = mpx.explain(mpx.autocast(loss))(W, X)
    assert of_product(report) == [PRODUCT]
    ((precision, rule, reason),) = decisions(report, "exp")
    assert (precision, rule) == ("float32", "full")
    assert "float32" in reason and "between matmuls" in reason
    products = [o for o in report.operations if o.primitive == "dot_general"]
    assert {o.where for o in products} == {"mlp"}
    assert not any("mpx:" in o.scope for o in report.operations)
    assert report.totals.findings == 0
    report = mpx.explain(mpx.autocast(lambda i: i * i))(jax.ShapeDtypeStruct((), int))
    ((precision, _, reason),) = decisions(report, "mul")
    assert precision == "int32" and reason.startswith("no float16, bfloat16 or float32")


def test_casts_and_gradients_say_what_they_are_for():
    report = mpx.explain(mpx.autocast(jnp.matmul))(X, W)
    for_product = ("cast", "for dot_general: a matmul or convolution")
    casts = [(o.rule, o.reason) for o in report.operations if o.is_cast]
    result = ("convert", "a result keeps its declared dtype")
    assert casts == [for_product, for_product, result]
    for func in (jax.grad(mpx.autocast(loss)), mpx.autocast(jax.grad(loss))):
        assert of_product(mpx.explain(func)(W, X)) == [PRODUCT]
    report = mpx.explain(jax.grad(mpx.autocast(loss)))(W, X)
    backward = ("bfloat16", "half", f"derivative of dot_general: {PRODUCT[2]}")
    assert of_product(report, "backward") == [backward]


def carried(x):
    return jax.lax.scan(lambda c, _: (jnp.cumsum(c), None), x, length=3)[0]


@pytest.mark.parametrize(
    ("func", "of"), [(jnp.exp, "a result"), (carried, "a loop's carry")]
)
def test_casts_back_say_so(func, of):
    x = jax.ShapeDtypeStruct((3,), jnp.bfloat16)
    report = mpx.explain(mpx.autocast(func, target="h100"))(x)
    back = [o for o in report.operations if o.outputs == ("bfloat16[3]",)]
    reason = f"{of} keeps its declared dtype"
    assert [(o.rule, o.reason) for o in back] == [("convert", reason)]


TRANSFORMS = {
    "plain": lambda f: f,
    "jit": jax.jit,
    "remat": jax.checkpoint,
    "map": lambda f: lambda w, x: jax.lax.map(lambda x: f(w, x[None]), x),
    "vmap": lambda f: lambda w, x: jax.vmap(lambda x: f(w, x[None]))(x),
    "cond": lambda f: lambda w, x: jax.lax.cond(True, f, f, w, x),
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_autocast_is_found_inside(transform):
    for func in transform(mpx.autocast(loss)), mpx.autocast(transform(loss)):
        assert set(of_product(mpx.explain(func)(W, X))) == {PRODUCT}


def test_what_was_compiled_before_is_explained_and_notes_are_only_taken_for_reports():
    step = jax.jit(mpx.autocast(loss))
    step(jnp.ones((4, 4)), jnp.ones((2, 4)))
    for _ in range(2):  # and again, out of the cache
        assert of_product(mpx.explain(step)(W, X)) == [PRODUCT]
    step = jax.jit(mpx.autocast(loss))
    mpx.explain(step)(W, X)
    text = step.lower(W, X).as_text(debug_info=True)
    assert "mlp" in text
    assert "mpx:" not in text


def test_only_the_part_under_autocast_has_decisions():
    def f(w, x):
        return mpx.autocast(lambda x, w: x @ w)(x, w) @ w

    first, second = of_product(mpx.explain(f)(W, X))
    assert first == PRODUCT
    line = f"tests/tools/inspect/test_decisions.py:{f.__code__.co_firstlineno + 1}"
    reason = f"cast to float32 at {line}; `args[0]`, which is float32"
    assert second == ("float32", "as written", reason)


def test_the_short_form():
    short = mpx.explain(loss, jnp.float16)(W, X)
    assert short == mpx.explain(mpx.autocast(loss, jnp.float16))(W, X)
    assert of_product(short)[0][0] == "float16"
    off = mpx.explain(loss, "bfloat16", enabled=False)(W, X)
    # Not the stacks of frames, in which the checks of annotations stand, too.
    assert str(off) == str(mpx.explain(loss)(W, X))


def test_a_module_under_autocast_is_its_own_weights(getkey):
    model = eqx.nn.MLP(4, 4, 8, 1, key=getkey())
    report = mpx.explain(mpx.autocast(model))(jnp.ones(4))
    products = [o for o in report.operations if o.primitive == "dot_general"]
    names = ("layers[0].weight",), ("layers[1].weight",)
    assert tuple(o.parameters for o in products) == names
    assert report.name == "MLP"


def test_rules_of_the_users_and_regions_are_named():
    keep = mpx.Rule(mpx.Precision.FULL, primitive="dot_general", scope="mlp")
    nothing = mpx.Rule(mpx.Precision.HALF, primitive="conv_general_dilated")
    rules = mpx.Rules(keep, nothing)
    report = mpx.explain(loss, rules=rules)(W, X)
    assert of_product(report) == [("float32", str(keep), "a rule of the user's")]
    assert report.unused_rules == (str(nothing),)
    assert f"the rule `{nothing}` matched nothing" in str(report)
    assert mpx.reports.Report.from_json(report.to_json()) == report

    def f(w, x):
        with jax.named_scope("inner"), mpx.autocast(enabled=False):
            x = x @ w
        return x @ w

    report = mpx.explain(mpx.autocast(f))(W, X)
    region = "float32", "as written", "a region with `enabled=False`"
    assert [(p, r) for p, _, r in of_product(report)] == [region[::2], PRODUCT[::2]]
    wheres = [o.where for o in report.operations if o.primitive == "dot_general"]
    assert wheres[0] == "inner"


def quantized(report):
    """The products in 8 bits: of which weight, and in which pass."""
    return [(o.parameters, o.phase) for o in report.operations if o.is_low]


def test_a_recipe_with_a_state_is_explained_without_one():
    """With the scales of a first step; the products are those of a training step."""
    shapes = (3, 32, 32), (16, 32)
    w, x = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)

    def loss(w, x):
        x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)
        return jnp.mean((x @ w[2]) ** 2)

    func = mpx.autocast(loss, recipe=mpx.DelayedScaling())
    current = mpx.autocast(loss, recipe=mpx.Float8CurrentScaling())
    report = mpx.explain(func)(w, x)
    assert len(quantized(report)) == 1
    assert quantized(report) == quantized(mpx.explain(current)(w, x))
    assert quantized(mpx.explain(loss, recipe=mpx.DelayedScaling())(w, x))
    scaling = mpx.init_scaling(func, w, x)

    def step(w, scaling, x):
        return mpx.filter_grad(func, scaling)(w, x)

    of_gradient = quantized(mpx.explain(jax.grad(func))(w, x))
    phases = [phase for _, phase in of_gradient]
    assert phases.count("backward") == 2 * phases.count("forward")
    assert [p for _, p in quantized(mpx.explain(step)(w, scaling, x))] == phases
    # Only a report takes them: a call still needs the state.
    match = "needs a state, which only a training step has"
    with pytest.raises(ValueError, match=match):
        jax.eval_shape(func, w, x)


@pytest.mark.parametrize(
    ("target", "is_found"), [("sm_90", False), ("sm_80", True), ("cpu", False)]
)
def test_a_product_that_is_quantized_without_units_is_a_finding(target, is_found):
    """It moves more than in half precision and saves nothing; not so an emulation."""
    low = mpx.autocast(loss, recipe=mpx.Float8CurrentScaling(), target=target)
    found = [(o.primitive, o.finding) for o in mpx.explain(low)(W, X).findings]
    finding = "quantized, but computed without hardware for it"
    assert found == [("dot_general", finding)] * is_found


@pytest.mark.parametrize(
    ("dtype", "target", "is_found"),
    [("float16", "cpu", True), ("float16", "sm_90", False), ("bfloat16", "cpu", False)],
)
def test_float16_on_a_cpu_is_one_finding(dtype, target, is_found):
    def deep(w, x):
        return loss(w, jnp.tanh(x @ w))

    report = mpx.explain(jax.grad(mpx.autocast(deep, dtype, target=target)))(W, X)
    found = [o for o in report.operations if o.finding.startswith("float16 on a CPU")]
    assert len(found) == is_found
