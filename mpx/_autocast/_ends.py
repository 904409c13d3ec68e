"""Where values go: into the loss, or into another product first.

The last products before a loss, the *final projection*, stay in half precision unless a
rule says otherwise: the loss sees their rounding as it is. They are found by looking
from the end: a product that goes into a scalar which the function returns, and into no
other product. In a function that returns no scalar, such as one layer, there is none.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend import core

from .._jax_compat import scope_names
from .._jaxpr import SubJaxpr, count, sub_jaxprs
from ._classes import CLASSES, PrimitiveClass
from ._region import told_by
from ._settings import NOWHERE, Ends


def ends_of_results(avals: Sequence[Any]) -> tuple[Ends, ...]:
    """Where the results of a whole function go: a floating scalar is a loss."""
    return tuple(
        Ends.LOSS
        if count(aval.shape) == 1 and jnp.issubdtype(aval.dtype, np.floating)
        else Ends.RESULT
        for aval in avals
    )


def ends_in(jaxpr: Any, results: Sequence[Ends]) -> Mapping[Any, Ends]:
    """Where the values of a program go.

    Args:
        jaxpr: The program, open.
        results: Where its results go.

    Returns:
        For each variable that goes somewhere.
    """
    ends: dict[Any, Ends] = {}

    def add(atom: Any, end: Ends) -> None:
        if end and not isinstance(atom, core.Literal):
            ends[atom] = ends.get(atom, NOWHERE) | end

    for atom, end in zip(jaxpr.outvars, results, strict=True):
        add(atom, end)
    for equation in reversed(jaxpr.eqns):
        outputs = [ends.get(v, NOWHERE) for v in equation.outvars]
        if CLASSES.get(equation.primitive.name) is PrimitiveClass.HALF:
            for atom in equation.invars:
                add(atom, Ends.PRODUCT)
            continue
        programs = sub_jaxprs(equation)
        for program in programs:
            inside = ends_in(program.jaxpr, ends_of_program(program, outputs))
            for place, variable in zip(
                program.operands, program.jaxpr.invars, strict=True
            ):
                if place is not None:
                    add(equation.invars[place], inside.get(variable, NOWHERE))
        if not programs:
            everything = NOWHERE
            for end in outputs:
                everything |= end
            for atom in equation.invars:
                add(atom, everything)
    return ends


def ends_of_program(program: SubJaxpr, outputs: Sequence[Ends]) -> tuple[Ends, ...]:
    """Where the results of a program go, given those of its equation.

    What a loop carries goes where it went in the last turn, and where the body of the
    next turn takes it.
    """
    ends = [NOWHERE if i is None else outputs[i] for i in program.results]
    while True:
        inside = ends_in(program.jaxpr, ends) if program.carried else {}
        before = list(ends)
        for out, back in program.carried:
            ends[out] |= inside.get(program.jaxpr.invars[back], NOWHERE)
        if ends == before:
            return tuple(ends)


def recipes_in(jaxpr: Any) -> set[Any]:
    """The recipes of the regions in a program."""
    return {told["recipe"] for told in _regions(jaxpr, set()) if told.get("recipe")}


def _regions(jaxpr: Any, seen: set[int]) -> Iterator[dict[str, Any]]:
    if id(jaxpr) in seen:
        return
    seen.add(id(jaxpr))
    for equation in jaxpr.eqns:
        for scope in scope_names(equation):
            if told := told_by(scope):
                yield told
        for program in sub_jaxprs(equation):
            yield from _regions(program.jaxpr, seen)
