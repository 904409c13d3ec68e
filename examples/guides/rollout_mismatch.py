"""How far a rollout is from its trainer: two compiled programs of the same policy."""

import jax
import jax.numpy as jnp

import mpx
from examples.guides.decoder import LENGTH, WORDS, new_model, rollout
from examples.guides.with_reinforcement import log_prob, loss

ROWS = {  # the precision of the trainer; the dtype to which an engine casts everything
    "float16, engine": ({"dtype": "float16"}, "float16"),
    "bfloat16, engine": ({"dtype": "bfloat16"}, "bfloat16"),
    "float16, mpx": ({"dtype": "float16"}, None),
    "bfloat16, mpx": ({"dtype": "bfloat16"}, None),
    "FP8, mpx": ({"recipe": mpx.Float8CurrentScaling()}, None),
}
SEEDS, BATCH = 3, 64


def programs(options, dtype):
    trainer = mpx.autocast(loss, **options)

    @jax.jit
    def trained(model, scaling, *batch):
        gradient = mpx.value_and_grad(trainer, scaling, has_aux=True)
        result = gradient(model, *batch)
        return result.aux["logits"], result.grads  # kept, so that remat is

    @jax.jit
    def rolled(model, scaling, tokens):
        func = mpx.inference(mpx.autocast(rollout, **options), scaling)
        func = func if dtype is None else mpx.cast_function(rollout, dtype, "float32")
        return func(model, tokens, jax.random.key(0))["logits"]

    return trainer, trained, rolled


def mismatch(options, dtype):
    """Returns the mean KL, the mean |log ratio| and the largest ratio, over seeds."""
    trainer, trained, rolled = programs(options, dtype)
    found, zeros = [], jnp.zeros((BATCH, LENGTH - 1))
    for key in jax.random.split(jax.random.key(0), SEEDS):
        model = new_model(key)
        tokens = jax.random.randint(key, (BATCH, LENGTH), 0, WORDS)
        scaling = mpx.init_scaling(trainer, model, tokens, zeros, zeros)
        a, _ = trained(model, scaling, tokens, zeros, zeros)
        b = rolled(model, scaling, tokens)
        kl = mpx.compare(lambda a, b: a, lambda a, b: b, floor=False)(a, b).kl
        log_ratio = jnp.abs(log_prob(a, tokens) - log_prob(b, tokens))
        found.append([kl.mean(), jnp.mean(log_ratio), jnp.exp(jnp.max(log_ratio))])
    return jnp.mean(jnp.array(found), axis=0)


found = {name: mismatch(*row) for name, row in ROWS.items()}
print("logits of the loss against those of the rollout, per token")
for name, (kl, log_ratio, ratio) in found.items():
    print(f"{name:18} KL {kl:.1e}, mean |log ratio| {log_ratio:.1e}, max {ratio:.3f}")
half, brain, own, _, low = (float(each[0]) for each in found.values())
assert own < half / 10 and 30 < brain / half < 100 and low > 10 * brain
