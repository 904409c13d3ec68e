"""Wrong calls of the gradient functions, and odd ones that are right.

The jaxtyping hook is off here, as in `test_bad_input`.
"""

from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import mpx

from ..helpers import OTHER_LEAVES, Case, unchecked_annotations, unscaled

pytestmark = unscaled


@pytest.fixture(autouse=True)
def _as_a_user_sees_it() -> Iterator[None]:
    with unchecked_annotations():
        yield


def _loss(w: Any, x: Any = 1.0) -> Any:
    return jnp.sum(w * x)


def _grads(**options: Any) -> Callable[[Any], Any]:
    """A gradient function with a state that is well, called with one weight."""
    func = options.pop("func", _loss)
    scaling = options.pop("scaling", None) or mpx.NoLossScaling()
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


def _of_all(name: str, call: Any, error: type[Exception], match: str) -> list[Case]:
    """One case for each of the gradient functions."""
    return [
        Case(
            f"{function} {name}",
            lambda f=f: call(f),
            error,
            rf"`mpx.{function}`.*{match}|{match}.*`mpx.{function}`",
        )
        for function, f in GRADIENT_FUNCTIONS.items()
    ]


def _frozen(transform: Any) -> Any:
    def call(f: Any) -> Any:
        scaling = mpx.DynamicLossScaling()
        return transform(lambda w: f(_loss, scaling)(w)[-1])(_w())

    return call


def _once(f: Any, func: Any, *args: Any, **options: Any) -> Any:
    return f(func, mpx.DynamicLossScaling(), **options)(*args)


GRADIENTS = [
    *[
        case
        for value in (8.0, 1, True, "dynamic", None, jnp.float32, mpx.NoLossScaling)
        for case in _of_all(
            f"scaling {value}",
            lambda f, value=value: f(_loss, value),
            TypeError,
            "must be a loss scaling",
        )
    ],
    *_of_all(
        "func",
        lambda f: f(3, mpx.NoLossScaling()),
        TypeError,
        "needs a function; got int 3",
    ),
    *_of_all(
        "frozen in jit",
        _frozen(jax.jit),
        ValueError,
        "would be a constant",
    ),
    *_of_all(
        "frozen in scan",
        _frozen(lambda g: lambda w: jax.lax.scan(lambda c, x: (c, g(x)), 0, w[None])),
        ValueError,
        "would be a constant",
    ),
    *_of_all(
        "no arguments",
        lambda f: _once(f, _loss),
        TypeError,
        "was called with 0",
    ),
    *_of_all(
        "vector loss",
        lambda f: _once(f, lambda w: w, _w()),
        ValueError,
        r"must return a scalar loss; got float\d+\[2\]. Reduce it, in full",
    ),
    *_of_all(
        "vector loss of autocast",
        lambda f: _once(f, mpx.autocast(lambda w: w), _w()),
        ValueError,
        r"must return a scalar loss; .*, for example by `jnp.mean\(losses\)`",
    ),
    *[
        case
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
        for case in _of_all(
            f"{kind} loss",
            lambda f, value=value: _once(f, value, _w()),
            TypeError,
            f"floating scalar.*{message}",
        )
    ],
    *[
        case
        for kind, value in [
            ("none", _loss),
            ("three", lambda w: (_loss(w), 1, 2)),
            ("a list", lambda w: [_loss(w), 1]),
        ]
        for case in _of_all(
            f"has_aux but aux is {kind}",
            lambda f, value=value: _once(f, value, _w(), has_aux=True),
            TypeError,
            r"must return `\(loss, aux\)`",
        )
    ],
    *_of_all(
        "float16 weights",
        lambda f: _once(f, lambda p: _loss(p["w"]), {"w": jnp.ones(2, jnp.float16)}),
        ValueError,
        r"full precision; got float16\[2\] at .*\['w'\]",
    ),
    *_of_all(
        "NNX",
        lambda f: _once(
            f, lambda m, x: m(x).sum(), nnx.Linear(2, 2, rngs=nnx.Rngs(0)), _w()
        ),
        TypeError,
        "Flax NNX",
    ),
    *[
        Case(
            f"no weights {kind}",
            lambda weights=weights: _grads()(weights()),
            ValueError,
            "no floating JAX array to differentiate",
        )
        for kind, weights in {
            "int": lambda: jnp.arange(2),
            "empty": dict,
            "None": lambda: None,
            "text": lambda: "model",
            "key": lambda: jax.random.key(0),
            "Python float": lambda: 1.0,
            "8 bits": lambda: jnp.ones(2, jnp.float8_e4m3fn),
        }.items()
    ],
    *[
        Case(
            f"grad of {kind}",
            lambda value=value: mpx.grad(_loss, mpx.NoLossScaling())(value()),
            TypeError,
            "differentiates floating numbers",
        )
        for kind, value in {
            "int": lambda: 3,
            "int array": lambda: jnp.arange(2),
            "8 bits": lambda: jnp.ones(2, jnp.float8_e4m3fn),
            "bool": lambda: True,
            "text": lambda: "w",
            "key": lambda: jax.random.key(0),
        }.items()
    ],
    *[
        Case(
            f"argnums {value}",
            lambda value=value: mpx.grad(_loss, mpx.NoLossScaling(), value),
            TypeError,
            "`argnums` of `mpx.grad`",
        )
        for value in (1.0, "0", True, (), (0, 0), None, [0])
    ],
    Case(
        "argnums out of range",
        lambda: mpx.grad(_loss, mpx.NoLossScaling(), 2)(1.0, 2.0),
        TypeError,
        "was called with 2",
    ),
    *[
        Case(
            f"retries {value}",
            lambda value=value: _grads(retries=value),
            ValueError,
            "`retries` of `mpx.filter_value_and_grad`",
        )
        for value in (-1, 1.5, True, None, "2")
    ],
    Case(
        "retries of a static scale",
        lambda: _grads(retries=1, scaling=mpx.StaticLossScaling(8.0))(_w()),
        ValueError,
        "`retries` needs a scale that can fall; got StaticLossScaling",
    ),
    Case("keep", lambda: _grads(keep="w"), TypeError, "`keep` of .* function"),
    Case("policy", lambda: _grads(policy=3), TypeError, "`policy` of .*got int 3"),
    Case(
        "policy text",
        lambda: _grads(policy="c=fp16"),
        ValueError,
        "needs a dtype; got 'fp16'",
    ),
    Case(
        "accumulate_dtype",
        lambda: _grads(accumulate_dtype="int32"),
        TypeError,
        "`accumulate_dtype` of .*int32",
    ),
    *[
        Case(
            f"accumulate {value}",
            lambda value=value: _grads(accumulate=value),
            error,
            match,
        )
        for value, error, match in [
            (0, ValueError, "at least 1; got 0"),
            (-2, ValueError, "at least 1; got -2"),
            (2.0, TypeError, "`accumulate` must be a whole number.*float 2.0"),
            (True, TypeError, "`accumulate` must be a whole number"),
            (None, TypeError, "`accumulate` must be a whole number"),
        ]
    ],
    Case(
        "accumulate does not divide",
        lambda: _grads(func=lambda w, x: _loss(w), accumulate=3)(_w(), jnp.ones(4)),
        ValueError,
        r"(?s)args\[1\].*4|4.*args\[1\]",
    ),
    Case(
        "accumulation of a half state",
        lambda: mpx.Accumulation(2, state_argnum=1),
        ValueError,
        "`state_argnum` and `new_state` together",
    ),
    Case(
        "no value",
        lambda: mpx.filter_grad(_loss, mpx.NoLossScaling())(_w()).value,
        AttributeError,
        "`mpx.filter_value_and_grad`",
    ),
    Case(
        "no aux", lambda: _grads()(_w()).aux, AttributeError, "build .*`has_aux=True`"
    ),
    Case(
        "replace of an unknown part",
        lambda: _grads()(_w())._replace(gradients=1),
        ValueError,
        "needs fields of value, scaling, finite, grads; got .*gradients",
    ),
]


@pytest.mark.parametrize("case", GRADIENTS, ids=lambda case: case.test_id)
def test_wrong_calls_are_refused(case):
    with pytest.raises(case.error, match=case.match):
        case.call()


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
    result = _grads(func=lambda w: 1.5)(_w())
    assert float(result.value) == 1.5 and not result.grads.any()


@pytest.mark.parametrize("kind", OTHER_LEAVES)
def test_leaves_of_every_kind_stand_beside_the_weights(kind):
    leaf = OTHER_LEAVES[kind]()
    result = _grads(func=lambda m: _loss(m["w"]))({"w": _w(), "other": leaf})
    assert bool(result.finite)
    assert result.grads["w"].tolist() == [1.0, 1.0]
