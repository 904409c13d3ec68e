"""Functions and layers that are ready for mixed precision.

Inputs, results and saved residuals are half precision; the arithmetic between them is
full precision. `force_full_precision` is not needed, and no float32 copy of an
activation is saved for backward.

Read `_recomputed` (saving half precision only), `_softmax` (also losses, means),
`_layers`, `_attention_products`, `_attention_kernel`, `_attention`,
`_dot_product_attention`, `_transformer`.

Import the module explicitly: `import mpx.nn`.
"""

from ._dot_product_attention import dot_product_attention as dot_product_attention
from ._layers import (
    LayerNorm as LayerNorm,
    Linear as Linear,
    RMSNorm as RMSNorm,
    layer_norm as layer_norm,
    rms_norm as rms_norm,
)
from ._softmax import (
    cross_entropy as cross_entropy,
    log_softmax as log_softmax,
    logsumexp as logsumexp,
    mean as mean,
    softmax as softmax,
    variance as variance,
)
from ._transformer import (
    MultiheadAttention as MultiheadAttention,
    TransformerLayer as TransformerLayer,
)
