"""Lookups of one number in each row: their gradient is no scatter, and the same."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import mpx

from ..helpers import slow_but
from .counting import equations

W = jax.random.normal(jax.random.key(0), (16, 40))
X = jax.random.normal(jax.random.key(1), (2, 3, 16))
LABELS = jnp.array([[1, 2, 39], [0, -1, 17]])
OUTSIDE = jnp.array([[1, 40, 39], [0, -41, 17]])


def by_label(mode, labels):
    def loss(w):
        found = jnp.take_along_axis(X @ w, labels[..., None], -1, mode=mode)
        return jnp.sum(jnp.sin(found))

    return loss


def along_the_first_axis(w):
    return jnp.sum(jnp.take_along_axis(X[0] @ w, LABELS[:1, :1] % 3, 0) ** 2)


def of_each_example(w):
    return jnp.sum(jax.vmap(lambda row, label: row[label] ** 2)(X[0] @ w, LABELS[0]))


def transposed(w):
    rows = jnp.swapaxes(X @ w, 0, 2)  # [40, 3, 2]
    return jnp.sum(jnp.take_along_axis(rows, LABELS.T[None] % 40, 0) ** 3)


def cross_entropy(w):
    found = optax.softmax_cross_entropy_with_integer_labels(X @ w, LABELS % 40)
    return jnp.mean(found)


LOOKUPS = {
    "fill": by_label("fill", LABELS),
    "clip": by_label("clip", LABELS),
    "promise": by_label("promise_in_bounds", LABELS % 40),
    "clip, outside": by_label("clip", OUTSIDE),
    "small integers, clip": by_label("clip", LABELS.astype(jnp.uint8)),
    "small integers": by_label("fill", LABELS.astype(jnp.int8)),
    "unsigned": by_label("fill", (LABELS % 40).astype(jnp.uint32)),
    "transposed": transposed,
    "cross-entropy": cross_entropy,
}
ROWS = {"each example": of_each_example, "first axis": along_the_first_axis}


def large_scatters(func):
    return [
        equation
        for equation, _ in equations(jax.make_jaxpr(func)(W))
        if equation.primitive.name.startswith("scatter")
        and 40 in equation.outvars[0].aval.shape
    ]


@pytest.mark.parametrize(
    "name", slow_but(["fill", "transposed", "each example"], [*LOOKUPS, *ROWS])
)
def test_the_gradient_of_a_lookup_is_that_of_jax(name):
    loss = {**LOOKUPS, **ROWS}[name]
    mixed = mpx.autocast(loss, "bfloat16")
    np.testing.assert_allclose(mixed(W), loss(W), rtol=0.05, atol=0.05)
    found, expected = jax.grad(mixed)(W), jax.grad(loss)(W)
    assert np.linalg.norm(found - expected) < 0.02 * np.linalg.norm(expected)


@pytest.mark.parametrize("name", LOOKUPS)
def test_it_is_no_scatter_into_the_logits(name):
    loss = LOOKUPS[name]
    assert not large_scatters(jax.grad(mpx.autocast(loss, "bfloat16")))
    assert large_scatters(jax.grad(loss))  # where it is one without mpx


def test_a_label_outside_gives_nan_and_no_gradient_as_in_jax():
    loss = by_label("fill", OUTSIDE)
    mixed = mpx.autocast(loss, "bfloat16")
    assert np.isnan(mixed(W)) and np.isnan(loss(W))
    only_good = by_label("clip", OUTSIDE.at[0, 1].set(0).at[1, 1].set(0))
    bad = jax.grad(lambda w: mixed(w))(W)
    assert np.isnan(bad).any() == np.isnan(jax.grad(loss)(W)).any()
    assert np.isfinite(jax.grad(mpx.autocast(only_good, "bfloat16"))(W)).all()


@pytest.mark.slow
def test_lookups_of_several_numbers_or_of_rows_stay_as_they_are():
    two = jnp.stack([LABELS % 40, LABELS % 7], axis=-1)

    def several(w):
        return jnp.sum(jnp.take_along_axis(X @ w, two, -1) ** 2)

    def rows(table):
        return jnp.sum((table[LABELS % 16] @ W.T) ** 2)

    for loss, given in ((several, W), (rows, W)):
        expected = jax.grad(loss)(given)
        found = jax.grad(mpx.autocast(loss, "bfloat16"))(given)
        assert np.linalg.norm(found - expected) < 0.02 * np.linalg.norm(expected)


@pytest.mark.parametrize("transform", slow_but([jax.jacfwd], [jax.jacfwd, jax.hessian]))
def test_other_derivatives_and_vmap_go_through(transform):
    loss = by_label("fill", LABELS)
    mixed = mpx.autocast(loss, "bfloat16")
    found, expected = transform(mixed)(W), transform(loss)(W)
    assert np.linalg.norm(found - expected) < 0.05 * np.linalg.norm(expected)
    both = jnp.stack([W, 2 * W])
    one, other = jax.vmap(jax.grad(mixed))(both), map(jax.grad(mixed), both)
    np.testing.assert_allclose(one, jnp.stack(list(other)), rtol=1e-2, atol=1e-3)


def test_only_the_labels_are_kept_for_it():
    """And no comparison with every word, of each turn of a scan."""

    def loss(w):
        def turn(total, x):
            return total + cross_entropy(w * x), None

        return jax.lax.scan(turn, 0.0, jnp.arange(1.0, 4.0))[0]

    _, backward = jax.vjp(mpx.autocast(loss, "bfloat16"), W)
    kept = jax.tree.leaves(backward)
    assert kept
    assert not [x for x in kept if x.dtype == bool and 40 in x.shape]


@pytest.mark.parametrize("check_vma", slow_but([], [False, True]))
def test_in_a_shard_map_each_device_looks_up_its_own_rows(check_vma):
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    x, labels = X.reshape(6, 16), LABELS.reshape(6) % 40

    def loss(w, x, labels):
        found = optax.softmax_cross_entropy_with_integer_labels(x @ w, labels)
        return jnp.mean(found)

    mixed = mpx.autocast(loss, "bfloat16")
    mapped = jax.shard_map(
        lambda *args: jax.lax.pmean(mixed(*args), "data"),
        mesh=mesh,
        in_specs=(P(), P("data"), P("data")),
        out_specs=P(),
        check_vma=check_vma,
    )
    found, expected = jax.grad(mapped)(W, x, labels), jax.grad(loss)(W, x, labels)
    assert np.linalg.norm(found - expected) < 0.02 * np.linalg.norm(expected)


def test_logits_that_lie_in_pieces_of_the_vocabulary_are_not_gathered():
    mesh = Mesh(np.array(jax.devices()[:4]), ("model",))
    pieces = NamedSharding(mesh, P(None, "model"))
    step = jax.jit(jax.grad(mpx.autocast(cross_entropy, "bfloat16")))
    text = step.lower(jax.device_put(W, pieces)).compile().as_text()
    assert "all-reduce" in text and "all-gather" not in text
