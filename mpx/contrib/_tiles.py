"""Pallas kernels over matrices: tile by tile, under vmap, on sharded arrays.

A kernel is opaque to `jax.vmap` and to the compiler, which would gather a sharded array
for it. So each array of a kernel declares its axes as axes of the matrix and numbers
per block: `("rows", 16)` has 16 numbers for each block of rows. Tiles, shards and
batching follow from that.

Pallas's Triton backend exists in jax 0.10 to 0.12 and is deprecated since 0.12; the
other one has no sums over a few numbers within a row.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import custom_partitioning
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, PyTree

from .._base.jax_compat import as_varying, manual_axes, shape_varying_like, varying_axes
from .._base.typing import AnyArray, DTypeLike, Shape

BLOCK = 32
"""What divides both sizes of a matrix; no device has a piece of such a block."""
_TILES = (64, 32)

# The axes of an array: the matrix's axis, and how many numbers the array has for each
# of its blocks; or None, and a length that belongs to no axis of the matrix.
Along = tuple[tuple[str | None, int], ...]
ROWS, COLUMNS = "rows", "columns"


def has_tiles(shape: Shape) -> bool:
    """Returns whether kernels accept a shape: matrices that divide into blocks.

    Fewer than 2^32 numbers, so that the position of each fits 32 bits.
    """
    are_known = all(isinstance(size, int) for size in shape)
    if len(shape) < 2 or not are_known or any(size % BLOCK for size in shape[-2:]):
        return False
    return 0 < math.prod(shape) < 2**32


@dataclasses.dataclass(frozen=True)
class Tiled:
    """A kernel and its arrays.

    Attributes:
        kernel: A function of references to a tile of each operand and each result.
        name: Its name in profiles.
        operands: The axes of each operand. The first one is the matrices.
        results: The axes of each result, and its dtype.
        interpret: Runs on a device without Triton, for tests.
    """

    kernel: Callable[..., None]
    name: str
    operands: tuple[Along, ...]
    results: tuple[tuple[Along, DTypeLike], ...]
    interpret: bool = False

    def __call__(self, *operands: Array) -> tuple[Array, ...]:
        """Runs the kernel over matrices `[..., m, n]`, whose sizes are multiples of 32.

        Args:
            *operands: The matrices, and arrays with the same leading axes, as the
                results.
        """
        here = self._on_a_device if manual_axes() else self._partitioned(operands[0])
        axes = varying_axes(operands[0])

        @jax.custom_batching.custom_vmap
        def each(*operands: Array) -> tuple[Array, ...]:
            return here(*operands)

        @each.def_vmap
        def rule(
            size: int, are_batched: Sequence[bool], *operands: Array
        ) -> tuple[tuple[Array, ...], tuple[bool, ...]]:
            pairs = zip(operands, are_batched, strict=True)
            every = (
                x if is_in else jnp.broadcast_to(x, (size, *x.shape))
                for x, is_in in pairs
            )
            return each(*every), (True,) * len(self.results)

        return each(*(as_varying(x, axes) for x in operands))

    def _partitioned(self, x: Array) -> Callable[..., tuple[Array, ...]]:
        """Returns the kernel for sharded arrays: each device computes its part."""
        whole = custom_partitioning.custom_partitioning(self._on_a_device)
        results = [along for along, _ in self.results]

        def partition(
            mesh: Mesh | AbstractMesh,
            operands: Sequence[jax.ShapeDtypeStruct],
            found: object,
        ) -> PyTree:
            x = operands[0]
            parts = x.sharding.shard_shape(x.shape)
            # A block split over devices would get several scales.
            place = {
                axis: name if size % BLOCK == 0 else None
                for axis, name, size in zip(
                    (ROWS, COLUMNS), x.sharding.spec[-2:], parts[-2:], strict=True
                )
            }

            def there(along: Along) -> NamedSharding:
                names = (axis and place[axis] for axis, _ in along)
                return NamedSharding(mesh, PartitionSpec(*x.sharding.spec[:-2], *names))

            return (
                mesh,
                self._on_a_device,
                tuple(map(there, results)),
                tuple(map(there, self.operands)),
            )

        every = [one for along in (*self.operands, *results) for one in along]
        # A rule needs the sizes of exactly those factors that never occur alone.
        sizes: dict[str, Any] = {
            _factor(axis, steps): steps
            for axis, steps in every
            if axis is not None and steps > 1
        }
        for axis, size in zip((ROWS, COLUMNS), x.shape[-2:], strict=True):
            if (axis, 1) not in every:
                sizes[axis] = size // BLOCK
        arrows = (
            ", ".join(map(_dimensions, group)) for group in (self.operands, results)
        )
        whole.def_partition(partition, sharding_rule=" -> ".join(arrows), **sizes)
        return whole

    def _on_a_device(self, *operands: Array) -> tuple[Array, ...]:
        # Not at the top: Pallas takes half a second to import.
        from jax.experimental import pallas as pl
        from jax.experimental.pallas import triton

        x = operands[0]
        *batch, rows, columns = x.shape
        flat = [
            y.reshape(-1, *y.shape[y.ndim - len(along) :])
            for y, along in zip(operands, self.operands, strict=True)
        ]
        sizes = {ROWS: rows, COLUMNS: columns}
        tile = {
            axis: next(t for t in _TILES if size % t == 0)
            for axis, size in sizes.items()
        }

        def shape(along: Along, sizes: dict[str, int]) -> Shape:
            return tuple(
                steps if axis is None else sizes[axis] // BLOCK * steps
                for axis, steps in along
            )

        def spec(along: Along) -> pl.BlockSpec:
            def place(n: AnyArray, i: AnyArray, j: AnyArray) -> tuple[AnyArray, ...]:
                index = {ROWS: i, COLUMNS: j, None: 0}
                return (n, *(index[axis] for axis, _ in along))

            return pl.BlockSpec((None, *shape(along, tile)), place)

        results = [along for along, _ in self.results]
        found = pl.pallas_call(
            self.kernel,
            grid=(
                flat[0].shape[0],
                *(sizes[axis] // tile[axis] for axis in (ROWS, COLUMNS)),
            ),
            in_specs=[*map(spec, self.operands)],
            out_specs=[*map(spec, results)],
            out_shape=[
                shape_varying_like(x, (flat[0].shape[0], *shape(along, sizes)), dtype)
                for along, dtype in self.results
            ],
            compiler_params=triton.CompilerParams(num_warps=4),
            interpret=self.interpret,
            name=self.name,
        )(*flat)
        return tuple(y.reshape(*batch, *y.shape[1:]) for y in found)


def _factor(axis: str | None, steps: int) -> str:
    return "" if steps == 1 else f"{axis or 'other'}{steps}"


def _dimensions(along: Along) -> str:
    """Returns an array's part of a sharding rule."""
    return " ".join(("...", *(_dimension(axis, steps) for axis, steps in along)))


def _dimension(axis: str | None, steps: int) -> str:
    factor = _factor(axis, steps)
    return f"({axis} {factor})" if axis and factor else axis or factor
