"""Compile-only devices: the real compiler of an accelerator, without the accelerator.

XLA compiles for a *topology*, a description of devices, without opening one. The
executable has its buffer assignment and its optimized HLO, so memory and traffic can be
read from it on any machine, and two commits compare exactly.

* TPU targets need the compiler `libtpu` (a wheel of 200 MB, 700 MB unpacked), installed
  or named by `TPU_LIBRARY_PATH`.
* CUDA targets need `jax[cuda12]` (5 GB unpacked). Nothing is autotuned without a GPU.

Without such a device, `JAX_PLATFORMS=cpu` must be set before JAX starts its backends.
The devices and their numbers are in `targets.toml`.
"""

import dataclasses
import importlib.util
import os
import string
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Range = tuple[float, float]


@dataclasses.dataclass(frozen=True)
class Roof:
    """The peak rates of a device, and the shares of them that programs reach.

    A pair is the best and the worst case.

    Attributes:
        bandwidth: Bytes a second of its memory.
        peaks: Operations a second of dense matmuls, by the bits of their operands.
        integers: The same for integers, where it differs.
        memory: Bytes of its memory.
        link: Bytes a second to other devices, in one direction.
        matmul: The share of the peak that large matmuls reach.
        attention: The share of the peak that attention in one kernel reaches.
        reads: The share of the bandwidth that kernels reach.
        start: The start-up time of each kernel, in seconds.
    """

    bandwidth: float
    peaks: Mapping[int, float]
    integers: Mapping[int, float] = dataclasses.field(default_factory=dict)
    memory: int = 0
    link: float = 0.0
    matmul: Range = (1.0, 1.0)
    attention: Range = (1.0, 1.0)
    reads: Range = (1.0, 1.0)
    start: Range = (0.0, 0.0)

    def peak(self, bits: int, are_integers: bool = False) -> float:
        """Returns the peak operations per second for operands of so many bits."""
        peaks = {**self.peaks, **(self.integers if are_integers else {})}
        wider = [size for size in peaks if size >= bits]
        return peaks[min(wider) if wider else max(peaks)]


@dataclasses.dataclass(frozen=True)
class Device:
    """A device to compile for.

    Attributes:
        name: The name on the command line.
        platform: `"tpu"` or `"cuda"`.
        title: The name for tables.
        roof: Its peak rates, and the shares that programs reach.
        sources: The source of each number of `roof`, by its name.
        topology: The argument of the compiler's topology lookup (TPU only).
        config: The device description in XLA's text format (CUDA only).
    """

    name: str
    platform: str
    title: str
    roof: Roof
    sources: Mapping[str, str]
    topology: str = ""
    config: str = ""


_FOLDER = Path(__file__).parent
# The limits of Hopper and later, unless a device has its own.
_LIMITS = {"threads_per_core": 2048, "shared_per_core": 233_472, "cudnn": 8}
_LIMITS |= {"shared_per_block": 232_448, "cache": 52_428_800, "clock_ghz": 1.98}


def _read() -> dict[str, Device]:
    data = tomllib.loads((_FOLDER / "targets.toml").read_text(encoding="utf-8"))
    config = string.Template((_FOLDER / "config.txt").read_text(encoding="utf-8"))
    shares: dict[str, Any] = {k: tuple(pair) for k, pair in data.pop("shares").items()}
    origins: dict[str, str] = data.pop("sources")
    found = {}
    for name, one in data.items():
        is_tpu = one["platform"] == "tpu"
        numbers = {key: one[key] for key in ("bandwidth", "memory", "link")}
        for key in filter(one.__contains__, ("peaks", "integers")):
            numbers[key] = {int(bits): peak for bits, peak in one[key].items()}
        roof = Roof(**numbers, **shares)
        own: dict[str, str] = {key: one["source"] for key in numbers}
        own |= one.get("sources", {})
        sources = origins | own
        if is_tpu:
            # unsure: no TPU was measured; its kernels are taken to start in no time,
            # its shares are a GPU's
            roof = dataclasses.replace(roof, start=(0.0, 0.0))
            sources = {key: f"as a GPU: {x}" for key, x in origins.items()} | own
        limits = _LIMITS | one | {"bandwidth": int(one["bandwidth"])}
        limits |= one.get("limits", {})
        limits["major"], limits["minor"] = limits.get("capability", (0, 0))
        text = "" if is_tpu else config.substitute(limits)
        topology = one.get("topology", "")
        title = one["title"]
        found[name] = Device(
            name, one["platform"], title, roof, sources, topology, text
        )
    return found


TARGETS = _read()
# Without a GPU nothing is autotuned, and Triton's untuned tiling rejects some shapes;
# matmuls use cuBLAS instead.
CUDA_OPTIONS = {"xla_gpu_enable_triton_gemm": False}


def why_missing(target: Device) -> str | None:
    """Returns why this process cannot compile for `target`; None if it can."""
    if target.platform == "tpu":
        named = os.environ.get("TPU_LIBRARY_PATH")
        if (named and Path(named).is_file()) or importlib.util.find_spec("libtpu"):
            return None
        return (
            f"{target.title} needs the compiler `libtpu`, which is not installed: "
            "`pip install libtpu`, 200 MB, on Linux"
        )
    if any(map(importlib.util.find_spec, ("jax_cuda12_plugin", "jax_cuda13_plugin"))):
        return None
    return (
        f"{target.title} needs JAX's CUDA plugin, which is not installed: "
        '`pip install "jax[cuda12]"`, 5 GB, on Linux; no GPU is needed'
    )


def compile_only_devices(target: Device, count: int = 1) -> list[Any]:
    """Returns the first `count` devices of the target's topology.

    Raises:
        RuntimeError: The target's compiler is not installed or does not start; the
            message has the remedy.
        ValueError: The topology has fewer devices.
    """
    reason = why_missing(target)
    if reason is not None:
        raise RuntimeError(f"{reason}.")
    import jax
    from jax.experimental import topologies

    jax.devices("cpu")  # any query of backends discovers the CUDA plugin
    options = {"topology": f"1x1x{count}", "target_config": target.config}
    is_tpu = target.platform == "tpu"
    try:
        description = topologies.get_topology_desc(
            target.topology, target.platform, **({} if is_tpu else options)
        )
    except (NotImplementedError, jax.errors.JaxRuntimeError) as error:
        raise RuntimeError(
            f"The compiler for {target.title} did not start: {error}. Without such a "
            "device set `JAX_PLATFORMS=cpu` before the process starts; "
            "`python -m mpx forecast` does so itself."
        ) from error
    devices = list(description.devices)
    if len(devices) < count:
        raise ValueError(
            f"{target.title} is compiled for a topology of {len(devices)} devices; "
            f"got arguments on {count}. Use at most {len(devices)}."
        )
    return devices[:count]
