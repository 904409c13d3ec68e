"""Finds the operations that made results of a step bad (non-finite, or above a limit).

Inspecting every value of a program costs more than the program. So a first run inspects
a few values that are stored anyway: results of matmuls. That leaves a *region*: the
operations between good values and the first bad one. A second run inspects all of it.

A bad value may be harmless: the root of a negative number that is never used. So
inspecting values does not identify a cause. A value is *cured* (see `_record`), and the
results that are bad then show whether it was the cause.

Bad values are followed back from the results to their *beginning*: an operation whose
operands are good, or one that takes a non-finite constant. Such a constant is in the
program on purpose, as the -inf of a mask, and is mostly harmless: it is *meant*. An
operation that makes NaN of meant infinities is a beginning as well: the softmax of a
row that is masked as a whole.

A comparison does not pass badness on. But where a comparison chooses a constant, such
as NaN instead of a scale, the compared value is the origin.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from ..._base.dtypes import full_precision_of
from ..._program import is_matmul, reachable
from ._blame_report import Range, is_number, range_of
from ._graph import Graph, Index, Instance, Node, Scope, is_copied, is_same_numbers
from ._record import Runs, Seen, is_measured

# --- Beginnings -----------------------------------------------------------------------

Turns = dict[Node, Index]

# The most regions that are inspected at once.
_REGIONS = 4


@dataclasses.dataclass(frozen=True)
class Begun:
    """Operations where bad values begin, each at its first iteration, in order.

    Attributes:
        made: Operations whose operands are good, or that make NaN of meant infinities.
        given: Operations that take a non-finite constant.
        held: Non-finite constants that reach a result without a computation.
    """

    made: Turns
    given: Turns
    held: list[int]


@dataclasses.dataclass(frozen=True)
class Beginnings:
    """Finds the beginnings of bad values in a recorded run.

    Attributes:
        graph: The program.
        seen: The record of the run.
        constants: The non-finite constants of the program; empty with a limit, where
            each of them is reported anyway.
    """

    graph: Graph
    seen: Seen
    constants: frozenset[int]

    def region(self, ends: Iterable[Instance]) -> set[Node]:
        """Returns the operations in which the badness of the ends may begin.

        They are between values known to be good and the first bad one. Of several
        regions, the first `_REGIONS` are returned.
        """
        found: list[set[tuple[Node, Index]]] = []

        def bad_before(end: Instance) -> list[Instance]:
            region, before = self._between(end)
            if region and not before:
                found.append(region)
            return before

        reachable(ends, bad_before)
        found.sort(key=lambda region: max(order(self.graph, *one) for one in region))
        return {step for region in found[:_REGIONS] for step, _ in region}

    def _between(self, end: Instance) -> tuple[set[tuple[Node, Index]], list[Instance]]:
        """Returns the operations from known values to `end`, and the bad known values.

        Operations that only move values are left out.
        """
        region: set[tuple[Node, Index]] = set()
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
        """Returns where the bad values behind `ends` begin."""
        graph = self.graph
        made: list[tuple[Node, Index]] = []
        given: list[tuple[Node, Index]] = []
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

    def meant_by(self, step: Node, index: Index) -> Node | None:
        """Returns the operation that took the infinity of which `step` makes NaN."""
        bad = self.seen.bad(step, index) or set()
        nan = self.seen.nan(step, index)
        operands = [(v, index) for v in step.operands if v in bad]
        if nan.isdisjoint(step.results) or not nan.isdisjoint(step.operands):
            return None
        return next((s for s in self.of(operands).given if s is not step), None)

    def constant_of(self, step: Node, index: Index) -> int | None:
        """Returns the constant that made a result bad; None if no constant did.

        Of `select_n` it is None: its constants are there to be chosen.
        """
        bad = self.seen.bad(step, index) or set()
        operands = [(v, index) for v in step.operands if v in bad]
        sources = [self._source(one) for one in operands]
        if step.primitive == "select_n" or not self.constants.issuperset(sources):
            return None
        return next(iter(sources), None)

    def _first(self, found: Iterable[tuple[Node, Index]]) -> Turns:
        turns: Turns = {}
        for step, index in sorted(found, key=lambda one: order(self.graph, *one)):
            turns.setdefault(step, index)
        return turns

    def _bad_operands(
        self, one: Instance, step: Node, bad: set[int]
    ) -> tuple[list[Instance], bool]:
        """Returns the computed bad operands, and whether there are constants too."""
        reached = [origin for origin in self.graph.origins(*one) if origin[0] in bad]
        computed = [origin for origin in reached if not self._is_constant(origin)]
        return computed, len(computed) < len(reached)

    def _source(self, one: Instance) -> int:
        """Returns the first value before operations that pass on or cast values."""
        while True:
            step = self.graph.makers.get(one[0])
            origins = list(self.graph.origins(*one))
            if len(origins) != 1 or (step is not None and not is_copied(step)):
                return one[0]
            (one,) = origins

    def _is_constant(self, one: Instance) -> bool:
        """Returns whether an instance has the values of a non-finite constant."""
        return self._source(one) in self.constants

    def _is_of_meant(self, one: Instance, step: Node, bad: list[Instance]) -> bool:
        """Returns whether an operation made NaN of meant infinities only."""
        value, index = one
        nan = self.seen.nan(step, index)
        if value not in nan or any(v in nan for v, _ in bad):
            return False
        return all(map(self._is_meant, bad))

    def _is_meant(self, one: Instance) -> bool:
        """Returns whether an instance is bad only by infinities of constants."""
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
        """Returns the origins of a result of a branch or a loop.

        Constants among them are added to `held`, unless a bad value chose them.
        """
        origins = list(self.graph.origins(*one))
        constants = [self._source(o) for o in origins if self._is_constant(o)]
        before = self._compared(origins) if constants else []
        if not before:
            held += constants
        return [*origins, *before]

    def _compared(self, operands: Iterable[Instance]) -> list[Instance]:
        """Returns the bad float values that non-float operands were computed from.

        Such operands are the result of a comparison that chooses, or bits. Meant
        infinities are left out.
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


def order(graph: Graph, step: Node, index: Index) -> tuple[bool, tuple[int, ...]]:
    """Returns a sort key: the forward pass first, then the order of execution."""
    is_backward = graph.forward.isdisjoint(step.results)
    return is_backward, step.order(index)


def large_constants(graph: Graph, above: float | None) -> Iterator[int]:
    """Yields the constants that are non-finite, or above a limit.

    Constants that are only compared are left out.
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
    """Returns whether a value is only used to compute booleans and integers."""
    if value in graph.held or value in graph.outputs:
        return False
    made = [(s, v) for s in graph.users.get(value, ()) for v in s.results]
    return bool(made) and all(
        _is_compared(graph, v) if is_same_numbers(s) else not is_number(graph.aval(v))
        for s, v in made
    )


# --- Search ---------------------------------------------------------------------------

# A program of fewer operations is one region.
# unsure: budgets of time; the corpus of tests/tools/blame needs no more, larger models
# may
_FEW = 40
# The most operations that are tried one by one, and the most causes that are reported.
_TRIED = 16
_NAMED = 4
# The most rounds in which harmless operations are cured to find what is behind them.
_ROUNDS = 4


@dataclasses.dataclass(frozen=True)
class Cause:
    """A value where badness begins.

    Attributes:
        graph: The program.
        step: The operation; None of an input; of a constant the first that uses it.
        value: The number of its first bad result, or of the input or constant.
        made: The ranges of its results, or of the input or constant.
        index: Its iteration in each loop around it.
        results: The positions of its bad results; empty for an input or constant.
        ranges: The ranges of its operands.
        devices: The devices on which it is bad.
        zeros: For values around it, the count of zeros.
        meant_by: If it is NaN of a meant infinity, the operation that took that.
        scope: If it is a constant without a user, the program whose output it is.
    """

    graph: Graph
    step: Node | None
    value: int
    made: tuple[Range, ...]
    index: Index = ()
    results: frozenset[int] = frozenset()
    ranges: tuple[Range, ...] = ()
    devices: tuple[int, ...] = ()
    zeros: dict[int, float] = dataclasses.field(default_factory=dict)
    meant_by: Node | None = None
    scope: Scope | None = None


@dataclasses.dataclass(frozen=True)
class Search:
    """A search for the cause of bad results of a program.

    Attributes:
        runs: The program.
        graph: Its operations.
        concern: The results in question; with a limit every bad value counts.
    """

    runs: Runs
    graph: Graph
    concern: frozenset[int]

    def causes(self) -> list[Cause]:
        """Returns the causes, the first one first.

        Empty if the run does not reproduce the bad results.
        """
        graph, above = self.graph, self.runs.above
        bad = zip(graph.inputs, self.runs.bad_inputs(), strict=True)
        sites = [value for value, is_bad in bad if is_bad]
        if above is not None:
            sites = [*large_constants(graph, above), *sites]
        region = frozenset(graph.steps if len(graph.steps) <= _FEW else ())
        run = self._recorded(sites, region)
        before = run(())
        if above is not None:
            # With a limit every bad value is reported, so nothing is cured.
            ends = [(v, ()) for v in graph.outermost()]
            found = [
                *self._held(sites),
                *self._operations([], before, run, region, ends),
            ]
            return found[:_NAMED]
        if not self._ends(before):
            return []
        seen, sources = run(sites), []
        mended = self._ends(before) - self._ends(seen)
        if mended:
            others = {v: [one for one in sites if one != v] for v in sites[:_TRIED]}
            found = [v for v in others if self._ends(run(others[v])) & mended]
            sources = self._held((found or sites)[:_NAMED])
        ends = [(graph.outputs[i], ()) for i in sorted(self._ends(seen))]
        operations = self._operations(sites, seen, run, region, ends) if ends else []
        return [*sources, *operations][:_NAMED]

    def _ends(self, seen: Seen) -> frozenset[int]:
        """Returns the bad results among `concern`."""
        return self.concern & frozenset(np.flatnonzero(seen.ends).tolist())

    @functools.cached_property
    def _constants(self) -> frozenset[int]:
        """The non-finite constants; with a limit empty, as each is reported anyway."""
        above = self.runs.above
        return frozenset(large_constants(self.graph, above) if above is None else ())

    def _begin(self, seen: Seen) -> Beginnings:
        return Beginnings(self.graph, seen, self._constants)

    def _held(self, values: Sequence[int]) -> list[Cause]:
        """Returns causes that are constants or inputs."""
        graph = self.graph
        measured = [v for v in values if is_measured(graph.aval(v))]
        sizes = dict(zip(measured, self.runs.sizes(graph, measured), strict=True))
        causes = []
        for value in values:
            users = graph.users.get(value, []) if value in graph.constants else []
            held = [range_of(graph.aval(v), sizes[v]) for v in (value,) if v in sizes]
            first = next(iter(users), None)
            scope = graph.scope_that_gives(value) if first is None else None
            causes.append(Cause(graph, first, value, tuple(held), scope=scope))
        return causes

    def _recorded(
        self, sites: Iterable[int], region: Iterable[Node]
    ) -> Callable[[Iterable[int]], Seen]:
        """Returns a run with given values cured, of `sites` or made in the region."""
        made = [v for step in region for v in step.results]
        watched = self.graph.steps if self.runs.above is not None else self._stored
        return self.runs.recorded(self.graph, [*sites, *made], watched, region)

    @functools.cached_property
    def _stored(self) -> list[Node]:
        """The operations whose results are inspected first: matmuls.

        The matmul of a weight's gradient is left out, since the gradient itself is
        inspected. Both need more memory than the step (a GPT of 4 layers: 142 MB, not
        136).
        """
        products = [step for step in self.graph.steps if is_matmul(step.equation)]
        lead_on = self.graph.reaching(v for step in products for v in step.operands)
        return [step for step in products if not lead_on.isdisjoint(step.results)]

    def _operations(
        self,
        cured: Sequence[int],
        seen: Seen,
        run: Callable[[Iterable[int]], Seen],
        region: frozenset[Node],
        ends: Sequence[Instance],
    ) -> list[Cause]:
        """Returns the operations that are the cause, with some values cured.

        Args:
            cured: The cured values.
            seen: The record of a run.
            run: That run, or a later one.
            region: The operations of which it records everything.
            ends: The bad results.
        """
        graph, first = self.graph, list[Cause]()
        for _ in range(_ROUNDS):
            wanted = self._begin(seen).region(ends)
            if not wanted <= region:
                region = frozenset(wanted)
                run = self._recorded(cured, region)
            seen = run(cured)
            begun = self._begin(seen).of(ends)
            turns = begun.made or begun.given
            steps = list(turns)[:_TRIED]
            if not steps:
                return first or self._held(begun.held[:_NAMED])
            if self.runs.above is not None:
                return [self._cause(step, turns[step], seen) for step in steps[:_NAMED]]
            judged, healthy = self._judged(run, cured, steps)
            named = [(step, turns[step]) for step in judged or steps[:1]]
            left = self._ends(healthy)
            cured = [*cured, *(v for step in steps for v in step.results)]
            ends = [(graph.outputs[i], ()) for i in sorted(left)]
            if judged and left:
                # Also constants whose badness does not depend on the steps.
                given = self._begin(healthy).of(ends).given
                also, _ = self._judged(run, cured, list(given)[:_TRIED])
                named += [(step, given[step]) for step in also]
                named.sort(key=lambda one: order(graph, *one))
            causes = [self._cause(*one, seen) for one in named[:_NAMED]]
            if judged or not left:
                return causes
            # The steps are harmless: the results are bad without them.
            first, seen = first or causes, healthy
        return first

    def _judged(
        self,
        run: Callable[[Iterable[int]], Seen],
        cured: Sequence[int],
        steps: Sequence[Node],
    ) -> tuple[list[Node], Seen]:
        """Returns the steps whose bad results reach a result or a stored matmul.

        Also returns the record of a run with all of them cured.
        """
        every = {*cured, *(v for step in steps for v in step.results)}
        healthy = run(every)
        found = []
        for step in steps:
            seen = run(every.difference(step.results))
            is_cause = bool(self._ends(seen) - self._ends(healthy))
            if self._ends(healthy):  # these are bad without the steps, too
                stored = (s.number for s in self._stored if s is not step)
                now, then = seen.records, healthy.records
                is_cause |= any((now[n] > then[n])[..., 0].any() for n in stored)
            found += [step] if is_cause else []
        return found, healthy

    def _cause(self, step: Node, index: Index, seen: Seen) -> Cause:
        graph, begin = self.graph, self._begin(seen)
        constant = begin.constant_of(step, index)
        if constant is not None:
            (held,) = self._held([constant])
            return dataclasses.replace(held, step=step, index=index)
        bad = [v for v in step.results if v in (seen.bad(step, index) or ())]
        devices = seen.devices(step, index)
        sizes: dict[int, np.ndarray] = {}
        for other in graph.steps:
            if other.scope is step.scope and seen.is_of_region(other):
                sizes |= seen.sizes(other, index, devices[0])
        sizes = {v: x for v, x in sizes.items() if is_measured(graph.aval(v))}
        made, ranges = (
            tuple(range_of(graph.aval(v), sizes[v]) for v in values if v in sizes)
            for values in (step.results, step.operands)
        )
        on_devices = any(s.primitive == "shard_map" for s in step.around)
        return Cause(
            graph,
            step,
            bad[0],
            made,
            index,
            frozenset(step.results.index(v) for v in bad),
            ranges,
            tuple(devices) if on_devices else (),
            {v: float(size[-1]) for v, size in sizes.items()},
            begin.meant_by(step, index),
        )
