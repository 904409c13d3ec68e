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
from tests.helpers import Case, unchecked_annotations

X = jax.ShapeDtypeStruct((4, 100), jnp.float32)


def quantize(x=X, quantizer=None, **options):
    quantizer = MXFP8Quantizer() if quantizer is None else quantizer
    return lambda: jax.eval_shape(
        lambda x: mpx.quantization.quantize(x, quantizer, **options), x
    )


CASES = [
    Case(
        "no multiple of the block",
        quantize(),
        ValueError,
        r"blocks of 1x32; got shape \(4, 100\), whose axis -1 has length 100. Pad "
        r"that axis with 28 zeros",
    ),
    Case(
        "one of two axes no multiple of the block",
        quantize(quantizer=NVFP4Quantizer(2)),
        ValueError,
        r"blocks of 16x16; got shape \(4, 100\), whose axis -2 has length 4. Pad that "
        "axis with 12 zeros.*choose another `axis`.*`mpx.quantization.TensorQuantizer`",
    ),
    Case("no such axis", quantize(axis=2), ValueError, r"got 2 for shape \(4, 100\)"),
    Case("axis of text", quantize(axis="rows"), TypeError, "integer or a pair"),
    Case("boolean axis", quantize(axis=[True]), TypeError, "integer or a pair"),
    Case("two axes for 1x32", quantize(axis=(0, 1)), ValueError, "1 different axes"),
    Case(
        "one axis twice",
        quantize(quantizer=BlockQuantizer(block_dimensions=2), axis=(0, -2, 1)),
        ValueError,
        r"whose axis -2 has length 4",
    ),
    Case(
        "square blocks of a vector",
        quantize(jnp.ones(16), NVFP4Quantizer(2)),
        ValueError,
        r"16x16 needs an array of at least 2 axes; got shape \(16,\)",
    ),
    Case("integers", quantize(jnp.ones(32, int)), TypeError, r"got int32\[32\]. Cast"),
    Case(
        "low precision",
        quantize(jnp.ones(32, jnp.float8_e5m2)),
        TypeError,
        "float8_e5m2",
    ),
    Case(
        "a Python number",
        lambda: mpx.quantization.quantize(1.0, TensorQuantizer()),  # pyright: ignore
        TypeError,
        "got float 1.0",
    ),
    Case(
        "quantized already",
        lambda: mpx.quantization.quantize(
            mpx.quantization.quantize(jnp.ones(32), MXFP8Quantizer()),  # pyright: ignore
            MXFP8Quantizer(),
        ),
        TypeError,
        "already quantized; `x.dequantize",
    ),
    Case(
        "a format for a quantizer",
        quantize(quantizer=mpx.Format.E4M3),
        TypeError,
        "needs a quantizer such as `mpx.quantization.TensorQuantizer",
    ),
    Case(
        "no key",
        quantize(quantizer=MXFP8Quantizer(stochastic_rounding=True)),
        ValueError,
        "needs a `key` for stochastic rounding",
    ),
    Case("a scale for blocks", quantize(scale=1.0), ValueError, "Omit it: each block"),
    Case(
        "scales",
        quantize(quantizer=TensorQuantizer(), scale=jnp.ones(4)),
        ValueError,
        r"a scalar; got float32\[4\]. Use `jax.vmap`",
    ),
    *(
        Case(
            f"scale {scale}",
            quantize(quantizer=TensorQuantizer(), scale=scale),
            ValueError,
            "positive and finite, between.*; got .*Omit it",
        )
        for scale in (
            *(0, -1.0, float("nan"), float("inf"), 1e300, 1e-40),
            *(np.float32(0), np.array(np.nan), jnp.zeros(())),
        )
    ),
    Case(
        "hybrid",
        lambda: TensorQuantizer(mpx.Format.HYBRID),
        ValueError,
        "needs one format.*`Format.HYBRID.forward`",
    ),
    Case(
        "format as text",
        lambda: MXFP8Quantizer("E4M3"),  # pyright: ignore
        TypeError,
        "needs a format such as `mpx.Format.E4M3`; got 'E4M3'",
    ),
    Case(
        "4 bits",
        lambda: BlockQuantizer(mpx.Format.E2M1),
        ValueError,
        "must have 8 bits.*`mpx.quantization.NVFP4Quantizer`",
    ),
    Case(
        "dimensions",
        lambda: BlockQuantizer(block_dimensions=3),
        ValueError,
        "`block_dimensions` of `mpx.quantization.BlockQuantizer` must be 1 or 2; got 3",
    ),
    Case(
        "rotated squares",
        lambda: NVFP4Quantizer(2, hadamard=True),
        ValueError,
        "along one axis",
    ),
    Case(
        "flag",
        lambda: TensorQuantizer(power_of_two_scales=1),  # pyright: ignore
        TypeError,
        "`power_of_two_scales` of `mpx.quantization.TensorQuantizer` must be True or "
        "False; got 1",
    ),
    Case(
        "epsilon",
        lambda: TensorQuantizer(amax_epsilon=-1.0),
        ValueError,
        "finite and not negative; got -1.0",
    ),
    Case(
        "epsilon of text",
        lambda: BlockQuantizer(amax_epsilon="small"),  # pyright: ignore
        TypeError,
        "`amax_epsilon` of .*BlockQuantizer` must be a number; got 'small'",
    ),
    Case(
        "rotating integers",
        lambda: mpx.quantization.hadamard_transform(jnp.ones(16, int)),
        TypeError,
        "needs a floating array; got int32",
    ),
    Case(
        "rotating 20 numbers",
        lambda: mpx.quantization.hadamard_transform(jnp.ones(20)),
        ValueError,
        "blocks of 1x16",
    ),
    Case(
        "4 signs",
        lambda: mpx.quantization.hadamard_transform(jnp.ones(16), signs=jnp.ones(4)),
        TypeError,
        r"`signs`.*16 numbers; got float32\[4\]",
    ),
    Case(
        "signs that are none",
        lambda: mpx.quantization.hadamard_transform(
            jnp.ones(16), signs=2 * jnp.ones(16)
        ),
        ValueError,
        r"`signs` of `mpx.quantization.hadamard_.* must be 1 or -1, .*; got \[2.0",
    ),
    Case(
        "signs of a quantizer that are none",
        lambda: NVFP4Quantizer(hadamard=True, signs=(1,) * 15 + (0,)),
        ValueError,
        r"`signs` of `mpx.quantization.NVFP4Quantizer` must be 1 or -1, .*0\]",
    ),
    Case(
        "signs of no transform",
        lambda: NVFP4Quantizer(signs=(1,) * 16),
        ValueError,
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
