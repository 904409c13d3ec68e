"""Layouts and recipes of linear products, each with its oracle in float64.

An oracle knows matrices: it brings both operands to [batch, rows, contracted] by their
letters, quantizes with `tests.reference.low_precision`, and multiplies in float64.
"""

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, PartitionSpec as P

import mpx
from mpx._quantize import LinearProduct, Target, quantized_product
from mpx._quantize._formats._blocks import alone
from mpx._quantize._products._operands import Copies
from mpx.quantization import (
    AbstractRecipe,
    Leg,
    MXFP8Quantizer,
    NVFP4Quantizer,
    Quantizer,
    Role,
    hadamard_transform,
)
from tests.reference import low_precision as reference

CPU = Target("cpu", "cpu")
FLOAT32, ALL = np.dtype("float32"), slice(None)


@dataclasses.dataclass(frozen=True)
class Layout:
    """A product by the letters of its axes, as in einsum.

    `dot_general` orders the axes of its result itself: batch, left's, right's.
    """

    left: str
    right: str
    is_weight_first: bool = False
    lengths: tuple[tuple[str, int], ...] = (
        *(("a", 3), ("b", 2), ("m", 5), ("n", 20)),
        *(("k", 40), ("j", 2), ("p", 3)),
    )

    @property
    def batch(self) -> str:
        return "".join(c for c in self.left if c in "ab" and c in self.right)

    @property
    def contracted(self) -> str:
        return "".join(c for c in self.left if c in self.right and c not in self.batch)

    def free(self, letters: str) -> str:
        return "".join(c for c in letters if c not in self.batch + self.contracted)

    @property
    def out(self) -> str:
        return self.batch + self.free(self.left) + self.free(self.right)

    @property
    def dimension_numbers(self):
        def places(letters: str, of: str) -> tuple[int, ...]:
            return tuple(of.index(c) for c in letters)

        return (
            (places(self.contracted, self.left), places(self.contracted, self.right)),
            (places(self.batch, self.left), places(self.batch, self.right)),
        )

    def shape(self, letters: str) -> tuple[int, ...]:
        return tuple(dict(self.lengths)[c] for c in letters)

    def matrices(self, x: np.ndarray, letters: str, rows: str, columns: str):
        """[batch, rows, columns] of an array with these letters."""
        x = np.einsum(f"{letters}->{self.batch}{rows}{columns}", x)
        sizes = [math.prod(self.shape(part)) for part in (self.batch, rows, columns)]
        return x.reshape(sizes)

    def array(self, x: np.ndarray, letters: str, rows: str, columns: str) -> np.ndarray:
        """The inverse of `matrices`."""
        x = x.reshape(self.shape(self.batch + rows + columns))
        return np.einsum(f"{self.batch}{rows}{columns}->{letters}", x)


LAYOUTS = {
    "matrices": Layout("mk", "kn"),
    "3-D": Layout("amk", "kn"),
    "weight first": Layout("nk", "amk", is_weight_first=True),
    "several contracted": Layout("jmk", "knjp"),
    "batches": Layout("kbma", "nbka"),
    "vector": Layout("k", "kn"),
}


def data(layout: Layout) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Left, right, and a gradient: multiples of 1/64, whose sums are exact."""
    generator = np.random.default_rng(0)
    for_each = (layout.left, 1.0), (layout.right, 0.125), (layout.out, 4.0)
    return tuple(
        jnp.asarray(scale * generator.integers(-127, 128, layout.shape(of)) / 64, "f4")
        for of, scale in for_each
    )


# A quantizer of an oracle: [batch, rows, contracted] in float32 to float64. Its second
# argument says whether it is for dw.
Rounder = Callable[[np.ndarray, bool], np.ndarray]


def _flat(x: np.ndarray, block: int, square: bool) -> np.ndarray:
    """Batches under each other, padded to whole blocks."""
    rows = -x.shape[1] % block if square else 0
    x = np.pad(x, ((0, 0), (0, rows), (0, -x.shape[2] % block)))
    return x.reshape(-1, x.shape[2])


def _unflat(flat: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    x = flat.reshape(shape[0], -1, flat.shape[1])
    return x[:, : shape[1], : shape[2]]


def tensor(bits, power_of_two: bool = False, scale: float | None = None) -> Rounder:
    def rounder(x: np.ndarray, for_wgrad: bool) -> np.ndarray:
        amax = np.abs(x).max()
        found = reference.scale(amax, bits.largest, power_of_two)
        found = np.float32(scale) if scale else found
        codes = reference.encode((x * found).astype(np.float32), bits)
        return reference.decode(codes, bits) * np.float64(np.float32(1) / found)

    return rounder


def scale_of(x: np.ndarray, bits: reference.Bits | None, axes=(-1,)) -> np.ndarray:
    """One for each row, or each matrix; a power of two for rows; 127 without bits."""
    amax = np.abs(x).max(axes, keepdims=True).astype(np.float32)
    largest = np.float32(bits.largest if bits else 127)
    found = np.where(amax == 0, np.float32(1), largest / np.where(amax == 0, 1, amax))
    if bits and axes == (-1,):
        found = 2 ** np.floor(np.log2(found.astype(np.float64)))
    return found.astype(np.float32)


def rows(bits: reference.Bits | None = None, axes=(-1,)) -> Rounder:
    def rounder(x: np.ndarray, for_wgrad: bool) -> np.ndarray:
        scale = scale_of(x, bits, axes)
        scaled = (x * scale).astype(np.float32)
        if bits is None:
            numbers = np.round(scaled).astype(np.float64)
        else:
            numbers = reference.decode(reference.encode(scaled, bits), bits)
        return numbers * np.float64(np.float32(1) / scale)

    return rounder


def blocks(shape: tuple[int, int], bits=reference.E4M3) -> Rounder:
    def rounder(x: np.ndarray, for_wgrad: bool) -> np.ndarray:
        flat = _flat(x, 128, shape[0] > 1)
        codes, inverse = reference.quantize_scaled(flat, bits, shape, True)
        return _unflat(reference.dequantize(codes, bits, inverse, shape), x.shape)

    return rounder


def mx(bits) -> Rounder:
    def rounder(x: np.ndarray, for_wgrad: bool) -> np.ndarray:
        codes, shared = reference.quantize_mx(_flat(x, 32, False), bits)
        factors = 2.0 ** (shared - 127.0)
        return _unflat(reference.dequantize(codes, bits, factors, (1, 32)), x.shape)

    return rounder


def nvfp4(shape: tuple[int, int], rotate: bool) -> Rounder:
    def rounder(x: np.ndarray, for_wgrad: bool) -> np.ndarray:
        flat = _flat(x, 16, shape[0] > 1)
        rotation = np.asarray(hadamard_transform(jnp.eye(16)), np.float64)
        if rotate and for_wgrad:
            flat = (flat.reshape(-1, 16).astype(np.float64) @ rotation).astype("f4")
            flat = flat.reshape(-1, x.shape[2] + -x.shape[2] % 16)
        codes, shared, inverse = reference.quantize_nvfp4(flat, shape)
        factors = reference.decode(shared, reference.E4M3) * np.float64(inverse)
        found = reference.to_blocks(reference.decode(codes, reference.E2M1), *shape)
        found = reference.from_blocks(found * factors[:, :, None, None])
        # Both operands of dw stay rotated, and with them what was padded with zeros.
        rotated = rotate and for_wgrad
        return _unflat(found, (*x.shape[:2], found.shape[1]) if rotated else x.shape)

    return rounder


def as_is(x: np.ndarray, for_wgrad: bool) -> np.ndarray:
    return x.astype(np.float64)


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A recipe and the oracles of input, weight and gradient.

    `backward` are those of x and w in the backward pass, where they are others; a
    format if their scales are folded into the gradient there.
    """

    recipe: AbstractRecipe
    rounders: tuple[Rounder, Rounder, Rounder]
    backward: str | reference.Bits | None = None
    scales: tuple[float, float, float] | None = None


_E4M3, _E5M2 = reference.E4M3, reference.E5M2
_CURRENT = (tensor(_E4M3), tensor(_E4M3), tensor(_E5M2))
_SCALES = (64.0, 300.0, 0.5)


def _mixed(role: Role, leg: Leg) -> Quantizer | None:
    """Quantizers that have nothing in common, and one that is missing."""
    if role is Role.INPUT:
        return NVFP4Quantizer()
    return None if role is Role.WEIGHT else MXFP8Quantizer(mpx.Format.E5M2)


RECIPES = {
    "current": Recipe(mpx.Float8CurrentScaling(), _CURRENT),
    "delayed": Recipe(
        mpx.DelayedScaling(),
        tuple(
            tensor(bits, scale=scale)
            for bits, scale in zip((_E4M3, _E4M3, _E5M2), _SCALES, strict=True)
        ),
        scales=_SCALES,
    ),
    "delayed, warm start": Recipe(
        mpx.DelayedScaling(warm_start=True), _CURRENT, scales=(0, 0, 0)
    ),
    "current, each matrix": Recipe(
        mpx.Float8CurrentScaling(one_scale_per_matrix=True),
        (rows(_E4M3, (-2, -1)), rows(_E4M3, (-2, -1)), rows(_E5M2, (-2, -1))),
    ),
    "rows": Recipe(mpx.Float8RowwiseScaling(), (rows(_E4M3),) * 3, _E4M3),
    "int8": Recipe(mpx.Int8CurrentScaling(), (rows(),) * 3, "integers"),
    "int8, one scale": Recipe(
        mpx.Int8CurrentScaling(one_scale=True), (rows(None, (-3, -2, -1)),) * 3
    ),
    "blocks": Recipe(
        mpx.Float8BlockScaling(),
        (blocks((1, 128)), blocks((128, 128)), blocks((1, 128))),
    ),
    "mxfp8": Recipe(mpx.MXFP8BlockScaling(), (mx(_E4M3),) * 3),
    "nvfp4": Recipe(
        mpx.NVFP4BlockScaling(disable_stochastic_rounding=True),
        (nvfp4((1, 16), True), nvfp4((16, 16), False), nvfp4((1, 16), True)),
    ),
    "nvfp4, 1-D, no transform": Recipe(
        mpx.NVFP4BlockScaling(
            disable_rht=True,
            disable_stochastic_rounding=True,
            disable_2d_quantization=True,
        ),
        (nvfp4((1, 16), False),) * 3,
    ),
    "high precision backward": Recipe(
        mpx.Float8CurrentScaling(backward_override="high_precision"),
        (tensor(_E4M3), tensor(_E4M3), as_is),
        "high_precision",
    ),
    "dequantized backward": Recipe(
        mpx.NVFP4BlockScaling(backward_override="dequantized"),
        (nvfp4((1, 16), False), nvfp4((16, 16), False), as_is),
        "dequantized",
    ),
    "custom": Recipe(
        mpx.CustomRecipe(_mixed), (nvfp4((1, 16), False), as_is, mx(_E5M2))
    ),
}


MATRICES = (((1,), (0,)), ((), ()))


def product_of(
    recipe: Recipe, layout: Layout, dtype=FLOAT32, target=CPU
) -> LinearProduct:
    numbers, first = layout.dimension_numbers, layout.is_weight_first
    options = {"dimension_numbers": numbers, "is_weight_first": first}
    return matrix_product(recipe.recipe, dtype, target, **options)


def matrix_product(recipe, dtype=FLOAT32, target=CPU, **options) -> LinearProduct:
    options = {"dimension_numbers": MATRICES, "is_weight_first": False, **options}
    return LinearProduct(recipe=recipe, dtype=np.dtype(dtype), target=target, **options)


def assert_close(found, exact: np.ndarray) -> None:
    assert found.shape == exact.shape
    error = np.abs(np.asarray(found, np.float64) - exact).max()
    assert error <= 1e-6 * np.abs(exact).max()


def scales_of(recipe: Recipe) -> jax.Array | None:
    return None if recipe.scales is None else jnp.array(recipe.scales, jnp.float32)


def linear_product(product, left, right, *besides):
    return quantized_product(product, (left, right), *besides)


def trained(product):
    """The product and its gradients, of what it gives."""

    def train(*args):
        y, backward = jax.vjp(functools.partial(linear_product, product), *args)
        return y, *backward(y)

    return train


def lowered_for(target: Target, f, *shapes) -> str:
    """The program for a device, of float32 arrays of these shapes."""
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    traced = jax.jit(f).trace(*args)
    return traced.lower(lowering_platforms=(target.platform,)).as_text()


@functools.partial(jax.jit, static_argnums=0)
def quantized_operands(recipe: AbstractRecipe, left, right):
    """Data and a weight as products get them; a scale that is kept is 1."""
    like = FLOAT32, CPU, alone
    scale = jnp.ones(()) if isinstance(recipe, mpx.DelayedScaling) else None
    data = Copies(recipe, Role.INPUT, *like, (-1, -2)).first(left, scale)
    weight = Copies(recipe, Role.WEIGHT, *like, (-2, -1)).first(right, scale)
    return data, weight


@functools.partial(jax.jit, static_argnums=0)
def result_and_gradients(product: LinearProduct, left, right, g, scales=None):
    """The product, the gradients of left and right, and the amaxes."""

    f = lambda *args: linear_product(product, *args)  # noqa: E731
    y, backward = jax.vjp(f, left, right, scales)
    return y, *backward(g.astype(y.dtype))


def check_delayed_in_bfloat16(f, x, w, g, rows=ALL, integers=0) -> None:
    """Dtypes, amaxes, and bytes that are kept, of a product `f(x, w, scales)`."""
    x_half, g_half, scales = *(a.astype("bfloat16") for a in (x, g)), jnp.zeros(3)

    @jax.jit
    def run(x, w, g):
        y, backward = jax.vjp(f, x, w, scales)
        return y, *backward(g)

    y, dx, dw, amaxes = run(x_half, w, g_half)
    assert (y.dtype, dx.dtype, dw.dtype) == ("bfloat16", "bfloat16", "float32")
    seen = (x_half[rows], w, g_half[rows])
    largest = [jnp.abs(array.astype("float32")).max() for array in seen]
    np.testing.assert_array_equal(amaxes, largest)
    kept = jax.eval_shape(lambda *args: jax.vjp(f, *args)[1], x, w, scales)
    sizes = {leaf.dtype.name: leaf.size for leaf in jax.tree.leaves(kept)}
    assert sizes.pop("float32") <= 3 and sizes.pop("int32", 0) == integers
    assert list(sizes) == ["uint8"]  # 8 bits, which a CPU keeps as integers


def gradients_on_two_devices(f, check_vma: bool, x, w, scales, g, *more):
    """Those of `f(x, w, scales, *more)`, with all but w and scales in pieces."""

    def loss(x, w, scales, g, *more):
        return jax.lax.psum((f(x, w, scales, *more) * g).sum(), "data")

    rows, whole = P("data"), P()
    run = jax.shard_map(
        loss,
        mesh=jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,)),
        in_specs=(rows, whole, whole, rows, *(rows for _ in more)),
        out_specs=whole,
        check_vma=check_vma,
    )
    return jax.jit(jax.grad(run, argnums=(0, 1, 2)))(x, w, scales, g, *more)


def expected(recipe: Recipe, layout: Layout, left, right, g) -> list[np.ndarray]:
    """What `result_and_gradients` gives, in float64."""
    left, right, g = map(np.asarray, (left, right, g))
    rows, columns = layout.free(layout.left), layout.free(layout.right)
    depth = layout.contracted
    of_left, of_right, of_g = recipe.rounders
    if layout.is_weight_first:
        of_left, of_right = of_right, of_left

    is_folded = recipe.backward not in (None, "high_precision", "dequantized")
    bits = None if recipe.backward == "integers" else recipe.backward

    def operand(x, letters, stay, contract, rounder, for_wgrad):
        return rounder(layout.matrices(x, letters, stay, contract), for_wgrad)

    def gradient(stay, contract, rounder, for_wgrad, other, letters):
        """The gradient's operand, with the scales of the other one folded into it."""
        if not is_folded:
            return operand(g, layout.out, stay, contract, rounder, for_wgrad)
        scale = scale_of(layout.matrices(other, letters, contract, depth), bits)
        factor = (np.float32(1) / scale).swapaxes(1, 2)
        x = layout.matrices(g, layout.out, stay, contract)
        return rounder((x * factor).astype(np.float32), for_wgrad) / factor

    def kept(x, letters, stay, contract, rounder, for_wgrad):
        if recipe.backward == "high_precision":
            rounder = as_is
        if recipe.backward == "dequantized" or is_folded:
            found = operand(x, letters, contract, stay, rounder, False)
            return found.swapaxes(1, 2)
        return operand(x, letters, stay, contract, rounder, for_wgrad)

    first = layout.is_weight_first
    y = operand(left, layout.left, rows, depth, of_left, False) @ operand(
        right, layout.right, columns, depth, of_right, False
    ).swapaxes(1, 2)
    d_left = gradient(rows, columns, of_g, first, right, layout.right) @ kept(
        right, layout.right, depth, columns, of_right, first
    ).swapaxes(1, 2)
    d_right = kept(left, layout.left, depth, rows, of_left, not first) @ gradient(
        columns, rows, of_g, not first, left, layout.left
    ).swapaxes(1, 2)
    return [
        layout.array(y, layout.out, rows, columns),
        layout.array(d_left, layout.left, rows, depth),
        layout.array(d_right, layout.right, depth, columns),
    ]
