"""Serving: weights of a run, as its products multiply them, in an engine's files."""

import json
import pathlib
import tempfile

import jax
import jax.numpy as jnp
import optax

import mpx

optimizer = optax.adamw(1e-2)
recipe = mpx.DelayedScaling(amax_history_len=8)
keys = jax.random.split(jax.random.key(0), 4)
model = {
    "blocks": {"up": 0.1 * jax.random.normal(keys[0], (4, 64, 256))},
    "head": 0.1 * jax.random.normal(keys[1], (64, 16)),
}
model["blocks"]["down"] = 0.1 * jax.random.normal(keys[2], (4, 256, 64))
opt_state = optimizer.init(model)
x = jax.random.normal(keys[3], (32, 64))
y = jnp.argmax(x[:, :16], axis=-1)


def network(model, x):
    def block(h, weights):
        return h + jax.nn.gelu(h @ weights["up"]) @ weights["down"], None

    h, _ = jax.lax.scan(block, x, model["blocks"])
    return h @ model["head"]


@mpx.autocast(recipe=recipe)
def loss(model, x, y):
    logits = network(model, x)
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


@jax.jit
def step(model, opt_state, scaling):
    result = mpx.filter_value_and_grad(loss, scaling)(model, x, y)
    return mpx.optimizer_step(model, optimizer, opt_state, result)


scaling = mpx.init_scaling(loss, model, x, y)
for _ in range(20):
    model, opt_state, scaling = step(model, opt_state, scaling)
print(f"loss {mpx.inference(loss, scaling)(model, x, y):.2f}")

predict = mpx.autocast(network, recipe=recipe)
engine = "model.layers.{}.mlp.%s_proj.weight"
names = {f"['blocks']['{name}']": engine % name for name in ("up", "down")}
folder = pathlib.Path(tempfile.mkdtemp()) / "model"
print(mpx.export(predict, scaling, folder, names=names)(model, x))
config = json.loads((folder / "config.json").read_text())["quantization_config"]
assert config["config_groups"]["group_0"]["input_activations"]["dynamic"] is False
served = mpx.inference(predict, scaling)(mpx.import_weights(folder, model), x)
assert jnp.array_equal(served, mpx.inference(predict, scaling)(model, x))
