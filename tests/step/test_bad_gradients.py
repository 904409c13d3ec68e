"""Wrong calls of the gradient functions, and odd ones that are right."""

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import mpx

from ..helpers import (
    OTHER_LEAVES,
    Case,
    each_refused,
    refused,
    unchecked_annotations,
    unscaled,
)

pytestmark = unscaled
NONE = mpx.NoLossScaling()


def _loss(w: Any, x: Any = 1.0) -> Any:
    return jnp.sum(w * x)


def _grads(func: Any = _loss, scaling: Any = NONE, **options: Any) -> Any:
    return mpx.filter_value_and_grad(func, scaling, **options)


def _w() -> jax.Array:
    return jnp.ones(2)


GRADIENT_FUNCTIONS = {
    "filter_grad": mpx.filter_grad,
    "filter_value_and_grad": mpx.filter_value_and_grad,
    "calculate_scaled_grad": mpx.calculate_scaled_grad,
    "grad": mpx.grad,
    "value_and_grad": mpx.value_and_grad,
}


def _frozen(transform: Any) -> Any:
    def call(f: Any) -> Any:
        scaling = mpx.DynamicLossScaling()
        return transform(lambda w: f(_loss, scaling)(w)[-1])(_w())

    return call


def _once(func: Any, *args: Any, **options: Any) -> Any:
    return lambda f: f(func, mpx.DynamicLossScaling(), **options)(*args)


def _scanned(g: Any) -> Any:
    return lambda w: jax.lax.scan(lambda c, x: (c, g(x)), 0, w[None])


WHOLE = "`accumulate` must be a whole number"
SCALAR = "must return a scalar loss; "
# Each for every gradient function: a name, what calls it, and what the error says.
OF_ALL = [
    *[
        (f"scaling {value}", lambda f, value=value: f(_loss, value), TypeError, match)
        for value in (8.0, 1, True, "dynamic", None, jnp.float32, mpx.NoLossScaling)
        for match in ("must be a loss scaling",)
    ],
    ("func", lambda f: f(3, NONE), TypeError, "needs a function; got int 3"),
    ("frozen in jit", _frozen(jax.jit), ValueError, "would be a constant"),
    ("frozen in scan", _frozen(_scanned), ValueError, "would be a constant"),
    ("no arguments", _once(_loss), TypeError, "was called with 0"),
    (
        "vector loss",
        lambda f: _once(lambda w: w, _w())(f),
        ValueError,
        rf"{SCALAR}got float\d+\[2\]. Reduce it, in full",
    ),
    (
        "vector loss of autocast",
        lambda f: _once(mpx.autocast(lambda w: w), _w())(f),
        ValueError,
        rf"{SCALAR}.*, for example by `jnp.mean\(losses\)`",
    ),
    *[
        (
            f"{kind} loss",
            lambda f, value=value: _once(value, _w())(f),
            TypeError,
            f"floating scalar.*{message}",
        )
        for kind, value, message in [
            ("None", lambda w: None, "got None. Is a `return` missing"),
            ("complex", lambda w: jnp.sum(w).astype("complex64"), r"got complex64\[\]"),
            ("integer", lambda w: jnp.sum(w > 0), r"got int32\[\]"),
            ("bool", lambda w: jnp.any(w > 0), r"got bool\[\]"),
            ("int", lambda w: 3, "got int 3"),
            ("text", lambda w: "loss", "got str 'loss'"),
            ("dict", lambda w: {"loss": jnp.sum(w)}, "an instance of builtins.dict"),
            ("tuple", lambda w: (jnp.sum(w), w), "set `has_aux=True`"),
            ("list", lambda w: [jnp.sum(w)], "a list of"),
        ]
    ],
    *[
        (
            f"has_aux but aux is {kind}",
            lambda f, value=value: _once(value, _w(), has_aux=True)(f),
            TypeError,
            r"must return `\(loss, aux\)`",
        )
        for kind, value in [
            ("none", _loss),
            ("three", lambda w: (_loss(w), 1, 2)),
            ("a list", lambda w: [_loss(w), 1]),
        ]
    ],
    (
        "float16 weights",
        lambda f: _once(lambda p: _loss(p["w"]), {"w": _w().astype("float16")})(f),
        ValueError,
        r"full precision; got float16\[2\] at .*\['w'\]",
    ),
    (
        "NNX",
        lambda f: _once(_loss, nnx.Linear(2, 2, rngs=nnx.Rngs(0)), _w())(f),
        TypeError,
        "Flax NNX",
    ),
]

GRADIENTS = [
    *[
        Case(
            f"{function} {name}",
            functools.partial(call, f),
            error,
            rf"`mpx.{function}`.*{match}|{match}.*`mpx.{function}`",
        )
        for name, call, error, match in OF_ALL
        for function, f in GRADIENT_FUNCTIONS.items()
    ],
    *each_refused(
        ValueError,
        "no floating JAX array to differentiate",
        lambda weights: _grads()(weights()),
        lambda: jnp.arange(2),
        dict,
        lambda: None,
        lambda: "model",
        lambda: jax.random.key(0),
        lambda: 1.0,
        lambda: jnp.ones(2, jnp.float8_e4m3fn),
    ),
    *each_refused(
        TypeError,
        "differentiates floating numbers",
        lambda value: mpx.grad(_loss, NONE)(value()),
        lambda: 3,
        lambda: jnp.arange(2),
        lambda: jnp.ones(2, jnp.float8_e4m3fn),
        lambda: True,
        lambda: "w",
        lambda: jax.random.key(0),
    ),
    *each_refused(
        TypeError,
        "`argnums` of `mpx.grad`",
        lambda value: mpx.grad(_loss, NONE, value),
        *(1.0, "0", True, (), (0, 0), None, [0]),
    ),
    *each_refused(
        ValueError,
        "`retries` of `mpx.filter_value_and_grad`",
        lambda value: _grads(retries=value),
        *(-1, 1.5, True, None, "2"),
    ),
    *each_refused(
        TypeError,
        WHOLE,
        lambda value: _grads(accumulate=value),
        *(True, None),
    ),
    *refused(
        ValueError,
        (
            "`retries` needs a scale that can fall; got StaticLossScaling",
            lambda: _grads(retries=1, scaling=mpx.StaticLossScaling(8.0))(_w()),
        ),
        ("needs a dtype; got 'fp16'", lambda: _grads(policy="c=fp16")),
        ("at least 1; got 0", lambda: _grads(accumulate=0)),
        ("at least 1; got -2", lambda: _grads(accumulate=-2)),
        (
            r"(?s)args\[1\].*4|4.*args\[1\]",
            lambda: _grads(lambda w, x: _loss(w), accumulate=3)(_w(), jnp.ones(4)),
        ),
        (
            "`state_argnum` and `new_state` together",
            lambda: mpx.Accumulation(2, state_argnum=1),
        ),
        (
            "needs fields of value, scaling, finite, grads; got .*gradients",
            lambda: _grads()(_w())._replace(gradients=1),
        ),
    ),
    *refused(
        TypeError,
        ("was called with 2", lambda: mpx.grad(_loss, NONE, 2)(1.0, 2.0)),
        ("`keep` of .* function", lambda: _grads(keep="w")),
        ("`policy` of .*got int 3", lambda: _grads(policy=3)),
        ("`accumulate_dtype` of .*int32", lambda: _grads(accumulate_dtype="int32")),
        (f"{WHOLE}.*float 2.0", lambda: _grads(accumulate=2.0)),
    ),
    *refused(
        AttributeError,
        (
            "`mpx.filter_value_and_grad`",
            lambda: mpx.filter_grad(_loss, NONE)(_w()).value,
        ),
        ("build .*`has_aux=True`", lambda: _grads()(_w()).aux),
    ),
]


@pytest.mark.parametrize("case", GRADIENTS, ids=lambda case: case.test_id)
def test_wrong_calls_are_refused(case):
    case.check()


# What looks odd and is right.


@pytest.mark.parametrize("transform", [jax.jit, jax.checkpoint, eqx.filter_jit])
def test_a_state_without_memory_may_be_closed_over(transform):
    scaling = mpx.NoLossScaling(skip=False)
    step = transform(lambda w: mpx.filter_grad(_loss, scaling)(w).grads)
    assert step(_w()).tolist() == [1.0, 1.0]


def test_a_missing_scaling_is_fine_in_full_precision():
    result = mpx.filter_grad(_loss, None, use_mixed_precision=False)(_w())
    assert result.scaling is None and bool(result.finite)


def test_a_python_float_as_a_loss():
    with unchecked_annotations():
        result = _grads(lambda w: 1.5)(_w())
    assert float(result.value) == 1.5 and not result.grads.any()


@pytest.mark.parametrize("kind", OTHER_LEAVES)
def test_leaves_of_every_kind_stand_beside_the_weights(kind):
    leaf = OTHER_LEAVES[kind]()
    result = _grads(lambda m: _loss(m["w"]))({"w": _w(), "other": leaf})
    assert bool(result.finite)
    assert result.grads["w"].tolist() == [1.0, 1.0]
