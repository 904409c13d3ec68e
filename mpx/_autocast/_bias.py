"""The gradient of a product and a bias, written once.

The product of the backward pass reads it in half precision, the sum for the bias as it
is. XLA's compiler for GPUs (jaxlib 0.10.2) writes it twice, in float32, too: a tenth of
the memory of a ViT's step for an H100 (`benchmarks residuals`). Rounded once for both
it is written once, and summed on the way. A cast to half precision and back does not
do: the compiler leaves it out, but not what is computed between. The compiler for TPUs
(libtpu 0.0.42) needs no help, and a tenth more traffic with it.
"""

import functools

import jax
import numpy as np

from .._jax_compat import is_for_tpu
from .._typing import AnyArray
from ._context import Value
from ._decide import Case


def with_rounded_gradient(case: Case, results: list[Value]) -> list[Value]:
    """What was bound for one operation, its gradient rounded if it adds a bias.

    Args:
        case: An `add` that gives float32.
        results: Its results.

    Returns:
        Its results.
    """
    products = [v.dtype for v in case.operands if v.is_computed_in_half]
    if not products or all(v.facts.parameter is None for v in case.operands):
        return results
    target = case.settings.target
    if is_for_tpu() if target is None else target.platform == "tpu":
        return results
    (summed,) = results
    array = _rounded(summed.array, products[0])
    return [Value(array, summed.facts, slots=summed.slots)]


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _rounded(x: AnyArray, dtype: np.dtype) -> AnyArray:
    return x


@_rounded.defjvp
def _(
    dtype: np.dtype, primals: tuple[AnyArray], tangents: tuple[AnyArray]
) -> tuple[AnyArray, AnyArray]:
    (x,), (dot,) = primals, tangents
    one = jax.lax.optimization_barrier(np.ones((), dtype))
    half = jax.lax.convert_element_type(dot, dtype) * one
    return x, jax.lax.convert_element_type(half, dot.dtype)
