"""What whole steps need on TPUs, beside naive bfloat16 and plain float32.

Each is compiled as far as its optimized program, with the compiler's report of memory;
machine code, nine tenths of the time, is of no use to a count.
"""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Iterator
from typing import Any

from .. import our_arms
from ..counter import TARGETS, counter
from ..models import plain
from ..models.on_tpu import SCORES
from ..models.whole_steps import FLAX, NAIVE, QWIX, Case, Kept
from ..results import Results
from ..steps import NAIVE as NAIVE_ARM, ArrayStep
from ..tables import Goal, Table, ratio
from . import whole_steps

FLOAT32, DEFAULT, HALF, UNCHECKED = our_arms.ON_TPU
CURRENT, DELAYED = whole_steps.CURRENT, whole_steps.DELAYED
_ARMS = (FLOAT32, NAIVE, DEFAULT, HALF, UNCHECKED)
_IN_8_BITS = (NAIVE, HALF, DELAYED, CURRENT, whole_steps.BY_HAND, FLAX, QWIX)
_LLAMA, _SCAN = "Llama of 2", "Llama of 4 in a scan"
_F32, _HALF = (f", scores in {one}" for one in SCORES)
# Of Equinox's layers, as in the MPX paper but for its size.
VIT, _BLOCKS, _BATCH = "desktop ViT, 65 tokens", 2, 256

Row = tuple[str, str, Kept]
_STEPS: tuple[Row, ...] = (
    *(
        ("v5e", one + kind, "float32")
        for one in (_LLAMA, _SCAN)
        for kind in (_F32, _HALF)
    ),
    *(("v5e", one + _F32, "masters") for one in (_LLAMA, _SCAN)),
    *(
        ("v5e", one, "float32")
        for one in (
            f"{_LLAMA}, flash attention",
            f"GPT of 4{_HALF}",
            "ViT-B",
            VIT,
            f"experts by einsum{_F32}",
            "experts by ragged_dot",
            "U-Net",
            "ResNet of 224",
            "state space of 2, float32 scan",
            "LSTM of 1024",
            "ffn",
        )
    ),
    *(("v6e", _LLAMA + kind, "float32") for kind in (_F32, _HALF)),
    ("v6e", _SCAN + _F32, "masters"),
)
CASES = [Case(*step, arm) for step in _STEPS for arm in _ARMS]
CASES += [Case("tpu7x", "ffn", "float32", arm) for arm in _IN_8_BITS]


def build(fields: dict[str, Any], devices: list[Any] | None = None) -> ArrayStep:
    """The step of a case."""
    case = Case(**fields)
    if case.whole != VIT:
        return whole_steps.build(fields, devices)
    arm = NAIVE_ARM if case.arm == NAIVE else our_arms.ON_TPU[case.arm]
    one = plain.Case(case.target, "desktop, token", _BLOCKS, _BATCH, case.arm)
    return plain.build(arm, one, devices)


def compile(lowered: Any, fields: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The program without its machine code, and nothing beside."""
    target = TARGETS[fields["target"]]
    devices = counter.compile_only_devices(target)
    return counter.program_of(lowered, target, devices), {}


def count(program: Any, fields: dict[str, Any]) -> dict[str, Any]:
    """Bytes of HBM and of all memory, kernels, matmuls by the dtypes of a step."""
    del fields
    kernels = counter.kernels_of(program.text)
    # As if there were one memory, and so no copy to another.
    anywhere = _PLACE.sub("", _COPY.sub("", program.text))
    return {
        "memory": program.memory,
        "traffic": counter.traffic(kernels),
        "all": counter.traffic(counter.kernels_of(anywhere)),
        "kernels": sum(kernel.times for kernel in kernels),
        "products": products(program.text),
    }


_PLACE = re.compile(r"S\(\d\)")
_COPY = re.compile(r"^.* (?:copy|slice|async)-start\(.*$", re.MULTILINE)


def products(text: str) -> dict[str, int]:
    """How many matmuls and convolutions run, by the dtypes of operands and result."""
    module, found = counter.parse(text), collections.Counter[str]()

    def look(one: Any, shapes: dict[str, str], times: int) -> None:
        if one.opcode in ("convolution", "dot"):
            left, right = (shapes[name].partition("[")[0] for name in one.operands)
            found[f"{left} x {right} > {one.results[0].kind}"] += times
        for body in (module.computations[name] for name in one.runs):
            inside = {other.name: other.shape for other in body}
            for other in body:
                look(other, inside, times)

    for run in module.kernels(lambda *_: 0):
        look(*run)
    return dict(found.most_common())


# --- What is shown --------------------------------------------------------------------

_WHAT = ("memory", "traffic", "all")


def _counts_of(found: Results) -> dict[Row, dict[str, dict[str, Any]]]:
    return found.counts_by("target", "whole", "weights")


def _where(row: Row) -> str:
    target, whole, weights = row
    return f"{TARGETS[target].title}, {whole_steps.name_of(whole, weights)}"


def tables(found: Results) -> Iterator[Table]:
    """The arms side by side, and all that was counted of each."""
    counts = _counts_of(found)
    if not counts:
        return
    arms = list(dict.fromkeys(case.arm for case in CASES if case.arm != NAIVE))
    rows = []
    for row, one in counts.items():
        shares = (
            " / ".join(ratio(one[arm][what] / one[NAIVE][what]) for what in _WHAT)
            if arm in one
            else ""
            for arm in arms
        )
        rows.append([_where(row), *shares])
    yield Table(
        "Memory / HBM traffic / all bytes of whole steps on TPUs, ratio to naive "
        "bfloat16",
        ["step", *map(_title, arms)],
        rows,
        [_NOTE],
    )
    yield Table(
        "What was counted",
        "step | arm | memory, GB | HBM, GB | all, GB | kernels | matmuls",
        [
            [
                _where(row),
                _title(arm),
                *(f"{counts[what] / 1e9:.2f}" for what in _WHAT),
                str(counts["kernels"]),
                ", ".join(f"{n} {kind}" for kind, n in counts["products"].items()),
            ]
            for row, one in counts.items()
            for arm, counts in one.items()
        ],
    )


def _title(arm: str) -> str:
    others = (FLOAT32, NAIVE, FLAX, QWIX, whole_steps.BY_HAND)
    return arm if arm in others else f"mpx, {arm}"


_NOTE = (
    "Lower is better. *HBM* leaves out arrays in VMEM, *all* has them too, but no copy "
    "between the two. *Float32* is plain JAX, whose matmuls a TPU computes in one pass "
    "of bfloat16, too. *Nothing set* is `mpx.autocast(loss)` with "
    '`mpx.optimizer_step`, *half stream* has `residual_stream="half"` (recipes, too), '
    "*unchecked* is `jax.value_and_grad(mpx.autocast(loss))`. Models as for GPUs but "
    "for fewer layers. *Scores*: what the naive cast scales and masks them in; plain "
    "attention without a kernel. *Masters*: beside float32 weights in float32. "
    "*Experts*: 8, of which a token takes 2, width 1024, hidden 2816. *ViT-B*: 3 "
    "layers, 64 images of 197 tokens. *Desktop ViT*: 2 blocks of Equinox's layers, "
    "dropout 0.1, 256 images; its memory is too high, as it is in VMEM for the most. "
    "*U-Net*: group norms, 16 images of 64 x 64 x 4, 128 to 512 channels. *ResNet*: a "
    "bottleneck in each stage, 64 images. *State space*: width 1024 to 2048, scan in "
    "float32 in all arms. *LSTM*: 2 layers, 64 texts of 256. *ffn* as for GPUs."
)


@dataclasses.dataclass(frozen=True)
class Limit:
    """What a step is to reach, to naive; see `_WHAT`.

    Attributes:
        row: Which.
        most: Memory, traffic of HBM, all bytes, at most; 0 where any will do.
        arm: Of that.
    """

    row: Row
    most: tuple[float, float, float]
    arm: str = DEFAULT


LIMITS = tuple(
    Limit(("v5e", whole, weights), (memory, traffic, every), arm)
    for whole, weights, memory, traffic, every, arm in (
        (_LLAMA + _F32, "masters", 1.11, 1.04, 0, DEFAULT),
        (_SCAN + _F32, "masters", 1.01, 1.02, 0, DEFAULT),
        (_LLAMA + _F32, "float32", 1.02, 0.97, 0, DEFAULT),
        (_LLAMA + _HALF, "float32", 1.02, 1.05, 0, DEFAULT),
        (_SCAN + _HALF, "float32", 1.03, 1.00, 0, DEFAULT),
        (f"GPT of 4{_HALF}", "float32", 0.97, 1.00, 0, DEFAULT),
        ("ViT-B", "float32", 0.95, 1.06, 0, DEFAULT),
        (VIT, "float32", 0, 0, 1.03, DEFAULT),
        (f"experts by einsum{_F32}", "float32", 1.01, 0.95, 0, DEFAULT),
        ("experts by ragged_dot", "float32", 1.02, 1.03, 0, DEFAULT),
        (f"{_LLAMA}, flash attention", "float32", 1.01, 1.04, 0, DEFAULT),
        ("U-Net", "float32", 0.80, 0.80, 0, DEFAULT),
        ("ResNet of 224", "float32", 1.06, 1.06, 0, DEFAULT),
        ("ResNet of 224", "float32", 1.00, 1.02, 0, UNCHECKED),
        ("state space of 2, float32 scan", "float32", 0, 1.05, 0, DEFAULT),
        ("LSTM of 1024", "float32", 0, 1.05, 0, DEFAULT),
        ("ffn", "float32", 0.97, 1.15, 0, DEFAULT),
    )
)
LIMITS += (Limit(("tpu7x", "ffn", "float32"), (0, 1.15, 0), CURRENT),)


def goals(found: Results) -> Iterator[Goal]:
    """The limits."""
    counts = _counts_of(found)
    for limit in LIMITS:
        arms = counts.get(limit.row, {})
        for what, most in zip(_WHAT, limit.most, strict=True):
            if most and limit.arm in arms:
                # To the digits of the tables.
                share = round(arms[limit.arm][what] / arms[NAIVE][what], 2)
                text = f"{what} to naive's at most {most}: {share:.2f}: {limit.arm}"
                yield Goal(f"{text}, {_where(limit.row)}", share <= most)
