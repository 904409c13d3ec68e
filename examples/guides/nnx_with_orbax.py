"""Flax NNX and Orbax: save and resume a module, its optimizer and the state of mpx."""

import tempfile

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
from flax import nnx

import mpx.nnx

images = jax.random.normal(jax.random.key(1), (32, 64))


class Model(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(64, 32, rngs=rngs)
        self.norm = nnx.BatchNorm(32, rngs=rngs)
        self.last = nnx.Linear(32, 64, rngs=rngs)

    def __call__(self, x):
        return self.last(nnx.relu(self.norm(self.first(x))))


@mpx.autocast(recipe=mpx.DelayedScaling(amax_history_len=4))
def loss(model, images):
    return jnp.mean((model(images) - images) ** 2)


@nnx.jit
def step(model, optimizer, scaling, images):
    result = mpx.nnx.value_and_grad(loss, scaling)(model, images)
    mpx.nnx.update(optimizer, model, result.grads, result.finite)
    return result.scaling, result.value


def initial():
    model = Model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(3e-3), wrt=nnx.Param)
    return model, optimizer, mpx.init_scaling(loss, model, images)


model, optimizer, scaling = initial()
for _ in range(4):
    scaling, value = step(model, optimizer, scaling, images)

with tempfile.TemporaryDirectory() as folder, ocp.CheckpointManager(folder) as manager:
    state = {"nnx": nnx.state((model, optimizer)), "scaling": scaling}
    manager.save(4, args=ocp.args.StandardSave(mpx.guard(state)))
    resumed, its_optimizer, fresh = initial()  # in another process
    state = {"nnx": nnx.state((resumed, its_optimizer)), "scaling": fresh}
    shapes = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
    found = manager.restore(4, args=ocp.args.StandardRestore(shapes))
nnx.update((resumed, its_optimizer), found["nnx"])

scaling, value = step(model, optimizer, scaling, images)
_, again = step(resumed, its_optimizer, found["scaling"], images)
assert value == again
print(f"loss {value:.3f} after step 5, and {again:.3f} resumed from step 4")
