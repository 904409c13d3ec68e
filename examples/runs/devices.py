"""Data parallelism over all local devices."""

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .config import RunConfig
from .errors import SetupError


def data_mesh() -> Mesh:
    """One axis over all local devices."""
    devices = jax.local_devices()
    auto = (jax.sharding.AxisType.Auto,)
    return jax.make_mesh((len(devices),), ("data",), axis_types=auto, devices=devices)


def replicated(mesh: Mesh) -> NamedSharding:
    """A full copy on every device."""
    return NamedSharding(mesh, PartitionSpec())


def divided(mesh: Mesh) -> NamedSharding:
    """The leading axis divided over the devices."""
    return NamedSharding(mesh, PartitionSpec("data"))


def require_divisible(config: RunConfig, mesh: Mesh) -> None:
    """Every device must get as many examples of every micro-batch."""
    tensor = dict(getattr(mesh, "shape", {})).get("tensor", 1)  # computes it together
    devices = mesh.size // tensor
    parts = config.accumulate * devices
    if config.batch_size % parts:
        raise SetupError(
            "`--batch-size` must be a multiple of micro-batches times devices, "
            f"{config.accumulate} x {devices}; got {config.batch_size}. Use "
            f"{-(-config.batch_size // parts) * parts}."
        )
