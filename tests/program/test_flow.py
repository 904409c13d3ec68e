"""The walker: which operations a program has, how often they run, what is known."""

import functools
import inspect

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.extend.core import Primitive
from jax.sharding import PartitionSpec

from mpx._program import BackwardFlow, Flow, backward, source_span, sub_jaxprs, walk
from tests.helpers import NoFlow

SQUARE = jax.ShapeDtypeStruct((3, 3), jnp.float32)


class Sources(Flow):
    """A flow whose facts are the names of the inputs that a value was made of."""

    def constant(self, value):
        return frozenset()

    def transfer(self, equation, facts):
        return [frozenset().union(*facts)] * len(equation.outvars)

    def join(self, a, b):
        return a | b


def visits(func, *args, flow=None, inputs=None):
    jaxpr = jax.make_jaxpr(func)(*args)
    inputs = inputs if flow else [None] * len(args)
    return list(walk(jaxpr, inputs, flow or NoFlow()))


def places(func, *args):
    """Executions, loops without a count, and what is around, of each product."""
    found = [v for v in visits(func, *args) if v.equation.primitive.name == PRODUCT]
    return [(v.place.executions, v.place.unknown_loops, v.place.inside) for v in found]


PRODUCT = "dot_general"


def scanned(length):
    return lambda x: lax.scan(lambda c, _: (c @ x, None), x, length=length)[0]


def test_a_dot_in_scan_in_jit_in_remat_runs_as_often_as_the_scan_is_long():
    @jax.checkpoint
    @jax.jit
    def f(x):
        return scanned(7)(x)

    assert places(f, SQUARE) == [(7, 0, ("remat2", "jit f", "scan body"))]


def test_nested_scans_multiply():
    def outer(x):
        return lax.scan(lambda c, _: (scanned(5)(c), None), x, length=3)[0]

    assert [place[:2] for place in places(outer, SQUARE)] == [(15, 0)]


def test_a_while_loop_has_no_count_and_a_scan_in_it_keeps_its_length():
    def f(x):
        x = lax.while_loop(lambda c: (c @ c).sum() < 1, lambda c: c @ x, x)
        return scanned(3)(x)

    assert places(f, SQUARE) == [
        (1, 1, ("while body",)),
        (1, 1, ("while condition",)),
        (3, 0, ("scan body",)),
    ]
    both = lambda x: lax.while_loop(lambda c: c.sum() < 1, scanned(7), x)  # noqa: E731
    assert [place[:2] for place in places(both, SQUARE)] == [(7, 1)]


def test_each_branch_of_a_cond_is_visited():
    def f(i, x):
        return lax.switch(i, [lambda x: x @ x, lambda x: x @ x.T, lambda x: x], x)

    found = places(f, jax.ShapeDtypeStruct((), jnp.int32), SQUARE)
    assert [place[2] for place in found] == [(f"cond branch {i} of 3",) for i in (1, 2)]


def with_jvp_rule():
    f = jax.custom_jvp(lambda x: x @ x)
    f.defjvp(lambda x, dx: (x[0] @ x[0], dx[0] @ x[0]))
    return f


def with_vjp_rule():
    f = jax.custom_vjp(lambda x: x @ x)
    f.defvjp(lambda x: (x @ x, x), lambda x, g: (g @ x,))
    return f


def with_vmap_rule():
    f = jax.custom_batching.custom_vmap(lambda x: x @ x)
    f.def_vmap(lambda size, batched, x: (x @ x, True))
    return f


@pytest.mark.parametrize("make", [with_jvp_rule, with_vjp_rule, with_vmap_rule])
def test_functions_with_rules_of_their_own_are_entered(make):
    (place,) = places(make(), SQUARE)
    assert place[0] == 1
    assert place[2][0].startswith("custom_")


def test_a_program_over_devices_runs_on_each():
    mesh = jax.make_mesh(
        (4, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2
    )
    spec = PartitionSpec("x")
    f = functools.partial(jax.shard_map, mesh=mesh, in_specs=spec, out_specs=spec)
    batch = jax.ShapeDtypeStruct((8, 3, 3), jnp.float32)
    assert [p[0] for p in places(f(lambda x: x @ x), batch)] == [8]
    half = f(lambda x: x @ x, axis_names={"x"})
    assert [p[0] for p in places(half, batch)] == [4]


def with_the_solver_of_a_linear_solve(a):
    solve = lambda _, b: jnp.sin(b)  # noqa: E731
    return lax.custom_linear_solve(lambda x: a @ x, a[0], solve, symmetric=True)


def with_combiners(x):
    x = x.at[0].add(1.0)
    return lax.reduce(x, jnp.float32(0), lambda a, b: a + 2 * b, (0, 1))


def with_a_kernel_of_pallas(x):
    from jax.experimental import pallas as pl

    def kernel(x, y):
        y[...] = x[...] * 2.0

    return pl.pallas_call(kernel, SQUARE)(x)


@pytest.mark.parametrize(
    ("func", "present", "absent"),
    [
        (with_the_solver_of_a_linear_solve, {"sin"}, "dot_general"),
        (with_combiners, {"scatter-add", "reduce"}, "mul"),
        (with_a_kernel_of_pallas, {"pallas_call"}, "mul"),
    ],
)
def test_programs_that_do_not_run_are_not_entered(func, present, absent):
    names = {v.equation.primitive.name for v in visits(func, SQUARE)}
    assert present <= names and absent not in names


# --- Facts -------------------------------------------------------------------------


def facts(func, n):
    inputs = [frozenset({c}) for c in "abc"[:n]]
    found = visits(func, *[SQUARE] * n, flow=Sources(), inputs=inputs)
    products = [v.operands for v in found if v.equation.primitive.name == PRODUCT]
    return [["".join(sorted(fact)) for fact in operands] for operands in products]


def test_of_an_unknown_equation_any_operand_may_go_into_its_program():
    unknown = Primitive("unknown")
    unknown.def_abstract_eval(lambda *avals, program: program.out_avals[0])
    program = jax.make_jaxpr(lambda x, y, z: x @ y + z)(*[SQUARE] * 3)
    for inputs in ("", "a", "ab"):
        f = functools.partial(unknown.bind, program=program)
        assert facts(f, len(inputs)) == [[inputs, inputs]]


def calls(a, b, c):
    return jax.jit(lambda x, y: (y, x))(a, b)[0] @ jax.checkpoint(jnp.sin)(c)


def carry_of_later_iterations(a, b, c):
    def body(carry, _):
        x, y, z = carry
        return (y, z, z), x @ y

    # b reaches x after one iteration, c after two.
    return lax.scan(body, (a, b, c), length=5)


def unchanged_carry(a, b):
    body = lambda c: (c[0] @ c[1], c[1])  # noqa: E731
    return lax.while_loop(lambda c: c[0].sum() < 1, body, (a, b))


def condition_of_a_while(a, b):
    return lax.while_loop(lambda x: (x @ x).sum() < 1, lambda x: x * b, a)


def either_branch_of_a_cond(a, b, c):
    return lax.cond(a.sum() > 0, lambda: b, lambda: c) @ a


def loop_of_no_iteration(a, b):
    return lax.while_loop(lambda x: x.sum() < 1, lambda x: b, a) @ b


@pytest.mark.parametrize(
    ("func", "expected"),
    [
        (calls, ["b", "c"]),
        (carry_of_later_iterations, ["abc", "bc"]),
        (unchanged_carry, ["ab", "b"]),
        (condition_of_a_while, ["ab", "ab"]),
        (either_branch_of_a_cond, ["bc", "a"]),
        (loop_of_no_iteration, ["ab", "b"]),
    ],
)
def test_facts_of_operands(func, expected):
    assert facts(func, len(inspect.signature(func).parameters)) == [expected]


class Uses(BackwardFlow):
    """A flow whose facts are the numbers of the results that a value goes into."""

    @property
    def nothing(self):
        return frozenset()

    def transfer(self, equation, results):
        return [frozenset().union(*results)] * len(equation.invars)

    def join(self, a, b):
        return a | b


def test_what_a_loop_carries_goes_where_later_iterations_take_it():
    def f(*four):
        def body(carry, _):
            w, x, y, z = carry
            return (x, y, z, z + 1), None

        return jax.lax.scan(body, four, length=5)[0]

    jaxpr = jax.make_jaxpr(f)(*[SQUARE] * 4).jaxpr
    facts = backward(jaxpr, [frozenset({i}) for i in range(4)], Uses())
    # Each turn drops the first, and the last is in the first result after three.
    found = [sorted(facts[v]) for v in jaxpr.invars]
    assert found == [[], [0], [0, 1], [0, 1, 2, 3]]


# --- Lines -------------------------------------------------------------------------


def test_frames_are_the_users_own():
    def helper(x):
        return jnp.sin(x)

    def f(x):
        return jax.jit(helper)(x)

    (visit,) = visits(f, SQUARE)
    frames = visit.frames
    names = [frame.function.rpartition(".")[2] for frame in frames]
    assert names[-2:] == ["f", "helper"]
    assert frames[-1].file == __file__
    assert frames[-1].line == helper.__code__.co_firstlineno + 1


def test_a_span_tells_a_promotion_from_a_cast():
    def promoted(x, y):
        return jnp.multiply(x, y)

    def cast(x, y):
        return x.astype(jnp.float32) * y

    half = jax.ShapeDtypeStruct((3,), jnp.bfloat16)
    full = jax.ShapeDtypeStruct((3,), jnp.float32)
    with jax.numpy_dtype_promotion("standard"):
        convert, mul = visits(promoted, half, full)
    assert source_span(convert.equation) == source_span(mul.equation)
    convert, mul = visits(cast, half, full)
    assert source_span(convert.equation) != source_span(mul.equation)


def test_every_program_of_an_equation_has_a_fact_for_each_input():
    def f(x):
        y = jax.lax.scan(lambda c, _: (jnp.linalg.solve(x, c), None), x, length=2)[0]
        return jnp.linalg.inv(y) + jax.lax.cond(True, jnp.sin, jnp.cos, y)

    def check(jaxpr):
        for equation in jaxpr.eqns:
            for sub in sub_jaxprs(equation):
                assert len(sub.operands) == len(sub.jaxpr.invars)
                assert len(sub.results) == len(sub.jaxpr.outvars)
                check(sub.jaxpr)

    check(jax.make_jaxpr(f)(SQUARE).jaxpr)
