"""What a step that `mpx.monitor` watches moves, beside the step as it is.

The monitored step is another program, which runs every so many steps in the place of
the other one. So its price is what it moves more, divided by how rarely it runs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import mpx

from ..counter import TARGETS
from ..models import plain
from ..results import Results
from ..steps import known_arms
from ..tables import Goal, Table, megabytes
from .program import count as count

TARGET = "h100"
ARM = "autocast bfloat16"
EVERY = 100
LIMIT = 0.6  # percent
SETUPS = (("base", 4, 64), ("gpt", 4, 16))
# Of how many rows one is counted; none for the step as it is.
SAMPLES: dict[str, int | None] = {
    "the step": None,
    "monitored, one row in four": 4,
    "monitored, all rows": 1,
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A training step to compile.

    Attributes:
        target: A name of `targets.TARGETS`.
        model: A name of `models.plain`.
        blocks: How many blocks it has.
        batch: Images or texts per step.
        watched: A name of `SAMPLES`.
    """

    target: str
    model: str
    blocks: int
    batch: int
    watched: str


CASES = [Case(TARGET, *setup, name) for setup in SETUPS for name in SAMPLES]


@dataclasses.dataclass(frozen=True)
class _Monitored:
    """A step and its monitor, with the face of an `ArrayStep`."""

    step: Any
    sample: int

    def __getattr__(self, name: str) -> Any:
        return getattr(self.step, name)

    def jitted(self) -> Any:
        formats = ("float16", "float8_e4m3fn", "float8_e5m2")
        return mpx.monitor(self.step.function, formats, sample=self.sample)


def build(fields: dict[str, Any], devices: Any = None) -> Any:
    """The step of a case, with shapes for arguments."""
    case = Case(**fields)
    known = plain.Case(case.target, case.model, case.blocks, case.batch, ARM)
    step = plain.build(known_arms()[ARM], known, devices)
    sample = SAMPLES[case.watched]
    return step if sample is None else _Monitored(step, sample)


# --- What is shown --------------------------------------------------------------------


def _traffic(found: Results) -> dict[str, dict[str, int]]:
    """For each model what a step moves, by how it is watched."""
    device = f"{ARM}, compiled for {TARGETS[TARGET].title}"
    every = found.counts_by("model", "blocks", "batch", arm="watched")
    return {
        f"{plain.title(model)}: {blocks} blocks, batch {batch}, {device}": {
            name: count["traffic"] for name, count in counts.items()
        }
        for (model, blocks, batch), counts in every.items()
    }


def _more(counts: dict[str, int], name: str) -> float:
    """What it moves more than the step, of what the step moves."""
    return counts[name] / counts["the step"] - 1


def tables(found: Results) -> list[Table]:
    """One table for each model."""
    return [
        Table(
            title=title,
            columns=["program", "traffic, MB", "more", f"every {EVERY} steps"],
            rows=[
                [
                    name,
                    megabytes(counts[name]),
                    f"{_more(counts, name):+.1%}" if sample else "",
                    f"{_more(counts, name) / EVERY:+.2%}" if sample else "",
                ]
                for name, sample in SAMPLES.items()
            ],
            notes=["Formats: float16, E4M3 and E5M2. Less is better."],
        )
        for title, counts in _traffic(found).items()
    ]


def goals(found: Results) -> Iterator[Goal]:
    """A monitored step in a hundred, at the default, costs next to nothing."""
    default = next(name for name, sample in SAMPLES.items() if sample)
    for title, counts in _traffic(found).items():
        share = 100 * _more(counts, default) / EVERY
        text = f"monitoring every {EVERY} steps: {share:.3f} % of traffic: {title}"
        yield Goal(f"{text}, at most {LIMIT}", share <= LIMIT)
