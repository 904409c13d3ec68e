r"""Estimates one program: a step in a precision on a target, compiled and counted.

Time follows from kernels. A kernel that moves $b$ bytes and does $o$ operations takes

$$t = \max\left(\frac{b}{B\,r}, \frac{o}{P\,m}\right) + s$$

with the bandwidth $B$ and the peak $P$ of the data sheet, the shares $r$ and $m$ that
large kernels reach, and the start-up time $s$. So small kernels reach less: half of
their peak if $t = 2 s$. The *roofline* has $r = m = 1$ and $s = 0$; the best and the
worst case have the shares of `Roof`. Kernels run one after the other. Communication is
hidden behind them in the best case, and added in the worst.

Memory is split by when an array is alive. The compiler reports the bytes of a program's
temporaries; the arrays are read from its schedule: an array is in memory from the
instruction that makes it to the last one that reads it. At the peak, arrays made by the
forward pass and read by the backward pass are *activations*, those of a weight's size
that the backward pass leaves for the update are *gradients*, all others *working
memory*. The sum is the compiler's figure: working memory takes the difference. Arrays
made in place of an argument count as the argument. A loop needs its carry, and the peak
of its body.
"""

import collections
import dataclasses
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from jaxtyping import PyTree

from ..._program import Frame, is_array_or_type
from .._counter import (
    COLLECTIVES,
    CUDA_OPTIONS,
    PALLAS,
    Device,
    Instruction,
    Kernel,
    Module,
    Roof,
    kernels_of,
    messages,
    parse,
    program_of,
)
from .._inspect import function_path, line_text
from ._forecast_report import Estimate, KernelGroup
from ._steps import ForecastStep, Variant

# --- Time -----------------------------------------------------------------------------

_MATMUL = "matmul, {} bits"
ATTENTION, CONVOLUTION, COLLECTIVE = "attention", "convolution", "collective"
QUANTIZING, OPTIMIZER, ELEMENTWISE = "quantizing", "optimizer", "elementwise"
# unsure: a kernel with so few results is taken for an amax by its size
_SCALARS = 4096

Frames = Sequence[tuple[str, str, int]]


def kind_of(kernel: Kernel, frames: Frames) -> str:
    """Returns the kind of a kernel, in a word."""
    if kernel.opcode.removesuffix("-start") in (*COLLECTIVES, "send", "recv"):
        return COLLECTIVE
    if kernel.matmuls:
        return _MATMUL.format(kernel.bits)
    if kernel.is_attention:
        return ATTENTION
    if kernel.further:
        return CONVOLUTION
    is_amax = kernel.results <= _SCALARS and "quantized" in kernel.source
    if is_amax or (kernel.few and kernel.results - kernel.few <= _SCALARS):
        return QUANTIZING
    files = [file for file, _, _ in frames]
    if "jvp(" not in kernel.source and any(map(_updates, files)):
        return OPTIMIZER
    return ELEMENTWISE


def _updates(file: str) -> bool:
    ours = ("/mpx/_step/_optimizer.py", "/mpx/_memory/", "optax")
    return any(part in file for part in ours)


def quantizing_bytes(kernel: Kernel, kind: str) -> int:
    """Returns the bytes that a kernel moves only to quantize, in one run.

    They are all of its bytes if it only quantizes, otherwise its quantized results. A
    matmul has none.
    """
    if kind == QUANTIZING:
        return kernel.bytes
    return 0 if kernel.matmuls else kernel.few


def _moving_and_multiplying(
    kernel: Kernel, roof: Roof, case: int | None
) -> tuple[float, float]:
    """Returns the seconds of one run for its bytes, and for its operations."""
    share = roof.attention if kernel.is_attention else roof.matmul
    units, reads = (1.0, 1.0) if case is None else (share[case], roof.reads[case])
    work = kernel.operations + kernel.further
    peak = roof.peak(kernel.bits or 16, kernel.is_of_integers)
    return kernel.bytes / (roof.bandwidth * reads), work / (peak * units)


def seconds(kernel: Kernel, roof: Roof, case: int | None = None) -> float:
    """Returns the seconds of all runs: roofline, best (0) or worst (1) case."""
    start = 0.0 if case is None else roof.start[case]
    return kernel.times * (max(_moving_and_multiplying(kernel, roof, case)) + start)


@dataclasses.dataclass(frozen=True)
class Times:
    """The time of a program in seconds, and its shares."""

    roofline: float
    range: tuple[float, float]
    by_kind: dict[str, float]
    by_memory: float


def times_of(kernels: Sequence[tuple[Kernel, str]], roof: Roof, sent: float) -> Times:
    """Returns the times of kernels with kinds, and of bytes sent to other devices."""
    computing = [(k, kind) for k, kind in kernels if kind != COLLECTIVE]
    roofline = sum(seconds(kernel, roof) for kernel, _ in computing)
    best, worst = (
        sum(seconds(kernel, roof, case) for kernel, _ in computing) for case in (0, 1)
    )
    wire = sent / roof.link if roof.link else 0.0
    by_kind: dict[str, float] = collections.defaultdict(float)
    by_memory = 0.0
    for kernel, kind in computing:
        each = sum(seconds(kernel, roof, case) for case in (0, 1)) / 2
        by_kind[kind] += each
        moving, multiplying = _moving_and_multiplying(kernel, roof, 0)
        by_memory += each * (moving >= multiplying)
    if wire:
        # unsure: the middle of "hidden" and "on top"; no overlap was measured
        by_kind[COLLECTIVE] += wire / 2
    total = sum(by_kind.values()) or 1.0
    order = sorted(by_kind, key=by_kind.__getitem__, reverse=True)
    shares = {kind: by_kind[kind] / total for kind in order}
    return Times(
        max(roofline, wire), (max(best, wire), worst + wire), shares, by_memory / total
    )


# --- Memory ---------------------------------------------------------------------------

ACTIVATIONS, GRADIENTS, WORKING = "activations", "gradients", "working memory"
# Their results are their operands, as for instructions that make no array.
_SAME = ("while", "call", "copy-start", "async-start", "slice-start")
_LEAST = 65536
_INDEX = re.compile(r"index=(\d+)")


@dataclasses.dataclass
class _Buffer:
    """An array: its bytes, and the first and last instruction that needs it."""

    size: int
    start: int
    maker: str
    end: int = 0
    reader: str = ""


def temporaries_by_part(
    module: Module, total: int, weight_sizes: frozenset[int]
) -> dict[str, int]:
    """Returns the bytes of a program's temporaries at its peak, by part.

    Args:
        module: The optimized program.
        total: The bytes of temporaries that the compiler reports.
        weight_sizes: The bytes of weights, in each width that they occur in.
    """
    parts = {ACTIVATIONS: 0, GRADIENTS: 0}
    for buffer in _at_peak(module, module.entry):
        part = _part(buffer, weight_sizes)
        if part in parts:
            parts[part] += buffer.size
    known = sum(parts.values())
    if known > total:  # the compiler lets arrays share memory that are alive together
        parts = {name: size * total // known for name, size in parts.items()}
    return parts | {WORKING: total - sum(parts.values())}


def _part(buffer: _Buffer, weight_sizes: frozenset[int]) -> str:
    is_backward = "transpose(" in buffer.maker
    if not is_backward and "jvp(" in buffer.maker and "transpose(" in buffer.reader:
        return ACTIVATIONS
    is_for_update = buffer.reader and "jvp(" not in buffer.reader
    if is_backward and is_for_update and buffer.size in weight_sizes:
        return GRADIENTS
    return WORKING


def _at_peak(module: Module, name: str) -> list[_Buffer]:
    """Returns the arrays in memory at a computation's peak."""
    body = module.computations[name]
    buffers: list[_Buffer] = []
    inner: dict[int, list[_Buffer]] = {}
    held: dict[str, list[list[_Buffer]]] = {}
    for place, one in enumerate(body.values()):
        given = [held.get(operand, [[]]) for operand in one.operands]
        if one.opcode == "while":
            inner[place] = _at_peak(module, one.runs[0])
        source = one.op_name
        for buffer in (b for value in given for part in value for b in part):
            buffer.end = place
            buffer.reader = source or buffer.reader
        if one.makes_nothing or one.opcode in _SAME:
            held[one.name] = _passed(one, given)
        elif re.search("update-slice|scatter", one.name) and given:
            held[one.name] = given[0]  # in place
        else:
            made = _Buffer(one.main_bytes, place, source, place)
            buffers += [made] * (made.size >= _LEAST)
            held[one.name] = [[made]]
    for value in [*held.values()][-1:]:  # results have memory of their own
        kept = {id(b) for part in value for b in part}
        buffers = [buffer for buffer in buffers if id(buffer) not in kept]
    return _most(buffers, inner, len(body))


def _passed(one: Instruction, given: list[list[list[_Buffer]]]) -> list[list[_Buffer]]:
    """Returns the buffers of an instruction that makes no new one."""
    everything = [[b for part in value for b in part] for value in given]
    if one.opcode == "tuple":
        return everything
    index = _INDEX.search(one.line)
    if one.opcode == "get-tuple-element" and index is not None and given:
        place = int(index[1])
        return [given[0][place]] if place < len(given[0]) else [everything[0]]
    return given[0] if given else [[]]


def _most(
    buffers: list[_Buffer], inner: dict[int, list[_Buffer]], count: int
) -> list[_Buffer]:
    changes: collections.Counter[int] = collections.Counter()
    for buffer in buffers:
        changes[buffer.start] += buffer.size
        changes[buffer.end + 1] -= buffer.size
    best, at, now = -1, 0, 0
    for place in range(count):
        now += changes[place]
        here = now + sum(buffer.size for buffer in inner.get(place, ()))
        if here > best:
            best, at = here, place
    alive = [buffer for buffer in buffers if buffer.start <= at <= buffer.end]
    return [*alive, *inner.get(at, ())]


# --- The estimate ---------------------------------------------------------------------

_FOLDER = str(Path(__file__).parent)
_LOG = logging.getLogger("mpx.forecast")


def estimate(
    step: ForecastStep, precision: Variant, target: Device, top: int
) -> Estimate:
    """Estimates a step in a precision on a target.

    Raises:
        RuntimeError: The compiler rejects the program for a reason other than size.
    """
    size, where = batch_of(step.args), f"{precision.label} for {target.title}"
    # For a whole step it is unknown which argument is the batch.
    batch = "" if step.optimizer is None else f", batch {size}"
    _LOG.info("Compiling %s%s", where, batch)
    where = f"`mpx.forecast`: {where}"
    try:
        lowered = step.lower(precision, target)
    except Exception as error:
        error.add_note(f"Raised while tracing and lowering the step. {where}.")
        raise
    try:
        options = {} if lowered.has_options else None
        flags = CUDA_OPTIONS if target.platform == "cuda" else None
        program = program_of(lowered.program, target, lowered.devices, options, flags)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            lines = str(error).splitlines()
            said = [line for line in lines if re.match(r"\w+Error: ", line)] or lines
            raise RuntimeError(
                f"{where}: the compiler refused it: {said[0]}"
            ) from error
        return _unfit(precision, target, size)
    text, whole = program.text, program.memory + lowered.constants
    module, temporaries = parse(text), program.temporaries
    parts = dict(lowered.arguments)
    held = {"closed-over arrays": lowered.closed_over} if lowered.closed_over else {}
    # Includes alignment, and results that reuse no argument.
    known = temporaries + sum(parts.values()) + lowered.closed_over
    parts["other arguments"] += whole - known
    widths = {size * b // 4 for size in lowered.weights for b in (1, 2, 4, 8)}
    parts |= temporaries_by_part(module, temporaries, frozenset(widths))
    parts |= held
    frames = module.frames
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
        quantized=sum(k.few * k.times for k, _ in kernels if not k.matmuls),
        flops=_flops(kernels),
        sent=dict(sent),
        kernels=sum(k.times for k, _ in kernels),
        roofline=times.roofline,
        time=times.range,
        bound=times.by_kind,
        by_memory=times.by_memory,
        top=_groups(kernels, frames, target.roof, top),
        batch=size,
        findings=tuple(_findings(module, kernels, frames)),
    )


_LOOPS = "Loops that run an unknown number of times, and count once: {} ({})."
_PALLAS = (
    "Pallas kernels without a `cost_estimate`, whose operations are unknown: {} ({})."
)


def _findings(
    module: Module, kernels: Sequence[tuple[Kernel, str]], frames: Mapping[int, Frames]
) -> Iterator[str]:
    """Yields what of a program is not counted, or less often than it runs."""
    every = (one for body in module.computations.values() for one in body.values())
    loops = [one for one in every if module.trips.get(one.name, 0) is None]
    hidden = [k for k, _ in kernels if k.target == PALLAS and not k.further]
    for says, found in ((_LOOPS, loops), (_PALLAS, hidden)):
        if found:
            lines = dict.fromkeys(_line(frames.get(one.frame, ())) for one in found)
            yield says.format(len(found), ", ".join(lines))


def _line(calls: Frames) -> str:
    """Returns the line of the user's code."""
    return line_text(_inside(calls)) or "unknown line"


def _unfit(precision: Variant, target: Device, batch: int) -> Estimate:
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
    """Returns kernels grouped by kind, line and scope; the most traffic first."""
    groups: dict[tuple[str, str, str], list[Kernel]] = {}
    for kernel, kind in kernels:
        chain = _inside(frames.get(kernel.frame, ()))
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


def _inside(calls: Frames) -> list[Frame]:
    """Returns the calls inside the step, without those around it or in Python."""
    chain = [Frame(file, line, 0, name) for file, name, line in reversed(calls)]
    ours = [i for i, one in enumerate(chain) if one.file.startswith(_FOLDER)]
    inner = chain[ours[-1] + 1 :] if ours else chain
    return [one for one in inner if not one.file.startswith("<frozen ")]


# Parts of an operation's path that JAX and mpx write.
_CALLS = re.compile(r"\bjit\([^()]*\)|\bmpx\.[\w.]+\([^()]*\)")
_NO_SCOPE = re.compile(
    r"jit|pjit|jvp|transpose|vmap|remat\d*|checkpoint|rematted_computation|while|body|"
    r"cond|closed_call|shard_map|custom_[jv]\w+_call|branch_\d+_fun|quantized_\w+|.*->.*"
)


def _scope(op_name: str) -> str:
    """Returns the named scopes of an operation's path."""
    path = _CALLS.sub("", op_name.rpartition("/")[0])
    names = [one for one in re.split(r"[/()]+", path) if one]
    return "/".join(one for one in names if not _NO_SCOPE.fullmatch(one))


def batch_of(args: tuple[PyTree, ...]) -> int:
    """Returns the first axis of the first array after the first argument; 0 if none."""
    arrays = [leaf for leaf in jax.tree.leaves(args[1:]) if is_array_or_type(leaf)]
    return next((leaf.shape[0] for leaf in arrays if leaf.shape), 0)


def resized(args: tuple[PyTree, ...], batch: int) -> tuple[PyTree, ...]:
    """Returns the arguments with another batch."""
    old = batch_of(args)

    def resize(leaf: Any) -> Any:
        if not is_array_or_type(leaf) or leaf.shape[:1] != (old,):
            return leaf
        sharding = getattr(leaf, "sharding", None)
        shape = (batch, *leaf.shape[1:])
        return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=sharding)

    return (args[0], *jax.tree.map(resize, args[1:]))
