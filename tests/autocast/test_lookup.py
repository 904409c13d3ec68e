"""Lookups of one number in each row: their gradient is no scatter, and the same."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import mpx

from ..helpers import slow_but
from .counting import equations, kept_by, named

W = jax.random.normal(jax.random.key(0), (16, 40))
X = jax.random.normal(jax.random.key(1), (2, 3, 16))
LABELS = jnp.array([[1, 2, 39], [0, -1, 17]])
OUTSIDE = jnp.array([[1, 40, 39], [0, -41, 17]])


def by_label(mode, labels):
    def loss(w):
        found = jnp.take_along_axis(X @ w, labels[..., None], -1, mode=mode)
        return jnp.sum(jnp.sin(found))

    return loss


def transposed(w):
    rows = jnp.swapaxes(X @ w, 0, 2)  # [40, 3, 2]
    return jnp.sum(jnp.take_along_axis(rows, LABELS.T[None] % 40, 0) ** 3)


def cross_entropy(w):
    return cross_entropy_of(w, X, LABELS % 40)


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
TWO = jnp.stack([LABELS % 40, LABELS % 7], axis=-1)
OTHERS = {
    "each example": lambda w: jnp.sum(
        jax.vmap(lambda row, label: row[label] ** 2)(X[0] @ w, LABELS[0])
    ),
    "first axis": lambda w: jnp.sum(
        jnp.take_along_axis(X[0] @ w, LABELS[:1, :1] % 3, 0) ** 2
    ),
    # Lookups of several numbers or of rows stay as they are.
    "several": lambda w: jnp.sum(jnp.take_along_axis(X @ w, TWO, -1) ** 2),
    "rows": lambda table: jnp.sum((table[LABELS % 16] @ W.T) ** 2),
}


def assert_near(found, expected, bound=0.02):
    assert np.linalg.norm(found - expected) < bound * np.linalg.norm(expected)


def large_scatters(func):
    return [
        equation
        for equation, _ in equations(jax.make_jaxpr(func)(W))
        if equation.primitive.name.startswith("scatter")
        and 40 in equation.outvars[0].aval.shape
    ]


@pytest.mark.parametrize(
    "name",
    slow_but(
        ["fill", "transposed", "each example", "several", "rows"], [*LOOKUPS, *OTHERS]
    ),
)
def test_the_gradient_of_a_lookup_is_that_of_jax(name):
    loss = {**LOOKUPS, **OTHERS}[name]
    mixed = mpx.autocast(loss, "bfloat16")
    np.testing.assert_allclose(mixed(W), loss(W), rtol=0.05, atol=0.05)
    assert_near(jax.grad(mixed)(W), jax.grad(loss)(W))


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


@pytest.mark.parametrize("transform", slow_but([jax.jacfwd], [jax.jacfwd, jax.hessian]))
def test_other_derivatives_and_vmap_go_through(transform):
    loss = by_label("fill", LABELS)
    mixed = mpx.autocast(loss, "bfloat16")
    assert_near(transform(mixed)(W), transform(loss)(W), 0.05)
    both = jnp.stack([W, 2 * W])
    one, other = jax.vmap(jax.grad(mixed))(both), map(jax.grad(mixed), both)
    np.testing.assert_allclose(one, jnp.stack(list(other)), rtol=1e-2, atol=1e-3)


def test_only_the_labels_are_kept_for_it():
    """And no comparison with every word, of each turn of a scan."""

    def loss(w):
        turn = lambda total, x: (total + cross_entropy(w * x), None)  # noqa: E731
        return jax.lax.scan(turn, 0.0, jnp.arange(1.0, 4.0))[0]

    kept = kept_by(mpx.autocast(loss, "bfloat16"), W)
    assert kept
    assert not [x for x in kept if x.dtype == bool and 40 in x.shape]


@pytest.mark.parametrize("check_vma", slow_but([], [False, True]))
def test_in_a_shard_map_each_device_looks_up_its_own_rows(check_vma):
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    x, labels = X.reshape(6, 16), LABELS.reshape(6) % 40

    mixed = mpx.autocast(cross_entropy_of, "bfloat16")
    mapped = jax.shard_map(
        lambda *args: jax.lax.pmean(mixed(*args), "data"),
        mesh=mesh,
        in_specs=(P(), P("data"), P("data")),
        out_specs=P(),
        check_vma=check_vma,
    )
    args = W, x, labels
    assert_near(jax.grad(mapped)(*args), jax.grad(cross_entropy_of)(*args))


def test_logits_that_lie_in_pieces_of_the_vocabulary_are_not_gathered():
    mesh = Mesh(np.array(jax.devices()[:4]), ("model",))
    pieces = NamedSharding(mesh, P(None, "model"))
    step = jax.jit(jax.grad(mpx.autocast(cross_entropy, "bfloat16")))
    text = step.lower(jax.device_put(W, pieces)).compile().as_text()
    assert "all-reduce" in text and "all-gather" not in text


# --- Sums over wide rows, for the second computation of a cross entropy ---------------


ROWS, CLASSES = 4, 4096


def cross_entropy_of(w, x, labels):
    losses = optax.softmax_cross_entropy_with_integer_labels(x @ w, labels)
    return jnp.mean(losses)


def smoothed(w, x, labels):
    """With more that reads the logits than a label."""
    logits = (x @ w).astype(jnp.float32)
    log = jax.nn.log_softmax(logits)
    kept = -jnp.take_along_axis(log, labels[:, None], -1).mean()
    return kept - 0.1 * log.mean() + 1e-3 * jnp.square(jax.nn.logsumexp(logits)).mean()


def given(classes=CLASSES):
    keys = jax.random.split(jax.random.key(0), 3)
    w = jax.random.normal(keys[0], (16, classes))
    x = jax.random.normal(keys[1], (ROWS, 16))
    return w, x, jax.random.randint(keys[2], (ROWS,), 0, classes)


def sums_of_exponentials(func, *args):
    program = [e for e, _ in equations(jax.make_jaxpr(jax.grad(func))(*args))]
    exponentials = [e.outvars[0] for e in program if e.primitive.name == "exp"]
    wide = [v for v in exponentials if v.aval.size >= ROWS * 4096]
    sums = [e for e in program if e.primitive.name == "reduce_sum"]
    return len(wide), sum(e.invars[0] in wide for e in sums)


def test_the_sum_of_a_cross_entropy_is_taken_once():
    # The exponentials twice, for the sum and for the derivative.
    assert sums_of_exponentials(mpx.autocast(cross_entropy_of), *given()) == (2, 1)


def test_what_is_one_kernel_with_its_derivative_is_computed_again_whole():
    gradient = jax.grad(mpx.autocast(cross_entropy_of))
    sums = named("reduce_sum", gradient, *given(classes=4095))
    assert sum(e.invars[0].aval.shape == (ROWS, 4095) for e in sums) >= 2


def gradient(loss, kind, args):
    w, x, labels = args
    if kind == "vmap":
        rows = x[:, None], labels[:, None]
        every = jax.vmap(loss, (None, 0, 0))
        return jax.grad(lambda w: every(w, *rows).mean())(w)
    if kind == "scan":
        parts = x.reshape(2, 2, 16), labels.reshape(2, 2)

        def total(w):
            turn = lambda kept, part: (kept + loss(w, *part), None)  # noqa: E731
            return lax.scan(turn, 0.0, parts)[0] / 2

        return jax.grad(total)(w)
    loss = jax.checkpoint(loss) if kind == "checkpoint" else loss
    return (jax.jit(jax.grad(loss)) if kind == "jit" else jax.grad(loss))(*args)


KINDS = ("plain", "jit", "vmap", "scan", "checkpoint")
CASES = list(zip(KINDS, itertools.cycle([smoothed, cross_entropy_of])))


@pytest.mark.parametrize(("kind", "loss"), slow_but([CASES[1], CASES[4]], CASES))
def test_gradients_are_right(kind, loss):
    args = given()
    ours = gradient(mpx.autocast(loss, jnp.bfloat16), kind, args)
    theirs = jax.grad(loss)(*args)
    # Logits up to 16 are rounded to eight bits; and a gradient of the logits sums to
    # zero over the classes, so one of the weights does, if the sum is theirs.
    assert jnp.linalg.norm(ours - theirs) < 0.04 * jnp.linalg.norm(theirs)
    assert jnp.all(jnp.abs(ours.sum(1)) < 0.05 * jnp.abs(theirs).sum(1))


@pytest.mark.parametrize(
    "loss", slow_but([cross_entropy_of], [cross_entropy_of, smoothed])
)
def test_second_derivatives(loss):
    """The known sum moves with what it is a sum of, once."""
    w, *rest = given()
    direction = jax.random.normal(jax.random.key(1), w.shape)

    def along(func):
        slope = lambda w: jnp.vdot(jax.grad(func)(w, *rest), direction)  # noqa: E731
        return jax.grad(slope)(w)

    ours, theirs = along(mpx.autocast(loss)), along(loss)
    error = jnp.linalg.norm(ours - theirs) / jnp.linalg.norm(theirs)
    assert error < 0.03  # what half precision leaves of it
    plain = along(mpx.autocast(loss, residuals="fast"))
    np.testing.assert_allclose(ours, plain, rtol=1e-2, atol=1e-5)


@pytest.mark.parametrize("number", [jnp.inf, jnp.nan])
def test_a_logit_that_is_not_finite(number):
    """The gradients are those of a program that keeps everything, bit for bit NaN."""
    w, x, labels = given()
    w = w.at[0, 3].set(number)
    losses = (mpx.autocast(cross_entropy_of, residuals=r) for r in ("small", "fast"))
    ours, theirs = (jax.grad(loss)(w, x, labels) for loss in losses)
    np.testing.assert_array_equal(jnp.isnan(ours), jnp.isnan(theirs))


def test_logits_that_are_stored_rounded_have_their_own_sum():
    """Exponentials of rounded logits would not add up to the sum of the exact ones."""

    def loss(w, x, labels):
        a, b = jnp.split(x, 2, 1)
        logits = a @ w[:8] + b @ w[8:]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return jnp.mean(losses)

    w, x, labels = given()
    w, x = w.at[0].set(300), x.at[:, 0].set(1)  # rounded to 1 or 2 in bfloat16
    ours = jax.grad(mpx.autocast(loss, jnp.bfloat16))(w, x, labels)
    # A gradient of the logits sums to zero over the classes, so one of the weights.
    assert jnp.all(jnp.abs(ours.sum(1)) < 0.02 * jnp.abs(ours).sum(1))
