"""A fault is forward where the function has it without a derivative, else backward."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import mpx

from ...helpers import slow_but

ZERO, ONE = jnp.zeros(4), jnp.ones(4)

# Functions that are finite, and the point at which their gradients are not.
OF_GRADIENT = {
    "sqrt": (jnp.sqrt, ZERO),
    "norm": (jnp.linalg.norm, ZERO),
    "arccos": (jnp.arccos, ONE),
    "cbrt": (jnp.cbrt, ZERO),
    "power": (lambda h: h**0.5, ZERO),
    "std": (jnp.std, ONE),
    "std of one row": (lambda h: jnp.std(h[None], axis=0), ONE),
    "eigh": (lambda h: jnp.linalg.eigh(jnp.diag(h))[1][0] ** 2, ONE),
    "masked log": (lambda h: jnp.where(h > 0, jnp.log(h), 0.0), ZERO),
}
# Functions that are not finite themselves.
OF_FUNCTION = {
    "log": (jnp.log, -ONE),
    "exp": (jnp.exp, 1000 * ONE),
    "zero by zero": (lambda h: h / h, ZERO),
    "inner gradient": (lambda h: jax.grad(lambda h: jnp.sum(jnp.sqrt(h)))(h), ZERO),
    "var of one row": (lambda h: jnp.var(h[None], axis=0, ddof=1), ONE),
}


def by_rule(f):
    @jax.custom_vjp
    def made(h):
        return f(h)

    made.defvjp(lambda h: (f(h), h), lambda h, c: jax.vjp(f, h)[1](c))
    return made


def by_scan(f):
    turn = lambda total, h: (total + jnp.sum(f(h)), None)  # noqa: E731
    return lambda h: jax.lax.scan(turn, jnp.zeros(()), jnp.stack([h, h]))[0]


WAYS = {
    "plain": lambda f: f,
    "scan": by_scan,
    "remat": jax.checkpoint,
    "remat in scan": lambda f: by_scan(jax.checkpoint(f)),
    "vmap": lambda f: lambda h: jax.vmap(f)(jnp.stack([h, h])),
    "custom_vjp": by_rule,
}
OTHERS = [way for way in WAYS if way != "plain"]


def first_of(f, h):
    loss = mpx.autocast(lambda w: jnp.sum(f(w)))
    return mpx.blame(loss, mpx.NoLossScaling())(h).first


POINTS = zip(OTHERS, ("sqrt", "power", "power", "sqrt", "sqrt"), strict=True)
QUICK = [("plain", "sqrt"), ("plain", "norm"), *POINTS]
ALL = [*QUICK, *(("plain", n) for n in [*OF_GRADIENT][2:]), ("custom_vjp", "eigh")]


@pytest.mark.parametrize(("way", "name"), slow_but(QUICK, ALL))
def test_a_fault_of_the_gradient_alone_is_backward(way, name):
    f, h = OF_GRADIENT[name]
    assert first_of(WAYS[way](f), h).phase == "backward"


FORWARD = [("plain", name) for name in ("exp", "zero by zero", "inner gradient")]
FORWARD += [(way, "log") for way in OTHERS]
ALL = [*FORWARD, ("plain", "var of one row"), ("remat in scan", "inner gradient")]


@pytest.mark.parametrize(("way", "name"), slow_but(FORWARD, ALL))
def test_a_fault_of_the_function_is_forward(way, name):
    f, h = OF_FUNCTION[name]
    assert first_of(WAYS[way](f), h).phase == "forward"


def test_a_checkpoint_recomputes_and_the_function_comes_before_its_gradient():
    # Infinity is harmless forward, where 1 is divided by it, and not backward.
    first = first_of(WAYS["remat in scan"](lambda h: h / jnp.exp(h * h)), 1000 * ONE)
    assert (first.primitive, first.phase) == ("exp", "recompute")
    f = lambda h: jnp.sum(jnp.sqrt(h)) + jnp.sum(jnp.log(h - 1.0))  # noqa: E731
    assert first_of(f, ZERO).primitive == "log"


def in_branch(h):
    total = lambda h: jnp.sum(jnp.log(h))  # noqa: E731
    return jax.lax.cond(h[0] < 1, total, jnp.sum, h)


@pytest.mark.parametrize("f", [lambda h: jnp.log(h[0]), in_branch])
def test_a_fault_that_makes_the_loss_itself_is_forward(f):
    report = mpx.blame(mpx.autocast(f), mpx.NoLossScaling())(ZERO)
    assert [c.phase for c in report.culprits] == ["forward", "backward"]
    assert report.first.primitive == "log"


AXES = [(("a", "b"), AxisType.Auto), (("a",), AxisType.Explicit)]


@pytest.mark.parametrize(
    ("names", "second"),
    [AXES[0], pytest.param(*AXES[1], marks=pytest.mark.exhaustive)],
)
def test_a_fault_on_one_device_of_explicit_axes_is_named(names, second):
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Explicit, second))

    def local(w, x):
        return jax.lax.pmean(jnp.mean(jnp.log(x * w[None])), "a")

    specs = {"in_specs": (P(), P("a")), "out_specs": P(), "axis_names": set(names)}
    loss = jax.shard_map(local, mesh=mesh, **specs)
    w = jax.device_put(ONE, NamedSharding(mesh, P()))
    x = jnp.ones((8, 4)).at[5].set(-1.0)
    x = jax.device_put(x, NamedSharding(mesh, P("a")))
    report = mpx.blame(mpx.autocast(loss), mpx.NoLossScaling())(w, x)
    assert (report.first.primitive, report.first.phase) == ("log", "forward")
    assert report.first.devices == ((2,) if names == ("a",) else (4, 5))
    assert report.rows == (5,)
