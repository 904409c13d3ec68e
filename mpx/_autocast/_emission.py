"""Binding one equation in the precision that was chosen for it."""

from typing import Any

import jax
import numpy as np

from .._jax_compat import bind_equation
from .._program import properties
from ._choice import Choice
from ._values import Provenance, Value, computed, declared, is_castable


def emit_operation(equation: Any, operands: list[Value], choice: Choice) -> list[Value]:
    """Casts operands and binds an equation.

    Args:
        equation: The equation.
        operands: Its operands.
        choice: What was chosen for it.

    Returns:
        Its results.
    """
    arrays = [
        _cast(equation, value, atom.aval, choice)
        for value, atom in zip(operands, equation.invars, strict=True)
    ]
    if choice.dtype is not None and choice.result is not None:
        return [_product(equation, arrays, choice.dtype, choice.result)]
    if equation.primitive.name in _SCATTERS:
        bound = [_scatter(equation, arrays)]
    else:
        bound = bind_equation(equation, *arrays)
    if equation.primitive.name == "iota":
        return [declared(x) for x in bound]
    values = [
        v
        for v, atom in zip(operands, equation.invars, strict=True)
        if is_castable(atom.aval)
    ]
    is_fixed = bool(values) and all(map(_is_fixed, values))
    results = [computed(x, is_fixed=is_fixed) for x in bound]
    weights = [v for v in values if v.facts.is_weight] if is_fixed else []
    if weights:
        for result in results:
            result.facts = result.facts._replace(is_weight=True)
            result.slots = weights[0].slots
    if is_fixed and all(v.facts.is_broadcast for v in values):
        for result in results:
            result.facts = result.facts._replace(is_broadcast=True)
    return results


def _is_fixed(value: Value) -> bool:
    facts = value.facts
    return facts.is_fixed or facts.parameter is not None or facts.literal is not None


def _cast(equation: Any, value: Value, aval: Any, choice: Choice) -> Any:
    if not is_castable(aval):
        return value.array
    target = aval.dtype if choice.dtype is None else choice.dtype
    return _spread(equation, value, target).cast(target)[0]


def _spread(equation: Any, value: Value, target: Any) -> Value:
    """A declared value that will be cast, broadcast to what it meets.

    JAX broadcasts the operands of binary operations along axes of size one. Before the
    cast: the gradient of a bias is a sum over the batch, which then runs in float32.
    """
    if (
        not properties(equation.primitive.name).is_binary
        or value.facts.provenance is not Provenance.DECLARED
        or value.is_constant
        or value.dtype == target
    ):
        return value
    shape = equation.outvars[0].aval.shape
    if value.array.shape == shape or value.array.ndim != len(shape):
        return value
    axes = tuple(range(len(shape)))
    array = jax.lax.broadcast_in_dim(value.array, shape, axes)
    return Value(array, value.facts, slots=value.slots)


def _product(
    equation: Any, arrays: list[Any], dtype: np.dtype, result: np.dtype
) -> Value:
    """A product of operands in half precision, or of float32 ones if a rule says so.

    A product of half precision operands that gives float32 would have backward products
    of float32 with half precision operands, and XLA's CPU compiler knows not all of
    them. So a result that is wanted in float32 is a product in half that is widened.
    XLA may drop the narrowing between the two (it does on CPUs), or write half as many
    bytes (on GPUs). The gradient of a ViT block has the same error both ways, 3.0e-3.
    """
    params = dict(equation.params)
    if params.get("preferred_element_type") is not None:
        params["preferred_element_type"] = dtype
    (half,) = bind_equation(equation.replace(params=params), *arrays)
    if half.dtype == result:
        return computed(half, is_product=True)
    made = computed(jax.lax.convert_element_type(half, result), is_product=True)
    made.narrow = half
    return made


_SCATTERS = {
    "scatter": jax.lax.scatter,
    "scatter-add": jax.lax.scatter_add,
    "scatter-sub": jax.lax.scatter_sub,
    "scatter-mul": jax.lax.scatter_mul,
    "scatter-min": jax.lax.scatter_min,
    "scatter-max": jax.lax.scatter_max,
}


def _scatter(equation: Any, arrays: list[Any]) -> jax.Array:
    """Emits a scatter, which holds a program of its own in the declared dtype."""
    if arrays[0].dtype == equation.invars[0].aval.dtype:
        return bind_equation(equation, *arrays)[0]
    params = equation.params
    operand, indices, updates = arrays
    return _SCATTERS[equation.primitive.name](
        operand,
        indices,
        updates,
        params["dimension_numbers"],
        indices_are_sorted=params["indices_are_sorted"],
        unique_indices=params["unique_indices"],
        mode=params["mode"],
    )
