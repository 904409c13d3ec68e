r"""Weights communicated in few bits, and the sums of their gradients over devices.

A sharded weight $w$ is gathered where it is used. If all its uses cast it to half
precision, the shards are cast instead of the gathered weight:

$$y = \operatorname{f32}\big(\operatorname{gather}(\operatorname{half}(w))\big)
\qquad \bar w = \operatorname{gather}^T(\operatorname{reduce}(\bar y))$$

with $\bar y$ the gradients of all uses, summed in float32, and the transpose of the
gather, a sum over the devices, in the dtype of the policy (`Wire`). The compiler
removes the cast to float32 together with the cast of each use.

In order: sending a weight in half precision; a `Gathering`, which is sent in the form
that its first use needs; the dtype of gradients' sums. All of it is for the gradient
functions, which differentiate in reverse mode: the derivative rules here have no
forward mode.
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
    """Returns the dtype in which a weight passes a primitive; None: unchanged.

    Args:
        wire: The dtypes of communication.
        name: The primitive.
        half: The dtype that the weight is computed with.
    """
    if properties(name).spreads:  # each device has it already
        return FLOAT32 if wire.reduce_dtype != FLOAT32 else None
    return half if wire.gather_dtype is None else np.dtype(wire.gather_dtype)


def gathered(
    equation: JaxprEqn, weight: AnyArray, dtype: np.dtype, wire: Wire
) -> AnyArray:
    """Gathers a float32 weight in a dtype; returns it rounded, as float32.

    Args:
        equation: The equation that gathers it.
        weight: The sharded weight.
        dtype: The dtype.
        wire: The dtypes of communication.
    """

    def move(x: AnyArray) -> AnyArray:
        return bind_equation(equation, x)[0]

    def send(weight: AnyArray) -> AnyArray:
        return move(cast_where_it_lies(weight, dtype)).astype(FLOAT32)

    return _sent(send, move, weight, wire)


def only_gradient(
    move: Callable[[AnyArray], AnyArray], weight: AnyArray, wire: Wire
) -> AnyArray:
    """Returns zeros in place of a float32 weight that is sent in another way.

    Their gradient goes back like the weight's: only the gradient is communicated.
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
    """Calls `send` with a weight; its gradient is by the transpose of `move`."""
    is_constraint = not manual_axes() and not _has_explicit_axes(weight)

    def backward(_: None, g: AnyArray) -> tuple[AnyArray]:
        if is_constraint:
            # The compiler sums where the gradient is made, and sends each device its
            # shard; the transpose of a constraint would need the whole gradient
            # everywhere.
            return (g,)
        like = jax.typeof(weight).update(dtype=wire.reduce_dtype)
        narrow = g.astype(wire.reduce_dtype)
        (found,) = jax.linear_transpose(move, like)(narrow)
        return (found.astype(FLOAT32),)

    travel = jax.custom_vjp(send)
    travel.defvjp(lambda weight: (send(weight), None), backward)
    return travel(weight)


def _has_explicit_axes(x: AnyArray) -> bool:
    return bool(jax.typeof(x).sharding.mesh.explicit_axes)


def cast_where_it_lies(weight: AnyArray, dtype: np.dtype) -> AnyArray:
    """Casts a sharded weight to half precision; see `where_it_lies`."""
    return where_it_lies(jax.lax.convert_element_type(weight, dtype))


def where_it_lies(narrow: AnyArray) -> AnyArray:
    """Keeps a cast on the devices of its operand's shards.

    By a constraint that leaves the sharding open. Without it the compiler moves the
    next constraint before the cast (Shardy of jaxlib 0.10.2, 2026-11), and the whole
    float32 array is communicated.
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
    """Returns the gathered weight in float32, whose gradient goes to the zeros."""
    return narrow.astype(FLOAT32)


def _joined_forward(narrow: AnyArray, zeros: AnyArray) -> tuple[AnyArray, None]:
    return narrow.astype(FLOAT32), None


joined.defvjp(_joined_forward, lambda _, g: (None, g))


# --- `Gathering`: a weight that is sent in the form that its first use needs ----------
#
# A product under a recipe reads 8 bits of a weight, other operations half precision.
# Which one is known only when the product is emitted, after the program gathers. So the
# gathering equation makes a `Gathering`, and the first use of its value sends it.


@dataclasses.dataclass(frozen=True)
class Gathering:
    """A gathered weight that has not been sent yet.

    Attributes:
        weight: The sharded float32 weight.
        equation: The equation that gathers it.
        dtype: The dtype in which it is sent as an array.
        wire: The dtypes of communication.
        moves: Later equations that move the gathered weight, or gather it further.
    """

    weight: AnyArray
    equation: JaxprEqn
    dtype: np.dtype
    wire: Wire
    moves: tuple[JaxprEqn, ...] = ()

    @property
    def shape(self) -> Shape:
        """The shape of the gathered weight."""
        last = self.moves[-1] if self.moves else self.equation
        return aval_of(last.outvars[0]).shape

    def then(self, equation: JaxprEqn) -> "Gathering":
        """Returns a copy that is then also moved by an equation."""
        return dataclasses.replace(self, moves=(*self.moves, equation))

    def arrive(self) -> AnyArray:
        """Sends it rounded to its dtype; returns the gathered weight in float32."""
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
            The array that gets the gradient, and the weight; None if it must be sent as
            an array.
        """
        # Inside a user's `shard_map` each shard would get its own scale, but the
        # gathered weight needs one.
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
        """Whether gathering only changes the sharding, so the shape stays.

        The product then gives each device its shard of the gradient, not the whole.
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


# --- Gradients summed over devices, in the dtype of the policy ------------------------
#
# Under `jax.jit` over a mesh the sum over devices is part of the product that makes a
# weight's gradient, and has the dtype of its result. So `wide_product` makes that
# product give float32 directly.


def wide_product(
    equation: JaxprEqn,
    arrays: list[AnyArray],
    weight: int,
    dtype: np.dtype,
    reduce_dtype: np.dtype,
) -> AnyArray:
    r"""Computes a product whose weight gradient has the dtype of the sum over devices.

    $$y = \operatorname{half}(x) \operatorname{half}(w) \qquad
      \bar x = \bar y \operatorname{half}(w)^T \qquad
      \bar w = \operatorname{reduce}(\operatorname{half}(x)^T \bar y)$$

    Args:
        equation: The product.
        arrays: Its operands, the weight in float32.
        weight: The position of the weight.
        dtype: The half-precision dtype of operands and result.
        reduce_dtype: The result dtype of the product that gives the weight's gradient.
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
        # XLA:CPU of jaxlib 0.10.2 (2026-11) lacks such a product for some layouts, and
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
    """Calls a function whose products return `dtype`, for operands of any dtype.

    Args:
        function: The function, of one product and moves of its operands.
        dtype: The dtype.
        *operands: The arguments of the function.
        of_wide: Casts the operands of its product to the dtype, too.
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
    """Raises if JAX itself sums gradients over devices, in float32 only."""
    if wire is None or not wire.is_explicit or wire.reduce_dtype == FLOAT32:
        return
    raise ValueError(
        f"`reduce_dtype={wire.reduce_dtype.name}` of `mpx.Policy` is not possible "
        "for a function with `jax.shard_map(..., check_vma=False)`, whose gradients "
        "JAX sums over devices in float32. Omit `check_vma`, or set "
        '`reduce_dtype="float32"`.'
    )


def dtype_of_sums(wire: Wire | None, primitive: str) -> np.dtype | None:
    """Returns the dtype of a product's weight gradient, so that sums have it.

    For convolutions only if set explicitly: cuDNN has no half-precision convolution
    with a float32 result. XLA casts the operands, and computes in float32 (jaxlib
    0.10.2 for an H100, 2026-11).

    Args:
        wire: The dtypes of communication.
        primitive: The product's name.

    Returns:
        The dtype; None: that of the product, or the sum is made elsewhere.
    """
    if wire is None or manual_axes():
        return None
    is_costly = primitive == "conv_general_dilated" and not wire.is_explicit
    return None if is_costly else wire.reduce_dtype
