"""`Target`: the properties of the device that a program is compiled for.

Which form of a quantized product is fast depends on the device, and a program is often
compiled on another machine than it runs on. So the device can be named; the default is
the device of the active mesh, else JAX's default device.
"""

import dataclasses
import functools
import pathlib
import re
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import jax
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import batching, mlir

from ..._base.jax_compat import (
    HAS_CPU_FORM,
    NEEDS_CPU_FORM,
    WIDENS_STACKS,
    traced_for_all,
)
from ..._program import by_platform

T = TypeVar("T")

# (words of JAX's device kind or of NVIDIA's product name, compute capability), from
# NVIDIA's list of CUDA GPUs; the first match counts. Devices report their capability
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
# The names of TPUs in JAX and in Google's documentation, by the words after "tpu"
# without a "v": "TPU v5 lite" is a v5e, "TPU v5" a v5p.
_TPUS = {"2": " v2", "3": " v3", "4": " v4", "4i": " v4i", "4lite": " v4i"}
_TPUS |= {"5e": " v5e", "5lite": " v5e", "5": " v5p", "5p": " v5p"}
_TPUS |= {"6e": " v6e", "6lite": " v6e"}
_TPUS |= {"7": "7x", "7x": "7x"}
_KNOWN = (
    '"cpu"',
    '"cpu bf16"',
    *(f'"{name}"' for name, _ in _GPUS),
    'CUDA compute capabilities such as "sm_90"',
    *(f'"tpu {name}"' for name in ("v2", "v3", "v4", "v5e", "v5p", "v6e")),
    '"tpu7x"',
)


@dataclasses.dataclass(frozen=True)
class Target:
    """A device to compile for.

    Attributes:
        platform: Its name in `jax.lax.platform_dependent`: "cpu", "cuda" or "tpu"; or
            another platform, without known properties.
        name: The name in messages and reports.
        capability: CUDA's compute capability, or a TPU's generation and 0; (1, 0) for a
            CPU with bfloat16 units.
        is_met: In a form that `on_target` computes: whether the program is lowered for
            this device; None elsewhere.
    """

    platform: str
    name: str
    capability: tuple[int, int] = (0, 0)
    is_met: bool | None = None

    @property
    def wants_cpu_form(self) -> bool:
        """Whether bfloat16 matmuls get the form of `_program/cpu_products.py`.

        With jax 0.10.2 the form costs a CPU without units a quarter of a matmul; older
        versions do not have it. From 0.11 on it is free, and avoids sums in bfloat16.
        """
        has_units = HAS_CPU_FORM and self.capability >= (1, 0)
        return self.platform == "cpu" and (has_units or NEEDS_CPU_FORM)

    @property
    def widens_stacks(self) -> bool:
        """Whether writing part of a bfloat16 array costs as much as writing it all."""
        return self.platform == "cpu" and WIDENS_STACKS

    @property
    def repeats_casts(self) -> bool:
        """Whether its compiler casts what a loop reads in each iteration again."""
        return self.platform == "cuda"

    @property
    def has_fp8_units(self) -> bool:
        """Whether matmuls with one scale per tensor are fast in FP8."""
        if self.platform == "cuda":
            return self.capability >= (8, 9)
        return self.platform == "tpu" and self.capability >= (7, 0)

    @property
    def has_int8_units(self) -> bool:
        """Whether matmuls of int8 with sums in int32 are fast.

        For TPUs by the cycles that XLA estimates (libtpu 0.0.42, November 2026): half
        of bfloat16's on v5e, v5p and v6e, and as many on TPU7x.

        For CUDA by compiled programs (jax 0.10.2, November 2026): a step of two layers
        of 4096 x 16384 that checks no gradient has 1.36 times the roofline speed of
        naive bfloat16 on an H100, 1.44 times on an A100; with operands dequantized 0.82
        and 0.88 times. It moves 1.37 and 1.68 times the bytes, since cuBLAS writes
        int32; dequantized 1.75 and 1.84 times. No GPU has run it. A B300 has a
        thirtieth of a B200's int8 rate (NVIDIA, Blackwell Technical Brief, table 3).
        """
        if self.platform == "cuda":
            return (8, 0) <= self.capability <= (10, 0)
        if self.platform == "tpu":
            return (5, 0) <= self.capability < (7, 0)
        return self.platform == "cpu" and self.capability >= (1, 0)

    @property
    def rounds_to_fp8(self) -> bool:
        """Whether its cast to FP8 is known to round to nearest; see `_casting`."""
        return self.platform == "cuda" and self.capability >= (8, 9)

    @property
    def transposes_fp8(self) -> bool:
        """Whether its FP8 matmuls need the contracted axis of both operands last."""
        return self.rounds_to_fp8 and self.capability < (10, 0)

    @property
    def has_block_units(self) -> bool:
        """Whether MXFP8 and NVFP4 matmuls are fast (with cuDNN 9.10 or later)."""
        return self.platform == "cuda" and self.capability >= (10, 0)


CPU = Target("cpu", "cpu")
CPU_WITH_UNITS = Target("cpu", "cpu bf16", (1, 0))


# Linux's flag for an x86 CPU with bfloat16 units, and the maker. For Intel it is AMX:
# without it their AVX512-BF16 was measured to gain nothing.
_UNITS = (("amx_bf16", ""), ("avx512_bf16", "AuthenticAMD"))


@functools.cache
def this_cpu() -> Target:
    """Returns this machine's CPU by Linux's flags; elsewhere one without units."""
    try:
        words = {*pathlib.Path("/proc/cpuinfo").read_text().split(), ""}
    except OSError:
        return CPU
    return CPU_WITH_UNITS if any(words.issuperset(pair) for pair in _UNITS) else CPU


def target_from(value: object) -> Target:
    """Returns the target of a name, or the one that the program would run on.

    Args:
        value: A name. None: the devices of the active mesh (`jax.set_mesh` or
            `shard_map`) if it has any, else JAX's default device, which starts the
            backend.
    """
    if value is None:
        return _from_mesh() or _from_default_device()
    return read_target(value, "`target`")


def read_target(
    value: object, argument: str, among: Sequence[str] | None = None
) -> Target:
    """Parses the name of a target that a user passed; all such names go through here.

    Upper case and word separators (a space, a hyphen, an underscore or nothing) are
    ignored.

    Args:
        value: "cpu", "cpu bf16"; "sm_90" and the like; the name of a GPU,
            "H100" or "NVIDIA H100 80GB HBM3"; "tpu v5e", "TPU v5 lite", "tpu7x" ...
        argument: The argument's name, for messages.
        among: The names of targets whose rates are known, if those are needed; by
            default all targets are accepted.

    Raises:
        TypeError: The value is not a string.
        ValueError: The target is unknown, or not accepted here.
    """
    found = _from_name(value) if isinstance(value, str) else None
    if found is None or (among is not None and found.name not in among):
        known = ", ".join(_KNOWN if among is None else (f'"{name}"' for name in among))
        error = ValueError if isinstance(value, str) else TypeError
        why = f", but the rates of {found.name} are unknown" if found else ""
        raise error(f"{argument} must be one of {known}; got {value!r}{why}.")
    return found


def _from_name(name: str) -> Target | None:
    words = re.sub(r"[\s_-]+", " ", name.lower()).strip()
    for cpu in (CPU, CPU_WITH_UNITS):
        if words == cpu.name:
            return cpu
    if match := re.fullmatch(r"sm ?(\d+)(\d)[af]?", words):
        capability = (int(match[1]), int(match[2]))
        return Target("cuda", f"sm_{match[1]}{match[2]}", capability)
    if match := re.fullmatch(r"(?:tpu ?v?|v)((\d\d?) ?(?:lite|[a-z])?)", words):
        generation, short = int(match[2]), match[1].replace(" ", "")
        # A generation later than all known ones keeps its own name.
        tpu = short if generation > 7 else _TPUS.get(short)
        return None if tpu is None else Target("tpu", f"tpu{tpu}", (generation, 0))
    for gpu, capability in _GPUS:
        if re.search(rf"\b{gpu}\b", words):
            return Target("cuda", gpu, capability)
    return None


def _from_mesh() -> Target | None:
    device = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    kind = getattr(device, "device_kind", None)
    if kind is None:
        return None
    return this_cpu() if kind.lower() == "cpu" else _from_name(kind)


def _from_default_device() -> Target:
    chosen: Any = getattr(jax.config, "jax_default_device", None)
    if chosen is None or isinstance(chosen, str):
        chosen = jax.local_devices(backend=chosen)[0]
    return target_of(chosen)


def target_of(device: Any) -> Target:
    """Returns the target of a `jax.Device`."""
    capability = str(getattr(device, "compute_capability", ""))
    match = re.fullmatch(r"(\d+)\.(\d+)", capability)  # not a number for ROCm
    if device.platform in ("gpu", "cuda") and match:
        name = f"sm_{match[1]}{match[2]}"
        return Target("cuda", name, (int(match[1]), int(match[2])))
    kind = device.device_kind
    if device.platform == "cpu":
        return this_cpu()
    return _from_name(kind) or Target(device.platform, kind)


# --- Two forms of a program -----------------------------------------------------------
#
# A program for a GPU also runs on a laptop, which emulates it. With both forms in a
# `jax.lax.platform_dependent` derivatives and `jax.checkpoint` take both apart, and
# half of the equations of a step are for a device that it never meets. So they are one
# operation: it holds the program for the target, and makes the other one if it is
# lowered for another platform.

_PLATFORMS = ("cuda", "rocm", "tpu")


def on_target(
    target: Target, form: Callable[..., T], *operands: Any, **options: Hashable
) -> T:
    """Computes in the form for a target; emulates it on other platforms.

    Args:
        target: The device.
        form: A function of a module: computes it, given the target with `is_met`, the
            operands and the options. Its results have the same types for both.
        *operands: Trees of arrays.
        **options: What else it is given.
    """
    if target.is_met is not None or target.platform not in _PLATFORMS:
        return form(target, *operands, **options)
    arrays, tree = jax.tree.flatten(operands)
    here, emulated = (
        _of_arrays(
            form, dataclasses.replace(target, is_met=met), tree, *options.items()
        )
        for met in (True, False)
    )
    traced = jax.jit(here).trace(*arrays)
    params = {"program": traced.jaxpr, "emulated": emulated}
    results = _on_target.bind(*arrays, **params, platform=target.platform)
    return jax.tree.unflatten(jax.tree.structure(traced.out_info), results)


# One function for equal forms, which JAX traces and lowers once.
@functools.lru_cache(maxsize=1024)
def _of_arrays(
    form: Callable[..., Any], target: Target, tree: Any, *options: tuple[str, Any]
) -> Callable[..., Any]:
    def run(*arrays: Any) -> Any:
        results = form(target, *jax.tree.unflatten(tree, arrays), **dict(options))
        return results if target.is_met else jax.tree.leaves(results)

    return traced_for_all(run)


_on_target = Primitive("on_target")
_on_target.multiple_results = True
_on_target.def_impl(by_platform)
_on_target.def_effectful_abstract_eval(
    lambda *_, program, **params: (program.out_avals, program.effects)
)


def _batched(operands: Any, axes: Any, **params: Any) -> Any:
    run = jax.vmap(jaxpr_as_fun(params["program"]), axes)
    params["program"] = jax.make_jaxpr(run)(*operands)
    params["emulated"] = jax.vmap(params["emulated"], axes)
    results = _on_target.bind(*operands, **params)
    return results, (0,) * len(results)


def _lower(known: str | None, context: Any, *operands: Any, **params: Any) -> Any:
    is_met = params["platform"] == known
    run = jaxpr_as_fun(params["program"]) if is_met else params["emulated"]
    return mlir.lower_fun(run)(context, *operands)


batching.primitive_batchers[_on_target] = _batched
for _known in (None, *_PLATFORMS):
    rule = functools.partial(_lower, _known)
    mlir.register_lowering(_on_target, rule, platform=_known)
