"""Finds the parts of an array that a program reads, e.g. layers of stacked weights.

A *part* is a box of the array, possibly moved: sliced, split, transposed, reshaped. The
gradients of disjoint parts are never really added to each other: JAX adds arrays that
are zero outside their part.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from .._base.jax_compat import open_jaxpr, scan_counts
from .._base.typing import Atom, Shape
from .equations import SubJaxpr, aval_of, program_of, sub_jaxprs
from .primitives import properties

# --- Integers that a program computes from its constants, such as slice positions -----


class Numbers:
    """The values in a program that depend on no input.

    JAX wraps a negative index by `lt`, `add` and `select_n`, in a nested program for
    `jnp.take` and similar functions.
    """

    def __init__(
        self,
        jaxpr: Jaxpr,
        operands: Sequence[Atom] = (),
        outside: "Numbers | None" = None,
    ) -> None:
        """Reads a program, whose inputs are these operands of another program."""
        self._jaxpr, self._outside = jaxpr, outside
        self._operands = dict(zip(jaxpr.invars, operands, strict=False))
        self._makers: dict[Atom, JaxprEqn] | None = None

    def inside(self, jaxpr: Jaxpr, operands: Sequence[Atom]) -> "Numbers":
        """Returns the values of a nested program with these operands."""
        return Numbers(jaxpr, operands, self)

    def of(self, atom: Atom) -> np.ndarray | None:
        """Returns the value of an integer; None if unknown."""
        if isinstance(atom, Literal):
            return np.asarray(atom.val)
        if self._outside is not None and atom in self._operands:
            return self._outside.of(self._operands[atom])
        if self._makers is None:
            self._makers = {v: e for e in self._jaxpr.eqns for v in e.outvars}
        maker = self._makers.get(atom)
        return None if maker is None else self._computed(maker)

    def _computed(self, equation: JaxprEqn) -> np.ndarray | None:
        name = equation.primitive.name
        if properties(name).program and len(equation.outvars) == 1:
            jaxpr = open_jaxpr(program_of(equation))
            if len(jaxpr.invars) != len(equation.invars):
                return None
            return self.inside(jaxpr, equation.invars).of(jaxpr.outvars[0])
        compute = _OPERATIONS.get(name)
        if compute is None:
            return None
        values = []
        for atom in equation.invars:
            value = self.of(atom)
            if value is None:
                return None
            values.append(value)
        found = np.asarray(compute(equation.params, *values))
        shape = aval_of(equation.outvars[0]).shape
        return found.reshape(shape) if found.size == math.prod(shape) else None


_OPERATIONS: dict[str, Callable[..., Any]] = {
    "lt": lambda params, a, b: a < b,
    "add": lambda params, a, b: a + b,
    "sub": lambda params, a, b: a - b,
    "mul": lambda params, a, b: a * b,
    "max": lambda params, a, b: np.maximum(a, b),
    "min": lambda params, a, b: np.minimum(a, b),
    "select_n": lambda params, which, *cases: np.choose(which.astype(int), cases),
    "convert_element_type": lambda params, a: a.astype(params["new_dtype"]),
    "broadcast_in_dim": lambda params, a: a,
    "reshape": lambda params, a: a,
    "squeeze": lambda params, a: a,
    "concatenate": lambda params, *parts: np.concatenate(parts, params["dimension"]),
}


# --- Parts ----------------------------------------------------------------------------

# The begin and end of a part along each axis of the array.
Box = tuple[tuple[int, int], ...]


class Part(NamedTuple):
    """The box of an array that a value consists of.

    Attributes:
        number: Which array.
        box: The part of it.
        axes: For each axis of the value, its axis in the box; None if unknown.
    """

    number: int
    box: Box
    axes: tuple[int | None, ...]

    def cut(self, starts: Sequence[int], shape: Sequence[int]) -> "Part":
        """Returns a slice of the value; unknown axes keep their full extent."""
        box = list(self.box)
        for axis, start, size in zip(self.axes, starts, shape, strict=True):
            if axis is not None:
                begin = box[axis][0] + start
                box[axis] = begin, begin + size
        return self._replace(box=tuple(box))

    def along(self, axes: Sequence[int | None]) -> "Part":
        """Returns the value with other axes, each an old one or None for a new one."""
        return self._replace(
            axes=tuple(None if i is None else self.axes[i] for i in axes)
        )


def boxes_read(jaxpr: Jaxpr, variables: Sequence[Var]) -> Sequence[Sequence[Box]]:
    """Finds the parts of inputs that a program reads.

    Args:
        jaxpr: The program.
        variables: Some of its inputs.

    Returns:
        For each input one part for each operation that reads it. Empty if an operation
        reads it in several iterations of a loop, if it is a result of the program, or
        if the parts are unknown.
    """
    known: dict[Var, Part] = {}
    for number, variable in enumerate(variables):
        shape = aval_of(variable).shape
        box, axes = tuple((0, n) for n in shape), tuple(range(len(shape)))
        known[variable] = Part(number, box, axes)
    reading = _Reading(len(known))
    reading.give_up(reading.read(jaxpr, known, Numbers(jaxpr)))
    return reading.boxes


def are_apart(boxes: Sequence[Box]) -> bool:
    """Returns whether the parts of an array are disjoint."""
    return not any(itertools.starmap(_meet, itertools.combinations(boxes, 2)))


def _meet(a: Box, b: Box) -> bool:
    return all(max(p[0], q[0]) < min(p[1], q[1]) for p, q in zip(a, b, strict=True))


def is_covered(shape: Shape, boxes: Sequence[Box]) -> bool:
    """Returns whether disjoint parts cover the whole array."""
    sizes = (math.prod(stop - start for start, stop in box) for box in boxes)
    return sum(sizes) == math.prod(shape)


def is_read_once(jaxpr: Jaxpr, variable: Var) -> bool:
    """Returns whether no element of an input is read by two ops or iterations."""
    (boxes,) = boxes_read(jaxpr, [variable])
    return bool(boxes) and are_apart(boxes)


class _Reading:
    """Collects the parts of some arrays that are read.

    Attributes:
        boxes: The parts that are read of each array; empty if unknown.
    """

    def __init__(self, count: int) -> None:
        self.boxes: list[list[Box]] = [[] for _ in range(count)]
        self._unknown: set[int] = set()

    def note(self, part: Part) -> None:
        """Adds a part that an operation reads."""
        if part.number not in self._unknown:
            self.boxes[part.number].append(part.box)

    def give_up(self, parts: Iterable[Part | None]) -> None:
        """Marks the arrays of these parts: the parts read of them are unknown."""
        for part in parts:
            if part is not None:
                self._unknown.add(part.number)
                self.boxes[part.number].clear()

    def read(
        self, jaxpr: Jaxpr, known: dict[Var, Part], numbers: Numbers
    ) -> list[Part | None]:
        """Adds the parts that a program reads, and returns those in its results."""
        for equation in jaxpr.eqns:
            parts = [_part(known, atom) for atom in equation.invars]
            if any(part is not None for part in parts):
                results = self._read_by(equation, parts, numbers)
                pairs = zip(equation.outvars, results, strict=True)
                known.update((v, part) for v, part in pairs if part is not None)
        return [_part(known, atom) for atom in jaxpr.outvars]

    def _read_by(
        self, equation: JaxprEqn, parts: Sequence[Part | None], numbers: Numbers
    ) -> Sequence[Part | None]:
        name = equation.primitive.name
        nothing = [None] * len(equation.outvars)
        if name == "optimization_barrier":
            return parts
        if name == "scan":
            self._read_by_turns(equation, parts)
            return nothing
        subs, known = sub_jaxprs(equation), properties(name)
        if subs:
            return self._read_inside(equation, subs, parts, numbers) or nothing
        if not known.moves and not known.joins:
            for part in parts:
                if part is not None:
                    self.note(part)
            return nothing
        part, mover = parts[0], _MOVERS.get(name)
        found = mover(part, equation, numbers) if part and mover else None
        if found is None:
            self.give_up(parts)
        return found or nothing

    def _read_inside(
        self,
        equation: JaxprEqn,
        subs: Sequence[SubJaxpr],
        parts: Sequence[Part | None],
        numbers: Numbers,
    ) -> list[Part | None] | None:
        """Reads a nested program that runs once, on one device."""
        sub, name = subs[0], equation.primitive.name
        is_one = len(subs) == 1 and sub.trips == 1 and name != "shard_map"
        if not is_one or None in sub.operands or None in sub.results:
            return self.give_up(parts)
        operands = [i for i in sub.operands if i is not None]
        inputs = zip(sub.jaxpr.invars, (parts[i] for i in operands), strict=True)
        known = {v: part for v, part in inputs if part is not None}
        inside = numbers.inside(sub.jaxpr, [equation.invars[i] for i in operands])
        given = self.read(sub.jaxpr, known, inside)
        found: dict[int | None, Part | None] = dict(
            zip(sub.results, given, strict=True)
        )
        return [found.get(i) for i in range(len(equation.outvars))]

    def _read_by_turns(self, equation: JaxprEqn, parts: Sequence[Part | None]) -> None:
        """Reads a scan, each iteration of which reads a slice of the scanned arrays."""
        first = sum(scan_counts(equation.params))
        (sub,) = sub_jaxprs(equation)
        for i, part in enumerate(parts):
            if part is None:
                continue
            if i >= first and is_read_once(sub.jaxpr, sub.jaxpr.invars[i]):
                self.note(part)
            else:
                self.give_up([part])


def _part(known: Mapping[Var, Part], atom: Atom) -> Part | None:
    return None if isinstance(atom, Literal) else known.get(atom)


# --- Operations that move an array ----------------------------------------------------


def _shape(equation: JaxprEqn) -> Shape:
    return aval_of(equation.invars[0]).shape


def _as_it_is(part: Part, equation: JaxprEqn, numbers: Numbers) -> list[Part]:
    return [part]


def _sliced(part: Part, equation: JaxprEqn, numbers: Numbers) -> list[Part]:
    params = equation.params
    starts, stops = params["start_indices"], params["limit_indices"]
    sizes = [stop - start for start, stop in zip(starts, stops, strict=True)]
    cut = part.cut(starts, sizes)
    # A strided slice: the box contains elements that are not read.
    steps = params["strides"] or (1,) * len(sizes)
    places = (i if step == 1 else None for i, step in enumerate(steps))
    return [cut.along(list(places))]


def _sliced_at(part: Part, equation: JaxprEqn, numbers: Numbers) -> list[Part] | None:
    shape, sizes = _shape(equation), equation.params["slice_sizes"]
    starts = []
    for atom, n, size in zip(equation.invars[1:], shape, sizes, strict=True):
        start = numbers.of(atom)
        if start is None and size != n:
            return None
        starts.append(0 if start is None else min(max(int(start), 0), n - size))
    return [part.cut(starts, sizes)]


def _split(part: Part, equation: JaxprEqn, numbers: Numbers) -> list[Part]:
    return _pieces(part, equation, list(map(int, equation.params["sizes"])))


def _unstacked(part: Part, equation: JaxprEqn, numbers: Numbers) -> list[Part]:
    shape, axis = _shape(equation), equation.params["axis"]
    others = [i for i in range(len(shape)) if i != axis]
    return [row.along(others) for row in _pieces(part, equation, [1] * shape[axis])]


def _pieces(part: Part, equation: JaxprEqn, sizes: list[int]) -> list[Part]:
    """Cuts a value into pieces of these sizes along the axis of an equation."""
    shape, axis, found = list(_shape(equation)), equation.params["axis"], []
    for start, size in zip(itertools.accumulate([0, *sizes]), sizes, strict=False):
        starts = [start if i == axis else 0 for i in range(len(shape))]
        found.append(part.cut(starts, [*shape[:axis], size, *shape[axis + 1 :]]))
    return found


def _squeezed(part: Part, equation: JaxprEqn, numbers: Numbers) -> list[Part]:
    dropped = equation.params["dimensions"]
    return [part.along([i for i in range(len(part.axes)) if i not in dropped])]


def _reshaped(part: Part, equation: JaxprEqn, numbers: Numbers) -> list[Part] | None:
    """Keeps the axes before and after those that a reshape changes."""
    old, new = _shape(equation), aval_of(equation.outvars[0]).shape
    if equation.params.get("dimensions") is not None:
        return None
    first = _equal(old, new)
    last = min(_equal(old[::-1], new[::-1]), len(old) - first, len(new) - first)
    between = [None] * (len(new) - first - last)
    behind = range(len(old) - last, len(old))
    return [part.along([*range(first), *between, *behind])]


def _equal(a: Shape, b: Shape) -> int:
    """Returns how many leading entries are equal."""
    pairs = zip(a, b, strict=False)
    return len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))


def _transposed(part: Part, equation: JaxprEqn, numbers: Numbers) -> list[Part]:
    return [part.along(equation.params["permutation"])]


def _reversed(part: Part, equation: JaxprEqn, numbers: Numbers) -> list[Part]:
    turned = equation.params["dimensions"]
    places = (None if i in turned else i for i in range(len(part.axes)))
    return [part.along(list(places))]


def _broadcast(part: Part, equation: JaxprEqn, numbers: Numbers) -> list[Part] | None:
    old, new = _shape(equation), aval_of(equation.outvars[0]).shape
    if math.prod(old) != math.prod(new):
        return None
    places = list(equation.params["broadcast_dimensions"])
    found = (places.index(i) if i in places else None for i in range(len(new)))
    return [part.along(list(found))]


def _gathered(part: Part, equation: JaxprEqn, numbers: Numbers) -> list[Part] | None:
    """Returns one slice at a constant position: `jnp.take(x, 2, axis=0)`."""
    params, shape = equation.params, _shape(equation)
    how, sizes = params["dimension_numbers"], params["slice_sizes"]
    index = numbers.of(equation.invars[1])
    if index is None or index.ndim != 1 or how.operand_batching_dims:
        return None
    starts = [0] * len(shape)
    for axis, start in zip(how.start_index_map, index, strict=True):
        starts[axis] = int(start)
    rows = zip(starts, sizes, shape, strict=True)
    if not all(0 <= start <= n - size for start, size, n in rows):
        return None
    kept = [i for i in range(len(shape)) if i not in how.collapsed_slice_dims]
    return [part.cut(starts, sizes).along(kept)]


_MOVERS = {
    "copy": _as_it_is,
    "copy_p": _as_it_is,
    "name": _as_it_is,
    "slice": _sliced,
    "dynamic_slice": _sliced_at,
    "split": _split,
    "unstack": _unstacked,
    "squeeze": _squeezed,
    "expand_dims": _reshaped,
    "reshape": _reshaped,
    "transpose": _transposed,
    "rev": _reversed,
    "broadcast_in_dim": _broadcast,
    "gather": _gathered,
}
