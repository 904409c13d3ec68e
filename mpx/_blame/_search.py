"""Which operation of a level made what is bad in its results.

A value that is bad may be harmless: a mask of -inf is, of which softmax makes zeros. So
nothing is judged by looking at values alone. A value is *cured*, finite numbers stand
in its place, and what is bad in the results then shows whether it was the cause.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from .._typing import AnyArray, Aval
from ._badness import MEASURED, Range, badness_of, cured, measured, range_of
from ._graph import (
    Bits,
    all_values,
    bad_constants,
    is_bad,
    is_certain,
    is_composite,
    parts,
    regions,
    roots,
    stored_values,
    values_around,
)
from ._level import Level, Step, run_level
from ._machine import Machine

# How many operations are tried one by one, and how many causes are named.
_TRIED = 16
_NAMED = 4
# How often harmless operations are cured to look behind them.
_ROUNDS = 4
# What stands in place of infinity: for a mask still as good as that, for the result of
# an operation a number that does not overflow at the next product.
_FAR, _NEAR = 1e4, 1.0

Concern = frozenset[int]
"""The outputs of a level that are bad and matter."""


@dataclasses.dataclass(frozen=True)
class Cause:
    """Where something bad began in a level.

    Attributes:
        level: The level.
        step: The operation; None where it is an input or a constant.
        value: The number of its first bad result, or of the input or constant.
        results: Which of its results are bad; none of an input or constant.
        operands: The operands, as they stay on the machine.
        ranges: The ranges of operands.
        made: The ranges of results; that of the input or constant.
        devices: The devices on which it is bad, of those of the machine.
        zeros: For values around it how many zeros they held.
    """

    level: Level
    step: Step | None
    value: int
    results: Concern
    operands: Sequence[Any]
    ranges: tuple[Range, ...]
    made: tuple[Range, ...]
    devices: tuple[int, ...]
    zeros: dict[int, float]


@dataclasses.dataclass(frozen=True)
class Search:
    """A level on a machine, with inputs; `above` is as in `badness_of`."""

    machine: Machine
    level: Level
    inputs: Sequence[AnyArray]
    above: float | None

    def causes(self, concern: Concern) -> list[Cause]:
        """The operations that made what is bad in the outputs, the first one first.

        Empty where a run of the level does not show it.
        """
        level = self.level
        ends = [level.source(level.outputs[i]) for i in sorted(concern)]
        watch, sites = stored_values(level), bad_constants(level)
        if self.above is not None:  # it need not reach a result
            watch = all_values(level)
            ends = list(dict.fromkeys([*ends, *watch]))
        run = self._compiled(sites, watch)
        bits = run(np.zeros(len(sites), bool)).bits
        if not _any_bad(bits, ends):
            return []
        inputs = [v for v in level.inputs if is_bad(bits, v)]
        if inputs:
            run = self._compiled([*sites, *inputs], watch)
        cures = np.ones(len(sites) + len(inputs), bool)
        sources: list[Cause] = []
        if self.above is not None:
            # With a limit all that is bad is told, so nothing is cured.
            cures = ~cures
            held = [v for v in level.constants if is_bad(bits, v)]
            sources = self._held([*held, *inputs])[:_NAMED]
        elif cures.size:
            before, bits = bits, run(cures).bits
            mended = [v for v in ends if is_bad(before, v) and not is_bad(bits, v)]
            if mended:
                sources = self._sources(run, [*sites, *inputs], mended)
            if not _any_bad(bits, ends):
                return sources
        operations = self._operations([*sites, *inputs], cures, bits, ends)
        return [*sources, *operations][:_NAMED]

    def _sources(
        self,
        run: "Callable[[np.ndarray], _Seen]",
        sites: list[int],
        ends: list[int],
    ) -> list[Cause]:
        """Which inputs and constants are the cause, all of whose cures is the cure."""
        found = []
        for i, site in enumerate(sites[:_TRIED]):
            switches = np.ones(len(sites), bool)
            switches[i] = False
            if _any_bad(run(switches).bits, ends):
                found.append(site)
        return self._held((found or sites)[:_NAMED])

    def _held(self, named: list[int]) -> list[Cause]:
        """Causes that no operation made: constants and inputs."""
        causes, level = [], self.level
        measure = [site for site in named if _is_measured(level.aval(site))]
        sizes = self._compiled((), (), measure)(np.zeros(0, bool)).sizes
        for site in named:
            users = level.users.get(site, []) if site in level.constants else []
            step = level.steps[users[0]] if users else None
            held = _ranges(level, [site], sizes, ())
            causes.append(Cause(level, step, site, frozenset(), (), (), held, (), {}))
        return causes

    def _operations(
        self, sites: list[int], cures: np.ndarray, bits: Bits, ends: list[int]
    ) -> list[Cause]:
        """The operations that are the cause, with these values cured."""
        level, first = self.level, []
        for _ in range(_ROUNDS):
            chosen, seen = self._chosen(sites, cures, bits, ends)
            if not chosen or seen is None:
                return first
            if self.above is not None or is_certain(level, seen.bits, chosen, bits):
                chosen = chosen[:_NAMED]
                return [self._cause(level.steps[n], seen) for n in chosen]
            results = [v for n in chosen for v in level.steps[n].results]
            results = [v for v in results if is_bad(seen.bits, v)]
            judged, bits = self._judged(sites, cures, chosen, results, ends)
            causes = [self._cause(level.steps[n], seen) for n in judged or chosen[:1]]
            if judged or not _any_bad(bits, ends):
                return causes[:_NAMED]
            # They are harmless: what is bad is so without them.
            first = first or causes
            sites = [*sites, *results]
            cures = np.ones(len(sites), bool)
        return first

    def _chosen(
        self, sites: list[int], cures: np.ndarray, bits: Bits, ends: list[int]
    ) -> "tuple[list[int], _Seen | None]":
        """Operations that made something bad of what is not, and what a run shows."""
        level = self.level
        bad = [v for v in ends if is_bad(bits, v)]
        found = set().union(*regions(level, bits, bad)[:_NAMED])
        known: dict[int, np.ndarray] = {}
        for part in parts(level, found):
            seen = self._looked_into(sites, cures, part, known)
            # What is bad comes out by what the operations make.
            made = [v for number in part for v in level.steps[number].results]
            chosen = roots(level, seen.bits, [level.source(v) for v in made])
            if chosen:
                return chosen[:_TRIED], seen
            known.update(seen.bits)
        return [], None

    def _looked_into(
        self,
        sites: list[int],
        cures: np.ndarray,
        numbers: Sequence[int],
        known: dict[int, np.ndarray],
    ) -> "_Seen":
        """A run that looks at all operands and results of some operations."""
        steps = [self.level.steps[number] for number in numbers]
        watch = [v for v in values_around(self.level, numbers) if v not in known]
        plain = [s for s in steps if not is_composite(s)]
        measure = [v for s in plain for v in (*s.operands, *s.results)]
        measure = [v for v in measure if _is_measured(self.level.aval(v))]
        keep = [v for s in steps if is_composite(s) for v in s.operands]
        distinct = (list(dict.fromkeys(values)) for values in (measure, keep))
        return self._compiled(sites, watch, *distinct)(cures)

    def _judged(
        self,
        sites: list[int],
        cures: np.ndarray,
        chosen: list[int],
        results: list[int],
        ends: list[int],
    ) -> tuple[list[int], Bits]:
        """Those of several operations whose bad results reach something.

        Also what is bad when all of them are cured.
        """
        watch = list(dict.fromkeys([*stored_values(self.level), *ends]))
        run = self._compiled([*sites, *results], watch, near=results)
        healthy = run(np.ones(len(sites) + len(results), bool)).bits
        # Ends that are bad without them, too, tell nothing about them.
        others = ends if not _any_bad(healthy, ends) else watch
        others = [v for v in others if not is_bad(healthy, v) and v not in results]
        found = []
        for number in chosen:
            own = self.level.steps[number].results
            if any(v in own and v in ends for v in results):
                found.append(number)  # it is itself what is bad in the end
                continue
            switches = np.array([v not in own for v in results])
            bits = run(np.concatenate([cures, switches])).bits
            if _any_bad(bits, others):
                found.append(number)
        return found, healthy

    def _cause(self, step: Step, seen: "_Seen") -> Cause:
        level, bits = self.level, seen.bits
        bad = [k for k, v in enumerate(step.results) if is_bad(bits, v)]
        on = np.any([bits[step.results[k]] != 0 for k in bad], axis=0)
        devices = tuple(int(d) for d in np.flatnonzero(on))
        return Cause(
            level,
            step,
            step.results[bad[0]],
            frozenset(bad),
            [seen.kept.get(v) for v in step.operands],
            _ranges(level, step.operands, seen.sizes, devices),
            _ranges(level, step.results, seen.sizes, devices),
            devices,
            {v: float(x[devices[0], -1]) for v, x in seen.sizes.items()},
        )

    def _compiled(
        self,
        sites: Sequence[int],
        watch: Sequence[int],
        measure: Sequence[int] = (),
        keep: Sequence[int] = (),
        near: Sequence[int] = (),
    ) -> "Callable[[np.ndarray], _Seen]":
        """A compiled run, of switches that say which of `sites` are cured.

        Of those in `near` infinity becomes a small number. It says of values in `watch`
        whether they are bad, measures those in `measure`, and keeps those in `keep`.
        What none of them needs does not run.
        """
        level, above = self.level, self.above
        place = {site: i for i, site in enumerate(sites)}
        looks = {"bits": watch, "sizes": measure, "kept": keep}
        wanted = {name: set(values) for name, values in looks.items()}

        def program(switches: AnyArray, *inputs: AnyArray) -> PyTree:
            bits: dict[int, AnyArray] = {}
            sizes: dict[int, AnyArray] = {}
            kept: dict[int, AnyArray] = {}

            def change(number: int, x: AnyArray) -> AnyArray:
                if number in place:
                    large = _NEAR if number in near else _FAR
                    x = cured(jnp.asarray(x), switches[place[number]], large)
                if number in wanted["bits"]:
                    # It is looked at before it is used: looked at in the end, all that
                    # is looked at would be held until then.
                    found = badness_of(jnp.asarray(x), above)
                    x, bits[number] = jax.lax.optimization_barrier((x, found))
                if number in wanted["sizes"]:
                    sizes[number] = measured(jnp.asarray(x))
                if number in wanted["kept"]:
                    kept[number] = jnp.asarray(x)
                return x

            run_level(level, inputs, change)
            small = (
                _stacked([bits[n] for n in watch], ()),
                _stacked([sizes[n] for n in measure], (MEASURED,)),
            )
            return small, [kept[n] for n in keep]

        types = [level.aval(value) for value in level.inputs]
        compiled = self.machine.compiled(program, types)

        def run(switches: np.ndarray) -> _Seen:
            (bits, sizes), kept = compiled(switches, self.inputs)
            return _Seen(
                dict(zip(watch, bits.T, strict=True)),
                dict(zip(measure, np.moveaxis(sizes, 1, 0), strict=True)),
                dict(zip(keep, kept, strict=True)),
            )

        return run


@dataclasses.dataclass(frozen=True)
class _Seen:
    """What a run shows, by value: what is bad, what was measured, and arrays."""

    bits: Bits
    sizes: dict[int, np.ndarray]
    kept: dict[int, AnyArray]


def _any_bad(bits: Bits, values: Sequence[int]) -> bool:
    return any(is_bad(bits, value) for value in values)


def _is_measured(aval: Aval) -> bool:
    dtype = getattr(aval, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.number)


def _ranges(
    level: Level,
    values: Sequence[int],
    sizes: dict[int, np.ndarray],
    devices: Sequence[int],
) -> tuple[Range, ...]:
    on = devices[0] if devices else 0
    return tuple(range_of(level.aval(v), sizes[v][on]) for v in values if v in sizes)


def _stacked(scalars: list[AnyArray], shape: tuple[int, ...]) -> AnyArray:
    """Arrays of one shape in one; in parts, as XLA is slow where thousands meet."""
    if not scalars:
        return jnp.zeros((0, *shape), jnp.int32)
    while len(scalars) > 1 or scalars[0].ndim == len(shape):
        if scalars[0].ndim == len(shape):
            scalars = [s[None] for s in scalars]
        scalars = [
            jnp.concatenate(scalars[i : i + 64]) for i in range(0, len(scalars), 64)
        ]
    return scalars[0]
