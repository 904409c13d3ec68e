r"""`AbstractProduct`: a product of data and a weight, quantized in both directions.

$$y = Q(x)\,Q(w) \qquad dx = Q(g)\,Q(w)^T \qquad dw = Q(x)^T\,Q(g)$$

One `jax.custom_vjp` serves all kinds of product: matmuls, convolutions, ragged matmuls.
It saves only quantized operands for backward: the copies that dx and dw contract. It
has no rule for forward mode (`jax.jvp`), and JAX raises; for second derivatives see
`differentiated_once`.

Scales of delayed scaling are an argument, float32[3] in the order of `Role`. Its
cotangent is not a gradient but the three *amaxes* of this step, for
`DelayedScaling.update`. Each product has a separate slot, so JAX does not add two of
them.

Both directions are jitted, so layers of the same shapes are traced and lowered once: 84
products of 12 layers take 0.5 instead of 4.3 seconds, under NVFP4 1.0 instead of 17.3.
XLA inlines the calls, so the compiled program is the same as without them.
"""

import abc
import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn, Self, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from ..._base.jax_compat import as_varying, traced_for_all, varying_axes
from ..._base.typing import AnyArray, Shape
from ..._program import data_scope
from .._formats._arithmetic import as_bits, as_numbers
from .._formats._blocks import Join, joined_over
from .._formats._target import Target, on_target
from .._quantizers._array import QuantizedArray
from .._quantizers._casting import beside_amax
from .._quantizers._delayed import (
    amax_and_scale,
    amax_cotangent,
    check_scales,
)
from .._quantizers._recipes import AbstractRecipe, Role
from ._lowering import Operand, stored
from ._operands import Copies, has_blocks, kernel_of

T = TypeVar("T")

# --- No second derivatives ------------------------------------------------------------
#
# The rules of a product compute with rounded values, by bit operations and casts to 8
# bits. Their derivative is zero or useless, and a second derivative through them would
# be silently wrong: by 67 to 100% in a Hessian.


@jax.custom_jvp
def differentiated_once(arrays: object) -> PyTree:
    """Returns the input of a derivative rule; raises if it has a tangent itself."""
    return arrays


@differentiated_once.defjvp
def _refuse(primals: PyTree, tangents: PyTree) -> NoReturn:
    # JAX does not call this rule if all tangents are zero.
    raise TypeError(
        "A matmul under a recipe has no second derivative (`jax.hessian`, a "
        "gradient penalty, a gradient step inside a loss): its first one is "
        "computed from quantized values. Put `mpx.autocast(..., recipe=...)` around "
        "the function that computes the inner derivative, so that each matmul in it "
        "is quantized separately; or compute the inner derivative without the "
        "recipe: `mpx.autocast(func, recipe=None)`."
    )


# --- Meshes of explicit axes: types contain shardings ---------------------------------
#
# Gradients of weights contract sharded axes, and blocks are cut and joined; types have
# no rule for either. Inside a product the axes are automatic, so the compiler finds the
# shardings; only that of the result is specified.


def in_automatic_axes(
    f: Callable[..., Array],
    plain: Callable[[], Array],
    out_sharding: object,
    besides: object,
    *operands: Array,
) -> Array:
    """Calls `f(besides, *operands)` on automatic mesh axes.

    Args:
        f: The quantized product.
        plain: The same product in half precision.
        out_sharding: The sharding of the result; None: that of `plain`.
        besides: The first argument of `f`: any tree of arrays.
        *operands: The operands.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:  # none is set; the operands' types may have one
        meshes = (jax.typeof(x).sharding.mesh for x in operands)
        said = next((one for one in meshes if one.explicit_axes), None)
        if said is not None:
            with jax.sharding.use_abstract_mesh(said):
                return in_automatic_axes(f, plain, out_sharding, besides, *operands)
    if not mesh.explicit_axes:
        return f(besides, *operands)
    if out_sharding is None:
        # Not `eval_shape`: it gives None if types leave some axes open.
        found = jax.make_jaxpr(plain)().out_avals[0].sharding
        if found.mesh.empty:  # the operands have no mesh
            return f(besides, *operands)
        out_sharding = found
    auto_axes: Any = jax.sharding.auto_axes
    return auto_axes(f, out_sharding=out_sharding)(besides, *operands)


# --- Products -------------------------------------------------------------------------

# Operands without a derivative: the group sizes of ragged matmuls.
Extra = tuple[Array, ...]
Factors = tuple[Array | None, Array | None]


class Residuals(eqx.Module):
    """The arrays that a product saves for backward.

    Attributes:
        data: The copy that dw contracts.
        weight: The copy that dx contracts.
        extra: Operands without a derivative.
        scales: The scales of delayed scaling.
        step: The number of the training step.
        amaxes: The amaxes of data and weight; None without scales.
        like_data: Shape and dtype of the data.
        like_weight: Shape and dtype of the weight.
        room: The room for the amax of each role in the slots.
    """

    data: Operand
    weight: Operand
    extra: Extra
    scales: Array | None
    step: Array | None
    amaxes: tuple[Array | None, Array | None]
    like_data: jax.ShapeDtypeStruct = eqx.field(static=True)
    like_weight: jax.ShapeDtypeStruct = eqx.field(static=True)
    room: int = eqx.field(static=True)


class PrequantizedWeight(NamedTuple):
    """A weight that was quantized before the product; see `_ahead`.

    Attributes:
        operand: The quantized weight.
        amax: Its amax; None without scales.
    """

    operand: QuantizedArray
    amax: Array | None

    def moved(self, move: Callable[[Array], Array]) -> "PrequantizedWeight":
        """Returns a copy whose payload went through `move`."""
        payload = move(self.operand.payload)
        return self._replace(operand=dataclasses.replace(self.operand, payload=payload))


class Besides(NamedTuple):
    """The arguments of a product besides its operands.

    Attributes:
        scales: float32[3], the scales of input, weight and gradient; only for
            `DelayedScaling`. A scale of 0 is replaced: by that of the current array if
            the recipe has a `warm_start`, else by 1.
        step: The number of the training step, an integer, for stochastic rounding.
        ahead: The weight, if it was quantized before. The weight operand is then not
            read, but still gets the gradient.
    """

    scales: Array | None = None
    step: Array | None = None
    ahead: PrequantizedWeight | None = None

    def varying_on(self, axes: frozenset[str]) -> "Besides":
        """Returns a copy whose weight varies on these axes of `shard_map`."""
        if self.ahead is None:
            return self
        move = functools.partial(as_varying, axes=axes)
        return self._replace(ahead=self.ahead.moved(move))


@dataclasses.dataclass(frozen=True, kw_only=True)
class AbstractProduct(abc.ABC):
    """A product of data and a weight: everything known about it before its values.

    Attributes:
        recipe: How operands are quantized.
        dtype: The dtype of the result and of the gradient of the data: half precision,
            or float32.
        target: The device that it is compiled for.
        manual_axes: Active axes of `shard_map`, over which the shards of an array share
            one scale.
        sums_over_devices: Whether these are of `shard_map(check_vma=False)`, where JAX
            sums the cotangents of replicated arguments over all `manual_axes`.
        out_sharding: The sharding of the result, over a mesh of explicit axes. None: as
            the plain operation infers it.
        reduce_dtype: The dtype in which gradients of weights are summed over devices;
            None if there is one device, or the sum is made elsewhere.
        is_weight_measured: Whether the amax of the weight is taken elsewhere; its place
            in the cotangent of the scales is then 0.
        weight_dtype: The dtype that the program rounds a float32 weight to; applied
            before it is quantized. None if it is not rounded.
    """

    recipe: AbstractRecipe
    dtype: np.dtype
    target: Target
    manual_axes: tuple[str, ...] = ()
    sums_over_devices: bool = False
    out_sharding: Any = None
    reduce_dtype: np.dtype | None = None
    weight_dtype: np.dtype | None = None
    is_weight_measured: bool = False

    @property
    def weight_gradient_dtype(self) -> np.dtype:
        """Returns the dtype of sums over devices if there are any.

        Else bfloat16 if that is `dtype`, else float32: float16 lacks the range.
        """
        if self.reduce_dtype is not None:
            return self.reduce_dtype
        return self.dtype if self.dtype == jnp.bfloat16 else np.dtype("float32")

    @abc.abstractmethod
    def _axes(self, role: Role) -> tuple[int, int]:
        """Returns the axes of an array that its two products contract; see `Copies`."""

    @abc.abstractmethod
    def _plain(self, data: Array, weight: Array, extra: Extra) -> Array:
        """Computes the product without quantizing."""

    @abc.abstractmethod
    def _forward(
        self, x: Operand, w: Operand, extra: Extra, shapes: tuple[Shape, Shape]
    ) -> Array:
        """Multiplies operands, which had these shapes before they were padded."""

    @abc.abstractmethod
    def _backward(
        self, kept: Residuals, for_data: Operand, for_weight: Operand, shape: Shape
    ) -> tuple[Array, Array]:
        """Returns the gradients of data and weight, from the copies of the gradient.

        Each has the shape of its primal; `shape` is that of the result.
        """

    @property
    def _is_by_rows(self) -> bool:
        """Whether the compiler probably stores operands row by row."""
        return False

    def _wants_wide_weight(self) -> bool:
        """Returns whether a rounded weight is better passed before it is rounded.

        A kernel that is opaque to the compiler rounds it itself, instead of reading a
        rounded copy. Between devices a weight is communicated rounded.
        """
        kernel = kernel_of(self.recipe, self.target)
        return kernel is not None and self.reduce_dtype is None

    def _has_units(self, x: Operand, w: Operand) -> bool:
        """Returns whether the device computes with the bits of the operands."""
        return False

    def _arranged(
        self, left: Array, right: Array, *extra: AnyArray
    ) -> tuple[Array, Array, Extra]:
        """Returns data, weight and constant operands, from JAX's operands."""
        return left, right, extra

    def _read(self, x: Array, extra: Extra) -> Array:
        """Returns data or a gradient, with zeros where the product reads nothing."""
        return x

    def _prepared(
        self, data: Array, weight: Array
    ) -> tuple[Self, Array, Array, Shape | None]:
        """Returns the product and its operands in a form that the recipe can quantize.

        Also the shape of the result, if that form changes it; else None.
        """
        return self, data, weight, None

    def _folded(self, kept: Residuals) -> tuple[Residuals, Factors]:
        """Returns what is kept without scales that the gradient's copies have."""
        return kept, (None, None)

    def _copies(
        self, role: Role, step: Array | None = None, extra: Extra = ()
    ) -> Copies:
        """Returns how an array becomes the operands of its two products."""
        rounded_to = self.weight_dtype if role is Role.WEIGHT else None
        of = self.recipe, role, self.dtype, self.target, self._join(), self._axes(role)
        return Copies(*of, step, rounded_to)

    def _quantized(
        self,
        x: Array,
        scales: Array | None,
        *given: Any,
        role: Role,
        both: bool = True,
        room: int = 1,
        factors: Factors = (None, None),
    ) -> tuple[Array | None, Operand, Operand | None]:
        """Returns an array's amax and its copies; None for a second that is the first.

        Args:
            x: The array.
            scales: The scales of delayed scaling.
            *given: The other arguments of `_copies`.
            role: The role of the array.
            both: Whether the second copy is needed.
            room: The room for parts of the amax.
            factors: What multiplies the copies before they are quantized.
        """
        # That of a weight is mostly taken elsewhere: see `with_weight_amax`. The length
        # of an axis may be a symbol.
        is_whole = role is Role.WEIGHT or self.manual_axes or not self._is_by_rows
        parts = 1 if is_whole or room == 2 or not isinstance(x.size, int) else room
        of = self.recipe, self.target, self._join()
        amax, scale = amax_and_scale(*of, role, x, scales, parts)
        if role is Role.WEIGHT and self.is_weight_measured and amax is not None:
            amax = jnp.zeros_like(amax)
        copies = dataclasses.replace(self._copies(role, *given), factors=factors)
        if not both:
            return amax, copies.first(x, scale), None
        first, second = copies.both(x, scale)
        return amax, first, None if second is first else second

    def _on_target(self, form: Callable[..., T], *operands: Any, **options: Any) -> T:
        """Calls a function of a product, of its module or class, by `on_target`."""
        options |= {"product": self, "of": form}
        return on_target(self.target, _by_product, *operands, **options)

    def _join(self) -> Join:
        return joined_over(self.manual_axes, self.sums_over_devices)

    def _summed_axes(self) -> tuple[str, ...]:
        """Returns the axes over which JAX sums the cotangent of the scales."""
        return self.manual_axes if self.sums_over_devices else ()


def _by_product(
    target: Target, *operands: Any, product: AbstractProduct, of: Any, **options: Any
) -> Any:
    return of(dataclasses.replace(product, target=target), *operands, **options)


def quantized_product(
    product: AbstractProduct, operands: Sequence[AnyArray], *besides: Any
) -> Array:
    """Multiplies data by a weight, quantized in both directions.

    Args:
        product: The product, and how it is quantized.
        operands: Those of JAX's operation, floating except for sizes of groups. Pass
            the weight in float32 if it is stored in float32: it is quantized from this
            array.
        *besides: Scales, step and weight; see `Besides`.

    Returns:
        The product in `product.dtype`. Gradients have the dtypes of the operands, and
        are rounded to `product.dtype` first, except that the weight's is not rounded to
        float16, which may lack the range. The "gradient" of `scales` is the amaxes of
        input, weight and gradient; they may be infinite or NaN.

    Raises:
        TypeError: Scales are missing, or passed to a recipe without scales.
        ValueError: `jax.vmap` maps the operands but not the scales.
    """
    given = Besides(*besides)
    check_scales(product.recipe, given.scales)
    data, weight, extra = product._arranged(*operands)

    def plain() -> Array:
        whole = weight if given.ahead is None else given.ahead.operand.payload
        left, right = data.astype(product.dtype), whole.astype(product.dtype)
        return product._plain(left, right, extra)

    def quantized(besides: Besides, data: Array, weight: Array, *extra: Array) -> Array:
        everywhere = varying_axes(data) | varying_axes(weight)
        data, weight = as_varying(data, everywhere), as_varying(weight, everywhere)
        prepared, data, weight, shape = product._prepared(data, weight)
        y = _product(prepared, data, weight, extra, besides.varying_on(everywhere))
        return y if shape is None else y.reshape(shape)

    arrays = (data, weight, *extra)
    return in_automatic_axes(quantized, plain, product.out_sharding, given, *arrays)


@functools.partial(jax.jit, static_argnames=("product", "is_differentiated"))
@traced_for_all
def quantized_forward(
    product: AbstractProduct,
    data: Array,
    weight: Array,
    extra: Extra,
    besides: Besides,
    *,
    is_differentiated: bool,
) -> tuple[Array, Residuals | None]:
    scales, step, ahead = besides
    like_data = jax.ShapeDtypeStruct(data.shape, data.dtype)
    like_weight = jax.ShapeDtypeStruct(weight.shape, weight.dtype)
    # Without blocks the second copy is the first, and both cases are one trace.
    both = is_differentiated or not has_blocks(product.recipe)
    form = AbstractProduct._quantized
    quantized = functools.partial(product._on_target, form, both=both)
    data = product._read(data, extra)
    room = 1 if scales is None else scales.size // len(Role)
    data_amax, x, kept_data = quantized(
        data, scales, step, extra, role=Role.INPUT, room=room
    )
    if ahead is None:
        weight_amax, w, kept_weight = quantized(weight, scales, step, role=Role.WEIGHT)
    else:
        (w, weight_amax), kept_weight = ahead, None
    if is_differentiated:
        x, data_amax = beside_amax(product.target, x, data_amax, is_gradient=False)
    shapes = like_data.shape, like_weight.shape
    y = product._on_target(type(product)._forward, x, w, extra, shapes=shapes)
    if not is_differentiated:
        return y, None
    kept_data = x if kept_data is None else kept_data
    kept_weight = w if kept_weight is None else kept_weight
    # XLA does not remove bits that are made of integers, so a CPU needs no barrier; and
    # without one JAX 0.10 quantizes a weight shared by all iterations of a scan only
    # once.
    is_on_cpu = product.target.platform == "cpu"
    if not is_on_cpu and not product._has_units(x, w):
        y, kept_data, kept_weight = stored(y, kept_data, kept_weight)
    if scales is not None and room > 1:  # without the room
        scales = scales.reshape(-1, room)[:, :2].reshape(-1)
    amaxes, like = (data_amax, weight_amax), (like_data, like_weight, room)
    kept = Residuals(kept_data, kept_weight, extra, scales, step, amaxes, *like)
    return y, as_bits(kept) if is_on_cpu else kept


def _primal(product: AbstractProduct, *given: Any) -> Array:
    return quantized_forward(product, *given, is_differentiated=False)[0]


_product = jax.custom_vjp(_primal, nondiff_argnums=(0,))


def _forward_rule(
    product: AbstractProduct, data: Array, weight: Array, extra: Extra, besides: Besides
) -> tuple[Array, Residuals | None]:
    data, weight, scales = differentiated_once((data, weight, besides.scales))
    besides = besides._replace(scales=scales)
    return quantized_forward(
        product, data, weight, extra, besides, is_differentiated=True
    )


def _backward_rule(
    product: AbstractProduct, kept: Residuals, g: Array
) -> tuple[Array, Array, None, Besides]:
    g = differentiated_once(g)
    if product.target.platform != "tpu":
        return quantized_backward(product, kept, g)
    with data_scope("quantized_backward", None):  # the name that the call has
        return _inlined_backward(product, kept, g)


@functools.partial(jax.jit, static_argnames="product")
@traced_for_all
def quantized_backward(
    product: AbstractProduct, kept: Residuals, g: Array
) -> tuple[Array, Array, None, Besides]:
    return product._on_target(_backward, kept, g)


def _backward(
    product: AbstractProduct, kept: Residuals, g: Array
) -> tuple[Array, Array, None, Besides]:
    kept, factors = product._folded(as_numbers(kept))
    g, role = product._read(g, kept.extra), Role.GRADIENT
    besides = kept.step, kept.extra
    amax, for_data, for_weight = product._quantized(
        g, kept.scales, *besides, role=role, room=kept.room, factors=factors
    )
    for_data, amax = beside_amax(product.target, for_data, amax, is_gradient=True)
    for_weight = for_data if for_weight is None else for_weight
    dx, dw = product._backward(kept, for_data, for_weight, g.shape)
    taken = *kept.amaxes, amax
    amaxes = amax_cotangent(taken, kept.room, kept.scales, product._summed_axes())
    dx, dw = dx.astype(kept.like_data.dtype), dw.astype(kept.like_weight.dtype)
    return dx, dw, None, Besides(scales=amaxes)


# XLA:TPU gives a function that several layers call one layout for its results, writes
# the gradients of weights transposed, and copies weights and Adam's moments there and
# back: 12.9 of the 30.8 GB that a step of an MLP moves (libtpu 0.0.42, compiled for
# TPU7x, November 2026).
_inlined_backward = inspect.unwrap(quantized_backward)
_product.defvjp(_forward_rule, _backward_rule)


def without_padding(x: Array, shape: Shape) -> Array:
    """Cuts an array to the shape that it had before padding."""
    return x if x.shape == shape else x[tuple(map(slice, shape))]
