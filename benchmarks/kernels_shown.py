"""Where the bytes of a step are: `python -m benchmarks kernels ROW ARM`.

Compiles one arm of a row of the tables of `workloads` or `whole-steps`, and what it is
compared with, and lists the kernels of both, dearest first. Kernels of one kind are one
line: those that come from the same operation of the program and move as many bytes.
"""

from __future__ import annotations

import collections
import dataclasses
import re
from pathlib import Path
from typing import Any, NamedTuple

import tyro
from rich.console import Console
from rich.table import Table

from . import processes
from .counts import eight_bits, half, whole_steps
from .models.eight_bits import NAIVE
from .models.plain import title
from .peers import environment


class Row(NamedTuple):
    """A row of a table of `workloads` or `whole-steps`.

    Attributes:
        steps: A module of `counts`.
        target: A name of `targets.TARGETS`.
        arms: The case of each arm.
        naive: The arm that the others are compared with.
    """

    steps: str
    target: str
    arms: dict[str, Any]
    naive: str


def rows() -> dict[str, Row]:
    """The rows that are compiled for a GPU, by the words that they begin with."""
    found: dict[str, Row] = {}
    for case in eight_bits.CASES:
        name = f"{case.target.upper()}, {case.workload}"
        row = found.setdefault(name, Row("eight_bits", case.target, {}, NAIVE))
        row.arms[case.arm] = case
    for case in whole_steps.CASES:
        name = f"{case.target.upper()}, {whole_steps.name_of(case.whole, case.weights)}"
        row = found.setdefault(
            name, Row("whole_steps", case.target, {}, whole_steps.NAIVE)
        )
        row.arms[case.arm] = case
    for case in half.CASES:
        if case.target == half.TARGET:
            name = f"{title(case.model)}, blocks {case.blocks}, batch {case.batch}"
            row = found.setdefault(name, Row("half", case.target, {}, half.NAIVE))
            row.arms[case.arm] = case
    return found


@dataclasses.dataclass(frozen=True)
class Options:
    """Lists the kernels of a step, dearest first, beside those of the naive cast."""

    row: tyro.conf.Positional[str]
    """How a row begins: "H100, ffn silu", "LSTM", "H100, Llama, masters"."""
    arm: tyro.conf.Positional[str]
    """Of that row: "delayed", "autocast bfloat16, half stream", "FP8 by hand"."""
    top: int = 20
    """How many lines of each."""
    cuda_libraries: Path = Path(".venv-cuda")
    """Folder with JAX's CUDA plugin; made (5 GB) where it is missing."""


def main(arguments: list[str]) -> int:
    """Prints the tables; returns 2 after an error."""
    options = tyro.cli(Options, args=arguments, prog="python -m benchmarks kernels")
    console = Console()
    try:
        row = _row(options)
        for arm in dict.fromkeys((options.arm, row.naive)):
            console.print(
                _table(arm, _kernels(row, arm, options, console), options.top)
            )
    except (RuntimeError, ValueError) as error:
        Console(stderr=True).print(f"Error: {error}", markup=False)
        return 2
    return 0


def _row(options: Options) -> Row:
    every = rows()
    found = [row for name, row in every.items() if name.startswith(options.row)]
    if options.row in every:
        found = [every[options.row]]  # "H100, big", and not "H100, big, cuDNN"
    if len(found) != 1:
        names = "\n  ".join(every)
        raise ValueError(
            f"{len(found)} rows begin with {options.row!r}. There are:\n  {names}"
        )
    if options.arm not in found[0].arms:
        names = ", ".join(map(repr, found[0].arms))
        raise ValueError(f"the row has no arm {options.arm!r}. There are: {names}")
    return found[0]


def _kernels(
    row: Row, arm: str, options: Options, console: Console
) -> list[dict[str, Any]]:
    case = row.arms[arm]
    side = processes.side_of(arm)
    peers = environment.prepare(console.print) if side == "peers" else None
    libraries = environment.prepare_cuda(options.cuda_libraries, console.print)
    request = {
        "task": "kernels",
        "steps": row.steps,
        "target": row.target,
        "cases": [dataclasses.asdict(case)],
    }
    with console.status(f"compiling {arm}"):
        _, answer = processes.ask(side, request, peers, libraries=libraries)
    return answer["kernels"]


# What JAX writes around the operations of a function.
_AROUND = re.compile(r"\b(jit|jvp|transpose|vmap|remat|checkpoint)\(|\)")


def _table(arm: str, kernels: list[dict[str, Any]], top: int) -> Table:
    """Kinds of kernels, those first that move most bytes together."""
    kinds: collections.Counter[tuple[str, str, int]] = collections.Counter()
    for one in kernels:
        kinds[one["target"], one["source"], one["bytes"]] += one["times"]
    total = sum(size * times for (*_, size), times in kinds.items())
    table = Table(title=f"{arm}: {total / 1e9:.2f} GB in {kinds.total()} kernels")
    for name in ("MB", "kernels", "MB each", "kind"):
        table.add_column(name, justify="right")
    table.add_column("comes from")
    order = sorted(kinds.items(), key=lambda kind: -kind[0][2] * kind[1])
    for (target, source, size), times in order[:top]:
        numbers = (f"{size * times / 1e6:.0f}", str(times), f"{size / 1e6:.0f}")
        table.add_row(*numbers, target.strip("_"), _AROUND.sub("", source))
    rest = sum(size * times for (*_, size), times in order[top:])
    if rest:
        table.add_row(f"{rest / 1e6:.0f}", "", "", "", f"{len(order) - top} more kinds")
    return table
