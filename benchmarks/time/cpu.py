"""How fast whole training steps are on the CPU of this machine.

Question: how much faster than float32 is a step (loss, gradients, SGD, donated weights)
in bfloat16, by mpx, by casts, by JAX's and Flax's own means, by the predecessors and by
PyTorch; on a CPU with AMX's units for bfloat16, and on one without?

All arms run in one command and take turns, round by round, so that what else runs on
the machine hits all alike; those of one environment share a process. Compared are times
of the same round: a *speed* is the median of float32's time over the arm's. The results
keep what was measured last on either kind of CPU. This file imports no JAX, which
PyTorch's environment has not.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import statistics
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from .. import results
from ..processes import MADE
from ..results import Results
from ..tables import Goal, Table, ratio


@dataclasses.dataclass(frozen=True)
class Step:
    """A model, its sizes and its data.

    Attributes:
        title: in words.
        model: a name of `models.on_cpu.MODELS`.
        rounds: how often each arm is timed.
        rows: examples in a batch.
        tokens: of each; steps of an LSTM, the side of an image.
        patch: numbers of a patch.
    """

    title: str
    model: str
    rounds: int
    rows: int
    width: int
    layers: int
    tokens: int = 0
    hidden: int = 0
    heads: int = 0
    patch: int = 0
    classes: int = 0

    def small(self) -> Step:
        """What tries the command."""
        rows = max(self.rows // 8, 1)
        return dataclasses.replace(
            self, layers=min(self.layers, 2), rows=rows, rounds=3
        )


STEPS = {
    "mlp": Step("MLP, 4 x 1024, 512 rows", "mlp", 15, 512, 1024, 4),
    "gpt": Step(
        "GPT, 4 x 512, 8 x 256 tokens", "gpt", 5, 8, 512, 4, 256, 2048, 8, classes=8192
    ),
    "vit384": Step(
        "ViT, 4 x 384, 32 x 64 tokens", "vit", 7, 32, 384, 4, 64, 1536, 6, 48, 100
    ),
    "vit": Step(
        "ViT of `make train`: 3 x 64, 64 x 16", "vit", 25, 64, 64, 3, 16, 200, 4, 4, 10
    ),
    "resnet": Step(
        "ResNet, 64 to 256 channels, 16 x 32 x 32",
        "resnet",
        9,
        16,
        64,
        3,
        32,
        classes=10,
    ),
    "lstm": Step("LSTM, 512, 64 x 64 steps", "lstm", 9, 64, 512, 1, 64, classes=256),
}
FLOAT32, NAIVE, OURS = "float32", "naive bfloat16", "mpx bfloat16"
FORM = "mpx bfloat16, form for AMX"
AUTOCAST = "PyTorch autocast"
# The first of each environment is what the others are compared with.
ARMS = {
    "ours": (
        *(FLOAT32, NAIVE, "Flax bfloat16", OURS, FORM),
        *("mpx float16", "mpx delayed", "mpx current"),
    ),
    "newest": (
        *(FLOAT32, NAIVE, "Flax bfloat16", OURS),
        *("mpx float16", "mpx delayed", "mpx current"),
    ),
    "peers": (FLOAT32, "MPX bfloat16", "JMP bfloat16"),
    "torch": ("PyTorch float32", AUTOCAST),
}
IN_TORCH = ("mlp", "gpt", "vit")
FLAGS = "avx2 avx512f avx512_vnni avx512_bf16 avx512_fp16 amx_bf16 amx_int8 amx_fp16"
# Speeds beside float32, with jax 0.10 and later: with units; without, for all.
GOALS = {
    "mlp": (2.8, 3.2),
    "gpt": (3.0, 3.0),
    "vit384": (3.5, 3.5),
    "vit": (1.5, 1.5),
    "resnet": (1.1, 1.2),
    "lstm": (1.5, 2.0),
}
WITHOUT_UNITS = 0.95
MOST_ERROR = 8e-3  # of gradients, but for the ResNet
MOST_TIME = {"mpx delayed": 1.1, "mpx current": 1.25}  # of an MLP with jax 0.10
BESIDE_PYTORCH = {"mlp": 0.9, "gpt": 1.3}


# --- Measuring ------------------------------------------------------------------------


def about(command: str) -> dict[str, Any]:
    """This CPU, what ran on it before, and of which commit this is."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    pairs = [one.partition(":") for one in lines]
    found = {name.strip(): value.strip() for name, _, value in pairs}
    words = found.get("flags", "").split()
    git = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True).stdout.strip()
    return {
        "units": "amx_bf16" in words,
        "cpu": f"{os.cpu_count()} cores of {found.get('model name', 'an unknown CPU')}",
        "flags": [flag for flag in FLAGS.split() if flag in words],
        "load": os.getloadavg()[0],
        "commit": commit or "unknown",
        "command": command,
    }


def requests(options: Any, found: Results) -> list[dict[str, Any]]:
    """One for each step, to all environments that are here."""
    here = about(found.command)
    known = results.read(found.name)
    found.records += (
        [record for record in known.records if record["units"] != here["units"]]
        if known
        else []
    )
    found.records.append(here)
    missing = [side for side, folder in MADE.items() if not (folder / "bin").is_dir()]
    found.notes += [
        f"Not run: {side}; `make {side}-venv` makes its environment."
        for side in missing
    ]
    asked = []
    for name in options.models or STEPS:
        step = STEPS[name].small() if options.quick else STEPS[name]
        left_out = {*missing, *(() if step.model in IN_TORCH else ("torch",))}
        names = {
            side: list(arms) for side, arms in ARMS.items() if side not in left_out
        }
        if here["units"]:
            names["ours"].remove(FORM)  # what it does by itself
        asked.append(
            {
                "sides": list(names),
                "names": names,
                "step": name,
                "units": here["units"],
                "sizes": dataclasses.asdict(step),
            }
        )
    return asked


def measure(request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields after each turn, and at last a record of every arm."""
    if request["side"] == "torch":
        import torch as library

        from ..peers.torch_steps import built
    else:
        import jax as library

        from ..models.on_cpu import built

    sizes = SimpleNamespace(**request["sizes"])
    steps = list(built(sizes, request["names"][request["side"]]))
    yield {"turn": "built"}
    timed = {name: run for name, run, _ in steps if run is not None}
    repeats = {name: math.ceil(0.05 / _seconds(run)) for name, run in timed.items()}
    taken: dict[str, list[float]] = {name: [] for name in timed}
    for index in range(sizes.rounds):
        for name, run in timed.items():
            seconds = _seconds(*[run] * repeats[name]) / repeats[name]
            taken[name].append(round(1e3 * seconds, 3))
        yield {"turn": index}
    same: dict[str, Any] = {key: request[key] for key in ("units", "step", "side")}
    same["of"] = f"{library.__name__} {library.__version__}"
    for name, run, found in steps:
        record = {**same, "arm": name, "load": os.getloadavg()[0]}
        if run is None:
            record |= {"ms": [], "seconds": found}
        else:
            record |= {"ms": taken[name], "error": found}
        yield {"run": record}


def _seconds(*runs: Any) -> float:
    start = time.perf_counter()
    for run in runs:
        run()
    return time.perf_counter() - start


# --- What it shows --------------------------------------------------------------------


Runs = dict[tuple[str, str, str], dict[str, Any]]


def runs_of(found: Results, units: bool) -> Runs:
    """What was measured on one kind of CPU, by step, environment and arm."""
    return {
        (record["step"], record["side"], record["arm"]): record
        for record in found.records
        if record["units"] == units and "ms" in record
    }


def speeds(runs: Runs, step: str, side: str, arm: str) -> tuple[float, float, float]:
    """Quartiles of float32's time over the arm's of the same round; NaN without it."""
    base = runs.get((step, side, ARMS[side][0]))
    return _quartiles(base, runs.get((step, side, arm)))


def beside_pytorch(runs: Runs, step: str, side: str) -> float:
    """Median of the time of mpx over that of PyTorch's autocast in the same round."""
    pytorch = runs.get((step, "torch", AUTOCAST))
    return _quartiles(runs.get((step, side, OURS)), pytorch)[1]


def _quartiles(above: Any, below: Any) -> tuple[float, float, float]:
    if above is None or below is None or not below["ms"]:
        return math.nan, math.nan, math.nan
    ratios = [a / b for a, b in zip(above["ms"], below["ms"], strict=True)]
    first, middle, last = statistics.quantiles(ratios, method="inclusive")
    return first, middle, last


def tables(found: Results) -> Iterator[Table]:
    """For each kind of CPU: the speeds, and then all that was measured."""
    for units in (True, False):
        yield _speed_table(found, units)
    for units in (True, False):
        rows = list(_rows(runs_of(found, units)))
        if rows:
            yield Table(
                f"The same, each arm: {_kind(units)}",
                "step, of | arm | ms | speed | quartiles | error | rounds | load",
                rows,
                [
                    "*ms* and *speed* are medians, *error* is that of all gradients "
                    "beside float32's, *load* the machine's at the end, of which what is "
                    "measured makes 2. Blank: too slow, run once."
                ],
            )


def _kind(units: bool) -> str:
    return f"CPU with{'' if units else 'out'} units for bfloat16 (AMX)"


COLUMNS = {
    "naive": ("own", NAIVE),
    "Flax": ("own", "Flax bfloat16"),
    "JMP": ("peers", "JMP bfloat16"),
    "MPX": ("peers", "MPX bfloat16"),
    "mpx": ("own", OURS),
    "mpx, form for AMX": ("own", FORM),
    "mpx float16": ("own", "mpx float16"),
    "mpx delayed": ("own", "mpx delayed"),
    "mpx current": ("own", "mpx current"),
    "PyTorch": ("torch", AUTOCAST),
}


def _speed_table(found: Results, units: bool) -> Table:
    heads = ["step", "jax", "float32, ms", *COLUMNS, "mpx to PyTorch, time"]
    runs, notes, rows = runs_of(found, units), [], []
    for step, side in itertools.product(STEPS, ("ours", "newest")):
        base = runs.get((step, side, FLOAT32))
        if base is None and runs:
            continue
        row = [STEPS[step].title, side if base is None else base["of"].split()[1]]
        row.append("" if base is None else f"{statistics.median(base['ms']):.1f}")
        for where, arm in COLUMNS.values():
            # The predecessors have the JAX of ours, and PyTorch is shown once.
            of = side if where == "own" else where if side == "ours" else "none"
            row.append(
                _text(speeds(runs, step, of, arm)[1] if of in ARMS else math.nan)
            )
        rows.append([*row, _text(beside_pytorch(runs, step, side))])
    for one in found.records:
        if one["units"] == units and "cpu" in one:
            flags = ", ".join(one["flags"])
            notes.append(
                "Median of float32's time over the arm's of the same round, PyTorch's "
                "beside its own float32; higher is better. Blank: no such model, or not "
                "of this environment. *naive*, *Flax*, *JMP* and *MPX* are in bfloat16; "
                f"*mpx* is `mpx.autocast(loss)`. {one['cpu']} ({flags}); load before "
                f"{one['load']:.1f}; `{one['command']}`, {one['commit']}."
            )
    notes = notes or ["Not measured: no machine with `amx_bf16` yet." if units else ""]
    return Table(f"Speed of a training step, {_kind(units)}", heads, rows, notes)


_ORDER = [(step, side, arm) for step in STEPS for side in ARMS for arm in ARMS[side]]


def _rows(runs: Runs) -> Iterator[Sequence[str]]:
    ordered = sorted(runs.items(), key=lambda item: _ORDER.index(item[0]))
    for (step, side, arm), run in ordered:
        first, middle, last = speeds(runs, step, side, arm)
        what = f"{STEPS[step].title}, {run['of']}{', peers' if side == 'peers' else ''}"
        if "seconds" in run:
            yield what, arm, f"{1e3 * run['seconds']:.0f}", "", "", "", "1", ""
            continue
        yield (
            what,
            arm,
            f"{statistics.median(run['ms']):.1f}",
            ratio(middle),
            f"{first:.2f} to {last:.2f}",
            f"{run['error']:.1e}" if run["error"] else "",
            str(len(run["ms"])),
            f"{run['load']:.1f}",
        )


def _text(value: float) -> str:
    return "" if math.isnan(value) else ratio(value)


def goals(found: Results) -> Iterator[Goal]:
    """Speeds and errors of mpx, on the kinds of CPUs that were measured."""
    for units in (True, False):
        runs = runs_of(found, units)
        for (step, side, arm), run in runs.items():
            what = f"{STEPS[step].title}, {run['of']}, {_kind(units)}: {arm}"
            speed = speeds(runs, step, side, arm)[1]
            if arm == OURS:
                least = GOALS[step][side == "newest"] if units else WITHOUT_UNITS
                text = f"{what} at least {least} times float32's speed: {speed:.2f}"
                yield Goal(text, speed >= least)
                if STEPS[step].model != "resnet" and "error" in run:
                    text = f"{what}, gradients' error below {MOST_ERROR}"
                    yield Goal(f"{text}: {run['error']:.1e}", run["error"] < MOST_ERROR)
                share = beside_pytorch(runs, step, side)
                if units and step in BESIDE_PYTORCH and not math.isnan(share):
                    most = BESIDE_PYTORCH[step]
                    text = f"{what} at most {most} times PyTorch's time: {share:.2f}"
                    yield Goal(text, share <= most)
            if units and (step, side) == ("mlp", "ours") and arm in MOST_TIME:
                most = MOST_TIME[arm]
                text = f"{what} at most {most} times float32's time: {1 / speed:.2f}"
                yield Goal(text, 1 / speed <= most)
