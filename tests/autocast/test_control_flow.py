"""Programs within programs: everything inside is cast, and nothing else changes."""

import contextlib
import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec

import mpx

from .counting import (
    BF16,
    PRODUCTS,
    count_products,
    equations,
    named,
    primitives,
    relative_error,
)


def layer(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ w)


def over_two_devices(func, out_specs):
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((2,), ("batch",), axis_types=auto, devices=jax.devices()[:2])
    in_specs = PartitionSpec(), PartitionSpec("batch")
    return jax.shard_map(func, mesh=mesh, in_specs=in_specs, out_specs=out_specs)


def _shard_map(w: jax.Array, x: jax.Array) -> jax.Array:
    func = lambda w, x: lax.pmean(layer(w, x).mean(), "batch")  # noqa: E731
    return over_two_devices(func, PartitionSpec())(w, x)


def _nested(w: jax.Array, x: jax.Array) -> jax.Array:
    step = lambda c, _: (jax.jit(layer)(w, c), None)  # noqa: E731
    twice = jax.checkpoint(lambda x: lax.scan(step, x, length=2)[0])
    return lax.cond(x[0, 0] > -9, twice, lambda x: x, x)


PROGRAMS = {
    "jit": lambda w, x: jax.jit(layer)(w, x),
    "scan": lambda w, x: lax.scan(lambda c, y: (layer(w, c + y), c), x[0], x)[1],
    "scan over weights": lambda w, x: lax.scan(
        lambda c, v: (layer(v, c), None), x, jnp.stack([w, w])
    )[0],
    "fori": lambda w, x: lax.fori_loop(0, 3, lambda _, c: layer(w, c), x),
    "map": lambda w, x: lax.map(lambda row: layer(w, row), x),
    "cond": lambda w, x: lax.cond(x[0, 0] > 0, layer, lambda _, x: x * 2.0, w, x),
    "switch": lambda w, x: lax.switch(
        jnp.int32(1), [lambda w, x: x, layer, lambda w, x: jnp.exp(x)], w, x
    ),
    "remat": lambda w, x: jax.checkpoint(layer)(w, x),
    "remat with a policy": lambda w, x: jax.checkpoint(
        layer, policy=jax.checkpoint_policies.dots_saveable
    )(w, x),
    "filter_checkpoint": lambda w, x: eqx.filter_checkpoint(layer)(w, x),
    "vmap": lambda w, x: jax.vmap(functools.partial(layer, w))(x),
    "shard_map": _shard_map,
    "jit in scan in remat in cond": _nested,
}


def loss_of(name):
    return lambda w, x: jnp.sum(PROGRAMS[name](w, x) ** 2)


@pytest.mark.parametrize("name", PROGRAMS)
def test_values_gradients_and_products(inputs, name):
    loss = loss_of(name)
    cast = mpx.autocast(loss)

    @jax.jit
    def every_way(*args):
        plain = jax.value_and_grad(loss)
        return plain(*args), jax.value_and_grad(cast)(*args), mpx.autocast(plain)(*args)

    (expected, expected_grad), *found = every_way(*inputs)
    for value, grad in found:
        assert value.dtype == grad.dtype == jnp.float32
        assert relative_error(value, expected) < 2e-2
        assert 0 < relative_error(grad, expected_grad) < 2e-2
    plain = sum(count_products(jax.grad(loss), *inputs).values())
    assert count_products(jax.grad(cast), *inputs) == {BF16: plain}


def test_operation_by_operation_it_is_the_same(inputs):
    loss = loss_of("jit in scan in remat in cond")
    cast = mpx.autocast(loss)
    jitted = jax.jit(jax.value_and_grad(cast))(*inputs)
    assert relative_error(cast(*inputs), jitted[0]) < 2e-2
    assert relative_error(jax.grad(cast)(*inputs), jitted[1]) < 2e-2
    assert relative_error(mpx.autocast(jax.grad(loss))(*inputs), jitted[1]) < 2e-2


@pytest.mark.parametrize("way", ["eager", "jit", "forwards"])
def test_examples_of_a_vmapped_while_end_one_by_one(way):
    """Each after as many turns as on its own, with a key among what is carried."""
    w = jnp.eye(4) / 2

    def halve(x, limit, key):
        def step(carry):
            count, x, key = carry
            return count + 1, x @ w, jax.random.fold_in(key, count)

        def is_large(carry):
            return jnp.sum(jnp.abs(carry[1])) > limit

        return lax.while_loop(is_large, step, (jnp.int32(0), x, key))

    batched = jax.vmap(halve)
    xs, limits = jnp.ones((3, 4)), jnp.array([8.0, 1.5, 0.4])
    keys = jax.random.split(jax.random.key(0), 3)
    cast = mpx.autocast(lambda xs: batched(xs, limits, keys))
    if way == "forwards":
        (_, xs_out, _), (_, tangents, _) = jax.jvp(cast, (xs,), (xs,))
        assert (xs_out == tangents).all()  # the loop is linear in what it begins with
        return
    found = (jax.jit(cast) if way == "jit" else cast)(xs)
    expected = batched(xs, limits, keys)
    assert found[0].tolist() == expected[0].tolist() == [0, 2, 4]
    assert (found[1] == expected[1]).all() and (found[2] == expected[2]).all()


def test_a_while_keeps_the_dtypes_that_it_carries(inputs):
    w, x = inputs

    def func(w, x):
        step = lambda c: (c[0] + 1, layer(w, c[1]))  # noqa: E731
        return lax.while_loop(lambda c: c[0] < 3, step, (0, x))[1]

    assert relative_error(mpx.autocast(func)(w, x), func(w, x)) < 2e-2
    (loop,) = named("while", mpx.autocast(func), w, x)
    assert [v.aval.dtype.name for v in loop.outvars] == ["int32", "float32"]
    assert count_products(mpx.autocast(func), w, x) == {BF16: 1}


def test_a_composite_stays_one(inputs):
    func = lambda w, x: lax.composite(layer, "test.layer")(w, x)  # noqa: E731
    assert relative_error(mpx.autocast(func)(*inputs), func(*inputs)) < 2e-2
    assert "composite" in primitives(mpx.autocast(func), *inputs)
    assert count_products(mpx.autocast(func), *inputs) == {BF16: 1}


def test_a_jit_keeps_its_name_donation_and_sharding(inputs):
    w, x = inputs
    mesh = jax.make_mesh((2,), ("i",), devices=jax.devices()[:2])
    sharding = jax.sharding.NamedSharding(mesh, PartitionSpec("i"))
    inner = jax.jit(layer, donate_argnums=1, out_shardings=sharding)

    (equation,) = jax.make_jaxpr(mpx.autocast(lambda w, x: inner(w, x)))(w, x).eqns[:1]
    assert equation.params["name"] == "layer"
    assert equation.params["donated_invars"] == (False, True)
    assert equation.params["out_shardings"] == (sharding,)
    out = jax.jit(mpx.autocast(inner))(w, x)
    assert out.sharding.is_equivalent_to(sharding, out.ndim)


@pytest.mark.parametrize(
    ("kinds", "is_set"),
    [
        ("Auto Auto", False),
        ("Explicit Explicit", True),
        pytest.param("Explicit Explicit", False, marks=pytest.mark.slow),
        ("Auto Explicit", True),
    ],
)
def test_a_jit_that_gets_a_state_keeps_its_shardings(inputs, kinds, is_set):
    """It is written out, as more goes in than its shardings are for."""
    types = tuple(getattr(jax.sharding.AxisType, kind) for kind in kinds.split())
    mesh = jax.make_mesh((2, 2), ("i", "j"), types, devices=jax.devices()[:4])
    sharding = jax.sharding.NamedSharding(mesh, PartitionSpec("i", "j"))
    inner = jax.jit(layer, in_shardings=(None, sharding), out_shardings=sharding)
    func = mpx.autocast(lambda w, x: jnp.sum(inner(w, x)), recipe=mpx.DelayedScaling())
    step = lambda s, *inputs: mpx.filter_grad(func, s)(*inputs).grads  # noqa: E731
    with jax.set_mesh(mesh) if is_set else contextlib.nullcontext():
        scaling = mpx.init_scaling(func, *inputs)
        made = jax.make_jaxpr(step)(scaling, *inputs)
        found = jax.jit(step)(scaling, *inputs)
    said = [
        e.params.get("sharding") or e.params["out_shardings"][0]
        for e, _ in equations(made)
        if e.primitive.name == "sharding_constraint" or "out_shardings" in e.params
    ]
    assert said.count(sharding) >= 4  # operand and result, and backward again
    exact = jax.grad(lambda w, x: jnp.sum(layer(w, x)))(*inputs)
    assert relative_error(found, exact) < 0.1


def test_equal_layers_are_rewritten_once(inputs):
    w, x = inputs
    inner = jax.jit(layer)

    def func(w, x):
        for _ in range(4):
            x = inner(w, x)
        return x

    jaxpr = jax.make_jaxpr(mpx.autocast(func))(w, x)
    layers = [e for e in jaxpr.eqns if e.primitive.name == "jit"]
    # The first takes an argument, the others what a layer gave; the last one's result
    # is wanted in float32.
    assert len(layers) == 4 and len({id(e.params["jaxpr"]) for e in layers}) <= 3


def test_a_remat_keeps_its_policy_and_saves_in_half_precision(inputs):
    w, x = inputs
    policy = jax.checkpoint_policies.dots_saveable
    func = jax.checkpoint(layer, policy=policy, prevent_cse=False)
    jaxpr = jax.make_jaxpr(mpx.autocast(lambda w, x: func(w, x)))(w, x)
    (remat,) = [e for e in jaxpr.eqns if e.primitive.name in ("remat2", "checkpoint")]
    assert remat.params["policy"] is policy and not remat.params["prevent_cse"]


def test_a_remat_may_say_of_each_operand_whether_it_is_a_barrier(inputs):
    """And its state and what it closes over are operands of ours beside these."""
    w, x = inputs
    func = jax.checkpoint(
        lambda w, x: layer(w, x) + x[:1, :1], prevent_cse=(True, False)
    )
    loss = lambda w, x: jnp.sum(func(w, x))  # noqa: E731
    made = mpx.autocast(loss, recipe=mpx.DelayedScaling())
    scaling = mpx.init_scaling(made, w, x)
    assert jnp.isfinite(mpx.filter_value_and_grad(made, scaling)(w, x).value)


def test_branches_agree_on_their_dtypes(inputs):
    """In half precision where nothing but products reads what they give."""
    w, x = inputs

    def func(w, x):
        y = lax.cond(x[0, 0] > 0, lambda: x @ w, lambda: jnp.exp(x))
        z = lax.cond(x[0, 0] > 0, lambda: x @ w, lambda: (x @ w) * 2.0)
        return y @ w, jnp.exp(y), z @ w

    first, second = named("cond", mpx.autocast(func), w, x)
    assert first.outvars[0].aval.dtype == jnp.float32
    assert second.outvars[0].aval.dtype == jnp.bfloat16


@pytest.mark.parametrize("outside", [True, False])
def test_ordered_callbacks_see_declared_dtypes_in_order(inputs, outside):
    w, x = inputs
    seen = []

    def func(w, x):
        for i in range(3):
            x = layer(w, x)
            jax.debug.callback(
                lambda x, i=i: seen.append((i, x.dtype.name)), x, ordered=True
            )
        return x

    call = jax.jit(mpx.autocast(func)) if outside else mpx.autocast(jax.jit(func))
    jax.block_until_ready(call(w, x))
    jax.effects_barrier()
    assert seen == [(0, "float32"), (1, "float32"), (2, "float32")]


def test_a_mutable_array_keeps_its_dtype(inputs):
    w, x = inputs

    def func(w, x):
        ref = jax.new_ref(jnp.zeros((4, 8)))
        ref[...] = x @ w
        return ref[...] * 2.0

    assert relative_error(mpx.autocast(func)(w, x), func(w, x)) < 1e-2


def test_scopes_and_source_lines_are_kept(inputs):
    w, x = inputs

    def func(w, x):
        with jax.named_scope("outer"):
            return jax.jit(named)(w, x)

    def named(w, x):
        with jax.named_scope("inner"):
            return x @ w

    traced = jax.jit(mpx.autocast(func)).trace(w, x)
    text = traced.lower().as_text(debug_info=True)
    assert "jit(func)/outer/jit(named)" in text
    assert "inner/dot_general" in text
    (product,) = [e for e, _ in equations(traced.jaxpr) if e.primitive.name in PRODUCTS]
    frames = str(product.source_info.traceback).splitlines()
    assert any("test_control_flow.py" in line and "named" in line for line in frames)


def test_numbers_go_into_programs_that_run_once_per_device(inputs):
    scaled = jax.jit(lambda x, scale: (x * scale, scale * 0.5))

    def local(w, x):
        y, half = scaled(x @ w, lax.pcast(2.0, "batch", to="varying"))
        return y * (half - 0.5)

    func = jax.jit(over_two_devices(local, PartitionSpec("batch")))
    assert relative_error(mpx.autocast(func)(*inputs), func(*inputs)) < 2e-2
