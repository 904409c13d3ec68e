"""Wrong calls: what must hold, what came, what to do."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpx
from mpx.quantization import (
    BlockQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    TensorQuantizer,
)
from tests.helpers import Case, type_error, unchecked_annotations, value_error

X = jax.ShapeDtypeStruct((4, 100), jnp.float32)


def quantize(x=X, quantizer=None, **options):
    quantizer = MXFP8Quantizer() if quantizer is None else quantizer
    return lambda: jax.eval_shape(
        lambda x: mpx.quantization.quantize(x, quantizer, **options), x
    )


CASES = [
    value_error(
        "no multiple of the block",
        quantize(),
        r"blocks of 1x32; got shape \(4, 100\), whose axis -1 has length 100. Pad "
        r"that axis with 28 zeros",
    ),
    value_error(
        "one of two axes no multiple of the block",
        quantize(quantizer=NVFP4Quantizer(2)),
        r"blocks of 16x16; got shape \(4, 100\), whose axis -2 has length 4. Pad that "
        "axis with 12 zeros.*choose another `axis`.*`mpx.quantization.TensorQuantizer`",
    ),
    value_error("no such axis", quantize(axis=2), r"got 2 for shape \(4, 100\)"),
    type_error("axis of text", quantize(axis="rows"), "integer or a pair"),
    type_error("boolean axis", quantize(axis=[True]), "integer or a pair"),
    value_error("two axes for 1x32", quantize(axis=(0, 1)), "1 different axes"),
    value_error(
        "one axis twice",
        quantize(quantizer=BlockQuantizer(block_dimensions=2), axis=(0, -2, 1)),
        r"whose axis -2 has length 4",
    ),
    value_error(
        "square blocks of a vector",
        quantize(jnp.ones(16), NVFP4Quantizer(2)),
        r"16x16 needs an array of at least 2 axes; got shape \(16,\)",
    ),
    type_error("integers", quantize(jnp.ones(32, int)), r"got int32\[32\]. Cast"),
    type_error("low precision", quantize(jnp.ones(32, jnp.float8_e5m2)), "float8_e5m2"),
    type_error(
        "a Python number",
        lambda: mpx.quantization.quantize(1.0, TensorQuantizer()),  # pyright: ignore
        "got float 1.0",
    ),
    type_error(
        "quantized already",
        lambda: mpx.quantization.quantize(
            mpx.quantization.quantize(jnp.ones(32), MXFP8Quantizer()),  # pyright: ignore
            MXFP8Quantizer(),
        ),
        "already quantized; `x.dequantize",
    ),
    type_error(
        "a format for a quantizer",
        quantize(quantizer=mpx.Format.E4M3),
        "needs a quantizer such as `mpx.quantization.TensorQuantizer",
    ),
    value_error(
        "no key",
        quantize(quantizer=MXFP8Quantizer(stochastic_rounding=True)),
        "needs a `key` for stochastic rounding",
    ),
    value_error("a scale for blocks", quantize(scale=1.0), "Omit it: each block"),
    value_error(
        "scales",
        quantize(quantizer=TensorQuantizer(), scale=jnp.ones(4)),
        r"a scalar; got float32\[4\]. Use `jax.vmap`",
    ),
    *(
        value_error(
            f"scale {scale}",
            quantize(quantizer=TensorQuantizer(), scale=scale),
            "positive and finite, between.*; got .*Omit it",
        )
        for scale in (
            *(0, -1.0, float("nan"), float("inf"), 1e300, 1e-40),
            *(np.float32(0), np.array(np.nan), jnp.zeros(())),
        )
    ),
    value_error(
        "hybrid",
        lambda: TensorQuantizer(mpx.Format.HYBRID),
        "needs one format.*`Format.HYBRID.forward`",
    ),
    type_error(
        "format as text",
        lambda: MXFP8Quantizer("E4M3"),  # pyright: ignore
        "needs a format such as `mpx.Format.E4M3`; got 'E4M3'",
    ),
    value_error(
        "4 bits",
        lambda: BlockQuantizer(mpx.Format.E2M1),
        "must have 8 bits.*`mpx.quantization.NVFP4Quantizer`",
    ),
    value_error(
        "dimensions",
        lambda: BlockQuantizer(block_dimensions=3),
        "`block_dimensions` of `mpx.quantization.BlockQuantizer` must be 1 or 2; got 3",
    ),
    value_error(
        "rotated squares", lambda: NVFP4Quantizer(2, hadamard=True), "along one axis"
    ),
    type_error(
        "flag",
        lambda: TensorQuantizer(power_of_two_scales=1),  # pyright: ignore
        "`power_of_two_scales` of `mpx.quantization.TensorQuantizer` must be True or "
        "False; got 1",
    ),
    value_error(
        "epsilon",
        lambda: TensorQuantizer(amax_epsilon=-1.0),
        "finite and not negative; got -1.0",
    ),
    type_error(
        "epsilon of text",
        lambda: BlockQuantizer(amax_epsilon="small"),  # pyright: ignore
        "`amax_epsilon` of .*BlockQuantizer` must be a number; got 'small'",
    ),
    type_error(
        "rotating integers",
        lambda: mpx.quantization.hadamard_transform(jnp.ones(16, int)),
        "needs a floating array; got int32",
    ),
    value_error(
        "rotating 20 numbers",
        lambda: mpx.quantization.hadamard_transform(jnp.ones(20)),
        "blocks of 1x16",
    ),
    type_error(
        "4 signs",
        lambda: mpx.quantization.hadamard_transform(jnp.ones(16), signs=jnp.ones(4)),
        r"`signs`.*16 numbers; got float32\[4\]",
    ),
    value_error(
        "signs that are none",
        lambda: mpx.quantization.hadamard_transform(
            jnp.ones(16), signs=2 * jnp.ones(16)
        ),
        r"`signs` of `mpx.quantization.hadamard_.* must be 1 or -1, .*; got \[2.0",
    ),
    value_error(
        "signs of a quantizer that are none",
        lambda: NVFP4Quantizer(hadamard=True, signs=(1,) * 15 + (0,)),
        r"`signs` of `mpx.quantization.NVFP4Quantizer` must be 1 or -1, .*0\]",
    ),
    value_error(
        "signs of no transform",
        lambda: NVFP4Quantizer(signs=(1,) * 16),
        "those of the Hadamard transform; .*Set `hadamard=True`",
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.test_id)
def test_errors_say_what_to_do(case: Case):
    with unchecked_annotations(), pytest.raises(case.error, match=case.match):
        case.call()


def test_a_scale_and_signs_that_are_traced_are_believed():
    """Their values are not known when the program is traced."""

    @jax.jit
    def f(x, scale, signs):
        x = mpx.quantization.hadamard_transform(x, signs=signs)
        return mpx.quantization.quantize(x, TensorQuantizer(), scale=scale).dequantize()

    found = f(jnp.ones(16), jnp.zeros(()), 2 * jnp.ones(16))
    assert not jnp.isfinite(found).any()
