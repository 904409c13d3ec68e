"""A layer of a transformer: attention and a multi-layer perceptron."""

import functools
from collections.abc import Callable
from typing import Literal

import equinox as eqx
import jax
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from .._ambient import with_ambient_recipe
from .._typing import DTypeLike
from ._attention_products import Implementation
from ._elementwise import activate, dropout
from ._layers import LayerNorm, Linear, RMSNorm, check_key, check_rate, check_size
from ._multihead import MaskType, MultiheadAttention

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
            mask: True where a position may be looked at; see
                `mpx.nn.MultiheadAttention`.
            bias: What is added to the scores of attention; see there, too.
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
        """What goes into the second product of the perceptron."""
        y = self.mlp_in(x)
        gate = () if self.mlp_gate is None else (self.mlp_gate(x),)
        return activate(self.activation, y, *gate)
