"""Rewrites a half-precision program to full precision.

Half-precision values become float32, and so do casts to half precision. Operands and
results of kernels and of unknown operations that hold a program or a type stay half
precision.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core
from jax.extend.core import ClosedJaxpr, JaxprEqn

from .._base.dtypes import HALF
from .._base.jax_compat import (
    bind_equation,
    equation_context,
    open_jaxpr,
    scan_counts,
    scan_options,
)
from .._base.typing import AnyArray, Program
from .equations import aval_of, distinct_equations, program_of, run_by, sub_jaxprs
from .primitives import PrimitiveClass, properties

_FLOAT32 = np.dtype(np.float32)


def widened(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Returns a program with float32 in place of half precision, also in its inputs."""

    def program(*arrays: AnyArray) -> list[AnyArray]:
        return _run(closed, arrays)

    types = (
        aval.update(dtype=_FLOAT32) if _is_half(aval) else aval
        for aval in closed.in_avals
    )
    return jax.make_jaxpr(program)(*types)


def _is_half(aval: Any) -> bool:
    return getattr(aval, "dtype", None) in HALF


def _wide(array: Any) -> Any:
    return jax.lax.convert_element_type(array, _FLOAT32) if _is_half(array) else array


def _run(program: Program, arrays: Sequence[Any]) -> list[Any]:
    """Runs a program with float32 arrays."""
    jaxpr, consts = open_jaxpr(program), getattr(program, "consts", ())
    closed = core.ClosedJaxpr(jaxpr, list(map(_wide, consts)))

    def bind(equation: JaxprEqn, operands: list[Any]) -> Sequence[Any]:
        with equation_context(equation):
            return _bind(equation, list(map(_wide, operands)))

    read = run_by(bind, closed, arrays)
    return [_wide(read(atom)) for atom in jaxpr.outvars]


def _bind(equation: JaxprEqn, operands: list[Any]) -> Sequence[Any]:
    name, params = equation.primitive.name, equation.params
    known = properties(name)
    if not any(map(_mentions_half, (equation, *_equations_in(equation)))):
        return bind_equation(equation, *operands)
    if known.program and known.runs_once and name != "shard_map":
        return _run(program_of(equation), operands)
    if name == "scan":
        return _scan(params, operands)
    if name == "while" and not aval_of(_test(params).outvars[0]).shape:
        return _while(params, operands)
    if name == "cond":
        return jax.lax.switch(
            operands[0],
            [lambda *x, b=b: _run(b, x) for b in params["branches"]],
            *operands[1:],
        )
    if known.kind is PrimitiveClass.OPAQUE or known.combines or sub_jaxprs(equation):
        declared = [
            jax.lax.convert_element_type(x, aval_of(atom).dtype)
            if _is_half(aval_of(atom))
            else x
            for x, atom in zip(operands, equation.invars, strict=True)
        ]
        return list(map(_wide, bind_equation(equation, *declared)))
    changed = {
        key: _FLOAT32 if isinstance(x, np.dtype | type) and x in HALF else x
        for key, x in params.items()
    }
    return bind_equation(equation.replace(params=changed), *operands)


def _mentions_half(equation: JaxprEqn) -> bool:
    return any(_is_half(aval_of(x)) for x in (*equation.invars, *equation.outvars))


def _equations_in(equation: JaxprEqn) -> list[JaxprEqn]:
    subs = sub_jaxprs(equation)
    return [inner for sub in subs for inner in distinct_equations(sub.jaxpr)]


def _scan(params: dict[str, Any], operands: list[Any]) -> Sequence[Any]:
    n_consts, n_carry = scan_counts(params)
    end, body = n_consts + n_carry, params["jaxpr"]
    consts, init, xs = operands[:n_consts], operands[n_consts:end], operands[end:]

    def turn(carry: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
        results = _run(body, [*consts, *carry, *xs])
        return results[:n_carry], results[n_carry:]

    carry, ys = jax.lax.scan(turn, init, xs, **scan_options(params))
    return [*carry, *ys]


def _test(params: dict[str, Any]) -> Any:
    return open_jaxpr(params["cond_jaxpr"])


def _while(params: dict[str, Any], operands: list[Any]) -> Sequence[Any]:
    n_test, n_body = params["cond_nconsts"], params["body_nconsts"]
    for_test, rest = operands[:n_test], operands[n_test:]
    for_body, init = rest[:n_body], rest[n_body:]
    return jax.lax.while_loop(
        lambda carry: _run(params["cond_jaxpr"], [*for_test, *carry])[0],
        lambda carry: _run(params["body_jaxpr"], [*for_body, *carry]),
        init,
    )
