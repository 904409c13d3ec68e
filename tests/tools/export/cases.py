"""What the tests of `mpx.export` share: recipes, models, and what products multiply."""

import itertools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import mpx
from mpx._program import Probe, is_matmul, probed, scopes
from mpx._tools._inspect import leg_of
from mpx.quantization import Leg, RecipeByLeg

FP8 = mpx.Float8CurrentScaling()
# Of weights: also the last one, which is no output layer here.
EVERY = mpx.Rules(mpx.Rule(mpx.Precision.LOW, primitive="dot_general", parameter="*"))
RECIPES = {
    "current": FP8,
    "power of two": mpx.Float8CurrentScaling(use_power_2_scales=True),
    "per matrix": mpx.Float8CurrentScaling(one_scale_per_matrix=True),
    "delayed": mpx.DelayedScaling(amax_history_len=4),
    "rows": mpx.Float8RowwiseScaling(),
    "blocks": mpx.Float8BlockScaling(),
    "mxfp8": mpx.MXFP8BlockScaling(),
    "nvfp4": mpx.NVFP4BlockScaling(),
    "int8": mpx.Int8CurrentScaling(),
    "half forward": RecipeByLeg(dgrad=FP8, wgrad=FP8),
}
NONE = mpx.NoLossScaling()


def normal(*shape: int, seed: int = 0, dtype: Any = "float32") -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, dtype) / 8


def mlp(model, x):
    return jnp.tanh(x @ model["up"]) @ model["down"]


def loss(model, x):
    return jnp.mean(mlp(model, x) ** 2)


def layers(model, x):
    x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, model["layers"])
    return x @ model["head"]


MLP = {"up": normal(64, 96), "down": normal(96, 32, seed=1)}
LAYERS = {"layers": normal(3, 64, 64), "head": normal(64, 32, seed=1)}
X = normal(8, 64, seed=2) * 8


def low(func: Any, recipe: Any = FP8, dtype: Any = jnp.bfloat16) -> Any:
    return mpx.autocast(func, dtype, recipe=recipe, rules=EVERY)


def scaling_of(func: Any, recipe: Any, model: Any, x: Any = X, steps: int = 3) -> Any:
    """The loss scaling of a run, after some steps if it has a state."""
    of = low(lambda model, x: jnp.mean(func(model, x) ** 2), recipe)
    scaling = mpx.init_scaling(of, model, x)
    step = jax.jit(lambda s, i: mpx.filter_value_and_grad(of, s)(model, x * i))
    for i in range(1, 1 + steps * recipe.has_state):
        scaling = step(scaling, jnp.float32(i)).scaling
    return scaling


class _Operands(Probe):
    """Records the operands of the forward matmuls of quantized products."""

    def __init__(self):
        self._numbers = itertools.count()

    def constant(self, array):
        return None

    def transfer(self, equation, place, operands):
        return [None] * len(equation.outvars)

    def observe(self, equation, place, operands, results):
        leg = leg_of((*place.scopes, *scopes(equation)))
        if not is_matmul(equation) or leg is not Leg.FORWARD:
            return {}
        return {next(self._numbers): [x.array for x in operands[:2]]}


def multiplied(func: Any, scaling: Any, *args: Any) -> list[np.ndarray]:
    """The operands of the quantized products of `mpx.inference`, in float32."""
    arrays, rest = eqx.partition(args, eqx.is_array)
    flat, tree = jax.tree.flatten(arrays)
    call = mpx.inference(func, scaling)
    again = lambda *x: call(*eqx.combine(tree.unflatten(x), rest))  # noqa: E731
    closed = jax.make_jaxpr(again)(*flat)
    run = jax.jit(lambda *x: probed(closed, _Operands(), x, [None] * len(x))[1])
    return [np.asarray(x, np.float32) for x in jax.tree.leaves(run(*flat))]


def is_operand(x: np.ndarray, operands: list[np.ndarray]) -> bool:
    """Whether the numbers are those of an operand, or of a part, in any layout."""
    for one in operands:
        for axes in itertools.permutations(range(one.ndim)) if one.size else ():
            if one.size % x.size == 0:
                parts = one.transpose(axes).reshape(-1, x.size)
                if (parts == x.reshape(-1)).all(axis=1).any():
                    return True
    return False
