"""Four Over Six: NVFP4 whose blocks end at 6 or at 4, by their squared error."""

import dataclasses

import jax
import jax.numpy as jnp

import mpx
from mpx.quantization import Quantizer, Role, TensorQuantizer, quantize_dequantize


@dataclasses.dataclass(frozen=True)
class FourOverSix(Quantizer):
    def range_of(self, blocks, amax):
        top = jnp.clip(jnp.nan_to_num(amax.max()), 1e-30, 1e30)

        def error(ranges):  # of scales in E4M3
            e4m3 = quantize_dequantize(ranges, TensorQuantizer(), scale=256 / top)
            return jnp.sum((self.rounded(blocks, e4m3) - blocks) ** 2, axis=-1)

        return jnp.where(error(1.5 * amax) < error(amax), 1.5 * amax, amax)


nvfp4 = mpx.NVFP4BlockScaling()


def qfactory(role, leg):
    options = dataclasses.asdict(nvfp4.quantizer(role, leg=leg))
    return FourOverSix(**options | {"largest_scale": 256.0})  # 1.5 x 256 <= 448


x = jax.random.normal(jax.random.key(0), (512, 512))
recipe = mpx.CustomRecipe(qfactory)
for one in nvfp4, recipe:
    rounded = quantize_dequantize(x, one.quantizer(Role.INPUT))
    print(f"mean squared error {jnp.mean((rounded - x) ** 2):.5f}")

loss = mpx.autocast(lambda w, x: jnp.mean((x @ w) ** 2), recipe=recipe)
value, grads = jax.value_and_grad(loss)(jnp.eye(512), x)
print(f"loss {value:.3f}")
