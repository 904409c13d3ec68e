"""What a compiled step keeps for its backward pass where autocast recomputes islands.

The models (`transformers`) are plain. The arms are float32, casts by hand with norms
and softmax in full precision, as the published MPX wants them, and autocast: keeping
what JAX keeps, and as it is by default, with a residual stream in float32 and in half
precision. Beside memory and traffic stand the matrix products of the program:
recomputing must add none.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from ..counter import TARGETS, counter
from ..models import plain
from ..models.plain import Case, title
from ..results import Results
from ..steps import ArrayStep, known_arms
from ..tables import Goal, Table, megabytes, ratio
from . import program

FLOAT32 = "float32"
BY_HAND = "mpx bfloat16"
PEER = "MPX bfloat16"
KEPT = "autocast bfloat16, kept"
DEFAULT = "autocast bfloat16"
HALF = "autocast bfloat16, half stream"
compile = program.compile
OUR_ARMS = (FLOAT32, BY_HAND, KEPT, DEFAULT, HALF)
FEW_ARMS = (FLOAT32, KEPT, DEFAULT, HALF)
PEER_ARMS = ("MPX float16", PEER)
WHAT = ("memory", "traffic")


Setup = tuple[str, str, int, int]

# Memory and traffic of float32 over those of the default that are to be reached.
LIMITS: dict[Setup, tuple[float, float]] = {
    ("h100", "desktop", 12, 256): (1.85, 1.75),
    ("h100", "desktop", 4, 256): (1.85, 1.75),
    ("h100", "base", 4, 64): (1.75, 1.60),
    ("h100", "gpt", 4, 16): (1.85, 1.75),
    ("h100", "gpt scan", 4, 16): (1.85, 1.75),
}
# Odd numbers of tokens. Only of autocast; what it reached when it was last changed,
# rounded down, is to stay.
REGIONS: dict[Setup, tuple[float, float]] = {
    ("h100", "desktop, token", 4, 256): (1.90, 1.60),
    ("h100", "base, token", 4, 64): (1.75, 1.60),
}
LIMITS |= REGIONS
SETUPS = (*LIMITS, ("v5e", "desktop", 2, 256))


CASES = [
    Case(*setup, arm)
    for setup in SETUPS
    for arm in (FEW_ARMS if setup in REGIONS else (*OUR_ARMS, *PEER_ARMS))
]


def build(fields: dict[str, Any], devices: list[Any] | None = None) -> ArrayStep:
    """The step of a case, in this environment's arms."""
    case = Case(**fields)
    return plain.build(known_arms()[case.arm], case, devices)


def count(compiled: Any, fields: dict[str, Any]) -> dict[str, Any]:
    """Bytes, and the matrix products."""
    products = products_of(program.text_of(compiled))
    return {**program.count(compiled, fields), "products": products}


_PRODUCTS = frozenset({"convolution", "dot", "ragged-dot"})


def products_of(text: str) -> int:
    """How many matrix products and convolutions an optimized HLO module has.

    One in the body of a loop counts once.
    """
    return sum(
        instruction.opcode in _PRODUCTS
        or 'custom_call_target="__cublas' in instruction.line
        or 'custom_call_target="__cudnn' in instruction.line
        for body in counter.parse(text).computations.values()
        for instruction in body.values()
    )


# --- What is shown --------------------------------------------------------------------


def _title(setup: Setup) -> str:
    target, model, blocks, batch = setup
    sizes = f"{title(model)}: {blocks} blocks, batch {batch}"
    return f"{sizes}, Adam, compiled for {TARGETS[target].title}"


def _setups(found: Results) -> dict[Setup, dict[str, dict[str, Any]]]:
    """Counts of each arm, in each setup."""
    return found.counts_by("target", "model", "blocks", "batch")


def tables(found: Results) -> Iterator[Table]:
    """One table for each setup."""
    for setup, counts in _setups(found).items():
        yield Table(
            _title(setup),
            "arm | memory, MB | float32 / arm | traffic, MB | float32 / arm | products",
            [
                [arm, *against(counts[FLOAT32], count), str(count["products"])]
                for arm, count in counts.items()
            ],
            notes=[
                f"*{BY_HAND}*, *MPX float16* and *{PEER}*, the latter without a "
                "check of gradients, cast by hand. *kept* is "
                '`mpx.autocast(..., residuals="fast")`, *half stream* '
                '`residual_stream="half"`, all with an unchanged model. Higher '
                "ratios are better."
            ],
        )


def against(base: dict[str, Any], one: dict[str, Any]) -> list[str]:
    """Memory and traffic, each with the base's over it."""
    pairs = [(one[what], base[what] / one[what]) for what in WHAT]
    return [cell for count, over in pairs for cell in (megabytes(count), ratio(over))]


def goals(found: Results) -> Iterator[Goal]:
    """The ratios asked for; no more products; on TPUs no worse than by hand."""
    for setup, counts in _setups(found).items():
        base, title = counts[FLOAT32], _title(setup)
        for what, limit in zip(WHAT, LIMITS.get(setup, ()), strict=False):
            for arm in (DEFAULT, HALF):
                reached = base[what] / counts[arm][what]
                text = f"{what} of float32 / {arm} >= {limit}: {reached:.3f}: {title}"
                yield Goal(text, reached >= limit)
        for arm in (DEFAULT, HALF):
            products, kept = (counts[name]["products"] for name in (arm, KEPT))
            text = f"products of {arm}, {products}, no more than {kept}: {title}"
            yield Goal(text, products <= kept)
        if setup[0] != "h100":
            for arm, what in itertools.product((DEFAULT, HALF), WHAT):
                share = counts[arm][what] / counts[PEER][what] - 1
                text = f"{what} of {arm} at most {PEER}'s: {100 * share:+.2f}%"
                yield Goal(f"{text}: {title}", share <= 0)
