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

from collections.abc import Callable

import jax
import numpy as np
from jax.extend.core import JaxprEqn
from jax.sharding import NamedSharding, PartitionSpec as P

from .._jax_compat import as_varying, bind_equation, manual_axes, type_varies_on
from .._policy import Wire
from .._program import properties
from .._typing import AnyArray

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
