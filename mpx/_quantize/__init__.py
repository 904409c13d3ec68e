"""Low precision: formats, scales, quantizers, recipes, and quantized products.

Vocabulary: a *format* is the meaning of the bits of a number; a *scale* multiplies on
the way into low precision, an *inverse scale* on the way out; a *quantizer* computes
scales and values; a *recipe* selects the quantizers of inputs, weights and gradients.

Three floors, each importing only those before it, in order of reading:

* `_formats`: formats, rounding, blocks and scales, transforms, devices;
* `_quantizers`: from an array to a `QuantizedArray`, and the recipes;
* `_products`: matmuls and convolutions of quantized operands.

Sharp edges: rounding is arithmetic in float32, not a cast (`_formats/_rounding.py`);
finite values saturate, while an infinity or a NaN shows in every product
(`_quantizers/_kinds.py`); a quantized array has no derivative
(`_quantizers/_quantize.py`).
"""

from ._formats._blocks import (
    Join,
    e8m0_code,
    e8m0_from_code,
    e8m0_scale,
    nvfp4_scale,
    nvfp4_tensor_scale,
)
from ._formats._format import Format
from ._formats._hadamard import hadamard_transform, signs_of
from ._formats._rounding import (
    encode,
    flushed,
    hashed,
    largest_magnitude,
    mixed,
    noise_of_hash,
    places,
    power_of_two,
    round_finite,
    uniform,
    up_or_down,
)
from ._formats._target import Target, read_target, target_from, target_of
from ._products._ahead import may_read, may_travel, quantized_ahead, stored_ahead
from ._products._linear import (
    ConvolutionProduct,
    LinearProduct,
    RaggedProduct,
    has_ragged_form,
)
from ._products._lowering import UNITS, Path
from ._products._operands import has_blocks, rounds_stochastically
from ._products._paths import LegPath, legs_of, legs_text
from ._products._product import AbstractProduct, PrequantizedWeight, quantized_product
from ._quantizers._array import HalfCopy, QuantizedArray, Stored
from ._quantizers._casting import AbstractKernel, amax_in_parts, amax_of
from ._quantizers._delayed import (
    DelayedScaling,
    DelayedScalingState,
    RecipeByLeg,
    filled,
)
from ._quantizers._kinds import (
    BlockQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    Quantizer,
    TensorQuantizer,
)
from ._quantizers._quantize import quantize, quantize_dequantize
from ._quantizers._recipes import (
    LEGS,
    AbstractRecipe,
    CustomRecipe,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowwiseScaling,
    Int8CurrentScaling,
    Leg,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Role,
)
