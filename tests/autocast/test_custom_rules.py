"""Functions with rules of their own keep their rules."""

import functools
import itertools
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from jax.custom_derivatives import SymbolicZero

import mpx

from ..helpers import slow_but
from ..registries import TRANSFORMS
from .counting import BF16, count_products, kept_by, primitives, relative_error

WAYS = {name: way for name, way in TRANSFORMS.items() if name != "cond"}


@jax.custom_vjp
def tripled(x, w, n):
    """The gradient is three times what it should be, so that one can see the rule."""
    return jnp.sin(x @ w) * n


def _tripled_backward(saved, g):
    x, w, n = saved
    g = 3.0 * g * jnp.cos(x @ w) * jnp.asarray(n, g.dtype)
    return g @ w.T, x.T @ g, None


tripled.defvjp(lambda x, w, n: (tripled(x, w, n), (x, w, n)), _tripled_backward)


@jax.custom_jvp
def doubled(x, n):
    return x * n


doubled.defjvp(lambda given, dots: (given[0] * given[1], 2.0 * dots[0] * given[1]))


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def power(x, n):
    return x**n


power.defjvp(lambda n, given, dots: (given[0] ** n, 5.0 * dots[0]))


@jax.custom_vjp
def straight_through(x):
    return jnp.round(x)


straight_through.defvjp(lambda x: (jnp.round(x), None), lambda _, g: (g,))


@jax.custom_vjp
def with_symbolic_zeros(x, y):
    return x * y


with_symbolic_zeros.defvjp(
    lambda x, y: (x.value * y.value, (x.value, y.value)),
    lambda saved, g: (7.0 * g * saved[1], 7.0 * g * saved[0]),
    symbolic_zeros=True,
)

FUNCTIONS = {
    "custom_vjp": lambda w, x: tripled(x, w, 2),
    "custom_vjp of a result": lambda w, x: tripled(x @ w, w, 2),
    "custom_vjp in jit": lambda w, x: jax.jit(tripled)(x @ w, w, 2),
    "custom_vjp in scan": lambda w, x: jax.lax.scan(
        lambda c, _: (tripled(c, w, 1), None), x, length=2
    )[0],
    "custom_vjp in remat": lambda w, x: jax.checkpoint(tripled)(x @ w, w, 2),
    "custom_vjp in vmap": lambda w, x: jax.vmap(
        lambda row: tripled(row[None] @ w, w, 2)
    )(x),
    "custom_jvp with an integer": lambda w, x: doubled(x @ w, 3),
    "custom_jvp with integers": lambda w, x: doubled(x @ w, jnp.arange(8.0)[None]),
    "custom_jvp with nondiff_argnums": lambda w, x: power(x @ w, 3),
    "custom_jvp in cond": lambda w, x: jax.lax.cond(
        x[0, 0] > -9, lambda: doubled(x @ w, 2), lambda: x
    ),
    "straight through": lambda w, x: straight_through(x @ w),
    "symbolic zeros": lambda w, x: with_symbolic_zeros(x @ w, x),
    "relu": lambda w, x: jax.nn.relu(x @ w),
    "logsumexp": lambda w, x: jax.nn.logsumexp(x @ w, axis=-1),
}


@pytest.mark.parametrize(
    ("name", "dtype"), [*zip(FUNCTIONS, itertools.cycle(["bfloat16", "float16"]))]
)
def test_values_and_gradients_are_those_of_the_rule(inputs, name, dtype):
    def loss(w, x):
        return jnp.sum(FUNCTIONS[name](w, x) * 0.5)

    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        cast = mpx.autocast(loss, dtype)
        plain = jax.value_and_grad(loss, (0, 1))

        @jax.jit
        def every_way(*args):
            inside = jax.value_and_grad(cast, (0, 1))(*args)
            return plain(*args), inside, mpx.autocast(plain, dtype)(*args)

        (expected_value, expected), *found = every_way(*inputs)
        for value, got in found:
            assert {g.dtype.name for g in got} == {"float32"}
            if name != "straight through":  # which rounds at other places
                assert relative_error(got, expected) < 3e-2
            assert abs(value - expected_value) < 3e-2 * abs(expected_value) + 0.5


@pytest.mark.parametrize("name", ["custom_vjp of a result", "custom_jvp in cond"])
def test_operation_by_operation_it_is_the_same(inputs, name):
    w, x = inputs
    cast = mpx.autocast(lambda w, x: jnp.sum(FUNCTIONS[name](w, x) * 0.5))
    value, grads = jax.jit(jax.value_and_grad(cast, (0, 1)))(w, x)
    assert relative_error(cast(w, x), value) < 2e-2
    assert relative_error(jax.grad(cast, (0, 1))(w, x), grads) < 2e-2


def test_a_rule_is_kept_and_its_residuals_are_in_half_precision(inputs):
    cast = mpx.autocast(lambda w, x: jnp.sum(tripled(x @ w, w, 2)))
    assert "custom_vjp_call" in primitives(cast, *inputs)
    saved = [a.dtype for a in kept_by(cast, *inputs) if a.shape == (4, 8)]
    assert jnp.bfloat16 in saved


def test_a_rule_for_vmap_is_used(inputs):
    w, x = inputs

    @jax.custom_batching.custom_vmap
    def product(x, w):
        return x @ w

    @product.def_vmap
    def rule(size, batched, x, w):
        return 2.0 * (x @ w), True  # twice, so that one can see the rule

    inner = mpx.autocast(lambda w, x: jax.vmap(lambda row: product(row, w))(x))
    outer = jax.vmap(mpx.autocast(lambda w, x: product(x, w)), in_axes=(None, 0))
    for func in (inner, outer, jax.jit(outer)):
        assert relative_error(func(w, x), 2.0 * x @ w) < 1e-2
        assert set(count_products(func, w, x)) == {BF16}


def test_hessians_and_tangents_pass_through_rules(getkey):
    x = jax.random.normal(getkey(), (3, 3))

    def func(x):
        return jnp.sum(jax.nn.softplus(jax.nn.relu(x @ x) + x))

    @jax.jit
    def derivatives(x):
        funcs = func, mpx.autocast(func)
        return [(jax.hessian(f)(x), jax.jvp(f, (x,), (x,))) for f in funcs]

    (expected_hessian, expected_tangents), (hessian, tangents) = derivatives(x)
    assert relative_error(hessian, expected_hessian) < 5e-2
    assert relative_error(tangents, expected_tangents) < 2e-2


# --- What a rule is told ------------------------------------------------------------


def recorder():
    """A function, and what its rule was told of derivatives and of cotangents."""
    told = {}

    @jax.custom_vjp
    def function(x, y):
        return x * y, x + y

    def forward(x, y):
        told["perturbed"] = (x.perturbed, y.perturbed)
        return (x.value * y.value, x.value + y.value), (x.value, y.value)

    def backward(saved, cotangents):
        are_zero = tuple(isinstance(c, SymbolicZero) for c in cotangents)
        if not all(are_zero):  # as rules may be called by JAX, for nothing
            told.setdefault("zero", []).append(are_zero)
        first, second = (0.0 if isinstance(c, SymbolicZero) else c for c in cotangents)
        x, y = saved
        return first * y + second, None

    function.defvjp(forward, backward, symbolic_zeros=True)
    return function, told


tells_zeros = pytest.mark.skipif(
    jax.__version_info__ < (0, 10, 2), reason="needs a JAX whose pullbacks take zeros"
)


@tells_zeros
@pytest.mark.parametrize("way", slow_but(["eager", "scan"], WAYS))
def test_a_rule_is_told_what_it_is_told_without_autocast(getkey, way):
    x, y = jax.random.normal(getkey(), (2, 4))
    function, told = recorder()
    cases = {
        "one operand": lambda x: function(x * 2.0, y)[0],
        "the other": lambda x: function(y, x * 2.0)[1],
        "both": lambda x: sum(function(jnp.sin(x), x)),
        "one behind a stop": lambda x: function(x, jax.lax.stop_gradient(x))[1],
        # The rule of the last one gives nothing for its second operand.
        "behind a rule that gives none": lambda x: function(
            jnp.cos(x), function(x, x)[0]
        )[1],
    }
    for name, case in cases.items():
        found = []
        for func in (case, mpx.autocast(case)):
            told.clear()
            grad = jax.grad(lambda x, f=func: jnp.sum(WAYS[way](f)(x)))(x)
            found.append((dict(told), grad))
        (expected, grad), (seen, got) = found
        assert seen == expected, name
        assert relative_error(got + 1.0, grad + 1.0) < 2e-2


@eqx.filter_custom_vjp
def filtered(weights, x, name):
    return jnp.tanh(x @ weights["w"]) + weights["b"]


@filtered.def_fwd
def _filtered_forward(perturbed, weights, x, name):
    assert perturbed == {"w": True, "b": False, "n": False} and name == "layer"
    return filtered(weights, x, name), jnp.tanh(x @ weights["w"])


@filtered.def_bwd
def _filtered_backward(y, g, perturbed, weights, x, name):
    return {"w": 2.0 * x.T @ (g * (1 - y * y)), "b": None, "n": None}


@pytest.mark.parametrize("way", slow_but(["remat", "vmap"], WAYS))
def test_rules_of_equinox_are_differentiated(inputs, way):
    w, x = inputs

    def loss(w):
        weights = {"w": w, "b": jnp.ones((4, 8)), "n": jnp.arange(3)}
        return jnp.sum(filtered(weights, x, "layer"))

    grad = jax.grad(lambda w: WAYS[way](mpx.autocast(loss))(w))
    assert relative_error(grad(w), jax.grad(loss)(w)) < 2e-2
    # One forward, one of its recomputation, one for the gradient: none in float32.
    assert set(count_products(grad, w)) == {BF16}


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 2))
def applied(func, x, n):
    return func(x) * n


applied.defvjp(
    lambda func, x, n: (func(x) * n, x),
    lambda func, n, x, g: (7.0 * n * g * jnp.cos(x),),
)


@pytest.mark.parametrize("way", slow_but(["jit", "scan"], WAYS))
def test_a_rule_may_close_over_constants_and_take_functions(getkey, way):
    x = jax.random.normal(getkey(), (8,))
    table = jax.random.normal(getkey(), (8, 8))

    @jax.custom_vjp
    def closing(x):
        return jnp.sin(table @ x)

    closing.defvjp(
        lambda x: (jnp.sin(table @ x), x),
        lambda x, g: (3.0 * table.T @ (g * jnp.cos(table @ x)),),
    )

    def loss(x):
        return jnp.sum(closing(x)) + jnp.sum(applied(jnp.sin, x, 2))

    grad = jax.grad(lambda x: jnp.sum(WAYS[way](mpx.autocast(loss))(x)))(x)
    assert relative_error(grad, jax.grad(loss)(x)) < 2e-2


def closing(function, forward, backward):
    """A loss whose rule closes over an argument, where these read it."""

    def loss(w, x):
        @jax.custom_vjp
        def closing_over_x(w):
            return jnp.sum(function(w, x))

        closing_over_x.defvjp(
            lambda w: (jnp.sum(forward(w, x)), w), lambda w, g: (g * backward(w, x),)
        )
        return closing_over_x(jnp.sin(w))

    return loss


def only_w(w, x):
    return 5.0 * w


def only_x(w, x):
    return x


def test_a_rule_may_close_over_an_argument_that_is_not_differentiated(getkey):
    """As far as `jax.checkpoint` can: where the rule itself does not need it."""
    w, x = jax.random.normal(getkey(), (2, 8))
    loss = closing(jnp.multiply, only_w, only_w)
    for func in (loss, mpx.autocast(loss), jax.checkpoint(mpx.autocast(loss))):
        assert relative_error(jax.grad(func)(w, x), jax.grad(loss)(w, x)) < 2e-2
    message = "`.*closing_over_x` at .*closes over a differentiated array"
    with pytest.raises(ValueError, match=message):
        jax.grad(mpx.autocast(loss), 1)(w, x)


def test_a_rule_that_closes_over_an_argument_is_named(getkey):
    w, x = jax.random.normal(getkey(), (2, 8))
    message = "rule of the function `.*closing_over_x` at .*test_custom_rules.*argument"
    for func in (
        closing(jnp.multiply, jnp.multiply, only_w),
        closing(only_w, only_w, only_x),
    ):
        with pytest.raises(jax.errors.UnexpectedTracerError):
            jax.grad(jax.checkpoint(func))(w, x)
        grad = jax.grad(mpx.autocast(func))
        for differentiate in (grad, jax.jit(grad), jax.jit(grad).lower):
            with pytest.raises(jax.errors.UnexpectedTracerError, match=message):
                differentiate(w, x)


def test_no_derivative_by_what_a_rule_of_tangents_closes_over(getkey):
    w, x = jax.random.normal(getkey(), (2, 8))

    def loss(w, x):
        @jax.custom_jvp
        def of_jvp(w):
            return jnp.sum(w * x)

        of_jvp.defjvp(lambda w, w_dot: (jnp.sum(w[0]), jnp.sum(w_dot[0])))
        return of_jvp(w)

    with pytest.raises(ValueError, match="`.*of_jvp` at .*closes over a diff"):
        jax.grad(mpx.autocast(loss), 1)(w, x)


@tells_zeros
def test_tangents_that_a_rule_knows_to_be_zero_stay_so(getkey):
    x = jax.random.normal(getkey(), (4,))
    function, told = recorder()

    @jax.custom_jvp
    def halves(x):
        return x, x + 1.0

    def rule(primals, tangents):
        (x,), (t,) = primals, tangents
        return (x, x + 1.0), (t, SymbolicZero(jax.typeof(x).to_tangent_aval()))

    halves.defjvp(rule, symbolic_zeros=True)
    loss = lambda x: jnp.sum(function(*halves(x))[0])  # noqa: E731
    expected = jax.grad(loss)(x)
    seen = dict(told)
    told.clear()
    assert relative_error(jax.grad(mpx.autocast(loss))(x), expected) < 2e-2
    assert told == seen == {"perturbed": (True, False), "zero": [(False, True)]}


# --- Rules that run the function alone where they can -------------------------------


@jax.custom_vjp
def fused(x, w):
    return jnp.tanh(x @ w)


def _fused_forward(x, w):
    y = jnp.tanh(x @ w)
    # A kernel would save more than it needs to give its result.
    return y, (x, w, jnp.sin(y))


def _fused_backward(saved, g):
    x, w, y = saved
    g = g * (1 - jnp.asin(y) ** 2)
    return g @ w.T, x.T @ g


fused.defvjp(_fused_forward, _fused_backward, optimize_remat=True)


@pytest.mark.parametrize("way", slow_but(["jit", "remat", "scan"], WAYS))
def test_forward_rules_of_a_training_step_are_in_half_precision(inputs, way):
    w, x = inputs

    def loss(w):
        return jnp.mean(fused(fused(x, w), w) ** 2)

    expected = jax.grad(loss)(w)
    grads = [
        jax.grad(WAYS[way](mpx.autocast(loss))),
        mpx.autocast(jax.grad(WAYS[way](loss))),
    ]
    if way != "vmap":  # JAX itself cannot: `jax.grad(jax.jit(jax.vmap(loss)))`
        grads.append(jax.grad(mpx.autocast(WAYS[way](loss))))
    for grad in grads:
        assert relative_error(jax.jit(grad)(w), expected) < 2e-2
        assert set(count_products(grad, w)) == {BF16}


def test_what_a_rule_saves_is_not_computed_where_it_is_not_needed(inputs):
    """In the forward pass of something that is recomputed."""
    w, x = inputs

    def loss(w):
        return jnp.mean(fused(x, w) ** 2)

    for func in (loss, mpx.autocast(loss)):
        jaxpr = jax.make_jaxpr(jax.grad(jax.checkpoint(func)))(w)
        forward = [e for e in jaxpr.eqns if "remat" not in e.primitive.name]
        inside = jax.tree.leaves(forward, is_leaf=lambda e: hasattr(e, "primitive"))
        assert inside and "sin" not in "\n".join(map(str, inside))


def test_the_function_of_a_rule_is_rewritten_once(inputs):
    """However often JAX asks for it, as each time that it leaves out what is unused."""
    gradient = mpx.autocast(jax.grad(lambda w, x: fused(x, w).sum()))
    equations = jax.make_jaxpr(gradient)(*inputs).eqns
    (rule,) = [e for e in equations if "fun_jaxpr_thunk" in e.params]
    jaxprs = [rule.params["fun_jaxpr_thunk"]()[0] for _ in range(2)]
    assert jaxprs[0] is jaxprs[1]


def test_explain_says_the_same_of_a_rule_and_of_its_gradient(inputs):
    w, x = inputs

    def forward_products(func):
        found = mpx.explain(func)(w).operations
        products = [o for o in found if o.primitive == "dot_general"]
        return [(o.precision, o.reason) for o in products if o.phase == "forward"]

    cast = mpx.autocast(lambda w: jnp.mean(fused(x, w) ** 2))
    (of_loss,) = forward_products(cast)
    assert of_loss == ("bfloat16", "a matmul or convolution")
    assert of_loss in forward_products(jax.grad(cast))


def _inner(x):
    return jnp.sin(x)  # in the function


@jax.custom_jvp
def ruled_by_jvp(x):
    return _inner(x)


@ruled_by_jvp.defjvp
def _ruled_jvp(primals, tangents):
    (x,), (dot,) = primals, tangents
    return ruled_by_jvp(x), dot * jnp.cosh(x)  # in the rule


@jax.custom_vjp
def ruled_by_vjp(x):
    return _inner(x)


def _ruled_backward(x, g):
    return (g * jnp.cosh(x),)  # in the rule


ruled_by_vjp.defvjp(lambda x: (ruled_by_vjp(x), x), _ruled_backward)


@pytest.mark.parametrize("func", [ruled_by_jvp, ruled_by_vjp])
def test_operations_of_a_rule_have_the_lines_of_the_rule(func):
    loss = mpx.autocast(lambda x: jnp.sum(jax.jit(func)(x * x)))
    report = mpx.explain(jax.grad(loss))(jnp.ones(3))
    text = Path(__file__).read_text().splitlines()
    numbers = {o.primitive: int(o.source.rsplit(":")[-1]) for o in report.operations}
    assert text[numbers["sin"] - 1].endswith("# in the function")
    if func is ruled_by_jvp:  # JAX itself gives a backward pass the lines of the call
        assert text[numbers["cosh"] - 1].endswith("# in the rule")


def test_an_error_in_a_rule_is_the_rules_own():
    @jax.custom_jvp
    def func(x):
        return jnp.sin(x)

    @func.defjvp
    def rule(primals, tangents):
        raise RuntimeError("out of order")

    with pytest.raises(RuntimeError, match="out of order"):
        jax.grad(mpx.autocast(lambda x: jnp.sum(func(x))))(jnp.ones(3))
