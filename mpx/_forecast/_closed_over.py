"""Arrays that a step closes over: frozen weights, a teacher, a table.

JAX makes constants of them. What a compiler's figures say of constants is not memory,
and numbers that it knows it computes with, so here they become arguments of the step.
Those of functions inside of loops, `jax.checkpoint` and `shard_map` remain constants.
"""

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.extend.core import JaxprEqn

from .._jax_compat import bind_equation, equation_context, open_jaxpr
from .._program import distinct_equations, program_of, properties, run_by, sub_jaxprs
from .._typing import AnyArray, Program

# Bytes. What is smaller is no memory, and compilers look into it: indices, windows.
_LEAST = 1024
# They hold a program apart from that around it, or divide it.
_KEPT = frozenset({"checkpoint", "remat", "remat2", "shard_map"})


class ClosedOver:
    """The large constants of a program and of those within it, each once.

    Attributes:
        arrays: Those that can be its arguments.
        constants: The others.
    """

    def __init__(self, program: Program) -> None:
        self._program = program
        self._holds: dict[int, bool] = {}
        arrays: dict[Hashable, AnyArray] = {}
        self._look(program, arrays)
        within = [sub for e in distinct_equations(program) for sub in sub_jaxprs(e)]
        large = [pair for sub in within for pair in _large(sub).items()]
        self._keys = [*arrays]
        self.arrays = [*arrays.values()]
        self.constants = [*{key: x for key, x in large if key not in arrays}.values()]

    def _look(self, program: Program, arrays: dict[Hashable, AnyArray]) -> bool:
        """Collects what can be an argument; whether there is any in this program."""
        if id(program) not in self._holds:
            large = _large(program)
            arrays |= large
            calls = [program_of(e) for e in open_jaxpr(program).eqns if _is_call(e)]
            inner = [self._look(call, arrays) for call in calls]
            self._holds[id(program)] = bool(large) or any(inner)
        return self._holds[id(program)]

    def run(self, arrays: Sequence[AnyArray], given: Sequence[AnyArray]) -> list[Any]:
        """Runs the program with `arrays` in the place of its own."""
        return self._run(
            self._program, dict(zip(self._keys, arrays, strict=True)), given
        )

    def _run(
        self,
        program: Program,
        found: Mapping[Hashable, AnyArray],
        given: Sequence[AnyArray],
    ) -> list[Any]:
        consts = [found.get(_key(x), x) for x in getattr(program, "consts", ())]
        closed = core.ClosedJaxpr(open_jaxpr(program), consts)

        def bind(equation: JaxprEqn, operands: list[Any]) -> Sequence[Any]:
            with equation_context(equation):
                if _is_call(equation):
                    inner = program_of(equation)
                    if self._holds[id(inner)]:
                        return self._run(inner, found, operands)
                return bind_equation(equation, *operands)

        return list(map(run_by(bind, closed, given), closed.jaxpr.outvars))


def _is_call(equation: JaxprEqn) -> bool:
    """Whether an equation runs a program that may stand in its place."""
    name = equation.primitive.name
    known = properties(name)
    return bool(known.program and known.runs_once) and name not in _KEPT


def _large(program: Any) -> dict[Hashable, AnyArray]:
    consts = getattr(program, "consts", ())
    return {_key(x): x for x in consts if size_of([x]) >= _LEAST}


def _key(x: Any) -> Hashable:
    """What tells arrays apart: one of NumPy's has a wrapper in each function of JAX."""
    if not isinstance(x, np.ndarray):
        return id(x)
    return x.__array_interface__["data"][0], x.shape, x.strides, x.dtype


def size_of(arrays: Sequence[Any]) -> int:
    """The bytes of arrays; of a random key 8."""
    return sum(
        math.prod(x.shape) * (8 if _is_key(x) else x.dtype.itemsize) for x in arrays
    )


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
