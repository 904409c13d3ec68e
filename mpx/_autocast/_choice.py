"""Choosing the precision of one equation from its class, its operands and its users."""

from typing import Any, NamedTuple

import jax
import numpy as np

from ._classes import PrimitiveClass, class_of
from ._decisions import Precision, Reason
from ._plan import JOINS, Wish
from ._settings import Run
from ._values import FULL, Colour, Value, does_not_fit, is_castable


class Choice(NamedTuple):
    """What was chosen for an equation.

    Attributes:
        kind: The class of its primitive.
        reason: Why.
        dtype: What its operands are cast to; None leaves each in its declared dtype.
        result: The dtype of a product's result.
    """

    kind: PrimitiveClass | None
    reason: Reason
    dtype: np.dtype | None = None
    result: np.dtype | None = None

    @property
    def precision(self) -> Precision:
        """The precision it is computed in."""
        if self.dtype is None:
            return Precision.DECLARED
        return Precision.FULL if self.dtype == FULL else Precision.HALF


# What these give is one of their operands' numbers, so it is exact in any precision.
EXACT = frozenset(
    """
    abs argmax argmin approx_top_k ceil cummax cummin floor is_finite neg pmax pmin
    reduce_max reduce_min reduce_window_max reduce_window_min sign sort top_k
    """.split()
)
_COMPARISONS = frozenset("eq eq_to ge gt le le_to lt lt_to ne".split())
_UPDATES = frozenset(("dynamic_update_slice", "scatter", "scatter-max", "scatter-min"))
_SUMS = frozenset(("add", "add_any", "sub"))


def choose(run: Run, equation: Any, operands: list[Value], wish: Wish) -> Choice:
    """Chooses the precision of an equation that holds no program.

    Args:
        run: The run.
        equation: The equation.
        operands: Its operands.
        wish: What the users of its results want.

    Returns:
        The choice.
    """
    kind = class_of(equation.primitive.name, run.settings.dtype)
    castable = [
        v
        for v, atom in zip(operands, equation.invars, strict=True)
        if is_castable(atom.aval)
    ]
    if kind is None:
        return Choice(kind, Reason.UNKNOWN)
    if not castable:
        return Choice(kind, Reason.UNTOUCHED)
    if kind is PrimitiveClass.HALF:
        return _choose_product(run, equation, operands, castable, wish)
    if kind is PrimitiveClass.FULL:
        return Choice(kind, Reason.SENSITIVE, FULL)
    if kind in (PrimitiveClass.PROMOTE, PrimitiveClass.FOLLOW):
        return _choose_elementwise(run, equation, kind, castable, wish)
    return Choice(kind, Reason.OPAQUE)


def _choose_product(
    run: Run, equation: Any, operands: list[Value], castable: list[Value], wish: Wish
) -> Choice:
    kind = PrimitiveClass.HALF
    params = equation.params
    dtypes = {
        a.aval.dtype
        for a in equation.invars
        if jax.numpy.issubdtype(a.aval.dtype, np.inexact)
    }
    if len(castable) < 2 or any(not is_castable(a.aval) for a in equation.invars[:2]):
        return Choice(kind, Reason.OPAQUE)
    if _asks_for_precision(params.get("precision")):
        return Choice(kind, Reason.PRECISION)
    numbers = params.get("dimension_numbers")
    if equation.primitive.name == "dot_general" and not numbers[0][0]:
        # An outer product sums nothing: rotary angles, not a product of weights.
        return _choose_elementwise(
            run, equation, PrimitiveClass.PROMOTE, castable, wish
        )
    if FULL in dtypes:
        dtype = run.settings.dtype
    elif len(dtypes) == 1:
        dtype = np.dtype(dtypes.pop())  # the user's own half precision
    else:
        return Choice(kind, Reason.OPAQUE)
    is_full = equation.outvars[0].aval.dtype == FULL
    is_wide = is_full and (wish is Wish.FULL or FULL not in dtypes)
    return Choice(kind, Reason.PRODUCT, dtype, FULL if is_wide else dtype)


def _asks_for_precision(precision: Any) -> bool:
    """Whether the program asks for more of a product than JAX's present default."""
    if precision is None:
        return False
    if not isinstance(precision, tuple):
        return True  # an algorithm, which belongs to certain dtypes
    # Set for the whole program by `jax.default_matmul_precision`, it says nothing of
    # this product.
    config: Any = jax.config
    default = config.jax_default_matmul_precision
    if default in _HIGHEST:
        return False
    return any(p is jax.lax.Precision.HIGHEST for p in precision)


# JAX's names for it.
_HIGHEST = ("highest", "float32", "fp32")


def _choose_elementwise(
    run: Run, equation: Any, kind: PrimitiveClass, castable: list[Value], wish: Wish
) -> Choice:
    name = equation.primitive.name
    numbers = [v.facts.literal for v in castable if v.facts.literal is not None]
    values = [v for v in castable if v.facts.literal is None]
    colours = {_colour(v) for v in values}
    halves = {v.dtype for v in values if _colour(v) is Colour.HALF}
    if Colour.FULL in colours:
        return Choice(kind, Reason.PROMOTED, FULL)
    if not halves:
        return Choice(kind, Reason.DECLARED, FULL if _has_full(castable) else None)
    dtype = halves.pop()
    if halves:  # float16 and bfloat16 have only float32 in common
        return Choice(kind, Reason.PROMOTED, FULL)
    if name in EXACT:
        return Choice(kind, Reason.FOLLOWS, dtype)
    is_result_float = any(is_castable(v.aval) for v in equation.outvars)
    if wish is Wish.FULL and is_result_float:
        return Choice(kind, Reason.WANTED, FULL)
    if any(does_not_fit(x, dtype) for x in numbers):
        return Choice(kind, Reason.LITERAL, FULL)
    others = [v for v in values if _colour(v) is Colour.DECLARED]
    if name in _COMPARISONS:
        inexact = others or any(_rounds(x, dtype) for x in numbers)
        return Choice(kind, Reason.FOLLOWS, FULL if inexact else dtype)
    if name in _UPDATES and _colour(castable[0]) is Colour.DECLARED:
        if castable[0].facts.literal is None:
            return Choice(kind, Reason.STREAM, FULL)
    if name in _SUMS and any(not _may_be_added(v, values, name) for v in others):
        return Choice(kind, Reason.STREAM, FULL)
    return Choice(kind, Reason.FOLLOWS, dtype)


def _colour(value: Value) -> Colour:
    """The colour for computing: what is declared in half precision is half."""
    if value.facts.colour is Colour.DECLARED and value.dtype != FULL:
        return Colour.HALF
    return value.facts.colour


def _has_full(castable: list[Value]) -> bool:
    return any(v.dtype == FULL for v in castable)


def _rounds(number: float, dtype: np.dtype) -> bool:
    with np.errstate(over="ignore", under="ignore"):
        return float(np.asarray(number, dtype)) != number


def _may_be_added(value: Value, values: list[Value], name: str) -> bool:
    """Whether a declared value can be added in half precision: a bias, not a stream.

    A vector that was not broadcast is a bias if it is a parameter and is added straight
    to a product (`w @ h + b` under `vmap`); the input of a residual block looks just
    the same but is no parameter.
    """
    if value.facts.is_broadcast:
        return True
    products = any(v.facts.is_product for v in values if v is not value)
    return name == "add" and products and value.facts.parameter is not None


def is_join_of_declared(equation: Any, operands: list[Value]) -> bool:
    """Whether an equation puts only declared values side by side."""
    return equation.primitive.name in JOINS and all(
        v.facts.colour is Colour.DECLARED
        for v, atom in zip(operands, equation.invars, strict=True)
        if is_castable(atom.aval)
    )
