"""What a step sends from device to device: bytes by collective and by dtype.

Bytes are what one device sends over a ring of $n$ devices, the least that is possible:
of an array of $B$ bytes, an all-gather and a reduce-scatter send $B (n - 1) / n$ of the
whole, an all-reduce twice that, an all-to-all once. A loop's body counts as often as
the loop runs. What a switch on the way adds up is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from ..counter import TARGETS, counter
from ..models.layouts import (
    BATCH,
    BLOCKS,
    CONTEXT,
    DEVICES,
    HIDDEN,
    LAYOUTS,
    WIDTH,
    Case,
    Layout,
    Sizes,
    build as build_layout,
)
from ..results import Results
from ..tables import Goal, Table, megabytes

TARGETS_OF_WIRE = ("h100", "v5e")

FLOAT32, EXPLICIT, AUTOCAST = "float32", "explicit bfloat16", "autocast bfloat16"
CURRENT, DELAYED = "current", "delayed"
ARMS = (FLOAT32, EXPLICIT, AUTOCAST, CURRENT, DELAYED)
# A TPU's compiler takes its time: the layouts that differ most.
ON_TPU = ("data parallel", "fsdp, constraint")
CASES = [
    *(Case("h100", layout, arm) for layout in LAYOUTS for arm in ARMS),
    *(
        Case("v5e", layout, arm)
        for layout in ON_TPU
        for arm in (FLOAT32, AUTOCAST, CURRENT)
    ),
]


def gradient_of(arm: str, policy: Any = None) -> Callable[..., Any]:
    """How an arm differentiates; see `models.layouts.build`."""
    import mpx

    recipes = {CURRENT: mpx.Float8CurrentScaling(), DELAYED: mpx.DelayedScaling()}

    def make(loss: Any, layout: Layout) -> Any:
        options: dict[str, Any] = {"accumulate": layout.accumulate}
        if layout.shares:
            options["accumulate"] = mpx.Accumulation(
                layout.accumulate, axes="data", in_order=layout.in_order
            )
        if arm == FLOAT32:
            options["use_mixed_precision"] = False
        elif arm == EXPLICIT:
            options["policy"] = "params=float32,compute=bfloat16,output=float32"
        else:
            loss = mpx.autocast(loss, recipe=recipes.get(arm))
        if policy is not None:
            options["policy"] = policy

        def gradient(scaling: Any, params: Any, batch: Any) -> Any:
            found = mpx.filter_grad(loss, scaling, **options)(params, batch)
            finite = found.finite if arm != FLOAT32 else jnp.asarray(True)
            return found.scaling, finite, found.grads

        def begin(params: Any, batch: Any) -> Any:
            if arm == DELAYED:
                return mpx.init_scaling(loss, params, batch)
            return mpx.NoLossScaling()

        return begin, gradient

    return make


def build(fields: dict[str, Any], devices: Any = None) -> Any:
    """The step of a case."""
    case = Case(**fields)
    if devices is None:
        devices = jax.devices()[: case.devices]
    return build_layout(gradient_of(case.arm), LAYOUTS[case.layout], Sizes(), devices)


# --- Reading a compiled program -------------------------------------------------------


def count(compiled: Any, fields: dict[str, Any]) -> dict[str, Any]:
    """Bytes sent, by collective and dtype, and how many collectives there are."""
    found = counter.messages(compiled.as_text(), fields["devices"])
    by: dict[str, dict[str, float]] = {}
    small = 0
    for one in found:
        if one.bytes <= 4096:
            small += one.times
        row = by.setdefault(one.kind, {})
        row[one.dtype] = row.get(one.dtype, 0) + one.sent
    return {"sent": by, "small": small, "collectives": sum(x.times for x in found)}


# --- What is shown --------------------------------------------------------------------

_NAMES = {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}
_NAMES |= {"f8e4m3fn": "e4m3", "u8": "8 bits", "s8": "8 bits"}


def sent(counts: dict[str, Any], *kinds: str) -> float:
    """Bytes that these collectives send; of all without names."""
    return sum(
        sum(row.values())
        for kind, row in counts["sent"].items()
        if not kinds or kind in kinds
    )


def _cell(counts: dict[str, Any], *kinds: str) -> str:
    """Megabytes by dtype; what is below a tenth of one is left out."""
    by: dict[str, float] = {}
    for kind in kinds:
        for dtype, size in counts["sent"].get(kind, {}).items():
            by[dtype] = by.get(dtype, 0) + size
    parts = [
        f"{megabytes(size)} {_NAMES.get(dtype, dtype)}"
        for dtype, size in sorted(by.items(), key=lambda pair: -pair[1])
        if size >= 5e4
    ]
    return ", ".join(parts) or "-"


GATHERS = ("all-gather", "collective-permute", "all-to-all")
SUMS = ("all-reduce", "reduce-scatter")


def tables(found: Results) -> Iterator[Table]:
    """A table for each target."""
    every = found.counts_by("target", "layout")
    for target in TARGETS_OF_WIRE:
        rows = [
            [
                *(LAYOUTS[layout].title, arm, megabytes(sent(counts))),
                *(_cell(counts, *GATHERS), _cell(counts, *SUMS), str(counts["small"])),
            ]
            for layout in LAYOUTS
            for arm, counts in every.get((target, layout), {}).items()
        ]
        if rows:
            yield Table(
                f"Megabytes that a device sends in a step: a transformer of {BLOCKS} "
                f"blocks (width {WIDTH}, hidden {HIDDEN}, context {CONTEXT}, batch "
                f"{BATCH}), compiled for {DEVICES} x {TARGETS[target].title}",
                "layout | arm | all | gathered | summed | small",
                rows,
                [
                    "*Small* counts collectives of at most 4 KB: amaxes, norms, flags. "
                    "Bytes are those of a ring; smaller is better."
                ],
            )


# Of float32's bytes, at least so many times fewer. Under a recipe the embedding stays
# float32, and the last projection bfloat16: 1 / 4 of all others.
_FEWER = {CURRENT: 3.75, DELAYED: 3.75}


def goals(found: Results) -> Iterator[Goal]:
    """Weights travel in few bytes, and FP8 sends no more than bfloat16."""
    for (target, layout), by_arm in sorted(found.counts_by("target", "layout").items()):
        where = f"{LAYOUTS[layout].title}, {TARGETS[target].title}"
        if LAYOUTS[layout].gathers == "entry":  # a recipe quantizes what has gone in
            by_arm = {k: v for k, v in by_arm.items() if k not in (CURRENT, DELAYED)}
        for arm in (name for name in (CURRENT, DELAYED) if name in by_arm):
            ours, half = (sent(by_arm[one]) for one in (arm, AUTOCAST))
            text = f"{arm} sends no more than {AUTOCAST}: {megabytes(ours)} MB to "
            text += f"{megabytes(half)} ({where})"
            yield Goal(text, ours <= half * 1.001)
        # A TPU's compiler rounds the operands of float32 products, and gathers those.
        if target != "h100" or FLOAT32 not in by_arm or not LAYOUTS[layout].is_divided:
            continue
        for arm in (name for name in ARMS[1:] if name in by_arm):
            whole, ours = (sent(by_arm[one], "all-gather") for one in (FLOAT32, arm))
            least = 1.95 if LAYOUTS[layout].shares else _FEWER.get(arm, 1.95)
            if whole:
                text = f"{arm} gathers at most 1 / {least} of float32's bytes: "
                text += f"1 / {whole / ours:.2f} ({where})"
                yield Goal(text, ours * least <= whole)
