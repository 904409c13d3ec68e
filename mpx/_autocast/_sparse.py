r"""Products of sparse matrices, which JAX adds up in the dtype of their operands.

A dense product of half precision is summed in float32 by the units, whoever writes it.
A sparse one is a gather and a scatter-add in the program: a row of 4,000 ones sums up
to 256 in bfloat16. So it is bound in float32, and rounded as a dense one is:

$$y = \operatorname{half}(\operatorname{f32}(A) \operatorname{f32}(x)) \qquad
  \bar x = \operatorname{half}(\operatorname{f32}(A)^T \operatorname{f32}(\bar y))$$
"""

import jax
from jax.extend.core import JaxprEqn

from .._dtypes import is_half
from .._jax_compat import bind_equation
from .._typing import AnyArray
from ._context import FULL


def sum_in_float32(equation: JaxprEqn, *arrays: AnyArray) -> list[AnyArray]:
    """Binds a product of half precision so that its sums are in float32.

    So are those of its derivatives. Only what comes in is kept for them, and in half
    precision: widening it is computed again.

    Args:
        equation: The product, whose parameters name half precision, if any.
        *arrays: Its operands: those in half precision, and indices.

    Returns:
        Its results, in half precision.
    """
    (dtype,) = {x.dtype for x in arrays if is_half(x.dtype)}
    params = dict(equation.params)
    if params.get("preferred_element_type") is not None:
        params["preferred_element_type"] = FULL
    wide_equation = equation.replace(params=params)

    def product(*arrays: AnyArray) -> list[AnyArray]:
        wide = [x.astype(FULL) if is_half(x.dtype) else x for x in arrays]
        return [x.astype(dtype) for x in bind_equation(wide_equation, *wide)]

    return jax.checkpoint(product, prevent_cse=False)(*arrays)
