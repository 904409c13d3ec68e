"""Building blocks of low precision: formats, quantizers, and parts of recipes.

A training step needs none of these: it passes a recipe to `mpx.autocast`. They are for
custom recipes, and for arrays that are quantized outside a matmul.
"""

from ._memory import CompressedArray as CompressedArray
from ._quantize import (
    AbstractRecipe as AbstractRecipe,
    BlockQuantizer as BlockQuantizer,
    DelayedScalingState as DelayedScalingState,
    Leg as Leg,
    MXFP8Quantizer as MXFP8Quantizer,
    NVFP4Quantizer as NVFP4Quantizer,
    QuantizedArray as QuantizedArray,
    Quantizer as Quantizer,
    RecipeByLeg as RecipeByLeg,
    Role as Role,
    TensorQuantizer as TensorQuantizer,
    hadamard_transform as hadamard_transform,
    quantize as quantize,
    quantize_dequantize as quantize_dequantize,
)
from ._step import RecipeScaling as RecipeScaling
from ._stored_weights import (
    StoredWeight as StoredWeight,
    dequantize_weights as dequantize_weights,
    quantize_weights as quantize_weights,
)
