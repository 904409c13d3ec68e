"""Gradients that devices sum, in the dtype of the policy.

Under `jax.jit` over a mesh the sum over devices belongs to the product that makes a
weight's gradient, and is in the dtype of its result. So that product gives float32
directly there: `wide_product`. It has a derivative rule of its own, so this holds in
the gradient functions only, which differentiate in reverse mode.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.extend.core import JaxprEqn

from .._dtypes import is_half
from .._jax_compat import bind_equation, manual_axes
from .._policy import Wire
from .._program import run_by
from .._typing import AnyArray
from ._weights import FLOAT32


def wide_product(
    equation: JaxprEqn,
    arrays: list[AnyArray],
    weight: int,
    dtype: np.dtype,
    reduce_dtype: np.dtype,
) -> AnyArray:
    r"""A product whose weight gets its gradient in the dtype in which it is summed.

    $$y = \operatorname{half}(x) \operatorname{half}(w) \qquad
      \bar x = \bar y \operatorname{half}(w)^T \qquad
      \bar w = \operatorname{reduce}(\operatorname{half}(x)^T \bar y)$$

    Args:
        equation: The product.
        arrays: Its operands, the weight in float32.
        weight: Which of them is the weight.
        dtype: The half precision dtype of operands and result.
        reduce_dtype: That of the product that gives the weight's gradient.
    """
    params = dict(equation.params)
    if params.get("preferred_element_type") is not None:
        params["preferred_element_type"] = dtype
    bound = equation.replace(params=params)
    other = 1 - weight

    def product(data: AnyArray, weights: AnyArray) -> AnyArray:
        pair = [data, weights] if weight else [weights, data]
        return bind_equation(bound, *pair, *arrays[2:])[0]

    def run(data: AnyArray, weights: AnyArray) -> AnyArray:
        return product(data, weights.astype(dtype))

    def forward(data: AnyArray, weights: AnyArray) -> tuple[AnyArray, Any]:
        narrow = weights.astype(dtype)
        return product(data, narrow), (data, narrow)

    def backward(kept: Any, g: AnyArray) -> tuple[AnyArray, AnyArray]:
        data, narrow = kept
        (for_data,) = jax.linear_transpose(lambda x: product(x, narrow), data)(g)

        def transposed(data: AnyArray, g: AnyArray) -> AnyArray:
            return jax.linear_transpose(lambda w: product(data, w), narrow)(g)[0]

        wide = functools.partial(_with_wide_products, transposed, reduce_dtype)
        # XLA:CPU of jaxlib 0.10.2 (2026-11) has no such product of some layouts, and
        # computes it in float32 in any case.
        found = jax.lax.platform_dependent(
            data, g, cpu=functools.partial(wide, of_wide=True), default=wide
        )
        return for_data, found.astype(FLOAT32)

    run = jax.custom_vjp(run)
    run.defvjp(forward, backward)
    return run(arrays[other], arrays[weight])


def _with_wide_products(
    function: Callable[..., AnyArray],
    dtype: np.dtype,
    *operands: AnyArray,
    of_wide: bool = False,
) -> AnyArray:
    """Calls a function whose products give a dtype, whatever their operands have.

    Args:
        function: The function, of one product and what moves its operands.
        dtype: The dtype.
        *operands: What the function gets.
        of_wide: The operands of its product are cast to the dtype, too.
    """
    closed = jax.make_jaxpr(function)(*operands)

    def bind(equation: JaxprEqn, inputs: list[Any]) -> list[AnyArray]:
        params = dict(equation.params)
        if "preferred_element_type" in params:
            params["preferred_element_type"] = dtype
            if of_wide:
                inputs = [x.astype(dtype) if is_half(x.dtype) else x for x in inputs]
        if equation.primitive.name == "convert_element_type":
            params["new_dtype"] = dtype
        return bind_equation(equation.replace(params=params), *inputs)

    return run_by(bind, closed, operands)(closed.jaxpr.outvars[0])


def refuse_sums_of_others(wire: Wire | None) -> None:
    """Raises where JAX itself sums gradients over devices, in float32 only."""
    if wire is None or not wire.is_explicit or wire.reduce_dtype == FLOAT32:
        return
    raise ValueError(
        f"`reduce_dtype={wire.reduce_dtype.name}` of `mpx.Policy` is not possible "
        "for a function with `jax.shard_map(..., check_vma=False)`, whose gradients "
        "JAX sums over devices in float32. Omit `check_vma`, or set "
        '`reduce_dtype="float32"`.'
    )


def dtype_of_sums(wire: Wire | None, primitive: str) -> np.dtype | None:
    """The dtype that a product gives its weight's gradient, so that sums have it.

    Of convolutions only where somebody asks for it: cuDNN has none of half precision
    that gives float32. XLA casts the operands, and computes it in float32 (jaxlib
    0.10.2 for an H100, 2026-11).

    Args:
        wire: What was said.
        primitive: The product's name.

    Returns:
        The dtype; None: that of the product, or the sum is made elsewhere.
    """
    if wire is None or manual_axes():
        return None
    is_costly = primitive == "conv_general_dilated" and not wire.is_explicit
    return None if is_costly else wire.reduce_dtype
