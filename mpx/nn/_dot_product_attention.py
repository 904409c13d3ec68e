"""`dot_product_attention`: attention in one kernel if the device has one."""

import math
import numbers
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int32, PRNGKeyArray

from .._autocast import call_with_ambient
from .._base.errors import describe
from ._attention import attend
from ._attention_products import AttentionOptions, Implementation, Operands
from ._layers import broadcasts, check_rate

_CALL = "`mpx.nn.dot_product_attention`"


def dot_product_attention(
    query: Float[Array, "*batch q_seq heads size"],
    key: Float[Array, "*batch kv_seq groups size"],
    value: Float[Array, "*batch kv_seq groups size"],
    bias: Float[Array, "..."] | None = None,
    mask: Bool[Array, "..."] | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: Int32[Array, " batch"] | None = None,
    key_value_seq_lengths: Int32[Array, " batch"] | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: Implementation = None,
    return_residual: bool = False,
    dropout_rate: float = 0.0,
    dropout_key: PRNGKeyArray | None = None,
) -> (
    Float[Array, "*batch q_seq heads size"]
    | tuple[
        Float[Array, "*batch q_seq heads size"], Float32[Array, "*batch q_seq heads"]
    ]
):
    r"""Computes attention, in one cuDNN kernel if device and sizes allow it.

    $$O = \operatorname{dropout}\!\big(\operatorname{softmax}(s\, Q K^\top +
    \text{bias})\big)\, V$$

    without the masked scores. The arguments are those of
    `jax.nn.dot_product_attention`, and dropout. Consecutive heads share keys and values
    if there are fewer of these (grouped queries); the number of heads must be a
    multiple of theirs. `batch` is one axis or none.

    The kernel accepts float16 and bfloat16, on NVIDIA GPUs from compute capability 8.0
    on, and the sizes that JAX accepts: a head size up to 128 (256 from 9.0 on) and a
    multiple of 8, even lengths with a bias or a mask. It is chosen at lowering, so
    programs that are compiled ahead of time use it, too. On TPUs JAX's Pallas kernel
    (`flash_attention`) takes bfloat16, sequences of a multiple of 128 and heads of 64,
    one key per query head, and `is_causal` only. By default it is used from sequences
    of 1,024 on, and on one device or in `shard_map`, as XLA does not divide it between
    devices. Everywhere else attention is two matmuls with a softmax between them. Under
    `mpx.autocast` query, key and value of a float32 model are cast first; `mpx.explain`
    reports which implementation was chosen, and why.

    Scores are summed, scaled and exponentiated in float32. Saved for backward: with the
    kernel query, key, value, the result and one float32 for each row; with matmuls the
    probabilities in half precision, and the dropout mask.

    Args:
        query: float16, bfloat16, float32 or float64.
        key: The keys, in the dtype of `query`.
        value: The values, as `key`.
        bias: Is added to the scaled scores. Of four axes (batch, heads, q_seq, kv_seq),
            each possibly 1, or fewer: leading ones may be missing. The kernel rounds it
            to the dtype of the query.
        mask: True for keys to attend to, of a shape as for `bias`.
        scale: The factor of the scores; $1 / \sqrt{\text{size}}$ if None.
        is_causal: Whether queries attend to no later key; the first key has the
            position of the first query.
        query_seq_lengths: The number of queries in each row of the batch. The result is
            0 after them.
        key_value_seq_lengths: The number of keys and values in each row; the rest is
            masked.
        local_window_size: The number of keys before and after its own position that a
            query attends to; one number for both.
        implementation: "cudnn" and "pallas" use that kernel or raise, "xla" the
            matmuls. None, the default, chooses.
        return_residual: Whether to return the logarithms of the rows' sums, too. They
            have no gradient.
        dropout_rate: The probability that a probability becomes 0; the others are
            divided by `1 - dropout_rate`.
        dropout_key: A PRNG key for that.

    Returns:
        The result in the shape and dtype of `query`. With `return_residual` also the
        logarithms, in float32, where `jax.nn.dot_product_attention` rounds them to the
        dtype of `key`.

    Raises:
        TypeError: Query, key and value differ in dtype, or one is not floating; `scale`
            is traced.
        ValueError: A shape does not match; dropout without a key, or a rate outside of
            [0, 1); `implementation` is not one of those above, or "cudnn" is
            unavailable.

    At the edges: a query whose keys are all masked attends evenly to all that its
    position allows (`is_causal`, `local_window_size`), and its scores have no gradient.
    A row of biases that are all `-inf` gives no NaN. Scores of float16 do not overflow.
    `inf` and NaN in query, key and value give NaN.

    Dropout depends on a JAX key and uses matmuls. cuDNN's kernel also has dropout, but
    XLA passes it a seed that is part of the program and an offset that grows with each
    run, so its mask is not a function of a key.

    Derivatives: where the kernel may be used, `jax.jvp` raises, as for every
    `jax.custom_vjp`; `implementation="xla"` supports it. Gradients of gradients are
    correct.

    Examples:
        >>> import jax.numpy as jnp, mpx.nn
        >>> x = jnp.ones((2, 16, 4, 8), jnp.bfloat16)
        >>> mpx.nn.dot_product_attention(x, x, x, is_causal=True).dtype
        dtype(bfloat16)
    """
    check_rate("dot_product_attention", "dropout_rate", dropout_rate)
    if dropout_rate and dropout_key is None:
        raise ValueError(
            f"{_CALL} needs a `dropout_key` for dropout; got None. Pass one, or "
            "`dropout_rate=0.0`."
        )
    arrays = _checked(query, key, value)
    first, is_single = arrays[0], arrays[0].ndim == 3
    operands = Operands(
        *(x[None] if is_single else x for x in arrays),
        bias=_four_axes("bias", bias, arrays),
        mask=_four_axes("mask", mask, arrays),
        query_lengths=_lengths("query_seq_lengths", query_seq_lengths, first),
        key_lengths=_lengths("key_value_seq_lengths", key_value_seq_lengths, first),
    )
    operands = operands.dropped(dropout_rate, dropout_key)
    options = AttentionOptions(
        scale=_scale(scale, first.shape[-1]),
        is_causal=bool(is_causal),
        window=_window(local_window_size),
        rate=float(dropout_rate),
        implementation=checked_implementation("dot_product_attention", implementation),
        with_residual=bool(return_residual),
    )
    results = call_with_ambient(attend, options, operands)
    out = results[0][0] if is_single else results[0]
    if not return_residual:
        return out
    rows = results[1].transpose(0, 2, 1)
    return out, rows[0] if is_single else rows


def checked_implementation(layer: str, implementation: object) -> Implementation:
    """Returns an `implementation`; raises unless it is valid."""
    if implementation not in (None, "xla", "cudnn", "pallas"):
        raise ValueError(
            f"`implementation` of `mpx.nn.{layer}` must be None, 'xla', 'cudnn' or "
            f"'pallas'; got {implementation!r}. None uses a kernel where possible."
        )
    return implementation


def _checked(*arrays: Any) -> tuple[Array, Array, Array]:
    query, key, value = (jnp.asarray(x) for x in arrays)
    found = ", ".join(map(describe, (query, key, value)))
    dtypes = {x.dtype for x in (query, key, value)}
    if len(dtypes) != 1 or not jnp.issubdtype(query.dtype, jnp.floating):
        raise TypeError(
            f"{_CALL} needs `query`, `key` and `value` in one floating dtype; got "
            f"{found}. Cast them."
        )
    fits = query.ndim in (3, 4) and key.ndim == query.ndim and key.shape == value.shape
    fits = fits and query.shape[:-3] == key.shape[:-3]
    fits = fits and query.shape[-1] == key.shape[-1] and key.shape[-2] > 0
    if not fits or query.shape[-2] % key.shape[-2]:
        raise ValueError(
            f"{_CALL} needs a `query` of (batch, q_seq, heads, size), `key` and "
            "`value` of (batch, kv_seq, groups, size), where groups divide heads; "
            f"the batch may be missing from all; got {found}."
        )
    return query, key, value


def _four_axes(
    name: str, x: object, arrays: tuple[Array, Array, Array]
) -> Array | None:
    """Returns a mask or bias with axes for batch, heads, queries and keys."""
    if x is None:
        return None
    x = jnp.asarray(x)
    query, key, _ = arrays
    batch = query.shape[0] if query.ndim == 4 else 1
    full = (batch, query.shape[-2], query.shape[-3], key.shape[-3])
    shape = (1,) * (4 - x.ndim) + x.shape
    if not broadcasts(shape, full):
        raise ValueError(
            f"`{name}` of {_CALL} must have the shape (batch, heads, q_seq, kv_seq) = "
            f"{full}, each axis possibly 1, or fewer axes; got {describe(x)}."
        )
    is_bool = x.dtype == np.bool_
    if is_bool != (name == "mask"):
        raise TypeError(
            f"`{name}` of {_CALL} must be {'bool' if name == 'mask' else 'a float'}; "
            f"got {describe(x)}. A mask selects keys, a bias is added to scores."
        )
    return x.reshape(shape)


def _lengths(name: str, x: object, query: Array) -> Array | None:
    if x is None:
        return None
    x = jnp.asarray(x)
    batch = query.shape[0] if query.ndim == 4 else 1
    if x.shape != (batch,) or not jnp.issubdtype(x.dtype, jnp.integer):
        raise ValueError(
            f"`{name}` of {_CALL} must be one int32 for each row of the batch, "
            f"int32[{batch}]; got {describe(x)}."
        )
    return x.astype(jnp.int32)


def _scale(scale: object, size: int) -> float:
    if scale is None:
        return 1 / math.sqrt(max(size, 1))
    if isinstance(scale, bool) or not isinstance(scale, numbers.Real):
        raise TypeError(
            f"`scale` of {_CALL} must be a Python number, which is part of the "
            f"kernel; got {describe(scale)}. Multiply the query by the array instead."
        )
    return float(scale)


def _window(window: Any) -> tuple[int, int] | None:
    if window is None:
        return None
    pair = (window, window) if isinstance(window, int) else tuple(window)
    if len(pair) != 2 or not all(isinstance(n, int) and n >= 0 for n in pair):
        raise ValueError(
            f"`local_window_size` of {_CALL} must be the numbers of keys before and "
            f"after, two numbers from 0 on, or one for both; got {window!r}."
        )
    return pair
