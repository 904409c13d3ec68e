"""Bounds of a program's results: they hold, and say what is never negative."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec as P

from mpx._memory._intervals import Bounds, Intervals
from mpx._program import propagate

RANGES = [(-2.0, 3.0), (0.0, 1.0), (0.0, 50.0), (1.0, 8.0), (-3.0, -1.0), (-1.0, 0.0)]
UNARY = {
    "abs": jnp.abs,
    "square": jnp.square,
    **{f"power {y}": lambda x, y=y: lax.integer_pow(x, y) for y in (-3, -2, -1, 2, 3)},
    "sqrt": jnp.sqrt,
    "rsqrt": lax.rsqrt,
    "exp": jnp.exp,
    "expm1": jnp.expm1,
    "tanh": jnp.tanh,
    "logistic": jax.nn.sigmoid,
    "sign": jnp.sign,
    "clip": lambda x: jnp.clip(x, -1.0, 2.0),
    "cumsum": jnp.cumsum,
    "one minus": lambda x: 1.0 - x,
    "unsigned": lambda x: x.astype(jnp.int32).astype(jnp.uint32),
    "mean of two": lambda x: x + 0.25 * (x[::-1] - x),
}
BINARY = {
    "add": jnp.add,
    "sub": jnp.subtract,
    "mul": jnp.multiply,
    "div": jnp.divide,
    "power": lambda x, y: jnp.power(x, y),
    "max": jnp.maximum,
    "where": lambda x, y: jnp.where(x > 0.5, x, y),
    "part of the way": lambda x, y: x + 0.1 * (y - x),
    "from elsewhere": lambda x, y: y + 0.5 * (y - x),
    "branch": lambda x, y: lax.cond(x[0] > 0.5, lambda: x, lambda: y),
    "twice the way": lambda x, y: x + 2.0 * (y - x),
    "multiples": lambda x, y: (2.0 * x) * (3.0 * y),
}


def bounds_of(func, *ranges):
    arrays = [jnp.zeros(64)] * len(ranges)
    program = jax.make_jaxpr(func)(*arrays)
    inputs = [Bounds(*map(float, ends), origin=i) for i, ends in enumerate(ranges)]
    (found,) = propagate(program.jaxpr, program.consts, inputs, Intervals())
    return found.low, found.high


def numbers(ends, seed):
    """Some between the bounds, these among them, in another order for each seed."""
    return jnp.asarray(
        np.random.default_rng(seed).permutation(np.linspace(*ends, 64)), jnp.float32
    )


@pytest.mark.parametrize("name", [*UNARY, *BINARY])
def test_bounds_hold(name):
    func, count = (UNARY[name], 1) if name in UNARY else (BINARY[name], 2)
    for ranges in itertools.product(RANGES, repeat=count):
        low, high = bounds_of(func, *ranges)
        found = np.asarray(func(*map(numbers, ranges, range(count))), np.float64)
        found = found[np.isfinite(found)]
        assert np.all((low <= found) & (found <= high)), ranges


@pytest.mark.parametrize(
    ("func", "ranges", "low"),
    [
        (lambda x: x**-2, [(-2, 3)], 0),
        (lambda x: x**-1, [(0, 3)], 0),
        (lambda x: x**-1, [(-2, 3)], -np.inf),
        (lambda x: x**3, [(0, 3)], 0),
        (jnp.power, [(1, 3), (0, 2)], 1),
        (lambda x, y: 1 - jnp.power(x, y), [(0, 1), (0, 2)], 0),
        (lambda x, y: 1 - jnp.power(x, y), [(1, 8), (-3, -1)], 0),
        (jnp.multiply, [(0, np.inf), (0, 1)], 0),
        (jnp.divide, [(1, 3), (0.5, 1)], 1),
        (jnp.divide, [(-3, -1), (-1, -0.5)], 1),
        (jnp.divide, [(0, 3), (0, 8)], 0),
        (jnp.divide, [(0, np.inf), (1, np.inf)], 0),
        (lambda x: 1 - x, [(0, 1)], 0),
        (lambda x: x * x, [(-2, 3)], 0),
        (lambda x: x * (2 * x), [(-2, 3)], 0),
        (lambda x: (2 * x) * x, [(-2, 3)], 0),
        (lambda x, y: x + 0.1 * (y - x), [(0, 50), (1, 8)], 0),
        (lambda x, y: x + (y - x) / 10, [(0, 50), (1, 8)], 0),
        (lambda x: -jnp.sum(-jnp.square(x)), [(-2, 3)], 0),
        (lambda x: jnp.sum(jnp.square(x)), [(-2, 3)], 0),
    ],
)
def test_what_is_never_less(func, ranges, low):
    assert bounds_of(func, *ranges)[0] == low


def test_devices_without_a_source_get_zeros():
    mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,))
    shift = jax.shard_map(
        lambda x: lax.ppermute(x, "d", [(0, 1)]),
        mesh=mesh,
        in_specs=P("d"),
        out_specs=P("d"),
    )
    assert np.min(shift(jnp.ones(64))) == 0
    assert bounds_of(shift, (1, 8))[0] == 0


def test_a_function_that_is_called_twice_has_other_values():
    twice = jax.jit(lambda x: 2 * x)
    both = jax.jit(lambda x, y: (x - y, x + y))
    anything = (-np.inf, np.inf)
    assert bounds_of(lambda x, y: twice(x) * twice(y), anything, anything)[0] < 0
    ends = bounds_of(
        lambda x, y, z: both(both(x, y)[0], z)[1], (0.0, 1.0), (-9.0, 9.0), (0.0, 1.0)
    )
    assert ends[0] <= -9.0 and ends[1] >= 10.0
