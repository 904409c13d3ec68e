"""Layers of a transformer: `MultiheadAttention` and `TransformerLayer`."""

import functools
from collections.abc import Callable
from typing import Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from .._autocast import with_ambient_recipe
from .._base.errors import describe
from .._base.typing import DTypeLike
from ._attention import attend
from ._attention_products import AttentionOptions, Implementation, Operands
from ._dot_product_attention import checked_implementation
from ._layers import (
    LayerNorm,
    Linear,
    RMSNorm,
    broadcasts,
    check_key,
    check_last_axis,
    check_rate,
    check_size,
)
from ._recomputed import activate, dropout, rotate

# --- Multi-head attention -------------------------------------------------------------

MaskType = Literal["no_mask", "causal"]
_MHA = "`mpx.nn.MultiheadAttention`"


class MultiheadAttention(eqx.Module):
    r"""Multi-head attention of a sequence to itself or to another one.

    $$\text{head}_i = \operatorname{softmax}\!\Big(
    \frac{(x W^Q_i)(y W^K_{g(i)})^\top}{\sqrt{d}}\Big)\, y W^V_{g(i)}, \qquad
    \text{out} = [\text{head}_1, \dots, \text{head}_n]\, W^O$$

    with $y = x$ unless another sequence is passed, and $g(i)$ the group of head $i$:
    consecutive heads share keys and values.

    It uses `mpx.nn.dot_product_attention`: one cuDNN kernel if available, otherwise two
    matmuls in the input's dtype and a softmax in float32. Saved for backward: inputs,
    queries, keys, values, and the result of the kernel or the probabilities, all in
    half precision.

    Attributes:
        query: The projection $W^Q$, an `mpx.nn.Linear`.
        key: The projection $W^K$.
        value: The projection $W^V$.
        output: The projection $W^O$.

    Args:
        hidden_size: The size of the last axis of input and result.
        num_attention_heads: The number of heads, $n$.
        num_gqa_groups: The number of heads of keys and values (grouped query
            attention); `num_attention_heads` if None.
        attention_dropout: The probability that an attention probability becomes 0.
        self_attention_mask_type: "causal" masks later positions; "no_mask" does not.
        use_bias: Whether the projections have a bias.
        use_rotary_positions: Whether queries and keys are rotated by their positions.
        rotary_base: The base of the angles.
        implementation: "xla" uses matmuls, "cudnn" the kernel or raises. None, the
            default, uses cuDNN's kernel where possible, which excludes calls with
            dropout. See `mpx.nn.dot_product_attention`.
        dtype: The dtype of the parameters.
        key: A PRNG key for the parameters.

    Raises:
        ValueError: The heads do not divide the hidden size, or the groups the heads;
            rotary positions with an odd head size; a dropout rate outside of [0, 1);
            dropout with `implementation="cudnn"`. At a call: a shape that does not
            match, or dropout without a key.

    Examples:
        >>> import jax, jax.numpy as jnp, mpx.nn
        >>> layer = mpx.nn.MultiheadAttention(
        ...     16, 4, num_gqa_groups=2, key=jax.random.key(0)
        ... )
        >>> layer(jnp.ones((2, 5, 16), jnp.bfloat16)).shape
        (2, 5, 16)
    """

    query: Linear
    key: Linear
    value: Linear
    output: Linear
    num_attention_heads: int = eqx.field(static=True)
    num_gqa_groups: int = eqx.field(static=True)
    attention_dropout: float = eqx.field(static=True)
    self_attention_mask_type: str = eqx.field(static=True)
    use_rotary_positions: bool = eqx.field(static=True)
    rotary_base: float = eqx.field(static=True)
    implementation: Implementation = eqx.field(static=True)

    def __init__(
        self,
        hidden_size: int,
        num_attention_heads: int,
        *,
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        self_attention_mask_type: MaskType = "no_mask",
        use_bias: bool = True,
        use_rotary_positions: bool = False,
        rotary_base: float = 10_000.0,
        implementation: Implementation = None,
        dtype: DTypeLike = "float32",
        key: PRNGKeyArray,
    ) -> None:
        """Draws the parameters."""
        groups = num_attention_heads if num_gqa_groups is None else num_gqa_groups
        _check_heads(hidden_size, num_attention_heads, groups)
        _check_options(self_attention_mask_type, implementation, attention_dropout)
        size = hidden_size // num_attention_heads
        if use_rotary_positions and size % 2:
            raise ValueError(
                f"`use_rotary_positions` of {_MHA} rotates pairs of channels and "
                f"needs an even head size; got {hidden_size} / {num_attention_heads} "
                f"= {size}. Change the number of heads."
            )
        keys = jax.random.split(key, 4)

        def linear(size: int, key: PRNGKeyArray) -> Linear:
            return Linear(hidden_size, size, use_bias=use_bias, dtype=dtype, key=key)

        self.query, self.output = (linear(hidden_size, keys[i]) for i in (0, 3))
        self.key, self.value = (linear(groups * size, keys[i]) for i in (1, 2))
        self.num_attention_heads, self.num_gqa_groups = num_attention_heads, groups
        self.attention_dropout = attention_dropout
        self.self_attention_mask_type = self_attention_mask_type
        self.use_rotary_positions = use_rotary_positions
        self.rotary_base = rotary_base
        self.implementation = implementation

    @with_ambient_recipe
    def __call__(
        self,
        x: Float[Array, "*batch q_seq hidden"],
        key_value: Float[Array, "*batch kv_seq hidden"] | None = None,
        *,
        mask: Bool[Array, "..."] | None = None,
        bias: Float[Array, "..."] | None = None,
        key: PRNGKeyArray | None = None,
        inference: bool = False,
    ) -> Float[Array, "*batch q_seq hidden"]:
        """Attends.

        Args:
            x: The sequence of the queries, with any number of leading axes.
            key_value: The sequence of keys and values; `x` if None.
            mask: True allows attention to a position: of shape (q_seq, kv_seq),
                (*batch, q_seq, kv_seq) or (*batch, heads, q_seq, kv_seq), each axis
                possibly 1. A row without True attends evenly to all positions, except
                later ones under "causal".
            bias: Is added to the scaled scores, for example relative positions; shaped
                as `mask`. Its gradient is summed in float32.
            key: A PRNG key for dropout.
            inference: Whether dropout is switched off.

        Returns:
            The result in the shape and dtype of `x`.
        """
        seen = x if key_value is None else key_value
        for sequence in (x, seen):
            check_last_axis("MultiheadAttention", sequence, self.query.weight.shape[1])
        _check_sequences(x, seen)
        rate = 0.0 if inference else self.attention_dropout
        check_key("MultiheadAttention", rate, key)
        heads, groups = self.num_attention_heads, self.num_gqa_groups
        batch = x.shape[:-2]
        x = x.reshape(-1, *x.shape[-2:])
        seen = seen.astype(x.dtype).reshape(-1, *seen.shape[-2:])
        inner = heads, x.shape[1], seen.shape[1]
        mask = _batched("mask", mask, batch, inner)
        bias = _batched("bias", bias, batch, inner)
        q = self.query(x).reshape(*x.shape[:2], heads, -1)
        k = self.key(seen).reshape(*seen.shape[:2], groups, -1)
        v = self.value(seen).reshape(*seen.shape[:2], groups, -1)
        if self.use_rotary_positions:
            q, k = rotate(q, self.rotary_base), rotate(k, self.rotary_base)
        operands = Operands(q, k, v, bias=bias, mask=mask)
        attended = self._attend(operands.dropped(rate, key), rate)
        out = self.output(attended.reshape(*x.shape[:2], -1))
        return out.reshape(*batch, *out.shape[-2:])

    def _attend(self, x: Operands, rate: float) -> Array:
        options = AttentionOptions(
            scale=x.query.shape[-1] ** -0.5,
            is_causal=self.self_attention_mask_type == "causal",
            rate=rate,
            implementation=self.implementation,
        )
        return attend(options, x)[0]


def _check_heads(hidden_size: int, heads: int, groups: int) -> None:
    sizes = {
        "hidden_size": hidden_size,
        "num_attention_heads": heads,
        "num_gqa_groups": groups,
    }
    for name, size in sizes.items():
        check_size("MultiheadAttention", name, size)
    if hidden_size % heads:
        raise ValueError(
            f"`num_attention_heads` of {_MHA} must divide `hidden_size`; got {heads} "
            f"heads for {hidden_size}. Change one of them."
        )
    if heads % groups:
        raise ValueError(
            f"`num_gqa_groups` of {_MHA} must divide `num_attention_heads`; got "
            f"{groups} groups for {heads} heads. Change one of them."
        )


def _check_options(mask_type: str, implementation: str | None, rate: float) -> None:
    check_rate("MultiheadAttention", "attention_dropout", rate)
    if mask_type not in ("no_mask", "causal"):
        raise ValueError(
            f"`self_attention_mask_type` of {_MHA} must be 'no_mask' or 'causal'; "
            f"got {mask_type!r}. Pass other masks at the call."
        )
    checked_implementation("MultiheadAttention", implementation)
    if implementation == "cudnn" and rate:
        raise ValueError(
            f"`implementation='cudnn'` of {_MHA} does not support dropout by a key; "
            f"got attention_dropout={rate}. Omit it: None uses the kernel without "
            "dropout, as in inference."
        )


def _check_sequences(x: Array, seen: Array) -> None:
    if x.ndim < 2 or seen.ndim != x.ndim or seen.shape[:-2] != x.shape[:-2]:
        raise ValueError(
            f"{_MHA} needs sequences of shape (*batch, sequence, hidden) with equal "
            f"leading axes; got {describe(x)} and {describe(seen)}. Add the axes that "
            "are missing."
        )


_MEANING = {
    "mask": "True allows attention to a position.",
    "bias": "It is added to the scores.",
}


def _batched(
    name: str, mask: Array | None, batch: tuple[int, ...], inner: tuple[int, ...]
) -> Array | None:
    """Returns a mask of shape (batch or 1, heads or 1, q_seq or 1, kv_seq or 1)."""
    if mask is None:
        return None
    shapes = {
        2: (1,) * (len(batch) + 1) + mask.shape,
        len(batch) + 2: (*mask.shape[:-2], 1, *mask.shape[-2:]),
        len(batch) + 3: mask.shape,
    }
    shape = shapes.get(mask.ndim)
    if shape is None or not broadcasts(shape, (*batch, *inner)):
        raise ValueError(
            f"`{name}` of {_MHA} must have the shape {inner[1:]}, "
            f"{(*batch, *inner[1:])} or {(*batch, *inner)}, each axis possibly 1; got "
            f"{describe(mask)}. {_MEANING[name]}"
        )
    mask = mask.reshape(shape)
    rows = mask.shape[:-3]
    if any(n != 1 for n in rows):
        mask = jnp.broadcast_to(mask, (*batch, *mask.shape[-3:]))
    return mask.reshape(-1, *mask.shape[-3:])


# --- The transformer layer ------------------------------------------------------------

_CALL = "`mpx.nn.TransformerLayer`"


class TransformerLayer(eqx.Module):
    r"""A transformer layer with the norms before attention and perceptron (pre-norm).

    $$h = x + \operatorname{Attention}(\operatorname{Norm}(x)), \qquad
    \text{out} = h + W_2\, \phi(W_1 \operatorname{Norm}(h) + b_1) + b_2$$

    With `gated_mlp` the operand of $W_2$ is $\phi(W_1 n + b_1) \odot (V n + c)$, where
    $n$ is the norm of $h$: SwiGLU with `activation=jax.nn.silu`, GeGLU with
    `jax.nn.gelu`, ReGLU with `jax.nn.relu`.

    Arguments that Transformer Engine's layer for JAX also has are named as there. By
    default there is no dropout, and the activation is GELU.

    Attributes:
        attention_norm: The norm before attention.
        attention: An `mpx.nn.MultiheadAttention`.
        mlp_norm: The norm before the perceptron.
        mlp_in: $W_1$ and $b_1$.
        mlp_gate: $V$ and $c$ of a gated perceptron, or None.
        mlp_out: $W_2$ and $b_2$.

    Args:
        hidden_size: The size of the last axis of input and result.
        mlp_hidden_size: The size between the two matmuls of the perceptron.
        num_attention_heads: The number of heads.
        num_gqa_groups: The number of heads of keys and values;
            `num_attention_heads` if None.
        attention_dropout: The probability that an attention probability becomes 0.
        hidden_dropout: The same for the results of attention and perceptron, before
            they are added to the residual stream.
        layernorm_type: "layernorm" or "rmsnorm".
        layernorm_epsilon: Is added to the variance by the norms.
        activation: $\phi$, an elementwise function of one array. It is computed in
            float32, and recomputed in the backward pass.
        gated_mlp: Whether the perceptron is gated.
        self_attention_mask_type: "causal" or "no_mask".
        use_bias: Whether the linear layers have a bias.
        use_rotary_positions: Whether queries and keys are rotated by their positions.
        implementation: See `mpx.nn.MultiheadAttention`.
        dtype: The dtype of the parameters.
        key: A PRNG key for the parameters.

    Raises:
        ValueError: See `mpx.nn.MultiheadAttention`; or `layernorm_type` is neither.

    Examples:
        >>> import jax, jax.numpy as jnp, mpx.nn
        >>> layer = mpx.nn.TransformerLayer(16, 64, 4, key=jax.random.key(0))
        >>> layer(jnp.ones((2, 5, 16), jnp.bfloat16)).dtype
        dtype(bfloat16)
    """

    attention_norm: LayerNorm | RMSNorm
    attention: MultiheadAttention
    mlp_norm: LayerNorm | RMSNorm
    mlp_in: Linear
    mlp_gate: Linear | None
    mlp_out: Linear
    activation: Callable[[Array], Array] = eqx.field(static=True)
    hidden_dropout: float = eqx.field(static=True)

    def __init__(
        self,
        hidden_size: int,
        mlp_hidden_size: int,
        num_attention_heads: int,
        *,
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        hidden_dropout: float = 0.0,
        layernorm_type: Literal["layernorm", "rmsnorm"] = "layernorm",
        layernorm_epsilon: float = 1e-6,
        activation: Callable[[Array], Array] = jax.nn.gelu,
        gated_mlp: bool = False,
        self_attention_mask_type: MaskType = "no_mask",
        use_bias: bool = True,
        use_rotary_positions: bool = False,
        implementation: Implementation = None,
        dtype: DTypeLike = "float32",
        key: PRNGKeyArray,
    ) -> None:
        """Draws the parameters."""
        check_rate("TransformerLayer", "hidden_dropout", hidden_dropout)
        check_size("TransformerLayer", "mlp_hidden_size", mlp_hidden_size)
        norms = {"layernorm": LayerNorm, "rmsnorm": RMSNorm}
        if layernorm_type not in norms:
            raise ValueError(
                f"`layernorm_type` of {_CALL} must be 'layernorm' or 'rmsnorm'; got "
                f"{layernorm_type!r}. Choose one of them."
            )
        norm = functools.partial(
            norms[layernorm_type], hidden_size, epsilon=layernorm_epsilon, dtype=dtype
        )
        linear = functools.partial(Linear, use_bias=use_bias, dtype=dtype)
        attention_key, in_key, out_key = jax.random.split(key, 3)
        self.attention = MultiheadAttention(
            hidden_size,
            num_attention_heads,
            num_gqa_groups=num_gqa_groups,
            attention_dropout=attention_dropout,
            self_attention_mask_type=self_attention_mask_type,
            use_bias=use_bias,
            use_rotary_positions=use_rotary_positions,
            implementation=implementation,
            dtype=dtype,
            key=attention_key,
        )
        self.attention_norm, self.mlp_norm = norm(), norm()
        sizes, gate_key = (hidden_size, mlp_hidden_size), jax.random.fold_in(in_key, 1)
        self.mlp_in = linear(*sizes, key=in_key)
        self.mlp_gate = linear(*sizes, key=gate_key) if gated_mlp else None
        self.mlp_out = linear(mlp_hidden_size, hidden_size, key=out_key)
        self.activation = activation
        self.hidden_dropout = hidden_dropout

    @with_ambient_recipe
    def __call__(
        self,
        x: Float[Array, "*batch seq hidden"],
        *,
        mask: Bool[Array, "..."] | None = None,
        bias: Float[Array, "..."] | None = None,
        key: PRNGKeyArray | None = None,
        inference: bool = False,
    ) -> Float[Array, "*batch seq hidden"]:
        """Applies the layer.

        Args:
            x: The sequence, with any number of leading axes.
            mask: True allows attention to a position; see `mpx.nn.MultiheadAttention`.
            bias: Is added to the scores of attention; see there, too.
            key: A PRNG key for dropout.
            inference: Whether dropout is switched off.

        Returns:
            The result in the shape and dtype of `x`.
        """
        rate = 0.0 if inference else self.hidden_dropout
        check_key("TransformerLayer", rate, key)
        keys = (None,) * 3 if key is None else tuple(jax.random.split(key, 3))

        def dropped(y: Array, key: PRNGKeyArray | None) -> Array:
            return dropout(y, rate, key) if rate and key is not None else y

        y = self.attention_norm(x)
        y = self.attention(y, mask=mask, bias=bias, key=keys[0], inference=inference)
        x = x + dropped(y, keys[1])
        y = self._activated(self.mlp_norm(x))
        return x + dropped(self.mlp_out(y), keys[2])

    def _activated(self, x: Array) -> Array:
        """Returns the operand of the perceptron's second matmul."""
        y = self.mlp_in(x)
        gate = () if self.mlp_gate is None else (self.mlp_gate(x),)
        return activate(self.activation, y, *gate)
