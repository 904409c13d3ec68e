"""Anchors: the values by which two programs of one loss are compared.

Two precisions of a loss are two programs, with other casts and other operations around
them. What both have is what the user wrote: an operation is the same in both if it
comes from the same scope and line, is of the same primitive and shape, and comes
equally often. The *anchors* are the last such operation of each layer.
"""

import dataclasses
import itertools
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, JaxprEqn
from jaxtyping import PyTree

from .._program import (
    Location,
    PrimitiveClass,
    Records,
    Span,
    Tagged,
    aval_of,
    probed,
    properties,
    source_span,
)
from .._typing import AnyArray
from ._trace import Source, SourceProbe, is_product, line, phase_of, where


@dataclasses.dataclass(frozen=True)
class Anchor:
    """An operation of the forward pass, as the user wrote it.

    Attributes:
        where: The named scopes, or else the functions around it.
        source: The line of the user's code.
        span: The expression, of the user's or of a library, that it comes from.
        primitive: Its primitive.
        shape: The shape of its result where it stands.
        number: How many such operations are before it in the program.
    """

    where: str
    source: str
    span: Span | None
    primitive: str
    shape: tuple[int, ...]
    number: int


@dataclasses.dataclass
class Found:
    """What is known of an anchor from a trace.

    Attributes:
        weights: The weights that it is a product with.
        axes: The axes in front of its shape: `turn`, `device`.
    """

    weights: tuple[str, ...]
    axes: list[str]

    def turns_first(self, x: AnyArray) -> tuple[AnyArray, int]:
        """A record with the axes of turns in front, and how many they are."""
        turns = [i for i, axis in enumerate(self.axes) if axis == "turn"]
        return jnp.moveaxis(x, turns, range(len(turns))), len(turns)


class Collect(SourceProbe):
    """Collects values of the forward pass, and notes the place of each.

    Args:
        wanted: The anchors whose values are recorded; None notes places only.
        reverses: Whether sums are taken the other way round.
    """

    def __init__(
        self, wanted: frozenset[Anchor] | None = None, *, reverses: bool = False
    ) -> None:
        super().__init__()
        self.found: dict[Hashable, Found] = {}
        self._wanted, self._reverses = wanted, reverses
        self._counts: Counter[Anchor] = Counter()

    def compute(self, equation: JaxprEqn, arrays: Sequence[AnyArray]) -> list[AnyArray]:
        """The results, of sums in another order if they are wanted so."""
        if self._reverses:
            arrays = reversed_sums(equation, arrays)
        return super().compute(equation, arrays)

    def observe(
        self,
        equation: JaxprEqn,
        place: Location,
        operands: Sequence[Tagged],
        results: Sequence[Tagged],
    ) -> Records:
        """The value of an anchor, if it is wanted."""
        if not _is_computed(equation) or phase_of(equation, place) != "forward":
            return {}
        path = where(equation, place)
        if not path:  # of a derivative, not of the user's
            return {}
        kind = Anchor(
            path,
            line(equation, place),
            source_span(equation),
            equation.primitive.name,
            tuple(aval_of(equation.outvars[0]).shape),
            0,
        )
        anchor = dataclasses.replace(kind, number=self._counts[kind])
        self._counts[kind] += 1
        weights = [v.tag.path for v in operands if is_product(equation)]
        self.found[anchor] = Found(tuple(filter(None, weights)), [])
        wanted = self._wanted is None or anchor in self._wanted
        return {anchor: results[0].array} if wanted else {}

    def stack(self, key: Hashable, axis: str) -> None:
        """Notes the axis."""
        self.found[key].axes.insert(0, axis)


def _is_computed(equation: JaxprEqn) -> bool:
    """Whether an operation makes numbers, of a floating dtype."""
    known = properties(equation.primitive.name)
    if known.moves or known.joins or known.is_free:
        return False
    if known.kind is PrimitiveClass.CONVERT or len(equation.outvars) != 1:
        return False
    aval = aval_of(equation.outvars[0])
    is_float = jnp.issubdtype(getattr(aval, "dtype", bool), jnp.floating)
    return bool(is_float) and aval.dtype.itemsize > 1 and bool(aval.ndim)


def reversed_sums(equation: JaxprEqn, arrays: Sequence[AnyArray]) -> list[AnyArray]:
    """The operands of an operation that sums, the last summand first."""
    name, params = equation.primitive.name, equation.params
    if name == "dot_general":
        pairs = params["dimension_numbers"][0]
        return [_reversed(x, axes) for x, axes in zip(arrays, pairs, strict=True)]
    if name == "reduce_sum":
        return [_reversed(arrays[0], params["axes"])]
    return list(arrays)


def _reversed(x: AnyArray, axes: Sequence[Any]) -> AnyArray:
    # XLA takes the reversal of both operands back, unless it cannot see it.
    return lax.optimization_barrier(lax.rev(x, [*map(int, axes)])) if axes else x


def anchors_of(
    closed: ClosedJaxpr, tags: Sequence[Source]
) -> dict[Anchor, tuple[Found, tuple[int, ...]]]:
    """The anchors of a program in their order, each with the shape of its record."""
    probe = Collect()

    keys: list[Any] = []

    def keyed(*arrays: AnyArray) -> list[PyTree]:
        _, records = probed(closed, probe, arrays, tags)
        # Set while JAX traces: records have keys, and results only an order.
        keys[:] = records
        return list(records.values())

    shapes = jax.eval_shape(keyed, *closed.in_avals)
    return {
        key: (probe.found[key], tuple(x.shape))
        for key, x in zip(keys, shapes, strict=True)
    }


def common_layers(
    first: dict[Anchor, tuple[Found, tuple[int, ...]]],
    second: dict[Anchor, tuple[Found, tuple[int, ...]]],
) -> list[tuple[str, Anchor, Found]]:
    """The last common anchor of each layer, with the layer's name, in their order."""
    numbers = [Counter(_kind(anchor) for anchor in some) for some in (first, second)]

    def is_common(anchor: Anchor) -> bool:
        kind = _kind(anchor)
        if anchor not in second or numbers[0][kind] != numbers[1][kind]:
            return False
        return first[anchor][1] == second[anchor][1]

    layers = []
    for members in _groups(first):
        weights = [path for anchor in members for path in first[anchor][0].weights]
        common = list(filter(is_common, members))
        if common:
            name = _layer(weights) or common[-1].where
            layers.append((name, common[-1], first[common[-1]][0]))
    return layers


def _groups(anchors: Iterable[Anchor]) -> Iterator[list[Anchor]]:
    """What comes from one scope, until something of it comes again: a layer each."""
    group: list[Anchor] = []
    for anchor in anchors:
        is_again = any(_kind(anchor) == _kind(other) for other in group)
        if group and (anchor.where != group[0].where or is_again):
            yield group
            group = []
        group.append(anchor)
    if group:
        yield group


def _kind(anchor: Anchor) -> Anchor:
    return dataclasses.replace(anchor, number=0)


def _layer(paths: Sequence[str]) -> str:
    """The name of the layer whose weights these are: `blocks[0].fc1`."""
    parts = [path.split(".") for path in dict.fromkeys(paths)]
    if not parts:
        return ""
    if len(parts) == 1:
        return ".".join(parts[0][:-1]) or parts[0][0]
    same = itertools.takewhile(lambda x: len(set(x)) == 1, zip(*parts, strict=False))
    return ".".join(group[0] for group in same)
