"""The kernels of a program compiled for a GPU: bytes, operations, and a roofline.

A kernel is an instruction of the optimized HLO that runs by itself. Its *bytes* are
those of operands and results. Of an array that it only slices (unchanged or after
elementwise arithmetic) or updates in place, only the slice counts. A loop's body counts
once per iteration. Its *operations* are those of the matmuls in it, *further* ones
those of attention in one kernel and of convolutions; other arithmetic is left out.

The *roofline time* of a program is the sum over its kernels of the larger of two times:
its bytes at the bandwidth of the data sheet, its operations at the peak of its dtype.
No kernel is faster; only a device shows how much slower it is. `roof_seconds` has
matmuls only, as the committed benchmarks do.

`operand_and_result_bytes` of the benchmarks is the older count, which takes sliced
arrays as a whole. The two must not be compared.

`messages` counts the bytes that a program communicates, `memory` those that it needs.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterator
from typing import Any

from ._hlo import (
    RESULT_HOLDS_OPERANDS,
    Instruction,
    Module,
    arrays_of,
    bytes_of_shape,
    parse,
)
from ._targets import Roof

# A fusion computes only the elements of these that are read.
_ELEMENTWISE = frozenset(
    "abs add and bitcast bitcast-convert ceil clamp compare convert copy divide "
    "exponential floor is-finite log maximum minimum multiply negate not or power "
    "rsqrt select sign sqrt subtract tanh xor".split()
)


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One instruction that runs as a kernel.

    Attributes:
        name: Its name in the HLO.
        target: The target of a library call; else its opcode.
        bytes: Bytes read and written in one run.
        operations: Operations of the matmuls in it, in one run.
        bits: The bits of the widest operand of those; 0 without one.
        times: The number of its runs.
        source: The operation of the program that its result comes from, with the
            scopes around it; "" if XLA does not record it.
        opcode: The opcode of the instruction.
        further: Operations of attention and convolutions in it, in one run.
        few: Bytes of its results in floats of 8 bits or less, in one run.
        results: Bytes of all its results.
        frame: The number of the stack frame of its line of code; 0 without.
        is_of_integers: Whether it multiplies integers.
    """

    name: str
    target: str
    bytes: int
    operations: int
    bits: int
    times: int
    source: str = ""
    opcode: str = ""
    further: int = 0
    few: int = 0
    results: int = 0
    frame: int = 0
    is_of_integers: bool = False

    @property
    def matmuls(self) -> int:
        """Operations of matmuls; on a TPU of convolutions, as which XLA writes them."""
        is_call = self.target.startswith("__cudnn")
        return self.operations + (0 if is_call else self.further)

    @property
    def is_attention(self) -> bool:
        """Whether it is attention in one kernel."""
        return self.target.startswith("__cudnn$fmha")


def roof_seconds(kernels: list[Kernel], roof: Roof) -> float:
    """Returns the roofline time of these kernels on a device."""
    return sum(
        kernel.times
        * max(
            kernel.bytes / roof.bandwidth,
            kernel.matmuls / roof.peak(kernel.bits, kernel.is_of_integers),
        )
        for kernel in kernels
    )


def traffic(kernels: list[Kernel]) -> int:
    """Returns the bytes that these kernels read and write."""
    return sum(kernel.times * kernel.bytes for kernel in kernels)


def of_few_bits(kernels: list[Kernel]) -> list[Kernel]:
    """Returns the kernels with matmuls of 8 bits or less."""
    return [kernel for kernel in kernels if kernel.matmuls and kernel.bits <= 8]


def kernels_of(text: str) -> list[Kernel]:
    """Returns the kernels of an optimized HLO module.

    Of a conditional, the largest branch counts. Bytes are those of the main memory:
    arrays that a TPU's compiler has placed on the chip do not count.
    """
    module = parse(text)
    size = functools.partial(_bytes, module)
    return [_kernel(module, *run) for run in module.kernels(size)]


# Library calls have their working memory as a further result.
_LIBRARY = ("__cublas", "__cudnn")
_SCORES = re.compile(r'intermediate_tensor_shape":.*?"dimensions": ?\[([\d", ]*)\]')
_LABELS = re.compile(r"dim_labels=(\w+)_(\w+)->(\w+)")
_CONTRACTED = re.compile(r"lhs_contracting_dim(?:ension)?s\"?[=:][\[{]([\d,\"]*)[\]}]")
_BLOCK_SCALED = "__cudnn$blockScaledDot"
PALLAS = "tpu_custom_call"
_ESTIMATE = re.compile(r'"cost_estimate":\{"flops":"(\d+)"')


def _kernel(
    module: Module, instruction: Instruction, shapes: dict[str, str], times: int
) -> Kernel:
    inside = list(_inside(module, instruction, shapes))
    found = [x for one in inside if (x := _product(*one)) is not None]
    further = [x for one in inside if (x := _further(*one)) is not None]
    return Kernel(
        instruction.name,
        instruction.target or instruction.opcode,
        _bytes(module, instruction, shapes),
        sum(operations for operations, _ in found),
        max((bits for _, bits in found or further), default=0),
        times,
        instruction.op_name,
        instruction.opcode,
        sum(operations for operations, _ in further),
        sum(x.bytes for x in instruction.results if re.match("f[48]e", x.kind)),
        bytes_of_shape(instruction.shape),
        instruction.frame,
        any(
            x.kind[0] in "su"
            for one, names in inside
            if one.opcode in ("dot", "convolution")
            for x in arrays_of(names[one.operands[0]])
        ),
    )


def _inside(
    module: Module, instruction: Instruction, shapes: dict[str, str]
) -> Iterator[tuple[Instruction, dict[str, str]]]:
    """Yields an instruction, or those of a fusion and of the fusions in it."""
    if instruction.opcode != "fusion":
        yield instruction, shapes
        return
    body = module.computations[instruction.runs[0]]
    names = {one.name: one.shape for one in body}
    for one in body:
        yield from _inside(module, one, names)


def _bytes(module: Module, instruction: Instruction, shapes: dict[str, str]) -> int:
    operands = [shapes[one] for one in instruction.operands if one in shapes]
    if instruction.opcode == "fusion":
        body = module.computations[instruction.runs[0]]
        return _fusion_bytes(body, instruction.shape, operands)
    result = _bytes_of(instruction.shape)
    if instruction.opcode in ("slice", "dynamic-slice", "gather"):
        is_read = not operands or _bytes_of(operands[0]) > 0
        return result + is_read * bytes_of_shape(instruction.shape)
    if instruction.opcode == "dynamic-update-slice":
        return 2 * _bytes_of(operands[1])
    if instruction.opcode in RESULT_HOLDS_OPERANDS:
        return result
    if instruction.opcode == "slice-start":  # ((operand), result, context)
        places = instruction.results[:2]
        return sum(not one.is_on_chip for one in places) * places[1].bytes
    if instruction.target.startswith(_LIBRARY):
        result = _result_bytes(instruction)
    return result + sum(map(_bytes_of, operands))


def _bytes_of(shape: str) -> int:
    """Returns the bytes in the main memory."""
    return sum(array.bytes for array in arrays_of(shape) if not array.is_on_chip)


def _result_bytes(call: Instruction) -> int:
    """Returns the result bytes of a library call, without its working memory."""
    more = call.results[1:]
    scratch = (x for x in more if x.kind in ("s8", "u8") and len(x.shape) == 1)
    return bytes_of_shape(call.shape) - sum(x.bytes for x in scratch)


def _fusion_bytes(body: list[Instruction], result: str, operands: list[str]) -> int:
    """Returns the bytes of a fusion, from the uses of its parameters."""
    by_name = {one.name: one for one in body}
    users: dict[str, list[Instruction]] = {one.name: [] for one in body}
    for one in body:
        for name in set(one.operands) & users.keys():
            users[name].append(one)

    def source(name: str) -> str:
        while by_name[name].opcode == "bitcast":
            name = by_name[name].operands[0]
        return name

    def reads(parameter: str) -> dict[str, int]:
        """Returns the numbers read of each array, if made of this parameter."""
        found: dict[str, int] = {}
        for one in reversed(body):  # users come after what they use
            size, total = _size(one.shape), 0
            for user in users[one.name]:
                is_part = user.opcode in ("slice", "dynamic-slice")
                if is_part or (
                    gathers
                    and user.operands[:1] == (one.name,)
                    and user.opcode == "gather"
                ):
                    total += _size(user.shape)
                elif user.opcode in _ELEMENTWISE and _size(user.shape) == size:
                    total += found[user.name]
                elif targets.get(user.name) != parameter:
                    total = size
                    break  # else the part that is not overwritten stays in place
            found[one.name] = size if one is body[-1] else min(total, size)
        return found

    # Committed counts of GPUs have the whole array that a fusion gathers from.
    gathers = ":T(" in result  # a TPU's layouts have tiles
    updates = [one for one in body if one.opcode == "dynamic-update-slice"]
    targets = {one.name: source(one.operands[0]) for one in updates}
    by_parameter = {name: reads(name) for name in {"", *targets.values()}}
    total = _bytes_of(result)
    for one in updates if total else ():
        total -= bytes_of_shape(one.shape) - bytes_of_shape(
            by_name[one.operands[1]].shape
        )
    for one in body:
        if one.opcode == "parameter" and (size := _size(one.shape)):
            if one.number >= len(operands) or _bytes_of(operands[one.number]):
                read = by_parameter.get(one.name, by_parameter[""])[one.name]
                total += bytes_of_shape(one.shape) * read // size
    return max(total, 0)


def _size(shape: str) -> int:
    """Returns the count of numbers in the first array of a shape."""
    return math.prod(_dimensions(shape))


def _product(
    instruction: Instruction, shapes: dict[str, str]
) -> tuple[int, int] | None:
    """Returns the operations of a matmul, and the bits of its widest operand."""
    is_call = instruction.target.startswith(_LIBRARY)
    if instruction.opcode != "dot" and not is_call:
        return None
    operands = [shapes[one] for one in instruction.operands[:2]]
    left = _dimensions(operands[0])
    if instruction.target == _BLOCK_SCALED:
        contracted = left[-1]
    else:
        found = _CONTRACTED.search(instruction.line)
        if found is None:
            return None  # a convolution, or attention in one kernel
        places = re.findall(r"\d+", found[1])
        contracted = math.prod(left[int(place)] for place in places)
    bits = max(_bits(one) for one in operands)
    return 2 * math.prod(_dimensions(instruction.shape)) * contracted, bits


def _further(
    instruction: Instruction, shapes: dict[str, str]
) -> tuple[int, int] | None:
    """Returns the same for attention in one kernel, and for a convolution."""
    call = instruction.target
    if call.startswith("__cudnn$fmha"):
        scores, operand = _SCORES.search(instruction.line), instruction.operands[0]
        if scores is None or operand not in shapes:
            return None
        size = math.prod(int(one) for one in re.findall(r"\d+", scores[1]))
        # Two matmuls forward, five backward; half of each with a causal mask.
        count = 5 if call.endswith("Backward") else 2
        half = 1 + ('"mask_type": "CAUSAL"' in instruction.line)
        last = _dimensions(shapes[operand])[-1]
        return 2 * count * size * last // half, _bits(shapes[operand])
    if call == PALLAS:
        estimate = _ESTIMATE.search(instruction.line)
        arrays = (x for one in instruction.operands for x in arrays_of(shapes[one]))
        # unsure: its products are taken to be of its narrowest floats
        bits = min((x.bits_each for x in arrays if "f" in x.kind), default=32)
        return (int(estimate[1]), bits) if estimate else None
    labels = _LABELS.search(instruction.line)
    if labels is None or not (
        instruction.opcode == "convolution" or call.startswith("__cudnn$conv")
    ):
        return None
    left, right = (shapes[one] for one in instruction.operands[:2])
    if instruction.opcode == "convolution":
        return _convolution(instruction, left, right), max(_bits(left), _bits(right))
    # The result of the forward convolution, and its window.
    outputs, window = instruction.shape, right
    if "BackwardInput" in call:
        outputs = left
    elif "BackwardFilter" in call:
        outputs, window = right, instruction.shape
    sizes = _dimensions(window)
    each = math.prod(sizes) // max(sizes[labels[2].index("o")], 1)
    return 2 * _size(outputs) * each, max(_bits(left), _bits(right))


def _convolution(instruction: Instruction, left: str, right: str) -> int:
    """Returns the operations of a convolution, as which a TPU writes all matmuls.

    Axes of a batch are windows that meet one number each: only what meets counts.
    """
    by_axis: list[dict[str, int]] = []
    labels = re.split("_|->", instruction.attribute("dim_labels"))
    for names, shape in zip(labels, (left, right, instruction.shape), strict=True):
        by_axis.append(dict(zip(names, _dimensions(shape), strict=True)))
    data, kernel, result = by_axis
    window = dict(re.findall(r"(\w+)=(\S+)", instruction.attribute("window")))

    def of(key: str, axis: int, default: int) -> int:
        return (
            int(window[key].split("x")[axis].split("_")[0])
            if key in window
            else default
        )

    count = 2 * result["b"] * result["f"] * kernel["i"]
    for axis in range(len(data) - 2):
        steps = of("stride", axis, 1), of("rhs_dilate", axis, 1)
        sizes = result[str(axis)], of("size", axis, 1), data[str(axis)]
        count *= _meetings(
            *sizes, *steps, of("pad", axis, 0), of("lhs_dilate", axis, 1)
        )
    return count


@functools.lru_cache(1024)
def _meetings(
    results: int, window: int, size: int, stride: int, step: int, pad: int, gap: int
) -> int:
    """Returns how often a window's places meet numbers that are `gap` apart."""
    places = (
        start * stride - pad + place * step
        for start in range(results)
        for place in range(window)
    )
    last = (size - 1) * gap
    return sum(0 <= place <= last and place % gap == 0 for place in places)


def _dimensions(shape: str) -> tuple[int, ...]:
    """Returns the dimensions of the first array of a shape."""
    return next((array.shape for array in arrays_of(shape)), ())


def _bits(shape: str) -> int:
    return next((array.bits_each for array in arrays_of(shape)), 32)


# --- Communication between devices, by collective and dtype ---------------------------
#
# Bytes are those that one device sends over a ring of $n$ devices, the least possible:
# of an array of $B$ bytes, an all-gather and a reduce-scatter send $B (n - 1) / n$ of
# the whole, an all-reduce twice that, an all-to-all once. A loop's body counts once per
# iteration. Sums in a switch are left out.


@dataclasses.dataclass(frozen=True)
class Message:
    """A collective of one array.

    Attributes:
        kind: The collective.
        dtype: The dtype that is sent, as HLO writes it.
        bytes: The bytes of the whole array, over all devices.
        times: The number of its runs.
        devices: The number of devices that take part.
    """

    kind: str
    dtype: str
    bytes: int
    times: int
    devices: int

    @property
    def sent(self) -> float:
        """The bytes that one device sends."""
        share = (self.devices - 1) / self.devices
        if self.kind == "collective-permute":
            share = 1
        return self.times * self.bytes * share * (1 + (self.kind == "all-reduce"))


def messages(text: str, devices: int) -> list[Message]:
    """Returns the collectives of an optimized HLO module."""
    module = parse(text)
    return list(_messages(module, module.entry, 1, devices))


def _messages(module: Module, name: str, times: int, devices: int) -> Iterator[Message]:
    body = module.computations[name]
    types = {instruction.name: instruction.results for instruction in body}
    for instruction in body:
        if kind := instruction.collective(name):
            group = _group(instruction.line) or devices
            operands = instruction.operands
            if kind == "ragged-all-to-all":  # then its results' place, offsets, sizes
                operands = operands[:1]
            for array in (array for one in operands for array in types[one]):
                whole = array.bytes * (group if kind == "all-gather" else 1)
                yield Message(kind, array.kind, whole, times, group)
        for one in instruction.runs:
            yield from _messages(
                module, one, times * module.turns(instruction), devices
            )


def _group(line: str) -> int | None:
    """Returns the number of devices in a collective's group; None if all."""
    listed = re.search(r"replica_groups=\{\{([\d,]+)\}", line)
    if listed:
        return len(listed[1].split(","))
    sized = re.search(r"replica_groups=\[\d+,(\d+)\]<=", line)
    return int(sized[1]) if sized else None


# --- Memory ---------------------------------------------------------------------------


def memory(compiled: Any) -> int:
    """Returns the bytes of arguments, results in none of them, and temporaries."""
    sizes = _sizes(compiled)
    return (
        sizes.argument_size_in_bytes
        + sizes.output_size_in_bytes
        - sizes.alias_size_in_bytes
        + sizes.temp_size_in_bytes
    )


def _sizes(compiled: Any) -> Any:
    sizes = compiled.memory_analysis()
    if sizes is None:
        raise RuntimeError(
            "`memory(compiled)` needs an executable with a memory analysis; this "
            "backend has none. Compile for one of `TARGETS`."
        )
    return sizes
