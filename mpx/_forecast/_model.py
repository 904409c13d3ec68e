r"""From counted kernels to seconds.

Of a kernel that moves $b$ bytes and multiplies $o$ times,

$$t = \max\left(\frac{b}{B\,r}, \frac{o}{P\,m}\right) + s$$

with the bandwidth $B$ and the peak $P$ of the data sheet, the shares $r$ and $m$ that
large kernels reach, and the time $s$ that each takes to start. So small kernels reach
less: half of their peak where $t = 2 s$. The *roofline* has $r = m = 1$ and $s = 0$;
the best and the worst case have the shares of `Roof`. Kernels run one after the other.
Bytes to other devices are hidden behind them in the best case, and come on top in the
worst.
"""

import collections
import dataclasses
from collections.abc import Sequence

from .._counter import Kernel, Roof

_MATMUL = "matmul, {} bits"
ATTENTION, CONVOLUTION, COLLECTIVE = "attention", "convolution", "collective"
QUANTIZING, OPTIMIZER, ELEMENTWISE = "quantizing", "optimizer", "elementwise"
_COLLECTIVES = ("all-", "reduce-scatter", "collective", "ragged-all", "send", "recv")
_SCALARS = 4096

Frames = Sequence[tuple[str, str, int]]


def kind_of(kernel: Kernel, frames: Frames) -> str:
    """What a kernel does, in a word."""
    if kernel.opcode.startswith(_COLLECTIVES):
        return COLLECTIVE
    if kernel.operations:
        return _MATMUL.format(kernel.bits)
    if kernel.is_attention:
        return ATTENTION
    if kernel.further:  # a TPU's compiler writes matmuls as convolutions
        is_call = kernel.target.startswith("__cudnn")
        return CONVOLUTION if is_call else _MATMUL.format(kernel.bits)
    is_amax = kernel.results <= _SCALARS and "quantized" in kernel.source
    if is_amax or (kernel.few and kernel.results - kernel.few <= _SCALARS):
        return QUANTIZING
    files = [file for file, _, _ in frames]
    if "jvp(" not in kernel.source and any(map(_updates, files)):
        return OPTIMIZER
    return ELEMENTWISE


def _updates(file: str) -> bool:
    ours = "_optimizer.py", "_master_weights.py"
    return "optax" in file or "/mpx/_few_bits/" in file or file.endswith(ours)


def quantizing_bytes(kernel: Kernel, kind: str) -> int:
    """What a kernel moves only to quantize, in one run.

    All of it where it does nothing else; else the quantized results that it writes
    beside others.
    """
    if kind == QUANTIZING:
        return kernel.bytes
    return 0 if kernel.operations else kernel.few


def _moving_and_multiplying(
    kernel: Kernel, roof: Roof, case: int | None
) -> tuple[float, float]:
    """Seconds of one run for its bytes, and for its operations."""
    share = roof.attention if kernel.is_attention else roof.matmul
    units, reads = (1.0, 1.0) if case is None else (share[case], roof.reads[case])
    work = kernel.operations + kernel.further
    peak = roof.peak(kernel.bits or 16)
    return kernel.bytes / (roof.bandwidth * reads), work / (peak * units)


def seconds(kernel: Kernel, roof: Roof, case: int | None = None) -> float:
    """Of all runs of a kernel: at the roofline, in the best (0) or worst case (1)."""
    start = 0.0 if case is None else roof.start[case]
    return kernel.times * (max(_moving_and_multiplying(kernel, roof, case)) + start)


@dataclasses.dataclass(frozen=True)
class Times:
    """Seconds of a program, and what takes them."""

    roofline: float
    range: tuple[float, float]
    by_kind: dict[str, float]
    by_memory: float


def times_of(kernels: Sequence[tuple[Kernel, str]], roof: Roof, sent: float) -> Times:
    """Of kernels with their kinds, and bytes sent to other devices."""
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
        by_kind[COLLECTIVE] += wire / 2
    total = sum(by_kind.values()) or 1.0
    order = sorted(by_kind, key=by_kind.__getitem__, reverse=True)
    shares = {kind: by_kind[kind] / total for kind in order}
    return Times(
        max(roofline, wire), (max(best, wire), worst + wire), shares, by_memory / total
    )
