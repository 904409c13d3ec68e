"""The kernels of a program compiled for a GPU: bytes, operations, and a roofline.

A kernel is an instruction of the optimized HLO that runs by itself. Its *bytes* are
those of its operands and results, but of an array that it only slices, as it is or
after elementwise arithmetic, or updates in place, the slice. A loop's body counts as
often as the loop runs. Its *operations* are those of the matrix products in it; other
arithmetic is left out.

The *roof time* of a program is the sum over its kernels of the larger of two times: its
bytes at the bandwidth of the data sheet, its operations at the peak of its dtype. No
kernel is faster; how much slower it is, only a device can tell.

`program.operand_and_result_bytes` is the older way of counting, which takes sliced
arrays as a whole. The two must not be compared.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping

from .program import (
    ARRAY,
    Instruction,
    bits_of,
    bodies_of,
    bytes_of_shape,
    called,
    runs,
)


@dataclasses.dataclass(frozen=True)
class Roof:
    """What a device reaches at most.

    Attributes:
        bandwidth: Bytes a second of its memory.
        peaks: Operations a second of dense products, by the bits of their operands.
    """

    bandwidth: float
    peaks: Mapping[int, float]


# NVIDIA H100 Tensor Core GPU data sheet (SXM5) and NVIDIA DGX B200 data sheet, a GPU's
# share of eight. Both give products with sparsity; these are without: half of them.
# Products of float32 run as TF32.
ROOFS = {
    "h100": Roof(3.35e12, {32: 494.5e12, 16: 989e12, 8: 1979e12}),
    "b200": Roof(8.0e12, {32: 1.125e15, 16: 2.25e15, 8: 4.5e15, 4: 9.0e15}),
}


# A fusion computes of what these give only what is read of it.
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
        target: Of a call of a library, which; else its opcode.
        bytes: Read and written in one run.
        operations: Of the matrix products in it, in one run.
        bits: Of the widest operand of those; 0 without one.
        times: How often it runs.
        source: The operation of the program that its result comes from, with the
            scopes around it; "" where XLA does not say.
    """

    name: str
    target: str
    bytes: int
    operations: int
    bits: int
    times: int
    source: str = ""


def roof_seconds(kernels: list[Kernel], roof: Roof) -> float:
    """The least time that these kernels could take on a device."""
    return sum(
        kernel.times
        * max(
            kernel.bytes / roof.bandwidth,
            kernel.operations / roof.peaks[kernel.bits] if kernel.operations else 0.0,
        )
        for kernel in kernels
    )


def traffic(kernels: list[Kernel]) -> int:
    """Bytes that these kernels read and write."""
    return sum(kernel.times * kernel.bytes for kernel in kernels)


def of_few_bits(kernels: list[Kernel]) -> list[Kernel]:
    """Those that multiply numbers of 8 bits or less."""
    return [kernel for kernel in kernels if 0 < kernel.bits <= 8]


def kernels_of(text: str) -> list[Kernel]:
    """The kernels of an optimized HLO module; of a conditional, its largest branch."""
    return _Program(text).kernels()


# Calls of libraries give the memory that they work in as a further result.
_TARGET = re.compile(r'custom_call_target="([^"]+)"')
_SOURCE = re.compile(r'op_name="([^"]+)"')
_LIBRARY = ("__cublas", "__cudnn")
_CONTRACTED = re.compile(r"lhs_contracting_dim(?:ension)?s\"?[=:][\[{]([\d,\"]*)[\]}]")
_BLOCK_SCALED = "__cudnn$blockScaledDot"


class _Program:
    def __init__(self, text: str):
        self.bodies, self.entry = bodies_of(text)

    def kernels(self) -> list[Kernel]:
        return [
            self._kernel(*run) for run in runs(self.bodies, self.entry, self._bytes)
        ]

    def _kernel(
        self, instruction: Instruction, shapes: dict[str, str], times: int
    ) -> Kernel:
        target = _TARGET.search(instruction.line)
        products = [_product(instruction, shapes)]
        if instruction.opcode == "fusion":
            (inner,) = called(instruction.line, "calls")
            inside = {one.name: one.shape for one in self.bodies[inner]}
            products = [_product(one, inside) for one in self.bodies[inner]]
        found = [product for product in products if product is not None]
        return Kernel(
            instruction.name,
            target[1] if target else instruction.opcode,
            self._bytes(instruction, shapes),
            sum(operations for operations, _ in found),
            max((bits for _, bits in found), default=0),
            times,
            source[1] if (source := _SOURCE.search(instruction.line)) else "",
        )

    def _bytes(self, instruction: Instruction, shapes: dict[str, str]) -> int:
        operands = [shapes[one] for one in instruction.operands if one in shapes]
        if instruction.opcode == "fusion":
            (inner,) = called(instruction.line, "calls")
            return _fusion_bytes(self.bodies[inner], instruction.shape)
        result = bytes_of_shape(instruction.shape)
        if instruction.opcode in ("slice", "dynamic-slice", "gather"):
            return 2 * result
        if instruction.opcode == "dynamic-update-slice":
            return 2 * bytes_of_shape(operands[1])
        target = _TARGET.search(instruction.line)
        if target is not None and target[1].startswith(_LIBRARY):
            result = _result_bytes(instruction.shape)
        return result + sum(map(bytes_of_shape, operands))


def _result_bytes(shape: str) -> int:
    """Those of a library's call, without the memory that it works in."""
    first, *more = (array[0] for array in ARRAY.finditer(shape))
    scratch = [one for one in more if re.match(r"[su]8\[\d+\]", one)]
    return bytes_of_shape(shape) - sum(map(bytes_of_shape, scratch))


def _fusion_bytes(body: list[Instruction], result: str) -> int:
    """Bytes of a fusion, from what it does with its parameters."""
    by_name = {one.name: one for one in body}
    users: dict[str, list[Instruction]] = {one.name: [] for one in body}
    for one in body:
        for name in set(one.operands) & users.keys():
            users[name].append(one)

    def source(name: str) -> str:
        while by_name[name].opcode == "bitcast":
            name = by_name[name].operands[0]
        return name

    def read(one: Instruction, parameter: str) -> int:
        """How many numbers are read of an array that is made of a parameter."""
        size = _size(one.shape)
        if one is body[-1]:
            return size
        total = 0
        for user in users[one.name]:
            if user.opcode in ("slice", "dynamic-slice"):
                total += _size(user.shape)
            elif user.opcode in _ELEMENTWISE and _size(user.shape) == size:
                total += read(user, parameter)
            elif user not in updates or source(user.operands[0]) != parameter:
                return size  # else what is not overwritten stays where it is
        return min(total, size)

    updates = [one for one in body if one.opcode == "dynamic-update-slice"]
    total = bytes_of_shape(result)
    for one in updates:
        total -= bytes_of_shape(one.shape) - bytes_of_shape(
            by_name[one.operands[1]].shape
        )
    for one in body:
        if one.opcode == "parameter" and (size := _size(one.shape)):
            total += bytes_of_shape(one.shape) * read(one, one.name) // size
    return max(total, 0)


def _size(shape: str) -> int:
    """How many numbers the first array of a shape has."""
    return math.prod(_dimensions(shape))


def _product(
    instruction: Instruction, shapes: dict[str, str]
) -> tuple[int, int] | None:
    """Operations of a matrix product, and the bits of its widest operand."""
    target = _TARGET.search(instruction.line)
    is_call = target is not None and target[1].startswith(_LIBRARY)
    if instruction.opcode != "dot" and not is_call:
        return None
    operands = [shapes[one] for one in instruction.operands[:2]]
    left = _dimensions(operands[0])
    if target is not None and target[1] == _BLOCK_SCALED:
        contracted = left[-1]
    else:
        found = _CONTRACTED.search(instruction.line)
        if found is None:
            return None  # a convolution, or attention in one kernel
        places = re.findall(r"\d+", found[1])
        contracted = math.prod(left[int(place)] for place in places)
    bits = max(_bits(one) for one in operands)
    return 2 * math.prod(_dimensions(instruction.shape)) * contracted, bits


def _dimensions(shape: str) -> list[int]:
    """Of the first array of a shape."""
    array = ARRAY.search(shape)
    return [int(one) for one in array[2].split(",") if one] if array else []


def _bits(shape: str) -> int:
    array = ARRAY.search(shape)
    return bits_of(array[1]) if array else 32
