"""Steps that were skipped, kept so that they can be made again.

A skipped step leaves weights and optimizer as they were, but nobody waits for its flag:
when it is seen, later steps have changed them. So `bad_step_000812/` holds the batch
and the newest checkpoint before the step, as links, which cost no room while the run
has the checkpoint, too. From there the steps between are made again, with the same
program on the same data, bit for bit, to the weights, the random streams and the loss
scale that the bad step had. Good steps cost nothing.
"""

import dataclasses
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ..precisions import DTYPES, RECIPES, Precision
from .checkpoint import Checkpoints, run_options
from .config import RunConfig
from .errors import SetupError
from .folder import BAD_STEPS, Row

MOST = 3
"""The newest are kept; of several in a row the first, as all have the same state."""


class BadSteps:
    """The skipped steps of one precision of one run."""

    def __init__(self, folder: Path, checkpoints: Checkpoints):
        self.folder = folder / BAD_STEPS / checkpoints.precision
        self.checkpoints = checkpoints

    def keep(self, row: Row, batch: Any, is_writer: bool) -> None:
        """Keeps a step; forgets older ones.

        Args:
            row: its metrics.
            batch: what it was made with, arrays of the host.
            is_writer: whether this process, of several, writes.
        """
        self.checkpoints.wait()
        if not is_writer:
            return
        path = self.folder / name_of(row.step)
        if path.exists():  # of a run that was resumed before it
            shutil.rmtree(path)
        path.mkdir(parents=True)
        self.checkpoints.link(path, before=row.step)
        leaves = jax.tree_util.tree_leaves_with_path(batch)
        arrays: dict[str, Any] = {
            jax.tree_util.keystr(p) or "batch": np.asarray(x) for p, x in leaves
        }
        np.savez(path / "batch.npz", **arrays)
        record = {"step": row.step, "loss_scale": row.loss_scale}
        record["options"] = self.checkpoints.options
        (path / "step.json").write_text(json.dumps(record, indent=2) + "\n")
        for older in sorted(self.folder.glob("bad_step_*"))[:-MOST]:
            shutil.rmtree(older)


@dataclasses.dataclass(frozen=True)
class BadStep:
    """A skipped step that was kept."""

    path: Path
    config: RunConfig
    precision: Precision
    step: int
    loss_scale: float
    arrays: Mapping[str, np.ndarray]

    @property
    def batch(self) -> Any:
        """What it was made with: an array, or a dictionary of arrays."""
        if "batch" in self.arrays:
            return self.arrays["batch"]
        return {name[2:-2]: array for name, array in self.arrays.items()}

    def restore(self, state: Any) -> tuple[Any, int]:
        """The state of the newest checkpoint before it, and the steps made until then.

        Args:
            state: the initial state, which it is where there was no checkpoint yet.
        """
        with Checkpoints(self.path, self.config, self.precision) as checkpoints:
            if checkpoints.position is None:
                return state, 0
            return checkpoints.restore(state)

    def require_same(self, loss_scale: Any) -> None:
        """Raises unless the state that was made again has the scale that it had."""
        if float(loss_scale) != self.loss_scale:
            raise SetupError(
                f"Step {self.step} had the loss scale {self.loss_scale:g}, and made "
                f"again {float(loss_scale):g}: the steps before it have become others. "
                "Give the data, the devices and the versions of the run."
            )


def read_bad_steps(config: RunConfig, step: int) -> list[BadStep]:
    """A step, in each precision that has kept it; in one if the options say which.

    Raises:
        SetupError: none has, or it is of a run with other options.
    """
    root = config.folder / BAD_STEPS
    found = [
        _read(root / precision / name_of(step), config, precision)
        for precision in (*DTYPES, *RECIPES)
        if config.precision in ("all", precision)
        and (root / precision / name_of(step) / "step.json").exists()
    ]
    if not found:
        kept = sorted(str(p.relative_to(root)) for p in root.glob("*/bad_step_*"))
        raise SetupError(
            f"{root} does not hold step {step} in {config.precision}. "
            f"It holds: {', '.join(kept) or 'none'}."
        )
    return found


def _read(path: Path, config: RunConfig, precision: Precision) -> BadStep:
    try:
        record = json.loads((path / "step.json").read_text())
        theirs, step, scale = (record[k] for k in ("options", "step", "loss_scale"))
        with np.load(path / "batch.npz") as file:
            arrays = dict(file)
    except (OSError, ValueError, KeyError) as error:
        raise SetupError(f"{path} is damaged ({error!r}). Remove it.") from error
    ours = run_options(config)
    names = [name for name in ours | theirs if ours.get(name) != theirs.get(name)]
    if names:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in sorted(names))
        raise SetupError(
            f"{path} is of a run with other options: {options}. Give the same ones."
        )
    return BadStep(path, config, precision, step, scale, arrays)


def name_of(step: int) -> str:
    return f"bad_step_{step:06d}"
