"""`python -m mpx doctor`: versions, devices, fast precisions, and problems.

Whether a precision is fast follows from the kind of device, not from a measurement: the
generation that introduced hardware for the format. Emulated means that other hardware
computes the same results, without being faster.
"""

import dataclasses
import importlib.metadata
import os
import platform
import shutil
from collections.abc import Sequence
from typing import Any

import jax

from .._quantize import Target, target_of

_PACKAGES = ("jax", "jaxlib", "equinox", "jaxtyping")
_CLIENTS = ("optax", "flax", "dm-haiku", "keras", "orbax-checkpoint", "qwix")
_PLUGINS = ("jax-cuda12-plugin", "jax-cuda13-plugin", "libtpu")
_PUBLISHED = "mixed-precision-for-JAX"

# CUDA compute capabilities: matmuls in float16 came with Volta, in bfloat16 with Ampere
# (CUDA C++ Programming Guide, "Arithmetic instructions").
_FLOAT16, _BFLOAT16 = (7, 0), (8, 0)
_OF_A_CPU = (1, 0)  # AMX, or AVX512-BF16 of AMD: `_quantize/_formats/_target.py`
# Since this version XLA's compiler for CPUs sums some bfloat16 matmuls in bfloat16, of
# those that autocast does not emit: docs/numerics.md, "On a CPU".
_SUMS_IN_BFLOAT16 = (0, 11)
_FLAG = "xla_cpu_experimental_ynn_fusion_type="


@dataclasses.dataclass(frozen=True)
class Support:
    """Whether a device has hardware for a precision.

    Attributes:
        name: The name of the precision.
        is_fast: Whether there is hardware; None if mpx does not know the device.
        call: The code that uses it.
    """

    name: str
    is_fast: bool | None
    call: str


def precisions(target: Target) -> tuple[Support, ...]:
    """Returns which precisions a device has hardware for."""
    cuda = target.platform == "cuda"
    known = target.platform in ("cpu", "cuda", "tpu")
    units = {
        "float16": cuda and target.capability >= _FLOAT16,
        "bfloat16": target.platform == "tpu"
        or (cuda and target.capability >= _BFLOAT16)
        or (target.platform == "cpu" and target.capability >= _OF_A_CPU),
        "FP8": target.has_fp8_units,
        "MXFP8, NVFP4": target.has_block_units,
    }
    calls = {
        "float16": 'mpx.autocast(loss, "float16")',
        "bfloat16": "mpx.autocast(loss)",
        "FP8": "mpx.autocast(loss, recipe=mpx.DelayedScaling())",
        "MXFP8, NVFP4": "mpx.autocast(loss, recipe=mpx.MXFP8BlockScaling())",
    }
    return tuple(
        Support(name, fast if known else None, calls[name])
        for name, fast in units.items()
    )


def text() -> str:
    """Returns the whole report, for a terminal of 80 columns."""
    try:
        devices, trouble = jax.devices(), ""
    except RuntimeError as error:  # such as a plugin that does not start
        devices, trouble = [], str(error)
    lines = [f"Python {platform.python_version()}, {_versions(('mpx-jax',))}"]
    lines += [f"  {_versions(_PACKAGES)}"]
    lines += [
        f"  {found}" for found in (_versions(_CLIENTS), _versions(_PLUGINS)) if found
    ]
    kinds = {device.device_kind: device for device in devices}
    for kind, device in kinds.items():
        count = sum(other.device_kind == kind for other in devices)
        target = target_of(device)
        lines += ["", f"{count} x {kind}, known to mpx as {target.name!r}"]
        for found in precisions(target):
            fast = {True: "fast", False: "emulated", None: "not known"}[found.is_fast]
            lines.append(f"  {found.name:<13} {fast:<10} {found.call}")
    problems = [f"JAX finds no device: {trouble}"] if trouble else []
    problems += find_problems(devices)
    lines += ["", *(f"! {problem}" for problem in problems)]
    lines += [] if problems else ["Nothing is in the way."]
    return "\n".join(lines)


def find_problems(devices: Sequence[Any]) -> list[str]:
    """Returns the obstacles to correct use of mpx or of the devices."""
    found: list[str] = []
    if published := _version(_PUBLISHED):
        found.append(
            f"{_PUBLISHED} {published} is installed: it is also imported as `mpx`,\n"
            "  and its files overwrite those of mpx-jax. Uninstall both, then "
            "install\n"
            "  mpx-jax: it runs programs written for the other."
        )
    on_cpu = {device.platform for device in devices} == {"cpu"}
    if on_cpu and shutil.which("nvidia-smi"):
        found.append(
            "An NVIDIA driver is here, but JAX computes on the CPU. Install its\n"
            '  plugin: `pip install "jax[cuda12]"`.'
        )
    version = tuple(int(part) for part in jax.__version__.split(".")[:2])
    flags = os.environ.get("XLA_FLAGS", "")
    if on_cpu and version >= _SUMS_IN_BFLOAT16 and _FLAG not in flags:
        found.append(
            f"On a CPU, XLA of JAX {jax.__version__} sums some matmuls in bfloat16,\n"
            "  of those that `mpx.autocast` does not emit:\n"
            f"  `export XLA_FLAGS=--{_FLAG}` (docs/numerics.md, On a CPU)."
        )
    return found


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _versions(packages: Sequence[str]) -> str:
    found = {name: _version(name) for name in packages}
    return ", ".join(f"{name} {version}" for name, version in found.items() if version)
