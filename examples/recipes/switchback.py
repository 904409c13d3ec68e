"""SwitchBack: int8 forward and for the input's gradient, 16 bits for the weight's."""

import jax
import jax.numpy as jnp

import mpx
from mpx.quantization import Quantizer, RecipeByLeg, Role


def rows_in(format):
    """Inputs and gradients have a scale for each row, weights one for all."""

    def qfactory(role, leg):
        return Quantizer(format, 0 if role is Role.WEIGHT else 1)

    return mpx.CustomRecipe(qfactory)


int8 = rows_in(mpx.Format.INT8)
switchback = RecipeByLeg(forward=int8, dgrad=int8, wgrad=None)

# torchao's "rowwise_with_gw_hp": forward, the weight has a scale for each column, too.
fp8 = rows_in(mpx.Format.E4M3)
rowwise = RecipeByLeg(forward=mpx.Float8RowwiseScaling(), dgrad=fp8, wgrad=None)


def loss(weights, x):
    return jnp.mean((jnp.tanh(x @ weights[0]) @ weights[1]) ** 2)


keys = jax.random.split(jax.random.key(0), 3)
weights = [jax.random.normal(k, (128, 128)) / 11 for k in keys[:2]]
x = jax.random.normal(keys[2], (64, 128))
for recipe, device in (switchback, "tpu v5e"), (rowwise, "H100"):
    on_device = mpx.autocast(loss, recipe=recipe, target=device, strict=True)
    report = mpx.explain(on_device)(weights, x)
    print(*{one.reason for one in report.operations if one.is_low}, sep="\n")
    value, grads = jax.value_and_grad(on_device)(weights, x)  # here emulated
    print(f"loss {value:.4f}")
