"""Which products a recipe quantizes, and what the user can say about it."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpx
from mpx import Precision, Rule, Rules

from ..helpers import slow_but, unchecked_annotations
from ..registries import STATELESS
from .counting import relative_error

WIDTH, HEADS, CLASSES = 32, 2, 10
CURRENT, MXFP8 = mpx.Float8CurrentScaling(), mpx.MXFP8BlockScaling()


class Block(eqx.Module):
    qkv: eqx.nn.Linear
    out: eqx.nn.Linear
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, key):
        keys = jax.random.split(key, 4)
        self.qkv = eqx.nn.Linear(WIDTH, 3 * WIDTH, key=keys[0])
        self.out = eqx.nn.Linear(WIDTH, WIDTH, key=keys[1])
        self.up = eqx.nn.Linear(WIDTH, 2 * WIDTH, key=keys[2])
        self.down = eqx.nn.Linear(2 * WIDTH, WIDTH, key=keys[3])

    def __call__(self, x):
        with jax.named_scope("attention"):
            parts = jnp.split(jax.vmap(self.qkv)(x), 3, -1)
            q, k, v = (p.reshape(len(x), HEADS, -1) for p in parts)
            weights = jax.nn.softmax(jnp.einsum("shd,thd->hst", q, k))
            mixed = jnp.einsum("hst,thd->shd", weights, v).reshape(len(x), -1)
            x = x + jax.vmap(self.out)(mixed)
        with jax.named_scope("mlp"):
            return x + jax.vmap(self.down)(jax.nn.gelu(jax.vmap(self.up)(x)))


class Model(eqx.Module):
    table: eqx.nn.Embedding
    blocks: list[Block]
    head: eqx.nn.Linear

    def __init__(self, key):
        keys = jax.random.split(key, 4)
        self.table = eqx.nn.Embedding(CLASSES, WIDTH, key=keys[0])
        self.blocks = [Block(keys[1])]
        self.head = eqx.nn.Linear(WIDTH, CLASSES, key=keys[3])

    def __call__(self, tokens):
        x = jax.vmap(self.table)(tokens)
        for block in self.blocks:
            x = block(x)
        with jax.named_scope("head"):
            return jax.vmap(self.head)(x)


def loss(model, tokens):
    logits = jax.vmap(model)(tokens)
    chosen = jax.nn.log_softmax(logits)[..., :-1, :]
    return -jnp.mean(jnp.take_along_axis(chosen, tokens[:, 1:, None], -1))


@pytest.fixture(scope="module")
def inputs():
    random = np.random.default_rng(0)
    shapes, others = eqx.partition(
        eqx.filter_eval_shape(Model, jax.random.key(0)),
        lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct),
    )
    arrays = jax.tree.map(lambda s: jnp.asarray(normal(random, *s.shape) / 8), shapes)
    tokens = random.integers(0, CLASSES, (4, 16), np.int32)
    return eqx.combine(arrays, others), jnp.asarray(tokens)


@functools.cache
def gradient_of(recipe):
    """A function that is compiled once for all the tests that compare with it."""
    return eqx.filter_jit(eqx.filter_value_and_grad(mpx.autocast(loss, recipe=recipe)))


def quantized(func, *args):
    """The weights of the products that a recipe took, in their order."""
    report = mpx.explain(func)(*args)
    return [o.parameters for o in report.operations if o.is_low]


LINEAR = [(f"blocks[0].{name}.weight",) for name in ("qkv", "out", "up", "down")]
HEAD = ("head.weight",)


@pytest.mark.slow
def test_products_of_weights_are_quantized_and_no_others(inputs):
    func = mpx.autocast(loss, recipe=MXFP8)
    report = mpx.explain(func)(*inputs)
    low = [o.parameters for o in report.operations if o.is_low]
    assert low == LINEAR
    rest = {
        o.reason.split("not quantized: ")[-1]
        for o in report.operations
        if o.primitive == "dot_general" and not o.is_low
    }
    assert rest == {"an activation matmul", "the output layer (LM head)"}


@pytest.mark.parametrize("name", slow_but(["mxfp8"], STATELESS))
def test_gradients_are_near_those_of_half_precision(name, inputs):
    half, low = (gradient_of(r)(*inputs)[1] for r in (None, STATELESS[name]))
    bound = 0.6 if name in ("nvfp4", "custom") else 0.15
    assert 1e-3 < relative_error(low, half) < bound
    assert all(g.dtype == np.float32 for g in jax.tree.leaves(low))


LOW, HALF = (functools.partial(Rule, p) for p in (Precision.LOW, Precision.HALF))


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (LOW(scope="head"), [*LINEAR, HEAD]),
        (HALF(parameter="blocks[0].u*"), [*LINEAR[:2], LINEAR[3]]),
        (HALF(when=lambda c: c.multiplications <= 64 * 32 * 64), LINEAR[:1]),
    ],
    ids=["scope", "not a parameter", "not small ones"],
)
def test_rules_of_what_a_recipe_quantizes(rule, expected, inputs):
    func = mpx.autocast(loss, recipe=CURRENT, rules=Rules(rule))
    assert quantized(func, *inputs) == expected


def recipes_in(report):
    reasons = (o.reason for o in report.operations if o.is_low)
    return [reason.split(";")[1].split(",")[0].strip() for reason in reasons]


@pytest.mark.parametrize(
    "recipe",
    [
        mpx.DelayedScaling(fp8_dpa=True, warm_start=True),
        pytest.param(mpx.MXFP8BlockScaling(fp8_dpa=True), marks=pytest.mark.slow),
    ],
    ids=["delayed", "mxfp8"],
)
def test_attention_in_fp8_under_any_recipe(recipe, inputs):
    func = mpx.autocast(loss, recipe=recipe)
    scaling = mpx.init_scaling(func, *inputs)
    frozen = mpx.inference(func, scaling)
    report = mpx.explain(frozen)(*inputs)
    found = [o for o in report.operations if o.is_low]
    assert len(found) == 4 + 2
    attention = [o for o in found if not o.parameters]
    assert len(attention) == 2
    assert all("Float8CurrentScaling" in o.reason for o in attention)
    assert not any("Float8CurrentScaling" in o.reason for o in found if o.parameters)

    @eqx.filter_jit
    def gradient(scaling, inputs):
        return mpx.filter_value_and_grad(func, scaling)(*inputs)

    value, _, finite, _ = gradient(scaling, inputs)
    assert bool(finite)
    exact, _ = gradient_of(None)(*inputs)
    assert relative_error(value, exact) < 0.05


@pytest.mark.slow
def test_a_rule_may_name_a_recipe(inputs):
    rules = Rules(Rule(MXFP8, scope="mlp"))
    report = mpx.explain(mpx.autocast(loss, recipe=CURRENT, rules=rules))(*inputs)
    names = ["Float8CurrentScaling"] * 2 + ["MXFP8BlockScaling"] * 2
    assert recipes_in(report) == names
    assert len(quantized(mpx.autocast(loss, rules=rules), *inputs)) == 2


def layers(params, x):
    x = jnp.tanh(x @ params[0])
    with mpx.autocast(recipe=MXFP8):
        x = jnp.tanh(x @ params[1])
        with mpx.autocast(recipe=None):
            x = jnp.tanh(x @ params[2])
        with mpx.autocast(enabled=False):
            x = jnp.tanh(x @ params[3])
    return jnp.sum(jnp.tanh(x @ params[4]) @ params[5])


@pytest.fixture(scope="module")
def square():
    random = np.random.default_rng(1)
    ws = [jnp.asarray(normal(random, WIDTH, WIDTH) / 6) for _ in range(6)]
    return ws, jnp.asarray(normal(random, 8, WIDTH))


def normal(random, *shape):
    return random.standard_normal(shape, np.float32)


def test_regions_nest_and_follow(square):
    report = mpx.explain(mpx.autocast(layers, recipe=CURRENT))(*square)
    found = [o.parameters for o in report.operations if o.is_low]
    assert found == [("[0]",), ("[1]",), ("[4]",)]
    names = ["Float8CurrentScaling", "MXFP8BlockScaling", "Float8CurrentScaling"]
    assert recipes_in(report) == names
    assert quantized(mpx.autocast(layers), *square) == [("[1]",)]


def test_regions_hold_inside_of_programs_that_were_traced_before(square):
    @jax.jit
    def product(w, x):
        return jnp.tanh(x @ w)

    def func(params, x):
        with mpx.autocast(recipe=CURRENT):
            x = product(params[0], x)
        return product(params[1], x)

    product(square[0][0], square[1])
    assert len(quantized(mpx.autocast(func), *square)) == 1


@pytest.mark.parametrize(
    "func", [lambda w, x: x @ w[0], lambda w, x: jnp.sum(x @ w[0])]
)
def test_a_final_projection_is_quantized_that_is_all_or_gives_no_loss(func, square):
    assert quantized(mpx.autocast(func, recipe=CURRENT), *square) == [("[0]",)]


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
def test_a_recipe_around_an_autocast_function_says_who_decides(wrap, square):
    inner = wrap(mpx.autocast(layers))
    with pytest.raises(ValueError, match="got one, whose own precision.*Set the rec"):
        mpx.autocast(inner, recipe=CURRENT)(*square)


@pytest.mark.parametrize("rows", [0, 1])
def test_a_batch_of_one_row_is_computed_in_half_precision(rows, square):
    """Such as the last one of an epoch: a word, no error. A vector of `vmap` is one."""
    params, x = square
    low, half = mpx.autocast(layers, recipe=CURRENT), mpx.autocast(layers)
    with pytest.warns(UserWarning, match="data has at most one row here"):
        assert np.array_equal(low(params, x[:rows]), half(params, x[:rows]))
    with pytest.raises(ValueError, match="found no weight matmul"):
        jax.vmap(low, (None, 0))(params, x)


def test_the_arrays_of_a_module_are_its_weights_and_its_input_is_data(inputs):
    layer = eqx.nn.MLP(WIDTH, WIDTH, WIDTH, 2, key=jax.random.key(0))
    x = jnp.ones((WIDTH, WIDTH))
    batched = mpx.autocast(eqx.filter_vmap(layer), recipe=CURRENT)
    names = [f"_fun.layers[{i}].weight" for i in range(2)]
    assert quantized(batched, x) == [(name,) for name in names]


def test_weights_that_are_computed_from_weights_are_weights(square):
    """Weight normalization, a fused kernel, a branch, a transpose, a cast, a slice."""

    def func(params, x):
        normed = params[0] / jnp.linalg.norm(params[0], axis=0, keepdims=True)
        fused = jnp.concatenate([params[1], params[2]], axis=1)
        y = jnp.tanh(x @ normed) @ fused
        either = jax.lax.cond(x[0, 0] > 0, jnp.transpose, jnp.flip, params[3])
        y = jnp.tanh(y[:, :WIDTH] @ either.T).astype(jnp.bfloat16)
        y = y @ params[4].astype(jnp.bfloat16)
        y = y.astype(jnp.float32) @ params[5][:, : WIDTH // 2]
        return y @ params[0][: WIDTH // 2]

    report = mpx.explain(mpx.autocast(func, recipe=CURRENT))(*square)
    assert sum(o.is_low for o in report.operations) == 5


def test_every_form_of_product(square):
    """Weight first, batches of weights, several contracted axes, a convolution."""
    w, x = square[0][0], square[1]

    def func(w, x):
        heads = w.reshape(WIDTH, 4, 8)
        y = jnp.einsum("bi,ihd->bhd", x, heads)
        y = jnp.einsum("bhd,hdo->bo", y, w.reshape(4, 8, WIDTH))
        y = (w @ y.T).T
        experts = jnp.stack([w, w.T])
        return jnp.einsum("ebi,eio->ebo", jnp.stack([y, 2 * y]), experts)

    every = mpx.Rules(mpx.Rule(mpx.Precision.LOW, primitive="dot_general"))
    low = mpx.autocast(func, recipe=CURRENT, rules=every)
    assert len(quantized(low, w, x)) == 4
    (y, grads), (exact_y, exact) = (of_squares(f)(w, x) for f in (low, func))
    assert relative_error(y, exact_y) < 0.1
    assert relative_error(grads, exact) < 0.3


def of_squares(func):
    """What a function of two arrays gives, and the gradients of its sum of squares."""

    def loss(*args):
        y = func(*args)
        return jnp.sum(y**2), y

    def found(*args):
        grads, y = jax.grad(loss, (0, 1), has_aux=True)(*args)
        return y, grads

    return jax.jit(found)


def test_convolutions():
    random = np.random.default_rng(2)
    kernel, x = normal(random, 3, 3, 4, 8) / 6, normal(random, 2, 8, 8, 4)

    def func(kernel, x):
        return jax.lax.conv_general_dilated(
            x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    low = mpx.autocast(func, recipe=CURRENT)
    assert len(quantized(low, kernel, x)) == 1
    (y, grads), (exact_y, exact) = (of_squares(f)(kernel, x) for f in (low, func))
    assert 1e-3 < relative_error(y, exact_y) < 0.1
    assert 1e-3 < relative_error(grads, exact) < 0.2
    with pytest.raises(ValueError, match="a convolution needs a recipe with one scale"):
        mpx.autocast(func, recipe=MXFP8)(kernel, x)


def tensor_quantizers(role, leg):
    is_gradient = role is mpx.quantization.Role.GRADIENT
    made = mpx.Format.E5M2 if is_gradient else mpx.Format.E4M3
    return mpx.quantization.TensorQuantizer(made)


def block_quantizers(role, leg):
    is_gradient = role is mpx.quantization.Role.GRADIENT
    made = mpx.quantization
    return made.MXFP8Quantizer() if is_gradient else made.TensorQuantizer()


def convolution(kernel, x):
    return jax.lax.conv(x, kernel, (1, 1), "SAME")


def test_convolutions_are_quantized_by_any_recipe_with_one_scale_for_each_array():
    random = np.random.default_rng(2)
    kernel, x = normal(random, 8, 4, 3, 3) / 6, normal(random, 2, 4, 8, 8)
    own = mpx.autocast(convolution, recipe=mpx.CustomRecipe(tensor_quantizers))
    assert len(quantized(own, kernel, x)) == 1
    found = of_squares(own)(kernel, x)
    same = of_squares(mpx.autocast(convolution, recipe=CURRENT))(kernel, x)
    assert all(map(np.array_equal, jax.tree.leaves(found), jax.tree.leaves(same)))


def test_explain_says_that_blocks_keep_a_convolution_in_half_precision():
    random = np.random.default_rng(2)
    arrays = {"k": normal(random, 8, 4, 3, 3), "w": normal(random, 8, 8)}

    def func(arrays, x):
        return convolution(arrays["k"], x).mean((2, 3)) @ arrays["w"]

    low = mpx.autocast(func, recipe=mpx.CustomRecipe(block_quantizers))
    report = mpx.explain(low)(arrays, normal(random, 2, 4, 8, 8))
    (one,) = (o for o in report.operations if o.primitive == "conv_general_dilated")
    assert one.precision == "bfloat16" and "one scale for each array" in one.reason


def experts(weights, x, chosen):
    """A layer of experts: rows sorted by expert, two ragged products, and back."""
    order = jnp.argsort(chosen)
    sizes = jnp.bincount(chosen, length=len(weights["up"]))
    h = jax.nn.relu(jax.lax.ragged_dot(x[order], weights["up"], sizes))
    y = jax.lax.ragged_dot(h, weights["down"], sizes)
    return y[jnp.argsort(order)] @ weights["head"]


def an_expert_layer():
    random = np.random.default_rng(3)
    shapes = {"up": (4, 32, 64), "down": (4, 64, 32), "head": (32, 8)}
    weights = {k: jnp.asarray(normal(random, *s) / 6) for k, s in shapes.items()}
    x = jnp.asarray(normal(random, 48, 32))
    return weights, x, jnp.asarray(random.integers(0, 4, 48, np.int32))


@pytest.mark.parametrize(
    ("name", "of_value", "of_gradient"),
    [("current", 0.02, 0.15), pytest.param("nvfp4", 0.1, 0.5, marks=pytest.mark.slow)],
)
def test_experts_are_quantized(name, of_value, of_gradient):
    def loss(*args):
        return jnp.mean(experts(*args) ** 2)

    args = an_expert_layer()
    low = mpx.autocast(loss, recipe=STATELESS[name])
    assert len(quantized(low, *args)) == 2
    exact_value, exact = jax.jit(jax.value_and_grad(loss))(*args)
    value, grads = jax.jit(jax.value_and_grad(low))(*args)
    assert relative_error(value, exact_value) < of_value
    assert relative_error(grads, exact) < of_gradient


def test_ragged_products_that_are_left_alone():
    weights, x, chosen = an_expert_layer()
    sizes = jnp.bincount(chosen, length=4)
    sums = jax.lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])

    def by_group(w, x):
        return jax.lax.ragged_dot_general(x, x @ w["up"][0], sizes, sums)

    def of_data(w, x):
        y = x @ w["up"][0]
        return jax.lax.ragged_dot(x, jnp.stack([y.T @ y] * 4)[:, :32], sizes)

    for func, reason in (
        (by_group, "a ragged matmul of another form than rows in groups"),
        (of_data, "not quantized: a ragged matmul of operands other than"),
    ):
        report = mpx.explain(mpx.autocast(func, recipe=CURRENT))(weights, x)
        assert reason in report.table(width=None)


def test_a_weight_divided_by_something_of_the_data_is_no_weight(square):
    w, x = square[0][0], square[1]

    def norm(w, x):  # of the weight in the direction of the data
        return jnp.linalg.norm(jnp.mean(x, 0) @ w)

    before = mpx.autocast(lambda w, x: x @ (w / norm(w, x)), recipe=CURRENT)
    with pytest.raises(ValueError, match="counts as data: divide the matmul's"):
        before(w, x)
    after = mpx.autocast(lambda w, x: (x @ w) / norm(w, x), recipe=CURRENT)
    assert len(quantized(after, w, x)) == 1


def test_nothing_to_quantize_is_an_error(square):
    w, x = square[0][0], square[1]
    sums = mpx.autocast(lambda w, x: jnp.sum(x) * jnp.sum(w), recipe=CURRENT)
    with pytest.raises(ValueError, match="found no weight matmul"):
        jax.eval_shape(sums, w, x)
    mapped = jax.vmap(mpx.autocast(lambda w, x: x @ w, recipe=CURRENT), (None, 0))
    with pytest.raises(ValueError, match="put `jax.vmap` inside"):
        jax.eval_shape(mapped, w, x)
    with pytest.raises(ValueError, match="closes over are constants"):
        mpx.autocast(lambda x: x @ w, recipe=CURRENT)(x)
    with pytest.raises(ValueError, match="closes over are constants"):
        jax.eval_shape(mpx.autocast(lambda x: jnp.tanh(x @ w.T), recipe=CURRENT), x)
    named = mpx.autocast(lambda x, w: x @ w, recipe=CURRENT, weights=1)
    assert jax.eval_shape(named, x, w).shape == (8, WIDTH)


def test_a_recipe_around_a_gradient_is_an_error(inputs):
    around = mpx.autocast(eqx.filter_grad(loss), recipe=CURRENT)
    with pytest.raises(ValueError, match="not the other way round"):
        eqx.filter_eval_shape(around, *inputs)


def test_forward_mode_is_an_error_that_says_so(square):
    func = mpx.autocast(lambda w, x: x @ w, recipe=CURRENT)
    w, x = square[0][0], square[1]
    with pytest.raises(TypeError, match="forward-mode.*recipe=None"):
        jax.jvp(lambda w: func(w, x), (w,), (w,))


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"recipe": "fp8"}, TypeError, "must be a recipe"),
        ({"recipe": mpx.Float8CurrentScaling}, TypeError, "must be a recipe"),
        ({"recipe": CURRENT, "target": "abacus"}, ValueError, "sm_90"),
    ],
)
def test_an_unknown_recipe_or_target_is_an_error(options, error, match):
    with unchecked_annotations(), pytest.raises(error, match=match):
        mpx.autocast(loss, **options)


def test_low_precision_without_a_recipe_is_an_error(square):
    func = mpx.autocast(layers, rules=Rules(LOW(scope="*", primitive="dot_general")))
    assert len(quantized(func, *square)) == 1  # a region of it has one
    plain = lambda w, x: x @ w[0]  # noqa: E731
    with pytest.raises(ValueError, match="none is set"):
        mpx.autocast(plain, rules=Rules(LOW(primitive="dot_general")))(*square)


def test_strict_refuses_a_slow_path(inputs):
    strict = mpx.autocast(loss, recipe=CURRENT, strict=True, target="sm_80")
    with pytest.raises(ValueError, match="low-precision units.*FP8 hardware"):
        strict(*inputs)
    fast = mpx.autocast(loss, recipe=CURRENT, strict=True, target="sm_90")
    assert eqx.filter_eval_shape(fast, *inputs).shape == ()


def test_a_recipe_is_traced_once_for_many_steps(square):
    (first, second, *_), x = square
    traces = []

    def counted(w, x):
        traces.append(1)
        return jnp.sum(jnp.tanh(x @ w[0]) @ w[1])

    step = jax.jit(jax.grad(mpx.autocast(counted, recipe=CURRENT)))
    for w in ((first, second), (second, first), (first, first)):
        step(w, x)
    assert len(traces) == 1


def test_custom_derivatives_inside_keep_their_own_precision(square):
    """What a derivative rule computes is not ours to quantize."""

    @jax.custom_vjp
    def product(w, x):
        return x @ w

    product.defvjp(
        lambda w, x: (x @ w, (w, x)), lambda kept, g: (kept[1].T @ g, g @ kept[0].T)
    )

    def func(params, x):
        return jax.nn.relu(product(params[0], x)) @ params[1]

    report = mpx.explain(mpx.autocast(func, recipe=CURRENT))(square[0][:2], square[1])
    assert [o.parameters for o in report.operations if o.is_low] == [("[1]",)]
    reasons = [o.reason for o in report.operations if o.primitive == "dot_general"]
    assert any("custom derivative rule" in reason for reason in reasons)


def test_a_report_has_no_products_that_were_emitted_in_vain():
    """The only product is tried as the final projection first, and then quantized."""
    square = jnp.ones((WIDTH, WIDTH))
    only = mpx.autocast(lambda w, x: jnp.sum(x @ w), recipe=CURRENT)
    report = mpx.explain(only)(square, square)
    (product,) = (o for o in report.operations if o.primitive == "dot_general")
    assert product.is_low
