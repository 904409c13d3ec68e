"""Scores of attention on TPUs: scaled and masked in half precision, rounded once."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpx

from .counting import equations, relative_error

SHAPE = (2, 16, 2, 24)  # the root of 24 is no power of two
LEAST = float(jnp.finfo(jnp.float32).min)


def attention(
    q, k, v, *, fill=-1e30, scale=lambda s, d: s / d**0.5, softmax=jax.nn.softmax
):
    scores = scale(jnp.einsum("bthd,bshd->bhts", q, k), q.shape[-1])
    if fill is not None:
        causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))
        scores = jnp.where(causal, scores, fill)
    return jnp.einsum("bhts,bshd->bthd", softmax(scores), v)


def softmax_by_hand(s):
    e = jnp.exp(s - jnp.max(s, -1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def softmax_by_log(s):
    return jnp.exp(jax.nn.log_softmax(s, -1))


SCALES = {
    "divided": lambda s, d: s / d**0.5,
    "by a root of jnp": lambda s, d: s / jnp.sqrt(d),
    "by an inverse of jnp": lambda s, d: s * (1 / jnp.sqrt(jnp.float32(d))),
    "number first": lambda s, d: 0.1 * s,
    "power of two": lambda s, d: s * 0.125,
    "transposed before": lambda s, d: s.swapaxes(0, 1).swapaxes(0, 1) * 0.3,
}
CASES = {
    **{name: {"scale": scale} for name, scale in SCALES.items()},
    "no mask": {"fill": None},
    "no factor": {"scale": lambda s, d: s},
    "least number": {"fill": LEAST},
    "minus infinity": {"fill": -np.inf},
    "by hand": {"softmax": softmax_by_hand},
    "by its logarithm": {"softmax": softmax_by_log},
}


def operands(key=0, scale=2.0):
    keys = jax.random.split(jax.random.key(key), 3)
    q, k, v = (jax.random.normal(one, SHAPE) for one in keys)
    return scale * q, k, v


def on(target, func=attention, **options):
    return mpx.autocast(functools.partial(func, **options), target=target)


def all_results(func, *args):
    """Returns values, gradients, a derivative of a gradient, and of all in a vmap."""

    def total(*args):
        return jnp.sum(jnp.sin(func(*args)))

    value, gradients = func(*args), jax.grad(total, (0, 1, 2))(*args)
    tangents = jax.jvp(jax.grad(total), args, args)[1]
    many = jax.vmap(jax.grad(total))(*(jnp.stack([x, 2 * x]) for x in args))
    return {"value": value, "grad": gradients, "second": tangents, "vmap": many}


@pytest.mark.parametrize("name", CASES)
def test_scores_are_half_and_as_near_to_float32(name):
    options, args = CASES[name], operands()
    program = jax.make_jaxpr(on("tpu v5e", **options))(*args)
    scores = [
        e
        for e, _ in equations(program)
        if e.outvars and getattr(e.outvars[0].aval, "shape", ())[-2:] == (16, 16)
    ]
    wide = {e.primitive.name for e in scores if e.outvars[0].aval.dtype == jnp.float32}
    assert not wide & {"mul", "select_n"}, wide
    exact = jax.jit(
        functools.partial(all_results, functools.partial(attention, **options))
    )
    exact = exact(*args)
    ours, others = (
        jax.jit(functools.partial(all_results, on(target, **options)))(*args)
        for target in ("tpu v5e", "h100")
    )
    for part in exact:
        error, theirs = (
            relative_error(jax.tree.leaves(x[part]), jax.tree.leaves(exact[part]))
            for x in (ours, others)
        )
        assert error < 1.25 * theirs + 1e-4, (part, error, theirs)


def bits(tree):
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


@pytest.mark.parametrize("fill", [None, -1e30, LEAST, -np.inf, 0.0])
def test_of_a_power_of_two_and_a_mask_no_value_changes(fill):
    options = {"fill": fill, "scale": lambda s, d: s * 0.125}
    results = [
        bits(jax.jit(on(target, **options))(*operands()))
        for target in ("tpu v5e", "h100")
    ]
    assert results[0] == results[1]


@pytest.mark.parametrize("fill", [-1e30, LEAST])
def test_a_row_without_any_element_is_uniform(fill):
    def empty(q, k, v):
        scores = jnp.einsum("bthd,bshd->bhts", q, k) / 3.0
        scores = jnp.where(jnp.zeros(scores.shape, bool), scores, fill)
        return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores), v)

    q, k, v = operands()
    y = mpx.autocast(empty, target="tpu v5e")(q, k, v)
    mean = jnp.broadcast_to(v.mean(1, keepdims=True), y.shape)
    np.testing.assert_allclose(y, mean, atol=2e-2)


def reads_scores(q, k, v):
    s = jnp.einsum("bthd,bshd->bhts", q, k) / 3.3
    return jax.nn.softmax(s), s


def adds_a_bias(q, k, v):
    s = jnp.einsum("bthd,bshd->bhts", q, k) / 3.3
    return jax.nn.softmax(s + jnp.broadcast_to(jnp.linspace(0, 1, 16), s.shape))


def only_takes_the_maximum(q, k, v):
    s = jnp.einsum("bthd,bshd->bhts", q, k)
    return jnp.max(jnp.where(s > 1e9, s, -1e30), -1)


def masks_with_a_small_number(q, k, v):
    s = jnp.einsum("bthd,bshd->bhts", q, k)
    return jax.nn.softmax(jnp.where(s > 0, s, -0.1))


def masks_with_an_array(q, k, v):
    s = jnp.einsum("bthd,bshd->bhts", q, k)
    return jax.nn.softmax(
        jnp.where(s > 0, s, jnp.broadcast_to(jnp.linspace(-3e4, -2e4, 16), s.shape))
    )


def scales_by_an_argument(q, k, v):
    return jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", q, k) * v[0, 0, 0, 0])


@pytest.mark.parametrize(
    "func",
    [
        reads_scores,
        adds_a_bias,
        only_takes_the_maximum,
        masks_with_a_small_number,
        masks_with_an_array,
        scales_by_an_argument,
    ],
)
def test_what_another_use_reads_is_as_on_other_devices(func):
    programs = [
        str(jax.make_jaxpr(mpx.autocast(func, target=t, residuals="fast"))(*operands()))
        for t in ("tpu v5e", "h100")
    ]
    assert programs[0] == programs[1]


def test_a_rule_of_the_user_comes_first():
    rules = mpx.Rules(mpx.Rule(mpx.Precision.FULL, primitive="mul"))
    options = {"scale": lambda s, d: s * 0.3}
    func = functools.partial(attention, **options)
    ruled, plain = (
        str(jax.make_jaxpr(mpx.autocast(func, target="tpu v5e", rules=r))(*operands()))
        for r in (rules, mpx.Rules())
    )
    assert "mul" in ruled
    assert "mul" not in plain.split("custom_jvp_call")[0]


def test_a_policy_saves_the_scores_in_half_precision():
    policy = jax.checkpoint_policies.dots_saveable
    func = on("tpu v5e")

    def loss(*args):
        return jnp.sum(jax.checkpoint(func, policy=policy)(*args))

    _, back = jax.vjp(jax.jit(loss), *operands())
    kept = [x for x in jax.tree.leaves(back) if x.shape[-2:] == (16, 16)]
    assert kept
    assert {x.dtype.name for x in kept if x.dtype != bool} == {"bfloat16"}


def test_other_devices_and_float16_keep_their_programs():
    args = operands()
    for options in ({"target": "h100"}, {"target": "tpu v5e", "dtype": jnp.float16}):
        text = str(jax.make_jaxpr(mpx.autocast(attention, **options))(*args))
        assert " div " in text


def test_many_layers_share_one_program():
    def layers(q, k, v, count):
        for _ in range(count):
            q = attention(q, k, v)
        return q

    sizes = [
        len(
            list(equations(jax.make_jaxpr(on("tpu v5e", layers, count=n))(*operands())))
        )
        for n in (10, 300)
    ]
    assert sizes[1] < 31 * sizes[0]


def test_float16_factors_and_extremes():
    q, k, v = operands()
    for factor, key in itertools.product((1e-38, 3e38, np.inf, 0.0), (0, 1)):
        options = {"scale": lambda s, d: s * factor, "fill": None}  # noqa: B023
        ours, others = (
            np.asarray(on(t, **options)(*operands(key))) for t in ("tpu v5e", "h100")
        )
        np.testing.assert_allclose(ours, others, rtol=2e-2, atol=2e-2)
    broken = q.at[0, 0, 0, 0].set(jnp.nan), k, v
    assert np.isnan(on("tpu v5e")(*broken)).any()
