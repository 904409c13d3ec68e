r"""What travels between devices: weights on their way in, gradients on their way back.

A weight $w$ that lies in pieces is gathered where it is used. If all that uses it casts
it to half precision, the pieces are cast, and not the whole:

$$y = \operatorname{f32}\big(\operatorname{gather}(\operatorname{half}(w))\big)
\qquad \bar w = \operatorname{gather}^T(\operatorname{reduce}(\bar y))$$

with $\bar y$ the gradients of all uses, summed in float32, and the transpose of the
gather, a sum over the devices, in the dtype that the policy says. The compiler finds
that the cast to float32 and the cast of each use undo each other.

Under `jax.jit` over a mesh the sum over devices belongs to the product that makes a
weight's gradient, and is in the dtype of its result. So that product gives float32
directly there: `wide_product`.

Both hold in the gradient functions only, which differentiate in reverse mode: these
functions have a derivative rule of their own.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.extend.core import JaxprEqn, Literal
from jax.sharding import NamedSharding, PartitionSpec as P

from .._dtypes import is_half
from .._jax_compat import as_varying, bind_equation, manual_axes, type_varies_on
from .._policy import Wire
from .._typing import AnyArray

_FLOAT32 = np.dtype(np.float32)

# Known to JAX, so that no program that was traced for one policy is used for another.
_present = jax.make_user_context(default_value=None)

# They bring pieces together, or move them.
GATHERS = frozenset(
    """
    all_gather all_gather_invariant sharding_constraint reshard pvary pcast
    """.split()
)
SPREADS = ("pvary", "pcast")


def on_the_wire(wire: Wire | None) -> Any:
    """Functions that autocast rewrites inside send in these dtypes."""
    return _present(wire)


def present_wire() -> Wire | None:
    """What functions that are rewritten now send in; None: as they are written."""
    return _present.value


def travelling_dtype(wire: Wire, name: str, half: np.dtype) -> np.dtype | None:
    """The dtype in which a weight goes through a primitive; None: as it is written.

    Args:
        wire: What was said.
        name: The primitive.
        half: The dtype that the weight is computed with.
    """
    if name in SPREADS:  # each device has it already
        return _FLOAT32 if wire.reduce_dtype != _FLOAT32 else None
    return half if wire.gather_dtype is None else np.dtype(wire.gather_dtype)


def gathered(
    equation: JaxprEqn, weight: AnyArray, dtype: np.dtype, wire: Wire
) -> AnyArray:
    """A float32 weight that travels in a dtype, rounded to it and float32 again."""
    return travelled(functools.partial(_bind_one, equation), weight, dtype, wire)


def _bind_one(equation: JaxprEqn, x: AnyArray) -> AnyArray:
    return bind_equation(equation, x)[0]


def placed(sharding: Any, weight: AnyArray, dtype: np.dtype, wire: Wire) -> AnyArray:
    """A float32 weight that travels to where a sharding has it."""
    move = functools.partial(jax.lax.with_sharding_constraint, shardings=sharding)
    return travelled(move, weight, dtype, wire)


def travelled(
    move: Callable[[AnyArray], AnyArray], weight: AnyArray, dtype: np.dtype, wire: Wire
) -> AnyArray:
    """A float32 weight that `move`, which is linear, sends in a dtype."""

    def send(weight: AnyArray) -> AnyArray:
        return move(cast_where_it_lies(weight, dtype)).astype(_FLOAT32)

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
        zeros = jax.lax.full(like.shape, 0, _FLOAT32, sharding=explicit)
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
        return (found.astype(_FLOAT32),)

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
        return for_data, found.astype(_FLOAT32)

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
    values: dict[Any, Any] = dict(zip(closed.jaxpr.invars, operands, strict=True))
    values.update(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    for equation in closed.jaxpr.eqns:
        inputs = [
            atom.val if isinstance(atom, Literal) else values[atom]
            for atom in equation.invars
        ]
        params = dict(equation.params)
        if "preferred_element_type" in params:
            params["preferred_element_type"] = dtype
            if of_wide:
                inputs = [x.astype(dtype) if is_half(x.dtype) else x for x in inputs]
        if equation.primitive.name == "convert_element_type":
            params["new_dtype"] = dtype
        results = bind_equation(equation.replace(params=params), *inputs)
        values.update(zip(equation.outvars, results, strict=True))
    return values[closed.jaxpr.outvars[0]]


def refuse_sums_of_others(wire: Wire | None) -> None:
    """Raises where JAX itself sums gradients over devices, in float32 only."""
    if wire is None or not wire.is_said or wire.reduce_dtype == _FLOAT32:
        return
    raise ValueError(
        f"`reduce_dtype={wire.reduce_dtype.name}` of `mpx.Policy` cannot hold for a "
        "function with `jax.shard_map(..., check_vma=False)`, whose gradients JAX sums "
        "over devices in float32. Leave `check_vma` out, or say "
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
    is_costly = primitive == "conv_general_dilated" and not wire.is_said
    return None if is_costly else wire.reduce_dtype
