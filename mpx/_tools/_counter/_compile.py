"""Compiles a lowered program for a target: its optimized HLO and its memory.

Nine tenths of a compiler's time are code generation, which no count reads. So this file
runs as a script in a process of its own, which writes what XLA dumps, and which is
ended as soon as the scheduled program and its memory are there. The process gets the
very module and options that `lowered.compile()` compiles.
"""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the script has no package
    from ._targets import Device

# The compiler's own files. That of a TPU writes the program last; for a GPU the code of
# the first kernel follows.
_BUFFERS = "after_optimizations-buffer-assignment.txt"
_PROGRAMS = {"tpu": "after_optimizations_after_buffer_assignment.txt"}
_PROGRAMS |= {"cuda": "gpu_after_optimizations.txt"}
_CODE = "*.ir-no-opt.ll"
_WHOLE = re.compile(r"^ENTRY .*^\}", re.MULTILINE | re.DOTALL)
# Those on the chip and on the host have a color.
_ALLOCATION = re.compile(r"^allocation \d+: size (\d+), ([\w-]+)", re.MULTILINE)
_NOT_COUNTED = ("color", "constant", "thread-local")  # as by JAX
_POLL = 0.05
_TUPLED = 2000  # JAX passes more arguments than these to a TPU as one tuple


@dataclasses.dataclass(frozen=True)
class Program:
    """A program that a target's compiler made.

    Attributes:
        text: Its optimized, scheduled HLO.
        memory: Bytes of arguments, results in none of them, and temporaries. Of a TPU
            those in its main memory, by the compiler's buffer assignment:
            `compiled.memory_analysis()` says more of a program that uses the chip's.
        temporaries: Bytes of temporaries.
    """

    text: str = dataclasses.field(repr=False)
    memory: int
    temporaries: int


def program_of(
    lowered: Any,
    target: Device,
    devices: list[Any],
    options: dict[str, Any] | None = None,
    flags: dict[str, Any] | None = None,
) -> Program:
    """Compiles a `jax.stages.Lowered` for devices of `compile_only_devices`.

    Without generating code, unless that fails: then as a whole.

    Args:
        lowered: The program, lowered for these devices.
        target: The target that they are of.
        devices: All devices that the program runs on, in the order of its mesh.
        options: Compiler options. With them, or none in a dict, the program is compiled
            as a whole, and with those of its `jax.jit`, which only it knows.
        flags: Further ones, which do not ask for that.

    Raises:
        jax.errors.JaxRuntimeError: The compiler refuses the program.
    """
    from ._kernels import memory

    flags = flags or {}
    if options is None and devices[0].platform != "cpu":
        found = _without_code(lowered, target, devices, flags)
        if found is not None:
            return found
    with warnings.catch_warnings():
        # A compilation cache cannot load programs for an absent device.
        warnings.filterwarnings("ignore", ".*persistent compilation cache")
        compiled = lowered.compile({**(options or {}), **flags})
    temporaries = compiled.memory_analysis().temp_size_in_bytes
    return Program(compiled.as_text(), memory(compiled), temporaries)


def _without_code(
    lowered: Any, target: Device, devices: list[Any], flags: dict[str, Any]
) -> Program | None:
    """Returns the program, compiled up to its code; None if the process failed."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        module = lowered.compiler_ir("stablehlo")
        with (folder / "module").open("wb") as file:
            module.operation.write_bytecode(file)
        numbers = [device.id for device in devices]
        options = _options(module, numbers)
        options.env_option_overrides = list(flags.items())
        debug = options.executable_build_options.debug_options
        debug.xla_dump_to, debug.xla_dump_hlo_as_text = str(folder / "dump"), True
        (folder / "options").write_bytes(options.SerializeAsString())
        more = {"JAX_PLATFORMS": "cpu", "TPU_LOG_DIR": "disabled"}
        more |= {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
        (folder / "config").write_text(target.config, encoding="utf-8")
        call = [sys.executable, __file__, name, target.topology, *map(str, numbers)]
        try:
            child = subprocess.Popen(call, env=os.environ | more, **pipes)
        except OSError:
            return None
        try:
            while True:
                is_over = child.poll() is not None
                found = _read(folder / "dump", target.platform, is_over)
                if found is not None or is_over:
                    return None if child.returncode else found
                time.sleep(_POLL)
        finally:
            child.kill()
            child.wait()


def _options(module: Any, numbers: list[int]) -> Any:
    """Returns the options that JAX compiles a module with."""
    from jax.extend import backend

    main = {x.attributes["sym_name"].value: x for x in module.body.operations}["main"]

    def are_free(key: str) -> list[bool]:  # XLA shards an array that has no sharding
        given = main.attributes[key] if key in main.attributes else ()
        return ["sharding" not in str(one) for one in given]

    options: Any = backend.get_compile_options(
        num_replicas=1, num_partitions=len(numbers), device_assignment=[numbers]
    )
    arguments = main.regions[0].blocks[0].arguments
    options.parameter_is_tupled_arguments = len(arguments) > _TUPLED
    build = options.executable_build_options
    build.allow_spmd_sharding_propagation_to_parameters = are_free("arg_attrs")
    build.allow_spmd_sharding_propagation_to_output = are_free("res_attrs")
    return options


def _read(dump: Path, platform: str, is_over: bool) -> Program | None:
    """Returns the program that a process has dumped; None if it is not there yet."""
    name = _PROGRAMS[platform]
    is_written = is_over or platform == "tpu" or any(dump.glob(_CODE))
    made = next(dump.glob(f"module_*{name}"), None) if is_written else None
    text = "" if made is None else made.read_text(encoding="utf-8")
    if made is None or not _WHOLE.search(text):
        return None

    end = "after" + name.partition("after")[2]
    buffers = made.with_name(made.name.replace(end, _BUFFERS))
    pairs = _ALLOCATION.findall(buffers.read_text(encoding="utf-8"))
    sizes = [(int(size), kind) for size, kind in pairs if kind not in _NOT_COUNTED]
    temporaries = sum(size for size, kind in sizes if kind == "preallocated-temp")
    return Program(text, sum(size for size, _ in sizes), temporaries)


def _compile(folder: Path, topology: str, numbers: list[int]) -> None:
    """Compiles what is in a folder; the flags of XLA dump it."""
    import jax
    from jax.experimental import topologies
    from jax.extend import backend
    from jax.interpreters import mlir
    from jaxlib.xla_client import DeviceList

    jax.devices("cpu")
    options: Any = backend.get_compile_options(num_replicas=1, num_partitions=1)
    options = type(options).ParseFromString((folder / "options").read_bytes())
    config, platform, more = (folder / "config").read_text(encoding="utf-8"), "tpu", {}
    if config:
        platform, topology = "cuda", ""
        more = {"topology": f"1x1x{max(numbers) + 1}", "target_config": config}
    described = topologies.get_topology_desc(topology, platform, **more)
    found = {x.id: x for x in described.devices}
    devices = [found[number] for number in numbers]
    with mlir.make_ir_context():
        module = mlir.ir.Module.parse((folder / "module").read_bytes())
        client: Any = devices[0].client
        client.compile(module, DeviceList(tuple(devices)), options)


if __name__ == "__main__":
    _compile(Path(sys.argv[1]), sys.argv[2], list(map(int, sys.argv[3:])))
