"""Wrong calls: each gets an error that says what must hold and what came.

The jaxtyping hook is off here: its own errors would come first, and a user has no hook.
"""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpx

from .helpers import Case, unchecked_annotations, unscaled

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


W = np.ones(2, np.float32)


def _w() -> jax.Array:
    return jnp.ones(2)


CASTS = [
    Case(
        f"{function} {dtype}",
        lambda make=make, dtype=dtype: make(dtype),
        error,
        match,
    )
    for function, make in {
        "cast_tree": lambda d: mpx.cast_tree({}, d),
        "cast_function": lambda d: mpx.cast_function(_loss, d),
        "return_dtype": lambda d: mpx.cast_function(_loss, "float16", d),
        "Policy": lambda d: mpx.Policy("float32", d, "float32"),
    }.items()
    for dtype, error, match in [
        ("float17", ValueError, "needs a dtype; got 'float17'.*float32.*float8_e5m2"),
        ("", ValueError, "needs a dtype; got ''"),
        (3, ValueError, "needs a dtype; got 3"),
        (object(), ValueError, "needs a dtype; got <object"),
        ("int8", TypeError, "got int8"),
        (bool, TypeError, "got bool"),
        (jnp.int32, TypeError, "got int32"),
        ("complex64", TypeError, "got complex64"),
        ("float4_e2m1fn", TypeError, "got float4_e2m1fn"),
        ("float8_e8m0fnu", TypeError, "got float8_e8m0fnu"),
        ("float64", ValueError, "jax_enable_x64"),
        (jnp.float64, ValueError, "jax_enable_x64"),
    ]
] + [
    Case(
        "cast_tree None",
        lambda: mpx.cast_tree({}, None),
        ValueError,
        "needs a dtype; got None",
    ),
    Case(
        "keep is no function",
        lambda: mpx.cast_tree({"w": W}, "float16", keep="w"),
        TypeError,
        "`keep`.*must be a function",
    ),
    Case(
        "keep of a named cast",
        lambda: mpx.cast_to_half_precision({"w": W}, keep=["w"]),
        TypeError,
        "`keep`.*must be a function",
    ),
    Case(
        "cast_function of no function",
        lambda: mpx.cast_function(3, "float16"),
        TypeError,
        "`mpx.cast_function.*got 3",
    ),
    Case(
        "force_full_precision of a dtype",
        lambda: mpx.force_full_precision("float32"),
        TypeError,
        "`mpx.force_full_precision.*got 'float32'",
    ),
]

POLICIES = [
    Case(f"get_policy {text!r}", lambda text=text: mpx.get_policy(text), error, match)
    for text, error, match in [
        ("", ValueError, "needs a dtype; got ''"),
        ("fp16", ValueError, "needs a dtype; got 'fp16'"),
        ("c=", ValueError, "for 'c'.*needs a dtype; got ''"),
        ("x=f16", ValueError, "unknown key 'x'"),
        ("c=f16,c=f32", ValueError, "repeated key 'c'"),
        ("c=f16,compute=f32", ValueError, "repeated key 'compute'"),
        ("c=f16,", ValueError, "unknown key ''"),
        ("c=f16;o=f32", ValueError, "needs a dtype; got 'f16;o=f32'"),
        ("C=f16", ValueError, "unknown key 'C'"),
        ("c=int8", TypeError, "for 'c'.*got int8"),
        ("c=f64", ValueError, "jax_enable_x64"),
        (None, TypeError, "needs a string.*got None"),
        (jnp.float16, TypeError, "needs a string"),
    ]
] + [
    Case(
        f"{name} {dtype}",
        lambda name=name, dtype=dtype: mpx.Policy("f32", "f16", "f32", **{name: dtype}),
        ValueError,
        f"`{name}` of `mpx.Policy` must {rule}",
    )
    for name, dtype, rule in (
        ("grad_dtype", "f16", "have the range of float32"),
        ("reduce_dtype", "bf16", "be the compute dtype"),
        ("reduce_dtype", "float8_e4m3fn", "be the compute dtype"),
        ("gather_dtype", "bf16", "be the compute dtype"),
    )
]

SCALINGS = [
    Case(
        f"adjust {value}",
        lambda value=value, make=make: make().adjust(value),
        TypeError,
        rf"`grads_finite` of `{make.__name__}.adjust` needs one boolean",
    )
    for make in (mpx.DynamicLossScaling, mpx.NoLossScaling)
    for value in (1, 1.0, None, "True", np.int32(1), np.array([True]), {"w": True})
] + [
    Case(
        "skip is no bool",
        lambda: mpx.NoLossScaling(skip=np.array(True)),
        TypeError,
        "`skip` of `mpx.NoLossScaling`",
    ),
    Case(
        "scaled by a number",
        lambda: mpx.scaled(jnp.sum, 8.0),
        TypeError,
        "`scaling` of `mpx.scaled.*got float 8.0.*StaticLossScaling",
    ),
    Case(
        "scaled of no function",
        lambda: mpx.scaled(3, mpx.NoLossScaling()),
        TypeError,
        "`mpx.scaled.*got int 3",
    ),
    Case(
        "scaled has_aux without aux",
        lambda: mpx.scaled(jnp.sum, mpx.NoLossScaling(), has_aux=True)(W),
        TypeError,
        "`has_aux=True`",
    ),
]

TREES = [
    Case(
        "pred is no scalar",
        lambda: mpx.select_tree(np.array([True, False]), W, W),
        TypeError,
        r"`pred` of `mpx.select_tree.*got bool\[2\].*mpx.all_finite",
    ),
    Case(
        "pred is a float",
        lambda: mpx.select_tree(1.0, W, W),
        TypeError,
        "one boolean.*got float 1.0",
    ),
    Case(
        "structure",
        lambda: mpx.select_tree(True, {"a": W}, {"b": W}),
        ValueError,
        "(?s)two trees of the same structure.*'a'.*'b'",
    ),
    Case(
        "shape",
        lambda: mpx.select_tree(True, {"a": W}, {"a": np.ones(3, np.float32)}),
        ValueError,
        r"float32\[2\] and float32\[3\] at `\['a'\]`",
    ),
    Case(
        "dtype",
        lambda: mpx.select_tree(True, {"a": W}, {"a": np.ones(2, np.float16)}),
        ValueError,
        r"float32\[2\] and float16\[2\] at `\['a'\]`",
    ),
    Case(
        "array and number",
        lambda: mpx.select_tree(True, [W], [1.0]),
        ValueError,
        r"float32\[2\] and float 1.0 at `\[0\]`",
    ),
    Case(
        "number and array",
        lambda: mpx.select_tree(True, [1.0], [W]),
        ValueError,
        r"float 1.0 and float32\[2\] at `\[0\]`",
    ),
    Case(
        "other text",
        lambda: mpx.select_tree(True, {"s": "a"}, {"s": "b"}),
        ValueError,
        r"cannot choose.*str 'a' and str 'b' at `\['s'\]`",
    ),
]


def _update(**changes: Any) -> Any:
    parts = {"model": _w(), "optimizer": optax.sgd(0.1), "grads": _w(), "finite": True}
    parts |= changes
    state = optax.sgd(0.1).init(_w())
    return mpx.optimizer_update(
        parts["model"], parts["optimizer"], state, parts["grads"], parts["finite"]
    )


def _step(result: Any = None, **options: Any) -> Any:
    optimizer = optax.sgd(0.1)
    result = _grads()(_w()) if result is None else result
    return mpx.optimizer_step(_w(), optimizer, optimizer.init(_w()), result, **options)


OPTIMIZERS = [
    *[
        Case(
            f"finite {value}",
            lambda value=value: _update(finite=value),
            TypeError,
            "`grads_finite` of `mpx.optimizer_update` needs one boolean",
        )
        for value in (1, None, np.ones(2, bool))
    ],
    *[
        Case(
            f"optimizer {value}",
            lambda value=value: _update(optimizer=value),
            TypeError,
            "`mpx.optimizer_update` needs an Optax transformation",
        )
        for value in (None, 0.1, optax.sgd)
    ],
    *[
        Case(
            f"no gradients {value}",
            lambda value=value: _update(model=value, grads=value),
            ValueError,
            "`mpx.optimizer_update` needs gradients",
        )
        for value in ({}, None, {"w": None})
    ],
    Case(
        "gradients of another structure",
        lambda: _update(grads={"w": _w()}),
        ValueError,
        "`mpx.optimizer_update`.*structure",
    ),
    Case(
        "gradients of another shape",
        lambda: _update(grads=jnp.ones(1)),
        ValueError,
        r"`mpx.optimizer_update`.*float32\[1\]",
    ),
    *[
        Case(
            f"result {value}",
            lambda value=value: _step(value),
            TypeError,
            "`result` of `mpx.optimizer_step`",
        )
        for value in ((1, 2, 3), 3, {"grads": 1})
    ],
    *[
        Case(
            f"limit {value}",
            lambda value=value: _step(max_skipped_in_a_row=value),
            ValueError,
            "`max_skipped_in_a_row` of `mpx.optimizer_step`",
        )
        for value in (-1, 1.5, True, "3")
    ],
    Case(
        "skip_nonfinite",
        lambda: mpx.skip_nonfinite(3),
        TypeError,
        "`mpx.skip_nonfinite` needs an Optax transformation.*int 3",
    ),
    Case("check", lambda: mpx.check(3), TypeError, "`mpx.check.*int 3"),
    *[
        Case(
            f"check limit {value}",
            lambda value=value: mpx.check(
                mpx.NoLossScaling(), max_skipped_in_a_row=value
            ),
            ValueError,
            "`max_skipped_in_a_row` of `mpx.check`",
        )
        for value in (-1, 1.5, "3", True)
    ],
    Case(
        "check in jit",
        lambda: jax.jit(mpx.check)(mpx.NoLossScaling()),
        ValueError,
        "inside jit",
    ),
]

MOMENTUM = optax.sgd(0.1, momentum=0.9)
COUNTED = optax.GradientTransformation(
    lambda params: {"count": jnp.zeros((), jnp.int32)},
    lambda grads, state, params: (
        grads,
        {"count": jnp.asarray(state["count"], jnp.int32) + np.int32(1)},
    ),
)


def _state(state: Any, optimizer: Any = MOMENTUM, model: Any = None) -> Any:
    """A step with a state of the optimizer that may not be its own."""
    model = {"w": _w()} if model is None else model
    return mpx.optimizer_update(model, optimizer, state, model, True)


def _stacked() -> Any:
    return jax.vmap(lambda _: mpx.DynamicLossScaling())(np.arange(3))


def _cast(scaling: Any) -> Any:
    """A loss scaling of which the numbers are float16."""
    return jax.tree.map(
        lambda x: x.astype(jnp.float16) if x.dtype == jnp.float32 else x, scaling
    )


def _whole_step(model: Any, scaling: Any) -> Any:
    result = mpx.filter_grad(_loss, scaling)(model)
    return model, result.scaling


def _statistics() -> Any:
    return mpx.monitor(jnp.dot, "float16")(jnp.ones((2, 2)), jnp.ones((2, 2)))


STATES = [
    *[
        Case(
            f"state of {name}",
            lambda state=state: _state(state()),
            ValueError,
            "`mpx.optimizer_update` needs the state of this model and "
            f"optimizer; {match}.*Make it for this model",
        )
        for name, state, match in (
            (
                "more weights",
                lambda: MOMENTUM.init({"w": _w(), "b": _w()}),
                r"missing: none; unknown: `\[0\].trace\['b'\]`",
            ),
            (
                "larger weights",
                lambda: MOMENTUM.init({"w": jnp.ones(3)}),
                r"missing: none; unknown: none; of another shape: .*\(3,\) for \(2,\)",
            ),
            ("nothing", lambda: None, r"missing: `\[0\].trace\['w'\]`; unknown: none"),
            (
                "a restored dictionary",
                lambda: [{"trace": {"w": _w()}}],
                r"missing: `\[0\].trace\['w'\]`; unknown: `\[0\]\['trace'\]\['w'\]`",
            ),
        )
    ],
    *[
        Case(
            f"count {count!r}",
            lambda count=count: _state({"count": count}, COUNTED),
            TypeError,
            r"`mpx.optimizer_update` needs JAX arrays in the optimizer's state; got "
            r"int.* at `\['count'\]`. Convert them: .*jnp.asarray",
        )
        for count in (3, np.int64(3))
    ],
    Case(
        "count of skip_nonfinite",
        lambda: mpx.skip_nonfinite(COUNTED).update(
            _w(),
            mpx.skip_nonfinite(COUNTED).init(_w())._replace(inner_state={"count": 3}),
            _w(),
        ),
        TypeError,
        "`mpx.skip_nonfinite` needs JAX arrays",
    ),
    Case(
        "stacked scalings",
        lambda: _grads(scaling=_stacked()),
        ValueError,
        r"must be one state; got several, stacked as int32\[3\]. .*jax.vmap\(step\)",
    ),
    *[
        Case(
            f"float16 {type(scaling).__name__}",
            lambda scaling=scaling: _grads(scaling=_cast(scaling)),
            TypeError,
            r"needs a loss scale in float32; got float16\[\].*with a template",
        )
        for scaling in (mpx.DynamicLossScaling(), mpx.NoLossScaling())
    ],
    *[
        Case(
            f"restored {type(state).__name__}",
            lambda state=state: mpx.filter_grad(_loss, state),
            TypeError,
            "must be a loss scaling; got .*restored without a template?.*StandardRest",
        )
        for state in ({"loss_scaling": 8.0}, [8.0])
    ],
]

REPORTS = [
    *[
        Case(
            f"blame of {name}",
            lambda func=func, args=args: mpx.blame(func, mpx.NoLossScaling())(*args),
            TypeError,
            f"`mpx.blame` needs a loss function, not .*returns an instance of .*{kind}."
            r" .*`mpx.blame\(loss, scaling.of_bad_step\(\)\)\(model, batch\)`",
        )
        for name, func, args, kind in (
            ("a step", _whole_step, (_w(), mpx.NoLossScaling()), "tuple"),
            ("a gradient", jax.grad(lambda w: w["w"].sum()), ({"w": _w()},), "dict"),
        )
    ],
    *[
        Case(
            f"heat map of {name}",
            lambda history=history: mpx.reports.heat_map(history()),
            TypeError,
            f"must map step numbers to statistics; got .*{match}. .*watch",
        )
        for name, history, match in (
            ("a number", lambda: 3, "int 3"),
            ("statistics", lambda: _statistics()[1], "Statistics"),
            ("a list", lambda: [_statistics()[1]], "list"),
            ("results", lambda: {0: _statistics()}, "tuple"),
        )
    ],
    *[
        Case(
            f"explain with {len(args)} arguments",
            lambda args=args: mpx.explain(_loss, *args),
            TypeError,
            r"`mpx.explain` got float32\[2\] besides the function. "
            r".*`mpx.explain\(func\)\(\*args\)`",
        )
        for args in ((W,), (W, W), (None, W))
    ],
]

CASES = [*CASTS, *POLICIES, *SCALINGS, *TREES, *OPTIMIZERS, *STATES, *REPORTS]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.test_id)
def test_wrong_calls_are_refused(case):
    with pytest.raises(case.error, match=case.match):
        case.call()


# Row 12 of the table of promises.
BAD = {
    "factor": [1, 1.0, 0.5, 0, -2, np.nan, np.inf, True],
    "backoff": [0, 0.0, 1, 1.0, 2, -0.5, np.nan, np.inf, True],
    "period": [0, -1, 1.5, np.nan, np.inf, 2**40, True],
    "hysteresis": [0, -1, 1.5, np.nan, True],
    "counter": [-1, 0.5, np.nan, True],
    "loss_scaling": [0, 0.0, -2, np.nan, np.inf, 1e-45, True, "8", None, 1j, [1.0]],
    "min_loss_scaling": [0, -1, np.nan, np.inf, 1e-45, False],
    "max_loss_scaling": [0, -1, np.nan, np.inf, 65504, 3, True],
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name in BAD for value in BAD[name]]
)
def test_row12_bad_arguments_are_named(name, value):
    with pytest.raises(ValueError, match=f"`{name}`") as error:
        mpx.DynamicLossScaling(**{name: value})
    if isinstance(value, int | float) and not isinstance(value, bool):
        assert f"{value}" in str(error.value) or f"{float(value)}" in str(error.value)


@pytest.mark.parametrize(
    "arguments",
    [
        {"loss_scaling": 2, "min_loss_scaling": 4},
        {"loss_scaling": 64, "max_loss_scaling": 32},
        {"min_loss_scaling": 64, "loss_scaling": 64, "max_loss_scaling": 32},
    ],
)
def test_row12_order_of_floor_start_and_cap(arguments):
    with pytest.raises(ValueError, match="min_loss_scaling <= loss_scaling <= max"):
        mpx.DynamicLossScaling(**arguments)


@pytest.mark.parametrize("value", [0, -2, np.nan, np.inf, 1e-45, True, "8", None, 1j])
def test_static_scale_is_checked(value):
    with pytest.raises(ValueError, match="`loss_scaling` of `mpx.StaticLossScaling`"):
        mpx.StaticLossScaling(value)


def test_an_unknown_attribute_of_the_package():
    with pytest.raises(AttributeError, match="no attribute 'cast_to_float8'"):
        mpx.cast_to_float8  # noqa: B018
