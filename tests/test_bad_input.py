"""Wrong calls: each gets an error that says what must hold and what came."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpx

from .helpers import Case, each_refused, refused, unchecked_annotations, unscaled

pytestmark = unscaled


def _loss(w: Any, x: Any = 1.0) -> Any:
    return jnp.sum(w * x)


W, W3 = np.ones(2, np.float32), np.ones(3, np.float32)
W16 = W.astype(np.float16)
NONE = mpx.NoLossScaling()
NO_DTYPE = "needs a dtype; got"


def _w() -> jax.Array:
    return jnp.ones(2)


CASTS = [
    Case(f"{function} {dtype}", functools.partial(make, dtype), error, match)
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
]
CASTS += refused(ValueError, (f"{NO_DTYPE} None", lambda: mpx.cast_tree({}, None)))
KEEP = "`keep`.*must be a function"
CASTS += refused(
    TypeError,
    (KEEP, lambda: mpx.cast_tree({"w": W}, "float16", keep="w")),
    (KEEP, lambda: mpx.cast_to_half_precision({"w": W}, keep=["w"])),
    ("`mpx.cast_function.*got 3", lambda: mpx.cast_function(3, "float16")),
    (
        "`mpx.force_full_precision.*got 'float32'",
        lambda: mpx.force_full_precision("float32"),
    ),
)

POLICIES = [
    Case(f"get_policy {text!r}", functools.partial(mpx.get_policy, text), error, match)
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
    case
    for name, rule, *dtypes in (
        ("grad_dtype", "have the range of float32", "f16"),
        ("reduce_dtype", "be the compute dtype", "bf16", "float8_e4m3fn"),
        ("gather_dtype", "be the compute dtype", "bf16"),
    )
    for case in each_refused(
        ValueError,
        f"`{name}` of `mpx.Policy` must {rule}",
        lambda dtype, name=name: mpx.Policy("f32", "f16", "f32", **{name: dtype}),
        *dtypes,
    )
]

NO_FLAGS = (1, 1.0, None, "True", np.int32(1), np.array([True]), {"w": True})
SCALINGS = [
    case
    for make in (mpx.DynamicLossScaling, mpx.NoLossScaling)
    for case in each_refused(
        TypeError,
        rf"`grads_finite` of `{make.__name__}.adjust` needs one boolean",
        lambda value, make=make: make().adjust(value),
        *NO_FLAGS,
    )
] + refused(
    TypeError,
    ("`skip` of `mpx.NoLossScaling`", lambda: mpx.NoLossScaling(skip=np.array(True))),
    (
        "`scaling` of `mpx.scaled.*got float 8.0.*StaticLossScaling",
        lambda: mpx.scaled(jnp.sum, 8.0),
    ),
    ("`mpx.scaled.*got int 3", lambda: mpx.scaled(3, NONE)),
    ("`has_aux=True`", lambda: mpx.scaled(jnp.sum, NONE, has_aux=True)(W)),
)

TREES = refused(
    TypeError,
    (
        r"`pred` of `mpx.select_tree.*got bool\[2\].*mpx.all_finite",
        lambda: mpx.select_tree(np.array([True, False]), W, W),
    ),
    ("one boolean.*got float 1.0", lambda: mpx.select_tree(1.0, W, W)),
) + [
    Case(match, functools.partial(mpx.select_tree, True, a, b), ValueError, match)
    for match, a, b in (
        ("(?s)two trees of the same structure.*'a'.*'b'", {"a": W}, {"b": W}),
        (r"float32\[2\] and float32\[3\] at `\['a'\]`", {"a": W}, {"a": W3}),
        (r"float32\[2\] and float16\[2\] at `\['a'\]`", {"a": W}, {"a": W16}),
        (r"float32\[2\] and float 1.0 at `\[0\]`", [W], [1.0]),
        (r"float 1.0 and float32\[2\] at `\[0\]`", [1.0], [W]),
        (r"cannot choose.*str 'a' and str 'b' at `\['s'\]`", {"s": "a"}, {"s": "b"}),
    )
]


def _update(**changes: Any) -> Any:
    parts = {"model": _w(), "optimizer": optax.sgd(0.1), "grads": _w(), "finite": True}
    parts |= changes
    state = optax.sgd(0.1).init(_w())
    return mpx.optimizer_update(
        parts["model"], parts["optimizer"], state, parts["grads"], parts["finite"]
    )


def _step(result: Any = None, optimizer: Any = None, **options: Any) -> Any:
    sgd = optax.sgd(0.1)
    result = mpx.filter_value_and_grad(_loss, NONE)(_w()) if result is None else result
    optimizer = sgd if optimizer is None else optimizer
    return mpx.optimizer_step(_w(), optimizer, sgd.init(_w()), result, **options)


FINITE = "`grads_finite` of `mpx.optimizer_update` needs one boolean"
NO_LIMITS = (-1, 1.5, True, "3")
OPTIMIZERS = [
    *each_refused(
        TypeError, FINITE, lambda v: _update(finite=v), 1, 1.0, None, np.ones(2, bool)
    ),
    *refused(TypeError, (FINITE, lambda: _update(finite=jnp.ones(())))),
    *each_refused(
        TypeError,
        "`mpx.optimizer_update` needs an Optax transformation",
        lambda v: _update(optimizer=v),
        *(None, 0.1, optax.sgd),
    ),
    *each_refused(
        ValueError,
        # Row 22.
        "`mpx.optimizer_update` needs gradients; got a tree without arrays",
        lambda v: _update(model=v, grads=v),
        *({}, None, {"w": None}),
    ),
    *refused(
        ValueError,
        ("`mpx.optimizer_update`.*structure", lambda: _update(grads={"w": _w()})),
        (r"`mpx.optimizer_update`.*float32\[1\]", lambda: _update(grads=jnp.ones(1))),
        ("inside jit.*outside", lambda: jax.jit(mpx.check)(NONE)),
    ),
    *each_refused(
        TypeError, "`result` of `mpx.optimizer_step`", _step, (1, 2, 3), 3, {"grads": 1}
    ),
    *each_refused(
        ValueError,
        "`max_skipped_in_a_row` of `mpx.optimizer_step`",
        lambda v: _step(max_skipped_in_a_row=v),
        *NO_LIMITS,
    ),
    *each_refused(
        ValueError,
        "`max_skipped_in_a_row` of `mpx.check`",
        lambda v: mpx.check(NONE, max_skipped_in_a_row=v),
        *NO_LIMITS,
    ),
    *refused(
        TypeError,
        ("whole result", lambda: _step(tuple(mpx.grad(_loss, NONE)(_w())))),
        ("needs an Optax transformation", lambda: _step(optimizer=0.1)),
        (
            "`mpx.skip_nonfinite` needs an Optax transformation.*int 3",
            lambda: mpx.skip_nonfinite(3),
        ),
        ("`mpx.check.*int 3", lambda: mpx.check(3)),
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


def _state(state: Any, optimizer: Any = MOMENTUM) -> Any:
    """A step with a state of the optimizer that may not be its own."""
    model = {"w": _w()}
    return mpx.optimizer_update(model, optimizer, state, model, True)


def _stacked() -> Any:
    return jax.vmap(lambda _: mpx.DynamicLossScaling())(np.arange(3))


def _cast(scaling: Any) -> Any:
    low = lambda x: x.astype(jnp.float16) if x.dtype == jnp.float32 else x  # noqa: E731
    return jax.tree.map(low, scaling)


def _skip_with_a_number() -> Any:
    skip = mpx.skip_nonfinite(COUNTED)
    return skip.update(_w(), skip.init(_w())._replace(inner_state={"count": 3}), _w())


def _whole_step(model: Any, scaling: Any) -> Any:
    result = mpx.filter_grad(_loss, scaling)(model)
    return model, result.scaling


def _statistics() -> Any:
    return mpx.monitor(jnp.dot, "float16")(jnp.ones((2, 2)), jnp.ones((2, 2)))


OF_STATE = "`mpx.optimizer_update` needs the state of this model and optimizer; "
STATES = [
    *[
        Case(
            said,
            lambda state=state: _state(state()),
            ValueError,
            f"{OF_STATE}{said}.*Make it for this model",
        )
        for said, state in (
            (
                r"missing: none; unknown: `\[0\].trace\['b'\]`",
                lambda: MOMENTUM.init({"w": _w(), "b": _w()}),
            ),
            (
                r"missing: none; unknown: none; of another shape: .*\(3,\) for \(2,\)",
                lambda: MOMENTUM.init({"w": jnp.ones(3)}),
            ),
            (r"missing: `\[0\].trace\['w'\]`; unknown: none", lambda: None),
            (
                r"missing: `\[0\].trace\['w'\]`; unknown: `\[0\]\['trace'\]\['w'\]`",
                lambda: [{"trace": {"w": _w()}}],
            ),
        )
    ],
    *each_refused(
        TypeError,
        r"`mpx.optimizer_update` needs JAX arrays in the optimizer's state; got "
        r"int.* at `\['count'\]`. Convert them: .*jnp.asarray",
        lambda count: _state({"count": count}, COUNTED),
        *(3, np.int64(3)),
    ),
    *refused(TypeError, ("`mpx.skip_nonfinite` needs JAX arrays", _skip_with_a_number)),
    *refused(
        ValueError,
        (
            r"must be one state; got several, stacked as int32\[3\]. .*jax.vmap\(st",
            lambda: mpx.filter_value_and_grad(_loss, _stacked()),
        ),
        (r"one state; got several.*int32\[3\]", lambda: mpx.check(_stacked())),
    ),
    *each_refused(
        TypeError,
        r"needs a loss scale in float32; got float16\[\].*with a template",
        lambda make: mpx.filter_value_and_grad(_loss, _cast(make())),
        *(mpx.DynamicLossScaling, mpx.NoLossScaling),
    ),
    *each_refused(
        TypeError,
        "must be a loss scaling; got .*restored without a template?.*StandardRest",
        lambda state: mpx.filter_grad(_loss, state),
        *({"loss_scaling": 8.0}, [8.0]),
    ),
]

REPORTS = [
    *[
        Case(
            f"blame of {name}",
            lambda func=func, args=args: mpx.blame(func, NONE)(*args),
            TypeError,
            f"`mpx.blame` needs a loss function, not .*returns an instance of .*{kind}."
            r" .*`mpx.blame\(loss, scaling.of_bad_step\(\)\)\(model, batch\)`",
        )
        for name, func, args, kind in (
            ("a step", _whole_step, (W, NONE), "tuple"),
            ("a gradient", jax.grad(lambda w: w["w"].sum()), ({"w": W},), "dict"),
        )
    ],
    *[
        Case(
            f"heat map of {match}",
            lambda history=history: mpx.reports.heat_map(history()),
            TypeError,
            f"must map step numbers to statistics; got .*{match}. .*watch",
        )
        for match, history in (
            ("int 3", lambda: 3),
            ("Statistics", lambda: _statistics()[1]),
            ("list", lambda: [_statistics()[1]]),
            ("tuple", lambda: {0: _statistics()}),
        )
    ],
    *each_refused(
        TypeError,
        r"`mpx.explain` got float32\[2\] besides the function. "
        r".*`mpx.explain\(func\)\(\*args\)`",
        lambda args: mpx.explain(_loss, *args),
        *((W,), (W, W), (None, W)),
    ),
]

CASES = [*CASTS, *POLICIES, *SCALINGS, *TREES, *OPTIMIZERS, *STATES, *REPORTS]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.test_id)
def test_wrong_calls_are_refused(case):
    case.check()


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


@pytest.mark.parametrize(("name", "value"), [(n, v) for n in BAD for v in BAD[n]])
def test_row12_bad_arguments_are_named(name, value):
    raised = pytest.raises(ValueError, match=f"`{name}`")
    with unchecked_annotations(), raised as error:
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
    match = "`loss_scaling` of `mpx.StaticLossScaling`"
    with unchecked_annotations(), pytest.raises(ValueError, match=match):
        mpx.StaticLossScaling(value)


def test_an_unknown_attribute_of_the_package():
    with pytest.raises(AttributeError, match="no attribute 'cast_to_float8'"):
        mpx.cast_to_float8  # noqa: B018
