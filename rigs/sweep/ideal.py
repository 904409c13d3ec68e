"""Evaluates a program with only its products in half precision: autocast's rule.

Independent of mpx. Operands and results of products are converted to half precision
and back, so automatic differentiation rounds cotangents at the same places. Everything
else is float32, as the program says. A product that sums over one number is not one.

Sharp edges: a custom derivative around a product is dropped, because the body is
inlined; so is `jax.checkpoint`, which changes no number.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax.typing import DTypeLike

_INLINED = ("jit", "pjit", "closed_call", "core_call", "checkpoint", "remat2", "remat")
_CUSTOM = ("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr")


def make_ideal(function: Callable[..., Any], dtype: DTypeLike) -> Callable[..., Any]:
    """Returns `function` with products in `dtype` and all else unchanged."""

    def ideal(*args: Any) -> Any:
        closed, shape = jax.make_jaxpr(function, return_shape=True)(*args)
        results = evaluate(closed.jaxpr, closed.consts, jax.tree.leaves(args), dtype)
        return jax.tree.unflatten(jax.tree.structure(shape), results)

    return ideal


def evaluate(
    jaxpr: jex.Jaxpr, consts: Sequence[Any], args: Sequence[Any], dtype: DTypeLike
) -> list[Any]:
    """Evaluates a jaxpr, its products in `dtype`."""
    env: dict[Any, Any] = {}

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, jex.Literal) else env[atom]

    env.update(zip(jaxpr.constvars, consts, strict=True))
    env.update(zip(jaxpr.invars, args, strict=True))
    for eqn in jaxpr.eqns:
        results = _evaluate_equation(eqn, [read(v) for v in eqn.invars], dtype)
        env.update(zip(eqn.outvars, results, strict=True))
    return [read(v) for v in jaxpr.outvars]


def _evaluate_equation(
    eqn: jex.JaxprEqn, values: list[Any], dtype: DTypeLike
) -> list[Any]:
    name, params = eqn.primitive.name, eqn.params
    if is_product(eqn):
        return [_product(eqn, values, dtype)]
    bodies = _bodies(params)
    if not any(holds_product(body.jaxpr) for body in bodies):
        return _bind(eqn, values)
    if name in _INLINED or name in _CUSTOM:
        (body,) = bodies
        return evaluate(body.jaxpr, body.consts, values, dtype)
    if name == "scan":
        return _scan(params, values, dtype)
    if name == "while":
        return _while(params, values, dtype)
    if name == "cond":
        index, *operands = values
        branches = [
            lambda *args, body=body: evaluate(body.jaxpr, body.consts, args, dtype)
            for body in bodies
        ]
        return jax.lax.switch(index, branches, *operands)
    return _bind(eqn, values)


def _bind(eqn: jex.JaxprEqn, values: list[Any]) -> list[Any]:
    params = eqn.primitive.get_bind_params(eqn.params)
    results = eqn.primitive.bind(*values, **params)
    return list(results) if eqn.primitive.multiple_results else [results]


def _product(eqn: jex.JaxprEqn, values: list[Any], dtype: DTypeLike) -> Any:
    halves = [
        v.astype(dtype) if jnp.issubdtype(v.dtype, jnp.floating) else v for v in values
    ]
    params = eqn.params
    if "preferred_element_type" in params:
        params = params | {"preferred_element_type": jnp.dtype(dtype)}
    result = eqn.primitive.bind(*halves, **params)
    return result.astype(eqn.outvars[0].aval.dtype)


def _scan(params: dict[str, Any], values: list[Any], dtype: DTypeLike) -> list[Any]:
    n_consts, n_carry = params["num_consts"], params["num_carry"]
    consts, carry = values[:n_consts], values[n_consts : n_consts + n_carry]
    body = params["jaxpr"]

    def step(carry: list[Any], slices: list[Any]) -> tuple[list[Any], list[Any]]:
        args = [*consts, *carry, *slices]
        results = evaluate(body.jaxpr, body.consts, args, dtype)
        return results[:n_carry], results[n_carry:]

    carry, stacked = jax.lax.scan(
        step,
        carry,
        values[n_consts + n_carry :],
        length=params["length"],
        reverse=params["reverse"],
    )
    return [*carry, *stacked]


def _while(params: dict[str, Any], values: list[Any], dtype: DTypeLike) -> list[Any]:
    n_cond, n_body = params["cond_nconsts"], params["body_nconsts"]
    cond_consts, body_consts = values[:n_cond], values[n_cond : n_cond + n_body]
    cond, body = params["cond_jaxpr"], params["body_jaxpr"]
    return jax.lax.while_loop(
        lambda carry: evaluate(cond.jaxpr, cond.consts, [*cond_consts, *carry], dtype)[
            0
        ],
        lambda carry: evaluate(body.jaxpr, body.consts, [*body_consts, *carry], dtype),
        values[n_cond + n_body :],
    )


def is_product(eqn: jex.JaxprEqn) -> bool:
    """Whether an equation multiplies floats and sums over more than one number."""
    result = eqn.outvars[0].aval if eqn.outvars else None
    if not jnp.issubdtype(getattr(result, "dtype", jnp.int32), jnp.floating):
        return False
    name, params = eqn.primitive.name, eqn.params
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        shape = eqn.invars[0].aval.shape
        return math.prod(shape[i] for i in contracted) > 1
    if name == "conv_general_dilated":
        kernel = eqn.invars[1].aval.shape
        features = kernel[params["dimension_numbers"].rhs_spec[0]]
        return math.prod(kernel) // features > 1
    if name in ("ragged_dot", "ragged_dot_general"):
        (contracted, _), _ = params[
            "ragged_dot_dimension_numbers"
        ].dot_dimension_numbers
        shape = eqn.invars[0].aval.shape
        return math.prod(shape[i] for i in contracted) > 1
    return False


def holds_product(jaxpr: jex.Jaxpr) -> bool:
    """Whether a product is in a jaxpr or in one that it calls."""
    return any(
        is_product(eqn) or any(holds_product(b.jaxpr) for b in _bodies(eqn.params))
        for eqn in jaxpr.eqns
    )


def _bodies(params: dict[str, Any]) -> list[jex.ClosedJaxpr]:
    """Returns the programs that an equation calls, its functions of derivatives not."""
    found = []
    for value in params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if isinstance(item, jex.ClosedJaxpr):
                found.append(item)
            elif isinstance(item, jex.Jaxpr):
                found.append(jex.ClosedJaxpr(item, ()))
    return found
