"""Micro-batches that devices share: what they get, give, and what is refused."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

import mpx

from ..collectives import partitioned
from ..helpers import slow_but

HALF = "params=float32,compute=bfloat16,output=float32"


def mesh(devices=4, kind=AxisType.Auto):
    return Mesh(np.array(jax.devices()[:devices]), ("data",), axis_types=(kind,))


def loss(w, x, scale=1.0):
    return jnp.mean((x @ w) ** 2).astype(jnp.float32) * scale


WHOLE = P()


def placed(on, spec=WHOLE):
    w = jnp.linspace(-1.0, 1.0, 32).reshape(8, 4)
    x = jnp.linspace(0.0, 1.0, 128).reshape(16, 8)
    specs = NamedSharding(on, spec), NamedSharding(on, P("data"))
    return jax.device_put((w, x), specs)


def gradient(func, how, w, x, policy=HALF, **options):
    options |= {"policy": policy, "accumulate": how}

    @jax.jit
    def run(w, x):
        call = mpx.filter_value_and_grad(func, mpx.NoLossScaling(), **options)
        return call(w, x)._replace(scaling=None)

    return run(w, x)


KINDS = [AxisType.Auto, AxisType.Explicit]
CASES = list(itertools.product(KINDS, [P(), P("data")], [False, True]))


@pytest.mark.parametrize(
    ("kind", "spec", "in_order"),
    # Each two values of two of them come together.
    slow_but([CASES[i] for i in (0, 3, 5, 6)], CASES),
)
def test_value_and_gradients_are_those_of_the_whole_batch(kind, spec, in_order):
    w, x = placed(mesh(kind=kind), spec)
    how = mpx.Accumulation(8, axes="data", in_order=in_order)
    found = gradient(loss, how, w, x)
    value, grads = jax.value_and_grad(loss)(np.asarray(w), np.asarray(x))
    assert abs(found.value - value) <= 0.01 * abs(value) and found.finite
    assert np.abs(found.grads - grads).max() <= 0.02 * np.abs(grads).max()
    assert found.grads.dtype == jnp.float32
    if kind is AxisType.Explicit:  # types say that they lie as the weights do
        assert found.grads.sharding.is_equivalent_to(w.sharding, 2)


def test_one_bad_row_makes_the_step_a_bad_one_everywhere():
    w, x = placed(mesh())
    options = {"policy": HALF, "accumulate": mpx.Accumulation(4, axes="data")}
    run = jax.jit(lambda s, w, x: mpx.filter_grad(loss, s, **options)(w, x).finite)
    assert not run(mpx.DynamicLossScaling(), w, x.at[13, 0].set(jnp.nan))


def test_aux_comes_back_stacked_and_weights_weigh():
    w, x = placed(mesh())
    with_rows = lambda w, x: (loss(w, x), {"first": x[0, 0]})  # noqa: E731
    how = mpx.Accumulation(8, axes="data", weight=lambda w, x: x[0, 0])
    found = gradient(with_rows, how, w, x, has_aux=True)
    first = x[::2, 0].astype(jnp.bfloat16)
    assert (found.aux["first"] == first).all()
    parts = [loss(w, part) for part in x.reshape(8, 2, 8)]
    expected = np.average(parts, weights=np.asarray(x[::2, 0]))
    assert abs(found.value - expected) <= 0.01 * expected


def test_other_axes_of_the_mesh_stay_with_the_compiler():
    both = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "model"))
    w, x = placed(both, P(None, "model"))
    how = mpx.Accumulation(4, axes="data", in_order=True)
    alone = gradient(loss, how, *placed(mesh(2)))
    found = gradient(loss, how, w, x)
    assert np.abs(np.asarray(found.grads) - np.asarray(alone.grads)).max() < 1e-6


@pytest.mark.parametrize(
    ("how", "policy", "match"),
    [
        (mpx.Accumulation(8, axes="rows"), HALF, "names `rows`, and the mesh has"),
        (mpx.Accumulation(6, axes="data"), HALF, "divisible by the 4 devices; got 6"),
        (
            mpx.Accumulation(8, axes="data", in_order=True),
            f"{HALF},reduce=bfloat16",
            "sums in float32; got a policy with `reduce_dtype=bfloat16`",
        ),
    ],
)
def test_an_accumulation_that_a_call_cannot_have_is_refused(how, policy, match):
    w, x = placed(mesh())
    with pytest.raises(ValueError, match=match):
        gradient(loss, how, w, x, policy)


def test_axes_need_a_mesh_and_no_model_state():
    how = mpx.Accumulation(4, axes="data")
    with pytest.raises(ValueError, match="there is no mesh"):
        gradient(loss, how, jnp.ones((8, 4)), jnp.ones((16, 8)))
    state = mpx.Accumulation(4, axes="data", state_argnum=2, new_state=lambda aux: aux)
    with_state = lambda w, x, n: (loss(w, x), n)  # noqa: E731
    call = mpx.filter_grad(with_state, mpx.NoLossScaling(), True, accumulate=state)
    with pytest.raises(ValueError, match="must have no model state"):
        call(*placed(mesh()), jnp.zeros(()))


def test_gradients_may_be_summed_in_half_precision_if_no_order_is_asked_for():
    w, x = placed(mesh())
    how = mpx.Accumulation(8, axes="data")
    found = gradient(loss, how, w, x, f"{HALF},reduce=bfloat16")
    wanted = gradient(loss, how, w, x)
    error = jnp.linalg.norm(found.grads - wanted.grads)
    assert 0 < error < 0.01 * jnp.linalg.norm(wanted.grads)


@pytest.mark.parametrize(
    ("options", "dtype"),
    [("", "bf16"), (",reduce=float32", "bf16"), (",gather=float32", "f32")],
)
def test_divided_weights_are_gathered_as_the_policy_says(options, dtype):
    w, x = placed(mesh(), P("data"))
    how, policy = mpx.Accumulation(8, axes="data"), HALF + options
    step = lambda w, x: gradient(loss, how, w, x, policy).grads  # noqa: E731
    messages = partitioned(step, w, x)
    gathers = {m.dtype for m in messages if m.kind == "all-gather" and m.bytes > 32}
    assert gathers == {dtype}
