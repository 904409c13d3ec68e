"""Recipes: which quantizer a role gets, defaults, validation, and delayed scaling."""

import dataclasses
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpx
from mpx.quantization import (
    AbstractQuantizer,
    AbstractRecipe,
    BlockQuantizer,
    DelayedScalingState,
    MXFP8Quantizer,
    NVFP4Quantizer,
    Role,
    TensorQuantizer,
)
from tests import helpers
from tests.helpers import Case, type_error, unchecked_annotations, value_error
from tests.reference import low_precision as reference

E4M3, E5M2 = mpx.Format.E4M3, mpx.Format.E5M2
INPUT, WEIGHT, GRADIENT = Role
ROLES = [(INPUT, False), (WEIGHT, False), (GRADIENT, False), (INPUT, True)]
ROLES += [(GRADIENT, True)]


def factory(role: Role, for_wgrad: bool) -> AbstractQuantizer | None:
    return None if for_wgrad else TensorQuantizer()


STOCHASTIC = NVFP4Quantizer(stochastic_rounding=True)
ROTATED = NVFP4Quantizer(hadamard=True)
# Each recipe with the quantizers of (x, w, g, x for dw, g for dw).
RECIPES = {
    mpx.DelayedScaling(): [
        TensorQuantizer(format) for format in (E4M3, E4M3, E5M2, E4M3, E5M2)
    ],
    mpx.Float8CurrentScaling(): [
        TensorQuantizer(format) for format in (E4M3, E4M3, E5M2, E4M3, E5M2)
    ],
    mpx.Float8CurrentScaling(E4M3, use_power_2_scales=True, amax_epsilon=1e-9): [
        TensorQuantizer(power_of_two_scales=True, amax_epsilon=1e-9)
    ]
    * 5,
    mpx.Float8BlockScaling(): [
        BlockQuantizer(block_dimensions=dimensions) for dimensions in (1, 2, 1, 1, 1)
    ],
    mpx.Float8BlockScaling(True, w_block_scaling_dim=1, grad_block_scaling_dim=2): [
        BlockQuantizer(block_dimensions=dimensions, power_of_two_scales=False)
        for dimensions in (1, 1, 2, 1, 2)
    ],
    mpx.MXFP8BlockScaling(): [MXFP8Quantizer()] * 5,
    mpx.MXFP8BlockScaling(mpx.Format.HYBRID): [
        MXFP8Quantizer(format) for format in (E4M3, E4M3, E5M2, E4M3, E5M2)
    ],
    mpx.NVFP4BlockScaling(): [
        NVFP4Quantizer(),
        NVFP4Quantizer(2),
        STOCHASTIC,
        ROTATED,
        dataclasses.replace(ROTATED, stochastic_rounding=True),
    ],
    mpx.NVFP4BlockScaling(
        disable_rht=True, disable_stochastic_rounding=True, disable_2d_quantization=True
    ): [NVFP4Quantizer()] * 5,
    mpx.CustomRecipe(factory): [TensorQuantizer()] * 3 + [None] * 2,
}


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: type(r).__name__)
def test_each_role_has_its_quantizer(recipe: AbstractRecipe):
    found = [recipe.quantizer(role, for_wgrad=wgrad) for role, wgrad in ROLES]
    assert found == RECIPES[recipe]
    assert pickle.loads(pickle.dumps(recipe)) == recipe
    with pytest.raises(dataclasses.FrozenInstanceError):
        recipe.backward_override = None  # pyright: ignore
    with pytest.raises(ValueError, match="Omit `for_wgrad`"):
        recipe.quantizer(WEIGHT, for_wgrad=True)


@pytest.mark.parametrize("override", ["high_precision", "dequantized"])
@pytest.mark.parametrize(
    "recipe",
    [recipe for recipe in RECIPES if not isinstance(recipe, mpx.DelayedScaling)],
    ids=lambda r: type(r).__name__,
)
def test_an_overridden_backward_pass_quantizes_nothing(recipe, override: str):
    changed = dataclasses.replace(recipe, backward_override=override)
    found = [changed.quantizer(role, for_wgrad=wgrad) for role, wgrad in ROLES]
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
ALGORITHMS = {
    "max": ("max", "max"),
    "most_recent": ("most_recent", "most_recent"),
    "callable": (
        lambda h: (h[0] + h[-1]) / 2,
        lambda h: (h[0] + h[-1]) / np.float32(2),
    ),
}


@pytest.mark.parametrize(
    ("algorithm", "role", "length", "margin"),
    [
        ("max", INPUT, 4, 0),
        ("max", GRADIENT, 1024, 0),
        ("most_recent", GRADIENT, 7, 1),
        ("most_recent", WEIGHT, 1, -2),
        ("callable", INPUT, 4, 1),
    ],
)
def test_forty_steps_of_delayed_scaling(algorithm, role, length: int, margin: int):
    ours, theirs = ALGORITHMS[algorithm]
    recipe = mpx.DelayedScaling(margin, amax_history_len=length, amax_compute_algo=ours)
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
                history, scale, amax, largest, margin, theirs
            )
        expected = DelayedScalingState(jnp.asarray(history), jnp.asarray(scale))
        now = jax.tree.map(lambda a: a[step], found)  # noqa: B023
        np.testing.assert_array_equal(now.scale, scale)
        np.testing.assert_array_equal(now.amax_history, history)
        if length == 4:
            eager = recipe.update(eager, jnp.asarray(amax), role)
            helpers.assert_same_bits(eager.scale, expected.scale)
    scales = np.asarray(found.scale)
    assert len(np.unique(scales)) > 1 and np.isfinite(scales).all()


def test_stacked_states_are_updated_by_vmap():
    recipe = mpx.DelayedScaling(amax_history_len=3)
    states = jax.vmap(lambda _: recipe.init())(jnp.arange(2))
    amaxes = jnp.array([7.0, 0.0])
    states = jax.vmap(lambda s, a: recipe.update(s, a, INPUT))(states, amaxes)
    assert states.scale.tolist() == [64.0, 1.0]
    assert states.amax_history.tolist() == [[0.0, 0.0, 7.0], [0.0, 0.0, 0.0]]


CASES = [
    value_error(
        "pure E5M2",
        lambda: mpx.DelayedScaling(fp8_format=E5M2),
        "`mpx.Format.E4M3` or `mpx.Format.HYBRID`; got <Format.E5M2>: 2 bits",
    ),
    value_error(
        "4 bits in FP8",
        lambda: mpx.MXFP8BlockScaling(mpx.Format.E2M1),
        "use `mpx.NVFP4BlockScaling`",
    ),
    type_error(
        "format as text",
        lambda: mpx.Float8CurrentScaling("HYBRID"),  # pyright: ignore
        "`fp8_format` of .*Float8CurrentScaling` must be a `mpx.Format`; got 'HYBRID'",
    ),
    value_error(
        "8 bits in NVFP4",
        lambda: mpx.NVFP4BlockScaling(fp4_format=E4M3),
        "must be `mpx.Format.E2M1`; got <Format.E4M3>",
    ),
    value_error(
        "2-D by 2-D",
        lambda: mpx.Float8BlockScaling(x_block_scaling_dim=2),
        "Set at most one",
    ),
    value_error(
        "3-D",
        lambda: mpx.Float8BlockScaling(w_block_scaling_dim=3),
        "`w_block_scaling_dim` of `mpx.Float8BlockScaling` must be 1 or 2; got 3",
    ),
    value_error(
        "override",
        lambda: mpx.MXFP8BlockScaling(backward_override="bf16"),
        "None, 'high_precision' or 'dequantized'; got 'bf16'",
    ),
    value_error(
        "override of delayed scaling",
        lambda: mpx.DelayedScaling(backward_override="dequantized"),
        "`backward_override` of `mpx.DelayedScaling` must be None",
    ),
    value_error(
        "no history",
        lambda: mpx.DelayedScaling(amax_history_len=0),
        "`amax_history_len` of `mpx.DelayedScaling` must be at least 1; got 0",
    ),
    type_error(
        "margin",
        lambda: mpx.DelayedScaling(margin=0.5),  # pyright: ignore
        "`margin` of `mpx.DelayedScaling` must be an integer; got 0.5",
    ),
    type_error("a true margin", lambda: mpx.DelayedScaling(True), "got True"),
    type_error(
        "a true epsilon",
        lambda: mpx.Float8CurrentScaling(amax_epsilon=True),
        "`amax_epsilon` of `mpx.Float8CurrentScaling` must be a number; got True",
    ),
    value_error(
        "amaxes of pieces",
        lambda: mpx.DelayedScaling(reduce_amax=False),
        "`reduce_amax` of `mpx.DelayedScaling` must be True.*got False. Omit it",
    ),
    type_error(
        "reduce_amax of text",
        lambda: mpx.DelayedScaling(reduce_amax="yes"),  # pyright: ignore
        "`reduce_amax` of `mpx.DelayedScaling` must be True or False; got 'yes'",
    ),
    value_error("large margin", lambda: mpx.DelayedScaling(99), "-64 and 64"),
    value_error(
        "algorithm",
        lambda: mpx.DelayedScaling(amax_compute_algo="mean"),
        "'max', 'most_recent' or a function.*got 'mean'",
    ),
    value_error(
        "algorithm that gives no number",
        lambda: _update(mpx.DelayedScaling(amax_compute_algo=lambda h: h)),
        r"`amax_compute_algo` must be a scalar; got shape \(1024,\)",
    ),
    value_error(
        "amaxes",
        lambda: _update(mpx.DelayedScaling(), jnp.ones(2)),
        r"a scalar; got shape \(2,\). Use `jax.vmap`",
    ),
    type_error(
        "flag",
        lambda: mpx.NVFP4BlockScaling(disable_rht="yes"),  # pyright: ignore
        "`disable_rht` of `mpx.NVFP4BlockScaling` must be True or False",
    ),
    type_error(
        "role as text",
        lambda: mpx.MXFP8BlockScaling().quantizer("input"),  # pyright: ignore
        "a role such as `mpx.quantization.Role.INPUT`; got 'input'",
    ),
    type_error(
        "no factory",
        lambda: mpx.CustomRecipe(MXFP8Quantizer()),  # pyright: ignore
        "a function from role to quantizer; got MXFP8Quantizer",
    ),
    type_error(
        "factory of formats",
        lambda: mpx.CustomRecipe(lambda *_: E4M3).quantizer(INPUT),  # pyright: ignore
        "or None; got <Format.E4M3> for <Role.INPUT>",
    ),
]


def _update(recipe: mpx.DelayedScaling, amax=None):
    amax = jnp.float32(1) if amax is None else amax
    return recipe.update(recipe.init(), amax, INPUT)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.test_id)
def test_errors_say_what_to_do(case: Case):
    with unchecked_annotations(), pytest.raises(case.error, match=case.match):
        case.call()
