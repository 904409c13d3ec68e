"""Recipes: which quantizer a role gets, defaults, and delayed scaling."""

import dataclasses
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpx
from mpx.quantization import (
    AbstractRecipe,
    BlockQuantizer,
    Leg,
    MXFP8Quantizer,
    NVFP4Quantizer,
    Quantizer,
    Role,
    TensorQuantizer,
)
from tests import helpers
from tests.reference import low_precision as reference

E4M3, E5M2 = mpx.Format.E4M3, mpx.Format.E5M2
INPUT, WEIGHT, GRADIENT = Role
ROLES = [(role, None) for role in Role]
ROLES += [(INPUT, Leg.WGRAD), (GRADIENT, Leg.WGRAD)]


def factory(role: Role, leg: Leg) -> Quantizer | None:
    return None if leg is Leg.WGRAD else TensorQuantizer()


HYBRID = (E4M3, E4M3, E5M2, E4M3, E5M2)
STOCHASTIC = NVFP4Quantizer(stochastic_rounding=True)
ROTATED = NVFP4Quantizer(hadamard=True)
BOTH = dataclasses.replace(ROTATED, stochastic_rounding=True)
SCALED = {"use_power_2_scales": True, "amax_epsilon": 1e-9}
OTHER_BLOCKS = {"w_block_scaling_dim": 1, "grad_block_scaling_dim": 2}
PLAIN = {"disable_rht", "disable_stochastic_rounding", "disable_2d_quantization"}
# Each recipe with the quantizers of (x, w, g, x for dw, g for dw).
RECIPES = {
    mpx.DelayedScaling(): [
        Quantizer(format, scale_from="history") for format in HYBRID
    ],
    mpx.Float8CurrentScaling(): [TensorQuantizer(format) for format in HYBRID],
    mpx.Float8CurrentScaling(E4M3, **SCALED): [
        TensorQuantizer(power_of_two_scales=True, amax_epsilon=1e-9)
    ]
    * 5,
    mpx.Float8BlockScaling(): [
        BlockQuantizer(block_dimensions=dimensions) for dimensions in (1, 2, 1, 1, 1)
    ],
    mpx.Float8BlockScaling(True, **OTHER_BLOCKS): [
        BlockQuantizer(block_dimensions=dimensions, power_of_two_scales=False)
        for dimensions in (1, 1, 2, 1, 2)
    ],
    mpx.MXFP8BlockScaling(): [MXFP8Quantizer()] * 5,
    mpx.MXFP8BlockScaling(mpx.Format.HYBRID): [MXFP8Quantizer(f) for f in HYBRID],
    mpx.NVFP4BlockScaling(): [
        NVFP4Quantizer(),
        NVFP4Quantizer(2),
        STOCHASTIC,
        ROTATED,
        BOTH,
    ],
    mpx.NVFP4BlockScaling(**dict.fromkeys(PLAIN, True)): [NVFP4Quantizer()] * 5,
    mpx.CustomRecipe(factory): [TensorQuantizer()] * 3 + [None] * 2,
}


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: type(r).__name__)
def test_each_role_has_its_quantizer(recipe: AbstractRecipe):
    found = [recipe.quantizer(role, leg=leg) for role, leg in ROLES]
    assert found == RECIPES[recipe]
    assert pickle.loads(pickle.dumps(recipe)) == recipe
    with pytest.raises(dataclasses.FrozenInstanceError):
        recipe.backward_override = None  # pyright: ignore
    with pytest.raises(ValueError, match="Omit `leg`"):
        recipe.quantizer(WEIGHT, leg=Leg.WGRAD)


@pytest.mark.parametrize("override", ["high_precision", "dequantized"])
@pytest.mark.parametrize(
    "recipe",
    [recipe for recipe in RECIPES if not isinstance(recipe, mpx.DelayedScaling)],
    ids=lambda r: type(r).__name__,
)
def test_an_overridden_backward_pass_quantizes_nothing(recipe, override: str):
    changed = dataclasses.replace(recipe, backward_override=override)
    found = [changed.quantizer(role, leg=leg) for role, leg in ROLES]
    assert found == [*RECIPES[recipe][:2], None, None, None]


def test_defaults_are_transformer_engine_s():
    recipe = mpx.DelayedScaling()
    assert (recipe.margin, recipe.amax_history_len) == (0, 1024)
    assert (recipe.amax_compute_algo, recipe.fp8_format) == ("max", mpx.Format.HYBRID)
    assert mpx.Float8CurrentScaling().fp8_format is mpx.Format.HYBRID
    assert mpx.Float8BlockScaling().fp8_format is mpx.MXFP8BlockScaling().fp8_format
    assert mpx.MXFP8BlockScaling().fp8_format is E4M3


# 40 steps with zeros, infinities, NaN, and the smallest and largest numbers.
AMAXES = np.abs(np.random.default_rng(0).standard_normal(40)).astype(np.float32)
AMAXES[[2, 3, 30]] = 0, np.inf, 0
AMAXES[[8, 9, 10, 11]] = 1e-38, 1e-45, 3e38, 2.0**-126
AMAXES[[20, 33]] = np.nan, np.inf


def middle(history):
    return (history[0] + history[-1]) / np.float32(2)


@pytest.mark.parametrize(
    ("algorithm", "role", "length", "margin"),
    [
        ("max", INPUT, 4, 0),
        ("max", GRADIENT, 1024, 0),
        ("most_recent", GRADIENT, 7, 1),
        ("most_recent", WEIGHT, 1, -2),
        (middle, INPUT, 4, 1),
    ],
)
def test_forty_steps_of_delayed_scaling(algorithm, role, length: int, margin: int):
    options = {"amax_history_len": length, "amax_compute_algo": algorithm}
    recipe = mpx.DelayedScaling(margin, **options)
    largest = 57344.0 if role is GRADIENT else 448.0

    @jax.jit
    def run(amaxes):
        def body(state, amax):
            state = recipe.update(state, amax, role)
            return state, state

        return jax.lax.scan(body, recipe.init(), amaxes)[1]

    found = run(jnp.asarray(AMAXES))
    eager = recipe.init()
    history, scale = np.zeros(length, np.float32), np.float32(1)
    for step, amax in enumerate(AMAXES):
        with np.errstate(over="ignore", invalid="ignore"):
            history, scale = reference.delayed_update(
                history, scale, amax, largest, margin, algorithm
            )
        now = jax.tree.map(lambda a: a[step], found)  # noqa: B023
        np.testing.assert_array_equal(now.scale, scale)
        np.testing.assert_array_equal(now.amax_history, history)
        if length == 4:
            eager = recipe.update(eager, jnp.asarray(amax), role)
            helpers.assert_same_bits(eager.scale, jnp.asarray(scale))
    scales = np.asarray(found.scale)
    assert len(np.unique(scales)) > 1 and np.isfinite(scales).all()


def test_stacked_states_are_updated_by_vmap():
    recipe = mpx.DelayedScaling(amax_history_len=3)
    states = jax.vmap(lambda _: recipe.init())(jnp.arange(2))
    amaxes = jnp.array([7.0, 0.0])
    states = jax.vmap(lambda s, a: recipe.update(s, a, INPUT))(states, amaxes)
    assert states.scale.tolist() == [64.0, 1.0]
    assert states.amax_history.tolist() == [[0.0, 0.0, 7.0], [0.0, 0.0, 0.0]]
