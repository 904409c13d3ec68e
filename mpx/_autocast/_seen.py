"""Which gradients a recipe has seen: those of weights that only its products read.

Where a product has one scale for each array, the amaxes of data and gradient say
whether the gradient of the weight is finite (`mpx._quantize`), and nobody need read it
again. That holds of the gradient of an argument if all that reads the argument is such
products. What reads it stands in the program as it was written; which products are
quantized is known when they are emitted, and noted then.

A product is noted by its equation. One program may stand in several places, where
different things are decided: then nothing in it is seen.
"""

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn

from .._jax_compat import scan_counts
from .._program import (
    BackwardFlow,
    PrimitiveClass,
    aval_of,
    backward,
    properties,
    sub_jaxprs,
)
from .._quantize import AbstractProduct
from .._settings import is_tracing
from .._typing import AnyArray
from ._context import Place, Run, Value
from ._decide import Case

# Their programs read what the equation reads, once, and have no derivative of their
# own.
_ENTERED = frozenset({"jit", "pjit", "closed_call", "checkpoint", "remat2", "cond"})
# float16 ends at 65504: what is finite elsewhere may overflow in it.
_WIDE = (np.dtype(jnp.bfloat16), np.dtype(np.float32))


class SeenNotes:
    """What an autocast function noted of the arrays that it was called with.

    For each whether recipes have seen its gradient: along how many of its first axes
    scans cut it, so that each piece is the weight of products of its own; None if
    anything else reads it.
    """

    def __init__(self) -> None:
        """Starts with none."""
        # By identity: whatever made another array of one may have read more of it.
        self._noted: dict[int, tuple[AnyArray, int | None]] = {}

    def put(self, pairs: Iterable[tuple[AnyArray, int | None]]) -> None:
        """Notes all arrays of a call."""
        self._noted = {}
        for array, axes in pairs:
            _, before = self._noted.get(id(array), (array, axes))
            self._noted[id(array)] = array, axes if axes == before else None

    def of(self, leaves: Iterable[AnyArray]) -> list[int | None]:
        """What was noted of each of these arrays; None of others."""
        return [self._noted.get(id(leaf), (leaf, None))[1] for leaf in leaves]


# No context of JAX: a list that grows is no key of its caches.
_notes: contextvars.ContextVar[SeenNotes | None] = contextvars.ContextVar(
    "seen", default=None
)


@contextlib.contextmanager
def noting_seen() -> Iterator[SeenNotes]:
    """A call of an autocast function notes which of its arguments are seen.

    The call must be all that reads them.
    """
    notes = SeenNotes()
    token = _notes.set(notes)
    try:
        yield notes
    finally:
        _notes.reset(token)


def is_asked_for_seen() -> bool:
    """Whether a call here notes what is seen: none within another one does."""
    return _notes.get() is not None and not is_tracing()


# --- What was decided -----------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Decided:
    """What was decided for an equation; in `Run.used`.

    Attributes:
        equation: A product, or what holds a program, as it was written.
        weight: The operand whose gradient a recipe sees; None if it sees none.
    """

    equation: JaxprEqn
    weight: int | None


def note_product(run: Run, case: Case, product: AbstractProduct) -> None:
    """Notes that a product is quantized, where somebody asks."""
    if not case.settings.asks_seen:
        return
    weights = [v.facts.is_weight for v in case.operands[:2]]
    sees = product.spreads_nan and sum(weights) == 1
    weight = weights.index(True) if sees else None
    run.used.add(Decided(case.equation, weight))


def note_other(run: Run, place: Place, equation: JaxprEqn) -> None:
    """Notes that a product, or the program in an equation, is not, where it might be.

    Another place may have the same one, and decide otherwise.
    """
    known = properties(equation.primitive.name)
    is_asked = known.is_quantizable or known.kind is PrimitiveClass.RECURSE
    if place.settings.asks_seen and is_asked:
        run.used.add(Decided(equation, None))


# --- What reads an argument -----------------------------------------------------------


class _Readers(NamedTuple):
    """What reads a value.

    Attributes:
        axes: Along how many of its first axes scans cut it on its way to products of
            which it is the weight.
        are_others: Whether anything else reads it.
    """

    axes: frozenset[int] = frozenset()
    are_others: bool = False


_OTHERS = _Readers(are_others=True)


class _ReadersFlow(BackwardFlow[_Readers]):
    """What reads values, from what reads the results of their users."""

    def __init__(self, used: set[object]) -> None:
        """Starts with what was decided: see `Run.used`."""
        decided = [one for one in used if isinstance(one, Decided)]
        self._weights = {one.equation: one.weight for one in decided}
        others = {one.equation for one in decided if one.weight is None}
        # In one place so and in another one otherwise.
        self._weights |= dict.fromkeys(others)

    @property
    def nothing(self) -> _Readers:
        """Nobody reads it."""
        return _Readers()

    def join(self, a: _Readers, b: _Readers) -> _Readers:
        """What reads it in two places."""
        return _Readers(a.axes | b.axes, a.are_others or b.are_others)

    def operands(
        self, equation: JaxprEqn, results: Sequence[_Readers]
    ) -> Sequence[_Readers]:
        """What reads the operands of any equation."""
        name = equation.primitive.name
        if equation in self._weights:
            return self.transfer(equation, results)
        if name in _ENTERED:
            return super().operands(equation, results)
        if name == "scan":
            return self._of_scan(equation, results)
        if sub_jaxprs(equation):
            return [_OTHERS] * len(equation.invars)
        return self.transfer(equation, results)

    def transfer(
        self, equation: JaxprEqn, results: Sequence[_Readers]
    ) -> Sequence[_Readers]:
        """What reads the operands of an operation."""
        if equation in self._weights:
            found = [_OTHERS] * len(equation.invars)
            weight = self._weights[equation]
            if weight is not None:
                found[weight] = _Readers(frozenset({0}))
            return found
        name = equation.primitive.name
        if name == "convert_element_type":
            dtypes = {aval_of(equation.invars[0]).dtype, equation.params["new_dtype"]}
            return [results[0] if dtypes.issubset(_WIDE) else _OTHERS]
        # What scans cut has its first axes still.
        if properties(name).rearranges and results[0].axes <= {0}:
            return [results[0]] + [_OTHERS] * (len(equation.invars) - 1)
        return [_OTHERS] * len(equation.invars)

    def _of_scan(
        self, equation: JaxprEqn, results: Sequence[_Readers]
    ) -> list[_Readers]:
        found = list(super().operands(equation, results))
        n_consts, n_carry = scan_counts(equation.params)
        for i, readers in enumerate(found):
            if n_consts <= i < n_consts + n_carry:
                found[i] = _OTHERS
            elif i >= n_consts + n_carry:
                axes = frozenset(axis + 1 for axis in readers.axes)
                found[i] = readers._replace(axes=axes)
        return found


def note_seen(used: set[object], jaxpr: Jaxpr, values: Sequence[Value]) -> None:
    """Notes which arguments of a call are seen.

    Args:
        used: `Run.used`, when the call has been emitted.
        jaxpr: Its program, as it was written.
        values: Its arguments.
    """
    notes = _notes.get()
    if notes is None:
        return
    readers = backward(jaxpr, [_OTHERS] * len(jaxpr.outvars), _ReadersFlow(used))
    pairs = zip(jaxpr.invars, values, strict=True)
    notes.put((value.array, _cut_axes(value, readers.get(v))) for v, value in pairs)


def _cut_axes(value: Value, readers: _Readers | None) -> int | None:
    """What is noted of an argument with these readers."""
    if readers is None or readers.are_others or len(readers.axes) != 1:
        return None
    return next(iter(readers.axes)) if value.dtype in _WIDE else None
