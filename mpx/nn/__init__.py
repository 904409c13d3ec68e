"""Functions and layers that are ready for mixed precision.

Inputs, results and saved residuals are half precision; the arithmetic between them is
full precision. `force_full_precision` is not needed, and no float32 copy of an
activation is saved for backward.

Import the module explicitly: `import mpx.nn`.
"""

from ._dot_product_attention import dot_product_attention as dot_product_attention
from ._layers import LayerNorm as LayerNorm, Linear as Linear, RMSNorm as RMSNorm
from ._losses import cross_entropy as cross_entropy
from ._multihead import MultiheadAttention as MultiheadAttention
from ._normalize import layer_norm as layer_norm, rms_norm as rms_norm
from ._softmax import (
    log_softmax as log_softmax,
    logsumexp as logsumexp,
    softmax as softmax,
)
from ._statistics import mean as mean, variance as variance
from ._transformer import TransformerLayer as TransformerLayer
