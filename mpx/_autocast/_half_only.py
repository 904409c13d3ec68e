"""What takes half precision only, in a model that is traced in float32."""

import contextlib
from collections.abc import Iterator

# What JAX says of its kernel of attention: of operands, and where there is no cuDNN.
_TEXTS = ("Q must be fp16/bf16", "cuDNN is not detected")


@contextlib.contextmanager
def explaining_half_only() -> Iterator[None]:
    """Says what to write instead of JAX's kernel of attention."""
    try:
        yield
    except (NotImplementedError, RuntimeError) as error:
        if not any(text in str(error) for text in _TEXTS):
            raise
        raise type(error)(
            "`mpx.autocast` traces a function in its own dtypes, before it casts; "
            '`jax.nn.dot_product_attention(..., implementation="cudnn")` in it says: '
            f"{error} Write `mpx.nn.dot_product_attention(...)` with the same "
            "arguments: it is cast with the rest, and takes cuDNN's kernel where the "
            "device has it. Or cast query, key and value before the call."
        ) from error
