"""FP8 from nothing to evaluation: check, train, evaluate, compare with bfloat16."""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

import mpx

optimizer = optax.adamw(3e-3)
cross_entropy = optax.softmax_cross_entropy_with_integer_labels


def loss(model, images, labels):
    return jnp.mean(cross_entropy(jax.vmap(model)(images), labels))


model = eqx.nn.MLP(64, 10, width_size=64, depth=2, key=jax.random.key(0))
keys = jax.random.split(jax.random.key(1))
train, test = (jax.random.normal(key, (256, 64)) for key in keys)
label = lambda images: jnp.argmax(images[:, :10], axis=-1)  # noqa: E731


# 1. Is it on, and for which products? The report says so before anything is trained.
in_fp8 = mpx.autocast(loss, recipe=mpx.DelayedScaling())
report = mpx.explain(in_fp8)(model, train, label(train))
quantized = {
    operation.parameters for operation in report.operations if operation.is_low
}
# The final projection stays in half precision: it decides the loss, and costs little.
assert quantized == {("layers[0].weight",), ("layers[1].weight",)}
# On a GPU, `mpx.autocast(loss, recipe=..., strict=True)` raises where a product does
# not run on its FP8 units.


# 2. Train: the step of every other precision; `scaling` holds the histories.
@eqx.filter_jit
def step(loss, model, opt_state, scaling, *batch):
    result = mpx.filter_value_and_grad(loss, scaling)(model, *batch)
    return mpx.optimizer_step(model, optimizer, opt_state, result)


def fit(loss):
    opt_state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
    scaling = mpx.init_scaling(loss, model, train, label(train))
    state = model, opt_state, scaling
    for _ in range(30):
        state = step(loss, *state, train, label(train))
    return state[0], state[2]


# 3. Evaluate with the scales that the training has found, and compare.
trained, scaling = fit(in_fp8)
eight = mpx.inference(in_fp8, scaling)(trained, test, label(test))
half = mpx.autocast(loss)
sixteen = half(fit(half)[0], test, label(test))
print(f"test loss: FP8 {eight:.3f}, bfloat16 {sixteen:.3f}")
assert abs(eight - sixteen) < 0.05 * sixteen
