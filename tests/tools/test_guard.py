"""What is saved is good: `mpx.guard` before a checkpoint."""

import dataclasses
from decimal import Decimal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import mpx

from ..helpers import unchecked_annotations

# Optax and Orbax compute with JAX's own promotion.
pytestmark = pytest.mark.third_party

RECIPE = mpx.DelayedScaling(amax_history_len=4)
MESH = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
BAD = {"nan": np.nan, "inf": np.inf, "-inf": -np.inf}


class Model(eqx.Module):
    wide: jax.Array
    half: jax.Array
    brain: jax.Array
    wave: jax.Array
    stored: mpx.quantization.StoredWeight
    name: str = eqx.field(static=True, default="model")

    def __call__(self, x):
        return x @ self.wide


def loss(model, x):
    return jnp.sum(model(x) ** 2)


@pytest.fixture(scope="module")
def good():
    @jax.jit
    def made(keys):
        normal = jax.random.normal
        weights = {"w": normal(keys[4], (32, 8))}
        model = Model(
            normal(keys[0], (16, 8)),
            normal(keys[1], (8, 4)).astype(jnp.float16),
            normal(keys[2], (8, 4)).astype(jnp.bfloat16),
            jax.lax.complex(jnp.ones(4), jnp.ones(4)),
            mpx.quantization.quantize_weights(weights)["w"],
        )
        return model, normal(keys[3], (4, 16))

    model, x = made(jax.random.split(jax.random.key(0), 5))
    weights, optimizer = {"wide": model.wide}, optax.adam(1e-3)
    opt_state = optimizer.init(weights)
    loss = mpx.autocast(lambda w, x: jnp.sum((x @ w["wide"]) ** 2), recipe=RECIPE)
    scaling = mpx.init_scaling(loss, weights, x)

    @jax.jit
    def step(weights, opt_state, scaling):
        result = mpx.value_and_grad(loss, scaling)(weights, x)
        return mpx.optimizer_step(weights, optimizer, opt_state, result)

    for _ in range(3):
        weights, opt_state, scaling = step(weights, opt_state, scaling)
    dynamic = mpx.DynamicLossScaling().adjust(True).adjust(False)
    state = {"model": model, "opt": opt_state, "scaling": scaling, "dynamic": dynamic}
    return {**state, "step": 3, "seconds": 0.5, "key": jax.random.key(1)}


def spoil(array, value):
    bad = np.array(array)
    bad.flat[-1] = value
    return jnp.asarray(bad)


def replace(state, where, new):
    return eqx.tree_at(where, state, new(where(state)), is_leaf=lambda x: x is None)


PLACES = {
    "model.wide": lambda s: s["model"].wide,
    "model.half": lambda s: s["model"].half,
    "model.brain": lambda s: s["model"].brain,
    "model.wave": lambda s: s["model"].wave,
    "model.stored": lambda s: s["model"].stored.quantized.inverse_scale,
    "opt.mu": lambda s: s["opt"][0].mu["wide"],
    "opt.nu": lambda s: s["opt"][0].nu["wide"],
    "scaling.amax_history": lambda s: s["scaling"].scales[0].amax_history,
    "scaling.scale": lambda s: s["scaling"].scales[0].scale,
    "scaling.amaxes": lambda s: s["scaling"].amaxes[0],
    "dynamic.loss_scaling": lambda s: s["dynamic"].loss_scaling,
    "dynamic.max_loss_scaling": lambda s: s["dynamic"].max_loss_scaling,
}

_HISTORY = PLACES["scaling.amax_history"]
_SCALE = PLACES["scaling.scale"]
_LOSS_SCALE = PLACES["dynamic.loss_scaling"]


def _dynamic(name):
    return lambda s: getattr(s["dynamic"], name)


def _record(name):
    return lambda s: getattr(s["dynamic"].record, name)


# What is finite, and what no run reaches.
IMPOSSIBLE = {
    "a negative amax": (_HISTORY, lambda h: h.at[0, 0, -1].set(-1.0)),
    "a scale of 0": (_SCALE, jnp.zeros_like),
    "a negative scale": (_SCALE, jnp.negative),
    "a scale beyond 2^126": (_SCALE, lambda s: jnp.full_like(s, 2.0**127)),
    "a scale too large for its newest amax": (_SCALE, lambda s: 2 * s),
    "a loss scale of 0": (_LOSS_SCALE, jnp.zeros_like),
    "a negative loss scale": (_LOSS_SCALE, jnp.negative),
    "a loss scale above its cap": (_LOSS_SCALE, lambda s: jnp.full_like(s, 2.0**30)),
    "more skipped than made": (_record("skipped"), lambda n: n + 100),
    "a negative number of steps": (
        lambda s: s["scaling"].loss.record.steps,
        lambda n: n - 100,
    ),
    "a good step to come": (_record("last_finite"), lambda n: n + 7),
    "a negative count of good steps": (_dynamic("counter"), lambda n: n - 9),
}


def divided(state):
    def put(leaf):
        spec = P("data", "model") if leaf.shape == (16, 8) else P()
        return jax.device_put(leaf, NamedSharding(MESH, spec))

    return jax.tree.map(lambda x: put(x) if eqx.is_array(x) else x, state)


@pytest.fixture(scope="module")
def save(good, tmp_path_factory):
    """Saves a state, guarded; returns the steps that are on the disk."""
    folder = tmp_path_factory.mktemp("checkpoints")
    options = ocp.CheckpointManagerOptions(enable_async_checkpointing=False)
    with ocp.CheckpointManager(folder, options=options) as manager:
        step = 0

        def save(state):
            nonlocal step
            step += 1
            arrays = eqx.filter(mpx.guard(state), eqx.is_inexact_array)
            manager.save(step, args=ocp.args.StandardSave(arrays))

        save(good)
        assert manager.all_steps() == [1]
        yield save, manager.all_steps


POISONED = [
    *[(p, kind, False) for p in PLACES for kind in BAD],
    *[(p, kind, True) for p in ("model.wide", "opt.nu") for kind in BAD],
    *[(p, "nan", True) for p in ("model.half", "scaling.amaxes", "model.stored")],
    *[(p, "", many) for p in IMPOSSIBLE for many in (False, True)],
]


assert len(POISONED) >= 60


@pytest.mark.parametrize(("what", "kind", "many"), POISONED)
def test_a_poisoned_state_is_not_saved_and_its_leaf_named(good, save, what, kind, many):
    save, steps = save
    if kind:
        state = replace(good, PLACES[what], lambda x: spoil(x, BAD[kind]))
        top, _, name = what.partition(".")
        said = rf"`\['{top}'\].*{name}.*` \(1 {'NaN' if kind == 'nan' else 'infinite'}"
    else:
        where, new = IMPOSSIBLE[what]
        state, said = replace(good, where, new), r"No run reaches it: `\['(dyn|scal)"
    with pytest.raises(FloatingPointError, match=said):
        save(divided(state) if many else state)
    assert steps() == [1]


@pytest.mark.parametrize("many", [False, True])
def test_a_good_state_is_given_back_as_it_is(good, many):
    state = divided(good) if many else good
    assert mpx.guard(state) is state


def test_states_before_the_first_step_may_be_saved():
    weights = {"w": jnp.ones((4, 4))}

    def first(recipe):
        function = mpx.autocast(lambda w, x: jnp.sum(x @ w["w"]), recipe=recipe)
        return mpx.init_scaling(function, weights, jnp.ones((2, 4)))

    mpx.guard([first(RECIPE), first(dataclasses.replace(RECIPE, warm_start=True))])
    mpx.guard([mpx.NoLossScaling(), mpx.StaticLossScaling(8.0), None, "text", ()])
    mpx.guard(mpx.skip_nonfinite(optax.sgd(1.0)).init(weights))


def test_what_a_run_reaches_may_be_saved_at_every_step(good):
    state, adjusted = good["scaling"], jax.jit(lambda state: state.adjust(True))
    for amax in (3.0, 0.0, 1e-30, 1e30, 0.0, 0.0, 0.0, 0.0, 2.0**-140, 7.0, 1e38):
        amaxes = tuple(jnp.asarray(np.full_like(a, amax)) for a in state.amaxes)
        state = adjusted(dataclasses.replace(state, amaxes=amaxes))
        mpx.guard(state)


def test_numbers_of_the_host_are_looked_at():
    assert mpx.guard(np.ones(3)) is not None
    for bad in (np.array([1, np.nan]), np.float32(np.inf), float("nan"), 1j * np.inf):
        with pytest.raises(FloatingPointError, match=r"`\['x'\]` \(1 "):
            mpx.guard({"x": bad})


RECORDS = np.array([(np.nan, 1), (0.0, 2)], [("loss", "f4"), ("step", "i4")])


def _eight_bits():
    return jnp.array([1.0, jnp.nan]).astype(jnp.float8_e4m3fn)


@pytest.mark.parametrize(
    "leaf",
    [
        np.array([1.0, np.nan, "text", None], object),
        np.array([np.array([np.nan]), {}, 3], object),
        RECORDS,
        RECORDS[0],
        np.array([RECORDS[0], 1.0], object),
        Decimal("nan"),
        np.float64("nan"),
        np.array([np.nan], np.longdouble),
        lambda: jax.new_ref(jnp.array([1.0, jnp.nan])),
        _eight_bits,
    ],
    ids=[*"0123456", "longdouble", "reference", "float8"],
)
def test_nan_in_objects_records_references_and_8_bits_is_found(leaf):
    leaf = leaf() if callable(leaf) else leaf
    with pytest.raises(FloatingPointError, match=r"`\['x'\]` \(1 NaN of "):
        mpx.guard({"x": leaf})


def test_objects_records_and_references_without_nan_may_be_saved():
    mpx.guard([np.array([1.0, "text", None], object), RECORDS[1], Decimal(1)])
    mpx.guard(jax.new_ref(jnp.ones(2)))


@pytest.mark.parametrize("allow", ["", [""], ()])
def test_an_empty_path_allows_nothing(allow):
    with pytest.raises(FloatingPointError, match=r"`state` \(2 NaN of 2\)"):
        mpx.guard(jnp.full(2, jnp.nan), allow=allow)
    mpx.guard(jnp.full(2, jnp.nan), allow="*")


def test_what_is_infinite_on_purpose_is_allowed_by_its_path():
    plateau = optax.contrib.reduce_on_plateau().init({"w": jnp.ones(2)})
    state = {"mask": jnp.array([0.0, -jnp.inf]), "layers": [plateau]}
    with pytest.raises(FloatingPointError, match=r"best_value.*`\['mask'\]`"):
        mpx.guard(state)
    mpx.guard(state, allow=["*.best_value", "['mask']"])
    with pytest.raises(FloatingPointError, match="best_value"):
        mpx.guard(state, allow="['mask']")


def test_a_state_of_which_the_leaves_lie_apart():
    devices = jax.devices()[:2]
    put = lambda *values: [*map(jax.device_put, map(jnp.asarray, values), devices)]  # noqa: E731
    mpx.guard(put(1.0, 1.0))
    with pytest.raises(FloatingPointError, match=r"`\[1\]`"):
        mpx.guard(put(1.0, jnp.inf))


def test_many_bad_leaves_are_counted():
    with pytest.raises(FloatingPointError, match=r"`\[7\]` .* and 12 more\. Keep"):
        mpx.guard([jnp.full(2, jnp.nan)] * 20)


def test_one_program_looks_at_all_arrays_and_gathers_none(good):
    from mpx._tools._guard import _flags

    arrays = [x for x in jax.tree.leaves(divided(good)) if eqx.is_inexact_array(x)]
    compiled = jax.jit(_flags).lower(arrays).compile()
    assert "all-gather" not in compiled.as_text()


def test_it_is_not_for_the_inside_of_jit():
    with pytest.raises(ValueError, match="cannot run inside jit"):
        jax.jit(mpx.guard)({"w": jnp.ones(2)})


def test_a_path_that_is_no_text_is_refused():
    said = "`allow` of `mpx.guard` must be the path.*int 3"
    with unchecked_annotations(), pytest.raises(TypeError, match=said):
        mpx.guard({}, allow=3)


@pytest.mark.parametrize(
    ("state", "said"),
    [
        (loss, "got an instance of builtins.function, which has none"),
        (None, "got None, which has none"),
        (optax.adam(1e-3), "got .*ExtraArgs, which has none. Pass"),
        ({"w": jax.ShapeDtypeStruct((2,), jnp.float32)}, "got an instance of .*dict"),
    ],
    ids=["function", "None", "optimizer", "shapes"],
)
def test_a_state_without_an_array_is_refused(state, said):
    with pytest.raises(TypeError, match=f"needs a tree of arrays; {said}"):
        mpx.guard(state)


@pytest.mark.parametrize(
    "scaling",
    [mpx.DynamicLossScaling(), mpx.StaticLossScaling(8.0), mpx.NoLossScaling()],
    ids=lambda scaling: type(scaling).__name__,
)
def test_a_loss_scale_in_another_dtype_is_refused(scaling):
    """As Orbax restores one by a template of other dtypes."""
    low = lambda x: x.astype(jnp.float16) if x.dtype == jnp.float32 else x  # noqa: E731
    said = f"loss scale of `{type(scaling).__name__}` must be float32; got float16"
    with pytest.raises(FloatingPointError, match=said):
        mpx.guard({"scaling": jax.tree.map(low, scaling)})


def test_scales_of_recipes_in_another_dtype_are_refused(good):
    low = lambda scale: scale.astype("bfloat16")  # noqa: E731
    scaling = replace(good["scaling"], lambda s: s.scales[0].scale, low)
    with pytest.raises(FloatingPointError, match="amaxes in float32; got bfloat16 and"):
        mpx.guard(scaling)


@pytest.mark.parametrize(
    "state", [{}, optax.sgd(1.0).init(1.0), {"step": 3}, (jnp.ones(2), None, loss)]
)
def test_a_state_that_is_empty_or_of_integers_may_be_saved(state):
    assert mpx.guard(state) is state
