"""A mesh of devices with three axes, of which any may be of size one.

* `data`: weights lie whole on every device of it, and batches are divided over it.
* `fsdp`: batches are divided over it, too; weights lie in pieces and are gathered where
  they are used.
* `tensor`: each device computes a part of every layer.

The training step is the same for all meshes: it says where weights and activations lie,
and XLA finds out what to send.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Self

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from .config import RunConfig, require
from .errors import SetupError

AXES = ("data", "fsdp", "tensor")
BATCH = PartitionSpec(("data", "fsdp"))
"""Batches and activations: the leading axis over all devices but those of `tensor`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig(RunConfig):
    """A run on any mesh, in one process or in several."""

    mesh: tuple[str, ...] = ()
    """Sizes of `data`, `fsdp` and `tensor`, as `data=2 fsdp=4`; their product is the
    number of devices. A CPU has as many as they ask for."""
    processes: int = 1
    """Start so many processes on this machine, as if it were a cluster."""
    distributed: bool = False
    """This is one of the processes that a cluster has started."""

    @property
    def mesh_sizes(self) -> dict[str, int]:
        """The sizes of the axes that are named."""
        return parse_mesh(self.mesh)

    @property
    def devices_per_process(self) -> int | None:
        """How many devices each process needs; None: as many as there are."""
        if self.distributed or (self.processes == 1 and not self.mesh):
            return None
        return max(math.prod(self.mesh_sizes.values()) // self.processes, 1)

    def validate(self) -> Self:
        devices = math.prod(self.mesh_sizes.values())
        is_several = not (self.distributed and self.processes > 1)
        rule = "starts processes, and --distributed joins those that are there"
        require(is_several, self, "processes", rule)
        rule = f"must divide the devices of --mesh, {devices}"
        divides = self.processes >= 1 and devices % self.processes == 0
        unknown = self.processes >= 1 and not self.mesh
        require(divides or unknown, self, "processes", rule)
        return super().validate()


def parse_mesh(words: Sequence[str]) -> dict[str, int]:
    """The sizes of the axes of `--mesh data=2 fsdp=4`."""
    sizes: dict[str, int] = {}
    for word in words:
        name, _, size = word.partition("=")
        if name not in AXES or name in sizes or not size.isdigit() or int(size) < 1:
            raise SetupError(
                f"`--mesh` is made of {', '.join(f'{axis}=N' for axis in AXES)}, each "
                f"at most once, N a number of devices; got {word}."
            )
        sizes[name] = int(size)
    return sizes


def make_mesh(
    sizes: Mapping[str, int] | None = None, devices: Sequence[Any] | None = None
) -> Mesh:
    """A mesh over all devices of all processes.

    Args:
        sizes: of the axes; those that are not named are one. Nothing: all is `data`.
        devices: others than all of JAX's.
    """
    devices = jax.devices() if devices is None else devices
    sizes = sizes or {"data": len(devices)}
    if math.prod(sizes.values()) != len(devices):
        product = " x ".join(f"{name}={size}" for name, size in sizes.items())
        raise SetupError(
            f"`--mesh` must be of as many devices as there are, {len(devices)}; got "
            f"{product} = {math.prod(sizes.values())}."
        )
    shape = [sizes.get(axis, 1) for axis in AXES]
    auto = (AxisType.Auto,) * len(AXES)
    return jax.make_mesh(shape, AXES, axis_types=auto, devices=devices)


def pin(x: jax.Array, spec: PartitionSpec = BATCH) -> jax.Array:
    """Says where a traced array lies; changes nothing where no mesh is set."""
    if not set(AXES) <= set(jax.sharding.get_abstract_mesh().axis_names):
        return x
    return jax.lax.with_sharding_constraint(x, spec)


def pin_by_name(tree: Any, layout: Mapping[str, PartitionSpec]) -> Any:
    """Says where the arrays of a tree lie, by the ends of their names.

    Args:
        tree: the arrays.
        layout: by two names, `query.kernel`; others lie whole on every device. An
            array of one axis more is a stack of such.
    """

    def place(path: Any, array: jax.Array) -> jax.Array:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        end = ".".join(name.removesuffix(".value").split(".")[-2:])
        spec = layout.get(end, PartitionSpec())
        is_stacked = spec and array.ndim == len(spec) + 1
        return pin(array, PartitionSpec(None, *spec) if is_stacked else spec)

    return jax.tree_util.tree_map_with_path(place, tree)


def put(x: np.ndarray, mesh: Mesh) -> jax.Array:
    """Divides a batch, which every process has, over the devices of all of them."""
    rows = NamedSharding(mesh, BATCH)
    return jax.make_array_from_callback(x.shape, rows, lambda index: x[index])
