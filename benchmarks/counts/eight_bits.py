"""What a step in 8 bits costs, and what is left of what the units save.

The wide models are compiled for an H100 and a B200 with mpx, by hand and with the
peers, all in one run and by one way of counting (`kernels`). Beside bytes and the roof
time stand the kernels, the calls of the units, temporary memory, and how long the
compiler took: CPU time against the naive step's in the same process. That ratio is of
the machine that compiled, and not exact.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..counter import TARGETS
from ..models import eight_bits as models
from ..models.eight_bits import NAIVE, Case
from ..results import Results
from ..steps import ArrayStep
from ..tables import Goal, Table, megabytes, ratio
from . import cost

DELAYED, CURRENT, MXFP8, NVFP4 = "delayed", "current", "mxfp8", "nvfp4"
MXFP8_KERNEL, NVFP4_KERNEL = "mxfp8 by Pallas", "nvfp4 by Pallas"
AUTOCAST, BY_HAND, FLAX, QWIX = (
    "autocast bfloat16",
    "FP8 by hand",
    "Flax fp8",
    "Qwix fp8",
)
# The residual stream of `ffn` is in half precision in every arm, for its input is. That
# of `big` is in the naive step and the peers', and in ours where it is asked for.
AUTOCAST_HALF, CURRENT_HALF, DELAYED_HALF = (
    f"{arm}, half stream" for arm in (AUTOCAST, CURRENT, DELAYED)
)
# Of each step: our arms, and the peers that it is compared with.
OURS = {
    ("h100", "ffn silu"): (AUTOCAST, CURRENT, DELAYED),
    ("h100", "big"): (
        *(AUTOCAST, CURRENT, DELAYED),
        *(AUTOCAST_HALF, CURRENT_HALF, DELAYED_HALF),
    ),
    ("h100", "big, cuDNN"): (AUTOCAST_HALF, CURRENT_HALF, DELAYED_HALF),
    ("h100", "experts"): (AUTOCAST_HALF, CURRENT_HALF, DELAYED_HALF),
    ("h100", "convolutions"): (AUTOCAST_HALF, CURRENT_HALF, DELAYED_HALF),
    ("b200", "ffn gelu"): (
        *(AUTOCAST, CURRENT, DELAYED),
        *(MXFP8, MXFP8_KERNEL, NVFP4, NVFP4_KERNEL),
    ),
}
_EVERY = (BY_HAND, FLAX, QWIX)
PEERS = dict.fromkeys(OURS, _EVERY)
PEERS["b200", "ffn gelu"] += ("jax.nn MXFP8", "jax.nn NVFP4")
# Flax has no convolutions in FP8, and few write one by hand.
PEERS["h100", "convolutions"] = (QWIX,)
# Traffic against naive, at most, and the roof time of naive over that of the arm.
LIMITS = {
    ("h100", "ffn silu", DELAYED): (0.90, 1.65),
    ("h100", "ffn silu", CURRENT): (0.97, 1.58),
    ("b200", "ffn gelu", MXFP8): (1.05, 2.0),
    ("b200", "ffn gelu", MXFP8_KERNEL): (1.05, 2.0),
    ("b200", "ffn gelu", NVFP4): (1.10, 2.6),
    ("b200", "ffn gelu", NVFP4_KERNEL): (1.10, 2.6),
    ("h100", "big", DELAYED_HALF): (0.95, 0.0),
    ("h100", "big", CURRENT_HALF): (1.02, 0.0),
}
CASES = [
    Case(target, workload, arm)
    for (target, workload), arms in OURS.items()
    for arm in (NAIVE, *arms, *PEERS[target, workload])
]


# What was compiled before would take the compiler no time.
VARIABLES = {"JAX_ENABLE_COMPILATION_CACHE": "false"}
count = cost.count


def build(fields: dict[str, Any], devices: list[Any] | None = None) -> ArrayStep:
    """The step of a case."""
    return models.build(Case(**fields), devices)


def compile_with(lower: Any) -> Any:
    """What compiles a lowered case; see `worker`."""
    return cost.Timed(lower).compile


# --- What is shown --------------------------------------------------------------------


def _counts(found: Results) -> dict[tuple[str, str], dict[str, dict[str, Any]]]:
    """Counts of each arm, of each step."""
    every = found.counts_by("target", "workload")
    return {
        step: {
            arm: every[step][arm]
            for arm in (NAIVE, *arms, *PEERS[step])
            if arm in every[step]
        }
        for step, arms in OURS.items()
        if step in every
    }


def tables(found: Results) -> Iterator[Table]:
    """One table of all steps."""
    rows = [
        [
            f"{target.upper()}, {workload}",
            _name(arm, OURS[target, workload]),
            *traffic_and_roof(counts[NAIVE], one),
            *(str(one["kernels"]), str(one["calls"]), f"{one['on_units']:.0%}"),
            *(megabytes(one["temporaries"]), f"{one['compile']:.1f}"),
        ]
        for (target, workload), counts in _counts(found).items()
        for arm, one in counts.items()
    ]
    if rows:
        yield Table(
            "Training steps of wide models in 8 bits and less, against bfloat16",
            "step | arm | traffic, GB | to naive | roof, ms | naive / arm | kernels | "
            "calls | on the units | temporaries, MB | compile",
            rows,
            [_NOTE],
        )


def traffic_and_roof(naive: dict[str, Any], one: dict[str, Any]) -> list[str]:
    """Both of an arm, each with its ratio to naive; of the roof naive's to it."""
    share, faster = one["traffic"] / naive["traffic"], naive["roof"] / one["roof"]
    traffic, roof = f"{one['traffic'] / 1e9:.2f}", f"{1e3 * one['roof']:.2f}"
    return [traffic, ratio(share), roof, ratio(faster)]


def _name(arm: str, ours: tuple[str, ...]) -> str:
    return f"**mpx {arm}**" if arm in ours else arm


_NOTE = (
    "*ffn*: two blocks of norm, 4096 to 16384, activation and back, 8192 rows, head "
    "256. *big*: a layer of Llama 8B with attention in plain JAX, 16 texts of 512 "
    "tokens; *cuDNN*: with its kernel. *experts*: attention and 8 experts of 2048 to "
    "4096, 2 for each token, 8 texts of 1024. *convolutions*: 4 bottlenecks of a "
    "ResNet, 64 images of 128 x 128; none is computed in 8 bits. "
    "Adam, weights in float32, gradients checked. *Roof* is the sum over "
    "kernels of the larger of bytes at the data sheet's bandwidth and operations at "
    "its peak: no time that was measured. *Calls* are products with 8 or 4 bits; *on "
    "the units* is their share of the operations of linear layers, forward and both "
    "gradients. "
    "*Compile* is CPU time against naive's in the same process. Of `jax.nn` NVFP4, "
    "gradients are in bfloat16. Smaller traffic and larger *naive / arm* are better."
)


def goals(found: Results) -> Iterator[Goal]:
    """The ratios asked for; and no peer ahead of the best of ours."""
    every = _counts(found)
    for (target, workload, arm), (limit, least) in LIMITS.items():
        counts = every.get((target, workload), {})
        if arm not in counts:
            continue
        naive, one = counts[NAIVE], counts[arm]
        where = f"{arm}, {workload}, {TARGETS[target].title}"
        share = one["traffic"] / naive["traffic"]
        text = f"traffic at most {limit} of naive's: {share:.2f}: {where}"
        yield Goal(text, share <= limit)
        if least:
            reached = naive["roof"] / one["roof"]
            text = f"roof of naive / arm at least {least}: {reached:.2f}: {where}"
            yield Goal(text, reached >= least)
    for (target, workload), counts in every.items():
        ours = min(counts[arm]["roof"] for arm in OURS[target, workload])
        for peer in PEERS[target, workload]:
            if peer in counts:
                ahead = counts[peer]["roof"] / ours
                text = f"roof of {peer} at least our best's: {ahead:.2f}: {workload}"
                yield Goal(f"{text}, {TARGETS[target].title}", ahead >= 1)
