r"""`AbstractProduct`: a product of data and a weight, quantized in both directions.

$$y = Q(x)\,Q(w) \qquad dx = Q(g)\,Q(w)^T \qquad dw = Q(x)^T\,Q(g)$$

One `jax.custom_vjp` for all kinds of product: matrix products, convolutions, ragged
products. What it keeps for the backward pass are quantized operands only: the copies
that dx and dw contract. Forward mode (`jax.jvp`) has no rule, and JAX says so; the
derivative of a derivative has none either (see `_second_derivative`).

Scales of delayed scaling are an argument, float32[3] in the order of `Role`. What comes
back in the place of their gradient is no gradient: the three *amaxes* of this step, for
`DelayedScaling.update`. A slot of its own for every product keeps JAX from adding
two of them.

Both directions are jitted, so that layers of the same shapes are traced and lowered
once: 84 products of 12 layers in 0.5 seconds and not in 4.3, under NVFP4 in 1.0 and not
in 17.3. XLA inlines the calls, and compiles what it compiles without them.
"""

import abc
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn, Self

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from ..._base.jax_compat import as_varying, traced_for_all, varying_axes
from ..._base.typing import AnyArray, Shape
from .._formats._arithmetic import as_bits, as_numbers
from .._formats._blocks import Join, joined_over
from .._formats._target import Target
from .._quantizers._array import QuantizedArray
from .._quantizers._casting import beside_amax
from .._quantizers._delayed import amax_and_scale, amax_cotangent, check_scales
from .._quantizers._recipes import AbstractRecipe, Role
from ._lowering import Operand, stored
from ._operands import Copies, kernel_of

# ----------------------------------------------------------------------------
# Refusing the derivative of a derivative rule of a quantized product.
#
# The rules of a product compute with numbers that were rounded, by bit operations and
# casts to 8 bits. The derivative of these is zero or nothing useful, and a second
# derivative through them would be wrong without a word: by 67 to 100 % in a Hessian.


@jax.custom_jvp
def differentiated_once(arrays: object) -> PyTree:
    """What a derivative rule is given: an error where that has a tangent itself."""
    return arrays


@differentiated_once.defjvp
def _refuse(primals: PyTree, tangents: PyTree) -> NoReturn:
    # JAX does not ask for it where all tangents are zero.
    raise TypeError(
        "A matmul under a recipe has no second derivative (`jax.hessian`, a "
        "gradient penalty, a gradient step inside a loss): its first one is "
        "computed from quantized values. Put `mpx.autocast(..., recipe=...)` around "
        "the function that computes the inner derivative, so that each matmul in it "
        "is quantized separately; or compute the inner derivative without the "
        "recipe: `mpx.autocast(func, recipe=None)`."
    )


# ----------------------------------------------------------------------------
# Products over a mesh of explicit axes, where types say how arrays are sharded.
#
# Gradients of weights contract axes that are sharded, and blocks are cut and joined:
# for neither have types a rule. Inside of a product the axes are automatic, where the
# compiler finds shardings; only the result's is said.


def in_automatic_axes(
    f: Callable[..., Array],
    plain: Callable[[], Array],
    out_sharding: object,
    besides: object,
    *operands: Array,
) -> Array:
    """Calls `f(besides, *operands)` without types of shardings inside.

    Args:
        f: The quantized product.
        plain: The same product of half precision.
        out_sharding: The sharding of the result; None: what `plain` has.
        besides: What it gets beside the operands: any tree of arrays.
        *operands: The operands.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:  # nobody set one, and the types of the operands say it
        meshes = (jax.typeof(x).sharding.mesh for x in operands)
        said = next((one for one in meshes if one.explicit_axes), None)
        if said is not None:
            with jax.sharding.use_abstract_mesh(said):
                return in_automatic_axes(f, plain, out_sharding, besides, *operands)
    if not mesh.explicit_axes:
        return f(besides, *operands)
    if out_sharding is None:
        # Not `eval_shape`, which says None where types leave some axes open.
        found = jax.make_jaxpr(plain)().out_avals[0].sharding
        if found.mesh.empty:  # the operands are of no mesh
            return f(besides, *operands)
        out_sharding = found
    auto_axes: Any = jax.sharding.auto_axes
    return auto_axes(f, out_sharding=out_sharding)(besides, *operands)


# ----------------------------------------------------------------------------

# Operands without a derivative: the sizes of groups.
Extra = tuple[Array, ...]


class Residuals(eqx.Module):
    """What the backward pass needs of a product.

    Attributes:
        data: The copy that dw contracts.
        weight: The copy that dx contracts.
        extra: Operands that have no derivative.
        scales: The scales of delayed scaling.
        step: The number of the training step.
        amaxes: The amaxes of data and weight, with scales.
        like_data: Shape and dtype of the data.
        like_weight: The same of the weight.
    """

    data: Operand
    weight: Operand
    extra: Extra
    scales: Array | None
    step: Array | None
    amaxes: tuple[Array | None, Array | None]
    like_data: jax.ShapeDtypeStruct = eqx.field(static=True)
    like_weight: jax.ShapeDtypeStruct = eqx.field(static=True)


class PrequantizedWeight(NamedTuple):
    """A weight that was quantized before the product; see `_ahead`.

    Attributes:
        operand: What it became.
        amax: Its amax, with scales.
    """

    operand: QuantizedArray
    amax: Array | None

    def moved(self, move: Callable[[Array], Array]) -> "PrequantizedWeight":
        """The same with its numbers elsewhere."""
        payload = move(self.operand.payload)
        return self._replace(operand=dataclasses.replace(self.operand, payload=payload))


class Besides(NamedTuple):
    """What a product gets besides its operands.

    Attributes:
        scales: float32[3], the scales of input, weight and gradient, for
            `DelayedScaling` and for no other recipe. Where one is 0, it is computed
            from the array at hand if the recipe has a `warm_start`, and else 1.
        step: The number of the training step, an integer, for stochastic rounding.
        ahead: The weight, if it was quantized before. Of the weight nothing is read
            then; its gradient is that of the weight.
    """

    scales: Array | None = None
    step: Array | None = None
    ahead: PrequantizedWeight | None = None

    def varying_on(self, axes: frozenset[str]) -> "Besides":
        """The same with a weight that varies on these axes of `shard_map`."""
        if self.ahead is None:
            return self
        move = functools.partial(as_varying, axes=axes)
        return self._replace(ahead=self.ahead.moved(move))


@dataclasses.dataclass(frozen=True, kw_only=True)
class AbstractProduct(abc.ABC):
    """A product of data and a weight: all that is known of it before numbers are.

    Attributes:
        recipe: How operands are quantized.
        dtype: The dtype of the result and of the gradient of the data: half precision,
            or float32.
        target: The device that it is compiled for.
        manual_axes: Axes of `shard_map` in force, over which the pieces of an array
            have one scale.
        sums_over_devices: Whether that is `shard_map(check_vma=False)`, where JAX adds
            up the cotangents of replicated arguments over all `manual_axes`.
        out_sharding: That of the operation, over a mesh of explicit axes. None: as
            the operation finds it.
        reduce_dtype: In which gradients of weights are summed over devices; None where
            there is one device, or the sum is made elsewhere.
        is_weight_measured: Whether the amax of the weight is taken elsewhere. 0 stands
            for it in what comes back for the scales.
        weight_dtype: What the weight is rounded to before it is quantized, where it
            comes in float32 and the program rounds it; None if it is not.
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
        """That of sums over devices if there are any.

        Else bfloat16 if that is `dtype`, else float32, whose range float16 has not.
        """
        if self.reduce_dtype is not None:
            return self.reduce_dtype
        is_wide = self.dtype == jnp.bfloat16
        return self.dtype if is_wide else np.dtype("float32")

    @abc.abstractmethod
    def _axes(self, role: Role) -> tuple[int, int]:
        """The axes of an array that its two products contract; see `Copies`."""

    @abc.abstractmethod
    def _plain(self, data: Array, weight: Array, extra: Extra) -> Array:
        """The product without quantizing."""

    @abc.abstractmethod
    def _forward(
        self,
        x: Operand,
        w: Operand,
        extra: Extra,
        shapes: tuple[Shape, Shape],
    ) -> Array:
        """The product of operands, which had these shapes before they were padded."""

    @abc.abstractmethod
    def _backward(
        self, kept: Residuals, for_data: Operand, for_weight: Operand, shape: Shape
    ) -> tuple[Array, Array]:
        """The gradients of data and weight, from the copies of the result's gradient.

        Each with the shape of what it is the gradient of; `shape` is the result's.
        """

    def _wants_wide_weight(self) -> bool:
        """Whether a weight that the program rounds had better come as it was before.

        A kernel that is opaque to the compiler rounds it itself, instead of reading
        what was written rounded. Between devices a weight travels rounded.
        """
        kernel = kernel_of(self.recipe, self.target)
        return kernel is not None and self.reduce_dtype is None

    def _has_units(self, x: Operand, w: Operand) -> bool:
        """Whether the device computes with the bits of the operands."""
        return False

    def _arranged(
        self, left: Array, right: Array, *extra: AnyArray
    ) -> tuple[Array, Array, Extra]:
        """Data, weight and what has no derivative, from JAX's operands."""
        return left, right, extra

    def _read(self, x: Array, extra: Extra) -> Array:
        """Data or a gradient, with zeros for what the product leaves out."""
        return x

    def _prepared(
        self, data: Array, weight: Array
    ) -> tuple[Self, Array, Array, Shape | None]:
        """The product and its operands in a form that the recipe can quantize.

        And the shape of the result, if that form has another one.
        """
        return self, data, weight, None

    def _copies(
        self, role: Role, step: Array | None = None, extra: Extra = ()
    ) -> Copies:
        """How an array becomes the operands of its two products."""
        rounded_to = self.weight_dtype if role is Role.WEIGHT else None
        of = self.recipe, role, self.dtype, self.target, self._join(), self._axes(role)
        return Copies(*of, step, rounded_to)

    def _join(self) -> Join:
        return joined_over(self.manual_axes, self.sums_over_devices)

    def _summed_axes(self) -> tuple[str, ...]:
        """The axes over which JAX adds up what comes in the place of cotangents."""
        return self.manual_axes if self.sums_over_devices else ()

    def _scaled(
        self, role: Role, x: Array, scales: Array | None
    ) -> tuple[Array | None, Array | None]:
        """The amax of an array and the scale to quantize it with."""
        amax, scale = amax_and_scale(
            self.recipe, self.target, self._join(), role, x, scales
        )
        if role is Role.WEIGHT and self.is_weight_measured and amax is not None:
            amax = jnp.zeros_like(amax)
        return amax, scale


def quantized_product(
    product: AbstractProduct, operands: Sequence[AnyArray], *besides: Any
) -> Array:
    """A product of data and a weight, quantized in both directions.

    Args:
        product: What product, and how.
        operands: Those of JAX's operation, floating but for sizes of groups. The weight
            is best in float32 if that is what it is kept in: it is quantized from what
            comes.
        *besides: Scales, step and weight; see `Besides`.

    Returns:
        The product in `product.dtype`. Its gradients come in the dtypes of the
        operands, rounded before that to `product.dtype`; that of the weight not to
        float16, whose range may be too small for it. The "gradient" of `scales` are the
        amaxes of input, weight and gradient; they may be infinite or NaN.

    Raises:
        TypeError: Scales are missing, or given to a recipe that has none.
        ValueError: `jax.vmap` goes over the operands while scales are given once.
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
    data = product._read(data, extra)
    data_amax, data_scale = product._scaled(Role.INPUT, data, scales)
    weight_amax, weight_scale = None, None
    if ahead is None:
        weight_amax, weight_scale = product._scaled(Role.WEIGHT, weight, scales)
    of_data = product._copies(Role.INPUT, step, extra)
    of_weight = product._copies(Role.WEIGHT, step)
    shapes = data.shape, weight.shape
    if not is_differentiated:
        x = of_data.first(data, data_scale)
        w = of_weight.first(weight, weight_scale) if ahead is None else ahead.operand
        return product._forward(x, w, extra, shapes), None
    x, second_of_data = of_data.begin(data, data_scale)
    if ahead is None:
        w, second_of_weight = of_weight.begin(weight, weight_scale)
    else:
        (w, weight_amax), second_of_weight = ahead, lambda first: first
    x = beside_amax(product.target, x, data_amax)
    y = product._forward(x, w, extra, shapes)
    kept_data, kept_weight = second_of_data(x), second_of_weight(w)
    # XLA leaves out no bits that are made of integers, so a CPU needs no barrier; and
    # without one JAX 0.10 quantizes a weight that all iterations of a scan share once.
    is_on_cpu = product.target.platform == "cpu"
    if not is_on_cpu and not product._has_units(x, w):
        y, kept_data, kept_weight = stored(y, kept_data, kept_weight)
    kept = Residuals(
        kept_data,
        kept_weight,
        extra,
        scales,
        step,
        (data_amax, weight_amax),
        like_data,
        like_weight,
    )
    return y, as_bits(kept) if is_on_cpu else kept


def _primal(product: AbstractProduct, *given: Any) -> Array:
    return quantized_forward(product, *given, is_differentiated=False)[0]


_product = jax.custom_vjp(_primal, nondiff_argnums=(0,))


def _forward_rule(
    product: AbstractProduct,
    data: Array,
    weight: Array,
    extra: Extra,
    besides: Besides,
) -> tuple[Array, Residuals | None]:
    data, weight, scales = differentiated_once((data, weight, besides.scales))
    besides = besides._replace(scales=scales)
    return quantized_forward(
        product, data, weight, extra, besides, is_differentiated=True
    )


def _backward_rule(
    product: AbstractProduct, kept: Residuals, g: Array
) -> tuple[Array, Array, None, Besides]:
    return quantized_backward(product, kept, differentiated_once(g))


@functools.partial(jax.jit, static_argnames="product")
@traced_for_all
def quantized_backward(
    product: AbstractProduct, kept: Residuals, g: Array
) -> tuple[Array, Array, None, Besides]:
    kept, g = as_numbers(kept), product._read(g, kept.extra)
    amax, scale = product._scaled(Role.GRADIENT, g, kept.scales)
    of_gradient = product._copies(Role.GRADIENT, kept.step, kept.extra)
    for_data, second = of_gradient.begin(g, scale)
    for_data = beside_amax(product.target, for_data, amax)
    for_weight = second(for_data)
    dx, dw = product._backward(kept, for_data, for_weight, g.shape)
    amaxes = amax_cotangent(kept.amaxes, amax, kept.scales, product._summed_axes())
    dx, dw = dx.astype(kept.like_data.dtype), dw.astype(kept.like_weight.dtype)
    return dx, dw, None, Besides(scales=amaxes)


_product.defvjp(_forward_rule, _backward_rule)


def without_padding(x: Array, shape: Shape) -> Array:
    """An array without what it was padded with."""
    return x if x.shape == shape else x[tuple(map(slice, shape))]
