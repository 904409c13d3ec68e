r"""Lookups of one number in each row: the logit of the label, in a cross-entropy.

$$y_b = x_{b, i_b} \qquad \bar x_{b, v} = \bar y_b \, [v = i_b]$$

JAX transposes such a gather into a scatter into zeros. XLA fuses nothing behind a
scatter, so the gradient of the logits is written in float32, read, written again and
cast. As a comparison it is part of the kernel that writes it in half precision: of a
Llama with 32,000 words, 8 times 1,024 of them, a step moves 71.0 GB where it moved 75.2
(542 M weights, 8 layers; jax 0.10.2, compiled for an H100, November 2026). The numbers
are the same: one is added to zero.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn
from jax.sharding import AxisType
from jaxtyping import Array

from .._jax_compat import bind_equation
from .._program import aval_of
from .._typing import Length, Shape


def finds_one_in_each_row(equation: JaxprEqn) -> bool:
    """Whether a gather takes one number of each row of an array of floats.

    The rows lie along one axis, and the array has an index for every other one, as
    `jnp.take_along_axis` and an index under `jax.vmap` have it.
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
    """The result of such a gather, whose derivative is a comparison.

    Indices out of range give what the mode of the gather says, and no gradient, or
    that of the nearest number.
    """

    @jax.custom_jvp
    def found(x: Array, indices: Array) -> Array:
        return bind_equation(equation, x, indices)[0]

    @found.defjvp
    def _found_jvp(
        primals: tuple[Array, Array], tangents: tuple[Array, Array]
    ) -> tuple[Array, Array]:
        x, indices = primals
        # Computed again for the transpose, or the comparison would be kept for it.
        chosen = jax.checkpoint(functools.partial(_chosen, equation), prevent_cse=False)
        return found(x, indices), chosen(tangents[0], indices)

    return found(x, indices)


def _chosen(equation: JaxprEqn, x: Array, indices: Array) -> Array:
    """The numbers that the indices name, as a sum of those that are compared equal."""
    numbers = equation.params["dimension_numbers"]
    (axis,) = numbers.start_index_map
    pairs = zip(
        numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True
    )
    place = dict(pairs)  # of an axis of the array, among those of the indices
    rows = _without(x.shape, (axis,))
    order = [place[d] for d in range(x.ndim) if d != axis]
    index = lax.squeeze(indices, [indices.ndim - 1])
    alone = [d for d in range(index.ndim) if d not in order]
    index = lax.squeeze(index.transpose(*order, *alone), range(len(order), index.ndim))
    if index.dtype.itemsize < 4:  # of which not every position is one
        index = index.astype(jnp.int32)
    if equation.params["mode"] == lax.GatherScatterMode.CLIP:
        index = jnp.clip(index, 0, x.shape[axis] - 1)
    positions = lax.broadcasted_iota(index.dtype, x.shape, axis)
    is_chosen = positions == jnp.expand_dims(index, axis)
    y = jnp.sum(jnp.where(is_chosen, x, 0), axis=axis)  # of one number: exact
    turned = y.transpose(*sorted(range(len(rows)), key=order.__getitem__))
    return turned.reshape(aval_of(equation.outvars[0]).shape)


def _without(shape: Shape, axes: tuple[int, ...]) -> tuple[Length, ...]:
    return tuple(length for d, length in enumerate(shape) if d not in axes)
