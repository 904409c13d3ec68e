"""Wrong calls of `mpx.nnx`: each gets an error that says what came and what to do."""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import mpx
import mpx.nnx

from ..helpers import unchecked_annotations, unscaled
from .cases import FLOAT16, Normed, Tied, batch, loss_fn, make

pytestmark = pytest.mark.third_party


@pytest.fixture(autouse=True)
def _as_a_user_sees_it():
    with unchecked_annotations():
        yield


def tied():
    return Tied(nnx.Rngs(0))


def linear(width):
    return nnx.Linear(3, width, rngs=nnx.Rngs(0))


def first(model, x, *rest):
    return jnp.mean(model(x))


def gradient(func=first, scaling=None, **options):
    return mpx.nnx.value_and_grad(func, scaling or mpx.NoLossScaling(), **options)


def x():
    return batch(0)[0]


class Holding(nnx.Module):
    def __init__(self, value, kind=nnx.Param):
        self.weight = nnx.Param(jnp.ones(3))
        self.held = kind(value)

    def __call__(self, x):
        return self.weight[...]


def statistic():
    return Holding(jnp.ones(3), nnx.BatchStat)


def write(value):
    def loss(model, x):
        model.held.set_value(value)
        return jnp.mean(model(x))

    return loss


def update(**changes):
    model, optimizer = make("tied")
    grads = nnx.state(model, nnx.Param)
    parts = {"optimizer": optimizer, "model": model, "grads": grads, "finite": True}
    parts |= changes
    return mpx.nnx.update(**parts)


def update_with(optimizer, model):
    return update(optimizer=optimizer, model=model, grads=nnx.state(model, nnx.Param))


TYPE_ERRORS = {
    "scaling": (lambda: gradient(scaling=3), "`scaling` of `mpx.nnx.v"),
    "function": (lambda: gradient(3), "`mpx.nnx.*needs a function"),
    "policy": (lambda: gradient(policy=3), "`policy` of `mpx.nnx"),
    "keep": (lambda: gradient(keep=3), "`keep` of `mpx.nnx"),
    **{
        f"argnums {value}": (
            lambda value=value: gradient(argnums=value),
            "`argnums` of `mpx.nnx.value_and_grad`",
        )
        for value in ("0", None, 1.0, (0, 0), (), nnx.Param, (nnx.DiffState(0, 1), 0))
    },
    "grad names itself": (
        lambda: mpx.nnx.grad(first, 3),
        "`scaling` of `mpx.nnx.grad`",
    ),
    "position": (
        lambda: gradient(argnums=2)(tied(), x()),
        r"positional arguments \(2,\).*called with 2",
    ),
    "keyword": (
        lambda: gradient()(model=tied(), x=x()),
        "called with 0. Pass the model by position",
    ),
    "bound method": (
        lambda: gradient(tied().__call__),
        "takes the module as an argument; got an instance of .*Tied or a method",
    ),
    "module": (lambda: gradient(tied()), "got an instance of .*Tied"),
    "integer weights": (
        lambda: gradient()(Holding(jnp.arange(3)), x()),
        r"got int32\[3\] at `args\[0\].held`.*nnx.DiffState\(0, filter\)",
    ),
    "weights that are no arrays": (
        lambda: gradient()({"model": Holding("text")}, x()),
        r"got str 'text' at `args\[0\]\['model'\].held`",
    ),
    "aux without has_aux": (
        lambda: gradient(loss_fn)(tied(), *batch(0)),
        "For `\\(loss, aux\\)` set `has_aux=True`",
    ),
    "has_aux without aux": (
        lambda: gradient(has_aux=True)(tied(), x()),
        "`has_aux=True`.*must return `\\(loss, aux\\)`",
    ),
    **{
        kind: (
            lambda kind=kind: gradient()(
                nnx.with_vars(Holding(jnp.ones(3)), **{kind: True}), x()
            ),
            rf"got one that is a {name} at `args\[0\].*nnx.with_vars",
        )
        for kind, name in {"ref": "reference", "hijax": "hijax type"}.items()
    },
    "no nnx optimizer": (
        lambda: update(optimizer=optax.sgd(0.1)),
        "`mpx.nnx.update` needs an `nnx.Optimizer`.*mpx.optimizer_update",
    ),
    **{
        f"finite {value}": (
            lambda value=value: update(finite=value),
            "`finite` of `mpx.nnx.update` needs one boolean",
        )
        for value in (1, None, jnp.ones(2, bool))
    },
}
VALUE_ERRORS = {
    "retries": (lambda: gradient(retries=-1), "`retries` of `mpx.nnx"),
    "accumulate": (lambda: gradient(accumulate=0), "at least 1"),
    "half weights": (
        lambda: gradient()(Holding(jnp.ones(3, jnp.float16)), x()),
        r"weights in full precision; got float16\[3\] at `args\[0\].held`",
    ),
    "no weights": (
        lambda: gradient(argnums=nnx.DiffState(0, nnx.BatchStat))(tied(), x()),
        "found no floating JAX array to differentiate",
    ),
    "loss is no scalar": (
        lambda: gradient(lambda model, x: model(x))(tied(), x()),
        r"must return a scalar loss; got float16\[8,1\]",
    ),
    "frozen scaling": (lambda: nnx.jit(gradient())(tied(), x()), "would be a constant"),
    "one model twice": (
        lambda: (lambda model: gradient()(model, x(), model))(tied()),
        r"one Variable twice, at `args\[0\].first.bias` and at `args\[2\].first.bias`",
    ),
    "another shape": (
        lambda: gradient(write(jnp.ones(4)))(statistic(), x()),
        r"got float32\[4\] for float32\[3\] at `args\[0\].held`",
    ),
    "another dtype": (
        lambda: gradient(write(jnp.arange(3)))(statistic(), x()),
        r"got int32\[3\] for float32\[3\]",
    ),
    "a parameter changed while accumulating": (
        lambda: gradient(write(jnp.ones(3)), accumulate=2)(Holding(jnp.ones(3)), x()),
        r"`accumulate`.*set `args\[0\].held`.*Omit `accumulate`",
    ),
    "gradients of another model": (
        lambda: update(grads=nnx.state(Normed(nnx.Rngs(0)), nnx.Param)),
        r"missing: `.*first.*unknown: .*layers.*the filter of the optimizer",
    ),
    "an optimizer of another model": (
        lambda: update_with(make("tied")[1], linear(2)),
        r"missing: `0.mu.bias`.*unknown: `0.mu.first.*for this model: `nnx.Optimizer",
    ),
    "an optimizer of another width": (
        lambda: update_with(
            nnx.Optimizer(linear(4), optax.adam(1e-2), wrt=nnx.Param), linear(8)
        ),
        r"unknown: none; of another shape: `0.mu.bias \(4,\) for \(8,\)`",
    ),
    "no gradients": (
        lambda: update(grads=nnx.State({})),
        "needs a gradient for each Variable.*missing:",
    ),
    "gradients of another shape": (
        lambda: update(
            grads=jax.tree.map(lambda g: g[:1], nnx.state(tied(), nnx.Param))
        ),
        r"a gradient of its weight's shape; got float32\[1\] for float32\[4\] at `",
    ),
}
CASES = [
    *(pytest.param(TypeError, *case, id=name) for name, case in TYPE_ERRORS.items()),
    *(pytest.param(ValueError, *case, id=name) for name, case in VALUE_ERRORS.items()),
]


@pytest.mark.parametrize(("error", "call", "match"), CASES)
def test_wrong_calls_are_refused(error, call, match):
    with pytest.raises(error, match=match):
        call()


def test_an_optimizer_that_changes_its_form_is_refused():
    class Growing(nnx.Optimizer):
        def update(self, model, grads, /, **kwargs):
            super().update(model, grads, **kwargs)
            self.more = nnx.Variable(jnp.ones(1))

    model, _ = make("tied")
    optimizer = Growing(model, optax.sgd(0.1), wrt=nnx.Param)
    with pytest.raises(ValueError, match="adds or removes Variables of the optimizer"):
        update(optimizer=optimizer, model=model)


@pytest.mark.slow
@unscaled
def test_an_error_in_the_loss_leaves_the_model_as_it_was():
    model, _ = make("normed")

    def loss(model, x):
        model(x)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        gradient(loss, policy=FLOAT16)(model, x())
    assert int(model.calls[...]) == 0
    assert bool(gradient(policy=FLOAT16)(model, x()).finite)


def test_a_model_from_outside_of_the_traced_function_is_refused():
    """As `nnx.value_and_grad` does: its changes could not come out."""
    model, _ = make("normed")

    def step(scaling, x):
        return gradient(scaling=scaling)(model, x).value

    with pytest.raises(ValueError, match=r"outside the function.*args\[0\].calls"):
        nnx.jit(step)(mpx.NoLossScaling(), x())
    assert int(model.calls[...]) == 0
