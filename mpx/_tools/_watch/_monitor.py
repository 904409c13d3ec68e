"""`mpx.monitor`: a step that also returns statistics of its matmul operands.

A probe (`mpx._program`) follows sources (`_trace`) and counts each operand once, before
quantization; weights that are arguments are counted outside of loops.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn
from jaxtyping import PyTree

from ..._autocast import taking_notes
from ..._base.errors import describe
from ..._base.typing import AnyArray, Aval
from ..._program import (
    Form,
    Location,
    Records,
    Tagged,
    divide,
    is_array_or_type,
    is_matmul,
    is_multiplication,
    probed,
)
from ..._quantize import Format, Role
from ..._settings import MARK, read_weights, unwrapped, weights_in_call, weights_of
from .._inspect import Traced, trace
from ._comparison import numbered
from ._monitor_report import Statistics
from ._statistics import (
    Asked,
    AskedFormat,
    asked_formats,
    counts,
    joined,
    sampled,
    tensor_statistics,
)
from ._trace import Source, SourceProbe, phase_of, where

CALL = "`mpx.monitor(func)(*args)`"


def monitor(
    func: Callable[..., PyTree],
    formats: Asked | Sequence[Asked] = ("float16", Format.HYBRID),
    *,
    weights: int | str | tuple[int | str, ...] | None = None,
    sample: int = 4,
) -> "Callable[..., tuple[PyTree, Statistics]]":
    r"""Wraps a function to also return statistics of its matmul operands.

    Pass it the training step, and occasionally call the returned function instead of
    the step. It returns the step's result and statistics of every operand of a matmul
    or convolution, in the forward and backward pass: inputs, weights, gradients of
    outputs. A gradient function or a loss works, too. It is a separate compiled
    program; the step itself is unchanged.

    The statistics of an operand are the largest magnitude, the share of zeros, and for
    each requested format

    $$\mathrm{SNR} = 10 \log_{10} \frac{\sum x^2}{\sum (x - q(x))^2}$$

    and the shares of values beyond its range, in its subnormal range, and flushed to
    zero. An operand of several matmuls is counted once. An operand that a recipe
    quantizes is counted as it is before quantization.

    Args:
        func: The function, jitted or not. It is traced and compiled for each structure,
            shapes and dtypes of its arguments. Its donations are ignored.
        formats: One or several formats to count in. A dtype ("float16", "bfloat16",
            "float8_e4m3fn", ...) or a `mpx.Format` counts unscaled values. A quantizer
            or a recipe counts values with the scales that it computes, which reads the
            operands once more. If the legs of a recipe differ, it is counted for each
            quantized leg: "RecipeByLeg wgrad". By default float16 and
            `mpx.Format.HYBRID`: E4M3, and E5M2 for gradients, as in recipes.
        weights: The position or name of the argument that contains the weights, or
            several of them; by default those of an autocast function, else the first
            argument with a floating array, or the arrays of `func` itself.
        sample: Counts every `sample`-th row of inputs and gradients; 1 counts all.
            Weights are always counted in full. Rows are along the second-to-last axis,
            such as tokens.

    Returns:
        A function of the same arguments that returns the result of `func` and
        `mpx.reports.Statistics`: print them, or log their `records()`. Its
        `trace(*args)` returns the program, like that of a jitted function: compile it
        to see its cost.

    Raises:
        TypeError: `func` is not callable, a format is invalid, or the function is
            called inside one that JAX is tracing.
        ValueError: A format is named twice, the function contains no matmul or
            convolution, or `sample` is less than 1.

    The result equals that of `func` up to the order of sums, because it is another
    program. In a loop each iteration is counted; `TensorStatistics.turns` lists them
    separately. In a `while` loop they are counted together. Linear solves are not
    inspected.

    Examples:
        >>> import jax, jax.numpy as jnp, mpx
        >>> def loss(w, x):
        ...     return jnp.mean((x @ w) ** 2)
        >>> w, x = jnp.full((8, 4), 1e-3), jnp.full((2, 8), 1e3)
        >>> grads, seen = mpx.monitor(jax.grad(loss), "float16", sample=1)(w, x)
        >>> [(row.kind, round(row.amax, 3)) for row in seen.rows]
        [('input', 1000.0), ('weight', 0.001), ('gradient', 2.0)]
        >>> seen.rows[1].formats["float16"].flushed
        0.0
    """
    if not callable(func):
        raise TypeError(
            "`mpx.monitor(func)` needs a training step, a gradient function or a loss; "
            f"got {describe(func)}."
        )
    if isinstance(sample, bool) or not isinstance(sample, int) or sample < 1:
        raise ValueError(
            "`sample` of `mpx.monitor` must be a whole number, at least 1; got "
            f"{describe(sample)}."
        )
    return _Monitor(func, asked_formats(formats), read_weights(weights, CALL), sample)


class _Monitor:
    """A function and its programs, one for each form of its arguments."""

    def __init__(
        self,
        func: Callable[..., PyTree],
        formats: tuple[AskedFormat, ...],
        said: tuple[int | str, ...] | None,
        sample: int,
    ) -> None:
        self.formats, self.sample = formats, sample
        self._func, (self._inside, self._wrap) = func, unwrapped(func)
        self._said = said
        # Not a dict: non-array leaves may be unhashable.
        self._made: list[tuple[Form, tuple[Aval, ...], _Program]] = []

    def __call__(self, *args: PyTree, **kwargs: PyTree) -> tuple[PyTree, Statistics]:
        """Returns the result and the statistics."""
        arrays, form = divide((self._inside, args, kwargs))
        types = tuple(map(jax.typeof, arrays))
        for known, its_types, program in self._made:
            if known == form and its_types == types:
                return program(arrays)
        program, inputs = self._program(args, kwargs)
        self._made.append((form, types, program))
        return program(inputs)

    def trace(self, *args: PyTree, **kwargs: PyTree) -> jax.stages.Traced:
        """Returns the program for these arguments, as `jax.jit(func).trace` does."""
        program, inputs = self._program(args, kwargs)
        return program.trace(inputs)

    def _program(
        self, args: tuple[PyTree, ...], kwargs: dict[str, PyTree]
    ) -> "tuple[_Program, tuple[AnyArray, ...]]":
        said = self._said
        if said is None:
            said = _default_weights(self._func, args, kwargs)
        positions = weights_in_call(self._inside, said, args, kwargs, CALL)
        with taking_notes():
            traced = trace(self._inside, args, kwargs, self._wrap, positions, CALL)
        return _Program(traced, self.formats, self.sample), traced.inputs


def _default_weights(
    func: Callable[..., PyTree], args: tuple[PyTree, ...], kwargs: dict[str, PyTree]
) -> tuple[int | str, ...]:
    """Returns the arguments with the weights, if the user does not set them.

    For `step(loss, model, batch)` it is the second: a function has no floating array.
    """
    if getattr(func, MARK, None) is not None:
        return weights_of(func)
    for place, argument in (*enumerate(args), *kwargs.items()):
        if any(map(_is_float, jax.tree.leaves(argument))):
            return (place,)
    return (0,)


def _is_float(leaf: Any) -> bool:
    return is_array_or_type(leaf) and jnp.issubdtype(leaf.dtype, jnp.inexact)


class _Program:
    """A traced function that also returns counts."""

    def __init__(
        self, traced: Traced, formats: tuple[AskedFormat, ...], sample: int
    ) -> None:
        self._traced, self._formats, self._sample = traced, formats, sample
        self._rows: dict[Hashable, _Row] = {}
        self._uncounted: tuple[str, ...] = ()
        self._run = jax.jit(self._counted)

    def _counted(
        self, arrays: Sequence[AnyArray]
    ) -> tuple[list[AnyArray], list[AnyArray]]:
        probe = _Counts(self._formats, self._sample)
        named = zip(self._traced.paths, self._traced.is_weight, strict=True)
        tags = [
            probe.new(Role.WEIGHT, path, is_argument=True)
            if is_weight
            else probe.new(Role.INPUT)
            for path, is_weight in named
        ]
        results, records = probed(self._traced.jaxpr, probe, arrays, tags)
        for tag, array in zip(tags, arrays, strict=True):
            row = probe.rows.get(tag.key)
            if row is not None and row.is_whole_weight:
                row.dtype = row.dtype or str(array.dtype)
                records[tag.key] = _of_weight(array, row, self._formats)
        if not records:
            raise ValueError(
                f"{CALL} found no matmul or convolution in "
                f"`{getattr(self._traced, 'name', 'func')}`: there is nothing to "
                "count."
            )
        # Set while JAX traces: the operands of the counts that the program returns.
        self._rows = {key: probe.rows[key] for key in probe.rows if key in records}
        unseen = probe.unseen.items()
        self._uncounted = tuple(name for key, name in unseen if key not in records)
        return results, [records[key] for key in self._rows]

    def trace(self, arrays: Sequence[AnyArray]) -> jax.stages.Traced:
        return self._run.trace(list(arrays))

    def __call__(self, arrays: Sequence[AnyArray]) -> tuple[PyTree, Statistics]:
        results, found = self._run(list(arrays))
        result = self._traced.call.result_of(results)
        return result, self._statistics(jax.device_get(found), result)

    def _statistics(self, found: Sequence[np.ndarray], result: PyTree) -> Statistics:
        names = _layers(self._rows)
        rows = [
            tensor_statistics(x, names[key], row.kind, row.dtype, self._formats)
            for (key, row), x in zip(self._rows.items(), found, strict=True)
        ]
        bits = {each.name: each.bits for each in self._formats}
        found_rows = [row for row in rows if row is not None]
        return Statistics.of(found_rows, bits, result, self._uncounted)


@dataclasses.dataclass
class _Row:
    """A counted operand.

    Attributes:
        kind: Its kind.
        dtype: Its dtype; "" for an argument that was met quantized only.
        axis: The axis that matmuls contract.
        products: The layer (if any), scopes and other operands' keys of each matmul
            with it.
        turns: For a weight, the number of leading axes that loops iterate over.
        is_whole_weight: Whether it is an argument, which is counted outside of loops.
    """

    kind: Role
    dtype: str
    axis: int
    turns: int = 0
    is_whole_weight: bool = False
    products: list[tuple[str, str, tuple[Hashable, ...]]] = dataclasses.field(
        default_factory=list
    )


class _Counts(SourceProbe):
    """Counts the values of each operand of a matmul, once."""

    def __init__(self, formats: tuple[AskedFormat, ...], sample: int) -> None:
        super().__init__()
        self._sample = sample
        self.rows: dict[Hashable, _Row] = {}
        # The names of operands whose source is unknown here.
        self.unseen: dict[Hashable, str] = {}
        self._formats = formats
        # By source, and by the number of loops that cut it into layers.
        self._arrays: dict[tuple[Hashable, int], AnyArray] = {}
        self._counted: frozenset[Hashable] = frozenset()

    def carried(self, equation: JaxprEqn, place: Location, tag: Source) -> Source:
        """Returns a weight's own source; a new one for other carries, which change."""
        if tag.kind is Role.WEIGHT:
            return tag
        is_backward = phase_of(equation, place) == "backward"
        return self.new(Role.GRADIENT if is_backward else Role.INPUT)

    def cut(self, tag: Source) -> Source:
        """Returns the source of a layer of a stacked weight."""
        return dataclasses.replace(tag, turns=tag.turns + 1)

    def stacked(self, tag: Source) -> Source:
        """Returns the source of stacked residuals, which the forward pass counted."""
        return dataclasses.replace(tag, turns=max(tag.turns - 1, 0))

    def meet(self, values: Sequence[Tagged]) -> None:
        """Keeps sources, to count quantized operands as they were before."""
        for value in values:
            if not value.tag.is_quantized:
                self._arrays[_key(value.tag), value.tag.turns] = value.array

    def keep(self, records: Records, found: Records) -> None:
        """Adds records by maximum: a conditional records 0 for branches not taken."""
        for key, now in found.items():
            if key in records and records[key].shape == now.shape:
                now = jnp.maximum(records[key], now)
            records[key] = now

    @contextlib.contextmanager
    def inside(self, *, is_apart: bool = False) -> Iterator[None]:
        """Makes sources of outside known inside, and not the other way round."""
        before = self._arrays
        self._arrays = {} if is_apart else dict(before)
        try:
            yield
        finally:
            self._arrays = before

    @contextlib.contextmanager
    def branches(self) -> Iterator[Callable[[], None]]:
        """Lets each branch count for itself.

        An operand that some branch does not count is counted again after all of them,
        unless it was made inside.
        """
        before, outside = self._counted, {key for key, _ in self._arrays}
        by_branch: list[frozenset[Hashable]] = []

        def begin() -> None:
            by_branch.append(self._counted)
            self._counted = before

        yield begin
        begin()
        _, *found = by_branch
        made = frozenset().union(*found) - outside
        self._counted = before.union(frozenset.intersection(*found), made)

    def join(self, before: AnyArray, now: AnyArray) -> AnyArray:
        """Combines the counts of the iterations of a `while` loop."""
        return joined(before, now)

    def observe(
        self,
        equation: JaxprEqn,
        place: Location,
        operands: Sequence[Tagged],
        results: Sequence[Tagged],
    ) -> Records:
        """Returns the counts of a matmul's operands that are not counted yet."""
        if not is_matmul(equation) or is_multiplication(equation):
            return {}
        pair = operands[:2]
        layer = next((v.tag.path for v in pair if v.tag.path), "")
        at = where(equation, place)
        keys = [_key(v.tag) for v in pair]
        records: Records = {}
        for number, (value, key) in enumerate(zip(pair, keys, strict=True)):
            axis = _contracted(equation, number)
            records |= self._record(value, key, axis, layer or at or "product")
            others = tuple(keys[:number] + keys[number + 1 :])
            if key in self.rows:
                self.rows[key].products.append((layer, at, others))
        return records

    def _record(self, value: Tagged, key: Hashable, axis: int, name: str) -> Records:
        tag: Source = value.tag
        if key in self._counted or tag.is_again:
            return {}
        array: AnyArray | None = value.array
        if tag.is_quantized:
            array, axis = self._arrays.get((key, tag.turns)), -1
        dtype = "" if array is None else str(jnp.result_type(array))
        if array is not None and not (_is_real(array) and jnp.size(array)):
            return {}
        is_weight = tag.is_argument and tag.kind is Role.WEIGHT and key == tag.key
        row = _Row(tag.kind, dtype, axis, tag.turns, is_weight)
        if not is_weight and array is None:
            # No row is better than a row of other values.
            self.unseen.setdefault(key, f"{name}/{tag.kind.value}")
            return {}
        self._counted |= {key}
        self.rows.setdefault(key, row)
        if is_weight or array is None:
            return {}
        if tag.kind is not Role.WEIGHT:
            array = sampled(array, self._sample)
        return {key: counts(array, tag.kind, axis, self._formats)}


def _is_real(array: AnyArray) -> bool:
    return bool(jnp.issubdtype(jnp.result_type(array), jnp.floating))


def _key(tag: Source) -> Hashable:
    # A part differs from the whole; two parts of one shape are not distinguished.
    return tag.key if tag.part is None else (tag.key, tag.part)


def _contracted(equation: JaxprEqn, number: int) -> int:
    """Returns the axis of an operand that a matmul sums over, which has the blocks."""
    dimensions = equation.params.get("dimension_numbers")
    if equation.primitive.name != "dot_general" or dimensions is None:
        return -1
    return int(dimensions[0][number][-1])


def _of_weight(array: AnyArray, row: _Row, formats: Sequence[AskedFormat]) -> AnyArray:
    """Returns the counts of an argument, layer by layer if a loop cuts it."""
    count = lambda x: counts(x, Role.WEIGHT, row.axis, formats)  # noqa: E731
    for _ in range(row.turns):
        count = jax.vmap(count)
    return count(array)


def _layers(rows: dict[Hashable, _Row]) -> dict[Hashable, str]:
    """Returns a name for each operand by the weight it meets; unique for its kind."""
    names = {key: _own_layer(row) for key, row in rows.items()}
    for key, row in rows.items():
        if not names[key]:  # a gradient that meets only the input
            others = [k for *_, keys in row.products for k in keys]
            known = [names[k] for k in others if names.get(k)]
            names[key] = known[0] if known else row.products[0][1]
    found = ((names[key] or "product", row.kind) for key, row in rows.items())
    return dict(zip(rows, numbered(found), strict=True))


def _own_layer(row: _Row) -> str:
    return next((layer for layer, _, _ in row.products if layer), "")
