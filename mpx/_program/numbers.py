"""Numbers that a program computes from what stands in it, such as places to cut at."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal

from .._jax_compat import open_jaxpr
from .._typing import Atom
from .equations import aval_of, program_of
from .primitives import properties


class Numbers:
    """The numbers of a program that depend on no input.

    JAX counts a negative index from the end by `lt`, `add` and `select_n`, in a program
    of its own for `jnp.take` and the like.
    """

    def __init__(
        self,
        jaxpr: Jaxpr,
        operands: Sequence[Atom] = (),
        outside: "Numbers | None" = None,
    ) -> None:
        """Looks into a program, which gets these operands from another one."""
        self._jaxpr, self._outside = jaxpr, outside
        self._operands = dict(zip(jaxpr.invars, operands, strict=False))
        self._makers: dict[Atom, JaxprEqn] | None = None

    def inside(self, jaxpr: Jaxpr, operands: Sequence[Atom]) -> "Numbers":
        """Those of a program within, which gets these operands."""
        return Numbers(jaxpr, operands, self)

    def of(self, atom: Atom) -> np.ndarray | None:
        """What an integer is; None if that is not known."""
        if isinstance(atom, Literal):
            return np.asarray(atom.val)
        if self._outside is not None and atom in self._operands:
            return self._outside.of(self._operands[atom])
        if self._makers is None:
            self._makers = {v: e for e in self._jaxpr.eqns for v in e.outvars}
        maker = self._makers.get(atom)
        return None if maker is None else self._computed(maker)

    def _computed(self, equation: JaxprEqn) -> np.ndarray | None:
        name = equation.primitive.name
        if properties(name).program and len(equation.outvars) == 1:
            jaxpr = open_jaxpr(program_of(equation))
            if len(jaxpr.invars) != len(equation.invars):
                return None
            return self.inside(jaxpr, equation.invars).of(jaxpr.outvars[0])
        compute = _OPERATIONS.get(name)
        if compute is None:
            return None
        values = []
        for atom in equation.invars:
            value = self.of(atom)
            if value is None:
                return None
            values.append(value)
        found = np.asarray(compute(equation.params, *values))
        shape = aval_of(equation.outvars[0]).shape
        return found.reshape(shape) if found.size == math.prod(shape) else None


_OPERATIONS: dict[str, Callable[..., Any]] = {
    "lt": lambda params, a, b: a < b,
    "add": lambda params, a, b: a + b,
    "sub": lambda params, a, b: a - b,
    "mul": lambda params, a, b: a * b,
    "max": lambda params, a, b: np.maximum(a, b),
    "min": lambda params, a, b: np.minimum(a, b),
    "select_n": lambda params, which, *cases: np.choose(which.astype(int), cases),
    "convert_element_type": lambda params, a: a.astype(params["new_dtype"]),
    "broadcast_in_dim": lambda params, a: a,
    "reshape": lambda params, a: a,
    "squeeze": lambda params, a: a,
    "concatenate": lambda params, *parts: np.concatenate(parts, params["dimension"]),
}
