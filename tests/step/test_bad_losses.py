"""A loss that is not finite before it is scaled says nothing about the scale.

Such a step is skipped and counted apart; the scale, its tolerance and its window of
good steps stay. Only gradients that overflow make the scale fall.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, PartitionSpec as P

import mpx
import mpx.nnx

from .cases import same_bits, total

BAD = [np.nan, np.inf, -np.inf]
ONES, NANS = jnp.ones(2), jnp.full(2, jnp.nan)


def loss(w, x):
    """Linear in the weights, so that a large x is a large gradient."""
    return mpx.force_full_precision(jnp.mean, jnp.float32)(w * x)


def overflowing(w, x):
    """A finite loss whose gradient overflows at every scale above 2^-2."""
    return total(w * 0) + total((w - jax.lax.stop_gradient(w)) * 6e4 * x)


def adjusted(scaling, fun, w, x, **options):
    return jax.jit(lambda s: mpx.filter_grad(fun, s, **options)(w, x))(scaling)


def counted(scaling):
    """The scale, and how many steps were skipped, and for a bad loss."""
    return float(scaling.loss_scale), int(scaling.skipped), int(scaling.bad_losses)


@pytest.mark.parametrize("style", ["explicit", "autocast"])
def test_one_bad_batch_in_a_hundred_leaves_the_scale_for_20_000_steps(style):
    fun = loss if style == "explicit" else mpx.autocast(loss, jnp.float16)

    def step(carry, i):
        w, scaling = carry
        x = jnp.where(i % 100 == 37, jnp.nan, jnp.ones(4))
        scaling, finite, grads = mpx.filter_grad(fun, scaling)(w, x)
        return (mpx.select_tree(finite, w - 1e-6 * grads, w), scaling), None

    run = jax.jit(lambda carry: jax.lax.scan(step, carry, jnp.arange(20_000))[0])
    w, scaling = run((jnp.ones(4), mpx.DynamicLossScaling()))
    mpx.check(scaling)
    assert counted(scaling) == (2.0**15, 200, 200)
    assert int(scaling.floored) == 0 and np.isfinite(w).all()


@pytest.mark.parametrize("value", BAD)
def test_a_bad_loss_changes_counters_only(value):
    start = mpx.DynamicLossScaling(2.0**10, period=4, hysteresis=3)
    start = start.adjust(True).adjust(True).adjust(False)
    after = adjusted(start, loss, ONES, jnp.array([1.0, value])).scaling.state_dict()
    before = start.state_dict()
    changed = {n for n in after if not np.array_equal(after[n], before[n])}
    names = "steps skipped bad_losses skipped_in_a_row places places_seen last_bad"
    assert changed == {f"record.{name}" for name in names.split()}


def test_a_bad_loss_is_no_step_of_the_window():
    """Growth comes after as many good steps, with bad batches in between."""
    scaling = mpx.DynamicLossScaling(8.0, period=2)
    scales = []
    for step in "1n1n1nn1":
        scaling = scaling.adjust(step == "1", loss_finite=step == "1")
        scales.append(float(scaling.loss_scale))
    assert scales == [8, 8, 16, 16, 16, 16, 16, 32]


@pytest.mark.parametrize(
    ("fun", "rest", "one", "expected"),
    [(loss, 1.0, jnp.nan, (8.0, 1, 1)), (overflowing, 0.0, 1.0, (4.0, 1, 0))],
    ids=["bad", "overflowing"],
)
def test_one_bad_micro_batch_makes_the_loss_bad(fun, rest, one, expected):
    x, again = jnp.full(4, rest).at[1].set(one), lambda w, x: fun(w, x)
    result = adjusted(mpx.DynamicLossScaling(8.0), again, jnp.ones(()), x, accumulate=4)
    assert not result.finite and counted(result.scaling) == expected


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_bad_loss_is_not_tried_again(accumulate):
    tries = []

    def fun(w, x):
        jax.debug.callback(lambda: tries.append(1))
        return loss(w, x)

    scaling = mpx.DynamicLossScaling(2.0**10)
    result = adjusted(scaling, fun, ONES, NANS, retries=3, accumulate=accumulate)
    jax.effects_barrier()
    assert len(tries) == accumulate
    assert float(result.scaling.loss_scale) == 2.0**10
    result = adjusted(scaling, overflowing, ONES, ONES, retries=3)
    # Three tries more, and the fall that the last of them earns.
    assert float(result.scaling.loss_scale) == 2.0**6


@pytest.mark.parametrize("kind", ["shard_map", "unchecked", "pmap"])
def test_a_bad_loss_on_one_device_is_one_for_all(kind):
    scaling = mpx.DynamicLossScaling(8.0)
    x = jnp.ones(8).at[5].set(jnp.nan)

    def one(scaling, x):
        return mpx.filter_grad(loss, scaling)(jnp.ones(()), x).scaling

    if kind == "pmap":
        run = jax.pmap(one, in_axes=(None, 0), axis_name="data")
        scaling = jax.tree.map(lambda leaf: leaf[3], run(scaling, x[:, None]))
    else:
        mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
        specs = {"in_specs": (P(), P("data")), "out_specs": P()}
        run = jax.shard_map(one, mesh=mesh, check_vma=kind == "shard_map", **specs)
        scaling = jax.jit(run)(scaling, x)
    assert counted(scaling) == (8.0, 1, 1)


@pytest.mark.parametrize("scaling", [mpx.NoLossScaling(), mpx.StaticLossScaling(4.0)])
def test_every_scaling_counts_bad_losses(scaling):
    after = scaling.adjust(False, loss_finite=jnp.array(False))
    assert int(after.bad_losses) == 1 and int(scaling.adjust(False).bad_losses) == 0
    with pytest.raises(TypeError, match="`loss_finite` of `.*adjust`"):
        scaling.adjust(False, loss_finite=jnp.ones(2, bool))


def test_the_state_of_recipes_counts_bad_losses():
    recipe = mpx.DelayedScaling(amax_history_len=2)
    fun = mpx.autocast(lambda w, x: jnp.mean(x @ w), jnp.float16, recipe=recipe)
    w, x = jnp.ones((16, 16)), jnp.ones((16, 16))
    start = mpx.init_scaling(fun, w, x)
    after = adjusted(start, fun, w, x.at[0, 0].set(jnp.nan)).scaling
    assert int(after.bad_losses) == 1
    assert float(after.loss_scale) == float(start.loss_scale) == 2.0**15
    assert same_bits(after.scales, start.scales)
    after = start.adjust(False, loss_finite=False)
    assert int(after.bad_losses) == 1 and float(after.loss_scale) == 2.0**15


def test_what_a_step_checks_again_is_no_bad_loss():
    """Gradients that were broken after they came: the scale falls, as ever."""
    result = adjusted(mpx.DynamicLossScaling(8.0), loss, ONES, ONES)
    broken, optimizer = result._replace(grads=result.grads * jnp.nan), optax.sgd(0.1)
    *_, after = mpx.optimizer_step(
        ONES, optimizer, optimizer.init(ONES), broken, check_gradients=True
    )
    assert float(after.loss_scale) == 4.0 and int(after.bad_losses) == 0


def test_nnx_counts_bad_losses():
    fun = lambda w, x: loss(w[...], x)  # noqa: E731
    result = mpx.nnx.grad(fun, mpx.DynamicLossScaling(8.0))(nnx.Param(ONES), NANS)
    assert counted(result.scaling) == (8.0, 1, 1)


def test_skipped_optax_steps_have_no_loss_to_count():
    tx = mpx.skip_nonfinite(optax.sgd(0.1))
    _, state = tx.update(NANS, tx.init(ONES), ONES)
    assert (int(state.record.skipped), int(state.record.bad_losses)) == (1, 0)


def test_a_loop_of_ones_own_says_whether_the_loss_was_finite():
    scaling = mpx.DynamicLossScaling(8.0)
    value, grads = mpx.calculate_scaled_grad(loss, scaling)(ONES, NANS)
    finite = mpx.all_finite(grads)
    after = scaling.adjust(finite, loss_finite=jnp.isfinite(value))
    assert float(after.loss_scale) == 8.0 and int(after.bad_losses) == 1
    assert float(scaling.adjust(finite).loss_scale) == 4.0


class TestCheck:
    def test_is_silent_at_the_floor_if_only_losses_are_bad(self):
        scaling = mpx.DynamicLossScaling(1.0)
        for _ in range(5):
            scaling = scaling.adjust(False, loss_finite=False)
            mpx.check(scaling)
        scaling = scaling.adjust(False)
        with pytest.raises(FloatingPointError, match="were non-finite at the floor"):
            mpx.check(scaling)
        # A bad batch after it does not take it back, a good step does.
        with pytest.raises(FloatingPointError, match="of which 6 had a loss"):
            mpx.check(scaling.adjust(False, loss_finite=False))
        mpx.check(scaling.adjust(True))

    @pytest.mark.parametrize("make", [mpx.NoLossScaling, mpx.DynamicLossScaling])
    def test_stops_a_run_that_skips_for_ever(self, make):
        step = functools.partial(make.adjust, grads_finite=False, loss_finite=False)
        body = lambda s, _: (step(s), None)  # noqa: E731
        scaling = jax.lax.scan(body, make(), length=1000)[0]
        mpx.check(scaling)
        with pytest.raises(FloatingPointError, match="more than 999 steps in a row"):
            mpx.check(scaling, max_skipped_in_a_row=999)
        with pytest.raises(FloatingPointError, match="more than 1000 steps in a row"):
            mpx.check(step(scaling))
        mpx.check(step(scaling), max_skipped_in_a_row=None)
