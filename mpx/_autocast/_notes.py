"""What autocast says of what it decides: notes for who asks, errors if it is strict.

While somebody takes notes, each emitted equation stands in a named scope of its own,
whose text says what was decided. So the decision is found in the finished program, on
every equation that came of it: also in what autodiff made of it, in the bodies of
loops, and in programs that `jax.jit` had traced before. Without `mpx.explain` nothing
is noted and nothing is spent on it; a program that was traced without notes is traced
anew.

In strict mode what happens by accident, or without mpx knowing it, is an error.
"""

import contextlib
import contextvars
import dataclasses
import uuid
from collections.abc import Iterable, Iterator

import jax
from jax.extend.core import Jaxpr, JaxprEqn

from .._errors import describe, listing
from .._program import (
    PrimitiveClass,
    aval_of,
    count,
    cut_axes,
    data_of,
    data_scope,
    properties,
    source_span,
)
from .._quantize import AbstractProduct, Path, path_of
from .._rules import Rule, Rules
from .._settings import is_tracing
from .._typing import AnyArray
from ._context import FULL, Place, Run, Value, is_castable
from ._decide import Case, Choice, Reason

_taking = jax.make_user_context(default_value=False)

# No context of JAX: a list that grows is no key of its caches.
# The rules that held for no operation, while somebody takes notes in this thread.
_unused: contextvars.ContextVar[list[str] | None] = contextvars.ContextVar(
    "unused", default=None
)

RESULT = "a result keeps its declared dtype"
CARRY = "what a loop carries keeps its declared dtype"
USED = "what uses it takes half precision"


@dataclasses.dataclass(frozen=True)
class Note:
    """What was decided for the equation that another one was emitted for.

    Attributes:
        primitive: The primitive of the equation as it was written.
        kind: The class of the primitive: `half`, `full`, ...
        precision: What was chosen: `half`, `full` or `declared`.
        reason: Why, in words.
        weight: Of a quantized product, the path of its weight; "" of others.
        rule: The rule of the user's that was applied; "" if none was.
        without_units: Whether it is a quantized product that the target computes in
            half precision, as it has no units for it.
    """

    primitive: str
    kind: str
    precision: str
    reason: str
    weight: str = ""
    rule: str = ""
    without_units: bool = False

    @property
    def is_switched_off(self) -> bool:
        """Whether it stands in a region that the user switched off."""
        return self.reason == Reason.REGION.value


@contextlib.contextmanager
def taking_notes() -> Iterator[list[str]]:
    """In this thread, autocast writes notes on what it emits.

    Gives the list to which it adds the user's rules that held for no operation.
    """
    unused: list[str] = []
    token = _unused.set(unused)
    try:
        with _taking(True):
            yield unused
    finally:
        _unused.reset(token)


def is_taking_notes() -> bool:
    """Whether somebody takes notes here."""
    return _taking.value


def note_unused(rules: Iterable[Rule]) -> None:
    """Notes rules that held for no operation, if somebody takes notes."""
    unused = _unused.get()
    if unused is not None:
        unused += [text for rule in rules if (text := str(rule)) not in unused]


def noted(
    primitive: str, choice: Choice, weight: str = "", without_units: bool = False
) -> contextlib.AbstractContextManager[object]:
    """What is emitted inside was decided so."""
    if not _taking.value:
        return contextlib.nullcontext()
    kind = "unknown" if choice.kind is None else choice.kind.value
    rule = "" if choice.rule is None else str(choice.rule)
    reason = choice.reason.value
    if choice.detail:
        reason = f"{reason}; {choice.detail}"
    precision = choice.precision.value
    return _write(Note(primitive, kind, precision, reason, weight, rule, without_units))


def noted_cast(reason: str) -> contextlib.AbstractContextManager[object]:
    """What is emitted inside casts back to a dtype that the program declares."""
    if not _taking.value:
        return contextlib.nullcontext()
    return _write(Note("convert_element_type", "convert", "declared", reason))


@dataclasses.dataclass(frozen=True)
class IslandNote:
    """What recomputing an island saves.

    Attributes:
        before: The bytes that autodiff would keep of it.
        after: Those that are kept.
        name: Sets it apart from others.
    """

    before: int
    after: int
    # JAX compares scopes as texts: two islands that save the same would be one.
    name: str = dataclasses.field(default_factory=lambda: uuid.uuid4().hex)


def noted_island(
    note: IslandNote | None,
) -> contextlib.AbstractContextManager[object]:
    """What is emitted inside is an island that is recomputed."""
    return contextlib.nullcontext() if note is None else _write(note)


def _write(note: Note | IslandNote) -> contextlib.AbstractContextManager[object]:
    parts = map(str, dataclasses.astuple(note))
    return data_scope(f"mpx:{'!'.join(parts)}", note)


_SCALING = "the loss is scaled here"


def noted_scaling() -> contextlib.AbstractContextManager[object]:
    """What is computed inside is the scaled loss."""
    if not _taking.value:
        return contextlib.nullcontext()
    return data_scope("mpx-loss-scaling", _SCALING)


def is_scaling_note(scope: str) -> bool:
    """Whether the name of a scope says that a loss is scaled there."""
    return data_of(scope, str) == _SCALING


def read_note(scope: str) -> Note | IslandNote | None:
    """The note that the name of a scope carries, if it does."""
    return data_of(scope, Note) or data_of(scope, IslandNote)


# --- Functions that compute in float16 ------------------------------------------------

_float16_calls: contextvars.ContextVar[list[None] | None] = contextvars.ContextVar(
    "float16_calls", default=None
)


@contextlib.contextmanager
def noting_float16() -> Iterator[list[None]]:
    """Gives a list that is empty unless functions called inside compute in float16."""
    found: list[None] = []
    token = _float16_calls.set(found)
    try:
        yield found
    finally:
        _float16_calls.reset(token)


def note_float16() -> None:
    """What is called here computes in float16."""
    found = _float16_calls.get()
    if found is not None:
        found.append(None)


# --- Gradients that a recipe has seen -------------------------------------------------

# Arrays that an autocast function was called with: along how many first axes scans cut
# each, if recipes have seen its gradient.
SeenNotes = list[tuple[AnyArray, int | None]]

_seen: contextvars.ContextVar[SeenNotes | None] = contextvars.ContextVar(
    "seen", default=None
)

# In `Run.used`, before an equation and the operand whose gradient a recipe sees there,
# which is None if it sees none.
_DECIDED = "what reads a weight"


@contextlib.contextmanager
def noting_seen() -> Iterator[SeenNotes]:
    """A call of an autocast function notes whose gradients recipes have seen.

    They have where nothing reads an argument but quantized products that make its
    gradient NaN as a whole (`spreads_nan`), so that nobody need read it to find out
    whether it is finite. The call must be all that reads its arguments.
    """
    found: SeenNotes = []
    token = _seen.set(found)
    try:
        yield found
    finally:
        _seen.reset(token)


def is_asked_for_seen() -> bool:
    """Whether a call here notes what is seen: none within another one does."""
    return _seen.get() is not None and not is_tracing()


def note_product(run: Run, case: Case, product: AbstractProduct) -> None:
    """Notes that a product is quantized, where somebody asks."""
    if not case.settings.asks_seen:
        return
    weights = [v.facts.is_weight for v in case.operands[:2]]
    sees = product.spreads_nan and sum(weights) == 1
    weight = weights.index(True) if sees else None
    run.used.add((_DECIDED, case.equation, weight))


def note_other(run: Run, place: Place, equation: JaxprEqn) -> None:
    """Notes that a product, or the program in an equation, is not, where it might be.

    One program may stand in several places, and what one leaves alone another one
    quantizes: then nothing is seen there.
    """
    known = properties(equation.primitive.name)
    is_asked = known.is_quantizable or known.kind is PrimitiveClass.RECURSE
    if place.settings.asks_seen and is_asked:
        run.used.add((_DECIDED, equation, None))


def note_seen(run: Run, jaxpr: Jaxpr, values: Iterable[Value]) -> None:
    """Notes of the arguments of a call how they were seen, where somebody asks.

    Args:
        run: The run, when the call has been emitted.
        jaxpr: Its program, as it was written.
        values: Its arguments.
    """
    found = _seen.get()
    if found is None or not run.settings.asks_seen:
        return
    tuples = (one for one in run.used if isinstance(one, tuple))
    decided = [one[1:] for one in tuples if one[0] == _DECIDED]
    weights = dict(decided) | {equation: None for equation, w in decided if w is None}
    axes = cut_axes(jaxpr, weights)
    found[:] = [(v.array, n) for v, n in zip(values, axes, strict=True)]


def seen_of(notes: SeenNotes, arrays: Iterable[AnyArray]) -> list[int | None]:
    """What was noted of arrays; None of those that no call was given, or twice.

    By identity: whatever made another array of one may have read more of it.
    """
    found: dict[int, int | None] = {}
    for array, axes in notes:
        found[id(array)] = None if id(array) in found else axes
    return [found.get(id(array)) for array in arrays]


# --- Strict mode ----------------------------------------------------------------------

_CALL = "`mpx.autocast(..., strict=True)`"


def refuse_unknown(case: Case, choice: Choice) -> None:
    """Raises for a primitive that mpx does not know."""
    if choice.reason is Reason.UNKNOWN:
        raise NotImplementedError(
            f"{_CALL} met the primitive `{case.name}`{case.where}, which it "
            "does not know. Say what to do with it in `rules=`: "
            f'`mpx.Rule(mpx.Precision.DECLARED, primitive="{case.name}")` leaves it as '
            "it was written."
        )


def refuse_accident(case: Case, choice: Choice) -> None:
    """Raises where something small makes a half precision value float32.

    Small is what is less than the result: a scalar, a bias. A residual stream is not.
    """
    if choice.dtype != FULL or choice.rule is not None:
        return
    if not _was_upcast_here(case):
        return
    culprit = next(v for v in case.operands if v.upcast_equation is None)
    half = case.settings.dtype.name
    raise ValueError(
        f"{_CALL}: `{case.name}`{case.where} makes a half precision value "
        f"float32, because of {describe(culprit.array)}. Write that operand as a "
        f"Python number, or cast it to {half}; if float32 is what you want, cast the "
        'other operand: `x.astype("float32")`.'
    )


def _was_upcast_here(case: Case) -> bool:
    """Whether JAX's promotion cast an operand for the sake of a small one.

    The cast and the operation then come from one expression of the program.
    """
    widened = [
        v.upcast_equation for v in case.castable if v.upcast_equation is not None
    ]
    others = [v for v in case.castable if v.upcast_equation is None]
    size = max((count(aval_of(v).shape) for v in case.equation.outvars), default=0)
    if not widened or not others or not is_castable(aval_of(case.equation.outvars[0])):
        return False
    if any(count(v.array.shape) == size for v in others):
        return False
    here = source_span(case.equation)
    return here is not None and all(source_span(cast) == here for cast in widened)


def refuse_slow(case: Case, product: AbstractProduct) -> None:
    """Raises where a recipe is emulated on the device that is compiled for."""
    path, why = path_of(product)
    if Path(path) not in (Path.FP8_UNITS, Path.BLOCK_UNITS):
        raise ValueError(
            f"{_CALL}: the product{case.where} is not computed on the "
            f"device's units of low precision, but {path}: {why}. Choose another "
            "recipe, leave the product in half precision "
            "(`mpx.Rule(mpx.Precision.HALF, ...)`), or leave `strict` out."
        )


def refuse_unused(rules: Rules, used: set[object]) -> None:
    """Raises for rules that held for no operation."""
    unused = [str(rule) for rule in rules.rules if rule not in used]
    if unused:
        raise ValueError(
            f"{_CALL} has rules that hold for no operation: {listing(unused)}. Look at "
            "`mpx.explain(func)(*args)` for names of primitives, scopes and parameters."
        )
