r"""Attaching every use of a weight to its full precision master.

A weight that is cast once and used many times gets its gradients summed in half
precision: 4,096 uses with gradient 1 give 2,048 in float16, where 2,048 + 1 is 2,048.
Here each use is a use of the *master* of its own,

$$y = \operatorname{attach}(w_{half}, w), \qquad
  \dot y = \operatorname{cast}_{half}(\dot w),$$

so that what JAX sums on the way back are the masters' cotangents, in float32. The
forward computation is unchanged, value by value.

The function is traced to a jaxpr and emitted again with a *pair* (half, master) for
each weight. Pairs pass through operations that only move data (a transpose, a slice, a
gather), through jit, scan, cond and remat; every other operation is a use. Custom
derivative rules, `while` and `shard_map` are one use each: what they do inside is
theirs.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jaxtyping import PyTree

from ._jax_compat import (
    bind_equation,
    equation_context,
    scan_counts,
    scan_options,
)
from ._jaxpr import MOVES, is_plain_jit

# Stands for a leaf that is no weight; not None, which is no leaf at all.
NO_MASTER = object()

# Stands for an array among the results of a traced function.
_ARRAY = object()


@dataclasses.dataclass(frozen=True)
class Pair:
    """A weight in half precision and the master that its uses belong to."""

    half: Any
    master: Any


@jax.custom_jvp
def attach(half: Any, master: Any) -> Any:
    """`half`, with the derivative of `master`."""
    return half


@attach.defjvp
def _attach_jvp(primals: Any, tangents: Any) -> Any:
    half, _ = primals
    _, master_dot = tangents
    return half, master_dot.astype(half.dtype)


def call_with_masters(
    func: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    masters: PyTree,
    dtype: np.dtype,
) -> Any:
    """Calls `func(*args, **kwargs)` with each use of a weight attached to its master.

    Args:
        func: The function.
        args: Its positional arguments, weights in half precision.
        kwargs: Its keyword arguments; no weights are among them.
        masters: Like `args`, with `NO_MASTER` for what is no weight; a leaf of the
            same dtype as in `args` needs no attaching.
        dtype: The precision in which gradients are summed.

    Returns:
        What `func` returns.
    """
    leaves, treedef = jax.tree.flatten((tuple(args), kwargs))
    no_masters = jax.tree.map(lambda _: NO_MASTER, kwargs)
    wide = jax.tree.leaves((tuple(masters), no_masters))
    is_array = [isinstance(x, jax.Array | np.ndarray) for x in leaves]
    result: list[Any] = []

    def flat(*arrays: Any) -> list[Any]:
        remaining = iter(arrays)
        full = [
            next(remaining) if a else x for x, a in zip(leaves, is_array, strict=True)
        ]
        args, kwargs = jax.tree.unflatten(treedef, full)
        out, out_tree = jax.tree.flatten(func(*args, **kwargs))
        traced = [x for x in out if isinstance(x, jax.Array | np.ndarray)]
        # Only what is no array may leave this trace.
        rest = [_ARRAY if isinstance(x, jax.Array | np.ndarray) else x for x in out]
        result[:] = [out_tree, rest]
        return traced

    operands = [x for x, a in zip(leaves, is_array, strict=True) if a]
    jaxpr = jax.make_jaxpr(flat)(*operands)
    pairs = [
        _pair(x, master, dtype)
        for x, master, a in zip(leaves, wide, is_array, strict=True)
        if a
    ]
    arrays = iter(_emit(jaxpr.jaxpr, jaxpr.consts, pairs))
    out_tree, rest = result
    return jax.tree.unflatten(
        out_tree, [_use(next(arrays)) if x is _ARRAY else x for x in rest]
    )


def _pair(value: Any, master: Any, dtype: np.dtype) -> Any:
    if master is NO_MASTER or not jnp.issubdtype(value.dtype, jnp.floating):
        return value
    if master.dtype == value.dtype:
        return value
    return Pair(value, master.astype(dtype))


def _use(value: Any) -> Any:
    return attach(value.half, value.master) if isinstance(value, Pair) else value


def _emit(jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    """Evaluates a jaxpr whose inputs may be pairs."""
    env: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
    env.update(zip(jaxpr.invars, args, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, core.Literal) else env[atom]

    for equation in jaxpr.eqns:
        operands = [read(atom) for atom in equation.invars]
        with equation_context(equation):
            if any(isinstance(x, Pair) for x in operands):
                results = _emit_use(equation, operands)
            else:
                results = bind_equation(equation, *operands)
        env.update(zip(equation.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _emit_use(equation: Any, operands: list[Any]) -> list[Any]:
    name = equation.primitive.name
    # Their derivatives are data movement, or a sum that then runs in full precision.
    if name in MOVES and not any(isinstance(x, Pair) for x in operands[1:]):
        first, rest = operands[0], operands[1:]
        (half,) = bind_equation(equation, first.half, *rest)
        (master,) = bind_equation(equation, first.master, *rest)
        return [Pair(half, master)]
    emit = _CONTROL_FLOW.get(name)
    if emit is not None:
        results = emit(equation, operands)
        if results is not None:
            return results
    return bind_equation(equation, *map(_use, operands))


def _emit_jit(equation: Any, operands: list[Any]) -> list[Any] | None:
    if not is_plain_jit(equation):
        return None  # shardings or donation of its own: one use
    inner = equation.params["jaxpr"]
    return _emit(inner.jaxpr, inner.consts, operands)


def _emit_remat(equation: Any, operands: list[Any]) -> list[Any]:
    inner = equation.params["jaxpr"]
    flat, rebuild = _split(operands)

    def body(*flat: Any) -> list[Any]:
        return [_use(x) for x in _emit(inner, (), rebuild(flat))]

    return jax.checkpoint(
        body,
        prevent_cse=equation.params["prevent_cse"],
        policy=equation.params["policy"],
    )(*flat)


def _emit_cond(equation: Any, operands: list[Any]) -> list[Any]:
    index, *rest = operands
    flat, rebuild = _split(rest)

    def branch(closed: Any) -> Callable[..., list[Any]]:
        return lambda *flat: [
            _use(x) for x in _emit(closed.jaxpr, closed.consts, rebuild(flat))
        ]

    branches = [branch(closed) for closed in equation.params["branches"]]
    return jax.lax.switch(_use(index), branches, *flat)


def _emit_scan(equation: Any, operands: list[Any]) -> list[Any]:
    params = equation.params
    n_consts, n_carry = scan_counts(params)
    closed = params["jaxpr"]
    consts = operands[:n_consts]
    # A carry changes from one iteration to the next, so entering it is a use.
    init = [_use(x) for x in operands[n_consts : n_consts + n_carry]]
    xs, rebuild = _split(operands[n_consts + n_carry :])

    def body(carry: list[Any], flat: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        inputs = [*consts, *carry, *rebuild(flat)]
        out = [_use(x) for x in _emit(closed.jaxpr, closed.consts, inputs)]
        return out[:n_carry], out[n_carry:]

    carry, ys = jax.lax.scan(
        body,
        init,
        xs,
        **scan_options(params),
    )
    return [*carry, *ys]


def _split(
    values: Sequence[Any],
) -> tuple[list[Any], Callable[[Sequence[Any]], list[Any]]]:
    """Flattens pairs to arrays, and says how to put them together again."""
    is_pair = [isinstance(x, Pair) for x in values]
    flat = [
        a for x in values for a in ((x.half, x.master) if isinstance(x, Pair) else (x,))
    ]

    def rebuild(flat: Sequence[Any]) -> list[Any]:
        arrays = iter(flat)
        return [
            Pair(next(arrays), next(arrays)) if p else next(arrays) for p in is_pair
        ]

    return flat, rebuild


_CONTROL_FLOW: dict[str, Callable[[Any, list[Any]], list[Any] | None]] = {
    "jit": _emit_jit,
    "remat2": _emit_remat,
    "checkpoint": _emit_remat,
    "cond": _emit_cond,
    "scan": _emit_scan,
}
