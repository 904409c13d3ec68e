"""Transformers: its last Flax models."""

import jax
import jax.numpy as jnp

from ..data import cross_entropy, labels, normal
from ..record import client

SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}


def language_loss(key, model):
    """The loss of a language model, without dropout."""
    tokens = labels(key, 4, 16, classes=64)

    def loss(params, tokens):
        logits = model(input_ids=tokens, params=params, train=False).logits
        return cross_entropy(logits[:, :-1], tokens[:, 1:]), logits

    return loss, model.params, (tokens,)


@client(linear=True)
def transformers_gpt2(key):
    from transformers import FlaxGPT2LMHeadModel, GPT2Config

    config = GPT2Config(
        vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=4, n_inner=64
    )
    return language_loss(key, FlaxGPT2LMHeadModel(config))


@client(linear=True)
def transformers_bert(key):
    from transformers import BertConfig, FlaxBertForMaskedLM

    config = BertConfig(vocab_size=64, max_position_embeddings=32, **SMALL)
    return language_loss(key, FlaxBertForMaskedLM(config))


@client(linear=True)
def transformers_llama(key):
    from transformers import FlaxLlamaForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=64, max_position_embeddings=32, num_key_value_heads=4, **SMALL
    )
    return language_loss(key, FlaxLlamaForCausalLM(config))


@client(linear=True)
def transformers_t5(key):
    """Encoder and decoder, with relative positions."""
    from transformers import FlaxT5ForConditionalGeneration, T5Config

    config = T5Config(
        vocab_size=64,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=1,
        num_heads=4,
        decoder_start_token_id=0,
        dropout_rate=0.0,
    )
    model = FlaxT5ForConditionalGeneration(config)
    keys = jax.random.split(key)
    x, y = labels(keys[0], 4, 12, classes=64), labels(keys[1], 4, 10, classes=64)

    def loss(params, x, y):
        shifted = jnp.pad(y[:, :-1], ((0, 0), (1, 0)))
        logits = model(
            input_ids=x, decoder_input_ids=shifted, params=params, train=False
        ).logits
        return cross_entropy(logits, y), logits

    return loss, model.params, (x, y)


@client(linear=True)
def transformers_vit(key):
    from transformers import FlaxViTForImageClassification, ViTConfig

    config = ViTConfig(image_size=16, patch_size=4, num_labels=8, **SMALL)
    model = FlaxViTForImageClassification(config)
    keys = jax.random.split(key)
    x, y = normal(keys[0], 4, 3, 16, 16), labels(keys[1], 4, classes=8)

    def loss(params, x, y):
        logits = model(pixel_values=x, params=params, train=False).logits
        return cross_entropy(logits, y), logits

    return loss, model.params, (x, y)
