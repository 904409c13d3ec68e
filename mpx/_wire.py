r"""Weights that travel between devices in few bits, and the way back of gradients.

A weight $w$ that lies in pieces is gathered where it is used. If all that uses it casts
it to half precision, the pieces are cast, and not the whole:

$$y = \operatorname{f32}\big(\operatorname{gather}(\operatorname{half}(w))\big)
\qquad \bar w = \operatorname{gather}^T(\operatorname{reduce}(\bar y))$$

with $\bar y$ the gradients of all uses, summed in float32, and the transpose of the
gather, a sum over the devices, in the dtype that the policy says. The compiler finds
that the cast to float32 and the cast of each use undo each other.

This holds in the gradient functions only, which differentiate in reverse mode: what is
sent has a derivative rule of its own.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.extend.core import JaxprEqn
from jax.sharding import NamedSharding, PartitionSpec as P

from ._base.dtypes import is_half
from ._base.jax_compat import (
    as_varying,
    bind_equation,
    execution_context,
    manual_axes,
    type_varies_on,
)
from ._base.typing import AnyArray, Shape
from ._program import aval_of, properties, run_by
from ._quantize import AbstractProduct, PrequantizedWeight, may_travel, quantized_ahead
from ._settings import Wire

FLOAT32 = np.dtype(np.float32)


def travelling_dtype(wire: Wire, name: str, half: np.dtype) -> np.dtype | None:
    """The dtype in which a weight goes through a primitive; None: as it is written.

    Args:
        wire: What was said.
        name: The primitive.
        half: The dtype that the weight is computed with.
    """
    if properties(name).spreads:  # each device has it already
        return FLOAT32 if wire.reduce_dtype != FLOAT32 else None
    return half if wire.gather_dtype is None else np.dtype(wire.gather_dtype)


def gathered(
    equation: JaxprEqn, weight: AnyArray, dtype: np.dtype, wire: Wire
) -> AnyArray:
    """A float32 weight that travels in a dtype, rounded to it and float32 again.

    Args:
        equation: What brings its pieces together.
        weight: The weight as it lies.
        dtype: The dtype.
        wire: What was said of travelling.
    """

    def move(x: AnyArray) -> AnyArray:
        return bind_equation(equation, x)[0]

    def send(weight: AnyArray) -> AnyArray:
        return move(cast_where_it_lies(weight, dtype)).astype(FLOAT32)

    return _sent(send, move, weight, wire)


def only_gradient(
    move: Callable[[AnyArray], AnyArray], weight: AnyArray, wire: Wire
) -> AnyArray:
    """Zeros in the place of a float32 weight that arrives in another way.

    What they are differentiated by goes back as it would from the weight: only the
    gradient travels.
    """

    def send(weight: AnyArray) -> AnyArray:
        (like,) = jax.make_jaxpr(move)(weight).out_avals
        explicit = like.sharding if like.sharding.mesh.explicit_axes else None
        zeros = jax.lax.full(like.shape, 0, FLOAT32, sharding=explicit)
        return as_varying(zeros, type_varies_on(like))

    return _sent(send, move, weight, wire)


def _sent(
    send: Callable[[AnyArray], AnyArray],
    move: Callable[[AnyArray], AnyArray],
    weight: AnyArray,
    wire: Wire,
) -> AnyArray:
    """What is sent of a weight, and its gradient by the transpose of `move`."""
    is_constraint = not manual_axes() and not _has_explicit_axes(weight)

    def backward(_: None, g: AnyArray) -> tuple[AnyArray]:
        if is_constraint:
            # The compiler adds up where the gradient is made, and sends each device
            # its part; the transpose of a constraint would want the whole everywhere.
            return (g,)
        like = jax.typeof(weight).update(dtype=wire.reduce_dtype)
        narrow = g.astype(wire.reduce_dtype)
        (found,) = jax.linear_transpose(move, like)(narrow)
        return (found.astype(FLOAT32),)

    travel = jax.custom_vjp(send)
    travel.defvjp(lambda weight: (send(weight), None), backward)
    return travel(weight)


def _has_explicit_axes(x: AnyArray) -> bool:
    mesh = jax.typeof(x).sharding.mesh
    return bool(mesh.explicit_axes)


def cast_where_it_lies(weight: AnyArray, dtype: np.dtype) -> AnyArray:
    """A weight in half precision before it travels; see `where_it_lies`."""
    return where_it_lies(jax.lax.convert_element_type(weight, dtype))


def where_it_lies(narrow: AnyArray) -> AnyArray:
    """Holds a cast where what it is made of lies.

    An open constraint says nothing about where that is. Without it the compiler moves
    the constraint that follows to the other side of the cast (Shardy of jaxlib 0.10.2,
    2026-11), and the whole float32 array travels.
    """
    if manual_axes() or _has_explicit_axes(narrow):
        return narrow
    mesh = jax.typeof(narrow).sharding.mesh
    if mesh.empty:
        mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or not narrow.ndim:
        return narrow
    open_spec = P(*[P.UNCONSTRAINED] * narrow.ndim)
    return jax.lax.with_sharding_constraint(narrow, NamedSharding(mesh, open_spec))


@jax.custom_vjp
def joined(narrow: AnyArray, zeros: AnyArray) -> AnyArray:
    """The weight where it has arrived, float32, whose gradient goes to the zeros."""
    return narrow.astype(FLOAT32)


def _joined_forward(narrow: AnyArray, zeros: AnyArray) -> tuple[AnyArray, None]:
    return narrow.astype(FLOAT32), None


joined.defvjp(_joined_forward, lambda _, g: (None, g))


# ----------------------------------------------------------------------------
# A weight that is gathered, sent in the form that what uses it asks for.
#
# A product under a recipe reads 8 bits of a weight, everything else half precision.
# Which it is to be is known when the product is emitted, and not where the program
# gathers. So what gathers makes a `Gathering`, and the first use of its value sends it.


@dataclasses.dataclass(frozen=True)
class Gathering:
    """What an equation gathers.

    Attributes:
        weight: The float32 weight as it lies.
        equation: The equation.
        dtype: The dtype in which it travels as an array.
        wire: What was said of travelling.
        moves: What moves it where it has arrived, or gathers it further.
    """

    weight: AnyArray
    equation: JaxprEqn
    dtype: np.dtype
    wire: Wire
    moves: tuple[JaxprEqn, ...] = ()

    @property
    def shape(self) -> Shape:
        """The shape in which it arrives."""
        last = self.moves[-1] if self.moves else self.equation
        return aval_of(last.outvars[0]).shape

    def then(self, equation: JaxprEqn) -> "Gathering":
        """The same, and then moved by an equation where it arrives."""
        return dataclasses.replace(self, moves=(*self.moves, equation))

    def arrive(self) -> AnyArray:
        """Sends it rounded to its dtype; float32 where it arrives."""
        with execution_context(self.equation):
            whole = gathered(self.equation, self.weight, self.dtype, self.wire)
        return self._moved(whole)

    def arrive_quantized(
        self, product: AbstractProduct, scales: AnyArray | None
    ) -> tuple[AnyArray, PrequantizedWeight] | None:
        """Sends it in the few bits that a product reads.

        Args:
            product: The product.
            scales: The scales of delayed scaling.

        Returns:
            What the gradient goes to, and the weight; None if it is to be an array.
        """
        # What a device gathers on its own needs one scale, which is none of its own.
        is_apart = self.wire.is_alone and bool(manual_axes())
        if self.wire.gather_dtype is not None or is_apart or not may_travel(product):
            return None
        move = functools.partial(_bound, self.equation)

        def arriving(piece: AnyArray) -> AnyArray:
            return self._moved(move(where_it_lies(piece)))

        with execution_context(self.equation):
            ahead = quantized_ahead(product, self.weight, scales, arriving)
            back = (lambda x: x) if self._is_only_typed else move
            whole = only_gradient(back, self.weight, self.wire)
        return self._moved(whole), ahead

    @property
    def _is_only_typed(self) -> bool:
        """Whether a weight that lies in pieces has the shape of what arrives.

        The product then gives each device its piece of the gradient, not the whole.
        """
        names = {equation.primitive.name for equation in self.moves}
        is_placed = self.equation.primitive.name in ("sharding_constraint", "reshard")
        return is_placed and names <= {"transpose"}

    def _moved(self, whole: AnyArray) -> AnyArray:
        for equation in self.moves:
            with execution_context(equation):
                is_gather = properties(equation.primitive.name).gathers
                if is_gather and whole.dtype == FLOAT32:
                    whole = gathered(equation, whole, self.dtype, self.wire)
                else:
                    whole = _bound(equation, whole)
        return whole


def _bound(equation: JaxprEqn, x: Any) -> AnyArray:
    return bind_equation(equation, x)[0]


# ----------------------------------------------------------------------------
# Gradients that devices sum, in the dtype of the policy.
#
# Under `jax.jit` over a mesh the sum over devices belongs to the product that makes a
# weight's gradient, and is in the dtype of its result. So that product gives float32
# directly there: `wide_product`. It has a derivative rule of its own, so this holds in
# the gradient functions only, which differentiate in reverse mode.


def wide_product(
    equation: JaxprEqn,
    arrays: list[AnyArray],
    weight: int,
    dtype: np.dtype,
    reduce_dtype: np.dtype,
) -> AnyArray:
    r"""A product whose weight gets its gradient in the dtype in which it is summed.

    $$y = \operatorname{half}(x) \operatorname{half}(w) \qquad
      \bar x = \bar y \operatorname{half}(w)^T \qquad
      \bar w = \operatorname{reduce}(\operatorname{half}(x)^T \bar y)$$

    Args:
        equation: The product.
        arrays: Its operands, the weight in float32.
        weight: Which of them is the weight.
        dtype: The half precision dtype of operands and result.
        reduce_dtype: That of the product that gives the weight's gradient.
    """
    params = dict(equation.params)
    if params.get("preferred_element_type") is not None:
        params["preferred_element_type"] = dtype
    bound = equation.replace(params=params)
    other = 1 - weight

    def product(data: AnyArray, weights: AnyArray) -> AnyArray:
        pair = [data, weights] if weight else [weights, data]
        return bind_equation(bound, *pair, *arrays[2:])[0]

    def run(data: AnyArray, weights: AnyArray) -> AnyArray:
        return product(data, weights.astype(dtype))

    def forward(data: AnyArray, weights: AnyArray) -> tuple[AnyArray, Any]:
        narrow = weights.astype(dtype)
        return product(data, narrow), (data, narrow)

    def backward(kept: Any, g: AnyArray) -> tuple[AnyArray, AnyArray]:
        data, narrow = kept
        (for_data,) = jax.linear_transpose(lambda x: product(x, narrow), data)(g)

        def transposed(data: AnyArray, g: AnyArray) -> AnyArray:
            return jax.linear_transpose(lambda w: product(data, w), narrow)(g)[0]

        wide = functools.partial(_with_wide_products, transposed, reduce_dtype)
        # XLA:CPU of jaxlib 0.10.2 (2026-11) has no such product of some layouts, and
        # computes it in float32 in any case.
        found = jax.lax.platform_dependent(
            data, g, cpu=functools.partial(wide, of_wide=True), default=wide
        )
        return for_data, found.astype(FLOAT32)

    run = jax.custom_vjp(run)
    run.defvjp(forward, backward)
    return run(arrays[other], arrays[weight])


def _with_wide_products(
    function: Callable[..., AnyArray],
    dtype: np.dtype,
    *operands: AnyArray,
    of_wide: bool = False,
) -> AnyArray:
    """Calls a function whose products give a dtype, whatever their operands have.

    Args:
        function: The function, of one product and what moves its operands.
        dtype: The dtype.
        *operands: What the function gets.
        of_wide: The operands of its product are cast to the dtype, too.
    """
    closed = jax.make_jaxpr(function)(*operands)

    def bind(equation: JaxprEqn, inputs: list[Any]) -> list[AnyArray]:
        params = dict(equation.params)
        if "preferred_element_type" in params:
            params["preferred_element_type"] = dtype
            if of_wide:
                inputs = [x.astype(dtype) if is_half(x.dtype) else x for x in inputs]
        if equation.primitive.name == "convert_element_type":
            params["new_dtype"] = dtype
        return bind_equation(equation.replace(params=params), *inputs)

    return run_by(bind, closed, operands)(closed.jaxpr.outvars[0])


def refuse_sums_of_others(wire: Wire | None) -> None:
    """Raises where JAX itself sums gradients over devices, in float32 only."""
    if wire is None or not wire.is_explicit or wire.reduce_dtype == FLOAT32:
        return
    raise ValueError(
        f"`reduce_dtype={wire.reduce_dtype.name}` of `mpx.Policy` is not possible "
        "for a function with `jax.shard_map(..., check_vma=False)`, whose gradients "
        "JAX sums over devices in float32. Omit `check_vma`, or set "
        '`reduce_dtype="float32"`.'
    )


def dtype_of_sums(wire: Wire | None, primitive: str) -> np.dtype | None:
    """The dtype that a product gives its weight's gradient, so that sums have it.

    Of convolutions only where somebody asks for it: cuDNN has none of half precision
    that gives float32. XLA casts the operands, and computes it in float32 (jaxlib
    0.10.2 for an H100, 2026-11).

    Args:
        wire: What was said.
        primitive: The product's name.

    Returns:
        The dtype; None: that of the product, or the sum is made elsewhere.
    """
    if wire is None or manual_axes():
        return None
    is_costly = primitive == "conv_general_dilated" and not wire.is_explicit
    return None if is_costly else wire.reduce_dtype
