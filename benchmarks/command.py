"""The command line: `python -m benchmarks [names] [options]`, but for `device`."""

from __future__ import annotations

import dataclasses
import shlex
import sys
from pathlib import Path
from typing import Literal

import tyro
from rich.console import Console

from . import documentation, parts
from .numerics import recipes
from .results import COMMITTED
from .time import cpu

Name = Literal[(*parts.PARTS, "docs")]
ALL = ("sweep", "host", "recipes", "errors")
SCRATCH = Path("runs/bench")


@dataclasses.dataclass(frozen=True)
class Options:
    """Measures mpx beside float32, the published MPX and JMP.

    Without names everything is measured: `sweep` (memory and traffic over the batch
    size), `host` (CPU time to trace and lower), `recipes` (the loss of a GPT in each
    precision) and `errors` (of single products in low precision). Compiled for GPUs
    that need not be here are `whole-steps` (large models with remat, scans and master
    weights, beside the peers; `whole-steps-tpu` for TPUs), `workloads` (models of other
    kinds in half precision, and single layers by size), `residuals` (steps that
    recompute islands), `few-bits` (a state in few bits), `wire` (what steps on four
    devices send, also on TPUs), `monitor` (what watching a step costs), `compile-time`,
    and `published` (`mpx.forecast` beside speed-ups that others measured).
    `cpu` measures training steps on the CPU of this machine, with the peers, the newest
    JAX (`make newest-venv`) and PyTorch (`make torch-venv`) where they are.
    `few-bits-trainings` are the losses of optimizers, some for 3,000 steps. `docs` only
    writes the tables of the committed results into the pages. `device` measures what
    only a GPU can tell, and has options of its own:
    `python -m benchmarks device --help`.
    """

    names: tyro.conf.Positional[tuple[Name, ...]] = ALL
    """What to measure."""
    out: Path = SCRATCH
    """Where results and pictures go; `benchmarks/results` is what is committed."""
    fresh: bool = False
    """Compile also what has been compiled before by the same compiler."""
    rounds: int = 15
    """Samples of every arm in host."""
    models: tuple[Literal[tuple(cpu.STEPS)], ...] = ()
    """Steps of cpu; all if left out."""
    quick: bool = False
    """Only try cpu: few rounds of small models."""
    recipe_seeds: int = recipes.SEEDS
    """Seeds of recipes; each trains eight models."""
    recipe_steps: int = recipes.STEPS
    """Steps of every model in recipes."""
    cuda_libraries: Path = Path(".venv-cuda")
    """Folder with JAX's CUDA plugin; made (5 GB) where it is needed and missing."""

    @property
    def command(self) -> str:
        """The command that ran, for the results; without the folders of a machine."""
        words = sys.argv[1:]
        if "--cuda-libraries" in words:
            at = words.index("--cuda-libraries")
            del words[at : at + 2]
        return shlex.join(["python", "-m", "benchmarks", *words])


def main() -> int:
    """Runs the benchmarks; returns 1 where a goal was missed, 2 after an error."""
    options = tyro.cli(Options, prog="python -m benchmarks")
    console = Console()
    session = parts.Session(
        console=console,
        out=options.out,
        command=options.command,
        log=SCRATCH / "compiled.jsonl",
        known_in=() if options.fresh else (COMMITTED, SCRATCH, options.out),
        cuda=options.cuda_libraries,
    )
    try:
        for name in options.names:
            run_one(name, options, session)
    except RuntimeError as error:
        Console(stderr=True).print(f"Error: {error}", markup=False)
        return 2
    return session.summarize()


def run_one(name: str, options: Options, session: parts.Session) -> None:
    """Runs one benchmark."""
    if name in parts.COUNTED:
        session.count(name)
    elif name in parts.MEASURED:
        session.measure(name, options)
    elif name == "docs":
        for path in documentation.write():
            session.console.print(f"Written {path}")
