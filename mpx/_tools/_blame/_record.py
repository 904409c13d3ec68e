"""A run of a step that records the operands and results of operations.

Of some operations only badness of results is recorded. Of the operations of a region,
badness of operands, too, and the ranges of both. Records of loops and devices are
stacked, so each iteration and device has its own.

Values can be *cured*: where a switch is on, finite numbers replace bad ones.
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

# Each operation rounds as written. By default XLA removes pairs of casts; then an
# operation would be recorded as overflowing in a dtype in which its result is not used.
AS_WRITTEN = {"xla_allow_excess_precision": False}

# The replacements of infinity: for a mask one that works as well, for the result of an
# operation one that does not overflow in the next matmul.
_FAR, _NEAR = 1e4, 1.0


@dataclasses.dataclass(frozen=True)
class Seen:
    """The record of a run.

    Attributes:
        ends: Whether each result of the program is bad.
        records: For the number of an operation, `badness_of` of its results, and in a
            region also of its operands after them, each followed by `measured`. The
            axes are devices, iterations, values, and these measures.
    """

    ends: np.ndarray
    records: Mapping[int, np.ndarray]

    def bad(self, step: Node, index: Index) -> set[int] | None:
        """Returns the values bad on any device; None if not recorded."""
        return self._at_least(1, step, index)

    def nan(self, step: Node, index: Index) -> set[int]:
        """Returns the values of an operation with NaN on any device."""
        return self._at_least(2, step, index) or set()

    def _at_least(self, level: int, step: Node, index: Index) -> set[int] | None:
        if step.number not in self.records:
            return None
        found = self.records[step.number][:, *index, :, 0].max(axis=0) >= level
        values = (*step.results, *step.operands)
        return {values[i] for i in np.flatnonzero(found)}

    def devices(self, step: Node, index: Index) -> list[int]:
        """Returns the devices on which results of an operation are bad."""
        found = self.records[step.number][:, *index, : len(step.results), 0]
        return np.flatnonzero(found.any(axis=1)).tolist()

    def is_of_region(self, step: Node) -> bool:
        """Returns whether operands and ranges of an operation are recorded."""
        found = self.records.get(step.number)
        return found is not None and found.shape[-1] > 1

    def sizes(self, step: Node, index: Index, device: int) -> dict[int, np.ndarray]:
        """Returns the `measured` values of an operation of a region."""
        values = (*step.results, *step.operands)
        found = self.records[step.number][device, *index, :, 1:]
        return dict(zip(values, found, strict=True))


@dataclasses.dataclass(frozen=True)
class Runs:
    """A program that can be run and recorded.

    Attributes:
        jaxpr: The program.
        inputs: The arrays of its inputs.
        above: As in `badness_of`.
        options: The compiler options.
    """

    jaxpr: ClosedJaxpr
    inputs: Sequence[AnyArray]
    above: float | None
    options: dict[str, bool]

    def graph(self) -> Graph:
        """Returns the operations, after counting the iterations of `while` loops."""
        graph = Graph(self.jaxpr)
        while None in graph.turns:
            probe = _Turns(graph)
            _, found = self._compiled(lambda _, *xs, p=probe: self._probed(p, xs))(0)
            graph = Graph(self.jaxpr, _turns(graph, found))
        return graph

    def bad_inputs(self) -> np.ndarray:
        """Returns whether each input is bad."""

        def bits(_: object, *inputs: AnyArray) -> AnyArray:
            found = [badness_of(x, self.above) for x in inputs]
            return jnp.stack(found) if found else jnp.zeros(0, jnp.int32)

        return self._compiled(bits)(0)

    def sizes(self, graph: Graph, values: Sequence[int]) -> list[np.ndarray]:
        """Returns `measured` of inputs and constants."""
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
        """Returns a function that runs the program with a subset of `sites` cured.

        It records the results of operations in `watched`, and operands and results of
        those in `region`.
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
    """Returns a replicated sharding if there are several processes; else None."""
    for x in inputs:
        sharding = getattr(x, "sharding", None)
        if isinstance(sharding, NamedSharding) and not x.is_fully_addressable:
            return NamedSharding(sharding.mesh, PartitionSpec())
    return None


def _by_device(step: Node, record: np.ndarray) -> np.ndarray:
    """Returns the record of an operation with one axis of devices, in front."""
    scopes = [scope for scope in step.around if scope.primitive != "cond"]
    axes = [i for i, scope in enumerate(scopes) if scope.primitive == "shard_map"]
    record = np.moveaxis(record, axes, range(len(axes)))
    shape = record.shape[len(axes) :]
    return record.reshape(int(np.prod(record.shape[: len(axes)])), *shape)


class _Counting(Probe):
    """Identifies operations by counting, as a `Graph` does."""

    def __init__(self, graph: Graph) -> None:
        self._steps, self._lengths = iter(graph.steps), iter(graph.turns)
        self._forms = graph.forms

    def constant(self, array: object) -> None:
        """Records nothing."""

    def forms(self, equation: JaxprEqn) -> ClosedJaxpr:
        """Returns the program that the graph has opened."""
        return self._forms[id(equation)]

    def turns(self, equation: JaxprEqn) -> int | None:
        """Returns the most iterations of a loop; None if unknown."""
        return next(self._lengths)

    def transfer(
        self, equation: JaxprEqn, place: Location, operands: Sequence[Tagged]
    ) -> list[None]:
        """Returns no tags."""
        return [None] * len(equation.outvars)


class _Turns(_Counting):
    """Counts the runs of operations in `while` loops, summed over iterations."""

    def observe(
        self,
        equation: JaxprEqn,
        place: Location,
        operands: Sequence[Tagged],
        results: Sequence[Tagged],
    ) -> Records:
        """Returns a count of one."""
        step = next(self._steps)
        is_in_loop = any(s.primitive == "while" for s in step.around)
        return {step.number: jnp.int32(1)} if is_in_loop else {}

    def join(self, before: PyTree, now: PyTree) -> PyTree:
        """Adds the counts."""
        return before + now


def _turns(graph: Graph, runs: Mapping[int, np.ndarray]) -> list[int | None]:
    """Returns the iterations of loops; of inner loops once the outer ones are known."""
    found = []
    for scope, known in zip(graph.whiles, graph.turns, strict=True):
        around = [s for s in scope.around[:-1] if s.primitive == "while"]
        if known is None and all(s.length is not None for s in around):
            inside = [step for step in graph.steps if scope in step.around]
            # An operation of the loop itself runs in each iteration, one in a branch
            # may not: the sum over all of them is large enough.
            inside = [step for step in inside if step.scope is scope][:1] or inside
            known = sum(int(np.max(runs[step.number])) for step in inside)
        found.append(known)
    return found


class _Recorder(_Counting):
    """Cures values, and records operands and results of operations.

    Args:
        graph: The program.
        cures: The switch of each value that may be cured.
        looks: The numbers of the operations to record; True for the region.
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
        """Returns the array of a value, cured if it has a switch."""
        if value not in self._cures or not is_number(jax.typeof(x)):
            return x
        large = _NEAR if value in self._makers else _FAR
        return cured(jnp.asarray(x), self._cures[value], large)

    def compute(self, equation: JaxprEqn, arrays: Sequence[AnyArray]) -> list[AnyArray]:
        """Returns the results, cured if they have a switch, and records them."""
        step = next(self._steps)
        assert step.equation is equation, "a probe sees what a graph has, in its order"
        pairs = zip(step.results, super().compute(equation, arrays), strict=True)
        results = [self.cure(value, x) for value, x in pairs]
        self._found = {}
        if step.number not in self._looks:
            return results
        look = self._measured if self._looks[step.number] else self._is_bad
        # The barrier makes them inspected before they are used. Inspected at the end,
        # all of them would be stored until then.
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
        """Returns the record of the last operation."""
        return self._found


def _stacked(arrays: Sequence[AnyArray]) -> AnyArray:
    """Stacks arrays, as device-varying where JAX tracks that."""
    axes = manual_axes()
    if axes and varying_axes(jax.lax.axis_index(axes[0])):
        arrays = [as_varying(x, frozenset(axes)) for x in arrays]
    return jnp.stack(arrays)


def is_measured(x: object) -> bool:
    """Returns whether arrays of a type have a range."""
    dtype = getattr(x, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.number)
