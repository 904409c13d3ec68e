"""Notes on the equations that autocast emits: what was decided, and why.

While somebody takes notes, each emitted equation stands in a named scope of its own,
whose text says what was decided. So the decision is found in the finished program, on
every equation that came of it: also in what autodiff made of it, in the bodies of
loops, and in programs that `jax.jit` had traced before. Without `mpx.explain` nothing
is noted and nothing is spent on it; a program that was traced without notes is traced
anew.
"""

import contextlib
import contextvars
import dataclasses
import uuid
from collections.abc import Iterable, Iterator
from typing import Any

import jax

from ._choice import Choice
from ._rules import Rule

_taking = jax.make_user_context(default_value=False)

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
    """

    primitive: str
    kind: str
    precision: str
    reason: str
    weight: str = ""
    rule: str = ""


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
    primitive: str, choice: Choice, weight: str = ""
) -> contextlib.AbstractContextManager[None]:
    """What is emitted inside was decided so."""
    if not _taking.value:
        return contextlib.nullcontext()
    kind = "unknown" if choice.kind is None else choice.kind.value
    rule = "" if choice.rule is None else str(choice.rule)
    reason = choice.reason.value
    if choice.detail:
        reason = f"{reason}; {choice.detail}"
    precision = choice.precision.value
    return _write(Note(primitive, kind, precision, reason, weight, rule))


def noted_cast(reason: str) -> contextlib.AbstractContextManager[None]:
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
    name: str = dataclasses.field(default_factory=lambda: uuid.uuid4().hex)


class _Scope(str):
    """The name of a scope that is a note: no text of a user's is one."""

    note: Note | IslandNote

    def __new__(cls, note: Note | IslandNote) -> "_Scope":
        parts = map(str, dataclasses.astuple(note))
        self = super().__new__(cls, f"mpx:{'!'.join(parts)}")
        self.note = note
        return self


def noted_island(
    note: IslandNote | None,
) -> contextlib.AbstractContextManager[Any]:
    """What is emitted inside is an island that is recomputed."""
    return contextlib.nullcontext() if note is None else _write(note)


def _write(note: Note | IslandNote) -> contextlib.AbstractContextManager[Any]:
    return jax.named_scope(_Scope(note))


class _ScalingScope(str):
    """The name of the scope in which a loss is scaled: no text of a user's is one."""


def noted_scaling() -> contextlib.AbstractContextManager[Any]:
    """What is computed inside is the scaled loss."""
    if not _taking.value:
        return contextlib.nullcontext()
    return jax.named_scope(_ScalingScope("mpx-loss-scaling"))


def is_scaling_note(scope: str) -> bool:
    """Whether the name of a scope says that a loss is scaled there."""
    return isinstance(scope, _ScalingScope)


def is_note(scope: str) -> bool:
    """Whether the name of a scope is a note, on an equation or on an island."""
    return isinstance(scope, _Scope)


def read_note(scope: str) -> Note | IslandNote | None:
    """The note that the name of a scope is, if it is one."""
    return scope.note if isinstance(scope, _Scope) else None
