"""Wrong calls of quantizers and recipes: what must hold, what came, what to do."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpx
from mpx.quantization import (
    BlockQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    Quantizer,
    Role,
    TensorQuantizer,
    hadamard_transform,
)
from tests.helpers import unchecked_annotations

X = jax.ShapeDtypeStruct((4, 100), jnp.float32)


def refused(error, match, call, *args, **options):
    name = f"{getattr(call, '__name__', type(call).__name__)}: {match}"
    return pytest.param(error, match, lambda: call(*args, **options), id=name)


def value_error(match, *args, **options):
    return refused(ValueError, match, *args, **options)


def type_error(match, *args, **options):
    return refused(TypeError, match, *args, **options)


def option(error, what, call, **options):
    """What is said of an option, by its name and that of its class."""
    module = "mpx.quantization" if call in QUANTIZERS else "mpx"
    (name,) = options
    return refused(
        error, f"`{name}` of `{module}.{call.__name__}` {what}", call, **options
    )


def quantize(x=X, quantizer=None, **options):
    quantizer = MXFP8Quantizer() if quantizer is None else quantizer
    jax.eval_shape(lambda x: mpx.quantization.quantize(x, quantizer, **options), x)


def quantize_twice(quantizer):
    once = mpx.quantization.quantize(jnp.ones(32), quantizer)
    mpx.quantization.quantize(once, quantizer)


def update(recipe, amax=1.0):
    recipe.update(recipe.init(), jnp.asarray(amax, jnp.float32), Role.INPUT)


def quantizer_of(recipe, role):
    recipe.quantizer(role)


E4M3, E5M2, E2M1 = mpx.Format.E4M3, mpx.Format.E5M2, mpx.Format.E2M1
SQUARE, DELAYED = NVFP4Quantizer(2), mpx.DelayedScaling
QUANTIZERS = TensorQuantizer, BlockQuantizer, Quantizer
SCALES = (0, -1.0, float("nan"), float("inf"), 1e300, 1e-40)
SCALES += (np.float32(0), np.array(np.nan), jnp.zeros(()))
ONES = np.ones(16, np.float32)
CASES = [
    value_error(
        r"blocks of 1x32; got shape \(4, 100\), whose axis -1 has length 100. Pad "
        r"that axis with 28 zeros",
        quantize,
    ),
    value_error(
        r"blocks of 16x16; got shape \(4, 100\), whose axis -2 has length 4. Pad that "
        "axis with 12 zeros.*choose another `axis`.*`mpx.quantization.TensorQuantizer`",
        quantize,
        quantizer=SQUARE,
    ),
    value_error(r"got 2 for shape \(4, 100\)", quantize, axis=2),
    type_error("integer or a pair", quantize, axis="rows"),
    type_error("integer or a pair", quantize, axis=[True]),
    value_error("1 different axes", quantize, axis=(0, 1)),
    value_error(
        r"whose axis -2 has length 4",  # one axis twice
        quantize,
        quantizer=BlockQuantizer(block_dimensions=2),
        axis=(0, -2, 1),
    ),
    value_error(
        r"16x16 needs an array of at least 2 axes; got shape \(16,\)",
        quantize,
        ONES,
        SQUARE,
    ),
    type_error(r"got int32\[32\]. Cast", quantize, np.ones(32, np.int32)),
    type_error("float8_e5m2", quantize, np.ones(32, E5M2.dtype)),
    type_error("got float 1.0", mpx.quantization.quantize, 1.0, TensorQuantizer()),
    type_error("already quantized; `x.dequantize", quantize_twice, MXFP8Quantizer()),
    type_error(
        "needs a quantizer such as `mpx.quantization.TensorQuantizer",
        quantize,
        quantizer=E4M3,
    ),
    value_error(
        "needs a `key` for stochastic rounding",
        quantize,
        quantizer=MXFP8Quantizer(stochastic_rounding=True),
    ),
    value_error("Omit it: each block", quantize, scale=1.0),
    value_error(
        r"a scalar; got float32\[4\]. Use `jax.vmap`",
        quantize,
        X,
        TensorQuantizer(),
        scale=ONES[:4],
    ),
    *(
        value_error(
            "positive and finite, between.*; got .*Omit it",
            quantize,
            X,
            TensorQuantizer(),
            scale=scale,
        )
        for scale in SCALES
    ),
    value_error(
        "one format.*`Format.HYBRID.forward`", TensorQuantizer, mpx.Format.HYBRID
    ),
    type_error(
        "needs a format such as `mpx.Format.E4M3`; got 'E4M3'", MXFP8Quantizer, "E4M3"
    ),
    value_error("must be `mpx.Format.E4M3` or .*NVFP4Quantizer`", BlockQuantizer, E2M1),
    option(ValueError, "must be 1 or 2; got 3", BlockQuantizer, block_dimensions=3),
    value_error("along one axis", NVFP4Quantizer, 2, hadamard=True),
    option(
        TypeError,
        "must be True or False; got 1",
        TensorQuantizer,
        power_of_two_scales=1,
    ),
    value_error(
        "finite and not negative; got -1.0", TensorQuantizer, amax_epsilon=-1.0
    ),
    option(TypeError, "must be a number; got 'small'", Quantizer, amax_epsilon="small"),
    option(ValueError, "must be 0, 1 or 2; got 3", Quantizer, block_dimensions=3),
    option(TypeError, "must be an integer; got 1.5", Quantizer, block=1.5),
    option(ValueError, "must be 0 or the length", Quantizer, block=32),
    option(
        ValueError, "must be .*'e8m0' or 'e4m3'; got 'int'", Quantizer, scales="int"
    ),
    option(TypeError, "must be 'amax', .*; got None", Quantizer, scale_from=None),
    option(ValueError, "must be 'amax'; .*; got 0", Quantizer, scale_from=0.0),
    option(ValueError, "must be between 1 and 448", Quantizer, largest_scale=500),
    value_error("needs blocks.*Set `block_dim", Quantizer, E2M1),
    value_error("needs blocks.*Set `block_dim", Quantizer, scales="e8m0"),
    type_error(
        "needs a floating array; got int32", hadamard_transform, np.ones(16, np.int32)
    ),
    value_error("blocks of 1x16", hadamard_transform, np.ones(20, np.float32)),
    type_error(
        r"`signs`.*16 numbers; got float32\[4\]",
        hadamard_transform,
        ONES,
        signs=ONES[:4],
    ),
    value_error(
        r"`signs` of `mpx.quantization.hadamard_.* must be 1 or -1, .*; got \[2.0",
        hadamard_transform,
        ONES,
        signs=2 * ONES,
    ),
    value_error(
        r"`signs` of `mpx.quantization.Quantizer` must be 1 or -1, .*0\]",
        NVFP4Quantizer,
        hadamard=True,
        signs=(1,) * 15 + (0,),
    ),
    value_error(
        "those of the Hadamard transform; .*Set `hadamard=True`",
        NVFP4Quantizer,
        signs=(1,) * 16,
    ),
    # Recipes.
    value_error(
        "`mpx.Format.E4M3` or `mpx.Format.HYBRID`; got <Format.E5M2>: 2 bits",
        DELAYED,
        fp8_format=E5M2,
    ),
    value_error("use `mpx.NVFP4BlockScaling`", mpx.MXFP8BlockScaling, E2M1),
    value_error("use `mpx.Int8Current", mpx.MXFP8BlockScaling, mpx.Format.INT8),
    option(ValueError, "must be between 1 and 448", Quantizer, largest_scale="448"),
    option(
        TypeError,
        "must be a `mpx.Format`; got 'HYBRID'",
        mpx.Float8CurrentScaling,
        fp8_format="HYBRID",
    ),
    value_error(
        "must be `mpx.Format.E2M1`; got <Format.E4M3>",
        mpx.NVFP4BlockScaling,
        fp4_format=E4M3,
    ),
    value_error("Set at most one", mpx.Float8BlockScaling, x_block_scaling_dim=2),
    option(
        ValueError,
        "must be 1 or 2; got 3",
        mpx.Float8BlockScaling,
        w_block_scaling_dim=3,
    ),
    value_error(
        "None, 'high_precision' or 'dequantized'; got 'bf16'",
        mpx.MXFP8BlockScaling,
        backward_override="bf16",
    ),
    option(ValueError, "must be None", DELAYED, backward_override="dequantized"),
    option(ValueError, "must be at least 1; got 0", DELAYED, amax_history_len=0),
    option(TypeError, "must be an integer; got 0.5", DELAYED, margin=0.5),
    type_error("got True", DELAYED, True),
    option(
        TypeError,
        "must be a number; got True",
        mpx.Float8CurrentScaling,
        amax_epsilon=True,
    ),
    option(ValueError, "must be True.*got False. Omit it", DELAYED, reduce_amax=False),
    option(TypeError, "must be True or False; got 'yes'", DELAYED, reduce_amax="yes"),
    value_error("-64 and 64", DELAYED, 99),
    value_error(
        "'max', 'most_recent' or a function.*got 'mean'",
        DELAYED,
        amax_compute_algo="mean",
    ),
    value_error(
        r"`amax_compute_algo` must be a scalar; got shape \(1024,\)",
        update,
        DELAYED(amax_compute_algo=lambda h: h),
    ),
    value_error(
        r"a scalar; got shape \(2,\). Use `jax.vmap`",
        update,
        DELAYED(),
        ONES[:2],
    ),
    option(
        TypeError, "must be True or False", mpx.NVFP4BlockScaling, disable_rht="yes"
    ),
    type_error(
        "a role such as `mpx.quantization.Role.INPUT`.*; got 'input'",
        quantizer_of,
        mpx.MXFP8BlockScaling(),
        "input",
    ),
    type_error(
        "a function from role to quantizer; got Quantizer",
        mpx.CustomRecipe,
        MXFP8Quantizer(),
    ),
    type_error(
        "or None; got <Format.E4M3> for <Role.INPUT>",
        quantizer_of,
        mpx.CustomRecipe(lambda *_, leg: E4M3),
        Role.INPUT,
    ),
]


@pytest.mark.parametrize(("error", "match", "call"), CASES)
def test_wrong_calls_say_what_to_do(error, match, call):
    with unchecked_annotations(), pytest.raises(error, match=match):
        call()


def test_a_scale_and_signs_that_are_traced_are_believed():
    """Their values are not known when the program is traced."""

    @jax.jit
    def f(x, scale, signs):
        x = hadamard_transform(x, signs=signs)
        return mpx.quantization.quantize(x, TensorQuantizer(), scale=scale).dequantize()

    found = f(jnp.ones(16), jnp.zeros(()), 2 * jnp.ones(16))
    assert not jnp.isfinite(found).any()
