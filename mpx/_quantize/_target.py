"""`Target`: the device that a program is compiled for, as far as products care.

Which form of a quantized product is fast differs from device to device, and a program
is often compiled elsewhere than it runs. So the device can be named; otherwise it is
that of the mesh in force, otherwise JAX's default device.
"""

import dataclasses
import re
from typing import Any

import jax

# (words of JAX's device kind or of NVIDIA's product name, compute capability), from
# NVIDIA's list of CUDA GPUs; the first match holds. Devices report their capability
# themselves; the names serve `target=` and meshes without devices.
_GPUS = (
    ("gb300", (10, 3)),
    ("b300", (10, 3)),
    ("gb200", (10, 0)),
    ("b200", (10, 0)),
    ("b100", (10, 0)),
    ("gh200", (9, 0)),
    ("h200", (9, 0)),
    ("h100", (9, 0)),
    ("h800", (9, 0)),
    ("h20", (9, 0)),
    ("l40s", (8, 9)),
    ("l40", (8, 9)),
    ("l4", (8, 9)),
    ("a100", (8, 0)),
    ("v100", (7, 0)),
)
_KNOWN = (
    '"cpu", CUDA compute capabilities such as "sm_89", "sm_90" or "sm_100", names of '
    f"GPUs ({', '.join(name for name, _ in _GPUS)}), and TPUs such as "
    '"tpu v5e" or "tpu7x"'
)


@dataclasses.dataclass(frozen=True)
class Target:
    """A device to compile for.

    Attributes:
        platform: As `jax.lax.platform_dependent` names it: "cpu", "cuda" or "tpu"; or
            another one, of which nothing is known.
        name: What it is called in words.
        capability: CUDA's compute capability, or a TPU's generation and 0.
    """

    platform: str
    name: str
    capability: tuple[int, int] = (0, 0)

    @property
    def has_fp8_units(self) -> bool:
        """Whether products with one scale for each tensor are fast in FP8."""
        if self.platform == "cuda":
            return self.capability >= (8, 9)
        return self.platform == "tpu" and self.capability >= (7, 0)

    @property
    def rounds_to_fp8(self) -> bool:
        """Whether its cast to FP8 is known to round to nearest: see `_casting`."""
        return self.platform == "cuda" and self.capability >= (8, 9)

    @property
    def transposes_fp8(self) -> bool:
        """Whether its FP8 products want both operands with the contracted axis last."""
        return self.rounds_to_fp8 and self.capability < (10, 0)

    @property
    def has_block_units(self) -> bool:
        """Whether products of MXFP8 and NVFP4 are (with cuDNN 9.10 or later)."""
        return self.platform == "cuda" and self.capability >= (10, 0)


CPU = Target("cpu", "cpu")


def target_from(value: object) -> Target:
    """The target that a name means.

    Args:
        value: "cpu"; "sm_90" and the like; the name of a GPU such as "H100"; "tpu v5e",
            "tpu7x" and the like. None: the devices of the mesh in force (`jax.set_mesh`
            or `shard_map`) where it tells, else JAX's default device, which starts the
            backend.

    Returns:
        The target.

    Raises:
        TypeError: The value is neither a string nor None.
        ValueError: No such target is known.
    """
    if value is None:
        return _from_mesh() or _from_default_device()
    if not isinstance(value, str):
        raise TypeError(f"`target` is None or one of {_KNOWN}; got {value!r}.")
    found = _from_name(value)
    if found is None:
        raise ValueError(f"`target` is None or one of {_KNOWN}; got {value!r}.")
    return found


def _from_name(name: str) -> Target | None:
    words = name.lower().strip()
    if words == "cpu":
        return CPU
    if match := re.fullmatch(r"sm_(\d+)(\d)a?", words):
        capability = (int(match[1]), int(match[2]))
        return Target("cuda", words, capability)
    if match := re.fullmatch(r"(?:tpu ?v?|v)(\d\d?) ?(?:lite|[a-z])?", words):
        return Target("tpu", words, (int(match[1]), 0))
    for gpu, capability in _GPUS:
        if re.search(rf"\b{gpu}\b", words):
            return Target("cuda", words, capability)
    return None


def _from_mesh() -> Target | None:
    device = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    kind = getattr(device, "device_kind", None)
    return None if kind is None else _from_name(kind)


def _from_default_device() -> Target:
    chosen: Any = getattr(jax.config, "jax_default_device", None)
    if chosen is None or isinstance(chosen, str):
        chosen = jax.local_devices(backend=chosen)[0]
    return target_of(chosen)


def target_of(device: Any) -> Target:
    """The target that a `jax.Device` is."""
    capability = str(getattr(device, "compute_capability", ""))
    match = re.fullmatch(r"(\d+)\.(\d+)", capability)  # of ROCm it is a word
    if device.platform in ("gpu", "cuda") and match:
        name = f"sm_{match[1]}{match[2]}"
        return Target("cuda", name, (int(match[1]), int(match[2])))
    kind = device.device_kind
    return _from_name(kind) or Target(device.platform, kind)
