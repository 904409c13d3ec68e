"""Which operation made what is bad in the results of a step.

Looking at every value of a program costs more than the program. So a first run looks at
a few that are stored anyway, those that products make. That leaves a *region*: the
operations between values that are good and the first that is bad. A second run looks at
all of these.

A value that is bad may be harmless: the root of a negative number that nobody reads. So
nothing is judged by looking at values alone. A value is cured, and what is bad in the
results then shows whether it was the cause.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from .._program import PrimitiveClass, properties
from ._badness import Range, range_of
from ._beginnings import Beginnings, large_constants, order
from ._graph import Graph, Index, Instance, Scope, Step
from ._record import Runs, Seen, is_measured

# A program of fewer operations is a region as a whole.
_FEW = 40
# How many operations are tried one by one, and how many causes are named.
_TRIED = 16
_NAMED = 4
# How often harmless operations are cured to look behind them.
_ROUNDS = 4


@dataclasses.dataclass(frozen=True)
class Cause:
    """Where something bad began.

    Attributes:
        graph: The program.
        step: The operation; None of an input, of a constant the first that uses it.
        index: Its turns.
        value: The number of its first bad result, or of the input or constant.
        results: Which of its results are bad; none of an input or constant.
        ranges: The ranges of operands.
        made: The ranges of results; that of the input or constant.
        devices: The devices on which it is bad.
        zeros: For values around it how many zeros they held.
        meant_by: Of NaN made of an infinity that the program holds on purpose the
            operation that is given it.
        scope: Of a constant that no operation uses the program that gives it.
    """

    graph: Graph
    step: Step | None
    value: int
    made: tuple[Range, ...]
    index: Index = ()
    results: frozenset[int] = frozenset()
    ranges: tuple[Range, ...] = ()
    devices: tuple[int, ...] = ()
    zeros: dict[int, float] = dataclasses.field(default_factory=dict)
    meant_by: Step | None = None
    scope: Scope | None = None


@dataclasses.dataclass(frozen=True)
class Search:
    """A search in a program for what made some of its results bad.

    Attributes:
        runs: The program.
        graph: Its operations.
        concern: The results; with a limit all that is bad matters.
    """

    runs: Runs
    graph: Graph
    concern: frozenset[int]

    def causes(self) -> list[Cause]:
        """The operations that did it, the first one first.

        Empty where a run does not show it.
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
            # With a limit all that is bad is told, so nothing is cured.
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
        """The results of concern that are bad."""
        return self.concern & frozenset(np.flatnonzero(seen.ends).tolist())

    @functools.cached_property
    def _constants(self) -> frozenset[int]:
        """The constants that are not finite; none with a limit: each is told anyway."""
        above = self.runs.above
        return frozenset(large_constants(self.graph, above) if above is None else ())

    def _begin(self, seen: Seen) -> Beginnings:
        return Beginnings(self.graph, seen, self._constants)

    def _held(self, values: Sequence[int]) -> list[Cause]:
        """Causes that no operation made: constants and inputs."""
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
        self, sites: Iterable[int], region: Iterable[Step]
    ) -> Callable[[Iterable[int]], Seen]:
        """A run of the values that are cured in it: of `sites`, or made in a region."""
        made = [v for step in region for v in step.results]
        watched = self.graph.steps if self.runs.above is not None else self._stored
        return self.runs.recorded(self.graph, [*sites, *made], watched, region)

    @functools.cached_property
    def _stored(self) -> list[Step]:
        """The operations whose results are looked at first: products.

        The product that gives a weight's gradient is followed by the gradient itself;
        to look at both holds more than the step does (a GPT of 4 layers: 142 MB, not
        136).
        """
        products = [step for step in self.graph.steps if _is_product(step)]
        lead_on = self.graph.reaching(v for step in products for v in step.operands)
        return [step for step in products if not lead_on.isdisjoint(step.results)]

    def _operations(
        self,
        cured: Sequence[int],
        seen: Seen,
        run: Callable[[Iterable[int]], Seen],
        region: frozenset[Step],
        ends: Sequence[Instance],
    ) -> list[Cause]:
        """The operations that are the cause, with these values cured.

        Args:
            cured: Values.
            seen: What a run shows.
            run: That run, or a later one.
            region: The operations that it looks into.
            ends: What is bad in the end.
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
            told = [(step, turns[step]) for step in judged or steps[:1]]
            left = self._ends(healthy)
            cured = [*cured, *(v for step in steps for v in step.results)]
            ends = [(graph.outputs[i], ()) for i in sorted(left)]
            if judged and left:
                # What is bad of constants without them, too.
                given = self._begin(healthy).of(ends).given
                also, _ = self._judged(run, cured, list(given)[:_TRIED])
                told += [(step, given[step]) for step in also]
                told.sort(key=lambda one: order(graph, *one))
            causes = [self._cause(*one, seen) for one in told[:_NAMED]]
            if judged or not left:
                return causes
            # They are harmless: what is bad is so without them.
            first, seen = first or causes, healthy
        return first

    def _judged(
        self,
        run: Callable[[Iterable[int]], Seen],
        cured: Sequence[int],
        steps: Sequence[Step],
    ) -> tuple[list[Step], Seen]:
        """Those of several operations whose bad results reach something.

        Also what is bad when all of them are cured.
        """
        every = {*cured, *(v for step in steps for v in step.results)}
        healthy = run(every)
        found = []
        for step in steps:
            seen = run(every.difference(step.results))
            is_cause = bool(self._ends(seen) - self._ends(healthy))
            if self._ends(healthy):  # which are bad without them, too
                stored = (s.number for s in self._stored if s is not step)
                now, then = seen.records, healthy.records
                is_cause |= any((now[n] > then[n])[..., 0].any() for n in stored)
            found += [step] if is_cause else []
        return found, healthy

    def _cause(self, step: Step, index: Index, seen: Seen) -> Cause:
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


def _is_product(step: Step) -> bool:
    return properties(step.primitive).kind is PrimitiveClass.HALF
