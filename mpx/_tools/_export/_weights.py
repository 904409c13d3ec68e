"""Follows weights through a program, to the operations that read them.

A weight reaches a matmul moved: transposed, reshaped, cut into layers by a scan. These
moves are recorded, and repeated for a file: there a matrix is [out, in], as PyTorch
stores it, with one matrix for each layer or expert.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn, Literal, Var

from ..._autocast import MarkedWeight
from ..._base.typing import Shape
from ..._program import (
    Flow,
    aval_of,
    data_of,
    is_matmul,
    is_multiplication,
    scopes,
    walk,
)
from ..._quantize import Quantizer, Role
from .._inspect import Traced, innermost_note, line_text

# ("layer", (n, i)): layer i of n, or one that a loop chooses if i is None;
# ("transpose", axes), ("reshape", shape), ("cast", dtype).
Move = tuple[str, Any]


class Weight(NamedTuple):
    """A weight of a program, moved, or a value that is computed of weights only.

    Attributes:
        path: Its path; "" if it is computed.
        shape: Its present shape.
        moves: The moves since.
    """

    path: str
    shape: Shape
    moves: tuple[Move, ...] = ()


COMPUTED = Weight("", ())


class Layout(NamedTuple):
    """How an operand becomes matrices.

    Attributes:
        axes: Its axes: those of batches, of the result, of the sum.
        batch: The number of axes of batches, such as experts.
        out: The number of axes of the result.
        is_whole: Whether a file has the axes apart, as for a convolution.
    """

    axes: tuple[int, ...]
    batch: int
    out: int
    is_whole: bool = False

    def matrices(self, x: Any) -> Any:
        """Returns [*batch, out, in]."""
        x = x.transpose(self.axes)
        split = self.batch, self.batch + self.out
        sizes = math.prod(x.shape[slice(*split)]), math.prod(x.shape[split[1] :])
        return x.reshape(*x.shape[: self.batch], *sizes)

    def in_file(self, shape: Shape) -> Shape:
        """Returns the shape of one matrix in a file."""
        shape = tuple(shape[i] for i in self.axes[self.batch :])
        sizes = math.prod(shape[: self.out]), math.prod(shape[self.out :])
        return shape if self.is_whole else sizes


class Use(NamedTuple):
    """An operation that reads a weight.

    Attributes:
        weight: The weight, as it is read.
        dtype: In which dtype.
        why: What the operation is, or why it is not quantized.
        where: The line of the user's code.
        layout: How its operand becomes matrices; None if it is no matmul.
        mark: The quantized product; None for others.
    """

    weight: Weight
    dtype: str
    why: str
    where: str
    layout: Layout | None
    mark: MarkedWeight | None

    @property
    def layers(self) -> list[tuple[int, int | None]]:
        """For each choice of a layer, how many there are, and which it is."""
        return [layer for kind, layer in self.weight.moves if kind == "layer"]

    @property
    def cut(self) -> tuple[Move, ...]:
        """The moves to a layer, whichever it is, without casts."""
        moves = [x for x in self.weight.moves if x[0] != "cast"]
        last = max((i for i, x in enumerate(moves, 1) if x[0] == "layer"), default=0)
        return tuple(
            (kind, (given[0], None) if kind == "layer" else given)
            for kind, given in moves[:last]
        )

    @property
    def quantizer(self) -> Quantizer | None:
        """The quantizer of the weight."""
        return self.mark and self.mark.product.recipe.quantizer(Role.WEIGHT)

    def loops(self, index: Sequence[int]) -> list[int]:
        """Returns which iterations of the loops around it read this layer."""
        pairs = zip(self.layers, index, strict=True)
        return [i for (_, one), i in pairs if one is None]

    def reads(self, index: Sequence[int]) -> bool:
        """Returns whether it reads this layer."""
        pairs = zip(self.layers, index, strict=False)
        return all(one is None or one == i for (_, one), i in pairs)


def moved(x: Any, moves: Sequence[Move], index: Sequence[Any]) -> Any:
    """Returns what becomes of a weight, or of the numbers of its elements."""
    layers = iter(index)
    for kind, given in moves:
        if kind == "layer":
            x = x[next(layers)]
        elif kind == "cast":
            x = x.astype(given)
        else:
            x = x.transpose(given) if kind == "transpose" else x.reshape(given)
    return x


class _Weights(Flow[Weight | None]):
    """None for values that depend on data."""

    def constant(self, value: object) -> Weight:
        return COMPUTED

    def join(self, a: Weight | None, b: Weight | None) -> Weight | None:
        return a if a == b else None if a is None or b is None else COMPUTED

    def transfer(
        self, equation: JaxprEqn, facts: Sequence[Weight | None]
    ) -> list[Weight | None]:
        count, weights = len(equation.outvars), _operands(equation, facts)
        one = weights if len(weights) == count else weights[:1] * count
        other = None if None in weights else COMPUTED
        if _mark(equation) is not None:  # what its product makes of it is no weight
            return [other] * count
        found = [_moved(equation, *pair) for pair in enumerate(one)] or [None] * count
        return [other if x is None else x for x in found]


def _mark(equation: JaxprEqn) -> MarkedWeight | None:
    found = (data_of(entry.name, MarkedWeight) for entry in scopes(equation))
    return next(filter(None, found), None)


def _operands(
    equation: JaxprEqn, facts: Sequence[Weight | None]
) -> list[Weight | None]:
    """Returns the operands of an equation, cut into layers by the loops around it."""
    found = []
    for weight, variable in zip(facts, equation.invars, strict=True):
        shape = getattr(aval_of(variable), "shape", ())
        while weight is not None and len(weight.shape) > len(shape):
            first, *rest = weight.shape
            moves = (*weight.moves, ("layer", (first, None)))
            weight = Weight(weight.path, tuple(rest), moves)
        is_other = weight is not None and weight.shape != shape
        found.append(COMPUTED if is_other else weight)
    return found


# What changes neither the numbers nor their order.
_SAME = (
    "copy copy_p name optimization_barrier pvary reshard sharding_constraint".split()
)
_SHAPES = "reshape squeeze expand_dims broadcast_in_dim".split()


def _moved(equation: JaxprEqn, number: int, weight: Weight | None) -> Weight | None:
    """Returns the weight that a result still is."""
    name, params = equation.primitive.name, equation.params
    shape = tuple(getattr(aval_of(equation.outvars[number]), "shape", ()))
    move: list[Move] = []
    if weight is None or not weight.path:
        return None
    if name == "transpose":
        move = [("transpose", tuple(params["permutation"]))]
    elif name in _SHAPES and math.prod(shape) == math.prod(weight.shape):
        move = [("reshape", shape)]
    elif name == "convert_element_type":
        move = [("cast", str(np.dtype(params["new_dtype"])))]
    elif name in ("slice", "dynamic_slice") and shape == (1, *weight.shape[1:]):
        start = params.get("start_indices", equation.invars[1:])[0]
        start = start.val if isinstance(start, Literal) else start
        one = None if isinstance(start, Var) else int(start)
        move = [("layer", (weight.shape[0], one)), ("reshape", shape)]
    elif name not in _SAME:
        return None
    return Weight(weight.path, shape, (*weight.moves, *move))


def uses_of(traced: Traced) -> Iterator[Use]:
    """Yields the operations that read weights.

    Raises:
        ValueError: A quantized product reads a weight that is computed.
    """
    inputs = [
        Weight(path, x.shape) if is_weight else None
        for path, is_weight, x in zip(
            traced.paths, traced.is_weight, traced.inputs, strict=True
        )
    ]
    for visit in walk(traced.jaxpr, inputs, _Weights()):
        equation, mark, where = visit.equation, _mark(visit.equation), ""
        followed = {weight.path for weight in visit.results if weight is not None}
        for side, weight in enumerate(_operands(equation, visit.operands)):
            if weight is None or (not weight.path and mark is None):
                continue
            where = line_text(visit.frames)
            if not weight.path:
                raise ValueError(
                    f"The matmul at {where} quantizes a weight that the function "
                    "computes, or cuts by `jax.shard_map`; a file holds parameters. "
                    "Compute it before, or keep the matmul in half precision by a rule."
                )
            if weight.path in followed:
                continue
            note, why = innermost_note(visit.scopes), f"read by {equation.primitive}"
            layout = _layout(equation, side, mark)
            if layout is not None:
                why = "a matmul" if note is None else note.reason
                why = why.rpartition("not quantized: ")[2]
            dtype = aval_of(equation.invars[side]).dtype
            dtype = dtype if mark is None else mark.product.dtype
            yield Use(weight, str(dtype), why, where, layout, mark)


def _layout(equation: JaxprEqn, side: int, mark: MarkedWeight | None) -> Layout | None:
    params, groups = equation.params, ()
    if mark is not None:
        product: Any = mark.product
        numbers = product.dimension_numbers
        side = 0 if getattr(product, "is_weight_first", False) else 1
        rank = aval_of(equation.invars[0]).ndim
    elif is_matmul(equation) and not is_multiplication(equation) and side < 2:
        numbers = params.get("ragged_dot_dimension_numbers")
        numbers = params.get("dimension_numbers", numbers)
        rank = aval_of(equation.invars[side]).ndim
    else:
        return None
    if isinstance(numbers, lax.ConvDimensionNumbers):
        return Layout(tuple(numbers.rhs_spec), 0, 1, is_whole=True) if side else None
    if isinstance(numbers, lax.RaggedDotDimensionNumbers):
        groups, numbers = numbers.rhs_group_dimensions, numbers.dot_dimension_numbers
    if numbers is None or (groups and not side):
        return None
    summed, batch = (pair[side] for pair in numbers)
    batch = (*batch, *groups)
    out = [i for i in range(rank) if i not in (*batch, *summed)]
    return Layout((*batch, *out, *summed), len(batch), len(out))
