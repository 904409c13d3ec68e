"""What whole steps need on TPUs, beside naive bfloat16 and plain float32."""

from __future__ import annotations

import collections
import operator
from collections.abc import Iterable, Iterator
from typing import Any

from ..counter import TARGETS, counter
from ..models import plain
from ..models.on_tpu import SCORES
from ..models.whole_steps import FLAX, NAIVE, QWIX, Case, Kept
from ..results import Results
from ..steps import NAIVE as NAIVE_ARM, ArrayStep, known_arms
from ..tables import Goal, Table, ratio
from . import whole_steps
from .program import anywhere, compile as compile

# Names of `our_arms.ON_TPU`, which the peers' environment does not have.
FLOAT32, DEFAULT, FULL = "float32", "nothing set", "full stream"
BY_LOSS, UNCHECKED, CURRENT = "by the loss", "unchecked", whole_steps.CURRENT
ARMS = (FLOAT32, NAIVE, DEFAULT, FULL, BY_LOSS, UNCHECKED)
_BY_OTHERS = (whole_steps.BY_HAND, FLAX, QWIX)
_8_BITS = (NAIVE, DEFAULT, whole_steps.DELAYED, CURRENT, *_BY_OTHERS)
_INT8 = ("int8, one scale", "int8")
_BY_INT8 = (*_INT8, *(f"{one}, unchecked" for one in _INT8))
_ROWS = ("row-wise", "row-wise, unchecked")
_F32, _HALF = (f", scores in {one}" for one in SCORES)
_LLAMA, _SCAN, VIT = "Llama of 2", "Llama of 4 in a scan", "desktop ViT"
WHAT = ("memory", "traffic", "all")
Row = tuple[str, str, Kept]
# What a step is to take of naive's memory, HBM traffic, all bytes; 0 where any will do.
_V5E: dict[tuple[str, Kept], tuple[float, float, float]] = {
    (_LLAMA + _F32, "float32"): (1.02, 0.97, 0),
    (_LLAMA + _HALF, "float32"): (1.02, 1.05, 0),
    (f"{_LLAMA}, no remat{_F32}", "float32"): (0, 0, 0),
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
CASES += [Case("tpu7x", "ffn", "float32", arm) for arm in (*_8_BITS, *_ROWS)]
CASES += [Case("v5e", "ffn", "float32", arm) for arm in _BY_INT8]
_CHIPS = ("v5p", "v6e")
CASES += [Case(x, "ffn", "float32", arm) for x in _CHIPS for arm in (NAIVE, *_INT8)]
LIMITS = [(("v5e", *step), DEFAULT, most) for step, most in _V5E.items()]
LIMITS += [(("v5e", "ResNet of 224", "float32"), UNCHECKED, (1.00, 1.02, 0))]
LIMITS += [(("v5e", "ffn", "float32"), BY_LOSS, (0, 1.08, 0))]
LIMITS += [(("v5e", "ffn", "float32"), _BY_INT8[2], (0, 1.10, 0))]
LIMITS += [(("v5e", "ffn", "float32"), _BY_INT8[3], (0, 1.13, 0))]
LIMITS += [(("tpu7x", "ffn", "float32"), CURRENT, (0, 1.15, 0))]


def build(fields: dict[str, Any], devices: list[Any] | None = None) -> ArrayStep:
    """The step of a case."""
    if fields["whole"] != VIT:
        return whole_steps.build(fields, devices)
    arms = known_arms("ON_TPU") | {NAIVE: NAIVE_ARM}
    case = plain.Case(fields["target"], "desktop, token", 2, 256, fields["arm"])
    return plain.build(arms[case.arm], case, devices)


def count(program: Any, fields: dict[str, Any]) -> dict[str, Any]:
    """Bytes of HBM and of all memory, kernels, matmuls by the dtypes of a step."""
    texts = program.text, anywhere(program.text)
    modules = [counter.parse(text) for text in texts]
    if any(None in module.trips.values() for module in modules):
        raise ValueError(f"the number of turns of all loops must be known; {fields}")
    kernels = counter.kernels_of(program.text)
    found = (
        f"{left.kind} x {right.kind} > {y.kind}"
        for left, right, y in products(modules[0])
    )
    return {
        "memory": program.memory,
        "traffic": counter.traffic(kernels),
        "all": counter.traffic(counter.kernels_of(texts[1])),
        "kernels": sum(kernel.times for kernel in kernels),
        "products": dict(collections.Counter(found).most_common()),
    }


def products(module: Any) -> Iterator[tuple[Any, Any, Any]]:
    """The operands and the result of each matmul or convolution that runs."""
    return _products(module, module.kernels(lambda *_: 0))


def _products(module: Any, runs: Iterable[tuple[Any, Any, int]]) -> Iterator[Any]:
    for one, body, times in runs:
        is_call = one.target.startswith(("__cublas", "__cudnn$block"))
        if one.opcode in ("convolution", "dot") or is_call:
            left, right = (body[name].results[0] for name in one.operands[:2])
            yield from [(left, right, one.results[0])] * times
        for name in one.runs:
            inside = module.computations[name]
            inner = ((each, inside, times) for each in inside.values())
            yield from _products(module, inner)


# --- What is shown --------------------------------------------------------------------


def _where(row: Row) -> str:
    target, whole, weights = row
    return f"{TARGETS[target].title}, {whole_steps.name_of(whole, weights)}"


def tables(found: Results) -> Iterator[Table]:
    """All arms of a step side by side."""
    arms = [
        arm
        for arm in dict.fromkeys((*ARMS, *_8_BITS, *_ROWS, *_BY_INT8))
        if arm != NAIVE
    ]
    rows = []
    for row, one in found.counts_by("target", "whole", "weights").items():
        naive = [one[NAIVE][what] for what in WHAT]
        cells = [[f"{count / 1e9:.2f}" for count in naive]]
        for arm in arms:
            counts = [one[arm][what] for what in WHAT] if arm in one else []
            cells.append(list(map(ratio, map(operator.truediv, counts, naive))))
        rows.append([_where(row), *map(" / ".join, cells)])
    if rows:
        yield Table(
            "Whole steps on TPUs: memory / HBM traffic / all bytes, ratio to naive",
            ["step", "naive bfloat16, GB", *arms],
            rows,
            [_NOTE],
        )


_NOTE = (
    "Lower is better. *HBM* leaves out arrays in VMEM, *all* has them, but no copies "
    "between the two. *float32* is plain JAX, whose matmuls a TPU computes in "
    "bfloat16, too; beside masters its weights are float32. *Nothing set* is "
    "`mpx.autocast(loss)` and `mpx.optimizer_step`, *full stream* has "
    '`residual_stream="full"`, *by the loss* `mpx.NoLossScaling(skip="loss")`, '
    "*unchecked* is `jax.value_and_grad(mpx.autocast(loss))`. Models as for GPUs, with "
    "fewer layers; *scores* are scaled and masked in this by naive. *ViT-B*: 3 layers. "
    "*ViT*s and *ResNet*: 64 images, desktop 256, *U-Net* 16 of 64 x 64."
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
    for row, arms in counts.items():
        for arm in arms.keys() & {*_BY_INT8}:
            count = arms[arm]["products"].get("s8 x s8 > s32", 0)
            yield Goal(
                f"{arm}: {count} of 12 products in int8, {_where(row)}", count == 12
            )
