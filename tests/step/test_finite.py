"""The check of a try: it comes before the gradients, and looks at what they will be."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core

import mpx
from mpx._step._attempt import finite_flags

from ..helpers import unscaled


@unscaled
@pytest.mark.parametrize(
    ("scaling", "waits"),
    [
        (mpx.DynamicLossScaling(8.0), True),
        (mpx.StaticLossScaling(8.0), True),
        (mpx.NoLossScaling(), True),
        (mpx.NoLossScaling(skip=False), False),
    ],
    ids=str,
)
def test_gradients_wait_for_the_check(scaling, waits):
    """The optimizer stays out of the backward pass, whose memory it would prolong."""

    def grads(w, scaling):
        return mpx.filter_grad(lambda w: jnp.sum(w**2), scaling)(w).grads

    w = jnp.array([3.0, -0.0])
    assert depends_on_check(jax.make_jaxpr(grads)(w, scaling).jaxpr) == waits
    np.testing.assert_array_equal(jax.jit(grads)(w, scaling), [6.0, -0.0])
    assert np.signbit(jax.jit(grads)(w, scaling)[1])


def depends_on_check(jaxpr):
    """Whether the first result is computed from a reduction of booleans."""
    makers = {out: e for e in jaxpr.eqns for out in e.outvars}
    seen, todo = set(), [jaxpr.outvars[0]]
    while todo:
        equation = makers.get(todo.pop())
        if equation is not None and id(equation) not in seen:
            seen.add(id(equation))
            todo += [v for v in equation.invars if isinstance(v, core.Var)]
    return "reduce_and" in {e.primitive.name for e in makers.values() if id(e) in seen}


@pytest.mark.parametrize("scale", [2.0**-20, 0.3, 1.0, 2.0**10])
@pytest.mark.parametrize("dtype", ["float32", "complex64"])
def test_flags_are_those_of_the_unscaled_gradients(scale, dtype):
    """Dividing by a scale below 1 can overflow though the scaled gradient is finite."""
    scaling = mpx.StaticLossScaling(scale)
    largest = np.finfo(np.float32).max
    wanted = np.array([0.0, 1.0, largest / 4, largest * 0.99, np.inf, np.nan])
    for size in wanted:
        with np.errstate(over="ignore", invalid="ignore"):
            # As the gradient arrives: times the scale, in float32.
            scaled = (np.float32(size) * np.float32(scale)).astype(dtype)
        flags = finite_flags(scaling, jnp.ones(()), {"a": pair(scaled)})
        unscaled = scaling.unscale({"a": pair(scaled)})
        assert bool(flags.all()) == bool(mpx.all_finite(unscaled)), size
    # Finite times the scale, and not finite without.
    if scale < 1:
        grads = [jnp.full((2, 2), largest, dtype), jnp.zeros((), dtype)]
        flags = finite_flags(scaling, jnp.ones(()), grads)
        np.testing.assert_array_equal(flags, [True, False, True, True])
        assert not mpx.all_finite(scaling.unscale(grads))


@pytest.mark.parametrize("scale", [2.0**-120, 2.0**-112, 2.0**-111, 0.3, 2.0**15])
@pytest.mark.parametrize("value", [0.0, 65504.0, np.inf, np.nan])
def test_flags_of_float16_gradients(scale, value):
    """They are checked before they are widened, and unscaled afterwards."""
    scaling = mpx.StaticLossScaling(scale)
    grad = jnp.array([0, value], jnp.float16)
    flags = finite_flags(scaling, jnp.ones(()), [grad])
    unscaled = scaling.unscale([grad.astype(jnp.float32)])
    if scale >= 2.0**-111:
        assert bool(flags.all()) == bool(mpx.all_finite(unscaled))
    else:
        assert not flags.all()


def pair(value):
    return jnp.array([0, value], value.dtype)
