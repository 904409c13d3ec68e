"""What a step needs whose attention is one kernel, and when it is one.

Each case is compiled for an H100 that is not here. That attention became the kernel is
shown by the calls in the compiled program, forward and backward.
"""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Iterator
from typing import Any

from ..counter import TARGETS
from ..models.attention import CALLS, HEADS, LAYERS, WIDTH, Case, build as build
from ..results import Results
from ..steps import CHECKED
from ..tables import Goal, Table, megabytes, ratio
from . import program
from .residuals import WHAT

TARGET = "h100"
FLOAT32, BY_HAND = "float32", "mpx bfloat16"
AUTOCAST, HALF = "autocast bfloat16", "autocast bfloat16, half stream"
# Arm and attention. The first is what the others are compared with; casts by hand have
# a residual stream in half precision.
BASE = (FLOAT32, "written in JAX")
PEER = (BY_HAND, "jax.nn, cudnn")
NAIVE = (CHECKED.name, "jax.nn, cudnn")
OURS = (AUTOCAST, "mpx.nn")
OURS_HALF = (HALF, "mpx.nn")
WAYS = (
    BASE,
    (AUTOCAST, "written in JAX"),
    (AUTOCAST, "jax.nn"),
    (BY_HAND, "written in JAX"),
    PEER,
    NAIVE,
    OURS,
    OURS_HALF,
)
SIZES = ((1024, 8), (4096, 2))
CALL_SIZE = (1024, 8)

CASES = [
    *(
        Case(TARGET, "gpt", attention, arm, *size)
        for size in SIZES
        for arm, attention in WAYS
    ),
    *(
        Case(TARGET, call, attention, AUTOCAST, *CALL_SIZE)
        for call in CALLS
        for attention in ("mpx.nn", "products")
    ),
]


_CALL = re.compile(r'custom_call_target="__cudnn\$(fmha\w+)"')


def count(compiled: Any, fields: dict[str, Any]) -> dict[str, Any]:
    """Bytes, and the calls of the kernel."""
    del fields
    calls = collections.Counter(_CALL.findall(compiled.as_text()))
    return {**dataclasses.asdict(program.count(compiled)), "calls": dict(calls)}


# --- What is shown --------------------------------------------------------------------


def _counts(found: Results, model: str, size: tuple[int, int]) -> dict[Any, Any]:
    """Counts by arm and attention."""
    return {
        (record["arm"], record["attention"]): record["counts"]
        for record in found.records
        if record["model"] == model and (record["context"], record["batch"]) == size
    }


def _kernels(count: dict[str, Any]) -> tuple[int, int]:
    """How many calls of the kernel there are, forward and backward."""
    calls = count["calls"]
    backward = sum(n for name, n in calls.items() if name.endswith("Backward"))
    return sum(calls.values()) - backward, backward


def tables(found: Results) -> Iterator[Table]:
    """A table for each size of the GPT, and one of what a call can say."""
    for size in SIZES:
        if by_way := _counts(found, "gpt", size):
            yield Table(
                f"GPT (width {WIDTH}, {HEADS} heads, {LAYERS} blocks), context "
                f"{size[0]}, batch {size[1]}, Adam, compiled for "
                f"{TARGETS[TARGET].title}",
                "arm | attention | memory, MB | share | traffic, MB | share",
                [[*way, *shares(by_way[BASE], one)] for way, one in by_way.items()],
                [
                    "*Written in JAX* is two products with softmax between them. "
                    "Shares are of the first line; smaller is better."
                ],
            )
    rows = []
    for name, call in CALLS.items():
        kernel, products = (
            _counts(found, name, CALL_SIZE).get((AUTOCAST, attention))
            for attention in ("mpx.nn", "products")
        )
        if kernel is not None and products is not None:
            calls = ", ".join(f"`{name}`" for name in sorted(kernel["calls"])) or "none"
            both = (kernel, products)
            memory = [megabytes(one["memory"] - one["arguments"]) for one in both]
            rows.append([call.title, calls, *memory])
    context, batch = CALL_SIZE
    if rows:
        yield Table(
            "Attention of a float32 model under autocast, with gradients: "
            f"{HEADS} heads of {WIDTH // HEADS}, {context} queries and keys, batch "
            f"{batch}, compiled for {TARGETS[TARGET].title}",
            "a call with | calls of cuDNN | MB | MB by products",
            rows,
            ["MB are results and temporaries; smaller is better."],
        )


def shares(base: dict[str, Any], one: dict[str, Any]) -> list[str]:
    """Memory and traffic, each with its share of the base's."""
    pairs = [(one[what], one[what] / base[what]) for what in WHAT]
    return [cell for count, share in pairs for cell in (megabytes(count), ratio(share))]


def goals(found: Results) -> Iterator[Goal]:
    """The kernel is used wherever it can be, and costs no more than by hand."""
    for size in SIZES:
        by_way = _counts(found, "gpt", size)
        if OURS not in by_way:
            continue
        for way in (OURS, OURS_HALF):
            is_met = _kernels(by_way[way]) == (LAYERS, LAYERS)
            text = f"{way[0]}: every attention is one kernel, context {size[0]}"
            yield Goal(text, is_met)
        for what in WHAT:
            share = by_way[OURS_HALF][what] / by_way[PEER][what]
            text = f"{what} of {HALF} at most 1.02 of casts by hand: {share:.3f}"
            yield Goal(f"{text}, context {size[0]}", share <= 1.02)
            for way in (OURS, OURS_HALF):
                share = by_way[way][what] / by_way[NAIVE][what]
                text = f"{what} of {way[0]} at most 1.05 of a naive cast's: {share:.3f}"
                yield Goal(f"{text}, context {size[0]}", share <= 1.05)
    for name, call in CALLS.items():
        count = _counts(found, name, CALL_SIZE).get((AUTOCAST, "mpx.nn"))
        if count is not None:
            expected = (0, 0) if call.rate else (1, 1)
            text = f"a call with {call.title} has {expected[0]} kernel"
            yield Goal(text, _kernels(count) == expected)
