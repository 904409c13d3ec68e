"""Operations that are emitted differently from the program, in one section per kind.

Additions of a bias, lookups, scatters, sparse products and casts of the program.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn
from jax.sharding import AxisType
from jaxtyping import Array

from .._base.dtypes import is_half
from .._base.jax_compat import bind_equation
from .._base.typing import AnyArray, Length, Shape
from .._program import aval_of, avals, is_activation
from ._context import FULL, Value, computed, declared, is_castable, is_tpu
from ._decide import KERNELS, Case, noted_cast

# --- The gradient of a bias -----------------------------------------------------------
#
# The gradient of a product plus a bias is read twice: by the product of the backward
# pass in half precision, by the sum for the bias unrounded. XLA's compiler for GPUs
# (jaxlib 0.10.2) writes it twice, once in float32: a tenth of the memory of a ViT's
# step for an H100 (`benchmarks residuals`). Rounded once for both, it is written once,
# and summed on the way. A cast to half precision and back is not enough: the compiler
# removes it, but not a computation between. The compiler for TPUs (libtpu 0.0.42) needs
# no help, and has a tenth more memory traffic with it.


def with_rounded_gradient(case: Case, results: list[Value]) -> list[Value]:
    """Rounds the gradient of an addition if it adds a bias.

    Args:
        case: An `add` with a float32 result.
        results: Its results.

    Returns:
        Its results.
    """
    products = [v.dtype for v in case.operands if v.is_computed_in_half]
    if not products or all(v.facts.parameter is None for v in case.operands):
        return results
    if is_tpu(case.settings):
        return results
    (summed,) = results
    array = _rounded(summed.array, products[0], False)
    return [Value(array, summed.facts, slots=summed.slots)]


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def _rounded(x: AnyArray, dtype: np.dtype, is_stored: bool) -> AnyArray:
    """Returns an array whose gradient is rounded, and stored like that or not."""
    return x


@_rounded.defjvp
def _(
    dtype: np.dtype, is_stored: bool, *arrays: tuple[AnyArray]
) -> tuple[AnyArray, AnyArray]:
    (x,), (dot,) = arrays
    half = jax.lax.convert_element_type(dot, dtype)
    if is_stored:
        half = jax.lax.optimization_barrier(half)
    else:
        half *= jax.lax.optimization_barrier(np.ones((), dtype))
    return x, jax.lax.convert_element_type(half, dot.dtype)


# --- What several kernels read --------------------------------------------------------
#
# See `_program.islands`. XLA may leave out narrowing and widening again (jax #6283),
# but not around a barrier, which costs nothing where an array is written anyway. A step
# of a U-Net of 314 M weights with a half-precision stream moves 64.9 GB instead of
# 69.0, one of a state space model with causal convolutions 39.3 instead of 43.9 (jaxlib
# 0.10.2, compiled for an H100, November 2026).


def handed_on(case: Case, results: list[Value]) -> list[Value]:
    """Stores the results of an equation, or their gradients, in half precision.

    Args:
        case: The equation; the demands of its program say what is stored.
        results: Its results.

    Returns:
        Its results.
    """
    handed, variables = case.ahead.handed, case.equation.outvars
    if handed.keys().isdisjoint(variables):
        return results
    pairs = zip(variables, results, strict=True)
    return [_handed_on(case, handed.get(v), value) for v, value in pairs]


def _handed_on(case: Case, is_stored: bool | None, value: Value) -> Value:
    array, dtype = value.array, case.settings.dtype
    if is_stored is None or array.dtype != FULL:
        return value
    if not is_stored:
        array = _rounded(array, dtype, True)
    else:
        with noted_cast(KERNELS):
            array = value.cast(dtype)
        # Products read an activation, too: it is written in half precision anyway.
        if not is_activation(case.equation):
            array = jax.lax.optimization_barrier(array)
    return Value(array, value.facts, slots=value.slots)


# --- Lookups of one element in each row: the label's logit, in a cross-entropy --------
#
# $$y_b = x_{b, i_b} \qquad \bar x_{b, v} = \bar y_b \, [v = i_b]$$
#
# JAX transposes such a gather into a scatter into zeros. XLA fuses nothing after a
# scatter, so the gradient of the logits is written in float32, read, written again and
# cast. As a comparison it is part of the kernel that writes it in half precision: a
# step of a Llama with a vocabulary of 32,000 and 8 times 1,024 tokens moves 71.0 GB
# where it moved 75.2 (542 M weights, 8 layers; jax 0.10.2, compiled for an H100,
# November 2026). The values are the same: one is added to zero.


def finds_one_in_each_row(equation: JaxprEqn) -> bool:
    """Returns whether a gather takes one element of each row of a float array.

    The rows are along one axis, and there is an index for each position on the others,
    as with `jnp.take_along_axis`, or an index under `jax.vmap`.
    """
    operand, indices = map(aval_of, equation.invars)
    numbers = equation.params["dimension_numbers"]
    rest = tuple(d for d in range(operand.ndim) if d not in numbers.start_index_map)
    alone = _without(indices.shape[:-1], numbers.start_indices_batching_dims)
    return (
        jnp.issubdtype(operand.dtype, jnp.floating)
        and len(numbers.start_index_map) == 1
        and tuple(sorted(numbers.operand_batching_dims)) == rest
        and not numbers.offset_dims
        and all(length == 1 for length in alone)
        and AxisType.Explicit not in operand.sharding.mesh.axis_types
    )


def look_up(equation: JaxprEqn, x: Array, indices: Array) -> Array:
    """Returns the result of such a gather, whose derivative is a comparison.

    Indices out of range give what the mode of the gather specifies, and no gradient, or
    that of the nearest element.
    """

    @jax.custom_jvp
    def found(x: Array, indices: Array) -> Array:
        return bind_equation(equation, x, indices)[0]

    @found.defjvp
    def _found_jvp(
        primals: tuple[Array, Array], tangents: tuple[Array, Array]
    ) -> tuple[Array, Array]:
        x, indices = primals
        # Recomputed for the transpose, or the comparison would be saved for it.
        chosen = jax.checkpoint(functools.partial(_chosen, equation), prevent_cse=False)
        return found(x, indices), chosen(tangents[0], indices)

    return found(x, indices)


def _chosen(equation: JaxprEqn, x: Array, indices: Array) -> Array:
    """Returns the indexed elements, as a sum over those that compare equal."""
    numbers = equation.params["dimension_numbers"]
    (axis,) = numbers.start_index_map
    pairs = zip(
        numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True
    )
    place = dict(pairs)  # from an axis of the array to one of the indices
    rows = _without(x.shape, (axis,))
    order = [place[d] for d in range(x.ndim) if d != axis]
    index = lax.squeeze(indices, [indices.ndim - 1])
    alone = [d for d in range(index.ndim) if d not in order]
    index = lax.squeeze(index.transpose(*order, *alone), range(len(order), index.ndim))
    if index.dtype.itemsize < 4:  # it may not represent every position
        index = index.astype(jnp.int32)
    if equation.params["mode"] == lax.GatherScatterMode.CLIP:
        index = jnp.clip(index, 0, x.shape[axis] - 1)
    positions = lax.broadcasted_iota(index.dtype, x.shape, axis)
    is_chosen = positions == jnp.expand_dims(index, axis)
    y = jnp.sum(jnp.where(is_chosen, x, 0), axis=axis)  # one term: exact
    turned = y.transpose(*sorted(range(len(rows)), key=order.__getitem__))
    return turned.reshape(aval_of(equation.outvars[0]).shape)


def _without(shape: Shape, axes: tuple[int, ...]) -> tuple[Length, ...]:
    return tuple(length for d, length in enumerate(shape) if d not in axes)


# --- Scatters, which contain a program in the declared dtype --------------------------

SCATTERS = {
    "scatter": jax.lax.scatter,
    "scatter-add": jax.lax.scatter_add,
    "scatter-sub": jax.lax.scatter_sub,
    "scatter-mul": jax.lax.scatter_mul,
    "scatter-min": jax.lax.scatter_min,
    "scatter-max": jax.lax.scatter_max,
}


def scatter(equation: JaxprEqn, arrays: list[AnyArray]) -> AnyArray:
    """Returns the result of a scatter of arrays whose dtype may have changed."""
    if arrays[0].dtype == aval_of(equation.invars[0]).dtype:
        return bind_equation(equation, *arrays)[0]
    params = equation.params
    operand, indices, updates = arrays
    return SCATTERS[equation.primitive.name](
        operand,
        indices,
        updates,
        params["dimension_numbers"],
        indices_are_sorted=params["indices_are_sorted"],
        unique_indices=params["unique_indices"],
        mode=params["mode"],
    )


# --- Products of sparse matrices ------------------------------------------------------
#
# JAX sums them in the dtype of their operands. A dense half-precision product is summed
# in float32 by the hardware. A sparse one is a gather and a scatter-add in the program:
# a row of 4,000 ones sums up to 256 in bfloat16. So it is bound in float32, and rounded
# as a dense one is:
#
# $$y = \operatorname{half}(\operatorname{f32}(A) \operatorname{f32}(x)) \qquad \bar x =
# \operatorname{half}(\operatorname{f32}(A)^T \operatorname{f32}(\bar y))$$


def sum_in_float32(equation: JaxprEqn, *arrays: AnyArray) -> list[AnyArray]:
    """Binds a half-precision product so that it sums in float32.

    So do its derivatives. Only its operands are saved for them, in half precision:
    widening is recomputed.

    Args:
        equation: The product; any dtypes in its parameters are half precision.
        *arrays: Its operands: half-precision arrays, and indices.

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


# --- Casts in the program -------------------------------------------------------------


def converted(equation: JaxprEqn, value: Value) -> Value:
    """Returns the result of a cast in the program, of a value in its present dtype.

    Args:
        equation: The cast.
        value: Its operand.

    Returns:
        The value in the dtype of the cast; unchanged if the program casts to the dtype
        that it declares already.
    """
    target = equation.params["new_dtype"]
    from_aval, to_aval = avals((equation.invars[0], equation.outvars[0]))
    if not is_castable(from_aval) or not is_castable(to_aval):
        (array,) = bind_equation(equation, value.array)
        # Masks, positions, labels: like arguments they do not begin residual streams.
        is_number = jnp.issubdtype(from_aval.dtype, jnp.integer)
        is_number = is_number or from_aval.dtype == np.bool_
        return declared(array) if is_number else computed(array)
    if from_aval.dtype == target:
        # A cast to the dtype that is declared already does not undo the choice of half
        # precision.
        if equation.params.get("sharding") is None:
            return value
        params = {**equation.params, "new_dtype": value.dtype}
        (array,) = bind_equation(equation.replace(params=params), value.array)
        return Value(array, value.facts, slots=value.slots, stored=value.stored)
    array = value.cast(target)
    facts = value.facts._replace(is_declared=value.is_constant, fill=None)
    result = Value(array, facts, value.is_constant, value.slots, value.stored)
    if value.facts.is_weight and value.dtype == FULL:
        result.float32_source = value
    return result
