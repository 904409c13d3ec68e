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

from ._hlo import RESULT_HOLDS_OPERANDS, ArrayType, Body, Instruction, Module, parse
from ._targets import Roof

# A fusion computes only the elements of these that are read.
_ELEMENTWISE = frozenset(
    "abs add and bitcast bitcast-convert ceil clamp compare convert copy divide "
    "exponential floor is-finite log maximum minimum multiply negate not or power "
    "rsqrt select sign sqrt subtract tanh xor".split()
)
_PARTS = ("slice", "dynamic-slice")


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


def _kernel(module: Module, instruction: Instruction, home: Body, times: int) -> Kernel:
    inside = list(_inside(module, instruction, home))
    found = [x for one in inside if (x := _product(*one)) is not None]
    further = [x for one in inside if (x := _further(*one)) is not None]
    return Kernel(
        instruction.name,
        instruction.target or instruction.opcode,
        _bytes(module, instruction, home),
        sum(operations for operations, _ in found),
        max((bits for _, bits in found or further), default=0),
        times,
        instruction.op_name,
        instruction.opcode,
        sum(operations for operations, _ in further),
        sum(x.bytes for x in instruction.results if _is_quantized(x, instruction)),
        instruction.bytes,
        instruction.frame,
        any(
            x.kind[0] in "su"
            for one, body in inside
            if one.opcode in ("dot", "convolution")
            for x in body[one.operands[0]].results
        ),
    )


def _is_quantized(array: ArrayType, instruction: Instruction) -> bool:
    """Returns whether a recipe made an array; other programs have integers, too."""
    is_int8 = array.kind == "s8" and instruction.opcode == "fusion"
    is_int8 &= "quantized_" in instruction.op_name
    return bool(re.match("f[48]e", array.kind)) or is_int8


def _inside(
    module: Module, instruction: Instruction, home: Body
) -> Iterator[tuple[Instruction, Body]]:
    """Yields an instruction, or those of a fusion and of the fusions in it."""
    if instruction.opcode != "fusion":
        yield instruction, home
        return
    body = module.computations[instruction.runs[0]]
    for one in body.values():
        yield from _inside(module, one, body)


def _bytes(module: Module, instruction: Instruction, home: Body) -> int:
    operands = [home[one] for one in instruction.operands if one in home]
    if instruction.opcode == "fusion":
        return _fusion_bytes(module, instruction, operands)
    result = instruction.main_bytes
    if instruction.opcode in ("slice", "dynamic-slice", "gather"):
        is_read = not operands or operands[0].main_bytes > 0
        return result + is_read * instruction.bytes
    if instruction.opcode == "dynamic-update-slice":
        return 2 * operands[1].main_bytes
    if instruction.opcode in RESULT_HOLDS_OPERANDS:
        return result
    if instruction.opcode == "slice-start":  # ((operand), result, context)
        places = instruction.results[:2]
        return sum(not one.is_on_chip for one in places) * places[1].bytes
    if instruction.target.startswith(_LIBRARY):  # without its working memory
        more = instruction.results[1:]
        scratch = (x for x in more if x.kind in ("s8", "u8") and len(x.shape) == 1)
        result = instruction.bytes - sum(x.bytes for x in scratch)
    return result + sum(one.main_bytes for one in operands)


def _fusion_bytes(
    module: Module, fusion: Instruction, operands: list[Instruction]
) -> int:
    """Returns the bytes of a fusion, from the uses of its parameters."""
    body = module.computations[fusion.runs[0]]
    *_, last = body.values()
    users: dict[str, list[Instruction]] = {name: [] for name in body}
    for one in body.values():
        for name in set(one.operands) & users.keys():
            users[name].append(one)

    def source(name: str) -> str:
        while body[name].opcode == "bitcast":
            name = body[name].operands[0]
        return name

    def reads(parameter: str) -> dict[str, int]:
        """Returns the numbers read of each array, if made of this parameter."""
        found: dict[str, int] = {}
        for one in reversed(body.values()):  # users come after what they use
            size, total = one.size, 0
            for user in users[one.name]:
                is_table = user.opcode == "gather" and user.operands[0] == one.name
                if user.opcode in _PARTS or (gathers and is_table):
                    total += user.size
                elif user.opcode in _ELEMENTWISE and user.size == size:
                    total += found[user.name]
                elif user.opcode == "fusion" and gathers:
                    total += _read_inside(module, user, one.name)
                elif targets.get(user.name) != parameter:
                    total = size
                    break  # else the part that is not overwritten stays in place
            found[one.name] = size if one is last else min(total, size)
        return found

    # Committed counts of GPUs have the whole array that a fusion gathers from.
    gathers = ":T(" in fusion.shape  # a TPU's layouts have tiles
    updates = [one for one in body.values() if one.opcode == "dynamic-update-slice"]
    targets = {one.name: source(one.operands[0]) for one in updates}
    by_parameter = {name: reads(name) for name in {"", *targets.values()}}
    total = fusion.main_bytes
    for one in updates if total else ():
        total -= one.bytes - body[one.operands[1]].bytes
    for one in body.values():
        if one.opcode == "parameter" and one.size:
            if one.number >= len(operands) or operands[one.number].main_bytes:
                read = by_parameter.get(one.name, by_parameter[""])[one.name]
                total += one.bytes * read // one.size
    return max(total, 0)


def _read_inside(module: Module, fusion: Instruction, name: str) -> int:
    """Returns the numbers that a fusion in a fusion reads of an operand.

    A TPU's compiler puts the slice of a stack in one, inside that of the product.
    """
    body = module.computations[fusion.runs[0]].values()
    total = 0
    for one in body:
        if one.opcode == "parameter" and fusion.operands[one.number] == name:
            users = [user for user in body if one.name in user.operands]
            are_parts = all(user.opcode in _PARTS for user in users)
            total += sum(user.size for user in users) if are_parts else one.size
    return total


def _product(instruction: Instruction, home: Body) -> tuple[int, int] | None:
    """Returns the operations of a matmul, and the bits of its widest operand."""
    if instruction.opcode != "dot" and not instruction.target.startswith(_LIBRARY):
        return None
    operands = [home[one].results[0] for one in instruction.operands[:2]]
    left = operands[0].shape
    if instruction.target == _BLOCK_SCALED:
        contracted = left[-1]
    else:
        found = _CONTRACTED.search(instruction.line)
        if found is None:
            return None  # a convolution, or attention in one kernel
        places = re.findall(r"\d+", found[1])
        contracted = math.prod(left[int(place)] for place in places)
    return 2 * instruction.size * contracted, max(one.bits_each for one in operands)


def _further(instruction: Instruction, home: Body) -> tuple[int, int] | None:
    """Returns the same for attention in one kernel, and for a convolution."""
    call = instruction.target
    if call.startswith("__cudnn$fmha"):
        scores, operand = _SCORES.search(instruction.line), instruction.operands[0]
        if scores is None or operand not in home:
            return None
        size = math.prod(int(one) for one in re.findall(r"\d+", scores[1]))
        # Two matmuls forward, five backward; half of each with a causal mask.
        count = 5 if call.endswith("Backward") else 2
        half = 1 + ('"mask_type": "CAUSAL"' in instruction.line)
        query = home[operand].results[0]
        return 2 * count * size * query.shape[-1] // half, query.bits_each
    if call == PALLAS:
        estimate = _ESTIMATE.search(instruction.line)
        arrays = (x for one in instruction.operands for x in home[one].results)
        # unsure: its products are taken to be of its narrowest floats
        bits = min((x.bits_each for x in arrays if "f" in x.kind), default=32)
        return (int(estimate[1]), bits) if estimate else None
    labels = _LABELS.search(instruction.line)
    if labels is None or not (
        instruction.opcode == "convolution" or call.startswith("__cudnn$conv")
    ):
        return None
    left, right = (home[one].results[0] for one in instruction.operands[:2])
    result, bits = instruction.results[0], max(left.bits_each, right.bits_each)
    if instruction.opcode == "convolution":
        return _convolution(instruction, (left, right, result)), bits
    # The result of the forward convolution, and its window.
    outputs, window = result, right
    if "BackwardInput" in call:
        outputs = left
    elif "BackwardFilter" in call:
        outputs, window = right, result
    each = math.prod(window.shape) // max(window.shape[labels[2].index("o")], 1)
    return 2 * math.prod(outputs.shape) * each, bits


def _convolution(instruction: Instruction, arrays: tuple[ArrayType, ...]) -> int:
    """Returns the operations of a convolution, as which a TPU writes all matmuls.

    Axes of a batch are windows that meet one number each: only what meets counts.
    """
    labels = re.split("_|->", instruction.attribute("dim_labels"))
    data, kernel, result = (
        dict(zip(names, array.shape, strict=True))
        for names, array in zip(labels, arrays, strict=True)
    )
    window = dict(re.findall(r"(\w+)=(\S+)", instruction.attribute("window")))

    def of(key: str, axis: int, default: int = 1) -> int:
        found = window[key].split("x")[axis] if key in window else str(default)
        return int(found.split("_")[0])

    count = 2 * result["b"] * result["f"] * kernel["i"]
    for axis in range(len(data) - 2):
        sizes = result[str(axis)], of("size", axis), data[str(axis)]
        steps = of("stride", axis), of("rhs_dilate", axis)
        count *= _meetings(*sizes, *steps, of("pad", axis, 0), of("lhs_dilate", axis))
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
    for instruction in body.values():
        if kind := instruction.collective(name):
            group = _group(instruction.line) or devices
            operands = instruction.operands
            if kind == "ragged-all-to-all":  # then its results' place, offsets, sizes
                operands = operands[:1]
            for array in (array for one in operands for array in body[one].results):
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
    sizes = compiled.memory_analysis()
    if sizes is None:
        raise RuntimeError(
            "`memory(compiled)` needs an executable with a memory analysis; this "
            "backend has none. Compile for one of `TARGETS`."
        )
    return (
        sizes.argument_size_in_bytes
        + sizes.output_size_in_bytes
        - sizes.alias_size_in_bytes
        + sizes.temp_size_in_bytes
    )
