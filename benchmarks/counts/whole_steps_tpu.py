"""What whole steps need on TPUs, beside naive bfloat16 and plain float32.

Each is compiled as far as its optimized program, with the compiler's report of memory;
machine code, nine tenths of the time, is of no use to a count.
"""

from __future__ import annotations

import collections
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
CURRENT = whole_steps.CURRENT
ARMS = (FLOAT32, NAIVE, DEFAULT, HALF, UNCHECKED)
_8_BITS = (NAIVE, HALF, whole_steps.DELAYED, CURRENT, whole_steps.BY_HAND, FLAX, QWIX)
_F32, _HALF = (f", scores in {one}" for one in SCORES)
_LLAMA, _SCAN, VIT = "Llama of 2", "Llama of 4 in a scan", "desktop ViT"
WHAT = ("memory", "traffic", "all")
Row = tuple[str, str, Kept]
# What a step is to take of naive's memory, HBM traffic, all bytes; 0 where any will do.
_V5E: dict[tuple[str, Kept], tuple[float, float, float]] = {
    (_LLAMA + _F32, "float32"): (1.02, 0.97, 0),
    (_LLAMA + _HALF, "float32"): (1.02, 1.05, 0),
    (_SCAN + _F32, "float32"): (0, 0, 0),
    (_SCAN + _HALF, "float32"): (1.03, 1.00, 0),
    (_LLAMA + _F32, "masters"): (1.11, 1.04, 0),
    (_SCAN + _F32, "masters"): (1.01, 1.02, 0),
    (f"{_LLAMA}, flash attention", "float32"): (1.01, 1.04, 0),
    (f"GPT of 4{_HALF}", "float32"): (0.97, 1.00, 0),
    ("ViT-B", "float32"): (0.95, 1.06, 0),
    (VIT, "float32"): (0, 0, 1.03),
    (f"experts by einsum{_F32}", "float32"): (1.01, 0.95, 0),
    (f"experts by ragged_dot{_F32}", "float32"): (1.02, 1.03, 0),
    ("U-Net", "float32"): (0.80, 0.80, 0),
    ("ResNet of 224", "float32"): (1.06, 1.06, 0),
    ("state space of 2, float32 scan", "float32"): (0, 1.05, 0),
    ("LSTM of 1024", "float32"): (0, 1.05, 0),
    ("ffn", "float32"): (0.97, 1.15, 0),
}
STEPS: list[Row] = [("v5e", *step) for step in _V5E]
STEPS += [("v6e", *step) for step in _V5E if _LLAMA in step[0] or "masters" in step]
CASES = [Case(*step, arm) for step in STEPS for arm in ARMS]
CASES += [Case("tpu7x", "ffn", "float32", arm) for arm in _8_BITS]
LIMITS = [(("v5e", *step), DEFAULT, most) for step, most in _V5E.items()]
LIMITS += [(("v5e", "ResNet of 224", "float32"), UNCHECKED, (1.00, 1.02, 0))]
LIMITS += [(("tpu7x", "ffn", "float32"), CURRENT, (0, 1.15, 0))]


def build(fields: dict[str, Any], devices: list[Any] | None = None) -> ArrayStep:
    """The step of a case."""
    if fields["whole"] != VIT:
        return whole_steps.build(fields, devices)
    arms = our_arms.ON_TPU | {NAIVE: NAIVE_ARM}
    case = plain.Case(fields["target"], "desktop, token", 2, 256, fields["arm"])
    return plain.build(arms[case.arm], case, devices)


def compile(lowered: Any, fields: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The program without its machine code, and nothing beside."""
    target = TARGETS[fields["target"]]
    devices = counter.compile_only_devices(target)
    return counter.program_of(lowered, target, devices), {}


def count(program: Any, fields: dict[str, Any]) -> dict[str, Any]:
    """Bytes of HBM and of all memory, kernels, matmuls by the dtypes of a step."""
    del fields
    # As if there were one memory, and so no copy to another.
    anywhere = _PLACE.sub("", _COPY.sub("", program.text))
    kernels, all_kernels = map(_kernels, (program.text, anywhere))
    return {
        "memory": program.memory,
        "traffic": counter.traffic(kernels),
        "all": counter.traffic(all_kernels),
        "kernels": sum(kernel.times for kernel in kernels),
        "products": products(program.text),
    }


_PLACE = re.compile(r"S\(\d\)")
_COPY = re.compile(r"^.* (?:copy|slice|async)-start\(.*$", re.MULTILINE)


def _kernels(text: str) -> list[Any]:
    trips = counter.parse(text).trips
    if None in trips.values():
        raise ValueError(f"all loops must have a known number of turns; got {trips}")
    return counter.kernels_of(text)


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


def _where(row: Row) -> str:
    target, whole, weights = row
    return f"{TARGETS[target].title}, {whole_steps.name_of(whole, weights)}"


def tables(found: Results) -> Iterator[Table]:
    """All arms of a step side by side."""
    counts = found.counts_by("target", "whole", "weights")
    arms = [arm for arm in dict.fromkeys((*ARMS, *_8_BITS)) if arm != NAIVE]
    others = (FLOAT32, FLAX, QWIX, whole_steps.BY_HAND)

    def cells(one: dict[str, dict[str, Any]]) -> Iterator[str]:
        naive = one[NAIVE]
        yield " / ".join(f"{naive[what] / 1e9:.2f}" for what in WHAT)
        for arm in arms:
            shares = (
                ratio(one[arm][what] / naive[what]) for what in WHAT if arm in one
            )
            yield " / ".join(shares)

    if counts:
        heads = (arm if arm in others else f"mpx, {arm}" for arm in arms)
        yield Table(
            "Whole steps on TPUs: memory / HBM traffic / all bytes, ratio to naive",
            ["step", "naive bfloat16, GB", *heads],
            [[_where(row), *cells(one)] for row, one in counts.items()],
            [_NOTE],
        )


_NOTE = (
    "Lower is better. *HBM* leaves out arrays in VMEM, *all* has them, but no copies "
    "between the two. *float32* is plain JAX, whose matmuls a TPU computes in "
    "bfloat16, too; beside masters it has float32 weights. *Nothing set*: "
    "`mpx.autocast(loss)` and `mpx.optimizer_step`; *half stream*: "
    '`residual_stream="half"`, which recipes have as well; *unchecked*: '
    "`jax.value_and_grad(mpx.autocast(loss))`. Models as for GPUs, of fewer layers. "
    "*Scores* are scaled and masked in this by the naive cast. *Experts*: 8, width "
    "1024, hidden 2816. *ViT-B*: 3 layers, 64 images of 197 tokens. *Desktop ViT*: 2 "
    "of Equinox's blocks, 256 images, mostly in VMEM. *U-Net*: 16 images of 64 x 64, "
    "128 to 512 channels. *ResNet*: 4 blocks, 64 images. *State space*: a scan in "
    "float32 in all arms. *LSTM*: 64 texts of 256."
)


def goals(found: Results) -> Iterator[Goal]:
    """The limits, to the digits of the tables."""
    counts = found.counts_by("target", "whole", "weights")
    for row, arm, limits in LIMITS:
        for what, most in zip(WHAT, limits, strict=True):
            if most and arm in counts.get(row, {}):
                share = round(counts[row][arm][what] / counts[row][NAIVE][what], 2)
                text = f"{what} to naive's at most {most}: {share:.2f}: {arm}"
                yield Goal(f"{text}, {_where(row)}", share <= most)
