"""Chooses the products that a recipe quantizes, and binds them.

A recipe is for *linear* products: of data with a weight, which by dataflow is computed
from parameters and constants only (`_travel`). Everything else, attention's activation
matmuls included, follows the half-precision rules; a note on each product has the
reason. `Precision.LOW` in a rule quantizes any matmul.

The last products of a function, the *output layer*, stay in half precision unless a
rule overrides it: the loss sees their rounding directly. A product is one of them if it
goes into a result of the function, a loss or logits, and into no other product. If it
is the only product, as in one layer, it is quantized.

For evaluation, the state of a run records which uses of which weights are quantized,
whatever the function returns.
"""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from .._base.jax_compat import explaining, is_transposed, manual_axes
from .._base.typing import AnyArray, Length
from .._program import aval_of, avals, count, data_scope, properties, summed_numbers
from .._quantize import (
    AbstractProduct,
    AbstractRecipe,
    ConvolutionProduct,
    LinearProduct,
    QuantizedArray,
    RaggedProduct,
    has_blocks,
    has_ragged_form,
    legs_of,
    legs_text,
    may_read,
    quantized_product,
    rounds_stochastically,
    stored_ahead,
)
from .._recipe_state import (
    MissingScales,
    SlotName,
    Use,
    is_collecting_requests,
    shared,
    with_input_scale,
    with_scales,
)
from .._settings import ambient
from .._wire import dtype_of_sums
from ._context import Usage, Value, computed
from ._decide import Case, Choice, Reason, is_product_of_castable, noted, refuse_slow
from ._reach import CONSTANT, DERIVATIVE, UNUSED, Reach
from ._travel import are_weights

_VECTOR, _FINAL = "a matmul with a vector", "the output layer (LM head)"
# If a weight's side is shorter than this, and much shorter than the other (an adapter
# of low rank, the router of experts), the product moves as many bytes as quantizing its
# operand takes, and is bound by memory.
_NARROW, _MUCH = 128, 16
_CONVOLUTION, _RAGGED = "conv_general_dilated", "ragged_dot_general"
_FORWARD_MODE = (
    (TypeError,),
    ("forward-mode",),
    "A recipe has no forward-mode derivative (`jax.jvp`, `jax.jacfwd`, `jax.hessian`): "
    "its backward pass is not the derivative of its forward pass. Use `jax.grad` and "
    "the like, or compute the tangents without it: "
    "`mpx.autocast(func, recipe=None)`.",
)


def choose_recipe(case: Case, choice: Choice, is_asked_for: bool) -> Choice:
    """Chooses whether a recipe quantizes a product.

    Args:
        case: The product; its run notes a batch of one row.
        choice: The choice without a recipe: half precision.
        is_asked_for: Whether a rule sets low precision.

    Returns:
        The choice, with a recipe, or with the reason why it is not quantized.

    Raises:
        ValueError: The product is the gradient of a weight, and a result of the
            function.
    """
    recipe = case.settings.recipe
    if recipe is None:
        return choice
    why_not = _why_unsupported(case)
    left_alone = None if is_asked_for else _why_left_alone(case)
    if why_not == _VECTOR and left_alone is None and _is_batch_of_one(case):
        case.run.note(Usage(one_row=frozenset((recipe,))))
        # The batch that a state is made with may have one row, and those of steps more.
        # And evaluation with a state has the training's values for one row, too.
        is_whole = is_collecting_requests() or _by_state(case)
        why_not = None if is_whole else "a batch of one row"
    why_not = why_not or left_alone
    if why_not is not None:
        if why_not != _FINAL:
            _refuse_gradient(case)
        return choice._replace(detail=f"not quantized: {why_not}")
    recipe = _recipe_for(case, recipe)
    return choice._replace(reason=Reason.RECIPE, recipe=recipe)


def _refuse_gradient(case: Case) -> None:
    """Raises if the function returns the gradient of a weight.

    It is an activation matmul. An inner derivative that goes into a loss, as in a
    gradient penalty, is a product like others, and is quantized if one operand is a
    weight.
    """
    ends = [end & ~DERIVATIVE for end in case.place.reach]
    if is_transposed(case.equation) and ends == [Reach.RESULT]:
        raise ValueError(
            f"A recipe found the gradient of a weight{case.where} among the "
            "function's results: its matmuls are activation matmuls, and would not "
            "be quantized. Differentiate the autocast function, not the other way "
            "round: `mpx.filter_grad(mpx.autocast(loss, recipe=...), scaling)`."
        )


def _why_unsupported(case: Case) -> str | None:
    """Returns why a product cannot be quantized, or None."""
    if not properties(case.name).is_quantizable:
        return "only matmuls and convolutions are"
    if not is_product_of_castable(case.equation):
        return "one of its arrays has a dtype that autocast does not cast"
    if case.place.has_own_rule:
        return "a function with a custom derivative rule"
    if case.name == _CONVOLUTION:
        recipe = case.settings.recipe
        if recipe is not None and has_blocks(recipe):
            return "a convolution needs a recipe with one scale for each array"
        return _why_unsupported_order(case, "convolution")
    if case.name == _RAGGED:
        return _why_unsupported_ragged(case)
    sizes = summed_numbers(case.equation), *map(count, _free_axes(case))
    return _VECTOR if min(sizes) <= 1 else None


def _free_axes(case: Case) -> list[list[Length]]:
    """Returns the lengths of the axes of both operands that a product keeps."""
    both = avals(case.equation.invars[:2])
    contracted, batch = case.equation.params["dimension_numbers"]
    return [
        [n for i, n in enumerate(aval.shape) if i not in (*sums, *batched)]
        for aval, sums, batched in zip(both, contracted, batch, strict=True)
    ]


def _is_batch_of_one(case: Case) -> bool:
    """Returns whether one row of data is multiplied with a weight.

    That is the last batch of an epoch, or one example to evaluate. The program would
    quantize a larger batch, so the recipe is not useless.
    """
    weights = are_weights(case)
    if weights.count(True) != 1:
        return False
    free = _free_axes(case)
    rows, columns = free[weights.index(False)], free[weights.index(True)]
    return bool(rows) and count(rows) <= 1 < count(columns)


def _why_unsupported_ragged(case: Case) -> str | None:
    params = case.equation.params
    ranks = (aval_of(v).ndim for v in case.equation.invars[:2])
    numbers = params["ragged_dot_dimension_numbers"]
    if params["group_offset"] is not None or not has_ragged_form(numbers, *ranks):
        return "a ragged matmul of another form than rows in groups"
    return _why_unsupported_order(case, "ragged matmul")


def _why_unsupported_order(case: Case, what: str) -> str | None:
    if are_weights(case) != [False, True]:
        return f"a {what} of operands other than data and a weight"
    return None


def _why_left_alone(case: Case) -> str | None:
    """Returns why a recipe does not quantize a product, or None."""
    weights = are_weights(case)
    if not any(weights):
        return None if _is_attention(case) else "an activation matmul"
    data = case.operands[weights.index(True) ^ 1]
    if data.facts.is_weight or data.facts.origin == CONSTANT:
        return "a matmul of weights only"
    weight = case.operands[weights.index(True)]
    if case.name == "dot_general" and _is_narrow(case, weight):
        return "its weight is too small to pay"
    recipe, in_while = case.settings.recipe, case.place.is_in_while
    if recipe and recipe.has_state and weight.slots is None and not in_while:
        return "its weight is computed in a nested program"
    recorded = _by_state(case)
    if recorded is not None:
        return None if recorded else "neither does the run of the state"
    return _final(case)


def _by_state(case: Case) -> bool | None:
    """Returns whether the state records a product as quantized; None if unknown."""
    weight = _weight_of(case)
    return weight.slots and weight.slots.is_quantized(_use(case, weight))


def _is_narrow(case: Case, weight: Value) -> bool:
    columns = count(_free_axes(case)[0 if weight is case.operands[0] else 1])
    narrow, wide = sorted((summed_numbers(case.equation), columns))
    return narrow < _NARROW and wide >= _MUCH * narrow


def _final(case: Case) -> str | None:
    (end,) = case.place.reach or (UNUSED,)
    return _FINAL if end and Reach.PRODUCT not in end else None


def _is_attention(case: Case) -> bool:
    """Returns whether a product is an activation matmul that the recipe quantizes."""
    recipe, operands = case.settings.recipe, case.operands[:2]
    return (
        recipe is not None
        and recipe.fp8_dpa
        and case.name == "dot_general"
        and not any(v.facts.is_weight or v.facts.origin == CONSTANT for v in operands)
    )


def _recipe_for(case: Case, recipe: AbstractRecipe) -> AbstractRecipe:
    """Returns the recipe, or one without a state where scales are not stored.

    Amaxes come back as the derivative of scales. So a product before a `stop_gradient`
    returns none, and one whose result goes into an operation that JAX cannot
    differentiate must have no such derivative.
    """
    if _is_attention(case):
        return recipe._for_attention()
    weight = _weight_of(case)
    if weight.slots is None:
        return recipe._without_state()
    learns = all(end & DERIVATIVE == Reach.GRADIENT for end in case.place.reach)
    has_scales = weight.slots.has_scales(_use(case, weight), otherwise=learns)
    return recipe if has_scales else recipe._without_state()


def _weight_of(case: Case) -> Value:
    """Returns the operand in the role of the weight."""
    return case.operands[0 if are_weights(case) == [True, False] else 1]


def _product_of(case: Case, choice: Choice) -> AbstractProduct:
    """Returns the quantized product that is bound for an equation."""
    assert choice.recipe is not None and choice.dtype is not None
    params = case.equation.params
    wire = case.settings.wire
    is_alone = wire is not None and wire.is_alone
    common: dict[str, Any] = dict(
        recipe=choice.recipe,
        dtype=choice.dtype,
        target=case.settings.device,
        manual_axes=() if is_alone else manual_axes(),
        sums_over_devices=case.place.sums_over_devices,
        out_sharding=params.get("out_sharding"),
        reduce_dtype=dtype_of_sums(wire, case.name),
    )
    if case.name == _CONVOLUTION:
        names = (f.name for f in dataclasses.fields(ConvolutionProduct))
        own = {name: params[name] for name in names if name in params}
        return ConvolutionProduct(**{**own, **common})
    if case.name == _RAGGED:
        numbers = params["ragged_dot_dimension_numbers"]
        return RaggedProduct(dimension_numbers=numbers, **common)
    is_weight_first = _weight_of(case) is case.operands[0]
    (left, right), (left_batch, right_batch) = params["dimension_numbers"]
    sums, batch = (tuple(left), tuple(right)), (tuple(left_batch), tuple(right_batch))
    return LinearProduct(
        dimension_numbers=(sums, batch), is_weight_first=is_weight_first, **common
    )


class MarkedWeight(NamedTuple):
    """What an equation says of its operand: the weight of a quantized product.

    Attributes:
        product: The product.
        slot: The slot of its scales, if the recipe has a state.
    """

    product: AbstractProduct
    slot: SlotName | None


def emit_quantized(case: Case, choice: Choice) -> list[Value]:
    """Binds a quantized product.

    Args:
        case: The product; its run notes the recipe as used.
        choice: The choice for it.
    """
    assert case.settings.recipe is not None
    case.run.note(Usage(recipes=frozenset((case.settings.recipe,))))
    product = _product_of(case, choice)
    if case.settings.is_strict:
        refuse_slow(case, product)
    weight, legs = "", {}
    if ambient().takes_notes:
        legs = legs_of(product)
        detail = f"{type(product.recipe).__name__}, {legs_text(legs)}"
        if _stored_for(product, _weight_of(case)) is not None:
            detail += "; the stored weight is read without quantizing it again"
        choice = choice._replace(detail=detail)
        weight = _weight_of(case).facts.parameter or ""
    with noted(case.name, choice, weight, legs):
        return _emit_product(case, choice, product)


def _emit_product(case: Case, choice: Choice, product: AbstractProduct) -> list[Value]:
    """Binds a product; its weight is passed unrounded."""
    assert choice.dtype is not None
    weight = _weight_of(case)
    scales, use = None, _use(case, weight)
    if weight.slots is not None:
        weight.slots.note_quantized(use)
    if product.recipe.has_state:
        scales = _scales(case, weight, product.recipe, use)
        if _is_measured(weight, use):
            product = dataclasses.replace(product, is_weight_measured=True)
        data = case.operands[1 if weight is case.operands[0] else 0]
        scales = _with_one_input_scale(data, product.recipe, scales)
    step = case.run.step if rounds_stochastically(product.recipe) else None
    gathering = weight.gathering
    sent = gathering and gathering.arrive_quantized(product, scales)
    array, ahead = sent or (weight.array, None)
    if (stored := _stored_for(product, weight)) is not None:
        ahead = stored_ahead(product, stored, scales)
    if weight.float32_source is not None and product._wants_wide_weight():
        product = dataclasses.replace(product, weight_dtype=array.dtype)
        array = weight.float32_source.array
    if ambient().marks_weights:
        slot = weight.slots and weight.slots.slot(use)
        with data_scope("weight", MarkedWeight(product, slot)):
            array = lax.optimization_barrier(array)
    pair = [array if v is weight else v.cast(choice.dtype) for v in case.operands[:2]]
    sizes = [v.array for v in case.operands[2:]]  # of the groups of a ragged product
    with explaining(*_FORWARD_MODE):
        result = quantized_product(product, (*pair, *sizes), scales, step, ahead)
    for policy in case.place.saving:
        result = policy.named(case.equation, result)
    return [computed(result)]


def _stored_for(product: AbstractProduct, weight: Value) -> QuantizedArray | None:
    """Returns the stored form of a weight if a product can read it, else None."""
    stored = weight.stored
    is_8_bits = isinstance(stored, QuantizedArray)
    return stored if is_8_bits and may_read(product, stored) else None


def _use(case: Case, weight: Value) -> Use:
    """Returns the name of a use of a weight among its slots."""
    shape = "x".join(map(str, weight.shape))
    # The values of an inner derivative have another magnitude than the data.
    kind = " transposed" if is_transposed(case.equation) else ""
    return Use("/".join(case.place.scopes), shape + kind)


def _scales(case: Case, weight: Value, recipe: AbstractRecipe, use: Use) -> AnyArray:
    assert weight.slots is not None
    found = weight.slots.take(use, recipe)
    if found is None:
        raise MissingScales(type(recipe).__name__, case.where)
    row, scales = weight.slots.row(use), case.run.scales
    return found if row is None or scales is None else with_scales(found, scales[row])


def _is_measured(weight: Value, use: Use) -> bool:
    """Returns whether the amax of a weight is known from its parameter.

    A value computed from a parameter has an amax of its own; rounded to bfloat16, it
    has the parameter's amax, rounded.
    """
    is_rounded = weight.dtype == jnp.bfloat16 and weight.facts.parameter is not None
    is_moved = weight.facts.is_declared or is_rounded
    slots = weight.slots
    return is_moved and slots is not None and slots.is_measured(use, weight.shape)


def _with_one_input_scale(
    data: Value, recipe: AbstractRecipe, scales: AnyArray
) -> AnyArray:
    """Replaces the input's scales by those of the first product that reads the data.

    Queries, keys and values read one array. Their slots have recorded the same amaxes
    for it, so their scales are the same number. As three arrays the compiler would
    quantize, write and transpose the data three times, and store three copies (a layer
    of Llama 8B for an H100, 2026-11: 0.4 GB of 26).
    """
    first = data.input_scales.get(recipe)
    if first is None:
        scales, data.input_scales[recipe] = shared(scales, 2)
        return scales
    first, data.input_scales[recipe] = shared(first, 2)
    return with_input_scale(scales, first)
