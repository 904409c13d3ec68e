"""Weights in 8 bits: storing them, computing with them, and training them."""

import pickle

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import mpx
from mpx.quantization import dequantize_weights, quantize, quantize_weights

from ..helpers import assert_same_bits, slow_but, unchecked_annotations, unscaled
from ..step.cases import same_bits

pytestmark = unscaled

QUANTIZERS = {
    "tensor": mpx.quantization.TensorQuantizer(),
    "E5M2": mpx.quantization.TensorQuantizer(mpx.Format.E5M2, power_of_two_scales=True),
    "square": mpx.quantization.BlockQuantizer(block_dimensions=2),
    "mxfp8": mpx.quantization.MXFP8Quantizer(),
}
each_quantizer = pytest.mark.parametrize("name", QUANTIZERS)
TWO = slow_but(["mxfp8"], ["tensor", "mxfp8"])
two_quantizers = pytest.mark.parametrize("name", TWO)
SIZE = 128


def model_of(dtype="float32"):
    up, down = np.random.default_rng(0).normal(size=(2, SIZE, SIZE)) / 12
    return {
        "up": jnp.asarray(up, dtype),
        "down": jnp.asarray(down, dtype),
        "bias": jnp.zeros(SIZE, dtype),
        "steps": 3,
    }


X = jax.random.normal(jax.random.key(2), (16, SIZE))


def forward(model, x):
    return jax.nn.relu(x @ model["up"] + model["bias"][None]) @ model["down"]


def loss(model, x):
    return jnp.mean((forward(model, x) - x) ** 2)


def gradient_of(func, model, scaling=None):
    scaling = mpx.NoLossScaling() if scaling is None else scaling
    step = jax.jit(lambda scaling, *args: mpx.filter_grad(func, scaling)(*args))
    return step(scaling, model, X)


def arrays_of(model):
    return {key: model[key] for key in ("up", "down", "bias")}


def stored_model():
    """All but the number of steps."""
    return quantize_weights(arrays_of(model_of()))


@each_quantizer
def test_matrices_are_stored_in_a_byte_for_each_number(name: str):
    quantizer, model = QUANTIZERS[name], model_of()
    stored = quantize_weights(model, quantizer)
    assert stored["bias"] is model["bias"] and stored["steps"] == 3
    for key in ("up", "down"):
        weight, expected = stored[key], quantize(model[key], quantizer)
        assert isinstance(weight, mpx.quantization.StoredWeight)
        assert weight.shape == (SIZE, SIZE) and weight.ndim == 2
        assert weight.dtype == jnp.float32
        assert weight.nbytes <= 1.04 * SIZE**2
        assert_same_bits(weight.quantized, expected)
        assert_same_bits(dequantize_weights(stored)[key], expected.dequantize())
    assert_same_bits(quantize_weights(stored, quantizer), stored)
    assert_same_bits(pickle.loads(pickle.dumps(stored["up"])), stored["up"])


def test_which_weights_are_stored():
    model = model_of("bfloat16")
    stored = quantize_weights(model, where=lambda path, leaf: "down" in path)
    assert not isinstance(stored["up"], mpx.quantization.StoredWeight)
    assert dequantize_weights(stored)["down"].dtype == jnp.bfloat16
    untouched = model_of()
    assert dequantize_weights(untouched) is untouched
    shapes = eqx.filter_eval_shape(quantize_weights, model_of())
    assert shapes["up"].quantized.payload.dtype == jnp.float8_e4m3fn


NVFP4 = mpx.quantization.NVFP4Quantizer()
STOCHASTIC = mpx.quantization.TensorQuantizer(stochastic_rounding=True)
NOT_STORED = [
    (ValueError, "FP8 .* round to nearest.*E2M1", NVFP4),
    (ValueError, "round to nearest", STOCHASTIC),
    (TypeError, "`quantizer`.*a quantizer such as", "fp8"),
]


def test_what_cannot_be_stored():
    model = model_of()
    with unchecked_annotations():
        for error, match, quantizer in NOT_STORED:
            with pytest.raises(error, match=match):
                quantize_weights(model, quantizer)
        with pytest.raises(TypeError, match="`where`.*must be a function"):
            quantize_weights(model, where="up")
    with pytest.raises(ValueError, match="no float array with two axes"):
        quantize_weights({"bias": jnp.zeros(3)})
    with pytest.raises(ValueError, match="no float array that `where` names"):
        quantize_weights(model, where=lambda path, leaf: False)
    with pytest.raises(ValueError, match=r"at `\['w'\]`.*32"):
        quantize_weights({"w": jnp.zeros((3, 5))}, QUANTIZERS["mxfp8"])


@pytest.mark.parametrize(
    "compute", [lambda w: X @ w, lambda w: w @ X.T, lambda w: w * 2, jnp.sum]
)
def test_a_stored_weight_says_that_it_is_no_array(compute):
    with pytest.raises(TypeError, match=r"float32\[128, 128\].*dequantize_weights"):
        compute(stored_model()["up"])


def test_casts_do_not_look_into_what_is_quantized():
    stored = stored_model()
    half = mpx.cast_tree(stored, "bfloat16", keep=lambda path, leaf: "up" in path)
    for cast in (half, mpx.cast_to_half_precision(stored)):
        assert_same_bits(cast["up"], stored["up"])
        assert cast["bias"].dtype.itemsize == 2
    array = stored["up"].quantized

    def seen(model, array):
        assert_same_bits(array, stored["up"].quantized)
        return jnp.sum(model["bias"]).astype(jnp.float32)

    mpx.filter_grad(seen, mpx.NoLossScaling())(model_of(), array)


@two_quantizers
def test_autocast_and_gradients_are_those_of_the_numbers_that_are_stored(name: str):
    stored = quantize_weights(model_of(), QUANTIZERS[name])
    models = stored, dequantize_weights(stored)
    found, expected = (values_and_gradients(m, mpx.NoLossScaling()) for m in models)
    assert_same_bits(found, expected)
    assert found["filter_grad"].grads["up"].dtype == jnp.float32


AUTOCAST = mpx.autocast(loss)


@eqx.filter_jit
def values_and_gradients(model, scaling):
    """Of the function that is transformed and of the other, by each that there is."""
    scaled = mpx.calculate_scaled_grad(loss, mpx.StaticLossScaling(8.0))
    arrays = {"w": model["up"], **arrays_of(model)}
    return {
        "value": AUTOCAST(model, X),
        "filter_value_and_grad": mpx.filter_value_and_grad(AUTOCAST, scaling)(model, X),
        "filter_grad": mpx.filter_grad(AUTOCAST, scaling)(model, X),
        "not transformed": mpx.filter_grad(loss, scaling)(model, X),
        "and its value": mpx.filter_value_and_grad(loss, scaling)(model, X),
        "scaled": scaled(model, X),
        "summed": mpx.filter_grad(AUTOCAST, scaling, accumulate=4)(model, X),
        "grad": mpx.grad(AUTOCAST, scaling)(arrays, X),
    }


def test_derivatives_by_jax_alone_are_refused():
    stored = stored_model()
    with pytest.raises(TypeError, match="no derivative.*mpx.filter_grad"):
        eqx.filter_grad(AUTOCAST)(stored, X)
    with pytest.raises(TypeError, match="requires real- or complex-valued inputs"):
        jax.grad(AUTOCAST)(stored, X)  # JAX's own words
    grads = jax.jit(jax.grad(AUTOCAST))(dequantize_weights(stored), X)
    assert_same_bits(grads, gradient_of(AUTOCAST, stored).grads)
    assert jax.eval_shape(jax.grad(AUTOCAST, argnums=1), stored, X).shape == X.shape


def test_reports_name_stored_weights_as_any_other():
    func = mpx.autocast(loss, recipe=mpx.Float8CurrentScaling())

    def parameters(model):
        report = mpx.explain(func)(model, X)
        return [o.parameters for o in report.operations if o.is_low]

    assert parameters(quantize_weights(model_of())) == parameters(model_of()) != []


@pytest.mark.parametrize("name", ["tensor", "E5M2", "square"])
def test_a_recipe_quantizes_a_stored_weight_to_the_same_numbers(name: str):
    quantizer, model = QUANTIZERS[name], model_of()
    recipe = mpx.CustomRecipe(lambda role, leg: quantizer)
    every = mpx.Rules(mpx.Rule(mpx.Precision.LOW, parameter="*"))
    func = jax.jit(mpx.autocast(forward, recipe=recipe, rules=every))
    stored = quantize_weights(model, quantizer)
    again = quantize(stored["up"].dequantize(), quantizer)
    assert_same_bits(again.payload, stored["up"].quantized.payload)
    scales = (q.inverse_scale for q in (again, stored["up"].quantized))
    np.testing.assert_allclose(*scales, rtol=2e-7)
    found, expected = (func(arrays_of(m), X) for m in (stored, model))
    np.testing.assert_allclose(found, expected, rtol=1e-2, atol=1e-2)


def straight_through(quantizer):
    """The same training by hand: float32 weights, quantized in the loss."""
    through = lambda w: mpx.quantization.quantize_dequantize(w, quantizer)  # noqa: E731
    return lambda model, x: loss(
        {key: through(w) if w.ndim > 1 else w for key, w in model.items()}, x
    )


@pytest.mark.third_party
@two_quantizers
def test_masters_train_as_weights_that_are_quantized_in_the_loss(name: str):
    quantizer, model = QUANTIZERS[name], arrays_of(model_of())
    if name == "tensor":  # as the optimizer's step makes them
        quantizer = mpx.quantization.TensorQuantizer(power_of_two_scales=True)
    stored, optimizer = quantize_weights(model, quantizer), optax.adamw(1e-2)
    tx, by_hand = mpx.master_weights(optimizer), straight_through(quantizer)
    state, scaling = tx.init(stored, model), mpx.NoLossScaling()
    start, state_by_hand = model, optimizer.init(model)

    @jax.jit
    def step(stored, state, scaling):
        gradient = mpx.filter_value_and_grad(loss, scaling, use_mixed_precision=False)
        result = gradient(stored, X)
        return *mpx.optimizer_step(stored, tx, state, result)[:2], result.value

    @jax.jit
    def step_by_hand(model, state):
        grads = jax.grad(by_hand)(model, X)
        updates, state = optimizer.update(grads, state, model)
        return optax.apply_updates(model, updates), state

    values = []
    for _ in range(40):
        stored, state, value = step(stored, state, scaling)
        model, state_by_hand = step_by_hand(model, state_by_hand)
        values.append(float(value))
    assert values[-1] < 0.5 * values[0]
    for key in ("up", "down"):
        # Not the same bits: a sum in another order can turn a rounding around.
        trees = state.masters, model, start
        master, end, begin = (np.asarray(tree[key]) for tree in trees)
        assert np.linalg.norm(master - end) < 0.05 * np.linalg.norm(end - begin)
        has_one_scale = not quantizer.block_dimensions
        scale = 1 / stored[key].quantized.inverse_scale if has_one_scale else None
        expected = quantize(state.masters[key], quantizer, scale=scale)
        assert_same_bits(stored[key].quantized.payload, expected.payload)


@pytest.mark.third_party
def test_updates_are_applied_by_optax_equinox_and_mpx_alike():
    stored, tx = stored_model(), mpx.master_weights(optax.sgd(0.1))
    state = tx.init(stored)
    grads = gradient_of(loss, stored).grads
    updates, after = tx.update(grads, state, stored)
    by_optax = optax.apply_updates(stored, updates)
    assert_same_bits(by_optax, eqx.apply_updates(stored, updates))
    by_mpx, state = mpx.optimizer_update(stored, tx, state, grads, True)
    assert_same_bits((by_mpx, state), (by_optax, after))
    skipped, _ = mpx.optimizer_update(stored, tx, state, grads, False)
    assert_same_bits(skipped, stored)


@pytest.mark.third_party
@pytest.mark.parametrize("is_bad", [False, True])
def test_steps_can_be_checked(is_bad: bool):
    stored, rate = stored_model(), 1e38 if is_bad else 0.1
    tx = mpx.master_weights(optax.chain(optax.scale(1e3), optax.sgd(rate)))
    result = gradient_of(AUTOCAST, stored, mpx.DynamicLossScaling())
    state = tx.init(stored)
    after, _, scaling = mpx.optimizer_step(
        stored, tx, state, result, check_gradients=True, check_update=True
    )
    assert same_bits(after, stored) == is_bad == bool(scaling.record.skipped)


def test_modules_of_nnx_are_refused_and_their_state_is_not():
    nnx = pytest.importorskip("flax.nnx")
    model = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match="changes in place.*nnx.split"):
        quantize_weights(model)
    graphdef, params = nnx.split(model, nnx.Param)
    stored = jax.jit(quantize_weights)(params)
    func = mpx.autocast(lambda params, x: jnp.mean(nnx.merge(graphdef, params)(x)))
    x, plain = jnp.ones((2, 8)), dequantize_weights(stored)
    assert_same_bits(*(jax.jit(func)(weights, x) for weights in (stored, plain)))
    grads = jax.eval_shape(
        lambda s, *args: mpx.filter_grad(func, s)(*args), mpx.NoLossScaling(), stored, x
    ).grads
    assert jax.tree.structure(grads) == jax.tree.structure(plain)


@pytest.mark.third_party
def test_small_steps_add_up_and_changes_from_outside_count():
    store = jax.jit(quantize_weights)
    stored = store({"w": jnp.eye(4)})
    tx = mpx.master_weights(optax.sgd(1.0))
    state = tx.init(stored)
    small = {"w": jnp.full((4, 4), 1e-3).at[0].set(0.0)}
    update = jax.jit(lambda *args: mpx.optimizer_update(args[0], tx, *args[1:], True))
    for _ in range(50):
        stored, state = update(stored, state, small)
    np.testing.assert_allclose(state.masters["w"][1, 1], 0.95, rtol=1e-5)
    np.testing.assert_allclose(stored["w"].dequantize()[1, 1], 0.95, rtol=2**-4)
    other = store({"w": 2 * jnp.eye(4)})
    changed, state = update(other, state, {"w": jnp.zeros((4, 4))})
    np.testing.assert_array_equal(jnp.diag(state.masters["w"]), 2.0)
    assert_same_bits(*map(dequantize_weights, (changed, other)))


@pytest.mark.third_party
def test_masters_to_start_from():
    model, tx = arrays_of(model_of()), mpx.master_weights(optax.sgd(0.1))
    stored = quantize_weights(model)
    state = tx.init(stored, model)
    for key in ("up", "down"):
        assert_same_bits(state.masters[key], model[key])
    assert state.masters["bias"] is None
    with pytest.raises(ValueError, match="have the structure of `params`"):
        tx.init(stored, {"up": model["up"]})
    with pytest.raises(ValueError, match=r"float32\[3\].*up"):
        tx.init(stored, {**model, "up": jnp.zeros(3)})


@pytest.mark.slow
@pytest.mark.third_party
def test_blocks_lie_along_the_same_axis_after_an_update():
    model = {"w": jnp.arange(64.0 * 32).reshape(64, 32) / 100}
    quantizer = QUANTIZERS["mxfp8"]
    stored = quantize_weights(model, quantizer, axis=0)
    tx = mpx.master_weights(optax.sgd(1.0))
    state = tx.init(stored, model)
    update = jax.jit(lambda *args: mpx.optimizer_update(args[0], tx, *args[1:], True))
    for _ in range(2):
        stored, state = update(stored, state, model)
        wanted = quantize(state.masters["w"], quantizer, axis=0)
        assert_same_bits(stored["w"].quantized.payload, wanted.payload)
        assert stored["w"].quantized.axes == wanted.axes


@pytest.mark.third_party
def test_another_optimizer_says_what_is_missing():
    stored, optimizer = stored_model(), optax.adam(0.1)
    result = gradient_of(loss, stored)
    with pytest.raises(TypeError, match=r"mpx.master_weights\(optimizer\)"):
        mpx.optimizer_step(stored, optimizer, optimizer.init(stored), result)


def test_what_is_gathered_are_the_stored_numbers():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    stored = stored_model()

    def place(spec):
        layout = lambda a: NamedSharding(mesh, spec if a.ndim > 1 else P())  # noqa: E731
        return jax.tree.map(layout, stored)

    def step(stored, x):
        stored = jax.lax.with_sharding_constraint(stored, place(P()))
        return mpx.filter_grad(AUTOCAST, mpx.NoLossScaling())(stored, x).grads

    stored = jax.tree.map(jax.device_put, stored, place(P("data")))
    x = jax.device_put(X, NamedSharding(mesh, P("data")))
    text = jax.jit(step).lower(stored, x).compile().as_text()
    gathered = [line for line in text.splitlines() if " all-gather(" in line]
    # XLA:CPU has no collectives of 8 bits, and gathers them as float16.
    assert len(gathered) == 2 and all("= f16[128,128]" in line for line in gathered)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@two_quantizers
def test_weights_that_are_all_subnormal_are_stored_as_zeros_with_a_warning(name, dtype):
    small = jnp.asarray(np.full((SIZE, SIZE), -1e-39, np.float32).astype(dtype))
    model = {"small": small, "w": model_of(dtype)["up"]}
    said = r"stores zeros for `\['small'\]`: all numbers there are below 2\^-126"
    with pytest.warns(UserWarning, match=said):
        stored = quantize_weights(model, QUANTIZERS[name])
    assert not dequantize_weights(stored)["small"].any()


def test_other_small_weights_are_stored_without_a_warning():
    tiny = np.full((2, SIZE), 2e-38, np.float32)
    some = np.stack([tiny[0], np.full(SIZE, 1e-39, np.float32)])
    half = np.full((2, SIZE), 6e-8, np.float16)
    zeros = np.zeros((2, SIZE), np.float32)
    stored = quantize_weights([jnp.asarray(x) for x in (some, half, zeros, tiny)])
    _, half, *_ = dequantize_weights(stored)
    assert half.min() > 0
    quantize_weights(half)
    quantize_weights(tiny.astype(np.float64))
    jax.jit(quantize_weights)(tiny / 10)  # where values are not known
