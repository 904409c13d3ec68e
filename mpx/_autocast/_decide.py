"""Decides on the precision of one equation, and records or checks the decision.

The rule: matmuls and convolutions compute in half precision, data movement keeps the
precision of its input, and everything else computes in float32. A user's rule comes
first (`apply_rules`). `_products` decides how a recipe quantizes a half-precision
matmul. Notes record each decision in the emitted program, for `mpx.explain`; strict
mode turns cases that are otherwise only reported into errors.
"""

import contextlib
import dataclasses
import enum
import uuid
import weakref
from collections.abc import Iterable, Iterator, Mapping, Set
from typing import NamedTuple

import numpy as np
from jax.extend.core import JaxprEqn

from .._base.errors import listing, warn_user
from .._base.typing import Atom
from .._program import (
    PRIMITIVES,
    PrimitiveClass,
    aval_of,
    data_of,
    data_scope,
    is_along_vmap,
    is_multiplication,
    line_of,
    only_picks,
    properties,
    sub_jaxprs,
)
from .._quantize import (
    UNITS,
    AbstractProduct,
    AbstractRecipe,
    Leg,
    LegPath,
    Path,
    legs_of,
)
from .._settings import (
    Candidate,
    Precision,
    Rule,
    Rules,
    Settings,
    ambient,
    unkeyed,
    with_ambient,
    with_unkeyed,
)
from ._context import FULL, Place, Run, Usage, Value, is_castable, keeps_scores
from ._demand import (
    Demand,
    Demands,
    Wanted,
    asks_for_precision,
    blocks_in_half,
    half_dtype_of,
    together,
)


class Reason(enum.Enum):
    """Why an operation is computed in its precision."""

    PRODUCT = "a matmul or convolution"
    BETWEEN = "float32 between matmuls"
    STREAM = "adds to a residual stream that is half precision"
    ROUNDED = "only selects values, and all their uses are half precision"
    SCALED = "multiplies scores before they are rounded"
    MASKED = "masks scores, of which the maximum is subtracted"
    MOVES = "only moves data"
    CONVERTED = "a cast in the program"
    PRECISION = "the program sets the precision of the matmul"
    OPAQUE = "runs as it was written"
    KERNEL = "a Pallas kernel; what it only multiplies is in half precision"
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
    """The decision on an equation.

    Attributes:
        kind: The class of its primitive.
        reason: The reason.
        dtype: The dtype that its operands are cast to; None leaves each in its declared
            dtype.
        rule: The user's rule that was applied, or None.
        recipe: The recipe that quantizes a product, or None.
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
    """An equation that is being emitted, with all that is known about it.

    Attributes:
        run: The run.
        place: Its place in the program.
        equation: The equation.
        operands: Its operands.
        demands: The demands of the users of each of its results.
        ahead: The demands of the program that contains it.
    """

    run: Run
    place: Place
    equation: JaxprEqn
    operands: list[Value]
    demands: Wanted
    ahead: Demands

    @property
    def settings(self) -> Settings:
        """The settings that apply to it."""
        return self.place.settings

    @property
    def name(self) -> str:
        """The name of its primitive."""
        return self.equation.primitive.name

    @property
    def demand(self) -> Demand:
        """The demand of all users of its results together."""
        return together(self.demands)

    @property
    def where(self) -> str:
        """The line of the user's code that it comes from, for messages."""
        line = line_of(self.equation)
        return f" at {line}" if line else ""

    @property
    def candidate(self) -> Candidate:
        """The operation in the form that rules are matched against."""
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
        """Returns the same case under another recipe."""
        settings = dataclasses.replace(self.settings, recipe=recipe)
        return self._replace(place=dataclasses.replace(self.place, settings=settings))

    @property
    def castable(self) -> list[Value]:
        """The operands that may be cast."""
        pairs = zip(self.operands, self.equation.invars, strict=True)
        return [v for v, atom in pairs if is_castable(aval_of(atom))]


def apply_rules(case: Case) -> tuple[Case, Rule | None]:
    """Finds the user's rule for a case, and applies it if it names a recipe.

    A rule that names a recipe changes the settings here, and leaves the choice to
    autocast. A rule for low precision has no effect where no recipe is active.

    Args:
        case: The case; a rule that matches is noted as used in its run.

    Returns:
        The case, and the rule if it has a precision or a rewriting function, else None.
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
    """Chooses the precision of an equation that contains no program.

    Args:
        case: The equation.
        rule: The user's rule for it, without a rewriting function.

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
    is_kernel = case.name == "pallas_call"
    if is_kernel and any(blocks_in_half(case.settings, case.equation, case.demands)):
        return Choice(kind, Reason.KERNEL)
    return Choice(kind, Reason.OPAQUE)


def _dtype_by_rule(case: Case, precision: Precision) -> np.dtype | None:
    if precision in (Precision.HALF, Precision.LOW):
        return half_dtype_of(case.equation, case.settings)
    if precision is Precision.FULL:
        return FULL
    return _dtype_as_it_comes(case) if precision is Precision.FOLLOW else None


def _dtype_as_it_comes(case: Case) -> np.dtype:
    """Returns the one dtype that operands were computed in, otherwise float32."""
    computed = [v for v in case.castable if not v.facts.is_declared or v.dtype != FULL]
    dtypes = {v.dtype for v in computed}
    # The only common dtype of float16 and bfloat16 is float32.
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
    """Returns whether autocast may cast a product's factors and its result.

    JAX multiplies bfloat16 with float64 uncast, and a product of two half-precision
    operands may accumulate in float64: the operations after it would get another dtype
    than the one they were traced with.

    Args:
        equation: The product; its integer operands are indices.

    Returns:
        True if all may be cast.
    """
    factors = [a for a in equation.invars if not np.issubdtype(_kind(a), np.integer)]
    return all(is_castable(aval_of(a)) for a in (*factors, *equation.outvars))


def _kind(atom: Atom) -> np.dtype:
    dtype = aval_of(atom).dtype
    # Dtypes of random keys are classes of JAX.
    return dtype if isinstance(dtype, np.dtype) else np.dtype(object)


def _choose_elementwise(case: Case) -> Choice:
    kind, values = PrimitiveClass.FULL, [v for v in case.castable if not v.is_constant]
    if case.name in ("add", "add_any"):
        declared = aval_of(case.equation.outvars[0]).dtype
        if declared != FULL:
            return Choice(kind, Reason.STREAM, declared)
        if case.settings.has_half_stream and _adds_to_stream(case, values):
            return Choice(kind, Reason.STREAM, case.settings.dtype)
    halves = {v.dtype for v in values if v.dtype != FULL}
    half = next(iter(halves), case.settings.dtype)
    is_computed = not all(v.facts.is_declared for v in values)
    if is_computed and len(halves) < 2 and case.demand == Demand.HALF:
        # Nothing is lost if a float32 value is rounded before the selection.
        if only_picks(case.equation):
            return Choice(kind, Reason.ROUNDED, half)
    if case.name == "select_n" and _masks_scores(case):
        return Choice(kind, Reason.MASKED, half)
    return Choice(kind, Reason.BETWEEN, FULL)


def _masks_scores(case: Case) -> bool:
    """Returns whether an equation selects from scores that are half precision."""
    choices, demand = case.operands[1:], case.demand
    if Demand.SHIFT not in demand or Demand.FULL in demand:
        return False
    scores = [v for v in choices if v.is_computed_in_half]
    rest = (v.facts.fill is not None for v in choices if not v.is_computed_in_half)
    return bool(scores) and all(rest) and keeps_scores(case.settings)


def _adds_to_stream(case: Case, values: list[Value]) -> bool:
    """Returns whether an equation adds to a half-precision residual stream."""
    if any(v in case.ahead.residuals for v in case.equation.outvars):
        return True
    # In the first block the stream is an argument; a parameter would be a bias.
    has_half = any(v.dtype != FULL for v in values)
    return has_half and any(
        v.facts.is_declared and v.dtype == FULL and v.facts.parameter is None
        for v in values
    )


# --- Notes ----------------------------------------------------------------------------
#
# While notes are taken, each emitted equation is in a named scope of its own whose text
# contains the decision. So the decision is found on every equation of the finished
# program that comes from it: also after autodiff, in the bodies of loops, and in
# programs that `jax.jit` had traced before. Without `mpx.explain` nothing is noted, at
# no cost; a program that was traced without notes is traced again.

RESULT = "a result keeps its declared dtype"
CARRY = "a loop's carry keeps its declared dtype"
USED = "its uses read half precision"
KERNELS = "several kernels read it"


@dataclasses.dataclass(frozen=True)
class Note:
    """The decision on an equation, attached to each equation emitted for it.

    Attributes:
        primitive: The primitive of the original equation.
        kind: The class of the primitive: `half`, `full`, ...
        precision: The chosen precision: `half`, `full` or `declared`.
        reason: The reason, in words.
        weight: The path of a quantized product's weight; "" for other operations.
        rule: The user's rule that was applied, or "".
        legs: How a quantized product is computed: `legs_of`; empty for others.
        platform: The platform of the target device, if it is known.
    """

    primitive: str
    kind: str
    precision: str
    reason: str
    weight: str = ""
    rule: str = ""
    legs: Mapping[Leg, LegPath] = dataclasses.field(default_factory=dict, hash=False)
    platform: str = ""

    @property
    def slow_leg(self) -> Leg | None:
        """The first quantized leg that uses no low-precision units, or None."""
        return next((leg for leg, one in self.legs.items() if not one.format), None)

    @property
    def is_switched_off(self) -> bool:
        """Whether it is in a region with `enabled=False`."""
        return self.reason == Reason.REGION.value


@contextlib.contextmanager
def taking_notes() -> Iterator[list[str]]:
    """Makes autocast write notes on what it emits, in this thread.

    Yields the list of the user's rules that matched no operation.
    """
    unused: list[str] = []
    with with_unkeyed(unused_rules=unused), with_ambient(takes_notes=True):
        yield unused


def note_unused(rules: Iterable[Rule]) -> None:
    """Notes rules that matched no operation, if notes are taken."""
    unused = unkeyed().unused_rules
    if unused is not None:
        unused += [text for rule in rules if (text := str(rule)) not in unused]


def noted(
    primitive: str,
    choice: Choice,
    weight: str = "",
    legs: Mapping[Leg, LegPath] | None = None,
    platform: str = "",
) -> contextlib.AbstractContextManager[object]:
    """Returns a context that attaches a decision to what is emitted inside."""
    if not ambient().takes_notes:
        return contextlib.nullcontext()
    kind = choice.kind.value
    rule = "" if choice.rule is None else str(choice.rule)
    reason = choice.reason.value
    if choice.detail:
        reason = f"{reason}; {choice.detail}"
    precision = choice.precision.value
    facts = primitive, kind, precision, reason, weight, rule, legs or {}, platform
    return _write(Note(*facts))


def noted_cast(reason: str) -> contextlib.AbstractContextManager[object]:
    """Returns a context that notes a cast back to a declared dtype."""
    if not ambient().takes_notes:
        return contextlib.nullcontext()
    return _write(Note("convert_element_type", "convert", "declared", reason))


@dataclasses.dataclass(frozen=True)
class IslandNote:
    """The memory that recomputing an island saves.

    Attributes:
        before: The bytes of residuals that autodiff would save for it.
        after: The bytes of residuals that are saved.
        name: A unique name.
    """

    before: int
    after: int
    # JAX compares scopes as strings: islands that save the same would be taken for one.
    name: str = dataclasses.field(default_factory=lambda: uuid.uuid4().hex)


def noted_island(note: IslandNote) -> contextlib.AbstractContextManager[object]:
    """Returns a context that marks what is emitted inside as a recomputed island."""
    return _write(note)


def _write(note: Note | IslandNote) -> contextlib.AbstractContextManager[object]:
    parts = map(str, dataclasses.astuple(note))
    return data_scope(f"mpx:{'!'.join(parts)}", note)


_SCALING = "the loss is scaled here"


def noted_scaling() -> contextlib.AbstractContextManager[object]:
    """Returns a context that marks what is computed inside as the scaled loss."""
    if not ambient().takes_notes:
        return contextlib.nullcontext()
    return data_scope("mpx-loss-scaling", _SCALING)


def is_scaling_note(scope: str) -> bool:
    """Returns whether the name of a scope marks a scaled loss."""
    return data_of(scope, str) == _SCALING


def read_note(scope: str) -> Note | IslandNote | None:
    """Returns the note that the name of a scope carries, or None."""
    return data_of(scope, Note) or data_of(scope, IslandNote)


# --- Strict mode ----------------------------------------------------------------------
#
# In strict mode, accidental behaviour is an error, and so is an unknown primitive.

_CALL = "`mpx.autocast(..., strict=True)`"


def refuse_unknown(case: Case, choice: Choice) -> None:
    """Raises if mpx does not know the primitive."""
    if choice.reason is Reason.UNKNOWN:
        raise NotImplementedError(
            f"{_CALL} found the unknown primitive `{case.name}`{case.where}. Pass a "
            "rule for it in `rules=`: `mpx.Rule(mpx.Precision.DECLARED, "
            f'primitive="{case.name}")` leaves it as written.'
        )


def refuse_slow(case: Case, product: AbstractProduct) -> None:
    """Raises if a quantized leg of a product is emulated on the target device."""
    for leg, (path, why, _) in legs_of(product).items():
        if Path(path) not in UNITS:
            of = "" if leg is Leg.FORWARD else f"{leg.value} of the "
            raise ValueError(
                f"{_CALL}: the {of}matmul{case.where} is not computed on the device's "
                f"low-precision units, but {path}: {why}. Use another recipe, keep the "
                "matmul in half precision (`mpx.Rule(mpx.Precision.HALF, ...)`), or "
                "omit `strict`."
            )


# Rules that matched an operation in some function, or were warned about.
_known: weakref.WeakSet[Rule] = weakref.WeakSet()


def warn_of_unused(rules: Rules, used: Set[Rule]) -> None:
    """Warns once of a rule whose scope or parameter does not exist, as in a typo.

    Rules that matched in another function are fine: training and evaluation share them.
    A rule with `when` may be about sizes that do not occur here, and one with only a
    primitive applies to any program.
    """
    unused = [
        str(rule)
        for rule in rules.rules
        if rule not in used
        and rule not in _known
        and rule.when is None
        and (rule.scope is not None or rule.parameter is not None)
    ]
    _known.update(rules.rules)
    if unused:
        warn_user(
            "`mpx.autocast(..., rules=...)` has rules that match no operation: "
            f"{listing(unused)}. Is a name misspelled, or does an earlier rule "
            "decide? `mpx.explain(func)(*args)` shows the names of scopes and "
            "parameters. Nothing is wrong if the rule is for another function."
        )


def expect_unused(rule: Rule) -> None:
    """Suppresses the warning for a rule that mpx tries itself."""
    _known.add(rule)


def refuse_unused(rules: Rules, used: Set[Rule]) -> None:
    """Raises if a rule matched no operation."""
    unused = [str(rule) for rule in rules.rules if rule not in used]
    if unused:
        raise ValueError(
            f"{_CALL} has rules that match no operation: {listing(unused)}. See "
            "`mpx.explain(func)(*args)` for names of primitives, scopes and "
            "parameters."
        )
