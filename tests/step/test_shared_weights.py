"""Replicated weights in `shard_map`: gradients are summed over devices in float32.

The explicit style, with the check of what varies (JAX's default), in which JAX inserts
the sums by itself.
"""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import mpx
from mpx._program import sub_jaxprs

from .cases import BFLOAT16, FLOAT16, close, mean, total

ONE, DATA = P(), P("data")


def mesh(kind=AxisType.Auto, shape=(8,), names=("data",)):
    return jax.make_mesh(shape, names, axis_types=(kind,) * len(names))


def sharded(func, in_specs, out_specs, mesh, check_vma=True):
    return jax.shard_map(
        func, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=check_vma
    )


def sums(func, *args):
    """The dtype of what each sum over devices adds up, from the program.

    Of those whose result is used: a try that came to nothing leaves dead equations.
    """
    (equation,) = jax.make_jaxpr(func)(*args).jaxpr.eqns
    found, used = [], set(equation.params["jaxpr"].outvars)
    for inner in reversed(equation.params["jaxpr"].eqns):
        if not used.isdisjoint(inner.outvars):
            used.update(v for v in inner.invars if isinstance(v, core.Var))
            found += every(inner)
    found = [e for e in found if e.primitive.name.startswith("psum")]
    return collections.Counter(str(e.invars[0].aval.dtype) for e in found)


def every(equation):
    inside = [e for p in sub_jaxprs(equation) for e in p.jaxpr.eqns]
    return [equation, *(e for inner in inside for e in every(inner))]


def run_and_sums(step, w, x, out_specs=ONE, devices=None, **options):
    """What eight devices give, and the dtypes of their sums."""
    run = sharded(step, (ONE, DATA), out_specs, devices or mesh(), **options)
    return jax.jit(run)(w, x), sums(run, w, x)


def gradient(loss, policy=FLOAT16, scale=2.0**14, **options):
    """The gradients and the state of one step on one device."""

    def step(w, *data):
        scaling = mpx.DynamicLossScaling(scale)
        result = mpx.filter_grad(loss, scaling, policy=policy, **options)(w, *data)
        return result.grads, result.scaling.loss_scale, result.finite

    return step


def product(w, x):
    return total(w * x)


W, X = jnp.ones(()), jnp.ones(8)
IN_FLOAT32 = {"accumulate_dtype": "float32"}


@pytest.mark.parametrize(
    ("policy", "options", "kind"),
    # Each two values of two of them come together.
    [
        (FLOAT16, {}, AxisType.Auto),
        (FLOAT16, IN_FLOAT32, AxisType.Explicit),
        (BFLOAT16, IN_FLOAT32, AxisType.Auto),
        (BFLOAT16, {}, AxisType.Explicit),
    ],
)
def test_eight_good_gradients_of_one_give_eight(policy, options, kind):
    """At a scale of 2^14 their sum, 2^17, is no number of float16."""
    devices, step = mesh(kind), gradient(product, policy, **options)
    w, x = jax.device_put((W, X), tuple(NamedSharding(devices, s) for s in (ONE, DATA)))
    (grads, scale, finite), dtypes = run_and_sums(step, w, x, devices=devices)
    assert grads == 8 and grads.dtype == np.float32
    assert finite and scale == 2.0**14
    assert set(dtypes) == {"float32"}


HALF_WEIGHTS = {
    dtype: mpx.get_policy(f"params={dtype},compute={dtype}")
    for dtype in ("float16", "bfloat16")
}


@pytest.mark.parametrize(
    ("step", "dtype", "examples"),
    [
        (gradient(mpx.autocast(product, "bfloat16"), None), "float32", 8),
        (gradient(mpx.autocast(product, "float16"), None), "float32", 8),
        (gradient(product, accumulate=4), "float32", 64),  # in four means
        # Whose float32 copies are in the optimizer.
        *(
            (gradient(product, policy), dtype, 8)
            for dtype, policy in HALF_WEIGHTS.items()
        ),
    ],
)
def test_autocast_micro_batches_and_half_weights_sum_in_float32(step, dtype, examples):
    w, x = W.astype(dtype), jnp.ones(examples)
    (grads, _, finite), dtypes = run_and_sums(step, w, x)
    assert grads == min(examples, 16) and grads.dtype == np.float32 and finite
    assert set(dtypes) == {"float32"}


def test_no_digit_is_lost_between_devices():
    """256 + 1 is 256 in bfloat16; eight devices add 1 to 2^8."""
    step = gradient(product, BFLOAT16, 1.0)
    assert run_and_sums(step, W, X.at[0].set(256))[0][0] == 263


LOSSES = {
    "the loss of a device": lambda w, x: mean(w["a"] * x) + total(w["b"]),
    "the mean over devices": lambda w, x: jax.lax.pmean(
        mean(w["a"] * x) + total(w["b"] ** 2), "data"
    ),
    "a penalty outside of the mean": lambda w, x: (
        jax.lax.pmean(mean(w["a"] * x), "data") + total(w["b"] ** 2)
    ),
    "a penalty of the same weight": lambda w, x: (
        jax.lax.pmean(mean(w["a"] * x + w["b"]), "data") + total(w["a"] ** 2)
    ),
    "a loop over weights alone": lambda w, x: (
        jax.lax.pmean(mean(w["a"] * x), "data")
        + jax.lax.scan(lambda c, b: (c + total(b), None), jnp.float32(0), w["b"])[0]
    ),
    "a loop over uses": lambda w, x: jax.lax.pmean(
        jax.lax.scan(
            lambda c, _: (c + mean(w["a"] * x) + total(w["b"]), None),
            jax.lax.pcast(jnp.float32(0), "data", to="varying"),
            length=3,
        )[0],
        "data",
    ),
    "recomputed": lambda w, x: jax.lax.pmean(
        jax.checkpoint(lambda a, x: mean(jnp.sin(a * x)))(w["a"], x) + total(w["b"]),
        "data",
    ),
    "jitted": lambda w, x: jax.lax.pmean(
        jax.jit(lambda a, x: mean(a * x))(w["a"], x) + total(w["b"]), "data"
    ),
}


@functools.cache
def data():
    w = {"a": jnp.linspace(0.5, 1, 4)[None], "b": jnp.linspace(1, 2, 4)[None]}
    return w, jnp.linspace(0.5, 2, 64).reshape(16, 4)


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_are_those_of_float32(name):
    """The sum of the losses where they differ, and the loss where all share it."""
    loss, (w, x) = LOSSES[name], data()
    (grads, _, finite), found = run_and_sums(gradient(loss, scale=2.0**6), w, x)
    exact, theirs = run_and_sums(jax.grad(loss), w, x)
    close(grads, exact, 2e-3)
    assert finite and "float16" not in found
    # And not more of them than JAX has for a loss and a gradient of float32.
    shared = lambda w, x: jax.lax.pmax(loss(w, x), "data")  # noqa: E731
    theirs += run_and_sums(shared, w, x)[1]
    assert found["float32"] <= theirs["float32"]


def test_results_of_weights_alone_stay_shared():
    """Aux that out_specs says is the same on all devices."""

    def loss(w, x):
        return jax.lax.pmean(mean(w["a"] * x), "data"), (total(w["b"]), x * 2)

    def step(w, x):
        scaling = mpx.DynamicLossScaling(2.0**14)
        call = mpx.filter_value_and_grad(loss, scaling, has_aux=True, policy=FLOAT16)
        (value, (shared, own)), *_, grads = call(w, x)
        return value, shared, own, grads

    w, x = data()
    found, dtypes = run_and_sums(step, w, x, (ONE, ONE, DATA, ONE))
    _, shared, own, grads = found
    assert shared == pytest.approx(6, rel=1e-3) and own.shape == x.shape
    exact = jax.grad(lambda w: jnp.mean(w["a"] * x))(w)
    close(grads, exact, 2e-3)
    assert set(dtypes) == {"float32"}


@pytest.mark.parametrize("axes", ["data", ("data", "model")], ids=str)
def test_two_mesh_axes(axes):
    """Gradients are summed over the axes of the data, and not over another."""
    both = mesh(shape=(4, 2), names=("data", "model"))
    run = sharded(gradient(product), (ONE, P(axes)), ONE, both)
    assert jax.jit(run)(W, X)[0] == 8


def test_weights_in_pieces_on_one_axis_and_replicated_on_the_other():
    """Fully sharded on one axis: gathered as the program says, in half precision."""
    both = mesh(shape=(4, 2), names=("data", "fsdp"))

    def loss(w, x):
        whole = jax.lax.all_gather(w, "fsdp", tiled=True)
        return total(whole[None] * x)

    step = gradient(loss, scale=2.0**13)
    batch = P(("data", "fsdp"))
    run = sharded(step, (P("fsdp"), batch), (P("fsdp"), ONE, ONE), both)
    w, x = jnp.ones(4), jnp.ones((8, 4))
    grads, _, finite = jax.jit(run)(w, x)
    # 2^13 * 8 would be infinite; two are summed by the gather, and four here.
    assert np.array_equal(grads, np.full(4, 8.0)) and finite
    assert set(sums(run, w, x)) == {"float32"}


def test_without_the_check_gradients_are_those_of_each_device():
    step = lambda w, x: jax.lax.psum(gradient(product)(w, x)[0], "data")  # noqa: E731
    found, dtypes = run_and_sums(step, W, X, check_vma=False)
    assert found == 8 and dtypes == {"float32": 1}


def test_one_bad_device_is_seen_by_all():
    (grads, _, finite), _ = run_and_sums(gradient(product), W, X.at[3].set(7e4))
    assert not finite and not np.isfinite(grads)


def test_kept_weights_are_summed_as_they_are_and_unused_ones_get_zero():
    def loss(w, x):
        return total(w["a"] * x) + total(w["b"] * x.astype(jnp.float32))

    step = gradient(loss, keep=lambda path, leaf: path.endswith("['b']"))
    w = {"a": W, "b": W, "unused": jnp.ones(3)}
    (grads, *_), _ = run_and_sums(step, w, X)
    assert grads["a"] == grads["b"] == 8
    assert np.array_equal(grads["unused"], np.zeros(3))
