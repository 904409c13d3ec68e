"""What tests go through: one line here, and what holds of all is asked of it.

A new recipe of mpx stands in `RECIPES`, under the name that tests and tables give it
(`tests/test_registries.py` fails if it does not). What is tested of some of them only
is chosen from here by name.
"""

from collections.abc import Callable
from typing import Any

import jax

import mpx

# Each recipe as users make it, but for a history short enough to be filled in a test.
RECIPES: dict[str, mpx.quantization.AbstractRecipe] = {
    "current": mpx.Float8CurrentScaling(),
    "delayed": mpx.DelayedScaling(amax_history_len=4),
    "block": mpx.Float8BlockScaling(),
    "mxfp8": mpx.MXFP8BlockScaling(),
    "nvfp4": mpx.NVFP4BlockScaling(),
    "custom": mpx.CustomRecipe(
        lambda role, leg: (
            mpx.quantization.NVFP4Quantizer()
            if role is mpx.quantization.Role.INPUT
            else mpx.quantization.TensorQuantizer()
        )
    ),
    "rowwise": mpx.Float8RowwiseScaling(),
    "int8": mpx.Int8CurrentScaling(),
    "by leg": mpx.quantization.RecipeByLeg(
        forward=mpx.Int8CurrentScaling(), dgrad=mpx.Float8CurrentScaling()
    ),
}
# Those whose scales are known from the operands at hand.
STATELESS = {name: recipe for name, recipe in RECIPES.items() if name != "delayed"}

QUANTIZERS: dict[str, mpx.quantization.Quantizer] = {
    "E4M3": mpx.quantization.TensorQuantizer(),
    "E5M2": mpx.quantization.TensorQuantizer(mpx.Format.E5M2),
    "power of two": mpx.quantization.TensorQuantizer(power_of_two_scales=True),
    "blocks": mpx.quantization.BlockQuantizer(),
    "square blocks": mpx.quantization.BlockQuantizer(block_dimensions=2),
    "mxfp8": mpx.quantization.MXFP8Quantizer(),
    "nvfp4": mpx.quantization.NVFP4Quantizer(),
    "square nvfp4": mpx.quantization.NVFP4Quantizer(2),
    "rows": mpx.quantization.Quantizer(block_dimensions=1),
    "int8": mpx.quantization.Quantizer(mpx.Format.INT8),
    "constant": mpx.quantization.Quantizer(scale_from=4.0),
}

# Of floats; integers have no bits of an exponent to go through.
FORMATS = {"E4M3": mpx.Format.E4M3, "E5M2": mpx.Format.E5M2, "E2M1": mpx.Format.E2M1}

# Ways to call a function of arrays with one result; each must give the same bits.
TRANSFORMS: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "eager": lambda f: f,
    "jit": jax.jit,
    "vmap": lambda f: lambda x: jax.vmap(f)(x[None])[0],
    "scan": lambda f: lambda x: jax.lax.scan(lambda c, y: (c, f(y)), 0, x[None])[1][0],
    "cond": lambda f: lambda x: jax.lax.cond(True, f, f, x),
    "remat": jax.checkpoint,
}

# Precisions of a training step: what `mpx.autocast` is told.
PRECISIONS: dict[str, dict[str, Any]] = {
    "bfloat16": {"dtype": "bfloat16"},
    "float16": {"dtype": "float16"},
    **{name: {"recipe": recipe} for name, recipe in RECIPES.items()},
}
