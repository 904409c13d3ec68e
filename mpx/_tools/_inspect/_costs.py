r"""Costs of operations: FLOPs, bytes and residuals, counted from shapes.

FLOPs are floating-point operations of the program as written:

| operation | FLOPs |
|---|---|
| `dot_general` and relatives | $2 \cdot \text{size(result)} \cdot K$, with $K$ the length of the sum |
| attention kernels | $2 \cdot \text{size(query)} \cdot \text{keys}$ for each of 2 matmuls, 5 backward; masked keys count, too |
| `conv_general_dilated` | 2 for each pair of weight and input element; none for padding and holes |
| elementwise, also `exp`, comparisons and selects | 1 per element |
| reductions | 1 per element, less 1 per result |
| cumulative operations, scatters, collectives that add | 1 per element |
| windows | 1 per element of the window, less 1, per result |
| sorts | $n \lceil \log_2 n \rceil$ |
| FFT | $5 n \log_2 n$ per transform, half of it for real input |
| `cholesky`, `lu`, `geqrf`, `qr`, `triangular_solve` | Golub and Van Loan, Matrix Computations, 4th edition |
| matmuls of 8-bit integers | as of floats |
| casts, data movement, other integers, random bits, other 8-bit numbers | 0 |

Complex numbers count 4 times in matmuls and twice elsewhere. Other operations are not
counted, and reports list them. XLA counts likewise, but counts casts and integers, too,
and counts transcendental functions separately.

A symbolic dimension (`jax.export.symbolic_shape`) counts as 4,096.

Bytes are the reads and writes of an operation without fusion: an upper bound of memory
traffic. Reshapes move nothing; slices and gathers read what they return, in-place
updates write what they change.

*Residuals* are values that are saved for backward.
"""  # noqa: E501

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.extend import core
from jax.extend.core import JaxprEqn, Var

from ..._base.jax_compat import open_jaxpr
from ..._base.typing import Atom, Aval, Program
from ..._program import (
    Flops,
    aval_of,
    count,
    lengths,
    properties,
    scopes,
    sub_jaxprs,
    summed_numbers,
)
from ._traced import phase


def bits_of(dtype: Any) -> int:
    """Returns the bits of one number of a dtype in memory."""
    is_key_or_empty = not isinstance(dtype, np.dtype) or dtype == jax.dtypes.float0
    return 8 * dtype.itemsize if is_key_or_empty else jax.dtypes.itemsize_bits(dtype)


def bytes_of(aval: Aval) -> int:
    """Returns the bytes of an array of a type; 0 for tokens and other non-arrays."""
    if not hasattr(aval, "shape") or not hasattr(aval, "dtype"):
        return 0
    return math.ceil(count(aval.shape) * bits_of(aval.dtype) / 8)


def bytes_moved(equation: JaxprEqn) -> int:
    """Returns the bytes that one run of an equation reads and writes."""
    name = equation.primitive.name
    known = properties(name)
    if known.is_free:
        return 0
    operands = [aval_of(v) for v in equation.invars]
    writes = sum(bytes_of(aval_of(v)) for v in equation.outvars)
    if known.reads_part:
        return 2 * writes + sum(map(bytes_of, operands[1:]))
    if known.writes_part:
        update = operands[1 if name == "dynamic_update_slice" else 2]
        return sum(map(bytes_of, operands[1:])) + 2 * bytes_of(update)
    reads = {id(v): bytes_of(aval_of(v)) for v in equation.invars}  # x * x reads x once
    return sum(reads.values()) + writes


def flops(equation: JaxprEqn) -> int | None:
    """Returns the floating-point operations of one run of an equation.

    Args:
        equation: An equation without a program in it, see `mpx._program.sub_jaxprs`.

    Returns:
        The count; None if the primitive is unknown to mpx.
    """
    rule = _COUNTS.get(properties(equation.primitive.name).flops)
    return None if rule is None else rule(_with_lengths(equation))


def _with_lengths(equation: JaxprEqn) -> JaxprEqn:
    """Returns an equation whose dimensions are numbers (`mpx._program.lengths`)."""
    atoms = (*equation.invars, *equation.outvars)
    shapes = [getattr(aval_of(atom), "shape", ()) for atom in atoms]
    if all(isinstance(n, int) for shape in shapes for n in shape):
        return equation

    def known(atom: Atom) -> Var:
        aval = aval_of(atom)
        return Var(ShapedArray(lengths(aval.shape), aval.dtype))

    return equation.replace(
        invars=[known(v) for v in equation.invars],
        outvars=[known(v) for v in equation.outvars],
    )


def _floats(aval: Aval) -> int:
    """Returns the count of one elementwise operation: 0 for integers, 2 for complex."""
    if jnp.issubdtype(aval.dtype, jnp.complexfloating):
        return 2
    return int(jnp.issubdtype(aval.dtype, jnp.floating))


def _size(aval: Aval) -> int:
    return math.prod(aval.shape)


def _elementwise(equation: JaxprEqn) -> int:
    result = aval_of(equation.outvars[0])
    if _floats(result) and bits_of(result.dtype) <= 8:
        return 0  # 8-bit numbers are moved, as by a select, not computed with
    weight = max(_floats(aval_of(v)) for v in (*equation.invars, *equation.outvars))
    is_multiplied = equation.primitive.name in ("mul", "div", "integer_pow", "square")
    return _size(result) * (2 * weight if weight == 2 and is_multiplied else weight)


def _reduction(equation: JaxprEqn) -> int:
    # `reduce` takes pairs of operand and initial value.
    operand, result = aval_of(equation.invars[0]), aval_of(equation.outvars[0])
    return (_size(operand) - _size(result)) * _floats(operand)


def _per_operand_element(equation: JaxprEqn) -> int:
    avals = [aval_of(v) for v in equation.invars]
    return sum(_size(aval) * _floats(aval) for aval in avals)


def _scatter(equation: JaxprEqn) -> int:
    updates = aval_of(equation.invars[2])
    return _size(updates) * _floats(updates)


def _window(equation: JaxprEqn) -> int:
    result = aval_of(equation.outvars[0])
    window = math.prod(equation.params["window_dimensions"])
    return _size(result) * (window - 1) * _floats(result)


def _select_and_scatter(equation: JaxprEqn) -> int:
    # For each element of the source, the window is searched and one sum is computed.
    source = aval_of(equation.invars[0])
    window = math.prod(equation.params["window_dimensions"])
    return _size(source) * window * _floats(source)


def _sort(equation: JaxprEqn) -> int:
    operand = aval_of(equation.invars[0])
    length = operand.shape[equation.params["dimension"]]
    # The bits of n - 1 are log2(n), rounded up.
    return _size(operand) * max(length - 1, 0).bit_length() * _floats(operand)


def _fma(*avals: Aval) -> int:
    """Returns the count of a multiplication and an addition, real or complex."""
    return 8 if any(_floats(aval) == 2 for aval in avals) else 2


def _product(equation: JaxprEqn) -> int:
    lhs, rhs, result = _matrices(equation)
    terms = summed_numbers(equation)
    is_counted = _floats(result) or all(map(_is_int8, (lhs, rhs)))
    return _fma(lhs, rhs) * _size(result) * terms if is_counted else 0


def _is_int8(aval: Aval) -> bool:
    return aval.dtype in (np.int8, np.uint8)


def _ragged_dot(equation: JaxprEqn) -> int:
    numbers = equation.params["ragged_dot_dimension_numbers"]
    (contracting, _), _ = numbers.dot_dimension_numbers
    # If the contracted axis is ragged, each group has a result of a part of it.
    ragged = set(numbers.lhs_ragged_dimensions) & set(contracting)
    groups = aval_of(equation.invars[2]).shape[-1] if ragged else 1
    return _product(equation) // groups


def _last_axis_multiplied(equation: JaxprEqn) -> int:
    lhs, rhs, result = _matrices(equation)
    return _fma(lhs, rhs) * _size(result) * lhs.shape[-1]


def _matrices(equation: JaxprEqn) -> tuple[Aval, Aval, Aval]:
    lhs, rhs = (aval_of(v) for v in equation.invars[:2])
    return lhs, rhs, aval_of(equation.outvars[0])


def _attention(equation: JaxprEqn, products: int) -> int:
    query, key = (aval_of(v) for v in equation.invars[:2])
    # The layout specifies whether heads are before or after the sequence.
    keys = key.shape[2 if equation.params["layout"] else 1]
    return 2 * products * _size(query) * keys


def _convolution(equation: JaxprEqn) -> int:
    params = equation.params
    lhs, rhs, result = _matrices(equation)
    if not _floats(result):
        return 0
    lhs_spec, rhs_spec, out_spec = params["dimension_numbers"]
    meetings = math.prod(
        _meetings(lhs.shape[i], rhs.shape[k], result.shape[o], *numbers)
        for i, k, o, *numbers in zip(
            lhs_spec[2:],
            rhs_spec[2:],
            out_spec[2:],
            params["window_strides"],
            (low for low, _ in params["padding"]),
            params["lhs_dilation"],
            params["rhs_dilation"],
            strict=True,
        )
    )
    batch, features = (result.shape[i] for i in out_spec[:2])
    return _fma(lhs, rhs) * batch * features * rhs.shape[rhs_spec[1]] * meetings


@functools.lru_cache(maxsize=1024)
def _meetings(
    size: int,
    window: int,
    results: int,
    stride: int,
    low: int,
    lhs_dilation: int,
    rhs_dilation: int,
) -> int:
    """Returns how often a weight meets a real element, along one axis."""
    starts = np.arange(results)[:, None] * stride - low
    places = starts + np.arange(window)[None, :] * rhs_dilation
    last = (size - 1) * lhs_dilation
    there = (places >= 0) & (places <= last) & (places % lhs_dilation == 0)
    return int(there.sum())


def _fft(equation: JaxprEqn) -> int:
    operand, result = aval_of(equation.invars[0]), aval_of(equation.outvars[0])
    sides = equation.params["fft_lengths"]
    points = math.prod(sides)
    batch = _size(operand) // math.prod(operand.shape[-len(sides) :] or (1,))
    is_real = _floats(operand) == 1 or _floats(result) == 1
    whole = 5 * batch * points * math.log2(points) if points else 0
    return round(whole / 2 if is_real else whole)


def _matrix_sizes(equation: JaxprEqn) -> tuple[int, int, int]:
    """Returns the batch (complex counts 4 times), rows and columns of the operand."""
    aval = aval_of(equation.invars[0])
    *batch, m, n = aval.shape
    return math.prod(batch) * (4 if _floats(aval) == 2 else 1), m, n


def _cholesky(equation: JaxprEqn) -> int:
    batch, n, _ = _matrix_sizes(equation)
    return round(batch * n**3 / 3)


def _lu(equation: JaxprEqn) -> int:
    batch, m, n = _matrix_sizes(equation)
    k = min(m, n)
    return round(batch * (2 * m * n * k - (m + n) * k**2 + 2 * k**3 / 3))


def _reflectors(equation: JaxprEqn) -> int:
    """Counts QR as reflectors, or the product of such reflectors."""
    batch, m, n = _matrix_sizes(equation)
    k = min(m, n)
    return round(batch * 2 * k**2 * (max(m, n) - k / 3))


def _triangular_solve(equation: JaxprEqn) -> int:
    batch, n, _ = _matrix_sizes(equation)
    right = aval_of(equation.invars[1])
    columns = right.shape[-1] if equation.params["left_side"] else right.shape[-2]
    return batch * n**2 * columns


def _pallas(equation: JaxprEqn) -> int | None:
    """Returns the author's cost estimate, or else the sum over the instructions."""
    estimate = equation.params.get("cost_estimate")
    if estimate is not None:
        return int(estimate.flops)
    grid = equation.params["grid_mapping"].grid
    if not all(isinstance(size, int) for size in grid):
        return None
    body = open_jaxpr(equation.params["jaxpr"])
    computing = (e for e in body.eqns if not properties(e.primitive.name).is_access)
    counts = list(map(flops, computing))
    if any(one is None for one in counts):
        return None
    return math.prod(grid) * sum(one or 0 for one in counts)


_COUNTS: dict[Flops, Callable[[JaxprEqn], int | None]] = {
    Flops.ZERO: lambda equation: 0,
    Flops.ELEMENTWISE: _elementwise,
    Flops.REDUCTION: _reduction,
    Flops.PER_OPERAND_ELEMENT: _per_operand_element,
    Flops.SCATTER: _scatter,
    Flops.SORT: _sort,
    Flops.WINDOW: _window,
    Flops.SELECT_AND_SCATTER: _select_and_scatter,
    Flops.DOT_GENERAL: _product,
    Flops.RAGGED_DOT: _ragged_dot,
    Flops.LAST_AXIS_PRODUCT: _last_axis_multiplied,
    Flops.CONVOLUTION: _convolution,
    # Two matmuls: scores, and the weighted sum of values.
    Flops.ATTENTION_FORWARD: functools.partial(_attention, products=2),
    # The scores again, and a gradient for each of four factors.
    Flops.ATTENTION_BACKWARD: functools.partial(_attention, products=5),
    Flops.FFT: _fft,
    Flops.CHOLESKY: _cholesky,
    Flops.LU: _lu,
    Flops.QR: lambda equation: 2 * _reflectors(equation),
    Flops.REFLECTORS: _reflectors,
    Flops.TRIANGULAR_SOLVE: _triangular_solve,
    Flops.PALLAS: _pallas,
}


# --- Residuals ------------------------------------------------------------------------
#
# Operations of the backward pass have the transform `transpose` on their name stack. A
# residual is a value that the forward pass makes and the backward pass reads. Each is
# counted once. Not counted are inputs and constants, which exist anyway, and arrays
# filled with one number, which a compiler writes where they are read. A scan returns
# its residuals stacked, so its length is included. Of consecutive programs (the micro-
# batches of an accumulation are one program, run again and again) the largest counts.


def residual_bytes(jaxpr: Program) -> int | None:
    """Returns the bytes saved for backward; None without a backward pass."""
    made: set[Var] = set()
    kept: set[Var] = set()
    inside: list[int] = []
    has_backward = False
    for equation in open_jaxpr(jaxpr).eqns:
        if phase(scopes(equation)) != "forward":
            has_backward = True
            kept |= {v for v in equation.invars if not isinstance(v, core.Literal)}
        else:
            made |= set(equation.outvars) - _filled(equation)
            found = [residual_bytes(sub.jaxpr) for sub in sub_jaxprs(equation)]
            inside += [count for count in found if count is not None]
    if not has_backward and not inside:
        return None
    return sum(bytes_of(aval_of(v)) for v in made & kept) + max(inside, default=0)


def _filled(equation: JaxprEqn) -> set[Var]:
    """Returns the results of an equation that are filled with one number."""
    if equation.primitive.name == "broadcast_in_dim":
        is_number = isinstance(equation.invars[0], core.Literal)
        return set(equation.outvars) if is_number else set()
    if equation.primitive.name != "custom_jvp_call":
        return set()
    (sub,) = sub_jaxprs(equation)
    inside = set[object]().union(*map(_filled, sub.jaxpr.eqns))
    pairs = zip(equation.outvars, sub.jaxpr.outvars, strict=True)
    return {outer for outer, inner in pairs if inner in inside}
