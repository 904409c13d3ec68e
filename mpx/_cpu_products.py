"""Products of bfloat16 that a CPU computes in the form that it has units for.

Such a product is a primitive of its own, for JAX's derivative must not see the float32
result: products of float32 by bfloat16 would come of it. It has the name, parameters
and type of JAX's and is lowered to it, but for CPUs. So what knows a product by its
name knows this one, and a policy of `jax.checkpoint` is asked about JAX's.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn, Primitive
from jax.extend.core.primitives import conv_general_dilated_p, dot_general_p
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array

from ._cpu_convolution import convolve_to_float32
from ._cpu_form import DimensionNumbers, multiply_in_order
from ._jax_compat import (
    answer_policies_for,
    bind_equation,
    layouts_are_said,
    permuted_sharding,
)
from ._program import run_by
from ._typing import AnyArray

_BFLOAT16, _FLOAT32 = np.dtype("bfloat16"), np.dtype("float32")


def in_cpu_form(equation: JaxprEqn, arrays: Sequence[AnyArray]) -> JaxprEqn:
    """The equation of a product, or one that a CPU computes in the form for it."""
    twin = _TWINS.get(equation.primitive)
    is_taken = twin is not None and all(x.dtype == _BFLOAT16 for x in arrays)
    return equation.replace(primitive=twin) if is_taken else equation


def multiply_to_float32(
    left: AnyArray, right: AnyArray, dimension_numbers: DimensionNumbers
) -> Array:
    """The float32 product of two bfloat16 operands, in the form for CPUs.

    It is not to be differentiated.

    Args:
        left: The left operand.
        right: The right operand.
        dimension_numbers: Those of `jax.lax.dot_general`.
    """

    def product(left: AnyArray, right: AnyArray) -> Array:
        return lax.dot_general(
            left, right, dimension_numbers, preferred_element_type=_FLOAT32
        )

    return _replayed(_TWINS[dot_general_p], dot_general_p, product, left, right)


def _dot_general(says_layout: bool, left: Array, right: Array, **params: Any) -> Array:
    if not _is_taken(left, right, params):
        return dot_general_p.bind(left, right, **params)
    dtype = params.pop("preferred_element_type") or _BFLOAT16
    wide = multiply_in_order(left, right, **params, says_layout=says_layout)
    return lax.convert_element_type(wide, dtype)


def _convolution(says_layout: bool, left: Array, right: Array, **params: Any) -> Array:
    wide = None
    # Since some version of JAX it may be said where the result lies.
    if _is_taken(left, right, params) and params.get("out_sharding") is None:
        others = ("preferred_element_type", "out_sharding", "precision")
        rest = {name: value for name, value in params.items() if name not in others}
        multiply = functools.partial(
            multiply_in_order, precision=params["precision"], says_layout=says_layout
        )
        wide = convolve_to_float32(left, right, **rest, multiply=multiply)
    if wide is None:
        return conv_general_dilated_p.bind(left, right, **params)
    return lax.convert_element_type(wide, params["preferred_element_type"] or _BFLOAT16)


def _is_taken(left: Array, right: Array, params: dict[str, Any]) -> bool:
    """Whether a product is of bfloat16, and no algorithm for it is asked for.

    A program that was emitted is one like others: it may be rewritten in another dtype.
    """
    algorithms = lax.DotAlgorithm | lax.DotAlgorithmPreset
    is_half = left.dtype == right.dtype == _BFLOAT16
    is_known = params["preferred_element_type"] in (None, _BFLOAT16, _FLOAT32)
    return is_half and is_known and not isinstance(params["precision"], algorithms)


# --- Primitives that are others everywhere but on a CPU -------------------------------


def _twin(original: Primitive, on_cpu: Callable[..., Array]) -> Primitive:
    """A primitive that differs from another one by its lowering for CPUs.

    Args:
        original: The other one: bilinear, with one result.
        on_cpu: What a CPU computes, given whether layouts may be said, and all operands
            and parameters.
    """
    twin = Primitive(original.name)
    twin.def_effectful_abstract_eval(original.abstract_eval)

    @twin.def_impl
    def _(*operands: Any, **params: Any) -> Any:
        with jax.disable_jit(False):
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

    def lower_on_cpu(context: Any, *operands: Any, **params: Any) -> Any:
        form = functools.partial(on_cpu, layouts_are_said(context))
        return lower(form)(context, *operands, **params)

    mlir.register_lowering(twin, lower(original.bind))
    mlir.register_lowering(twin, lower_on_cpu, platform="cpu")
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
