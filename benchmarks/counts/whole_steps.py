"""What whole steps of large models need, under every recipe and with the peers.

Each step is compiled for an H100 or a B200 with matrix products by cuBLAS. Under XLA's
default flags Triton may take them instead, and then in half precision: so those in FP8
are counted in a second program, compiled for the H100 with these flags.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from .. import processes
from ..counter import TARGETS
from ..models import whole_steps as models
from ..models.whole_steps import FLAX, NAIVE, PEERS, QWIX, STORED, Case, Kept
from ..processes import side_of
from ..results import Results
from ..steps import ArrayStep
from ..tables import Goal, Table, ratio
from .cost import compile_twice as compile, count as count  # noqa: F401

AUTOCAST, DELAYED, CURRENT = "bfloat16", "delayed", "current"
BLOCKS = ("mxfp8", "nvfp4", "mxfp8 by Pallas", "nvfp4 by Pallas")
ROWS, INT8 = "row-wise", "int8"
BY_HAND, BY_JAX = "FP8 by hand", ("jax.nn MXFP8", "jax.nn NVFP4")
_EVERY = (AUTOCAST, DELAYED, CURRENT)
ARMS = {"h100": _EVERY, "b200": (*_EVERY, *BLOCKS)}
_BOTH: tuple[Kept, ...] = ("float32", "masters")
_WAYS = ("scan", "slices", "no remat")
STEPS: tuple[tuple[str, str, Kept], ...] = (
    *(
        ("h100", whole, weights)
        for whole in ("Llama", *(f"Llama, {way}" for way in _WAYS), "ffn", "GPT")
        for weights in _BOTH
    ),
    ("h100", "LoRA", "frozen"),
    ("b200", "Llama", "masters"),
    ("b200", "ffn", "float32"),
)
_MORE: dict[tuple[str, str, Kept], tuple[str, ...]] = {
    ("h100", "Llama", "masters"): (STORED,),
    ("h100", "LoRA", "frozen"): (STORED,),
    ("h100", "ffn", "float32"): (BY_HAND, ROWS, INT8),
    ("b200", "ffn", "float32"): (BY_HAND, *BY_JAX, ROWS),
}
# Of other kinds; with peers where they quantize what mpx does, and need no change.
_MICRO, _BY_MATMULS = "Llama of 2, micro-batches", ("long Llama", "DiT")
_HALF = "Llama of 2", "Llama of 2, lookup", "large U-Net", "residual blocks", "SSD"
_HALF += "ResNet of 224", "state space of 2, float32 scan", "large LSTM", "graph"
_EXPERTS = "large experts by einsum", "large experts by ragged_dot"
_ROADS: dict[tuple[str, Kept], tuple[str, ...]] = {
    **{(_MICRO, weights): (AUTOCAST, DELAYED, QWIX) for weights in _BOTH},
    **{(one, "float32"): (AUTOCAST, DELAYED, FLAX, QWIX) for one in _BY_MATMULS},
    **{(one, "float32"): (AUTOCAST, DELAYED) for one in _EXPERTS},
    **{(one, "float32"): (AUTOCAST,) for one in _HALF},
}
CASES = [
    Case(*step, arm)
    for step in STEPS
    for arm in (NAIVE, *ARMS[step[0]], *_MORE.get(step, ()), FLAX, QWIX)
]
CASES += [
    Case("h100", *row, arm) for row, arms in _ROADS.items() for arm in (NAIVE, *arms)
]


# Programs that a machine without the target's compiler lowers to the same text.
PORTABLE = [
    dataclasses.replace(case, portable=True)
    for case in CASES
    if side_of(case.arm) == "ours"
]


def build(fields: dict[str, Any], devices: list[Any] | None = None) -> ArrayStep:
    """The step of a case."""
    return models.build(Case(**fields), devices)


def more_records() -> list[dict[str, Any]]:
    """Fingerprints that a machine without the target's compiler compares."""
    request = {"task": "lower", "steps": "whole_steps"}
    request["cases"] = [dataclasses.asdict(case) for case in PORTABLE]
    _, *answers = processes.ask("ours", request, None)
    return [{**answer["case"], "program": answer["program"]} for answer in answers]


def name_of(whole: str, weights: Kept) -> str:
    """A row, as tables call it."""
    return whole if weights == "frozen" else f"{whole}, {weights}"


# --- What is shown --------------------------------------------------------------------

Row = tuple[str, str, Kept]


def counts_of(found: Results) -> dict[Row, dict[str, dict[str, Any]]]:
    """Counts of each arm, of each step."""
    return found.counts_by("target", "whole", "weights")


def tables(found: Results) -> Iterator[Table]:
    """A table of all steps, and one of the arms side by side."""
    counts = counts_of(found)
    if counts:
        yield _side_by_side(counts)
        yield _every_arm(counts)


def _side_by_side(counts: dict[Row, dict[str, dict[str, Any]]]) -> Table:
    ours = (AUTOCAST, DELAYED, CURRENT, ROWS, INT8, STORED, *BLOCKS)
    rows = []
    for (target, whole, weights), found in counts.items():
        naive = found[NAIVE]
        row = [f"{target.upper()}, {name_of(whole, weights)}"]
        for arm in (*ours, FLAX, QWIX):
            time = found[arm]["roof"] / naive["roof"] if arm in found else 0.0
            cell = ratio(time) if time else ""
            row.append(f"**{cell}**" if time > 1.005 else cell)
        rows.append(row)
    return Table(
        title="Roofline time of whole steps, ratio to naive bfloat16",
        columns=["step", *(f"mpx {arm}" for arm in ours), FLAX, QWIX],
        rows=rows,
        notes=[
            "Lower is better; **bold** where the step is slower than naive bfloat16. "
            "Blank: formats in blocks need a B200, and FP8 weights are counted in two "
            "steps."
        ],
    )


def _every_arm(counts: dict[Row, dict[str, dict[str, Any]]]) -> Table:
    rows = []
    for (target, whole, weights), found in counts.items():
        for arm, one in found.items():
            default, naive = one["default_calls"], found[NAIVE]
            rows.append(
                [
                    f"{target.upper()}, {name_of(whole, weights)}",
                    arm if arm in (NAIVE, *PEERS) else f"**mpx {arm}**",
                    f"{one['traffic'] / 1e9:.2f}",
                    ratio(one["traffic"] / naive["traffic"]),
                    f"{1e3 * one['roof']:.2f}",
                    ratio(naive["roof"] / one["roof"]),
                    f"{one['memory'] / 1e9:.2f}",
                    ratio(one["memory"] / naive["memory"]),
                    *(str(one.get(what, "")) for what in ("kernels", "tiny", "calls")),
                    "" if default is None else str(default),
                ]
            )
    return Table(
        "Whole training steps of large models, against naive bfloat16",
        "step | arm | traffic, GB | to naive | roofline, ms | naive / arm | "
        "memory, GB | to naive | kernels | tiny | calls | calls, default flags",
        rows,
        [_NOTE + _of_lookup(counts)],
    )


def _of_lookup(counts: dict[Row, dict[str, dict[str, Any]]]) -> str:
    """What mpx makes of a gather, against a comparison by hand."""
    rows = (("h100", f"Llama of 2{more}", "float32") for more in (", lookup", ""))
    found, base = (counts.get(row) for row in rows)
    if not found or not base:
        return ""
    share = ratio(found[AUTOCAST]["traffic"] / base[NAIVE]["traffic"])
    return f" mpx with the *lookup* moves {share} of naive's bytes without it."


_NOTE = (
    "*Llama*: 542 M weights, 8 layers of 2048, hidden 5632, vocabulary 32,000, 8 texts "
    "of 1,024 tokens, cuDNN's attention, each layer in `jax.checkpoint`; in a loop in "
    "Python, in a *scan* over stacked weights, over *slices* of them, or with *no "
    "remat*. *ffn*: two blocks of norm, 4096 to 16384, silu and back, 8192 rows; *by "
    "hand* is 40 lines (`benchmarks/peers/eight_bits.py`), and of `jax.nn` NVFP4 "
    "gradients are in bfloat16. "
    "*GPT*: 419 M weights, 12 layers of 1536 in a scan, gelu, layer norms with bias, "
    "one matrix for query, key and value, tied embedding, 8 texts of 1,024 tokens, "
    "cuDNN's attention, `dots_with_no_batch_dims_saveable`. *LoRA*: the Llama with "
    "adapters of rank 16 at all its linear layers, its own weights frozen in bfloat16. "
    "*Masters*: bfloat16 weights, float32 masters in the optimizer's state. *FP8 "
    "weights*: those of linear layers by `mpx.quantization.quantize_weights`. Adam. "
    'mpx has `residual_stream="half"` and checks gradients; the others do not. '
    "*Calls* are products of 8 or 4 bits, *default flags* those of a second program, "
    "in which Triton may take products (counted for the H100; blank for the B200, or "
    "where Triton's untuned tiling refuses a shape); *tiny* kernels move less than 64 "
    "kB. **In every arm the label's logit is found by a comparison**, but in *lookup*, "
    "as by Optax: a gather, whose gradient is a scatter in float32. *Long Llama*: one "
    "layer, windows of 1,024 of 16,384 tokens, the loss of 128,256 classes in 16 "
    "chunks; *micro-batches*: 4 of 4 texts; *experts*: 8 of 4096, of which a token "
    "takes two; *U-Net*: 314 M, group norms, attention to a text, *DiT*: 2 blocks of "
    "1152, both with a moving average of the weights; *residual blocks*: two of the "
    "U-Net, by SGD; *SSD*: 2 blocks of Mamba 2; *LSTM*: 2 layers of 1024; *graph*: "
    "600,000 edges."
)


@dataclasses.dataclass(frozen=True)
class Limit:
    """What a step is to reach.

    Attributes:
        row: Which.
        arm: Of that.
        traffic: To naive, at most.
        speed: The roof time of naive over the arm's, at least.
        memory: Gigabytes, at most; 0 where any will do.
        share: Of naive's memory, at most; 0 where any will do.
    """

    row: Row
    arm: str
    traffic: float
    speed: float = 0.0
    memory: float = 0.0
    share: float = 0.0


# The first ones were set on a naive step that gathers the label's logit, and are said
# against the one that compares: the same bytes and times.
LIMITS = (
    Limit(("h100", "Llama", "float32"), DELAYED, 1.03, 1.31, 8.8),
    Limit(("h100", "Llama", "masters"), DELAYED, 1.07, 1.29, 9.6),
    Limit(("h100", "Llama", "masters"), CURRENT, 1.18, 1.21),
    Limit(("h100", "Llama, scan", "float32"), DELAYED, 1.04, 1.29, 10.0),
    Limit(("h100", "Llama, scan", "masters"), DELAYED, 1.04, 1.29, 10.1),
    Limit(("h100", "Llama, no remat", "masters"), DELAYED, 1.08, 1.25),
    Limit(("h100", "ffn", "masters"), DELAYED, 1.02, 1.55),
    Limit(("h100", "ffn", "float32"), ROWS, 1.10, 1.45),
    Limit(("h100", "GPT", "float32"), DELAYED, 1.15, 1.09),
    Limit(("h100", "GPT", "masters"), DELAYED, 1.15, 1.09),
    Limit(("h100", "LoRA", "frozen"), DELAYED, 0.97, 1.34, 3.05),
    Limit(("h100", "Llama", "masters"), STORED, 1.05, 1.32),
    Limit(("h100", "LoRA", "frozen"), STORED, 0.94, 1.34, 2.65),
    Limit(("b200", "Llama", "masters"), DELAYED, 1.01, 1.34),
    *(
        Limit(("h100", whole, "float32"), AUTOCAST, 1.01, 0.99)
        for whole in ("Llama", "Llama, scan", "Llama, no remat", "GPT")
    ),
    *(
        Limit(("h100", whole, "masters"), AUTOCAST, 1.01, 0.99)
        for whole in ("Llama", "Llama, scan", "GPT")
    ),
    Limit(("h100", "Llama, slices", "float32"), AUTOCAST, 1.12, 0.92),
    *(
        Limit(("h100", whole, "float32"), arm, traffic, speed, share=share)
        for whole, arm, traffic, speed, share in (
            ("large U-Net", AUTOCAST, 1.00, 0, 1.00),
            ("residual blocks", AUTOCAST, 1.25, 0, 0),
            ("long Llama", AUTOCAST, 1.11, 0, 1.10),
            (_MICRO, AUTOCAST, 1.00, 0, 0),
            (_MICRO, DELAYED, 0.95, 1.15, 0),
            ("SSD", AUTOCAST, 1.05, 0, 0),
            ("graph", AUTOCAST, 1.05, 0, 1.05),
            ("large LSTM", AUTOCAST, 0.95, 0, 0),
            # Of naive with a gather 0.97 and 1.20.
            (_EXPERTS[1], DELAYED, 1.02, 0, 1.20),
        )
    ),
)


def goals(found: Results) -> Iterator[Goal]:
    """The limits, no peer ahead of our best, products in 8 bits by default, too.

    And no more memory in FP8 than naive's, and not many kernels more.
    """
    counts = counts_of(found)
    for limit in LIMITS:
        arms = counts.get(limit.row, {})
        if limit.arm in arms:
            yield from _goals_of(limit, arms)
    for (target, whole, weights), arms in counts.items():
        where = f"{name_of(whole, weights)}, {TARGETS[target].title}"
        ours = arms.keys() - {NAIVE, *PEERS}
        best = min(arms[arm]["roof"] for arm in ours)
        for peer in sorted(arms.keys() & set(PEERS)):
            ahead = arms[peer]["roof"] / best
            text = f"roof of {peer} at least our best's: {ahead:.2f}: {where}"
            yield Goal(text, ahead >= 1)
        for arm in sorted(ours & {DELAYED, CURRENT, STORED}):
            if (target, whole, weights) in STEPS:
                share = arms[arm]["memory"] / arms[NAIVE]["memory"]
                yield _at_most("memory to naive's", share, 1.0, f"{arm}, {where}")
        if whole in ("Llama", _MICRO) and weights == "float32":
            share = arms[DELAYED]["kernels"] / arms[NAIVE]["kernels"]
            yield _at_most("kernels to naive's", share, 1.3, f"{DELAYED}, {where}")
        for arm in sorted(ours - {AUTOCAST}):
            calls, default = arms[arm]["calls"], arms[arm]["default_calls"]
            if default is not None:
                text = f"{arm}: {calls} calls in 8 bits by default: {default}: {where}"
                yield Goal(text, default >= calls)


def _goals_of(limit: Limit, arms: dict[str, dict[str, Any]]) -> Iterator[Goal]:
    target, whole, weights = limit.row
    where = f"{limit.arm}, {name_of(whole, weights)}, {TARGETS[target].title}"
    naive, one = arms[NAIVE], arms[limit.arm]
    traffic, speed = one["traffic"] / naive["traffic"], naive["roof"] / one["roof"]
    yield _at_most("traffic to naive's", traffic, limit.traffic, where)
    if limit.speed:
        text = f"roof of naive / arm at least {limit.speed}: {speed:.2f}: {where}"
        yield Goal(text, speed >= limit.speed)
    if limit.share:
        share = one["memory"] / naive["memory"]
        yield _at_most("memory to naive's", share, limit.share, where)
    if limit.memory:
        yield _at_most("memory, GB,", one["memory"] / 1e9, limit.memory, where)


def _at_most(what: str, reached: float, limit: float, where: str) -> Goal:
    """To the digits of the tables."""
    met = round(reached, 2) <= limit
    return Goal(f"{what} at most {limit}: {reached:.2f}: {where}", met)
