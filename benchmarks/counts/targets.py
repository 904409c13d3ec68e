"""Compile-only devices: the real compiler of an accelerator that is not there.

XLA compiles for a *topology*, a description of devices, without opening one. The
executable carries its buffer assignment and its optimized HLO, so memory and
traffic can be read from it on any machine, and two commits compare exactly.

* TPU targets need the compiler `libtpu` (a wheel of 200 MB, 700 MB unpacked). It
  need not be in the environment that runs: `TPU_LIBRARY_PATH` names the file.
* CUDA targets need `jax[cuda12]` (5 GB unpacked). Nothing is autotuned there.

Both want `JAX_PLATFORMS=cpu` and the variables of `environment` set before JAX is
imported, which is why the benchmarks compile in processes of their own.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
from pathlib import Path
from typing import Any


@dataclasses.dataclass(frozen=True)
class Target:
    """A device to compile for.

    Attributes:
        name: the word on the command line.
        platform: `"tpu"` or `"cuda"`.
        title: the device in words, for tables.
        topology: what the compiler's topology lookup wants (TPU only).
        config: the device description in XLA's text format (CUDA only).
    """

    name: str
    platform: str
    title: str
    topology: str = ""
    config: str = ""


# XLA's `GpuTargetConfigProto`. The limits that all targets share, and those per thread
# block, are those of CUDA's programming guide (table "Technical Specifications per
# Compute Capability", 8.9 to 10.0).
_CUDA_CONFIG = """
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  threads_per_core_limit: {threads_per_core}
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: {shared_per_block}
  shared_memory_per_core: {shared_per_core}
  registers_per_block_limit: 65536
  registers_per_core_limit: 65536
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  core_count: {cores}
  fpus_per_core: 128
  clock_rate_ghz: {clock_ghz}
  memory_bandwidth: {bandwidth}
  l2_cache_size: {cache}
  device_memory_size: {memory}
  cuda_compute_capability {{ major: {capability[0]} minor: {capability[1]} }}
}}
platform_name: "CUDA"
runtime_version {{ major: 12 minor: 9 }}
dnn_version_info {{ major: 9 minor: {cudnn} }}
device_description_str: "{title}"
"""


def _cuda(name: str, title: str, cudnn: int = 8, **limits: Any) -> Target:
    config = _CUDA_CONFIG.format(title=title, cudnn=cudnn, **limits)
    return Target(name, "cuda", title, config=config)


_HOPPER_AND_LATER = {
    "threads_per_core": 2048,
    "shared_per_core": 233_472,
    "shared_per_block": 232_448,
}
TARGETS = {
    target.name: target
    for target in (
        Target("v5e", "tpu", "TPU v5e", topology="v5e:2x2"),
        Target("v5p", "tpu", "TPU v5p", topology="v5p:2x2x1"),
        Target("v6e", "tpu", "TPU v6e", topology="v6e:2x2"),
        Target("tpu7x", "tpu", "TPU7x", topology="tpu7x:2x2x1"),
        _cuda(
            "h100",
            "NVIDIA H100 80GB HBM3",
            cores=132,
            bandwidth=3_352_320_000_000,
            capability=(9, 0),
            memory=84_978_434_048,
            cache=52_428_800,
            clock_ghz=1.98,
            **_HOPPER_AND_LATER,
        ),
        _cuda(
            "b200",
            "NVIDIA B200",
            cudnn=10,  # the first with products of MXFP8 and NVFP4
            cores=148,
            bandwidth=7_672_320_000_000,
            capability=(10, 0),
            memory=191_514_411_008,
            cache=132_644_864,
            clock_ghz=1.965,
            **_HOPPER_AND_LATER,
        ),
        _cuda(
            "l40s",
            "NVIDIA L40S",
            cores=142,
            bandwidth=864_000_000_000,
            capability=(8, 9),
            memory=47_810_936_832,
            cache=100_663_296,
            clock_ghz=2.52,
            threads_per_core=1536,
            shared_per_core=102_400,
            shared_per_block=101_376,
        ),
    )
}


# Without a GPU nothing is tuned, and Triton's untuned tiling refuses some shapes; the
# matrix products go to cuBLAS instead.
CUDA_ENVIRONMENT = {"XLA_FLAGS": "--xla_gpu_enable_triton_gemm=false"}


def environment(library: Path | None = None) -> dict[str, str]:
    """The variables a compiling process needs before it imports JAX.

    Args:
        library: the `libtpu.so` to use where `libtpu` is not installed.
    """
    variables = {
        "JAX_PLATFORMS": "cpu",
        # No chip is opened: ask no metadata server, share the library freely.
        "TPU_SKIP_MDS_QUERY": "1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TPU_LOG_DIR": "disabled",
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    if library is not None:
        variables["TPU_LIBRARY_PATH"] = str(library)
    return variables


def why_missing(target: Target) -> str | None:
    """Why this process cannot compile for `target`; None where it can."""
    if target.platform == "tpu":
        named = os.environ.get("TPU_LIBRARY_PATH")
        if named and Path(named).is_file():
            return None
        if importlib.util.find_spec("libtpu") is None:
            return (
                f"{target.title} needs the compiler `libtpu`, which is not installed "
                '(`pip install "jax[tpu]"`, or let `make bench` make .venv-peers)'
            )
        return None
    if importlib.util.find_spec("jax_cuda12_plugin") is None:
        return (
            f"{target.title} needs JAX's CUDA plugin, which is not installed "
            '(`pip install "jax[cuda12]"`, 5 GB)'
        )
    return None


def compile_only_devices(target: Target, count: int = 1) -> list[Any]:
    """The first `count` devices of the target's topology.

    Raises:
        RuntimeError: where the target's compiler is not installed, with the remedy.
        ValueError: where the topology has fewer devices.
    """
    reason = why_missing(target)
    if reason is not None:
        raise RuntimeError(reason)
    import jax
    from jax.experimental import topologies

    if target.platform == "tpu":
        description = topologies.get_topology_desc(
            topology_name=target.topology, platform="tpu"
        )
    else:
        jax.devices("cpu")  # any query of backends discovers the CUDA plugin
        description = topologies.get_topology_desc(
            "", platform="cuda", topology=f"1x1x{count}", target_config=target.config
        )
    devices = list(description.devices)
    if len(devices) < count:
        raise ValueError(
            f"`compile_only_devices(target, count)`: {target.title} has a topology of "
            f"{len(devices)} devices; got count={count}. Ask for fewer."
        )
    return devices[:count]
