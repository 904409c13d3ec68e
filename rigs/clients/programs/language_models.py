"""Language models as their packages have them, at tiny sizes."""

import jax
import jax.numpy as jnp

from ..data import cross_entropy, labels
from ..record import client

VOCABULARY, LENGTH = 64, 24


def next_token(forward):
    """The loss of predicting each token from those before it."""

    def loss(params, tokens):
        logits = forward(params, tokens[:, :-1])
        return cross_entropy(logits, tokens[:, 1:]), logits

    return loss


@client("recurrentgemma", linear=True)
def griffin(key):
    """Gated linear recurrences and local attention."""
    from recurrentgemma import jax as griffin
    from recurrentgemma.common import ScanType

    block = griffin.TemporalBlockType
    config = griffin.GriffinConfig(
        vocab_size=VOCABULARY,
        width=32,
        mlp_expanded_width=64,
        num_heads=4,
        block_types=(block.RECURRENT, block.ATTENTION),
        embeddings_scale_by_sqrt_dim=True,
        attention_window_size=8,
        logits_soft_cap=30.0,
        scan_type=ScanType.LINEAR_NATIVE,
    )
    model = griffin.Griffin(config)
    keys = jax.random.split(key)
    tokens = labels(keys[0], 4, LENGTH + 1, classes=VOCABULARY)
    positions = jnp.broadcast_to(jnp.arange(LENGTH), (4, LENGTH))

    def forward(params, tokens):
        return model.apply(params, tokens, positions, return_cache=False)[0]

    params = model.init(keys[1], tokens[:, :-1], positions, return_cache=False)
    return next_token(forward), params, (tokens,)


@client("gemma", linear=True)
def gemma_3(key):
    """Norms of queries and keys, local and global attention."""
    from gemma import modules, transformer

    config = transformer.TransformerConfig(
        num_layers=2,
        num_embed=VOCABULARY,
        embed_dim=32,
        hidden_dim=64,
        num_heads=4,
        head_dim=8,
        num_kv_heads=2,
        final_logit_softcap=None,
        use_post_attn_norm=True,
        use_post_ffw_norm=True,
        use_qk_norm=True,
        attention_types=(
            modules.AttentionType.LOCAL_SLIDING,
            modules.AttentionType.GLOBAL,
        ),
        sliding_window_size=8,
        transpose_gating_einsum=True,
        global_base_frequency=1_000_000,
    )
    model = transformer.Transformer(config)
    keys = jax.random.split(key)
    tokens = labels(keys[0], 4, LENGTH + 1, classes=VOCABULARY)
    positions = jnp.broadcast_to(jnp.arange(LENGTH), (4, LENGTH))
    mask = jnp.broadcast_to(
        jnp.tril(jnp.ones((LENGTH, LENGTH), bool)), (4, LENGTH, LENGTH)
    )

    def forward(params, tokens):
        return model.apply(params, tokens, positions, None, mask)[0]

    params = model.init(keys[1], tokens[:, :-1], positions, None, mask)
    return next_token(forward), params, (tokens,)


def nnx_model(key, make):
    """The loss of an NNX model, and its parameters."""
    from flax import nnx

    keys = jax.random.split(key)
    graph, params = nnx.split(make(nnx.Rngs(keys[0])))

    def forward(params, tokens):
        return nnx.merge(graph, params)(tokens)["logits"]

    tokens = labels(keys[1], 4, LENGTH + 1, classes=VOCABULARY)
    return next_token(forward), params, (tokens,)


@client("mamba2-jax", linear=True)
def mamba_2(key):
    """A state space model, whose scan is written as products."""
    import mamba2_jax

    config = mamba2_jax.Mamba2Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        state_size=16,
        head_dim=16,
        chunk_size=8,
        num_hidden_layers=2,
    )
    return nnx_model(key, lambda rngs: mamba2_jax.Mamba2ForCausalLM(config, rngs=rngs))


@client("penzai", linear=True)
def penzai_llama(key):
    """Named axes, and layers that are data."""
    from penzai import pz
    from penzai.models.transformer.variants import llamalike_common as common

    config = common.LlamalikeTransformerConfig(
        num_kv_heads=2,
        query_head_multiplier=2,
        embedding_dim=32,
        projection_dim=8,
        mlp_hidden_dim=64,
        num_decoder_blocks=2,
        vocab_size=VOCABULARY,
        mlp_variant="swiglu",
        tie_embedder_and_logits=False,
    )
    keys = jax.random.split(key)
    model = common.build_llamalike_transformer(config, init_base_rng=keys[0])
    tokens = labels(keys[1], 4, LENGTH + 1, classes=VOCABULARY)
    model, variables = pz.unbind_variables(model, freeze=True)
    params = {v.label: v.value for v in variables}
    frozen = {v.label: v for v in variables}

    def forward(params, tokens):
        import dataclasses

        bound = [dataclasses.replace(frozen[k], value=v) for k, v in params.items()]
        named = pz.nx.wrap(tokens).tag("batch", "seq")
        logits = pz.bind_variables(model, bound, unfreeze_as_copy=True)(
            named, token_positions=pz.nx.arange("seq", tokens.shape[1])
        )
        return logits.unwrap("batch", "seq", "vocabulary")

    return next_token(forward), params, (tokens,)
