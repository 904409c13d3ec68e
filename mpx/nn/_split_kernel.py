"""A kernel of JAX's and its pullback as two functions, with residuals that are known.

`jax.vjp` of a kernel gives a pullback that holds what the kernel's authors chose. Here
the two passes stand apart, each in a choice of platforms, so what is between them must
have the same types wherever the program runs: the operands, the result and one array
of the kernel's own, its `rows`. What the pullback holds besides is seen in the program:
it is computed again from the operands. If a version of JAX kept more of what the kernel
computes, that would be an error here, and the kernel would not be used.
"""

import dataclasses
import functools
from collections.abc import Callable, Hashable
from typing import Any

import jax
from jax.extend import core
from jax.extend.core import ClosedJaxpr, JaxprEqn
from jaxtyping import PyTree

from .._jax_compat import bind_equation
from .._program import sub_jaxprs
from .._typing import AnyArray, Atom, Program


@dataclasses.dataclass(frozen=True, eq=False)
class SplitKernel:
    """A kernel and its pullback, for operands of certain types.

    Attributes:
        program: From the operands, flat, to the result and the pullback's residuals.
        structure: How residuals make a pullback.
    """

    program: ClosedJaxpr
    structure: Any

    def forward(self, operands: object) -> tuple[AnyArray, AnyArray]:
        """The result, and the rows."""
        out, *residuals = core.jaxpr_as_fun(self.program)(*jax.tree.leaves(operands))
        return out, residuals[self._rows]

    def backward(
        self, operands: object, out: AnyArray, rows: AnyArray, cotangent: PyTree
    ) -> PyTree:
        """What the pullback gives."""
        jaxpr = self.program.jaxpr
        values = self._without_kernel(jax.tree.leaves(operands))
        values[jaxpr.outvars[0]] = out
        values[jaxpr.outvars[1 + self._rows]] = rows
        residuals = [_read(values, atom) for atom in jaxpr.outvars[1:]]
        return jax.tree.unflatten(self.structure, residuals)(cotangent)

    @property
    def _rows(self) -> int:
        """The place of the rows among the residuals."""
        jaxpr = self.program.jaxpr
        known = _independent(jaxpr)
        out = jaxpr.outvars[0]
        own = [v for v in jaxpr.outvars[1:] if _is_unknown(known, v) and v is not out]
        if len(set(own)) != 1:
            raise NotImplementedError(
                f"this version of JAX keeps {len(set(own))} arrays of the kernel's own"
            )
        return jaxpr.outvars[1:].index(own[0])

    def _without_kernel(self, operands: list[AnyArray]) -> dict[Atom, AnyArray]:
        """The values of the program that do not come from the kernel."""
        jaxpr = self.program.jaxpr
        known = _independent(jaxpr)
        values = dict(zip(jaxpr.constvars, self.program.consts, strict=True))
        values.update(zip(jaxpr.invars, operands, strict=True))
        for equation in jaxpr.eqns:
            if any(v not in known for v in equation.outvars):
                continue
            inputs = [_read(values, atom) for atom in equation.invars]
            outputs = bind_equation(equation, *inputs)
            values.update(zip(equation.outvars, outputs, strict=True))
        return values


def split_kernel(
    kernel: Callable[..., PyTree],
    told: tuple[Hashable, ...],
    operands: object,
    rows: jax.ShapeDtypeStruct,
) -> SplitKernel:
    """Takes a kernel apart. JAX keeps what it traced for equal arguments.

    Args:
        kernel: A function that calls one kernel of JAX's.
        told: Its first arguments.
        operands: The types of its last one, of which the floats are differentiated.
        rows: The type of what the kernel keeps for itself.

    Returns:
        The two functions.

    Raises:
        NotImplementedError: The pullback holds something else of the kernel's.
    """
    traced = _result_and_pullback.trace(kernel, told, operands)
    _, pullback = traced.out_info
    found = SplitKernel(traced.jaxpr, jax.tree.structure(pullback))
    kept = found.program.jaxpr.outvars[1 + found._rows].aval
    if (kept.shape, kept.dtype) != (rows.shape, rows.dtype):
        raise NotImplementedError(f"this version of JAX keeps {kept} of the kernel")
    return found


@functools.partial(jax.jit, static_argnums=(0, 1))
def _result_and_pullback(
    kernel: Callable[..., PyTree], told: tuple[Hashable, ...], operands: object
) -> tuple[PyTree, PyTree]:
    leaves, tree = jax.tree.flatten(operands)
    is_float = [jax.numpy.issubdtype(x.dtype, jax.numpy.inexact) for x in leaves]

    def of_floats(*floats: object) -> PyTree:
        given = iter(floats)
        pairs = zip(leaves, is_float, strict=True)
        full = [next(given) if f else x for x, f in pairs]
        return kernel(*told, jax.tree.unflatten(tree, full))

    floats = [x for x, f in zip(leaves, is_float, strict=True) if f]
    return jax.vjp(of_floats, *floats)


def _read(values: dict[Atom, AnyArray], atom: Atom) -> AnyArray:
    return atom.val if isinstance(atom, core.Literal) else values[atom]


def _independent(jaxpr: Program) -> set[Atom]:
    """The variables that do not come from a kernel."""
    known = {*jaxpr.constvars, *jaxpr.invars}
    for equation in jaxpr.eqns:
        is_known = not any(_is_unknown(known, atom) for atom in equation.invars)
        if is_known and not _holds_kernel(equation):
            known.update(equation.outvars)
    return known


def _is_unknown(known: set[Atom], atom: Atom) -> bool:
    return not isinstance(atom, core.Literal) and atom not in known


def _holds_kernel(equation: JaxprEqn) -> bool:
    if equation.primitive.name.startswith("dot_product_attention"):
        return True
    programs = sub_jaxprs(equation)
    return any(_holds_kernel(e) for sub in programs for e in sub.jaxpr.eqns)
