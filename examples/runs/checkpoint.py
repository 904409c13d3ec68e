"""Checkpoints with Orbax: all that training changes, and the data position.

A checkpoint is written beside the others and renamed when it is complete, so that
whatever interrupts a run leaves the last complete one. With the arrays goes a record:
the data position, the options of the run, and a checksum of every array, so that a
damaged file is found and named instead of trained on.
"""

import dataclasses
import json
import zlib
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from ..precisions import Precision
from .config import RunConfig
from .errors import SetupError

VERSION = 1
# Options that may differ between a run and its continuation: they change neither the
# numbers nor the data.
FREE_OPTIONS = (
    "precision",
    "recipe",
    "data_path",
    "workers",
    "run_dir",
    "resume",
    "overwrite",
    "log_every",
    "checkpoint_every",
)


class Checkpoints:
    """The checkpoints of one precision of one run; keeps the two newest."""

    def __init__(self, folder: Path, config: RunConfig, precision: Precision):
        """Opens the folder.

        Args:
            folder: the run folder; checkpoints lie in `checkpoints/PRECISION` in it.
            config: the run; a checkpoint of another run is refused.
            precision: the precision that is trained.
        """
        self.folder = folder / "checkpoints" / precision
        self.precision: Precision = precision
        self.options = run_options(config)
        self.manager = ocp.CheckpointManager(
            self.folder.absolute(),
            options=ocp.CheckpointManagerOptions(max_to_keep=2),
        )

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *exception: object) -> None:
        self.manager.close()

    @property
    def position(self) -> int | None:
        """The data position of the newest complete checkpoint, None without one."""
        return self.manager.latest_step()

    def save(self, position: int, state: Any) -> None:
        """Writes a checkpoint and returns when it is complete."""
        if self.position == position:
            return
        arrays = jax.tree.map(without_key, eqx.filter(state, eqx.is_array))
        record = {
            "version": VERSION,
            "position": position,
            "precision": self.precision,
            "options": self.options,
            "checksums": checksums(arrays),
        }
        self.manager.save(
            position,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(arrays), record=ocp.args.JsonSave(record)
            ),
        )
        self.manager.wait_until_finished()

    def restore(self, like: Any) -> tuple[Any, int]:
        """Reads the newest checkpoint.

        Args:
            like: a state of the same run; gives structure, shapes, dtypes and devices.

        Returns:
            The state, and the position of the next batch.

        Raises:
            SetupError: there is no checkpoint, it is damaged, or of another run.
        """
        position = self.position
        if position is None:
            raise SetupError(
                f"`--resume`: there is no complete checkpoint in {self.folder}. Start "
                "without `--resume`."
            )
        path = self.folder / str(position)
        record = self._record(path, position)
        self._require_same_run(record)
        arrays, static = eqx.partition(like, eqx.is_array)

        def describe(array: Any) -> jax.ShapeDtypeStruct:
            x = without_key(array)
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)

        template = jax.tree.map(describe, arrays)
        restored = self._item(
            path, position, "state", ocp.args.StandardRestore(template)
        )
        expected, found = record["checksums"], checksums(restored)
        names = sorted(expected.keys() | found.keys())
        wrong = [name for name in names if expected.get(name) != found.get(name)]
        if wrong:
            raise self._damaged(path, f"checksum differs at `{wrong[0]}`")
        return eqx.combine(
            jax.tree.map(with_key_of, arrays, restored), static
        ), position

    def _record(self, path: Path, position: int) -> dict[str, Any]:
        record = self._item(path, position, "record", ocp.args.JsonRestore())
        needed = {"version", "position", "precision", "options", "checksums"}
        if not isinstance(record, dict) or not needed <= record.keys():
            raise self._damaged(path, "its record lacks entries")
        if record["version"] != VERSION:
            raise SetupError(
                f"The checkpoint {path} has version {record['version']}; this program "
                f"reads version {VERSION}. Continue it with the program that wrote it."
            )
        return record

    def _require_same_run(self, record: dict[str, Any]) -> None:
        theirs, ours = record["options"], self.options
        differing = [
            f"--{name.replace('_', '-')} was {theirs.get(name)} and is {ours.get(name)}"
            for name in sorted(theirs.keys() | ours.keys())
            if theirs.get(name) != ours.get(name)
        ]
        if differing:
            raise SetupError(
                f"`--resume`: the checkpoints in {self.folder} are of another run: "
                f"{'; '.join(differing)}. Give the same options, or another "
                "`--run-dir`."
            )

    def _item(self, path: Path, position: int, name: str, item: Any) -> Any:
        """Reads one part; whatever goes wrong in it is a damaged checkpoint."""
        try:
            restored = self.manager.restore(
                position, args=ocp.args.Composite(**{name: item})
            )
            return restored[name]
        except Exception as error:
            raise self._damaged(path, str(error).split("\n")[0][:200]) from error

    def _damaged(self, path: Path, reason: str) -> SetupError:
        older = [step for step in self.manager.all_steps() if str(step) != path.name]
        remedy = (
            f"Remove {path} to continue from step {max(older)}."
            if older
            else f"There is no older one: remove {path} and start without `--resume`."
        )
        return SetupError(
            f"The checkpoint {path} is damaged or cut off ({reason}). {remedy}"
        )


def run_options(config: RunConfig) -> dict[str, Any]:
    """The options that decide a run's numbers, as JSON has them."""
    options = dataclasses.asdict(config)
    for name in FREE_OPTIONS:
        options.pop(name, None)
    for group in ("model", "scaling"):
        values = options.pop(group)
        options |= {f"{group}.{name}": value for name, value in values.items()}
    return json.loads(json.dumps(options))


def checksums(tree: Any) -> dict[str, int]:
    """CRC-32 of the bytes of every array, by its path in the tree."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {
        jax.tree_util.keystr(path): zlib.crc32(np.ascontiguousarray(leaf).tobytes())
        for path, leaf in leaves
    }


def without_key(leaf: Any) -> Any:
    """A random key as numbers, which checkpoints can hold; others as they are."""
    return jax.random.key_data(leaf) if is_key(leaf) else leaf


def with_key_of(like: Any, leaf: Any) -> Any:
    """The inverse, for a leaf whose old value is given."""
    if not is_key(like):
        return leaf
    return jax.random.wrap_key_data(leaf, impl=jax.random.key_impl(like))


def is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
