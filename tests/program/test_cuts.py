"""What of an array a program reads, against counting the reads of each number."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from jax import lax

from mpx._program import are_apart, boxes_read, is_covered, is_read_once

SHAPE = (4, 2, 6)


def read(func, shape=SHAPE):
    jaxpr = jax.make_jaxpr(func)(np.zeros(shape, np.float32)).jaxpr
    (boxes,) = boxes_read(jaxpr, jaxpr.invars)
    return boxes


def counted(func):
    count = np.zeros(SHAPE, int)
    with jax.disable_jit():
        parts = func(jnp.arange(count.size).reshape(SHAPE))
    for part in parts:
        np.add.at(count.reshape(-1), np.asarray(part).ravel(), 1)
    return count


@st.composite
def cuts(draw):
    """What moves and cuts an array; functions that give all parts, or one of two."""
    names = ["transpose", "reshape", "reverse", "slice", "split", "index", "take"]
    names += ["expand", "unstack", "jit", "every second"]
    steps = draw(
        st.lists(st.tuples(st.sampled_from(names), st.integers(0, 7)), max_size=4)
    )

    def func(x):
        parts = [x]
        for name, number in steps:
            parts = [b for a in parts for b in moved(name, number, a)]
        return parts

    return func


def moved(name, number, x):
    if not x.ndim:
        return [x]
    axis = number % x.ndim
    n = x.shape[axis]
    some = number % n if n else 0
    if name == "transpose":
        return [jnp.moveaxis(x, axis, 0)]
    if name == "reshape":
        return [x.reshape(-1, *x.shape[2:]) if number % 2 and x.ndim > 1 else x.ravel()]
    if name == "reverse":
        return [lax.rev(x, [axis])]
    if name == "slice":
        return [lax.slice_in_dim(x, 0, some, axis=axis)] if some else [x]
    if name == "split":
        return jnp.split(x, 2, axis) if n % 2 == 0 else [x]
    if name == "index":
        return [jnp.moveaxis(x, axis, 0)[i] for i in range(n)]
    if name == "take":
        return [jnp.take(x, some, axis=axis), jnp.take(x, n - 1, axis=axis)]
    if name == "expand":
        return [jnp.expand_dims(x, axis)]
    if name == "unstack":
        return list(jnp.unstack(x, axis=axis))
    if name == "jit":
        return jax.jit(lambda x: (x[: some + 1], x[some + 1 :]))(x)
    return [x[::2], x[1::2]]


@pytest.mark.slow
@settings(max_examples=40)
@given(cuts())
def test_a_number_that_is_read_twice_lies_in_two_parts(func):
    boxes = read(lambda x: [jnp.sin(part) for part in func(x)])
    count = np.zeros(SHAPE, int)
    for box in boxes:
        count[tuple(slice(*ends) for ends in box)] += 1
    assert boxes
    # Of what is not known a part is more than it is, and never less.
    assert np.all(count >= counted(func))
    assert are_apart(boxes) == (count.max() <= 1)
    if are_apart(boxes):
        assert is_covered(SHAPE, boxes) == (count.min() == 1)


@pytest.mark.parametrize(
    "func",
    [
        lambda x: x[0],
        lambda x: lax.scan(lambda c, i: (c + jnp.sum(x[0]), None), 0.0, jnp.arange(2)),
        lambda x: lax.scan(lambda c, x: (c + x * jnp.sin(x), None), x[0] * 0, x),
        lambda x: lax.while_loop(lambda i: i < 3, lambda i: i + jnp.sum(x), 0.0),
        lambda x: lax.cond(jnp.sum(x[0]) > 0, jnp.sin, jnp.cos, x),
        lambda x: jnp.sin(lax.dynamic_index_in_dim(x, jnp.int32(jnp.sum(x)), 0)),
        lambda x: jnp.sin(x[jnp.array([0, 0])]),
        lambda x: jnp.sin(jnp.take(x, 7, axis=0)),
        lambda x: jnp.sin(jnp.concatenate([x[0], x[1]])),
        lambda x: jnp.sin(jnp.tile(x, 2)),
        lambda x: jnp.sin(jnp.broadcast_to(x, (2, *SHAPE))),
    ],
    ids="result constant-of-a-loop twice-in-a-turn while cond traced rows "
    "out-of-range joined tiled repeated".split(),
)
def test_nothing_is_said_where_it_cannot_be_told(func):
    # Whatever operations before and behind it read.
    assert read(lambda x: (jnp.sin(x[0]), func(x), jnp.sin(x[1]))) == []


def test_a_scan_reads_each_row_of_what_it_stacks():
    def func(x):
        return lax.scan(lambda c, row: (c + jnp.sum(row * 2), None), 0.0, x[:2])

    assert read(func) == [((0, 2), (0, 2), (0, 6))]


def test_what_is_read_of_several_inputs_is_kept_apart():
    def func(x, y):
        return jnp.sin(x[0]) + jnp.sin(y[1]), x[1] @ y[0].T

    x = np.zeros((2, 3, 3), np.float32)
    jaxpr = jax.make_jaxpr(func)(x, x).jaxpr
    first, second = boxes_read(jaxpr, jaxpr.invars)
    assert [box[0] for box in first] == [(0, 1), (1, 2)]
    assert [box[0] for box in second] == [(1, 2), (0, 1)]
    assert all(is_read_once(jaxpr, v) for v in jaxpr.invars)


def test_an_input_that_is_a_result_too_is_not_read_once():
    jaxpr = jax.make_jaxpr(lambda x: (jnp.sin(x), x))(np.float32(0)).jaxpr
    assert not is_read_once(jaxpr, jaxpr.invars[0])
