"""The run folder: what a run leaves behind.

* `metrics.csv`: one row per precision and step; equal runs write equal bytes.
* `results.json`: the table, the options, the versions.
* `curves.png`: the picture, see `plot`.
* `checkpoints/`: one folder per precision, see `checkpoint`.
"""

import csv
import dataclasses
import json
import platform
import shutil
from collections.abc import Iterable
from importlib import metadata
from typing import Any, NamedTuple

import jax

from ..precisions import Precision
from .checkpoint import run_options
from .config import RunConfig
from .errors import SetupError

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
        self.history: dict[Precision, list[Row]] = {}
        self.results: dict[Precision, Result] = {}
        if config.resume:
            self._open()
        else:
            self._start()

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
        if self.checkpoints_path.exists():
            shutil.rmtree(self.checkpoints_path)
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
        with self.metrics_path.open("a", newline="") as file:
            csv.writer(file).writerows((precision, *row) for row in rows)

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
            "device": {"kind": device.device_kind, "count": jax.local_device_count()},
            "python": platform.python_version(),
            "versions": {name: _version(name) for name in PACKAGES},
        }
        self.results_path.write_text(json.dumps(content, indent=2) + "\n")

    def _write_metrics(self) -> None:
        with self.metrics_path.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(("precision", *Row._fields))
            for precision, rows in self.history.items():
                writer.writerows((precision, *row) for row in rows)

    def _read_metrics(self) -> None:
        try:
            with self.metrics_path.open(newline="") as file:
                for entry in csv.DictReader(file):
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
