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
import platform
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
        goals: of its speed with units, with jax 0.10 and with the newest.
        rounds: how often each arm is timed.
        rows: examples in a batch.
        tokens: of each; steps of an LSTM, the side of an image.
        patch: numbers of a patch.
    """

    title: str
    model: str
    goals: tuple[float, float]
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
        return dataclasses.replace(self, layers=1, rows=rows, rounds=3)


STEPS = {
    "mlp": Step("MLP, 4 x 1024, 512 rows", "mlp", (2.8, 3.2), 15, 512, 1024, 4),
    "gpt": Step(
        *("GPT, 4 x 512, 8 x 256 tokens", "gpt", (3.0, 3.0), 5),
        *(8, 512, 4, 256, 2048, 8, 0, 8192),
    ),
    "vit384": Step(
        *("ViT, 4 x 384, 32 x 64 tokens", "vit", (3.5, 3.5), 5),
        *(32, 384, 4, 64, 1536, 6, 48, 100),
    ),
    "vit": Step(
        *("ViT of `make train`, 3 x 64, 64 x 16 tokens", "vit", (1.5, 1.5), 25),
        *(64, 64, 3, 16, 200, 4, 4, 10),
    ),
    "resnet": Step(
        *("ResNet, 64 to 256 channels, 16 x 32 x 32", "resnet", (1.1, 1.2), 9),
        *(16, 64, 3, 32, 0, 0, 0, 10),
    ),
    "lstm": Step(
        *("LSTM, 512, 64 steps of 64 rows", "lstm", (1.5, 2.0), 9),
        *(64, 512, 1, 64, 0, 0, 0, 256),
    ),
}
FLOAT32, NAIVE, OURS = "float32", "naive bfloat16", "mpx bfloat16"
# With and without the form of products for units, whatever this CPU is.
FORM, PLAIN = "mpx bfloat16, form for units", "mpx bfloat16, plain form"
AUTOCAST = "PyTorch autocast"
_BOTH = (FLOAT32, NAIVE, "Flax bfloat16", OURS)
_BOTH += ("mpx float16", "mpx delayed", "mpx current", "mpx int8")
# The first of each environment is what the others are compared with.
ARMS = {
    "ours": (*_BOTH, FORM, PLAIN),  # JAX since 0.11 always has the form
    "newest": _BOTH,
    "peers": (FLOAT32, "JMP bfloat16", "MPX bfloat16"),
    "torch": ("PyTorch float32", AUTOCAST),
}
COLUMNS = (*ARMS["ours"][1:], *ARMS["peers"][1:], AUTOCAST)
IN_TORCH = ("mlp", "gpt", "vit")
FLAGS = "avx2 avx512f avx512_vnni avx512_bf16 avx512_fp16 amx_bf16 amx_int8 amx_fp16"
# Goals: speed without units; errors of gradients, but for the ResNet; with units, times
# beside float32's (of an MLP with jax 0.10) and beside PyTorch's autocast.
WITHOUT_UNITS = 0.95
MOST_ERROR = 8e-3
MOST_TIME = {"mpx delayed": 1.1, "mpx current": 1.25}
BESIDE_PYTORCH = {"mlp": 0.9, "gpt": 1.3}


# --- Measuring ------------------------------------------------------------------------


def _info() -> dict[str, str]:
    """What Linux knows of this CPU."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    pairs = [one.partition(":") for one in lines]
    return {name.strip(): value.strip() for name, _, value in pairs}


def processor() -> str:
    """The processor in words, and how many cores it has."""
    name = _info().get("model name") or platform.processor() or platform.machine()
    return f"{os.cpu_count()} cores of {name}"


def about(command: str) -> dict[str, Any]:
    """This CPU, what ran on it before, and of which commit this is."""
    words = _info().get("flags", "").split()
    git = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True).stdout.strip()
    return {
        "units": "amx_bf16" in words,
        "cpu": processor(),
        "flags": [flag for flag in FLAGS.split() if flag in words],
        "load": os.getloadavg()[0],
        "commit": commit or "unknown",
        "command": command,
    }


def requests(options: Any, found: Results) -> list[dict[str, Any]]:
    """One for each step, to all environments that are here."""
    here = about(found.command)
    known = results.read(found.name) or found
    models = options.models or list(STEPS)
    kept = [
        one
        for one in known.records
        if one["units"] != here["units"] or one.get("step", "") not in models
    ]
    # What is said of a run goes with the last of its steps.
    of = {one["units"] for one in kept if "step" in one}
    found.records += [one for one in kept if "step" in one or one["units"] in of]
    found.records.append(here)
    missing = [side for side, folder in MADE.items() if not (folder / "bin").is_dir()]
    found.notes += [
        f"Not run: {side}; `make {side}-venv` makes its environment."
        for side in missing
    ]
    asked = []
    for name in models:
        step = STEPS[name].small() if options.quick else STEPS[name]
        left_out = {*missing, *(() if step.model in IN_TORCH else ("torch",))}
        names = {side: ARMS[side] for side in ARMS if side not in left_out}
        of = {"step": name, "units": here["units"], "sizes": dataclasses.asdict(step)}
        asked.append({"sides": list(names), "names": names, **of})
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
    for name, run, error in steps:
        record = {**same, "arm": name, "load": round(os.getloadavg()[0], 2)}
        if run is None:  # what is found is the seconds of its only step
            yield {"run": record | {"error": None, "ms": [round(1e3 * error)]}}
        else:
            yield {"run": record | {"error": error, "ms": taken[name]}}


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
    if above is None or below is None or len(above["ms"]) != len(below["ms"]):
        return math.nan, math.nan, math.nan  # or run once, because it is slow
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
                    "beside float32's, *load* the machine's at the end, in which this "
                    "run has its part. Blank: too slow, run once."
                ],
            )


def _kind(units: bool) -> str:
    return "CPU with AMX's units for bfloat16" if units else "CPU without AMX"


def _speed_table(found: Results, units: bool) -> Table:
    heads = ["step", "jax", "float32, ms", *COLUMNS, "mpx to PyTorch, time"]
    runs, notes, rows = runs_of(found, units), [], []
    for step, side in itertools.product(STEPS, ("ours", "newest")):
        base = runs.get((step, side, FLOAT32))
        if base is not None:
            row = [STEPS[step].title, base["of"].split()[1]]
            row.append(f"{statistics.median(base['ms']):.1f}")
            # The predecessors have the JAX of ours, and PyTorch is shown once.
            sides = ("ours", "peers", "torch") if side == "ours" else (side,)
            for arm in COLUMNS:
                of = next((each for each in sides if arm in ARMS[each]), None)
                row.append("" if of is None else _text(speeds(runs, step, of, arm)[1]))
            rows.append([*row, _text(beside_pytorch(runs, step, side))])
        elif not runs:
            rows.append([STEPS[step].title, side, *[""] * (len(heads) - 2)])
    told = [one for one in found.records if one["units"] == units and "cpu" in one]
    if told:
        notes.append(
            "Median of float32's time over the arm's of the same round, PyTorch "
            "beside its own float32; higher is better. Blank: no such model or "
            "another environment. *mpx bfloat16* is `mpx.autocast(loss)`, in the "
            "form for units where the CPU has some, and always since jax 0.11."
        )
    notes += [
        f"{one['cpu']} ({', '.join(one['flags'])}); load before {one['load']:.1f}; "
        f"`{one['command']}`, {one['commit']}."
        for one in told
    ]
    notes = notes or ["Not measured: no machine with `amx_bf16` yet." if units else ""]
    return Table(f"Speed of a training step, {_kind(units)}", heads, rows, notes)


_ORDER = [(step, side, arm) for step in STEPS for side in ARMS for arm in ARMS[side]]


def _rows(runs: Runs) -> Iterator[Sequence[str]]:
    for key in sorted(runs, key=_ORDER.index):
        run, (first, middle, last) = runs[key], speeds(runs, *key)
        yield (
            f"{STEPS[key[0]].title}, {run['of']}{', peers' * (key[1] == 'peers')}",
            key[2],
            f"{statistics.median(run['ms']):.1f}",
            _text(middle),
            _text(first, f"{first:.2f} to {last:.2f}"),
            f"{run['error']:.1e}" if run["error"] else "",
            str(len(run["ms"])),
            f"{run['load']:.1f}",
        )


def _text(value: float, text: str = "") -> str:
    return "" if math.isnan(value) else text or ratio(value)


def goals(found: Results) -> Iterator[Goal]:
    """Speeds and errors of mpx, on the kinds of CPUs that were measured."""
    for units in (True, False):
        runs = runs_of(found, units)
        for (step, side, arm), run in runs.items():
            what = f"{STEPS[step].title}, {run['of']}, {_kind(units)}: {arm}"
            speed = speeds(runs, step, side, arm)[1]
            if arm == OURS:
                least = STEPS[step].goals[side == "newest"] if units else WITHOUT_UNITS
                text = f"{what} at least {least} times float32's speed: {speed:.2f}"
                yield Goal(text, speed >= least)
                error, share = run["error"], beside_pytorch(runs, step, side)
                if STEPS[step].model != "resnet" and error is not None:
                    text = f"{what}, gradients' error below {MOST_ERROR}: {error:.1e}"
                    yield Goal(text, error < MOST_ERROR)
                if units and step in BESIDE_PYTORCH and not math.isnan(share):
                    most = BESIDE_PYTORCH[step]
                    text = f"{what} at most {most} times PyTorch's time: {share:.2f}"
                    yield Goal(text, share <= most)
            if units and (step, side) == ("mlp", "ours") and arm in MOST_TIME:
                most = MOST_TIME[arm]
                text = f"{what} at most {most} times float32's time: {1 / speed:.2f}"
                yield Goal(text, 1 / speed <= most)
