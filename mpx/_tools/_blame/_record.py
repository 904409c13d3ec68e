"""A run of a step that records what its operations take and make.

Of some operations it is recorded whether their results are bad. Of those of a region,
whether their operands are, too, and what numbers all of them held. What is recorded in
loops and on devices is stacked, so that each turn and each device is told apart.

Values can be *cured*: finite numbers stand in their place where a switch is on.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import PyTree

from ..._base.jax_compat import as_varying, manual_axes, varying_axes
from ..._base.typing import AnyArray
from ..._program import Location, Probe, Records, Tagged, probed
from ._blame_report import MEASURED, badness_of, cured, is_number, measured
from ._graph import Graph, Index, Node

# Each operation rounds as it is written. By default XLA leaves out pairs of casts, and
# an operation would be seen overflow whose result nobody used in that dtype.
AS_WRITTEN = {"xla_allow_excess_precision": False}

# What stands in place of infinity: for a mask still as good as that, for the result of
# an operation a number that does not overflow at the next product.
_FAR, _NEAR = 1e4, 1.0


@dataclasses.dataclass(frozen=True)
class Seen:
    """What a run shows.

    Attributes:
        ends: For each result of the program whether it is bad.
        records: By the number of an operation what is known of its results, and of a
            region of its operands behind them: what `badness_of` gives, and of a region
            what `measured` gives. The axes are devices, turns, values, and these.
    """

    ends: np.ndarray
    records: Mapping[int, np.ndarray]

    def bad(self, step: Node, index: Index) -> set[int] | None:
        """The values of an operation that are bad on any device; None if not seen."""
        return self._at_least(1, step, index)

    def nan(self, step: Node, index: Index) -> set[int]:
        """Those of an operation that hold NaN on any device."""
        return self._at_least(2, step, index) or set()

    def _at_least(self, level: int, step: Node, index: Index) -> set[int] | None:
        if step.number not in self.records:
            return None
        found = self.records[step.number][:, *index, :, 0].max(axis=0) >= level
        values = (*step.results, *step.operands)
        return {values[i] for i in np.flatnonzero(found)}

    def devices(self, step: Node, index: Index) -> list[int]:
        """The devices on which results of an operation are bad."""
        found = self.records[step.number][:, *index, : len(step.results), 0]
        return np.flatnonzero(found.any(axis=1)).tolist()

    def is_of_region(self, step: Node) -> bool:
        """Whether all of an operation was looked at."""
        found = self.records.get(step.number)
        return found is not None and found.shape[-1] > 1

    def sizes(self, step: Node, index: Index, device: int) -> dict[int, np.ndarray]:
        """What `measured` gives of the values of an operation of a region."""
        values = (*step.results, *step.operands)
        found = self.records[step.number][device, *index, :, 1:]
        return dict(zip(values, found, strict=True))


@dataclasses.dataclass(frozen=True)
class Runs:
    """A program that can be run and looked into.

    Attributes:
        jaxpr: The program.
        inputs: The arrays that it is given.
        above: As in `badness_of`.
        options: What the compiler is told.
    """

    jaxpr: ClosedJaxpr
    inputs: Sequence[AnyArray]
    above: float | None
    options: dict[str, bool]

    def graph(self) -> Graph:
        """The operations, once the turns of `while` loops are counted."""
        graph = Graph(self.jaxpr)
        while None in graph.turns:
            probe = _Turns(graph)
            _, found = self._compiled(lambda _, *xs, p=probe: self._probed(p, xs))(0)
            graph = Graph(self.jaxpr, _turns(graph, found))
        return graph

    def bad_inputs(self) -> np.ndarray:
        """For each input whether it is bad."""

        def bits(_: object, *inputs: AnyArray) -> AnyArray:
            found = [badness_of(x, self.above) for x in inputs]
            return jnp.stack(found) if found else jnp.zeros(0, jnp.int32)

        return self._compiled(bits)(0)

    def sizes(self, graph: Graph, values: Sequence[int]) -> list[np.ndarray]:
        """What `measured` gives of inputs and constants."""
        places = {value: i for i, value in enumerate(graph.inputs)}

        def found(_: object, *inputs: AnyArray) -> list[AnyArray]:
            arrays = (
                inputs[places[v]] if v in places else jnp.asarray(graph.constants[v])
                for v in values
            )
            return [measured(x) for x in arrays]

        return self._compiled(found)(0)

    def recorded(
        self,
        graph: Graph,
        sites: Sequence[int],
        watched: Iterable[Node],
        region: Iterable[Node],
    ) -> Callable[[Iterable[int]], Seen]:
        """A run of those of the values `sites` that are cured in it.

        It looks at the results of the operations in `watched`, and at all of those in
        `region`.
        """
        place = {site: i for i, site in enumerate(sites)}
        looks = {step.number: False for step in watched if step.results}
        looks |= {step.number: True for step in region if step.results}

        def program(switches: AnyArray, *inputs: AnyArray) -> PyTree:
            on = {site: switches[i] for site, i in place.items()}
            probe = _Recorder(graph, on, looks, self.above)
            arrays = [
                probe.cure(value, x)
                for value, x in zip(graph.inputs, inputs, strict=True)
            ]
            results, records = self._probed(probe, arrays)
            return jnp.stack([badness_of(x, self.above) for x in results]), records

        run = self._compiled(program)

        def seen(values: Iterable[int]) -> Seen:
            values = set(values)
            ends, records = run(np.array([site in values for site in sites], bool))
            found = {n: _by_device(graph.steps[n], x) for n, x in records.items()}
            return Seen(ends, found)

        return seen

    def _probed(
        self, probe: Probe, arrays: Sequence[AnyArray]
    ) -> tuple[list[AnyArray], Records]:
        return probed(self.jaxpr, probe, arrays, [None] * len(arrays))

    def _compiled(self, program: Callable[..., PyTree]) -> Callable[[object], PyTree]:
        compiled = jax.jit(
            program,
            out_shardings=_everywhere(self.inputs),
            compiler_options=self.options,
        )
        return lambda control: jax.tree.map(np.asarray, compiled(control, *self.inputs))


def _everywhere(inputs: Sequence[AnyArray]) -> NamedSharding | None:
    """Where results are that every process reads; None in one process."""
    for x in inputs:
        sharding = getattr(x, "sharding", None)
        if isinstance(sharding, NamedSharding) and not x.is_fully_addressable:
            return NamedSharding(sharding.mesh, PartitionSpec())
    return None


def _by_device(step: Node, record: np.ndarray) -> np.ndarray:
    """What was recorded of an operation with one axis of devices, in front."""
    scopes = [scope for scope in step.around if scope.primitive != "cond"]
    axes = [i for i, scope in enumerate(scopes) if scope.primitive == "shard_map"]
    record = np.moveaxis(record, axes, range(len(axes)))
    shape = record.shape[len(axes) :]
    return record.reshape(int(np.prod(record.shape[: len(axes)])), *shape)


class _Counting(Probe):
    """Knows the operations that it sees by counting, as a `Graph` does."""

    def __init__(self, graph: Graph) -> None:
        self._steps, self._lengths = iter(graph.steps), iter(graph.turns)

    def constant(self, array: object) -> None:
        """Nothing is to be known of it."""

    def turns(self, equation: JaxprEqn) -> int | None:
        """As far as they are known."""
        return next(self._lengths)

    def transfer(
        self, equation: JaxprEqn, place: Location, operands: Sequence[Tagged]
    ) -> list[None]:
        """Nothing is to be known of the results."""
        return [None] * len(equation.outvars)


class _Turns(_Counting):
    """Counts how often the operations in `while` loops run in them, turns added up."""

    def observe(
        self,
        equation: JaxprEqn,
        place: Location,
        operands: Sequence[Tagged],
        results: Sequence[Tagged],
    ) -> Records:
        """One run."""
        step = next(self._steps)
        is_in_loop = any(s.primitive == "while" for s in step.around)
        return {step.number: jnp.int32(1)} if is_in_loop else {}

    def join(self, before: PyTree, now: PyTree) -> PyTree:
        """All runs."""
        return before + now


def _turns(graph: Graph, runs: Mapping[int, np.ndarray]) -> list[int | None]:
    """The turns of loops, of those within only once the turns around are known."""
    found = []
    for scope, known in zip(graph.whiles, graph.turns, strict=True):
        around = [s for s in scope.around[:-1] if s.primitive == "while"]
        if known is None and all(s.length is not None for s in around):
            inside = [step for step in graph.steps if scope in step.around]
            # An operation of the loop itself runs in each turn, one in a branch of it
            # may not: together they run often enough.
            inside = [step for step in inside if step.scope is scope][:1] or inside
            known = sum(int(np.max(runs[step.number])) for step in inside)
        found.append(known)
    return found


class _Recorder(_Counting):
    """Cures values, and records what operations take and make.

    Args:
        graph: The program.
        cures: For each value that may be cured its switch.
        looks: The numbers of the operations that are looked at; True for one of the
            region.
        above: As in `badness_of`.
    """

    def __init__(
        self,
        graph: Graph,
        cures: Mapping[int, AnyArray],
        looks: Mapping[int, bool],
        above: float | None,
    ) -> None:
        super().__init__(graph)
        self._makers = graph.makers
        self._cures, self._looks, self._above = cures, looks, above
        self._found: Records = {}

    def cure(self, value: int, x: AnyArray) -> AnyArray:
        """The array of a value, cured if that is asked for."""
        if value not in self._cures or not is_number(jax.typeof(x)):
            return x
        large = _NEAR if value in self._makers else _FAR
        return cured(jnp.asarray(x), self._cures[value], large)

    def compute(self, equation: JaxprEqn, arrays: Sequence[AnyArray]) -> list[AnyArray]:
        """The results, cured perhaps, once they were looked at."""
        step = next(self._steps)
        assert step.equation is equation, "a probe sees what a graph has, in its order"
        pairs = zip(step.results, super().compute(equation, arrays), strict=True)
        results = [self.cure(value, x) for value, x in pairs]
        self._found = {}
        if step.number not in self._looks:
            return results
        look = self._measured if self._looks[step.number] else self._is_bad
        # They are looked at before they are used: looked at in the end, all that is
        # looked at would be held until then.
        pairs = [jax.lax.optimization_barrier((x, look(x))) for x in results]
        results, found = map(list, zip(*pairs, strict=True))
        if self._looks[step.number]:
            found += map(look, arrays)
        self._found = {step.number: _stacked(found)}
        return results

    def _is_bad(self, x: AnyArray) -> AnyArray:
        return badness_of(jnp.asarray(x), self._above).astype(jnp.float32)[None]

    def _measured(self, x: AnyArray) -> AnyArray:
        size = jnp.zeros(MEASURED, jnp.float32)
        if is_measured(jax.typeof(x)):
            size = measured(jnp.asarray(x))
        return jnp.concatenate([self._is_bad(x), size])

    def observe(
        self,
        equation: JaxprEqn,
        place: Location,
        operands: Sequence[Tagged],
        results: Sequence[Tagged],
    ) -> Records:
        """What was found."""
        return self._found


def _stacked(arrays: Sequence[AnyArray]) -> AnyArray:
    """Arrays in one, as one that differs between devices, where JAX keeps account."""
    axes = manual_axes()
    if axes and varying_axes(jax.lax.axis_index(axes[0])):
        arrays = [as_varying(x, frozenset(axes)) for x in arrays]
    return jnp.stack(arrays)


def is_measured(x: object) -> bool:
    """Whether there is something to be said of the numbers of a type."""
    dtype = getattr(x, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.number)
