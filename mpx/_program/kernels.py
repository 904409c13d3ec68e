"""Pallas kernels with blocks of operands and results in half precision.

A kernel is traced for the dtypes of its operands: its program reads and writes
references to blocks of them. Here some of these get another dtype: what is read is
widened behind the load, and what is written is rounded before the store. The rest of
the kernel is as it was written, except that a product of two such operands reads them
before they are widened, which gives the same sums.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var

from .._base.jax_compat import open_jaxpr
from .._base.typing import Atom
from .equations import aval_of, sub_jaxprs
from .flow import Flow, propagate

_PROGRAMS = (Jaxpr, ClosedJaxpr)
# Two rows of 16 bits share a register of a TPU, whose tiles have 8.
_ROWS = 16


def is_reference(atom: Atom) -> bool:
    """Returns whether a value is a reference to an array."""
    return hasattr(atom.aval, "inner_aval")


class _Divisors(Flow[int]):
    """Numbers that divide the integers of a kernel, by which it indexes; 0 divides 0.

    Attributes:
        refused: The ids of accesses that TPUs have for 32 bits, but not for 16.
    """

    def __init__(self) -> None:
        self.refused: set[int] = set()

    def constant(self, value: object) -> int:
        """Returns the number itself."""
        if not isinstance(value, int | np.integer | np.ndarray):
            return 1
        number = np.asarray(value)
        is_integer = number.shape == () and number.dtype.kind in "iu"
        return abs(int(number)) if is_integer else 1

    def transfer(self, equation: JaxprEqn, facts: Sequence[int]) -> Sequence[int]:
        """Returns a divisor of each result; looks at where references are accessed."""
        name = equation.primitive.name
        if name in ("get", "swap") and not _takes_whole_tiles(equation, facts):
            self.refused.add(id(equation))
        found = 1
        if name in ("add", "sub", "convert_element_type"):
            found = math.gcd(*facts)
        elif name == "mul":
            found = math.prod(facts)
        elif name == "multiple_of":
            found = math.gcd(*equation.params["values"])
        return [found] * len(equation.outvars)

    def join(self, a: int, b: int) -> int:
        """Returns a divisor of either."""
        return math.gcd(a, b)


def accesses_of_wide_only(jaxpr: Jaxpr) -> set[int]:
    """Returns the ids of accesses of a kernel that TPUs have for 32 bits only."""
    flow = _Divisors()
    propagate(jaxpr, (), [1] * len(jaxpr.invars), flow)
    return flow.refused


def _takes_whole_tiles(equation: JaxprEqn, divisors: Sequence[int]) -> bool:
    """Returns whether a `get` or `swap` is of whole rows: all of them, or a part.

    Of a part the number is a multiple of 16, and the first one's one of 8.
    """
    where = divisors[1 if equation.primitive.name == "get" else 2 :]
    indexers = jax.tree.unflatten(equation.params["tree"], where)
    shape, part = (aval_of(v).shape for v in (equation.invars[0], *equation.outvars))
    if len(shape) < 2 or not indexers:
        return len(shape) > 1
    last: Any = getattr(indexers[0], "indices", ())[-2:]
    # An index that is not a slice drops its axis.
    is_sliced = len(indexers) == 1 and [getattr(i, "stride", 0) for i in last] == [1, 1]
    if not is_sliced or part[-1] != shape[-1]:
        return False
    is_aligned = part[-2] % _ROWS == 0 and last[0].start % (_ROWS // 2) == 0
    return part[-2] == shape[-2] or is_aligned


def with_half_blocks(
    equation: JaxprEqn, are_half: Sequence[bool], dtype: np.dtype
) -> JaxprEqn:
    """Returns the call of a kernel for blocks of another dtype.

    Args:
        equation: The call.
        are_half: For each operand that has blocks, then for each result, whether it
            gets the dtype.
        dtype: The dtype.
    """
    mapping: Any = equation.params["grid_mapping"]
    pairs = [*zip(mapping.block_mappings, are_half, strict=True)]
    blocks = tuple(_retyped_block(b, dtype) if is_half else b for b, is_half in pairs)
    first = mapping.num_index_operands
    which = {first + i for i, is_half in enumerate(are_half) if is_half}
    outs = zip(equation.params["out_avals"], blocks[mapping.num_inputs :], strict=True)
    params = {
        "jaxpr": _with_references(equation.params["jaxpr"], which, dtype),
        "grid_mapping": dataclasses.replace(mapping, block_mappings=blocks),
        "out_avals": tuple(a.update(dtype=b.array_aval.dtype) for a, b in outs),
    }
    return equation.replace(params={**equation.params, **params})


def _retyped(reference: Any, dtype: np.dtype) -> Any:
    return reference.update(inner_aval=reference.inner_aval.update(dtype=dtype))


def _retyped_block(block: Any, dtype: np.dtype) -> Any:
    return dataclasses.replace(
        block,
        transformed_block_aval=_retyped(block.transformed_block_aval, dtype),
        array_aval=block.array_aval.update(dtype=dtype),
    )


def _with_references(jaxpr: Jaxpr, which: set[int], dtype: np.dtype) -> Jaxpr:
    """Returns a program of which some inputs refer to arrays of another dtype."""
    if not which:
        return jaxpr
    new = {jaxpr.invars[i]: Var(_retyped(jaxpr.invars[i].aval, dtype)) for i in which}
    # What was read, before it is widened.
    read: dict[Var, Var] = {}
    equations: list[JaxprEqn] = []
    for equation in jaxpr.eqns:
        name, invars = equation.primitive.name, equation.invars
        if name == "dot_general" and all(
            isinstance(a, Var) and a in read for a in invars
        ):
            is_same = equation.params["preferred_element_type"] == np.float32
            halves: list[Atom] = [read[a] for a in invars if isinstance(a, Var)]
            equations.append(equation.replace(invars=halves if is_same else invars))
        elif not any(isinstance(a, Var) and a in new for a in invars):
            equations.append(equation)
        elif name == "get":
            (wide,) = equation.outvars
            half = read[wide] = _like(wide, dtype)
            invars = [_replaced(new, a) for a in invars]
            equations.append(equation.replace(invars=invars, outvars=[half]))
            equations.append(_cast(equation, half, wide))
        elif name == "swap":
            reference, wide, *where = invars
            half = _like(wide, dtype)
            invars = [_replaced(new, reference), half, *where]
            before = _like(equation.outvars[0], dtype)
            equations.append(_cast(equation, wide, half))
            equations.append(equation.replace(invars=invars, outvars=[before]))
        else:
            equations.append(_entered(equation, new, dtype))
    invars = [_replaced(new, v) for v in jaxpr.invars]
    return jaxpr.replace(invars=invars, eqns=equations)


def _replaced(new: Mapping[Var, Var], atom: Atom) -> Atom:
    return new.get(atom, atom) if isinstance(atom, Var) else atom


def _like(atom: Atom, dtype: np.dtype) -> Var:
    return Var(aval_of(atom).update(dtype=dtype))


def _cast(equation: JaxprEqn, source: Atom, result: Var) -> JaxprEqn:
    """Returns the cast of one variable to another, at the place of an equation."""

    def cast(x: Any) -> Any:
        return jax.lax.convert_element_type(x, aval_of(result).dtype)

    (made,) = jax.make_jaxpr(cast)(source.aval).eqns
    info = equation.source_info
    return made.replace(invars=[source], outvars=[result], source_info=info)


def _entered(equation: JaxprEqn, new: Mapping[Var, Var], dtype: np.dtype) -> JaxprEqn:
    """Returns an equation whose programs are given the new references."""
    invars = [_replaced(new, a) for a in equation.invars]
    are_new = [a is not b for a, b in zip(invars, equation.invars, strict=True)]
    made: dict[int, Jaxpr] = {}
    for sub in sub_jaxprs(equation):
        pairs = enumerate(sub.operands)
        which = {i for i, place in pairs if place is not None and are_new[place]}
        made[id(sub.jaxpr)] = _with_references(sub.jaxpr, which, dtype)

    def rewritten(value: Any) -> Any:
        if isinstance(value, tuple):  # the branches of a cond
            return tuple(map(rewritten, value))
        if not isinstance(value, _PROGRAMS):
            return value
        jaxpr = made[id(open_jaxpr(value))]
        consts = getattr(value, "consts", None)
        return jaxpr if consts is None else ClosedJaxpr(jaxpr, consts)

    params = {key: rewritten(value) for key, value in equation.params.items()}
    return equation.replace(invars=invars, params=params)
