"""Demands: in which precision the users of each value want it.

They travel from the end of a program to its beginning. A value is wanted in float32 if
one user wants it so and none wants it in half: then the elementwise operations before
it run in float32 and a matrix product gives float32 directly, instead of rounding a
number that is then widened again. If all users cast it to half precision, what only
picks numbers (relu, max pooling, a mask) picks rounded ones: the same, in half the
bytes.

A demand stops at *residual additions*, of two computed values neither of which is made
elementwise of the other: the float32 stream is no reason for the products that are
added to it to be written in float32. And at products that are scaled by a number, as
attention's scores are: rounded twice they are as good as rounded once, and a compiler
that sees the scores in half precision keeps them so until softmax's gradient.
"""

import enum
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from .._jax_compat import open_jaxpr, scope_names
from .._program import (
    BackwardFlow,
    PrimitiveClass,
    SubJaxpr,
    aval_of,
    avals,
    backward,
    class_of,
    is_multiplication,
    is_residual,
    is_scaling,
    looked_up,
    makers_of,
    program_of,
    properties,
    sub_jaxprs,
)
from .._rules import Precision
from .._settings import Settings
from .._typing import Atom, Program
from ._context import FULL, Run, is_castable


class Demand(enum.Enum):
    """What the users of a value want it to be."""

    ANY = "any"
    FULL = "full"
    HALF = "half"
    """All users cast it to half precision: rounded at once, it loses nothing."""
    BOTH = "both"
    """Some want half precision, and some may compute with all of its digits."""

    def __or__(self, other: "Demand") -> "Demand":
        """What two users want together."""
        if Demand.ANY in (self, other):
            return other if self is Demand.ANY else self
        return self if self is other else Demand.BOTH

    @property
    def has_half(self) -> bool:
        """Whether somebody wants half precision."""
        return self in (Demand.HALF, Demand.BOTH)

    @property
    def of_operands(self) -> "Demand":
        """What elementwise arithmetic wants of its operands, given this of its result.

        It may be computed in float32 and rounded afterwards.
        """
        return Demand.BOTH if self is Demand.HALF else self


# What is wanted of each result of a program, or of an equation.
Wanted = tuple[Demand, ...]


class Demands(NamedTuple):
    """The demands for the values of a program.

    Attributes:
        demands: For each variable that somebody uses.
        inputs: For each input.
        are_declared: For each result whether it is an input or a constant, moved.
        residuals: The results of residual additions.
        beginnings: The rows of tables that residual additions add to.
        scalings: The results of scaling a product by a number.
        jaxpr: The program, held so that its identity stays its own.
    """

    demands: dict[Var, Demand]
    inputs: tuple[Demand, ...]
    are_declared: tuple[bool, ...]
    residuals: frozenset[Var]
    beginnings: frozenset[Var]
    scalings: frozenset[Var]
    jaxpr: Jaxpr

    def demand(self, variable: Var) -> Demand:
        """What the users of a variable want."""
        return self.demands.get(variable, Demand.ANY)


def demand_for(dtype: np.dtype) -> Demand:
    """The demand of somebody who will cast to a dtype."""
    return Demand.FULL if dtype == FULL else Demand.HALF


def demands_of(
    run: Run,
    settings: Settings,
    jaxpr: Program,
    are_declared: tuple[bool, ...],
    results: Wanted,
) -> Demands:
    """Makes the plan of a program.

    Args:
        run: The run, which keeps plans.
        settings: What holds around the program.
        jaxpr: The program, open or closed.
        are_declared: For each input whether it is a declared value.
        results: What is wanted of each result.

    Returns:
        The plan.
    """
    jaxpr = open_jaxpr(jaxpr)
    if not settings.is_enabled:  # everything runs as it was written
        inputs, nothing = (Demand.ANY,) * len(jaxpr.invars), frozenset()
        are_declared = (False,) * len(jaxpr.outvars)
        return Demands({}, inputs, are_declared, nothing, nothing, nothing, jaxpr)
    # The plan holds its program, so the id is that of no other one.
    key = (id(jaxpr), settings, are_declared, results)
    made = run.demands.get(key)
    if made is None:
        made = run.demands[key] = _make(run, settings, jaxpr, are_declared, results)
    return made


def _make(
    run: Run,
    settings: Settings,
    jaxpr: Jaxpr,
    are_declared: tuple[bool, ...],
    results: Wanted,
) -> Demands:
    flow = _DemandFlow(run, settings, jaxpr, are_declared)
    demands = backward(jaxpr, results, flow)
    return Demands(
        demands,
        tuple(demands.get(v, Demand.ANY) for v in jaxpr.invars),
        tuple(map(flow.is_declared, jaxpr.outvars)),
        frozenset(flow.residuals),
        frozenset(flow.beginnings),
        frozenset(flow.scalings),
        jaxpr,
    )


class _DemandFlow(BackwardFlow[Demand]):
    """How demands travel through one program; those within it have plans of their own.

    Attributes:
        residuals: The results of residual additions.
        beginnings: The rows of tables that residual additions add to.
        scalings: The results of scaling a product by a number.
    """

    def __init__(
        self,
        run: Run,
        settings: Settings,
        jaxpr: Jaxpr,
        are_declared: tuple[bool, ...],
    ) -> None:
        self.residuals: set[Var] = set()
        self.beginnings: set[Var] = set()
        self.scalings: set[Var] = set()
        self._run = run
        self._settings = settings
        self._declared = _declared_variables(jaxpr, are_declared)
        self._makers = makers_of(jaxpr)

    @property
    def nothing(self) -> Demand:
        """Nobody wants anything."""
        return Demand.ANY

    def join(self, a: Demand, b: Demand) -> Demand:
        """What two users want together."""
        return a | b

    def is_declared(self, atom: Atom) -> bool:
        """Whether a value of the program is an input or a constant, moved perhaps."""
        return isinstance(atom, Literal) or atom in self._declared

    def operands(
        self, equation: JaxprEqn, results: Sequence[Demand]
    ) -> Sequence[Demand]:
        """What an equation wants of its operands."""
        declared = tuple(map(self.is_declared, equation.invars))
        here = self._settings.at(scope_names(equation))
        is_full = results[0] is Demand.FULL if results else False
        if not any(declared) and self._is_residual(equation, is_full):
            # `backward` asks for each equation once, when all that its users want is
            # known.
            self.residuals.update(equation.outvars)
            found = (looked_up(a, self._makers) for a in equation.invars)
            self.beginnings.update(v for v in found if v is not None)
            return _residual_demands(here, results[0])
        if is_scaling(equation, self._makers):
            self.scalings.update(equation.outvars)
            return (Demand.ANY if is_full else results[0].of_operands,) * 2
        kind = properties(equation.primitive.name).kind
        if kind is not PrimitiveClass.RECURSE:
            return _operand_demands(here, equation, results)
        found = [Demand.ANY] * len(equation.invars)
        for sub in sub_jaxprs(equation):
            if sub.role == "condition":  # of a loop: it is planned on its own
                continue
            inputs = self._inputs_of(sub, here, declared, results)
            for place, demand in zip(sub.operands, inputs, strict=True):
                if place is not None:
                    found[place] |= demand
        return found

    def _is_residual(self, equation: JaxprEqn, is_full: bool) -> bool:
        is_float = any(is_castable(aval_of(v)) for v in equation.outvars)
        return is_float and is_residual(equation, self._makers, is_full)

    def _inputs_of(
        self,
        sub: SubJaxpr,
        settings: Settings,
        declared: tuple[bool, ...],
        results: Sequence[Demand],
    ) -> Sequence[Demand]:
        """What a program within wants: of what a loop carries, its declared dtype."""
        variables = sub.jaxpr.invars
        wanted = [Demand.ANY if i is None else results[i] for i in sub.results]
        inside = [i is not None and declared[i] for i in sub.operands]
        for output, where in sub.carried:
            (wanted[output],) = carried_demands(variables[where : where + 1])
            # Declared it may be before the first turn only.
            inside[where] = False
        made = demands_of(self._run, settings, sub.jaxpr, tuple(inside), tuple(wanted))
        inputs = list(made.inputs)
        for output, where in sub.carried:
            inputs[where] = wanted[output]
        return inputs

    def transfer(
        self, equation: JaxprEqn, results: Sequence[Demand]
    ) -> Sequence[Demand]:
        """What an operation wants of its operands."""
        return _operand_demands(self._settings, equation, results)


def _residual_demands(settings: Settings, wanted: Demand) -> tuple[Demand, Demand]:
    if settings.residual_stream == "half" and settings.is_enabled:
        # A sum of two float32 values is rounded if all its users cast it.
        found = Demand.HALF if wanted is Demand.HALF else Demand.BOTH
        return found, found
    if wanted is Demand.FULL:
        return Demand.ANY, Demand.ANY
    return wanted.of_operands, wanted.of_operands


def _declared_variables(jaxpr: Jaxpr, are_declared: Sequence[bool]) -> set[Var]:
    # What is declared here must be so when it is emitted (`_move`, `_join` and
    # `_convert` of `_emit`): residual additions are found by it.
    known = {v for v, d in zip(jaxpr.invars, are_declared, strict=True) if d}
    known.update(jaxpr.constvars)
    for equation in jaxpr.eqns:
        properties_of = properties(equation.primitive.name)
        atoms = equation.invars
        if properties_of.moves or properties_of.joins:
            if all(isinstance(a, Literal) or a in known for a in atoms):
                known.update(equation.outvars)
        elif properties_of.kind is PrimitiveClass.CONVERT:
            if not is_castable(aval_of(atoms[0])):
                known.update(equation.outvars)
        elif properties_of.program:
            inputs = tuple(isinstance(a, Literal) or a in known for a in atoms)
            inner = open_jaxpr(program_of(equation))
            if any(inputs) and len(inner.eqns) < 8:  # only ones that do little but move
                found = _declared_variables(inner, inputs)
                known.update(
                    outer
                    for outer, out in zip(equation.outvars, inner.outvars, strict=True)
                    if isinstance(out, Literal) or out in found
                )
    return known


def _operand_demands(
    settings: Settings, equation: JaxprEqn, outputs: Sequence[Demand]
) -> tuple[Demand, ...]:
    """What an operation wants of its operands."""
    name, count = equation.primitive.name, len(equation.invars)
    if not settings.rules.looks_ahead:
        return (Demand.ANY,) * count
    kind = _planned_class(settings, name)
    wanted = Demand.ANY
    for output in outputs:
        wanted |= output
    if kind is PrimitiveClass.HALF:
        is_sure = _is_cast_to_half(settings, equation)
        return (Demand.HALF if is_sure else Demand.BOTH,) * count
    if kind is PrimitiveClass.CONVERT:
        source, result = avals((equation.invars[0], equation.outvars[0]))
        if is_castable(result):
            is_none = source.dtype == result.dtype
            return (wanted if is_none else demand_for(result.dtype),)
        return (Demand.ANY,)
    if kind in (PrimitiveClass.PROMOTE, PrimitiveClass.FOLLOW):
        if not any(is_castable(aval_of(v)) for v in equation.outvars):
            return (Demand.ANY,) * count
        known = properties(name)
        is_same = known.picks or known.moves
        return (wanted if is_same else wanted.of_operands,) * count
    if kind is PrimitiveClass.FULL:
        return (Demand.FULL,) * count
    # Opaque: declared dtypes.
    return tuple(
        demand_for(aval.dtype) if is_castable(aval) else Demand.ANY
        for aval in avals(equation.invars)
    )


def _is_cast_to_half(settings: Settings, equation: JaxprEqn) -> bool:
    """Whether a product casts its operands, whatever they turn out to be."""
    precision = equation.params.get("precision")
    return not (
        settings.rules._may_hold(equation.primitive.name)
        or is_multiplication(equation)
        or asks_for_precision(precision)
        or not all(map(is_castable, avals(equation.invars[:2])))
    )


_PLANNED = {
    Precision.HALF: PrimitiveClass.HALF,
    Precision.LOW: PrimitiveClass.HALF,
    Precision.FULL: PrimitiveClass.FULL,
    Precision.FOLLOW: PrimitiveClass.PROMOTE,
    Precision.DECLARED: PrimitiveClass.OPAQUE,
}


def _planned_class(settings: Settings, name: str) -> PrimitiveClass | None:
    kind = class_of(name, settings.dtype)
    if kind is PrimitiveClass.CONVERT or properties(name).moves:
        return kind
    if not settings.is_enabled:
        return PrimitiveClass.OPAQUE
    ruled = settings.rules._precision_of(name)
    return kind if ruled is None else _PLANNED[ruled]


def carried_demands(variables: Sequence[Var]) -> tuple[Demand, ...]:
    """What a loop wants of the values it carries: their declared dtypes."""
    return tuple(
        demand_for(aval_of(v).dtype) if is_castable(aval_of(v)) else Demand.ANY
        for v in variables
    )


# JAX's names for the highest precision.
_HIGHEST = ("highest", "float32", "fp32")


def asks_for_precision(precision: object) -> bool:
    """Whether the program asks for more of a product than JAX's present default."""
    if precision is None:
        return False
    if not isinstance(precision, tuple):
        return True  # an algorithm, which belongs to certain dtypes
    # Set for the whole program by `jax.default_matmul_precision`, it says nothing of
    # this product.
    config: Any = jax.config
    if config.jax_default_matmul_precision in _HIGHEST:
        return False
    return any(p is jax.lax.Precision.HIGHEST for p in precision)
