"""One program: a step in a precision on a target, compiled and counted."""

import collections
import logging
import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from jaxtyping import PyTree

from .._counter import (
    CUDA_OPTIONS,
    Kernel,
    Roof,
    Target,
    frames_of,
    kernels_of,
    memory,
    messages,
)
from .._inspect import function_path, line_text
from .._program import Frame, is_array_or_type
from ._model import (
    ATTENTION,
    OPTIMIZER,
    Frames,
    kind_of,
    quantizing_bytes,
    seconds,
    times_of,
)
from ._peak import temporaries_by_part
from ._report import Estimate, KernelGroup
from ._steps import Precision, Step

_FOLDER = str(Path(__file__).parent)
_LOG = logging.getLogger("mpx.forecast")


def estimate(step: Step, precision: Precision, target: Target, top: int) -> Estimate:
    """A step in a precision on a target.

    Raises:
        RuntimeError: The compiler refuses the program, but not because of its size.
    """
    size, where = batch_of(step.args), f"{precision.label} for {target.title}"
    # A whole step says not which argument is the batch.
    batch = "" if step.optimizer is None else f", batch {size}"
    _LOG.info("Compiling %s%s", where, batch)
    where = f"`mpx.forecast`: {where}"
    try:
        lowered = step.lower(precision, target)
    except Exception as error:
        error.add_note(f"Raised while tracing and lowering the step. {where}.")
        raise
    try:
        options = CUDA_OPTIONS if target.platform == "cuda" else None
        with warnings.catch_warnings():
            # A compilation cache cannot load what is for a device that is not here.
            warnings.filterwarnings("ignore", ".*persistent compilation cache")
            compiled = lowered.program.compile(options)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            lines = str(error).splitlines()
            said = [line for line in lines if re.match(r"\w+Error: ", line)] or lines
            raise RuntimeError(
                f"{where}: the compiler refused it: {said[0]}"
            ) from error
        return _unfit(precision, target, size)
    text, whole = compiled.as_text(), memory(compiled) + lowered.constants
    temporaries = compiled.memory_analysis().temp_size_in_bytes
    parts = dict(lowered.arguments)
    held = {"closed-over arrays": lowered.closed_over} if lowered.closed_over else {}
    # With alignment, and results that are in no argument's place.
    known = temporaries + sum(parts.values()) + lowered.closed_over
    parts["other arguments"] += whole - known
    widths = {size * b // 4 for size in lowered.weights for b in (1, 2, 4, 8)}
    parts |= temporaries_by_part(text, temporaries, frozenset(widths))
    parts |= held
    frames = frames_of(text)
    kernels = [(k, kind_of(k, frames.get(k.frame, ()))) for k in kernels_of(text)]
    sent: collections.Counter[str] = collections.Counter()
    for message in messages(text, step.devices):
        sent[message.dtype] += int(message.sent)
    times = times_of(kernels, target.roof, sum(sent.values()))
    return Estimate(
        target=target.name,
        precision=precision.label,
        memory=whole,
        memory_by_part=parts,
        traffic=sum(k.bytes * k.times for k, _ in kernels),
        quantizing=sum(quantizing_bytes(*one) * one[0].times for one in kernels),
        quantized=sum(k.few * k.times for k, _ in kernels if not k.operations),
        flops=_flops(kernels),
        sent=dict(sent),
        kernels=sum(k.times for k, _ in kernels),
        roofline=times.roofline,
        time=times.range,
        bound=times.by_kind,
        by_memory=times.by_memory,
        top=_groups(kernels, frames, target.roof, top),
        batch=size,
    )


def _unfit(precision: Precision, target: Target, batch: int) -> Estimate:
    never, nothing = float("inf"), (0, 0, 0, {}, {}, 0)
    names = (target.name, precision.label, None, {})
    return Estimate(*names, *nothing, never, (never, never), {}, 0.0, batch=batch)


def _flops(kernels: Sequence[tuple[Kernel, str]]) -> dict[str, int]:
    found: collections.Counter[str] = collections.Counter()
    for kernel, kind in kernels:
        unit = ATTENTION if kind == ATTENTION else f"{kernel.bits} bits"
        found[unit] += (kernel.operations + kernel.further) * kernel.times
    return {unit: count for unit, count in found.items() if count}


def _groups(
    kernels: Sequence[tuple[Kernel, str]],
    frames: Mapping[int, Frames],
    roof: Roof,
    top: int,
) -> tuple[KernelGroup, ...]:
    """Kernels of the same kind, line and scope together; those that move most."""
    groups: dict[tuple[str, str, str], list[Kernel]] = {}
    for kernel, kind in kernels:
        calls = frames.get(kernel.frame, ())
        chain = _inside(
            [Frame(file, line, 0, name) for file, name, line in reversed(calls)]
        )
        path = function_path(chain).split("/")
        scope = _scope(kernel.source) or "/".join(dict.fromkeys(path))
        line = line_text(chain)
        if kind == OPTIMIZER:  # the step around it is mpx's
            line = scope = ""
        groups.setdefault((kind, line, scope), []).append(kernel)
    made = [
        KernelGroup(
            kind,
            sum(k.bytes * k.times for k in several),
            sum((k.operations + k.further) * k.times for k in several),
            sum(seconds(k, roof) for k in several),
            sum(k.times for k in several),
            scope,
            line,
        )
        for (kind, line, scope), several in groups.items()
    ]
    made = sorted(made, key=lambda group: -group.bytes)
    least = sum(group.bytes for group in made) // 1000
    return tuple(group for group in made[:top] if group.bytes > least)


def _inside(chain: list[Frame]) -> list[Frame]:
    """The calls inside of the step; what called the forecast, or Python, is not."""
    ours = [i for i, one in enumerate(chain) if one.file.startswith(_FOLDER)]
    inner = chain[ours[-1] + 1 :] if ours else chain
    return [one for one in inner if not one.file.startswith("<frozen ")]


# What JAX and mpx write into the path of an operation.
_CALLS = re.compile(r"\bjit\([^()]*\)|\bmpx\.[\w.]+\([^()]*\)")
_NO_SCOPE = re.compile(
    r"jit|pjit|jvp|transpose|vmap|remat\d*|checkpoint|rematted_computation|while|body|"
    r"cond|closed_call|shard_map|custom_[jv]\w+_call|branch_\d+_fun|quantized_\w+|.*->.*"
)


def _scope(op_name: str) -> str:
    """The named scopes of an operation's path."""
    path = _CALLS.sub("", op_name.rpartition("/")[0])
    names = [one for one in re.split(r"[/()]+", path) if one]
    return "/".join(one for one in names if not _NO_SCOPE.fullmatch(one))


def batch_of(args: tuple[PyTree, ...]) -> int:
    """The first axis of the first array behind the first argument; 0 without one."""
    arrays = [leaf for leaf in jax.tree.leaves(args[1:]) if is_array_or_type(leaf)]
    return next((leaf.shape[0] for leaf in arrays if leaf.shape), 0)


def resized(args: tuple[PyTree, ...], batch: int) -> tuple[PyTree, ...]:
    """The arguments with another batch."""
    old = batch_of(args)

    def resize(leaf: Any) -> Any:
        if not is_array_or_type(leaf) or leaf.shape[:1] != (old,):
            return leaf
        sharding = getattr(leaf, "sharding", None)
        shape = (batch, *leaf.shape[1:])
        return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=sharding)

    return (args[0], *jax.tree.map(resize, args[1:]))
