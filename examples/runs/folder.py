"""The run folder: what a run leaves behind.

* `metrics.csv`: one row per precision and step; equal runs write equal bytes.
* `results.json`: the table, the options, the versions.
* `curves.png`: the picture, see `plot`.
* `checkpoints/`: one folder per precision, see `checkpoint`.
* `monitor/`: with `--monitor`, how large numbers are: table, advice, CSV, picture.
* `bad_steps/`: likewise, the last steps that were skipped, see `bad_steps`.
"""

import csv
import dataclasses
import io
import json
import platform
import shutil
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.experimental import multihost_utils

import mpx

from ..precisions import Precision
from .checkpoint import run_options
from .config import RunConfig
from .errors import SetupError

BAD_STEPS = "bad_steps"
PACKAGES = ("jax", "jaxlib", "equinox", "flax", "optax", "mpx-jax")


class Row(NamedTuple):
    """The metrics of one step."""

    step: int
    """Counted from 1."""
    loss: float
    """Training loss of the batch, unscaled."""
    accuracy: float
    """Training accuracy of the batch."""
    loss_scale: float
    """What the loss was multiplied by in this step; 1 without loss scaling."""
    finite: bool
    """False: the step was skipped."""
    skipped: int
    """Skipped steps so far."""
    test_accuracy: float | None = None
    """On held-out data, where it was measured after this step."""
    test_loss: float | None = None
    """Mean loss on held-out data, likewise."""


@dataclasses.dataclass(frozen=True)
class Result:
    """What came out of one precision."""

    precision: Precision
    steps: int
    test_accuracy: float
    test_loss: float
    final_loss: float | None
    """Mean training loss of the last 20 steps."""
    skipped: int
    parameters: int
    step_bytes: int | None
    """What the compiled step needs on one device: arguments, results and temporaries,
    each donated buffer counted once. None where the backend does not say."""
    step_seconds: float | None
    """Median over the windows between two looks at the metrics, waiting for data
    included. None for a run that was resumed after its last step."""


class RunFolder:
    """Reads and writes the files of a run."""

    def __init__(self, config: RunConfig):
        """Opens the folder of a run: empty for a new one, as left for a resumed one."""
        self.config = config
        self.path = config.folder
        self.metrics_path = self.path / "metrics.csv"
        self.results_path = self.path / "results.json"
        self.picture_path = self.path / "curves.png"
        self.checkpoints_path = self.path / "checkpoints"
        self.bad_steps_path = self.path / BAD_STEPS
        self.history: dict[Precision, list[Row]] = {}
        self.statistics: dict[Precision, dict[int, mpx.reports.Statistics]] = {}
        self.results: dict[Precision, Result] = {}
        self.is_writer = jax.process_index() == 0  # of several, the first writes
        if config.resume:
            self._open()
        elif self.is_writer:
            self._start()
        if jax.process_count() > 1:  # what one reads, another is about to change
            multihost_utils.sync_global_devices("run folder")

    def _start(self) -> None:
        finished = self.results_path.exists() and self._read_results()["finished"]
        if self.checkpoints_path.exists() and not (finished or self.config.overwrite):
            raise SetupError(
                f"{self.path} holds an unfinished run. Continue it with `--resume`, "
                "start anew with `--overwrite`, or give another `--run-dir`."
            )
        # Only what a run has written itself: `--run-dir` may be any folder.
        for path in (self.metrics_path, self.results_path, self.picture_path):
            path.unlink(missing_ok=True)
        monitor = self.path / "monitor"
        for path in (self.checkpoints_path, self.bad_steps_path, monitor):
            if path.exists():
                shutil.rmtree(path)
        self.path.mkdir(parents=True, exist_ok=True)
        self._write_metrics()

    def _open(self) -> None:
        if not self.checkpoints_path.exists():
            raise SetupError(
                f"`--resume`: {self.path} holds no checkpoints. Start without "
                "`--resume`, or give the `--run-dir` of the run to continue."
            )
        if self.metrics_path.exists():
            self._read_metrics()
        if self.results_path.exists():
            saved = self._read_results()
            if saved["options"] == run_options(self.config):
                for entry in saved["results"]:
                    self.results[entry["precision"]] = Result(**entry)

    def rewind(self, precision: Precision, position: int) -> list[Row]:
        """Forgets what was recorded after `position`; returns what was before."""
        rows = self.history.get(precision, [])
        self.history[precision] = [row for row in rows if row.step <= position]
        self._write_metrics()
        return list(self.history[precision])

    def add_rows(self, precision: Precision, rows: Iterable[Row]) -> None:
        """Appends metrics."""
        rows = list(rows)
        self.history.setdefault(precision, []).extend(rows)
        if not self.is_writer:
            return
        with self.metrics_path.open("a", newline="") as file:
            csv.writer(file).writerows((precision, *row) for row in rows)

    def add_statistics(
        self, precision: Precision, position: int, seen: mpx.reports.Statistics
    ) -> None:
        """Appends statistics, and writes what they advise, and a picture."""
        if not self.is_writer:
            return
        history = self.statistics.setdefault(precision, {})
        history[position] = seen
        self.path.joinpath("monitor").mkdir(exist_ok=True)
        start = self.path / "monitor" / precision
        with start.with_suffix(".csv").open("a", newline="") as file:
            csv.writer(file).writerows((position, *x) for x in seen.records().items())
        start.with_suffix(".txt").write_text(f"Before step {position + 1}\n{seen}\n")
        mpx.reports.heat_map(history).savefig(start.with_suffix(".png"))

    def add_result(self, result: Result) -> None:
        """Records that a precision is done."""
        self.results[result.precision] = result
        self.write_results(finished=False)

    def write_results(self, finished: bool) -> None:
        """Writes `results.json`."""
        device = jax.local_devices()[0]
        content = {
            "finished": finished,
            "options": run_options(self.config),
            "results": [dataclasses.asdict(r) for r in self.results.values()],
            "device": {"kind": device.device_kind, "count": jax.device_count()},
            "python": platform.python_version(),
            "versions": {name: _version(name) for name in PACKAGES},
        }
        self._replace(self.results_path, json.dumps(content, indent=2) + "\n")

    def _write_metrics(self) -> None:
        text = io.StringIO(newline="")
        writer = csv.writer(text)
        writer.writerow(("precision", *Row._fields))
        for precision, rows in self.history.items():
            writer.writerows((precision, *row) for row in rows)
        self._replace(self.metrics_path, text.getvalue())

    def _replace(self, path: Path, text: str) -> None:
        """Writes a file that is the old one or the new one whenever the run ends."""
        if self.is_writer:
            beside = path.with_suffix(".new")
            beside.write_bytes(text.encode())
            beside.replace(path)

    def _read_metrics(self) -> None:
        try:
            text = self.metrics_path.read_bytes().decode()
            # A run that was killed may have written half of its last line.
            lines = text[: text.rfind("\n") + 1].splitlines()
            for entry in csv.DictReader(lines):
                precision: Any = entry["precision"]
                row = Row(
                    step=int(entry["step"]),
                    loss=float(entry["loss"]),
                    accuracy=float(entry["accuracy"]),
                    loss_scale=float(entry["loss_scale"]),
                    finite=entry["finite"] == "True",
                    skipped=int(entry["skipped"]),
                    test_accuracy=_number(entry["test_accuracy"]),
                    test_loss=_number(entry["test_loss"]),
                )
                self.history.setdefault(precision, []).append(row)
        except (KeyError, TypeError, ValueError) as error:
            raise SetupError(
                f"{self.metrics_path} is damaged ({error!r}). Remove it to continue "
                "without the metrics of the steps so far."
            ) from error

    def _read_results(self) -> dict[str, Any]:
        try:
            content = json.loads(self.results_path.read_text())
            if not {"finished", "options", "results"} <= content.keys():
                raise ValueError("entries are missing")
            return content
        except (ValueError, AttributeError) as error:
            raise SetupError(
                f"{self.results_path} is damaged ({error}). Remove it."
            ) from error


def _number(text: str) -> float | None:
    return float(text) if text else None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
