"""Where what is bad in a run begins.

From the results of a program back through all that is bad, as a run recorded it. It
begins with an operation whose operands are good. It also begins with an operation that
takes a constant that is not finite: the program holds that on purpose, as the -inf of a
mask, and mostly nothing bad comes of it. So such an infinity is *meant*, and an
operation that makes NaN of meant infinities is a beginning of its own: the softmax of a
row that is masked as a whole.

What is compared is not handed on. But where a comparison chooses a constant, NaN in
place of a scale, what is bad about that is what was compared.
"""

import dataclasses
from collections.abc import Iterable, Iterator

import numpy as np

from .._dtypes import full_precision_of
from .._program import PrimitiveClass, properties, reachable
from ._badness import is_number
from ._graph import Graph, Index, Instance, Step, is_same_numbers
from ._record import Seen

Turns = dict[Step, Index]

# How many regions are looked into at once.
_REGIONS = 4


@dataclasses.dataclass(frozen=True)
class Begun:
    """Operations where something bad began, each in its first turn, the first first.

    Attributes:
        made: Those whose operands are good, or whose NaN is of meant infinities.
        given: Those that are given a constant that is not finite.
        held: Constants that are results themselves.
    """

    made: Turns
    given: Turns
    held: list[int]


@dataclasses.dataclass(frozen=True)
class Beginnings:
    """What a program holds and a run of it recorded.

    Attributes:
        graph: The program.
        seen: What the run shows.
        constants: Those of its constants that are not finite; none with a limit, where
            each of them is told anyway.
    """

    graph: Graph
    seen: Seen
    constants: frozenset[int]

    def region(self, ends: Iterable[Instance]) -> set[Step]:
        """The operations where something bad began that reached the ends.

        From values that are known not to be bad to the first that is. Of several such
        regions the first few.
        """
        found: list[set[tuple[Step, Index]]] = []

        def bad_before(end: Instance) -> list[Instance]:
            region, before = self._between(end)
            if region and not before:
                found.append(region)
            return before

        reachable(ends, bad_before)
        found.sort(key=lambda region: max(order(self.graph, *one) for one in region))
        return {step for region in found[:_REGIONS] for step, _ in region}

    def _between(self, end: Instance) -> tuple[set[tuple[Step, Index]], list[Instance]]:
        """The operations from values that are known to one, and the bad ones of these.

        Those that only move numbers are none of them.
        """
        region: set[tuple[Step, Index]] = set()
        before: list[Instance] = []

        def unknown_before(one: Instance) -> Iterable[Instance]:
            value, index = one
            step = self.graph.makers.get(value)
            bad = None if step is None else self.seen.bad(step, index)
            if bad is not None and value not in bad:
                return ()
            if bad is not None and one != end:
                before.append(one)
                return ()
            if step is not None and not is_same_numbers(step):
                region.add((step, index))
            return self.graph.origins(value, index)

        reachable([end], unknown_before)
        return region, before

    def of(self, ends: Iterable[Instance]) -> Begun:
        """Where what is bad about some values began."""
        graph = self.graph
        made: list[tuple[Step, Index]] = []
        given: list[tuple[Step, Index]] = []
        held: list[int] = []

        def bad_origins(one: Instance) -> Iterable[Instance]:
            value, index = one
            step = graph.makers.get(value)
            bad = None if step is None else self.seen.bad(step, index)
            if bad is not None and value not in bad:
                return ()
            if value in graph.leaves:
                return self._of_branches(one, held)
            if value in self.constants:
                held.append(value)
            if step is None or bad is None or not self.seen.is_of_region(step):
                return graph.origins(value, index)
            computed, is_given = self._bad_operands(one, step, bad)
            if computed and not self._is_of_meant(one, step, computed):
                return computed
            operands = [(v, index) for v in step.operands]
            before = [] if computed else self._compared(operands)
            if not before:
                (given if is_given and not computed else made).append((step, index))
            return before

        reachable(ends, bad_origins)
        return Begun(self._first(made), self._first(given), held)

    def meant_by(self, step: Step, index: Index) -> Step | None:
        """The operation that was given the infinity of which another one makes NaN."""
        bad = self.seen.bad(step, index) or set()
        nan = self.seen.nan(step, index)
        operands = [(v, index) for v in step.operands if v in bad]
        if nan.isdisjoint(step.results) or not nan.isdisjoint(step.operands):
            return None
        return next((s for s in self.of(operands).given if s is not step), None)

    def constant_of(self, step: Step, index: Index) -> int | None:
        """The constant that made the result of an operation bad; None if none did.

        Of one that chooses it is not the constant, which was there to be chosen.
        """
        bad = self.seen.bad(step, index) or set()
        operands = [(v, index) for v in step.operands if v in bad]
        sources = [self._source(one) for one in operands]
        if step.primitive == "select_n" or not self.constants.issuperset(sources):
            return None
        return next(iter(sources), None)

    def _first(self, found: Iterable[tuple[Step, Index]]) -> Turns:
        turns: Turns = {}
        for step, index in sorted(found, key=lambda one: order(self.graph, *one)):
            turns.setdefault(step, index)
        return turns

    def _bad_operands(
        self, one: Instance, step: Step, bad: set[int]
    ) -> tuple[list[Instance], bool]:
        """The bad operands that were computed, and whether others are constants."""
        reached = [origin for origin in self.graph.origins(*one) if origin[0] in bad]
        computed = [origin for origin in reached if not self._is_constant(origin)]
        return computed, len(computed) < len(reached)

    def _source(self, one: Instance) -> int:
        """The first value before operations that hand on what they are given."""
        while True:
            step = self.graph.makers.get(one[0])
            origins = list(self.graph.origins(*one))
            if len(origins) != 1 or (step is not None and not _is_handed_on(step)):
                return one[0]
            (one,) = origins

    def _is_constant(self, one: Instance) -> bool:
        """Whether an instance holds the numbers of a constant that is not finite."""
        return self._source(one) in self.constants

    def _is_of_meant(self, one: Instance, step: Step, bad: list[Instance]) -> bool:
        """Whether an operation made NaN, and of nothing but meant infinities."""
        value, index = one
        nan = self.seen.nan(step, index)
        if value not in nan or any(v in nan for v, _ in bad):
            return False
        return all(map(self._is_meant, bad))

    def _is_meant(self, one: Instance) -> bool:
        """Whether what is bad about an instance are infinities of constants."""
        others: list[Instance] = []
        given: list[Instance] = []

        def origins_of(one: Instance) -> Iterable[Instance]:
            value, index = one
            step = self.graph.makers.get(value)
            if step is None:
                (given if value in self.constants else []).append(one)
                return self.graph.origins(value, index)
            bad = self.seen.bad(step, index)
            if bad is not None and value not in bad:
                return ()
            known = bad is not None and self.seen.is_of_region(step)
            if bad is None and is_same_numbers(step):
                return self.graph.origins(value, index)
            if bad is None or not known or value in self.seen.nan(step, index):
                others.append(one)
                return ()
            computed, is_given = self._bad_operands(one, step, bad)
            if is_given:
                given.append(one)
            elif not computed:
                others.append(one)
            return computed

        reachable([one], origins_of)
        return bool(given) and not others

    def _of_branches(self, one: Instance, held: list[int]) -> list[Instance]:
        """Where what a branch or a loop gives comes from.

        Constants that it gives are added to `held`, unless what chose them is bad.
        """
        origins = list(self.graph.origins(*one))
        constants = [self._source(o) for o in origins if self._is_constant(o)]
        before = self._compared(origins) if constants else []
        if not before:
            held += constants
        return [*origins, *before]

    def _compared(self, operands: Iterable[Instance]) -> list[Instance]:
        """What is bad of the numbers that those operands come from that are none.

        Those of a comparison that chooses, or bits.
        """
        graph, seen = self.graph, self.seen
        found: list[Instance] = []

        def origins_of(one: Instance) -> Iterator[Instance]:
            value, index = one
            step = graph.makers.get(value)
            bad = None if step is None else seen.bad(step, index)
            for origin in graph.origins(value, index):
                if not is_number(graph.aval(origin[0])):
                    yield origin
                elif bad is not None and origin[0] in bad:
                    found.append(origin)

        reachable([o for o in operands if not is_number(graph.aval(o[0]))], origins_of)
        meant = (one for one in found if self._is_constant(one) or self._is_meant(one))
        return list(set(found).difference(meant))


def order(graph: Graph, step: Step, index: Index) -> tuple[bool, tuple[int, ...]]:
    """What is bad in the forward pass comes before what is in the backward pass."""
    is_backward = graph.forward.isdisjoint(step.results)
    return is_backward, step.order(index)


def large_constants(graph: Graph, above: float | None) -> Iterator[int]:
    """The constants of a program that are not finite, or above a limit.

    Without those that are only compared.
    """
    for value, array in graph.constants.items():
        aval = graph.aval(value)
        if not is_number(aval):
            continue
        wide = np.asarray(array, full_precision_of(aval.dtype))
        limit = np.finfo(wide.dtype).max if above is None else above
        if not np.all(np.abs(wide) <= limit) and not _is_compared(graph, value):
            yield value


def _is_compared(graph: Graph, value: int) -> bool:
    """Whether nothing but truth values and integers are made of a value."""
    if value in graph.held or value in graph.outputs:
        return False
    made = [(s, v) for s in graph.users.get(value, ()) for v in s.results]
    return bool(made) and all(
        _is_compared(graph, v) if is_same_numbers(s) else not is_number(graph.aval(v))
        for s, v in made
    )


def _is_handed_on(step: Step) -> bool:
    """Whether an operation gives the numbers that it takes, cast perhaps."""
    is_cast = properties(step.primitive).kind is PrimitiveClass.CONVERT
    return is_cast or is_same_numbers(step)
