"""Backward rules that are not proportional to their gradient do not see the scale."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import mpx
from tests.autocast.counting import relative_error

from .cases import mean, total

SCALE = 2.0**15


def with_rule(backward):
    """The identity, whose rule is this function of the gradient."""

    @jax.custom_vjp
    def function(h):
        return h

    function.defvjp(lambda h: (h, None), lambda _, g: (backward(g),))
    return function


clip = with_rule(lambda g: jnp.clip(g, -0.01, 0.01))
clip_norm = with_rule(lambda g: g * jnp.minimum(1, 0.02 / jnp.linalg.norm(g)))
reverse = with_rule(lambda g: -0.5 * g)
smooth = with_rule(lambda g: jnp.tanh(g * 100) / 100)
without_infinities = with_rule(lambda g: jnp.where(jnp.isfinite(g), g, 0))


@jax.custom_vjp
def attach(h, aux):
    """Adds the gradient of `aux` to the loss."""
    return h


attach.defvjp(lambda h, aux: (h, None), lambda _, g: (g, jnp.ones(())))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def clip_to(h, limit):
    return h


clip_to.defvjp(lambda h, limit: (h, None), lambda c, _, g: (jnp.clip(g, -c, c),))


@jax.custom_gradient
def clip_by_hand(h):
    return h, lambda g: jnp.clip(g, -0.01, 0.01)


@jax.custom_vjp
def twice(h):
    return 2 * clip(h)


twice.defvjp(
    lambda h: (twice(h), h), lambda h, g: jax.vjp(lambda h: 2 * clip(h), h)[1](g)
)


@with_rule
def in_float32(g):
    wide = jnp.clip(g.astype(jnp.float32), -0.01, 0.01)
    return jax.lax.fori_loop(0, 2, lambda i, x: x * 0.5, wide).astype(g.dtype) * 4


def loss_of(function):
    def loss(w, x):
        return total(function(jnp.tanh(x @ w)) ** 2 / 1000)

    return loss


def attached(w, x):
    h = x @ w
    size = mpx.force_full_precision(lambda h: jnp.mean(h) ** 2 / 10, jnp.float32)(h)
    return mean(attach(h, size).astype(h.dtype)) / 100


def scanned(w, x):
    def body(h, _):
        return clip(jnp.tanh(h @ (w @ w.T))), None

    h, _ = jax.lax.scan(body, x, None, length=3)
    return loss_of(lambda h: h)(jnp.eye(16, dtype=h.dtype), h)


def each_example(w, x):
    return jnp.mean(jax.vmap(lambda x: total((x @ clip_norm(w)) ** 2))(x)) / 10


def chosen(h):
    return jax.lax.cond(h[0, 0] > -5, lambda h: clip(jnp.sin(h)), lambda h: h, h)


def nested(h):
    def body(h, _):
        return twice(h), None

    return jax.lax.scan(jax.checkpoint(body), h, None, length=2)[0]


LOSSES = {
    "clip": loss_of(clip),
    "clip_norm": loss_of(clip_norm),
    "attach": attached,
    "nondiff_argnums": loss_of(lambda h: clip_to(h, 0.01)),
    "custom_gradient": loss_of(clip_by_hand),
    "inside": loss_of(twice),
    "float32": loss_of(in_float32),
    "proportional": loss_of(reverse),
    "scan": scanned,
    "remat": loss_of(jax.checkpoint(lambda h: clip(jnp.sin(h)))),
    "cond": loss_of(chosen),
    "jit": loss_of(jax.jit(lambda h: clip(jnp.sin(h)))),
    "vmap": each_example,
    "nested": loss_of(jax.jit(nested)),
}

FULL = {"policy": "full"}
# The function that is differentiated, and the options of that.
MADE = {
    "autocast": lambda loss, half: (half, {}),
    "explicit": lambda loss, half: (loss, {"policy": "float16"}),
    "masters": lambda loss, half: (
        loss,
        {"policy": "float16", "accumulate_dtype": jnp.float32},
    ),
    "lambda": lambda loss, half: (lambda w, x: half(w, x) * 1.0, FULL),
    "twice": lambda loss, half: (
        mpx.autocast(lambda w, x: half(w, x) * 1.0, jnp.float16),
        {},
    ),
    "off": lambda loss, half: (mpx.autocast(loss, enabled=False), {}),
    "jit": lambda loss, half: (jax.jit(half), {}),
    "full": lambda loss, half: (loss, FULL),
}


def step_of(loss, how, **more):
    function, options = MADE[how](loss, mpx.autocast(loss, jnp.float16))

    def step(scaling, w, x):
        return mpx.value_and_grad(function, scaling, **options, **more)(w, x)

    return jax.jit(step)


@pytest.fixture
def w(getkey):
    return jax.random.normal(getkey(), (16, 8)) / 4


@pytest.fixture
def x(getkey):
    return 1 + jax.random.normal(getkey(), (64, 16))


def check(result, exact):
    assert result.finite
    assert relative_error(result.grads, exact) < 5e-3


@pytest.mark.parametrize(
    ("name", "how"),
    [
        *((name, "autocast") for name in LOSSES),
        *((name, "explicit") for name in ("attach", "float32", "cond", "vmap")),
        *(("nested", how) for how in MADE if how != "autocast"),
    ],
)
def test_a_rule_gets_the_gradient_without_the_scale(w, x, name, how):
    loss = LOSSES[name]
    result = step_of(loss, how)(mpx.DynamicLossScaling(SCALE), w, x)
    check(result, jax.grad(loss)(w, x))


def test_operation_by_operation_with_retries_and_micro_batches(w, x):
    loss, scaling = LOSSES["clip"], mpx.DynamicLossScaling(SCALE)
    half, exact = mpx.autocast(loss, jnp.float16), jax.grad(loss)(w, x)
    check(mpx.value_and_grad(half, scaling)(w, x), exact)
    check(step_of(loss, "autocast", retries=2)(scaling, w, x), exact)
    halves = [jax.grad(loss)(w, x[i::2]) for i in range(2)]
    result = step_of(loss, "autocast", accumulate=2)(scaling, w, x)
    check(result, sum(halves) / 2)
    run = jax.jit(lambda s, w, x: mpx.calculate_scaled_grad(half, s)(w, x))
    _, grads = run(scaling, w, x)
    assert relative_error(scaling.unscale(grads), exact) < 3e-3


@pytest.mark.parametrize("how", ["autocast", "explicit"])
@pytest.mark.parametrize("check_vma", [True, False])
def test_on_several_devices(w, x, check_vma, how):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = dict(mesh=mesh, check_vma=check_vma, out_specs=P("data"))
    loss = loss_of(lambda h: h)

    @functools.partial(jax.shard_map, in_specs=(P(), P("data")), **rows)
    def layer(w, x):
        return clip(jnp.tanh(x @ w))

    def on_devices(w, x):
        return loss(jnp.eye(8, dtype=w.dtype), layer(w, x))

    scaling = mpx.DynamicLossScaling(SCALE)
    exact = jax.grad(on_devices)(w, x)
    check(step_of(on_devices, how)(scaling, w, x), exact)
    if check_vma:
        plain = LOSSES["clip"]
        with jax.set_mesh(mesh):
            how_many = mpx.Accumulation(4, axes="data")
            result = step_of(plain, how, accumulate=how_many)(scaling, w, x)
        parts = [jax.grad(plain)(w, part) for part in jnp.split(x, 4)]
        check(result, sum(parts) / 4)


def test_derivatives_within_the_loss_have_no_scale(w, x):
    loss = loss_of(smooth)

    def penalty(gradient, w, x):
        return 100 * jnp.sum(gradient(w, x) ** 2)

    exact = jax.grad(functools.partial(penalty, jax.grad(loss, argnums=1)))(w, x)
    half = mpx.autocast(loss, jnp.float16)
    scaling = mpx.DynamicLossScaling(SCALE)
    inner = jax.grad(half, argnums=1)
    for gradient in (inner, jax.jit(inner)):
        outer = functools.partial(penalty, gradient)
        check(step_of(outer, "full")(scaling, w, x), exact)
    outer = functools.partial(penalty, jax.grad(loss, argnums=1))
    check(step_of(outer, "autocast")(scaling, w, x), exact)


def test_derivatives_of_a_step_have_no_scale_either(w, x):
    loss = loss_of(smooth)
    half = mpx.autocast(loss, jnp.float16)

    def norm(w, scaling, x):
        return jnp.sum(mpx.grad(half, scaling)(w, x).grads ** 2)

    found = jax.jit(jax.grad(norm))(w, mpx.DynamicLossScaling(SCALE), x)
    exact = jax.grad(lambda w: jnp.sum(jax.grad(loss)(w, x) ** 2))(w)
    assert relative_error(found, exact) < 1e-2


# --- Overflow and underflow -----------------------------------------------------------


@pytest.mark.parametrize("rule", [clip, without_infinities])
def test_a_rule_does_not_hide_an_overflow(w, x, rule):
    def loss(w, x):
        return jnp.sum(10 * (rule(x @ w) @ jnp.ones((8, 8))))

    half = mpx.autocast(loss, jnp.float16)
    result = mpx.value_and_grad(half, mpx.DynamicLossScaling(SCALE))(w, x)
    assert not result.finite
    assert result.scaling.loss_scale < SCALE
    result = mpx.value_and_grad(half, mpx.DynamicLossScaling(1.0))(w, x)
    check(result, jax.grad(loss)(w, x))


def test_at_a_scale_of_one_a_rule_may_remove_infinities(w, x):
    def loss(w, x):
        return jnp.sum(jnp.sqrt(without_infinities(0 * w))) + LOSSES["clip"](w, x)

    half = mpx.autocast(loss, jnp.float16)
    for scale, is_finite in (1.0, True), (4.0, False):
        result = mpx.value_and_grad(half, mpx.DynamicLossScaling(scale))(w, x)
        assert bool(result.finite) is is_finite
        if is_finite:
            check(result, jax.grad(loss)(w, x))


@pytest.mark.parametrize("how", ["autocast", "explicit"])
def test_what_the_scale_preserves_is_not_lost(w, x, how):
    """Without the scale these gradients are zero in float16."""
    loss = lambda w, x: 1e-8 * total(clip(jnp.tanh(x @ w)))  # noqa: E731
    result = step_of(loss, how)(mpx.DynamicLossScaling(2.0**20), w, x)
    check(result, jax.grad(loss)(w, x))


# --- What does not see the scale ------------------------------------------------------


@pytest.mark.parametrize("how", ["autocast", "explicit"])
def test_only_a_rule_that_sees_the_scale_is_traced_again(w, x, how):
    def traces(rule, scaling, dtype):
        traced = []

        def loss(w, x):
            traced.append(1)
            return loss_of(rule)(w, x)

        function, options = mpx.autocast(loss, dtype), {}
        if how == "explicit":
            function, options = loss, {"policy": jnp.dtype(dtype).name}
        jax.make_jaxpr(lambda s: mpx.grad(function, s, **options)(w, x))(scaling)
        return len(traced)

    scaled, unscaled = mpx.DynamicLossScaling(SCALE), mpx.NoLossScaling()
    assert traces(clip, scaled, jnp.float16) == 2
    assert traces(reverse, scaled, jnp.float16) == 1
    assert traces(clip, unscaled, jnp.bfloat16) == 1


def test_a_function_that_needs_values_runs_as_before(w, x):
    def loss(w, x):
        h = jnp.tanh(x @ w)
        if h[0, 0] < -5:
            raise AssertionError
        return loss_of(reverse)(w, x)

    scaling = mpx.DynamicLossScaling(SCALE)
    result = mpx.value_and_grad(loss, scaling, policy="float16")(w, x)
    check(result, jax.grad(loss)(w, x))
    with pytest.raises(ZeroDivisionError):
        mpx.grad(lambda w: 1 // 0, scaling, policy="float16")(w)


_SAYS = "not proportional to the gradient, which it gets without the loss scale"


@pytest.mark.parametrize("how", ["autocast", "explicit"])
@pytest.mark.parametrize("name", ["clip", "proportional"])
def test_explain_says_what_a_rule_gets(w, x, how, name):
    report = mpx.explain(step_of(LOSSES[name], how))(
        mpx.DynamicLossScaling(SCALE), w, x
    )
    reasons = {o.primitive for o in report.operations if _SAYS in o.reason}
    assert ("min" in reasons) == (name == "clip")
