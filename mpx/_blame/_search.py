"""Which operation made what is bad in the results of a step.

Looking at every value of a program costs more than the program. So a first run looks at
a few that are stored anyway, those that products make. That leaves a *region*: the
operations between values that are good and the first that is bad. A second run looks at
all of these.

A value that is bad may be harmless: a mask of -inf is, of which softmax makes zeros. So
nothing is judged by looking at values alone. A value is cured, and what is bad in the
results then shows whether it was the cause.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from .._dtypes import full_precision_of
from .._program import PrimitiveClass, properties, reachable
from ._badness import Range, is_number, range_of
from ._graph import Graph, Index, Instance, Step, is_same_numbers
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
        sites = [v for v in graph.constants if self._is_bad_constant(v)]
        sites += [value for value, is_bad in bad if is_bad]
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

    def _is_bad_constant(self, value: int) -> bool:
        aval, above = self.graph.aval(value), self.runs.above
        if not is_number(aval):
            return False
        wide = np.asarray(self.graph.constants[value], full_precision_of(aval.dtype))
        limit = np.finfo(wide.dtype).max if above is None else above
        return not np.all(np.abs(wide) <= limit)

    def _held(self, values: Sequence[int]) -> list[Cause]:
        """Causes that no operation made: constants and inputs."""
        graph = self.graph
        measured = [v for v in values if is_measured(graph.aval(v))]
        sizes = dict(zip(measured, self.runs.sizes(graph, measured), strict=True))
        causes = []
        for value in values:
            users = graph.users.get(value, []) if value in graph.constants else []
            held = [range_of(graph.aval(v), sizes[v]) for v in (value,) if v in sizes]
            causes.append(Cause(graph, next(iter(users), None), value, tuple(held)))
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
        first: list[Cause] = []
        for _ in range(_ROUNDS):
            wanted = self._region(seen, ends)
            if not wanted:
                return first
            if not wanted <= region:
                region = frozenset(wanted)
                run = self._recorded(cured, region)
            seen = run(cured)
            roots = self._roots(seen, ends)
            steps = list(roots)[:_TRIED]
            if not steps:
                return first
            if self.runs.above is not None:
                return [self._cause(step, roots[step], seen) for step in steps[:_NAMED]]
            judged, healthy = self._judged(run, cured, steps)
            causes = [
                self._cause(step, roots[step], seen) for step in judged or steps[:1]
            ]
            left = self._ends(healthy)
            if judged or not left:
                return causes[:_NAMED]
            # They are harmless: what is bad is so without them.
            first = first or causes
            cured = [*cured, *(v for step in steps for v in step.results)]
            seen, ends = healthy, [(self.graph.outputs[i], ()) for i in sorted(left)]
        return first

    def _region(self, seen: Seen, ends: Iterable[Instance]) -> set[Step]:
        """The operations where something bad began that reached the ends.

        From values that are known not to be bad to the first that is. Of several such
        regions the first few.
        """
        found: list[set[tuple[Step, Index]]] = []

        def bad_before(end: Instance) -> list[Instance]:
            region, before = self._between(seen, end)
            if region and not before:
                found.append(region)
            return before

        reachable(ends, bad_before)
        found.sort(key=lambda region: max(self._order(*one) for one in region))
        return {step for region in found[:_NAMED] for step, _ in region}

    def _between(
        self, seen: Seen, end: Instance
    ) -> tuple[set[tuple[Step, Index]], list[Instance]]:
        """The operations from values that are known to one, and the bad ones of these.

        Those that only move numbers are none of them.
        """
        region: set[tuple[Step, Index]] = set()
        before: list[Instance] = []

        def unknown_before(one: Instance) -> Iterable[Instance]:
            value, index = one
            step = self.graph.makers.get(value)
            bad = None if step is None else seen.bad(step, index)
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

    def _roots(self, seen: Seen, ends: Iterable[Instance]) -> dict[Step, Index]:
        """The operations whose results are bad though their operands are not.

        As far as they reach the ends, the first one first, each in its first turn.
        """
        found: list[tuple[Step, Index]] = []

        def bad_origins(one: Instance) -> Iterable[Instance]:
            value, index = one
            step = self.graph.makers.get(value)
            bad = None if step is None else seen.bad(step, index)
            origins = self.graph.origins(value, index)
            if bad is not None and value not in bad:
                return ()
            if step is None or bad is None or not seen.is_of_region(step):
                return origins
            reached = [origin for origin in origins if origin[0] in bad]
            if not reached:
                found.append((step, index))
            return reached

        reachable(ends, bad_origins)
        roots: dict[Step, Index] = {}
        for step, index in sorted(found, key=lambda one: self._order(*one)):
            roots.setdefault(step, index)
        return roots

    def _order(self, step: Step, index: Index) -> tuple[bool, tuple[int, ...]]:
        """What is bad in the forward pass comes before what is in the backward pass."""
        is_backward = self.graph.forward.isdisjoint(step.results)
        return is_backward, step.order(index)

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
        graph = self.graph
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
        )


def _is_product(step: Step) -> bool:
    return properties(step.primitive).kind is PrimitiveClass.HALF
