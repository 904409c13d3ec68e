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
    may_read,
    may_travel,
    quantized_ahead,
    stored_ahead,
)
from ._amax import Join
from ._array import QuantizedArray
from ._casting import amax_of
from ._convolution import ConvolutionProduct
from ._delayed import (
    DelayedScaling,
    DelayedScalingState,
)
from ._explain import formats_of, path_of
from ._format import Format
from ._four_bits import encode
from ._hadamard import hadamard_transform, signs_of
from ._kernel import AbstractKernel
from ._linear import LinearProduct
from ._noise import (
    hashed,
    mixed,
    noise_of_hash,
    places,
    uniform,
)
from ._operands import (
    has_blocks,
    rounds_stochastically,
)
from ._product import (
    AbstractProduct,
    PrequantizedWeight,
    quantized_product,
)
from ._products import UNITS, Path
from ._quantize import quantize, quantize_dequantize
from ._quantizers import (
    AbstractQuantizer,
    BlockQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    TensorQuantizer,
)
from ._ragged import RaggedProduct, has_ragged_form
from ._recipes import (
    AbstractRecipe,
    CustomRecipe,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Role,
)
from ._rounding import (
    flushed,
    largest_magnitude,
    power_of_two,
    round_finite,
    up_or_down,
)
from ._scales import (
    e8m0_code,
    e8m0_from_code,
    e8m0_scale,
    nvfp4_scale,
    nvfp4_tensor_scale,
)
from ._target import Target, target_from, target_of
