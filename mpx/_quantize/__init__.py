"""Low precision: formats, scales, quantizers, and recipes that choose among them.

Vocabulary: a *format* says how bits make a number; a *scale* multiplies on the way into
low precision, an *inverse scale* on the way out; a *quantizer* computes both scales and
numbers; a *recipe* says which quantizer is for inputs, for weights and for gradients.

The sharp edges: rounding is arithmetic in float32, not a cast (see `_rounding`);
finite numbers saturate, while an infinity or a NaN shows in every product (see
`_quantizers`); and an array of low-precision numbers has no derivative (see
`_quantize`).
"""

from ._ahead import (
    may_read as may_read,
    may_travel as may_travel,
    quantized_ahead as quantized_ahead,
    stored_ahead as stored_ahead,
)
from ._amax import Join as Join
from ._array import QuantizedArray as QuantizedArray
from ._convolution import (
    ConvolutionProduct as ConvolutionProduct,
    linear_convolution as linear_convolution,
)
from ._delayed import (
    DelayedScaling as DelayedScaling,
    DelayedScalingState as DelayedScalingState,
)
from ._explain import formats_of as formats_of, path_of as path_of
from ._format import Format as Format
from ._four_bits import encode as encode
from ._hadamard import hadamard_transform as hadamard_transform, signs_of as signs_of
from ._kernel import AbstractKernel as AbstractKernel
from ._linear import LinearProduct as LinearProduct, linear_product as linear_product
from ._noise import (
    hashed as hashed,
    noise_of_hash as noise_of_hash,
    uniform as uniform,
)
from ._operands import (
    has_blocks as has_blocks,
    rounds_stochastically as rounds_stochastically,
)
from ._product import (
    AbstractProduct as AbstractProduct,
    PrequantizedWeight as PrequantizedWeight,
)
from ._products import Path as Path
from ._quantize import (
    quantize as quantize,
    quantize_dequantize as quantize_dequantize,
)
from ._quantizers import (
    AbstractQuantizer as AbstractQuantizer,
    BlockQuantizer as BlockQuantizer,
    MXFP8Quantizer as MXFP8Quantizer,
    NVFP4Quantizer as NVFP4Quantizer,
    TensorQuantizer as TensorQuantizer,
)
from ._ragged import (
    RaggedProduct as RaggedProduct,
    has_ragged_form as has_ragged_form,
    linear_ragged_product as linear_ragged_product,
)
from ._recipes import (
    AbstractRecipe as AbstractRecipe,
    CustomRecipe as CustomRecipe,
    Float8BlockScaling as Float8BlockScaling,
    Float8CurrentScaling as Float8CurrentScaling,
    MXFP8BlockScaling as MXFP8BlockScaling,
    NVFP4BlockScaling as NVFP4BlockScaling,
    Role as Role,
)
from ._rounding import (
    biased_exponent as biased_exponent,
    flushed as flushed,
    largest_magnitude as largest_magnitude,
    power_of_two as power_of_two,
    round_finite as round_finite,
    up_or_down as up_or_down,
)
from ._scales import (
    e8m0_code as e8m0_code,
    e8m0_from_code as e8m0_from_code,
    e8m0_scale as e8m0_scale,
    nvfp4_scale as nvfp4_scale,
    nvfp4_tensor_scale as nvfp4_tensor_scale,
)
from ._slots import (
    amax_of as amax_of,
)
from ._target import (
    Target as Target,
    target_from as target_from,
    target_of as target_of,
)
