"""The data of a report (operations, islands, totals), and how numbers are written."""

import dataclasses
import math
import re
from collections.abc import Iterable

HALF = ("bfloat16", "float16")
"""The dtypes that count as half precision."""

LOW = "low"
"""The rule of products that a recipe quantizes."""
QUANTIZES = "quantize"
"""The rule of the operations that quantize their operands."""
PART = "part"
"""The rule of the steps between the matmuls of an operation of mpx itself."""


@dataclasses.dataclass(frozen=True)
class Operation:
    """One operation of a program, as `mpx.explain` reports it.

    FLOPs and bytes are those of all its executions together.
    """

    number: int
    """Its position in the program, from 0."""
    primitive: str
    """The name of the JAX primitive, such as `dot_general`."""
    scope: str
    """The named scopes around it, as a path: `encoder/attention`; often empty."""
    function: str
    """The functions of the user's code around it, as a path: `loss/Block/Attention`."""
    phase: str
    """`forward`, `backward`, or `recompute` if a checkpoint recomputes it."""
    leg: str
    """Of a matmul under a recipe, `forward`, `dgrad` or `wgrad`; empty for others."""
    inside: tuple[str, ...]
    """The equations around it: `jit step`, `scan body`, `cond branch 1 of 2`."""
    inputs: tuple[str, ...]
    """Type of each operand: `bfloat16[8,16]`."""
    outputs: tuple[str, ...]
    """Type of each result."""
    precision: str
    """The dtype it is computed in; `mixed` for a matmul of two dtypes."""
    format: str
    """`FP8`, `MXFP8`, `NVFP4` or `INT8` for a quantized matmul that the target
    multiplies in it, or that a CPU emulates for a device that does; otherwise its
    precision."""
    rule: str
    """The rule that decided its precision: `as written`, or one of autocast."""
    reason: str
    """The reason for its precision."""
    finding: str
    """A probable mistake in a mixed-precision program; mostly empty: an implicit
    promotion, a matmul in full precision, a critical operation in half precision."""
    executions: int
    """The number of its runs: lengths of scans times numbers of devices."""
    unknown_loops: int
    """The number of `while` loops around it with a count that is unknown before a run;
    each is counted as one iteration."""
    flops: int | None
    """FLOPs of all executions; None where mpx cannot count them."""
    bytes: int
    """Bytes read and written in all executions if nothing were fused."""
    is_cast: bool
    """Whether it only changes a floating dtype."""
    parameters: tuple[str, ...]
    """The paths of the weights among its operands: `blocks[3].fc1.weight`."""
    source: str
    """The line of the user's code: `model.py:41`."""
    stack: tuple[str, ...]
    """The calls around it, outermost first: `model.py:41 Block.__call__`."""

    @property
    def where(self) -> str:
        """The named scopes, or else the functions around it."""
        return self.scope or self.function

    @property
    def is_low(self) -> bool:
        """Whether it is a matmul that a recipe quantizes."""
        return self.rule.split(" ")[0] == LOW

    @property
    def is_emulated(self) -> bool:
        """Whether it is a quantized matmul that a CPU computes in a wider dtype."""
        return self.format != self.precision and not is_low(self.precision)

    @property
    def times(self) -> str:
        """The number of its executions: `7`, or `7 x ?` inside a `while` loop."""
        return str(self.executions) + " x ?" * self.unknown_loops


@dataclasses.dataclass(frozen=True)
class Island:
    """A region that the backward pass recomputes: softmax, a norm, ...

    Its bytes are those of all its executions together, without what is saved anyway:
    weights, and half-precision operands of matmuls.
    """

    where: str
    """The named scopes, or else the functions around it."""
    primitives: tuple[str, ...]
    """The operations of its forward pass, each once."""
    bytes_before: int
    """The bytes that autodiff would save of it for backward."""
    bytes_after: int
    """The bytes that are saved of it."""
    source: str
    """The line of the user's code that its first operation comes from."""


@dataclasses.dataclass(frozen=True)
class Totals:
    """Sums over the operations of a report.

    All branches of a `cond` are counted, as if each were taken, and one iteration of
    a `while` loop.
    """

    operations: int
    """The number of operations of the program."""
    executed: int
    """The number of operations that run, times lengths of scans."""
    flops: int
    """FLOPs of the whole program."""
    flops_by_precision: dict[str, int]
    """FLOPs by the dtype that is computed in, the largest first."""
    flops_by_format: dict[str, int]
    """The same by format: quantized matmuls count under theirs, emulated ones too."""
    half_flops_share: float
    """The share of FLOPs in float16 and bfloat16, 0 to 1."""
    low_flops_share: float
    """The share of FLOPs in formats of 8 bits and fewer, emulated ones too."""
    bytes: int
    """Bytes read and written if nothing were fused."""
    casts: int
    """The number of casts from one floating dtype to another."""
    cast_bytes: int
    """Bytes that casts read and write if nothing were fused."""
    findings: int
    """The number of operations with a finding: `Operation.finding` has it."""
    residual_bytes: int | None
    """Bytes computed in the forward pass and saved for backward."""
    residuals: str
    """How the residual bytes were counted, or why they could not be."""
    in_branches: int
    """The number of operations in a branch that may not be taken."""
    in_unknown_loops: int
    """The number of operations in loops of unknown count."""
    not_counted: tuple[str, ...]
    """The primitives whose FLOPs mpx cannot count."""


def totals_of(
    operations: Iterable[Operation], residual_bytes: int | None, residuals: str
) -> Totals:
    """Sums up operations."""
    operations = list(operations)
    flops = _flops_by(operations, "precision")
    formats = _flops_by(operations, "format")
    total = sum(flops.values())
    half = sum(count for name, count in flops.items() if name in HALF)
    low = sum(count for name, count in formats.items() if is_low(name))
    casts = [operation for operation in operations if operation.is_cast]
    return Totals(
        operations=len(operations),
        executed=sum(operation.executions for operation in operations),
        flops=total,
        flops_by_precision=flops,
        flops_by_format=formats,
        half_flops_share=half / total if total else 0.0,
        low_flops_share=low / total if total else 0.0,
        bytes=sum(operation.bytes for operation in operations),
        casts=sum(operation.executions for operation in casts),
        cast_bytes=sum(operation.bytes for operation in casts),
        findings=sum(bool(operation.finding) for operation in operations),
        residual_bytes=residual_bytes,
        residuals=residuals,
        in_branches=sum(_is_in_branch(operation) for operation in operations),
        in_unknown_loops=sum(o.unknown_loops > 0 for o in operations),
        not_counted=tuple(sorted({o.primitive for o in operations if o.flops is None})),
    )


def _flops_by(operations: Iterable[Operation], field: str) -> dict[str, int]:
    flops: dict[str, int] = {}
    for operation in operations:
        if operation.flops:
            name = getattr(operation, field)
            flops[name] = flops.get(name, 0) + operation.flops
    return dict(sorted(flops.items(), key=lambda item: -item[1]))


def is_low(name: str) -> bool:
    """Returns whether a dtype or a format has 8 bits or fewer."""
    # Not float64.
    return name.startswith(("float8", "float6_", "float4_", *_LOW))


_LOW = ("FP8", "MXFP8", "NVFP4", "INT8", "int8", "uint8")


def _is_in_branch(operation: Operation) -> bool:
    return any(place.startswith("cond branch") for place in operation.inside)


@dataclasses.dataclass(frozen=True)
class Content:
    """The data of a report; `Report` adds the views."""

    name: str
    """The name of the function."""
    operations: tuple[Operation, ...]
    """Every operation, in the order of the program."""
    totals: Totals
    """Sums over the operations."""
    unused_rules: tuple[str, ...] = ()
    """The rules of `mpx.autocast` that matched no operation."""
    islands: tuple[Island, ...] = ()
    """The recomputed regions of `mpx.autocast`: `residuals="small"`."""


# --- Text of numbers and types --------------------------------------------------------

_STEPS = ("", "k", "M", "G", "T", "P", "E")
_SHORT = {"bfloat": "bf", "float": "f", "uint": "u", "int": "i", "complex": "c"}
# Formats of fewer than 8 bits keep their long names.
_LONG = re.compile(rf"^({'|'.join(_SHORT)})(?=8_|\d+(\[|$))")


def short_type(text: str) -> str:
    """Returns a type in short: `bf16[8,16]` for `bfloat16[8,16]`."""
    return _LONG.sub(lambda found: _SHORT[found[1]], text, count=1)


def flops_text(count: int, unit: str = "") -> str:
    """Returns a count with three digits: `1.23 G`; with a unit `1.23 GFLOPs`."""
    number, prefix = _scaled(count)
    return f"{number} {prefix}{unit}".rstrip()


def bytes_text(count: int) -> str:
    """Returns bytes with three digits: `1.23 MB`, in powers of 1000."""
    number, unit = _scaled(count)
    return f"{number} {unit}B"


def count_text(count: int) -> str:
    """Returns a count such as `12,345`."""
    return f"{count:,}"


def share_text(share: float) -> str:
    """Returns a share such as `96.4 %`; less than all is never rounded to 100."""
    if 0.9995 <= share < 1:
        share = 0.999
    return f"{100 * share:.1f} %"


def _scaled(count: int) -> tuple[str, str]:
    if count < 1000:
        return str(count), ""
    step = min(int(math.log10(count)) // 3, len(_STEPS) - 1)
    number = count / 1000**step
    if number >= 999.5 and step < len(_STEPS) - 1:  # 999,999 is 1.00 M
        step, number = step + 1, number / 1000
    digits = 2 if number < 9.995 else 1 if number < 99.95 else 0
    return f"{number:.{digits}f}", _STEPS[step]
