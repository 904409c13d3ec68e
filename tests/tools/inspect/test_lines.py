"""The line of each operation is that of its own caller, also where programs are shared.

A helper is traced once for all its callers: the quantized product of mpx for each
shape, `jnp.where` of JAX, a function under `jax.jit` of a user's.
"""

import inspect

import jax
import jax.numpy as jnp
import pytest

import mpx

KEYS = jax.random.split(jax.random.key(0), 5)
A, B, C, D, X = (jax.random.normal(key, (32, 32)) for key in KEYS)
WEIGHTS = {"a": A, "b": B, "c": C, "d": D}


def matmuls(w, x):
    x = jnp.tanh(x @ w["a"])
    x = jnp.tanh(x @ w["b"])
    x = jnp.tanh(x @ w["c"])
    return jnp.mean((x @ w["d"]) ** 2)


def convolutions(w, x):
    a, b, c, d = (w[n][:2, :18].reshape(2, 2, 3, 3) for n in "abcd")
    x = x.reshape(1, 2, 16, 32)
    x = jnp.tanh(jax.lax.conv(x, a, (1, 1), "SAME"))
    x = jnp.tanh(jax.lax.conv(x, b, (1, 1), "SAME"))
    x = jnp.tanh(jax.lax.conv(x, c, (1, 1), "SAME"))
    return jnp.mean(jax.lax.conv(x, d, (1, 1), "SAME"))


def experts(w, x):
    a, b, c, d = (jnp.stack([w[n], -w[n]]) for n in "abcd")
    sizes = jnp.array([8, 24], jnp.int32)
    x = jnp.tanh(jax.lax.ragged_dot(x, a, sizes))
    x = jnp.tanh(jax.lax.ragged_dot(x, b, sizes))
    x = jnp.tanh(jax.lax.ragged_dot(x, c, sizes))
    return jnp.mean(jax.lax.ragged_dot(x, d, sizes))


def transformed(w, x):
    x = jax.checkpoint(lambda x: jnp.tanh(x @ w["a"]))(x)
    x = jax.lax.cond(x[0, 0] > 0, lambda x: jnp.tanh(x @ w["b"]), lambda x: x, x)
    x = jax.vmap(lambda x: jnp.tanh(x @ w["c"]))(x)
    x, _ = jax.lax.scan(lambda x, w: (x @ w, None), x, w["d"][None])
    x = jnp.tanh(x @ w["d"].T)
    return jnp.mean(x @ w["d"])


PRODUCTS = ("dot_general", "conv_general_dilated", "ragged_dot_general")
PRODUCTS += ("scaled_matmul_wrapper",)


def lines(func, *args, primitives=PRODUCTS, phase=None):
    """For each product the text of its line, forward and backward."""
    source = inspect.getsource(inspect.getmodule(lines)).splitlines()
    report = mpx.explain(func)(*args)
    found = [o for o in report.operations if o.primitive in primitives]
    assert all(o.source.startswith("tests/tools/inspect/test_lines.py:") for o in found)
    return {
        (o.phase, source[int(o.source.rpartition(":")[2]) - 1].strip())
        for o in found
        if phase in (None, o.phase)
    }


CURRENT, DELAYED = mpx.Float8CurrentScaling(), mpx.DelayedScaling()
CASES = [
    (matmuls, CURRENT, "cpu"),
    (matmuls, DELAYED, "H100"),
    (matmuls, CURRENT, "TPU7x"),
    (matmuls, mpx.MXFP8BlockScaling(), "B200"),
    (matmuls, mpx.NVFP4BlockScaling(), "B200"),
    (convolutions, DELAYED, "cpu"),
    (experts, CURRENT, "H100"),
    (transformed, CURRENT, "cpu"),
]


@pytest.mark.parametrize(("func", "recipe", "target"), CASES)
def test_products_of_one_shape_have_their_own_lines(func, recipe, target):
    low = mpx.autocast(func, recipe=recipe, target=target)
    assert lines(jax.grad(low), WEIGHTS, X) == lines(jax.grad(func), WEIGHTS, X)


def test_products_are_traced_once_for_all_lines():
    low = mpx.autocast(matmuls, recipe=CURRENT)
    program = jax.make_jaxpr(jax.grad(low))(WEIGHTS, X)
    for name in ("quantized_forward", "quantized_backward"):
        calls = [e for e in program.eqns if e.params.get("name") == name]
        assert len(calls) == 3 and len({id(e.params["jaxpr"]) for e in calls}) == 1


def test_backward_passes_for_tpus_share_no_function():
    low = mpx.autocast(matmuls, recipe=CURRENT, target="TPU7x")
    program = jax.make_jaxpr(jax.grad(low))(WEIGHTS, X)
    names = {e.params.get("name") for e in program.eqns}
    assert "quantized_forward" in names and "quantized_backward" not in names


def divides(w, x):
    return x @ w["a"] / 2


def takes_logarithms(w, x):
    return jnp.log1p(jnp.abs(x @ w["b"]))


@pytest.mark.parametrize("recipe", [None, CURRENT])
def test_an_operation_is_in_the_function_that_calls_for_it(recipe):
    def loss(w, x):
        return jnp.mean(takes_logarithms(w, divides(w, x)) @ w["c"])

    report = mpx.explain(mpx.autocast(loss, recipe=recipe))(WEIGHTS, X)
    paths = {o.function for o in report.operations if o.primitive in PRODUCTS}
    assert paths == {"loss/divides", "loss/takes_logarithms", "loss"}
    assert {o.function for o in report.operations} <= paths | {""}


@jax.jit
def helper(w, x):
    return jax.nn.silu(x @ w)  # in a helper


@pytest.mark.parametrize("recipe", [None, CURRENT])
def test_of_a_jitted_function_the_line_within_it_is_named(recipe):
    def loss(w, x):
        x = helper(w["a"], x)
        x = helper(w["b"], x)
        return jnp.mean(x @ w["c"])

    found = mpx.explain(mpx.autocast(loss, recipe=recipe))(WEIGHTS, X).operations
    products = [o for o in found if o.primitive in PRODUCTS]
    one, other = (o for o in products if "helper" in o.function)
    assert one.source == other.source and one.stack != other.stack
    inside = {text for _, text in lines(loss, WEIGHTS, X)}
    within = "return jax.nn.silu(x @ w)  # in a helper"
    assert inside == {within, 'return jnp.mean(x @ w["c"])'}


@jax.custom_vjp
def gated(x):
    return jnp.floor(x)


def gated_backward(x, g):
    return (jnp.clip(jnp.where(x > 0, g, 0.0), -1.0, 1.0),)


gated.defvjp(lambda x: (gated(x), x), gated_backward)


def twice_gated(x):
    x = gated(x)
    x = gated(x * 2)
    return jnp.sum(x)


DERIVATIVES = {
    "plain": jax.grad,
    "within": lambda func: jax.grad(mpx.autocast(func)),
    "around": lambda func: mpx.autocast(jax.grad(func)),
}


@pytest.mark.parametrize("derivative", DERIVATIVES.values(), ids=DERIVATIVES)
def test_helpers_of_jax_in_a_backward_pass_have_the_lines_of_their_calls(derivative):
    jax.clear_caches()  # or another test has traced `jnp.where`
    helpers = {"primitives": ("select_n", "min"), "phase": "backward"}
    found = lines(derivative(twice_gated), X, **helpers)
    assert found == {("backward", "x = gated(x)"), ("backward", "x = gated(x * 2)")}


def user_maps(x):
    x = jax.lax.map(lambda row: jnp.sin(row), x)
    x = jax.lax.map(lambda row: jnp.sin(row), x)  # again
    return jnp.sum(x)


@pytest.mark.parametrize("wrap", [lambda f: f, mpx.autocast, jax.grad])
def test_functions_that_jax_calls_keep_their_lines(wrap):
    found = {text for _, text in lines(wrap(user_maps), X, primitives=("sin", "cos"))}
    line = "x = jax.lax.map(lambda row: jnp.sin(row), x)"
    assert found == {line, f"{line}  # again"}
