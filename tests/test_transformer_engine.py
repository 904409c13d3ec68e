"""Both examples of Transformer Engine's introduction, and what it says about them.

The first trains a layer in high precision, with bfloat16 or float16 computation and
float32 master weights, and with bfloat16 weights. The second trains in FP8: with one
recipe, with sequential contexts and with nested ones. Each is done twice: by ambient
contexts around layers of `mpx.nn`, as there, and by transforming a function.
"""

import functools
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpx
import mpx.nn
from tests.autocast.counting import relative_error
from tests.helpers import slow_but

from .low_precision import low_dtypes, quantized_products

pytestmark = pytest.mark.third_party  # Optax

HIDDEN = 32
E4M3 = mpx.DelayedScaling(fp8_format=mpx.Format.E4M3, amax_history_len=4)
BOTH = {"float8_e4m3fn", "float8_e5m2"}
HYBRID = mpx.DelayedScaling(fp8_format=mpx.Format.HYBRID, amax_history_len=4)


@functools.cache
def transformer(dtype="float32", seed=0):
    return eqx.filter_jit(mpx.nn.TransformerLayer)(
        hidden_size=HIDDEN,
        mlp_hidden_size=64,
        num_attention_heads=4,
        dtype=dtype,
        key=jax.random.key(seed),
    )


def linears(count):
    return [linear(seed) for seed in range(count)]


@functools.cache
def linear(seed):
    return mpx.nn.Linear(HIDDEN, HIDDEN, key=jax.random.key(seed))


@functools.cache
def batch(dtype="bfloat16"):
    x, y = jax.random.normal(jax.random.key(9), (2, 2, 8, HIDDEN))
    return x.astype(dtype), y


def plain_loss(model, x, y):
    return difference(model(x), y)


def difference(output, y):
    return mpx.nn.mean((output.astype(jnp.float32) - y) ** 2)


class Trained(NamedTuple):
    losses: list[float]
    model: Any
    scaling: Any
    grads: Any  # of the last step: delayed scaling knows no scales in the first


def train(loss, model, data, optimizer=None, steps=4, scaling=None, mixed=True):
    optimizer = optax.adam(3e-3) if optimizer is None else optimizer
    opt_state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
    scaling = mpx.init_scaling(loss, model, *data) if scaling is None else scaling

    @eqx.filter_jit
    def step(model, opt_state, scaling):
        grad = mpx.filter_value_and_grad(loss, scaling, use_mixed_precision=mixed)
        result = grad(model, *data)
        return mpx.optimizer_step(model, optimizer, opt_state, result), result

    losses = []
    for _ in range(steps):
        (model, opt_state, scaling), result = step(model, opt_state, scaling)
        losses.append(float(result.value))
    assert scaling.skipped == 0
    return Trained(losses, model, scaling, result.grads)


def falls(losses):
    return losses == sorted(losses, reverse=True) and losses[-1] < 0.98 * losses[0]


def near(trained, reference):
    """Whether a run in low precision differs from one in bfloat16 and is near it."""
    np.testing.assert_allclose(trained.losses, reference.losses, rtol=0.02)
    assert trained.losses != reference.losses
    return 1e-3 < relative_error(trained.grads, reference.grads) < 0.15


def dtypes(tree):
    return {leaf.dtype.name for leaf in jax.tree.leaves(eqx.filter(tree, eqx.is_array))}


def flat(tree):
    leaves = [np.asarray(x, np.float64).ravel() for x in jax.tree.leaves(tree)]
    return np.concatenate(leaves)


def gradient(loss, scaling, *args):
    step = jax.jit(lambda s, args: mpx.filter_value_and_grad(loss, s)(*args))
    return step(scaling, args)


# --- High precision, half precision, master weights -----------------------------------


DTYPES = [("bfloat16", "bfloat16"), ("float32", "float16")]


@pytest.mark.parametrize(("parameters", "compute"), slow_but(DTYPES[:1], DTYPES))
def test_the_input_decides_the_precision(parameters, compute):
    """Weights of any dtype are cast to the input's dtype where they are used."""
    layer, data = transformer(parameters), batch(compute)

    def loss(layer, x, y):
        output = layer(x)
        assert output.dtype == compute
        return difference(output, y)

    is_float16 = compute == "float16"
    scaling = mpx.DynamicLossScaling() if is_float16 else mpx.NoLossScaling()
    run = train(loss, layer, data, scaling=scaling, mixed=False)
    assert falls(run.losses) and dtypes(run.model) == {parameters}
    assert run.scaling.loss_scale == (2.0**15 if is_float16 else 1)


@functools.cache
def in_half_precision(dtype):
    return train(mpx.autocast(plain_loss, dtype), transformer(), batch("float32"))


@pytest.mark.parametrize("dtype", slow_but(["float16"], ["bfloat16", "float16"]))
def test_the_transform_keeps_master_weights_in_the_model(dtype):
    """As `torch.autocast` around a layer of float32."""
    run = in_half_precision(dtype)
    assert falls(run.losses) and dtypes(run.model) == {"float32"}
    kind = mpx.NoLossScaling if dtype == "bfloat16" else mpx.DynamicLossScaling
    assert isinstance(run.scaling, kind)


def test_master_weights_in_the_optimizer_keep_what_bfloat16_loses():
    """Steps too small for bfloat16 add up in the optimizer's float32 copies."""
    sgd, start = optax.sgd(1e-3), mpx.cast_to_bfloat16(linears(1)[0])
    in_optimizer, in_model = mpx.master_weights(sgd), mpx.cast_to_float32(start)

    def moved(layer, optimizer):
        run = train(plain_loss, layer, batch(), optimizer, steps=6, mixed=False)
        assert dtypes(run.model) == dtypes(layer)
        return flat(run.model) - flat(start)

    exact = moved(in_model, sgd)
    lost = relative_error(moved(start, sgd), exact)
    assert lost > 0.9  # next to nothing has moved
    assert dtypes(in_optimizer.init(start).masters) == {"float32"}
    # What the model shows is rounded, but on the right side.
    assert relative_error(moved(start, in_optimizer), exact) < lost


# --- Low precision: one recipe --------------------------------------------------------


@pytest.mark.slow
def test_a_layer_in_fp8_by_a_transform():
    layer, data = transformer(), batch("float32")
    loss = mpx.autocast(plain_loss, recipe=HYBRID)
    run = train(loss, layer, data)
    assert falls(run.losses) and dtypes(run.model) == {"float32"}
    assert near(run, in_half_precision("bfloat16"))
    frozen = mpx.inference(loss, run.scaling)
    # Query, key, value, output, and the first of the perceptron: the second one is the
    # last product before the loss.
    assert quantized_products(frozen, layer, *data) == 5
    assert low_dtypes(jax.grad(frozen), layer, *data) == BOTH


def test_the_last_product_is_quantized_if_a_rule_says_so():
    rules = mpx.Rules(mpx.Rule(mpx.Precision.LOW, parameter="mlp_out.weight"))
    loss = mpx.autocast(plain_loss, recipe=mpx.Float8CurrentScaling(), rules=rules)
    assert quantized_products(loss, transformer(), *batch()) == 6


def test_one_linear_layer_and_a_sum():
    """The smallest example: its only product is the last one before the loss."""
    loss = lambda layer, x: layer(x).astype(jnp.float32).sum()  # noqa: E731
    (layer,), (x, _) = linears(1), batch()
    transformed = mpx.autocast(loss, recipe=mpx.DelayedScaling())
    scaling = mpx.init_scaling(transformed, layer, x)
    result = gradient(transformed, scaling, layer, x)
    evaluate = mpx.inference(transformed, result.scaling)
    assert quantized_products(evaluate, layer, x) == 1
    # Gradients of 1 are exact in E5M2; x and w are not in E4M3.
    exact = np.asarray(x, np.float64).sum((0, 1))
    assert 1e-3 < relative_error(result.grads.weight[0], exact) < 0.12
    with ambient(mpx.Float8CurrentScaling()):
        assert quantized_products(loss, layer, x) == 1


@pytest.mark.slow
def test_a_layer_in_fp8_by_a_context():
    """The first example as it stands there; what is new is an explicit state."""
    layer, data = transformer(), batch()
    with mpx.autocast(enabled=True, recipe=HYBRID, ambient=True):
        run = train(plain_loss, layer, data)
        frozen = mpx.inference(plain_loss, run.scaling)
        # Also the last product: a context knows no loss.
        assert quantized_products(frozen, layer, *data) == 6
        assert low_dtypes(jax.grad(frozen), layer, *data) == BOTH
    assert falls(run.losses) and dtypes(run.model) == {"float32"}
    assert near(run, in_half_precision("bfloat16"))
    assert run.scaling.loss_scale == 1
    assert quantized_products(plain_loss, layer, *data) == 0


def test_without_its_state_a_layer_shows_the_lines_to_write():
    layer, (x, y) = linears(1)[0], batch()
    lines = (
        "    scaling = mpx.init_scaling(loss, model, ...)\n",
        "    result = mpx.filter_value_and_grad(loss, scaling)(model, ...)\n",
        "    mpx.inference(loss, scaling)(model, ...)\n",
        "mpx.Float8CurrentScaling()",
    )
    with ambient(mpx.DelayedScaling()):
        for call in (layer, lambda x: jax.value_and_grad(plain_loss)(layer, x, y)):
            with pytest.raises(ValueError) as error:
                call(x)
            assert all(line in str(error.value) for line in lines)
        # What the lines say, in the order in which they stand there.
        scaling = mpx.init_scaling(plain_loss, layer, x, y)
        result = gradient(plain_loss, scaling, layer, x, y)
        assert jax.jit(mpx.inference(plain_loss, result.scaling))(layer, x, y) > 0


@pytest.mark.slow
def test_contexts_may_stand_around_the_step_or_inside_of_the_loss():
    """And in it around loops, recomputation and jit, where a layer knows nothing."""
    layers, (x, y) = linears(2), batch()

    def loss(layers, x, y):
        for layer in layers:
            x = jax.checkpoint(jax.jit(lambda layer, x: layer(x)))(layer, x)
        return difference(x, y)

    def inside(layers, x, y):
        with ambient(HYBRID):
            return loss(layers, x, y)

    with ambient(HYBRID):
        outside = mpx.init_scaling(loss, layers, x, y)
        around = gradient(loss, outside, layers, x, y)
    scaling = mpx.init_scaling(inside, layers, x, y)
    assert list(scaling.scales_by_weight()) == list(outside.scales_by_weight())
    assert [s.recipe for s in scaling.scales] == [HYBRID]
    within = gradient(inside, scaling, layers, x, y)
    np.testing.assert_array_equal(flat(within.grads), flat(around.grads))
    # The state is that of the transformed function: a program may change its style.
    every = mpx.Rules(mpx.Rule(mpx.Precision.LOW, parameter="*"))
    region = mpx.autocast(loss, recipe=HYBRID, rules=every)
    names = mpx.init_scaling(region, layers, x, y).scales_by_weight()
    assert list(names) == list(outside.scales_by_weight())


def test_explain_sees_contexts_in_a_function_that_nobody_transformed():
    layers, data = linears(2), batch()

    def inside(layers, x, y):
        with ambient(HYBRID):
            return difference(layers[1](layers[0](x)), y)

    products = [o for o in mpx.explain(inside)(layers, *data).operations if o.is_low]
    assert [o.parameters for o in products] == [("[0].weight",), ("[1].weight",)]
    gradient = mpx.explain(jax.grad(inside))(layers, *data)
    assert sum(o.is_low for o in gradient.operations) > len(products)


def test_a_context_decides_the_precision_of_its_layers_alone():
    """Inputs are not cast by default: they say what layers compute in, as there."""
    layers, (x, y) = linears(2), batch()

    def loss(layers, x, y):
        with ambient(mpx.Float8CurrentScaling()):
            x = layers[0](x)
        return difference(layers[1](x), y)

    grads = gradient(loss, mpx.NoLossScaling(), layers, x, y).grads
    control = jax.jit(jax.grad(loss))(layers, x, y)
    np.testing.assert_array_equal(flat(grads), flat(control))
    # Asked for, they are.
    assert mpx.init_scaling(loss, layers, x, y).loss_scale == 1
    half = lambda s, *args: mpx.filter_grad(loss, s, policy="float16")(*args).grads  # noqa: E731
    program = jax.make_jaxpr(half)(mpx.StaticLossScaling(1.0), layers, x, y)
    assert "f16[2,8,32]" in str(program)


# --- Low precision: several recipes ---------------------------------------------------


def sequential(layers, x, context):
    encoder, decoder = layers
    with context(E4M3):
        hidden = encoder(x)
    with context(HYBRID):
        return decoder(hidden)


def nested(layers, x, context):
    """The inner context overrides the outer one; one layer is left out."""
    with context(E4M3):
        x = layers[0](x)
        with context(HYBRID):
            x = layers[1](x)
        with context(None):
            x = layers[2](x)
        return layers[3](x)


MODELS = {"sequential": (sequential, 2, 2), "nested": (nested, 4, 3)}


def region(recipe):
    return mpx.autocast(recipe=recipe)


def ambient(recipe):
    return mpx.autocast(recipe=recipe, ambient=True)


def ambient_without_state(recipe):
    """The recipe that computes its scales from the array at hand, in a context."""
    current = recipe and mpx.Float8CurrentScaling(recipe.fp8_format)
    return ambient(current)


def off(_):
    return ambient(None)


def loss_in(context, model):
    return lambda layers, x, y: difference(model(layers, x, context), y)


def test_several_recipes_in_a_transformed_function():
    model, depth, quantized = MODELS["nested"]
    layers, data = linears(depth), batch("float32")
    # The last layer is the last product before the loss.
    rules = mpx.Rules(mpx.Rule(mpx.Precision.LOW, parameter=f"[{depth - 1}].weight"))
    losses = [mpx.autocast(loss_in(c, model), rules=rules) for c in (region, ambient)]
    run = train(losses[0], layers, data)
    in_bfloat16 = train(mpx.autocast(loss_in(off, model)), layers, data)
    assert falls(run.losses) and near(run, in_bfloat16)
    recipes = {name: s.recipe for s in run.scaling.scales for (name, _), _ in s.slots}
    expected = {0: E4M3, 1: HYBRID, 3: E4M3}
    assert recipes == {f"[{i}].weight": recipe for i, recipe in expected.items()}
    frozen = [mpx.inference(loss, run.scaling) for loss in losses]
    assert quantized_products(frozen[0], layers, *data) == quantized
    assert low_dtypes(jax.grad(frozen[0]), layers, *data) == BOTH
    # Contexts in a transformed function are regions.
    texts = [str(jax.make_jaxpr(jax.grad(f))(layers, *data)) for f in frozen]
    assert texts[0] == texts[1]


@functools.cache
def in_bfloat16_by_contexts(name):
    model, depth, _ = MODELS[name]
    return train(loss_in(off, model), linears(depth), batch(), mixed=False)


CONTEXTS = [("sequential", ambient_without_state), ("nested", ambient)]


@pytest.mark.parametrize(("name", "context"), slow_but(CONTEXTS[:1], CONTEXTS))
def test_several_recipes_by_contexts_around_layers(name, context):
    """The second example as it stands there, in a function that nobody transforms."""
    model, depth, quantized = MODELS[name]
    layers, data, loss = linears(depth), batch(), loss_in(context, model)
    run, frozen = train(loss, layers, data), loss
    if context is ambient:
        assert {s.recipe for s in run.scaling.scales} == {E4M3, HYBRID}
        frozen = mpx.inference(loss, run.scaling)
    assert quantized_products(frozen, layers, *data) == quantized
    assert low_dtypes(jax.grad(frozen), layers, *data) == BOTH
    assert falls(run.losses) and near(run, in_bfloat16_by_contexts(name))


@pytest.mark.filterwarnings("ignore:.*before its first step")
@pytest.mark.exhaustive
def test_several_recipes_for_transformer_layers():
    """The second example of the introduction, layer by layer."""
    model, depth, quantized = MODELS["nested"]
    args = [transformer(seed=seed) for seed in range(depth)], batch()[0]
    func = functools.partial(model, context=ambient_without_state)
    assert quantized_products(func, *args) == 6 * quantized
    in_regions = mpx.autocast(functools.partial(model, context=region))
    with pytest.raises(ValueError, match="mpx.init_scaling"):  # it has a state
        in_regions(*args)
    frozen = mpx.inference(in_regions, mpx.init_scaling(in_regions, *args))
    # The last product of a function stays in half precision, and not that of a layer.
    assert quantized_products(frozen, *args) == 6 * quantized - 1
