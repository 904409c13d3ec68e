"""Deciding on the precision of one equation.

The rule: matrix products and convolutions compute in half precision, what moves numbers
keeps the precision that they have, and everything else computes in float32. A
user's rule comes first (`apply_rules`). What a recipe makes of a half-precision product
is in `_products`.
"""

import dataclasses
import enum
from typing import NamedTuple

import numpy as np
from jax.extend.core import JaxprEqn

from .._program import (
    PRIMITIVES,
    PrimitiveClass,
    aval_of,
    is_along_vmap,
    is_multiplication,
    line_of,
    only_picks,
    properties,
    sub_jaxprs,
)
from .._quantize import AbstractRecipe
from .._rules import Candidate, Precision, Rule
from .._settings import Settings
from .._typing import Atom
from ._context import FULL, Place, Run, Usage, Value, is_castable
from ._demand import (
    Demand,
    Demands,
    Wanted,
    asks_for_precision,
    half_dtype_of,
    together,
)


class Reason(enum.Enum):
    """Why an operation is computed in the precision it is computed in."""

    PRODUCT = "a matmul or convolution"
    BETWEEN = "float32 between matmuls"
    STREAM = "adds to a residual stream that is half precision"
    ROUNDED = "only selects values, and all their uses are half precision"
    MOVES = "only moves data"
    CONVERTED = "a cast in the program"
    PRECISION = "the program sets the precision of the matmul"
    OPAQUE = "runs as it was written"
    UNKNOWN = "contains a program that mpx does not enter; it runs as written"
    UNTOUCHED = "no float16, bfloat16 or float32 among its operands and results"
    REGION = "a region with `enabled=False`"
    RULE = "a rule of the user's"
    RECIPE = "a weight matmul"
    UNSCALED = (
        "its rule is not proportional to the gradient, which it gets without the loss "
        "scale, in float32"
    )


ON_ONE_DEVICE = "it sums over an axis of `jax.vmap`"


class Choice(NamedTuple):
    """What was chosen for an equation.

    Attributes:
        kind: The class of its primitive.
        reason: Why.
        dtype: What its operands are cast to; None leaves each in its declared dtype.
        rule: The user's rule that was applied, or None.
        recipe: How a product is quantized, or None.
        detail: More about the reason.
    """

    kind: PrimitiveClass
    reason: Reason
    dtype: np.dtype | None = None
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
    """An equation that is being emitted, and all that is known of it.

    Attributes:
        run: The run.
        place: Where it stands.
        equation: The equation.
        operands: Its operands.
        demands: What the users of each of its results read.
        ahead: The plan of the program that it stands in.
    """

    run: Run
    place: Place
    equation: JaxprEqn
    operands: list[Value]
    demands: Wanted
    ahead: Demands

    @property
    def settings(self) -> Settings:
        """What holds where it stands."""
        return self.place.settings

    @property
    def name(self) -> str:
        """The name of its primitive."""
        return self.equation.primitive.name

    @property
    def demand(self) -> Demand:
        """What the users of its results read."""
        return together(self.demands)

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
            kind=properties(self.name).kind,
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


def apply_rules(case: Case) -> tuple[Case, Rule | None]:
    """What the user's rules make of a case.

    A rule that names a recipe changes what holds here, and leaves the rest to autocast.
    One that asks for low precision says nothing where no recipe holds.

    Args:
        case: The case, in whose run a rule that holds counts as used.

    Returns:
        The case, and the rule, which says a precision or a rewriting function.
    """
    rules = case.settings.rules
    if not rules.rules or not case.settings.is_enabled:
        return case, None
    rule = rules._find(case.candidate)
    if rule is None:
        return case, None
    case.run.note(Usage(rules=frozenset((rule,))))
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
    kind = properties(case.name).kind
    if not case.settings.is_enabled:
        return Choice(kind, Reason.REGION)
    if not case.castable:
        return Choice(kind, Reason.UNTOUCHED)
    if kind is PrimitiveClass.HALF and not is_product_of_castable(case.equation):
        return Choice(kind, Reason.OPAQUE, detail="an array of it is of another dtype")
    if rule is not None and isinstance(rule.precision, Precision):
        return Choice(kind, Reason.RULE, _dtype_by_rule(case, rule.precision), rule)
    if case.name not in PRIMITIVES and sub_jaxprs(case.equation):
        return Choice(kind, Reason.UNKNOWN)
    if kind is PrimitiveClass.HALF:
        return _choose_product(case)
    if kind is PrimitiveClass.FULL:
        return _choose_elementwise(case)
    if kind is PrimitiveClass.MOVE:
        return _choose_collective(case)
    return Choice(kind, Reason.OPAQUE)


def _dtype_by_rule(case: Case, precision: Precision) -> np.dtype | None:
    if precision in (Precision.HALF, Precision.LOW):
        return half_dtype_of(case.equation, case.settings)
    if precision is Precision.FULL:
        return FULL
    return _dtype_as_it_comes(case) if precision is Precision.FOLLOW else None


def _dtype_as_it_comes(case: Case) -> np.dtype:
    """Float32 if an operand was computed in float32, or none in half precision."""
    computed = [v for v in case.castable if not v.facts.is_declared or v.dtype != FULL]
    dtypes = {v.dtype for v in computed}
    # float16 and bfloat16 have only float32 in common.
    return dtypes.pop() if len(dtypes) == 1 else FULL


def _choose_collective(case: Case) -> Choice:
    if properties(case.name).sums and is_along_vmap(case.equation):
        return Choice(PrimitiveClass.FULL, Reason.BETWEEN, FULL, detail=ON_ONE_DEVICE)
    return Choice(PrimitiveClass.MOVE, Reason.MOVES, _dtype_as_it_comes(case))


def _choose_product(case: Case) -> Choice:
    kind = PrimitiveClass.HALF
    if asks_for_precision(case.equation.params.get("precision")):
        return Choice(kind, Reason.PRECISION)
    if is_multiplication(case.equation):  # rotary angles, decays of a state
        detail = "it sums over one number"
        return Choice(PrimitiveClass.FULL, Reason.BETWEEN, FULL, detail=detail)
    return Choice(kind, Reason.PRODUCT, half_dtype_of(case.equation, case.settings))


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


def _choose_elementwise(case: Case) -> Choice:
    kind, values = PrimitiveClass.FULL, [v for v in case.castable if not v.is_constant]
    if case.name in ("add", "add_any"):
        declared = aval_of(case.equation.outvars[0]).dtype
        if declared != FULL:
            return Choice(kind, Reason.STREAM, declared)
        is_half_stream = case.settings.residual_stream == "half"
        if is_half_stream and _adds_to_stream(case, values):
            return Choice(kind, Reason.STREAM, case.settings.dtype)
    halves = {v.dtype for v in values if v.dtype != FULL}
    half = next(iter(halves), case.settings.dtype)
    is_computed = not all(v.facts.is_declared for v in values)
    if is_computed and len(halves) < 2 and case.demand == Demand.HALF:
        # Nothing is lost if what was computed in float32 is rounded before.
        if only_picks(case.equation):
            return Choice(kind, Reason.ROUNDED, half)
    return Choice(kind, Reason.BETWEEN, FULL)


def _adds_to_stream(case: Case, values: list[Value]) -> bool:
    """Whether an equation adds to a residual stream that is to be half precision."""
    if any(v in case.ahead.residuals for v in case.equation.outvars):
        return True
    # In the first block the stream is an argument; a parameter would be a bias.
    has_half = any(v.dtype != FULL for v in values)
    return has_half and any(
        v.facts.is_declared and v.dtype == FULL and v.facts.parameter is None
        for v in values
    )
