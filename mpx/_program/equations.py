"""Equations of a program, and the programs that they hold.

A *program* is a jaxpr. An equation may hold programs (`sub_jaxprs`): the body of a
scan, the branches of a cond, a function under jit. This module defines once how the
equation's operands map to their inputs, and how often they run.

The scalar combiners of reduce and scatter are not programs, nor are Pallas kernels,
whose instructions work on references. An equation that holds one is a leaf.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from .._base.jax_compat import (
    bind_equation,
    composite_parameter,
    manual_axes_of,
    open_jaxpr,
    scan_counts,
    shard_map_axes,
)
from .._base.typing import AnyArray, Atom, Aval, Program
from .primitives import Flops, PrimitiveClass, properties

OTHERS = "for other platforms"
"""The role of a branch for all platforms without a separate one."""

# unsure: in place of any unknown length; decisions by size may differ at the real one
MANY = 4096
"""The assumed size of a symbolic dimension, such as that of an exported batch."""


def lengths(shape: Iterable[object]) -> tuple[int, ...]:
    """Returns a shape as integers.

    A symbolic dimension (`jax.export.symbolic_shape`) counts as a large number, because
    JAX refuses to compare it.
    """
    known = (int, np.integer)
    return tuple(int(n) if isinstance(n, known) else MANY for n in shape)


def count(shape: Iterable[object]) -> int:
    """Returns the size of an array, to compare it with others."""
    return math.prod(lengths(shape))


@dataclasses.dataclass(frozen=True)
class SubJaxpr:
    """A program that an equation holds, and how it is connected to the equation."""

    jaxpr: Jaxpr
    consts: tuple[AnyArray, ...]
    role: str
    """Its role if the equation has several programs: `body`, `branch 1 of 3`."""
    trips: int | None
    """How often it runs for each run of the equation; None if unknown before a run."""
    operands: tuple[int | None, ...]
    """For each input, the operand of the equation that arrives there."""
    results: tuple[int | None, ...]
    """For each output, the result of the equation that it becomes."""
    carried: tuple[tuple[int, int], ...] = ()
    """Which output comes back as which input in the next iteration."""
    devices: int = 1
    """On how many devices it runs, each with a part of the data."""


def aval_of(atom: Atom) -> Aval:
    """Returns the type of an operand or a result: an array, token or reference.

    JAX annotates it as an abstract value, without shape and dtype.
    """
    aval: Any = atom.aval
    return aval


def avals(atoms: Iterable[Atom]) -> list[Aval]:
    """Returns the types of operands or results."""
    return [aval_of(atom) for atom in atoms]


def is_inexact(aval: Aval) -> bool:
    """Returns whether values of a type are floating-point or complex."""
    return jnp.issubdtype(aval.dtype, jnp.inexact)


def program_of(equation: JaxprEqn) -> Program:
    """Returns the one program of an equation whose primitive names its parameter."""
    name, params = equation.primitive.name, equation.params
    if name == "composite":
        return params[composite_parameter(params)]
    return params[properties(name).program]


def equations(jaxpr: Program) -> Iterator[JaxprEqn]:
    """Yields every equation of a program, including nested ones, in order.

    An equation is repeated if several equations hold its program.
    """
    for equation in open_jaxpr(jaxpr).eqns:
        yield equation
        for sub in sub_jaxprs(equation):
            yield from equations(sub.jaxpr)


def distinct_equations(jaxpr: Program) -> Iterator[JaxprEqn]:
    """Yields each equation once: twelve layers may call one program twelve times."""
    # Ids stay unique: the outermost program keeps all nested programs alive.
    seen: set[int] = set()

    def inside(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
        if id(jaxpr) in seen:
            return
        seen.add(id(jaxpr))
        for equation in jaxpr.eqns:
            yield equation
            for sub in sub_jaxprs(equation):
                yield from inside(sub.jaxpr)

    yield from inside(open_jaxpr(jaxpr))


def summed_numbers(equation: JaxprEqn) -> int:
    """Returns how many terms a matmul or convolution sums; 0 for other operations."""
    name, params = equation.primitive.name, equation.params
    if name == "dot_general":
        return _count_at(equation.invars[0], params["dimension_numbers"][0][0])
    if name == "ragged_dot_general":
        numbers = params["ragged_dot_dimension_numbers"].dot_dimension_numbers
        return _count_at(equation.invars[0], numbers[0][0])
    if name == "ragged_dot":
        return _count_at(equation.invars[0], (-1,))
    if name == "conv_general_dilated":
        # The first two entries are the kernel's output and input feature axes.
        _, *summed = params["dimension_numbers"].rhs_spec
        return _count_at(equation.invars[1], summed)
    return 0


def _count_at(atom: Atom, axes: Iterable[int]) -> int:
    shape = aval_of(atom).shape
    return count(shape[axis] for axis in axes)


def is_matmul(equation: JaxprEqn) -> bool:
    """Returns whether it is a matmul, a convolution or attention in one kernel.

    Products of blocks with scales are among them, which autocast does not look into.
    """
    known = properties(equation.primitive.name)
    return known.kind is PrimitiveClass.HALF or known.flops is Flops.LAST_AXIS_PRODUCT


def is_multiplication(equation: JaxprEqn) -> bool:
    """Returns whether an equation is a matmul or convolution with sums of one term.

    JAX writes `jnp.einsum("bl,blp->blp", decay, x)`, `jnp.outer` and `Dense` with one
    feature as matmuls, but they are multiplications.
    """
    return summed_numbers(equation) == 1


# Up to this many gradients are summed in half precision: a norm feeds three matmuls,
# and four 3 by 3 windows at stride two overlap. A sum of eight equal ones is 2 % off.
# unsure: 4 and 8 were compared, 5 to 7 were not
FEW_USES = 4


def only_picks(equation: JaxprEqn) -> bool:
    """Returns whether each result element is an operand's, its negative, or zero.

    So rounding before or after gives equal values. The gradient also goes to the same
    element, except in a window with elements that are equal once rounded: a float32
    pool would save its operand in float32 (a ResNet for an H100: 13 % more memory).
    """
    name, params = equation.primitive.name, equation.params
    if name in ("max", "min"):  # relu
        return any(isinstance(a, Literal) and a.val == 0 for a in equation.invars)
    if name in ("reduce_window_max", "reduce_window_min"):
        sizes, strides = params["window_dimensions"], params["window_strides"]
        reads = (-(-size // s) for size, s in zip(sizes, strides, strict=True))
        return math.prod(reads) <= FEW_USES
    return properties(name).picks


def is_along_vmap(equation: JaxprEqn) -> bool:
    """Returns whether a collective is along an axis of `jax.vmap`, on one device.

    Such an axis has a name inside the `vmap`, and is a number in the batched equation.
    A sum over both also has an axis of a mesh: then the rest is small.
    """
    params = equation.params
    axes = params.get("axes", params.get("axis_name", ()))
    axes = axes if isinstance(axes, tuple) else (axes,)
    return not set(axes) <= set(manual_axes_of(equation))


_PROGRAMS = (Jaxpr, ClosedJaxpr)


def sub_jaxprs(equation: JaxprEqn) -> tuple[SubJaxpr, ...]:
    """Returns the programs that an equation holds; none for an operation."""
    name, params = equation.primitive.name, equation.params
    if name == "scan":
        return (_scan_body(equation),)
    if name == "while":
        return _while_programs(equation)
    if name == "cond":
        return _branches(equation)
    if name == "custom_linear_solve":
        return (_solve(equation),)
    known = properties(name)
    if known.combines:
        return ()
    if known.program:
        found = [program_of(equation)]
    else:
        # For a primitive that is not in the table, find programs by their type. Their
        # number of runs is unknown.
        found = [x for x in params.values() if isinstance(x, _PROGRAMS)]
    if not found:
        return ()
    devices = _devices(params) if name in ("shard_map", "xla_pmap") else 1
    role = "" if len(found) == 1 else "program"
    trips = 1 if known.runs_once else None
    return tuple(
        dataclasses.replace(_joined(equation, x, role), trips=trips, devices=devices)
        for x in found
    )


def _sub(jaxpr: Program, **joints: Any) -> SubJaxpr:
    return SubJaxpr(open_jaxpr(jaxpr), tuple(getattr(jaxpr, "consts", ())), **joints)


def _joined(equation: JaxprEqn, jaxpr: Program, role: str) -> SubJaxpr:
    """Connects a program to its equation, input by input where the counts match."""
    inner = open_jaxpr(jaxpr)
    n_in, n_out = len(inner.invars), len(inner.outvars)
    same_in = n_in == len(equation.invars)
    same_out = n_out == len(equation.outvars)
    return _sub(
        jaxpr,
        role=role,
        trips=1,
        # None: the operand is unknown, so it may be any of them.
        operands=tuple(range(n_in)) if same_in else (None,) * n_in,
        results=tuple(range(n_out)) if same_out else (None,) * n_out,
    )


def _scan_body(equation: JaxprEqn) -> SubJaxpr:
    params = equation.params
    n_consts, n_carry = scan_counts(params)
    body = _joined(equation, params["jaxpr"], "body")
    return dataclasses.replace(
        body,
        trips=params["length"],
        carried=tuple((i, n_consts + i) for i in range(n_carry)),
    )


def _while_programs(equation: JaxprEqn) -> tuple[SubJaxpr, ...]:
    params = equation.params
    n_cond, n_body = params["cond_nconsts"], params["body_nconsts"]
    n_carry = len(equation.outvars)
    carry = range(n_cond + n_body, n_cond + n_body + n_carry)
    body = _sub(
        params["body_jaxpr"],
        role="body",
        trips=None,
        operands=(*range(n_cond, n_cond + n_body), *carry),
        results=tuple(range(n_carry)),
        carried=tuple((i, n_body + i) for i in range(n_carry)),
    )
    condition = _sub(
        params["cond_jaxpr"],
        role="condition",
        trips=None,
        operands=(*range(n_cond), *carry),
        results=(None,),
    )
    # In this order: the condition reads the carry that the body returns, and walks pass
    # the facts of one program on to the next (`flow`).
    return body, condition


def _branches(equation: JaxprEqn) -> tuple[SubJaxpr, ...]:
    branches = equation.params["branches"]
    roles = [f"branch {i} of {len(branches)}" for i in range(1, len(branches) + 1)]
    # Set by `jax.lax.platform_dependent`; None means all platforms not named.
    platforms = equation.params.get("branches_platforms")
    if platforms is not None:
        roles = [OTHERS if p is None else f"for {' or '.join(p)}" for p in platforms]
    return tuple(
        _sub(
            branch,
            role=role,
            trips=1,
            # Operand 0 chooses the branch.
            operands=tuple(range(1, len(equation.invars))),
            results=tuple(range(len(equation.outvars))),
        )
        for role, branch in zip(roles, branches, strict=True)
    )


def by_platform(
    *arrays: AnyArray, program: ClosedJaxpr, emulated: Any, platform: str
) -> list[AnyArray]:
    """Computes an `on_target` of `_quantize`, which has a form for one platform."""
    forms: dict[str, Any] = {platform: core.jaxpr_as_fun(program)}
    return jax.lax.platform_dependent(*arrays, **forms, default=emulated)


def forms_of(equation: JaxprEqn) -> ClosedJaxpr:
    """Returns the program of an `on_target`: a conditional with a branch for each form.

    Its equations are new ones in each call.
    """
    run = functools.partial(by_platform, **equation.params)
    return jax.make_jaxpr(run)(*map(aval_of, equation.invars))


def _solve(equation: JaxprEqn) -> SubJaxpr:
    """Returns the solver, the only one of a linear solve's four programs that runs."""
    lengths, jaxprs = (equation.params[key] for key in ("const_lengths", "jaxprs"))
    first = lengths.matvec + lengths.vecmat
    right_sides = range(sum(lengths), len(equation.invars))
    return _sub(
        jaxprs.solve,
        role="solve",
        trips=1,
        operands=(*range(first, first + lengths.solve), *right_sides),
        results=tuple(range(len(equation.outvars))),
    )


def where_leading(condition: AnyArray, new: AnyArray, old: AnyArray) -> AnyArray:
    """Selects `new` where a condition on the leading axes is true, else `old`.

    It freezes finished examples of a `while` whose condition is batched by `vmap`. The
    primitive accepts that, `jax.lax.while_loop` does not (jax 0.10 to 0.12).
    """
    whole = jax.lax.broadcast_in_dim(condition, new.shape, range(condition.ndim))
    return jax.lax.select(whole, new, old)


def constants_as_inputs(closed: ClosedJaxpr) -> tuple[ClosedJaxpr, Sequence[AnyArray]]:
    """Returns a program without constant arrays, and the arrays to pass first instead.

    A constant may be a tracer, and a program that holds a tracer is valid only during
    its trace.
    """
    if not closed.consts:
        return closed, ()
    count = len(closed.consts)

    def program(*arrays: AnyArray) -> list[AnyArray]:
        held = core.ClosedJaxpr(open_jaxpr(closed), list(arrays[:count]))
        return core.jaxpr_as_fun(held)(*arrays[count:])

    types = map(jax.typeof, closed.consts)
    return jax.make_jaxpr(program)(*types, *closed.in_avals), closed.consts


def checkpoint_params(
    params: dict[str, Any], program: ClosedJaxpr, before: int, after: int = 0
) -> dict[str, Any]:
    """Returns the parameters of a checkpoint of a program with more operands.

    `prevent_cse` may be a tuple of one entry for each operand.
    """
    cuts = params["prevent_cse"]
    if isinstance(cuts, tuple):
        cuts = (*(False,) * before, *cuts, *(False,) * after)
    return {**params, "jaxpr": open_jaxpr(program), "prevent_cse": cuts}


def run_by(
    bind: Callable[[JaxprEqn, list[Any]], Sequence[Any]],
    closed: ClosedJaxpr,
    arrays: Sequence[AnyArray],
) -> Callable[[Atom], Any]:
    """Runs a program by a function of each equation and its operands.

    Returns:
        A function that returns the value of a variable or literal of the program.
    """
    values: dict[Atom, Any] = dict(zip(closed.jaxpr.invars, arrays, strict=True))
    values.update(zip(closed.jaxpr.constvars, closed.consts, strict=True))

    def read(atom: Atom) -> Any:
        return atom.val if isinstance(atom, Literal) else values[atom]

    for equation in closed.jaxpr.eqns:
        results = bind(equation, list(map(read, equation.invars)))
        values.update(zip(equation.outvars, results, strict=True))
    return read


def zero_results(jaxpr: Jaxpr) -> tuple[bool, ...]:
    """Returns for each result of a program whether it is always zero.

    This detects derivatives that JAX knows to be zero but has to materialize. A zero
    that arises by computing is not detected.
    """
    makers = {v: equation for equation in jaxpr.eqns for v in equation.outvars}

    def is_zero(atom: Atom) -> bool:
        if isinstance(atom, core.Literal):
            return bool(atom.val == 0)
        maker = makers.get(atom)
        if maker is None:
            return False
        known = properties(maker.primitive.name)
        is_same = known.kind is PrimitiveClass.CONVERT or (
            # An operation that reads a part may read out of bounds, where it fills
            # other values.
            known.moves and not known.reads_part and len(maker.invars) == 1
        )
        return is_same and is_zero(maker.invars[0])

    return tuple(map(is_zero, jaxpr.outvars))


def _devices(params: dict[str, Any]) -> int:
    """Returns the number of devices over which a `shard_map` splits its program."""
    # `xla_pmap` has no mesh.
    if "axis_size" in params:
        return params["axis_size"]
    sizes = dict(params["mesh"].shape)
    return math.prod(sizes[axis] for axis in shard_map_axes(params))


_SCALAR = (PrimitiveClass.FULL, PrimitiveClass.CONVERT, PrimitiveClass.MOVE)


def number_of(atom: Atom, makers: Mapping[Atom, JaxprEqn]) -> float | None:
    """Returns the one number that a constant consists of, or None.

    It may be computed in the program: `jnp.sqrt(64)`, `1 - rate`.

    Args:
        atom: The operand.
        makers: The equation that makes each variable of its program.
    """
    while not isinstance(atom, Literal):
        maker = makers.get(atom)
        if maker is None:
            return None
        if maker.primitive.name == "broadcast_in_dim":
            atom = maker.invars[0]
            continue
        if properties(maker.primitive.name).kind not in _SCALAR or maker.effects:
            return None
        if any(aval_of(a).shape for a in (*maker.invars, *maker.outvars)):
            return None
        operands = [number_of(a, makers) for a in maker.invars]
        if None in operands or len(maker.outvars) != 1:
            return None
        with jax.ensure_compile_time_eval():
            pairs = zip(operands, maker.invars, strict=True)
            arrays = [jnp.asarray(n, aval_of(a).dtype) for n, a in pairs]
            return float(bind_equation(maker, *arrays)[0])
    return None if aval_of(atom).shape else float(atom.val)
