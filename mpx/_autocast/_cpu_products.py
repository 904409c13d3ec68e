"""Products of bfloat16 that a CPU computes in the form that it has units for.

Such a product is a primitive of its own, for JAX's derivative must not see the float32
result: products of float32 by bfloat16 would come of it. It has the name, parameters
and type of JAX's and is lowered to it, but for CPUs. So what knows a product by its
name knows this one, and a policy of `jax.checkpoint` is asked about JAX's.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn, Primitive
from jax.extend.core.primitives import conv_general_dilated_p, dot_general_p
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array

from .._cpu_form import DimensionNumbers, multiply_to_float32
from .._jax_compat import answer_policies_for, bind_equation, permuted_sharding
from .._program import run_by
from .._quantize import target_from
from .._typing import AnyArray
from ._cpu_convolution import convolve_to_float32
from ._decide import Case

_BFLOAT16 = np.dtype("bfloat16")


def for_cpu(case: Case, equation: JaxprEqn, arrays: list[AnyArray]) -> JaxprEqn:
    """The equation of a product, or of one that a CPU computes in another form."""
    twin = _TWINS.get(equation.primitive)
    if twin is None or any(x.dtype != _BFLOAT16 for x in arrays):
        return equation
    target = case.settings.target or target_from(None)
    return equation.replace(primitive=twin) if target.wants_cpu_form else equation


def _dot_general(left: Array, right: Array, **params: Any) -> Array:
    if not _is_plain(left, right, params):
        return dot_general_p.bind(left, right, **params)
    wide = multiply_to_float32(left, right, **_without_dtype(params))
    return lax.convert_element_type(wide, _BFLOAT16)


def _convolution(left: Array, right: Array, **params: Any) -> Array:
    wide, rest = None, _without_dtype(params)
    # Since some version of JAX it may be said where the result lies.
    is_free = rest.pop("out_sharding", None) is None
    if is_free and _is_plain(left, right, params):
        wide = convolve_to_float32(left, right, **rest)
    if wide is None:
        return conv_general_dilated_p.bind(left, right, **params)
    return lax.convert_element_type(wide, _BFLOAT16)


def _is_plain(left: Array, right: Array, params: dict[str, Any]) -> bool:
    """Whether a product is of bfloat16, and no algorithm for it is asked for.

    A program that was emitted is one like others: it may be rewritten in another dtype.
    """
    dtypes = {left.dtype, right.dtype, params["preferred_element_type"] or _BFLOAT16}
    is_asked_for = isinstance(
        params["precision"], lax.DotAlgorithm | lax.DotAlgorithmPreset
    )
    return dtypes == {_BFLOAT16} and not is_asked_for


def _without_dtype(params: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in params.items() if k != "preferred_element_type"}


# --- Primitives that are others everywhere but on a CPU -------------------------------


def _twin(original: Primitive, on_cpu: Callable[..., Array]) -> Primitive:
    twin = Primitive(original.name)
    twin.def_effectful_abstract_eval(original.abstract_eval)

    @twin.def_impl
    def _(*operands: Any, **params: Any) -> Any:
        return _compiled(twin, tuple(params.items()))(*operands)

    ad.defbilinear(
        twin,
        lambda g, x, y, **params: _transposed(twin, original, 0, g, y, x.aval, params),
        lambda g, x, y, **params: _transposed(twin, original, 1, g, x, y.aval, params),
    )

    def batched(axis: Any, operands: Any, axes: Any, **params: Any) -> Any:
        found = []

        def by_rule(*operands: Any) -> Any:
            rule = batching.fancy_primitive_batchers[original]
            result, result_axis = rule(axis, operands, axes, **params)
            found.append(result_axis)
            return result

        return _replayed(twin, original, by_rule, *operands), found[0]

    batching.fancy_primitive_batchers[twin] = batched
    lower = functools.partial(mlir.lower_fun, multiple_results=False)
    mlir.register_lowering(twin, lower(original.bind))
    mlir.register_lowering(twin, lower(on_cpu), platform="cpu")
    answer_policies_for(twin, original)
    return twin


@functools.lru_cache(maxsize=1024)
def _compiled(twin: Primitive, params: tuple[tuple[str, Any], ...]) -> Any:
    return jax.jit(functools.partial(twin.bind, **dict(params)))


def _transposed(
    twin: Primitive,
    original: Primitive,
    position: int,
    g: Array,
    other: Array,
    aval: Any,
    params: dict[str, Any],
) -> Array:
    """The cotangent of an operand, from that of the product and the other operand."""
    if original is dot_general_p and position == 1:
        numbers = params["dimension_numbers"]
        return _cotangent_of_right(twin, g, other, aval, numbers, params["precision"])

    def by_rule(g: Array, other: Array) -> Array:
        def product(x: Array) -> Array:
            operands = (x, other) if position == 0 else (other, x)
            return original.bind(*operands, **params)

        return jax.linear_transpose(product, aval)(g)[0]

    return _replayed(twin, original, by_rule, g, other)


def _replayed(
    twin: Primitive, original: Primitive, rule: Callable[..., Array], *operands: Array
) -> Array:
    """What a rule binds, each product of JAX's as its twin."""

    def bind(equation: JaxprEqn, operands: list[Any]) -> list[Any]:
        if equation.primitive is original:
            equation = equation.replace(primitive=twin)
        return bind_equation(equation, *operands)

    closed = jax.make_jaxpr(rule)(*operands)
    return run_by(bind, closed, operands)(closed.jaxpr.outvars[0])


def _cotangent_of_right(
    twin: Primitive,
    g: Array,
    left: Array,
    right: Any,
    numbers: DimensionNumbers,
    precision: Any,
) -> Array:
    """The cotangent of the right operand, as `left` by `g`.

    JAX multiplies `g` by the left operand and transposes the result. Of a weight that
    would be a pass of its own, for the rounding stands between it and the product.
    """
    (lc, rc), (lb, rb) = numbers
    kept = [i for i in range(left.ndim) if i not in (*lc, *lb)]
    of_g = range(len(lb), len(lb) + len(kept))
    # What comes out is batch axes, contracted ones in the order of `left`, kept ones.
    contracted = [rc[i] for i in np.argsort(lc)]
    rest = [i for i in range(right.ndim) if i not in (*rc, *rb)]
    order = [*rb, *contracted, *rest]

    def product(left: Array, g: Array) -> Array:
        return lax.dot_general(
            left,
            g,
            ((kept, of_g), (lb, range(len(lb)))),
            precision=precision,
            preferred_element_type=right.dtype,
            out_sharding=permuted_sharding(right, order),
        )

    found = _replayed(twin, dot_general_p, product, left, g)
    return lax.transpose(found, tuple(np.argsort(order)))


_TWINS = {
    dot_general_p: _twin(dot_general_p, _dot_general),
    conv_general_dilated_p: _twin(conv_general_dilated_p, _convolution),
}
