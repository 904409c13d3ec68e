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
import dataclasses
import uuid
import weakref
from collections.abc import Iterable, Iterator, Set

from .._ambient_record import ambient, unkeyed, with_ambient, with_unkeyed
from .._errors import listing, warn_user
from .._program import data_of, data_scope
from .._quantize import UNITS, AbstractProduct, Path, path_of
from .._rules import Rule, Rules
from ._decide import Case, Choice, Reason

RESULT = "a result keeps its declared dtype"
CARRY = "a loop's carry keeps its declared dtype"
USED = "its uses read half precision"


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
        path: Of a quantized product how it is computed, as `path_of` says; else "".
        formats: What it is multiplied in, and its derivatives: `formats_of`.
        platform: That of the device that is compiled for, where it is known.
    """

    primitive: str
    kind: str
    precision: str
    reason: str
    weight: str = ""
    rule: str = ""
    path: str = ""
    formats: tuple[str, str] = ("", "")
    platform: str = ""

    @property
    def without_units(self) -> bool:
        """Whether it is quantized, and no units multiply it: see `formats_of`."""
        return bool(self.path) and not self.formats[0]

    @property
    def is_emulated(self) -> bool:
        """Whether it is computed as on a CPU."""
        return self.path == Path.EMULATED.value

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
    with with_unkeyed(unused_rules=unused), with_ambient(takes_notes=True):
        yield unused


def note_unused(rules: Iterable[Rule]) -> None:
    """Notes rules that held for no operation, if somebody takes notes."""
    unused = unkeyed().unused_rules
    if unused is not None:
        unused += [text for rule in rules if (text := str(rule)) not in unused]


def noted(
    primitive: str,
    choice: Choice,
    weight: str = "",
    path: str = "",
    formats: tuple[str, str] = ("", ""),
    platform: str = "",
) -> contextlib.AbstractContextManager[object]:
    """What is emitted inside was decided so."""
    if not ambient().takes_notes:
        return contextlib.nullcontext()
    kind = choice.kind.value
    rule = "" if choice.rule is None else str(choice.rule)
    reason = choice.reason.value
    if choice.detail:
        reason = f"{reason}; {choice.detail}"
    precision = choice.precision.value
    told = primitive, kind, precision, reason, weight, rule, path, formats, platform
    note = Note(*told)
    return _write(note)


def noted_cast(reason: str) -> contextlib.AbstractContextManager[object]:
    """What is emitted inside casts back to a dtype that the program declares."""
    if not ambient().takes_notes:
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


def noted_island(note: IslandNote) -> contextlib.AbstractContextManager[object]:
    """What is emitted inside is an island that is recomputed."""
    return _write(note)


def _write(note: Note | IslandNote) -> contextlib.AbstractContextManager[object]:
    parts = map(str, dataclasses.astuple(note))
    return data_scope(f"mpx:{'!'.join(parts)}", note)


_SCALING = "the loss is scaled here"


def noted_scaling() -> contextlib.AbstractContextManager[object]:
    """What is computed inside is the scaled loss."""
    if not ambient().takes_notes:
        return contextlib.nullcontext()
    return data_scope("mpx-loss-scaling", _SCALING)


def is_scaling_note(scope: str) -> bool:
    """Whether the name of a scope says that a loss is scaled there."""
    return data_of(scope, str) == _SCALING


def read_note(scope: str) -> Note | IslandNote | None:
    """The note that the name of a scope carries, if it does."""
    return data_of(scope, Note) or data_of(scope, IslandNote)


# --- Strict mode ----------------------------------------------------------------------

_CALL = "`mpx.autocast(..., strict=True)`"


def refuse_unknown(case: Case, choice: Choice) -> None:
    """Raises for a primitive that mpx does not know."""
    if choice.reason is Reason.UNKNOWN:
        raise NotImplementedError(
            f"{_CALL} found the unknown primitive `{case.name}`{case.where}. Pass a "
            "rule for it in `rules=`: `mpx.Rule(mpx.Precision.DECLARED, "
            f'primitive="{case.name}")` leaves it as written.'
        )


def refuse_slow(case: Case, product: AbstractProduct) -> None:
    """Raises where a recipe is emulated on the device that is compiled for."""
    path, why = path_of(product)
    if Path(path) not in UNITS:
        raise ValueError(
            f"{_CALL}: the matmul{case.where} is not computed on the device's "
            f"low-precision units, but {path}: {why}. Use another recipe, keep the "
            "matmul in half precision (`mpx.Rule(mpx.Precision.HALF, ...)`), or "
            "omit `strict`."
        )


# Rules that held for an operation somewhere, or were warned of.
_known: weakref.WeakSet[Rule] = weakref.WeakSet()


def warn_of_unused(rules: Rules, used: Set[Rule]) -> None:
    """Warns once of a rule whose scope or parameter is nowhere, as in a typo.

    Rules that held in another function are fine: training and evaluation share them.
    One with `when` may be about sizes that are not here, and one with a primitive only
    is about whatever program comes.
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
    """Nobody is warned of this rule: it is tried, and not the user's."""
    _known.add(rule)


def refuse_unused(rules: Rules, used: Set[Rule]) -> None:
    """Raises for rules that held for no operation."""
    unused = [str(rule) for rule in rules.rules if rule not in used]
    if unused:
        raise ValueError(
            f"{_CALL} has rules that match no operation: {listing(unused)}. See "
            "`mpx.explain(func)(*args)` for names of primitives, scopes and "
            "parameters."
        )
