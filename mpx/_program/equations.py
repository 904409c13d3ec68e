"""Equations of a program, and the programs that they hold.

A *program* is a jaxpr. An equation may hold programs of its own (`sub_jaxprs`): the
body of a scan, the branches of a cond, a function under jit. Where each operand of the
equation arrives in them, and how often they run, is said once, here.

What is no program: the scalar combiners of reduce and scatter, and the kernels of
Pallas, whose instructions work on references. An equation that holds one is a leaf.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from .._base.jax_compat import (
    composite_parameter,
    manual_axes_of,
    open_jaxpr,
    scan_counts,
    shard_map_axes,
)
from .._base.typing import AnyArray, Atom, Aval, Program
from .primitives import Flops, PrimitiveClass, properties

OTHERS = "for other platforms"
"""The role of a branch for all platforms that have none of their own."""

MANY = 4096
"""What a dimension counts that only a call knows, such as that of an exported batch."""


def lengths(shape: Iterable[object]) -> tuple[int, ...]:
    """A shape in numbers.

    A dimension without one (`jax.export.symbolic_shape`) is taken to be large: JAX
    refuses to compare it.
    """
    known = (int, np.integer)
    return tuple(int(n) if isinstance(n, known) else MANY for n in shape)


def count(shape: Iterable[object]) -> int:
    """How many numbers an array has, to compare it with others."""
    return math.prod(lengths(shape))


@dataclasses.dataclass(frozen=True)
class SubJaxpr:
    """A program that an equation holds, and how it is joined to the equation."""

    jaxpr: Jaxpr
    consts: tuple[AnyArray, ...]
    role: str
    """What it is to the equation, where that has several: `body`, `branch 1 of 3`."""
    trips: int | None
    """How often it runs where the equation runs once; None if only a run can tell."""
    operands: tuple[int | None, ...]
    """For each input, the operand of the equation that arrives there."""
    results: tuple[int | None, ...]
    """For each output, the result of the equation that it becomes."""
    carried: tuple[tuple[int, int], ...] = ()
    """Which output comes back as which input in the next iteration."""
    devices: int = 1
    """On how many devices it runs, each with a part of the data."""


def aval_of(atom: Atom) -> Aval:
    """The type of an operand or a result: of an array, but for tokens and references.

    JAX's annotations know an abstract value without shape and dtype.
    """
    aval: Any = atom.aval
    return aval


def avals(atoms: Iterable[Atom]) -> list[Aval]:
    """The types of operands or results."""
    return [aval_of(atom) for atom in atoms]


def is_inexact(aval: Aval) -> bool:
    """Whether values of a type are floating or complex numbers."""
    return jnp.issubdtype(aval.dtype, jnp.inexact)


def program_of(equation: JaxprEqn) -> Program:
    """The one program that an equation holds whose primitive names its parameter."""
    name, params = equation.primitive.name, equation.params
    if name == "composite":
        return params[composite_parameter(params)]
    return params[properties(name).program]


def equations(jaxpr: Program) -> Iterator[JaxprEqn]:
    """Every equation of a program, and of those within it, in their order.

    One of a program that several equations hold comes several times.
    """
    for equation in open_jaxpr(jaxpr).eqns:
        yield equation
        for sub in sub_jaxprs(equation):
            yield from equations(sub.jaxpr)


def distinct_equations(jaxpr: Program) -> Iterator[JaxprEqn]:
    """The same, once each: twelve layers may be one program, called twelve times."""
    # Ids stay apart: the outermost program holds all those within it meanwhile.
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
    """How many numbers each number of a product's result sums; 0 of no product."""
    name, params = equation.primitive.name, equation.params
    if name == "dot_general":
        return _count_at(equation.invars[0], params["dimension_numbers"][0][0])
    if name == "ragged_dot_general":
        numbers = params["ragged_dot_dimension_numbers"].dot_dimension_numbers
        return _count_at(equation.invars[0], numbers[0][0])
    if name == "ragged_dot":
        return _count_at(equation.invars[0], (-1,))
    if name == "conv_general_dilated":
        # The first two of the kernel's dimensions are output and input features.
        _, *summed = params["dimension_numbers"].rhs_spec
        return _count_at(equation.invars[1], summed)
    return 0


def _count_at(atom: Atom, axes: Iterable[int]) -> int:
    shape = aval_of(atom).shape
    return count(shape[axis] for axis in axes)


def is_matmul(equation: JaxprEqn) -> bool:
    """Whether it is a matrix product, a convolution or attention in one kernel.

    Products of blocks with scales are among them, which autocast does not look into.
    """
    known = properties(equation.primitive.name)
    return known.kind is PrimitiveClass.HALF or known.flops is Flops.LAST_AXIS_PRODUCT


def is_multiplication(equation: JaxprEqn) -> bool:
    """Whether an equation is a matrix product or convolution that sums one number.

    `jnp.einsum("bl,blp->blp", decay, x)`, `jnp.outer` and `Dense` of one feature are
    multiplications that JAX writes as products.
    """
    return summed_numbers(equation) == 1


# So many gradients are summed in half precision: a norm feeds three products, and of
# windows of 3 by 3, two apart, four overlap. A sum of eight equal ones is 2 % off.
FEW_USES = 4


def only_picks(equation: JaxprEqn) -> bool:
    """Whether each number of the result is one of an operand's, its negative, or zero.

    Rounded before or after, it is the same. So is where its gradient goes, but in a
    window with numbers that are equal once they are rounded: a pool of float32 would
    have its operand kept in float32 (a ResNet for an H100: 13 % more of its memory).
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
    """Whether a collective is along an axis of `jax.vmap`, which is on one device.

    Such an axis has its name inside of the `vmap`, and is a number in what that made.
    One of a mesh is there as well where a sum is over both: then the rest is small.
    """
    params = equation.params
    axes = params.get("axes", params.get("axis_name", ()))
    axes = axes if isinstance(axes, tuple) else (axes,)
    return not set(axes) <= set(manual_axes_of(equation))


_PROGRAMS = (Jaxpr, ClosedJaxpr)


def sub_jaxprs(equation: JaxprEqn) -> tuple[SubJaxpr, ...]:
    """The programs that an equation holds; none for an operation."""
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
        # Of a primitive that the table does not know: its programs are found by their
        # type, and how often they run stays open.
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
    consts = tuple(getattr(jaxpr, "consts", ()))
    return SubJaxpr(open_jaxpr(jaxpr), consts, **joints)


def _joined(equation: JaxprEqn, jaxpr: Program, role: str) -> SubJaxpr:
    """A program whose inputs and outputs are those of its equation, as far as known."""
    inner = open_jaxpr(jaxpr)
    n_in, n_out = len(inner.invars), len(inner.outvars)
    same_in = n_in == len(equation.invars)
    same_out = n_out == len(equation.outvars)
    return _sub(
        jaxpr,
        role=role,
        trips=1,
        # None: nobody knows which operand arrives there, so each of them may.
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
    # In this order: the condition sees what the body has made of the carry, and whoever
    # walks hands the facts of one program on to the next (`flow`).
    return body, condition


def _branches(equation: JaxprEqn) -> tuple[SubJaxpr, ...]:
    branches = equation.params["branches"]
    roles = [f"branch {i} of {len(branches)}" for i in range(1, len(branches) + 1)]
    # What `jax.lax.platform_dependent` makes; None is for all that are not named.
    platforms = equation.params.get("branches_platforms")
    if platforms is not None:
        roles = [OTHERS if p is None else f"for {' or '.join(p)}" for p in platforms]
    return tuple(
        _sub(
            branch,
            role=role,
            trips=1,
            # Operand 0 says which branch is taken.
            operands=tuple(range(1, len(equation.invars))),
            results=tuple(range(len(equation.outvars))),
        )
        for role, branch in zip(roles, branches, strict=True)
    )


def _solve(equation: JaxprEqn) -> SubJaxpr:
    """Of the four programs of a linear solve, only the solver itself is run."""
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
    """`new` where a condition of the leading axes holds, else `old`.

    So a `while` keeps what ended, whose test is one for each example of a `vmap`: JAX's
    primitive takes it, which `jax.lax.while_loop` does not (jax 0.10 to 0.12).
    """
    axes = range(condition.ndim)
    whole = jax.lax.broadcast_in_dim(condition, new.shape, axes)
    return jax.lax.select(whole, new, old)


def constants_as_inputs(closed: ClosedJaxpr) -> tuple[ClosedJaxpr, Sequence[AnyArray]]:
    """A program that holds no arrays, and those that it is given first instead.

    What a function closes over may be an array that JAX traces; a program that holds
    one lasts no longer than the trace.
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
    """The parameters of a checkpoint of a program that has more operands.

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
    """Runs a program, each of its equations by a function of that and of its operands.

    Returns:
        What gives the value of a variable or literal of the program.
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
    """For each result of a program whether it is zero, whatever the program is given.

    So come the derivatives that JAX knows to be zero when it has to make arrays of
    them. One that is found to be nothing by computing is not known.
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
            # What reads a part may read beyond it, where other numbers are filled in.
            known.moves and not known.reads_part and len(maker.invars) == 1
        )
        return is_same and is_zero(maker.invars[0])

    return tuple(map(is_zero, jaxpr.outvars))


def _devices(params: dict[str, Any]) -> int:
    """Over how many devices a program is split by hand."""
    # Of `xla_pmap`, which has no mesh.
    if "axis_size" in params:
        return params["axis_size"]
    sizes = dict(params["mesh"].shape)
    return math.prod(sizes[axis] for axis in shard_map_axes(params))
