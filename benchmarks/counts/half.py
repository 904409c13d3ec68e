"""Half precision against a naive cast: models of many kinds, for an H100.

The steps of `whole_steps`, with a residual stream in float32, which is the default, and
in half precision.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..models.whole_steps import NAIVE, WHOLE, Case
from ..results import Results
from ..tables import Goal, Table, megabytes, ratio
from .cost import compile as compile, count as count
from .whole_steps import build as build

DEFAULT, HALF = "autocast bfloat16", "bfloat16"
ARMS = (NAIVE, DEFAULT, HALF)
# A scan in half precision on purpose, by a rule.
SCAN, SCANNED = "autocast bfloat16, half scan", "state space"
MODELS = ("small Llama in a scan", "LSTM", SCANNED, "experts", "ResNet")
CASES = [Case("h100", model, "float32", arm) for model in MODELS for arm in ARMS]
CASES += [Case("h100", SCANNED, "float32", SCAN)]
# Of naive, at most.
WHAT = ("temporaries", "traffic")
LIMITS = {DEFAULT: 1.08, HALF: 1.03}


def _size(model: str) -> str:
    """How large a model is."""
    whole = WHOLE[model]
    length = f" of {whole.context}" if whole.context else ""
    blocks, width = whole.sizes.layers, whole.sizes.width
    wide = f"width {width}, {blocks} blocks, " if width else ""
    return f"{wide}batch {whole.rows}{length}"


def tables(found: Results) -> Iterator[Table]:
    """A row for each model."""
    rows: list[list[str]] = []
    notes = [
        "Ratios to the naive cast; below 1 is better. *Default* is "
        '`mpx.autocast(loss)`, *half stream* has `residual_stream="half"`. '
        "Gradients are checked but in the naive step."
    ]
    for (model,), counts in found.counts_by("whole").items():
        naive, *ours = (counts[arm] for arm in ARMS)
        if SCAN in counts:
            by_rule = " and ".join(ratio(counts[SCAN][x] / naive[x]) for x in WHAT)
            notes += [
                "The gated state space model with a half stream and `mpx.Rule("
                'mpx.Precision.HALF, primitive=("add", "mul"))` takes '
                f"{by_rule}, and has the naive cast's digits in its scan."
            ]
        row = [f"{model}, {_size(model)}"]
        row += [megabytes(naive[what]) for what in WHAT]
        rows.append(
            row + [ratio(one[what] / naive[what]) for one in ours for what in WHAT]
        )
    if rows:
        yield Table(
            "Half precision against a naive cast, compiled for an H100",
            "step | naive: temporaries, MB | traffic, MB | default: temporaries | "
            "traffic | half stream: temporaries | traffic",
            rows,
            notes,
        )


def goals(found: Results) -> Iterator[Goal]:
    """Close to the naive cast, or better."""
    for (model,), counts in found.counts_by("whole").items():
        for arm, limit in LIMITS.items():
            for what in WHAT:
                share = counts[arm][what] / counts[NAIVE][what]
                text = f"{what} of {arm} at most {limit} of naive's: {share:.2f}"
                yield Goal(f"{text}: {model}", share <= limit)
