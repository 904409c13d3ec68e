"""Deciding on the precision of one equation.

A rule of the user's comes first (`ruled`). Then the class of the primitive, the
operands and their users decide (`choose`). What a recipe makes of a product that would
be one in half precision is in `_products`.
"""

import dataclasses
import enum
from typing import NamedTuple

import numpy as np
from jax.extend.core import JaxprEqn

from .._program import (
    PrimitiveClass,
    aval_of,
    class_of,
    is_multiplication,
    properties,
)
from .._quantize import AbstractRecipe
from .._rules import Candidate, Precision, Rule, line_of
from .._settings import Settings
from .._typing import Atom
from ._context import FULL, Place, Provenance, Run, Value, does_not_fit, is_castable
from ._demand import Demand, asks_for_precision


class Reason(enum.Enum):
    """Why an operation is computed in the precision it is computed in."""

    PRODUCT = "a matrix product or convolution"
    SENSITIVE = "loses digits or range in half precision"
    WANTED = "everything that uses its result wants float32"
    PROMOTED = "an operand was computed in float32"
    STREAM = "adds to a float32 value, or updates one"
    LITERAL = "a constant does not fit into half precision"
    FOLLOWS = "follows its operands"
    ROUNDED = "only picks numbers, and all that uses them is half precision"
    DECLARED = "its operands are arguments or constants"
    MOVES = "only moves data"
    CONVERTED = "a cast that the program asks for"
    PRECISION = "the program asks for a precision of the product"
    RECURSES = "a program within the program, decided equation by equation"
    OPAQUE = "runs as it was written"
    UNKNOWN = "mpx does not know this primitive; it runs as it was written"
    UNTOUCHED = "no float16, bfloat16 or float32 among its operands and results"
    REGION = "a region that is switched off"
    RULE = "a rule of the user's"
    RECIPE = "a product of data with a weight"


class Choice(NamedTuple):
    """What was chosen for an equation.

    Attributes:
        kind: The class of its primitive.
        reason: Why.
        dtype: What its operands are cast to; None leaves each in its declared dtype.
        result: The dtype of a product's result.
        rule: The user's rule that was applied, or None.
        recipe: How a product is quantized, or None.
        detail: More about the reason.
    """

    kind: PrimitiveClass | None
    reason: Reason
    dtype: np.dtype | None = None
    result: np.dtype | None = None
    rule: Rule | None = None
    recipe: AbstractRecipe | None = None
    detail: str = ""

    @property
    def precision(self) -> Precision:
        """The precision it is computed in."""
        if self.recipe is not None:
            return Precision.LOW
        if self.dtype is None:
            return Precision.DECLARED
        return Precision.FULL if self.dtype == FULL else Precision.HALF


class Case(NamedTuple):
    """An equation that a precision is chosen for.

    Attributes:
        place: Where it stands.
        equation: The equation.
        operands: Its operands.
        demand: What the users of its results want.
        is_residual: Whether it adds a branch to a stream.
        is_scaling: Whether it scales a product by a number.
    """

    place: Place
    equation: JaxprEqn
    operands: list[Value]
    demand: Demand
    is_residual: bool
    is_scaling: bool

    @property
    def settings(self) -> Settings:
        """What holds where it stands."""
        return self.place.settings

    @property
    def name(self) -> str:
        """The name of its primitive."""
        return self.equation.primitive.name

    @property
    def where(self) -> str:
        """The line of the user's code that it comes from, for messages."""
        line = line_of(self.equation)
        return f" at {line}" if line else ""

    @property
    def candidate(self) -> Candidate:
        """What a rule is asked about."""
        return Candidate(
            primitive=self.name,
            kind=class_of(self.name, self.settings.dtype),
            dtype=self.settings.dtype,
            scopes=self.place.scopes,
            equation=self.equation,
            in_dtypes=tuple(v.dtype for v in self.operands),
            parameters=tuple(v.facts.parameter or None for v in self.operands),
        )

    def with_recipe(self, recipe: AbstractRecipe) -> "Case":
        """The same, where another recipe holds."""
        settings = dataclasses.replace(self.settings, recipe=recipe)
        return self._replace(place=dataclasses.replace(self.place, settings=settings))

    @property
    def castable(self) -> list[Value]:
        """The operands that may be cast."""
        pairs = zip(self.operands, self.equation.invars, strict=True)
        return [v for v, atom in pairs if is_castable(aval_of(atom))]


def ruled(run: Run, case: Case) -> tuple[Case, Rule | None]:
    """What the user's rules make of a case.

    A rule that names a recipe changes what holds here, and leaves the rest to autocast.
    One that asks for low precision says nothing where no recipe holds.

    Args:
        run: The run, in which a rule that holds counts as used.
        case: The case.

    Returns:
        The case, and the rule, which says a precision or a rewriting function.
    """
    rules = case.settings.rules
    if not rules.rules or not case.settings.is_enabled:
        return case, None
    rule = rules._find(case.candidate)
    if rule is None:
        return case, None
    run.used.add(rule)
    if isinstance(rule.precision, AbstractRecipe):
        return case.with_recipe(rule.precision), None
    if rule.precision is Precision.LOW and case.settings.recipe is None:
        return case, None
    return case, rule


def choose(case: Case, rule: Rule | None = None) -> Choice:
    """Chooses the precision of an equation that holds no program.

    Args:
        case: The equation.
        rule: The user's rule for it, which says no rewriting function.

    Returns:
        The choice.
    """
    kind = class_of(case.name, case.settings.dtype)
    if not case.settings.is_enabled:
        return Choice(kind, Reason.REGION)
    if not case.castable:
        reason = Reason.UNKNOWN if kind is None else Reason.UNTOUCHED
        return Choice(kind, reason)
    if kind is PrimitiveClass.HALF and not is_product_of_castable(case.equation):
        return Choice(kind, Reason.OPAQUE, detail="an array of it is of another dtype")
    if rule is not None and isinstance(rule.precision, Precision):
        found = _choose_by_rule(case, kind, rule.precision)
        return found._replace(reason=Reason.RULE, rule=rule, kind=kind)
    if kind is None:
        return Choice(kind, Reason.UNKNOWN)
    if kind is PrimitiveClass.HALF:
        return _choose_product(case)
    if kind is PrimitiveClass.FULL:
        return Choice(kind, Reason.SENSITIVE, FULL)
    if kind in (PrimitiveClass.PROMOTE, PrimitiveClass.FOLLOW):
        return _choose_elementwise(case, kind)
    return Choice(kind, Reason.OPAQUE)


def _choose_by_rule(
    case: Case, kind: PrimitiveClass | None, precision: Precision
) -> Choice:
    is_product = kind is PrimitiveClass.HALF
    if precision in (Precision.HALF, Precision.LOW):
        dtype = _half_dtype(case)
        if not is_product:
            return Choice(kind, Reason.RULE, dtype)
        return Choice(kind, Reason.RULE, dtype, _product_result(case, dtype))
    if precision is Precision.FULL:
        return Choice(kind, Reason.RULE, FULL, FULL if is_product else None)
    if precision is Precision.FOLLOW:
        found = _choose_elementwise(case, PrimitiveClass.PROMOTE)
        return found._replace(result=found.dtype if is_product else None)
    return Choice(kind, Reason.RULE)


def _declared_dtypes(case: Case) -> set[np.dtype]:
    return {aval_of(a).dtype for a in case.equation.invars if is_castable(aval_of(a))}


def _half_dtype(case: Case) -> np.dtype:
    """The user's own half precision if all operands have it, else that of autocast."""
    dtypes = _declared_dtypes(case)
    if len(dtypes) == 1 and FULL not in dtypes:
        return np.dtype(dtypes.pop())
    return case.settings.dtype


def _product_result(case: Case, dtype: np.dtype) -> np.dtype:
    is_full = aval_of(case.equation.outvars[0]).dtype == FULL
    # Half precision goes in and float32 comes out: so the program says itself.
    asked_for = FULL not in _declared_dtypes(case)
    return FULL if is_full and (case.demand is Demand.FULL or asked_for) else dtype


def _choose_product(case: Case) -> Choice:
    kind, params = PrimitiveClass.HALF, case.equation.params
    if asks_for_precision(params.get("precision")):
        return Choice(kind, Reason.PRECISION)
    if is_multiplication(case.equation):  # rotary angles, decays of a state
        found = _choose_elementwise(case, PrimitiveClass.PROMOTE)
        if found.reason is Reason.WANTED and _are_half(case.castable):
            # What its gradients are multiplied with was half before: they are products.
            dtype = case.castable[0].dtype
            return Choice(kind, Reason.PRODUCT, dtype, _product_result(case, dtype))
        return found._replace(result=found.dtype, detail="it sums nothing")
    dtype = _half_dtype(case)
    return Choice(kind, Reason.PRODUCT, dtype, _product_result(case, dtype))


def is_product_of_castable(equation: JaxprEqn) -> bool:
    """Whether a product's factors, and its result, are ones that autocast may cast.

    JAX multiplies bfloat16 with float64 as they are, and the sum of two that are half
    may be asked for in float64: what follows would find another dtype than it was
    traced with.

    Args:
        equation: The product; operands of integers are indices.

    Returns:
        Whether all are.
    """
    factors = [a for a in equation.invars if not np.issubdtype(_kind(a), np.integer)]
    return all(is_castable(aval_of(a)) for a in (*factors, *equation.outvars))


def _kind(atom: Atom) -> np.dtype:
    dtype = aval_of(atom).dtype
    # Those of keys are classes of JAX.
    return dtype if isinstance(dtype, np.dtype) else np.dtype(object)


def _choose_elementwise(case: Case, kind: PrimitiveClass) -> Choice:
    castable = case.castable
    numbers = [v.facts.literal for v in castable if v.facts.literal is not None]
    values = [v for v in castable if v.facts.literal is None]
    provenances = {_provenance(v) for v in values}
    halves = {v.dtype for v in values if _provenance(v) is Provenance.HALF}
    if len(halves) == 1 and _joins_half_stream(case, values):
        return Choice(kind, Reason.FOLLOWS, halves.pop())
    if Provenance.FULL in provenances and len(halves) < 2 and _may_be_rounded(case):
        dtype = halves.pop() if halves else case.settings.dtype
        return Choice(kind, Reason.ROUNDED, dtype)
    if Provenance.FULL in provenances or len(halves) > 1:
        # float16 and bfloat16 have only float32 in common.
        return Choice(kind, Reason.PROMOTED, FULL)
    if not halves:
        is_full = any(v.dtype == FULL for v in castable)
        return Choice(kind, Reason.DECLARED, FULL if is_full else None)
    dtype = halves.pop()
    known = properties(case.name)
    if known.is_exact:
        return Choice(kind, Reason.FOLLOWS, dtype)
    is_result_float = any(is_castable(aval_of(v)) for v in case.equation.outvars)
    if case.demand is Demand.FULL and is_result_float and not case.is_scaling:
        return Choice(kind, Reason.WANTED, FULL)
    if any(does_not_fit(x, dtype) for x in numbers):
        return Choice(kind, Reason.LITERAL, FULL)
    others = [v for v in values if _provenance(v) is Provenance.DECLARED]
    if known.compares:
        # Rounded, what is compared with may come to lie on the other side.
        inexact = others or any(_rounds(x, dtype) for x in numbers)
        return Choice(kind, Reason.FOLLOWS, FULL if inexact else dtype)
    if known.updates and _provenance(castable[0]) is Provenance.DECLARED:
        # A buffer that came from outside keeps its digits. One that is filled with a
        # number, zeros mostly, has none to lose.
        if castable[0].facts.literal is None:
            return Choice(kind, Reason.STREAM, FULL)
    if known.adds and any(not _may_be_added(case, v, values) for v in others):
        return Choice(kind, Reason.STREAM, FULL)
    return Choice(kind, Reason.FOLLOWS, dtype)


def _provenance(value: Value) -> Provenance:
    """The provenance for computing: what is declared in half precision is half."""
    if value.facts.provenance is Provenance.DECLARED and value.dtype != FULL:
        return Provenance.HALF
    return value.facts.provenance


def _are_half(values: list[Value]) -> bool:
    return all(_provenance(v) is Provenance.HALF for v in values)


def _rounds(number: float, dtype: np.dtype) -> bool:
    with np.errstate(over="ignore", under="ignore"):
        return float(np.asarray(number, dtype)) != number


def _may_be_rounded(case: Case) -> bool:
    """Whether nothing is lost if operands that were computed in float32 are rounded.

    A sum in the residual stream may be rounded where that is to be half precision.
    """
    if case.demand is not Demand.HALF:
        return False
    is_stream = case.is_residual and case.settings.residual_stream == "half"
    return properties(case.name).picks or is_stream


def _joins_half_stream(case: Case, values: list[Value]) -> bool:
    """Whether an equation adds to a residual stream that is to be half precision."""
    if case.settings.residual_stream != "half" or case.name not in ("add", "add_any"):
        return False
    # The stream itself is an argument in the first block; a parameter that is added is
    # a bias.
    return case.is_residual or any(
        v.facts.provenance is Provenance.DECLARED and v.facts.parameter is None
        for v in values
    )


def _may_be_added(case: Case, value: Value, values: list[Value]) -> bool:
    """Whether a declared value can be added in half precision: a bias, not a stream.

    A vector that was not broadcast is a bias if it is a parameter and is added straight
    to a product (`w @ h + b` under `vmap`); the input of a residual block looks just
    the same but is no parameter.
    """
    if value.facts.is_broadcast:
        return True
    products = any(v.facts.is_product for v in values if v is not value)
    return case.name == "add" and products and value.facts.parameter is not None
