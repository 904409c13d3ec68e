"""Checkpoints with Orbax: all that training changes, and the data position.

A checkpoint is written beside the others, while training goes on, and renamed when it
is complete, so that whatever interrupts a run leaves the last complete one. Each array
has a folder of its own, to which each process writes what its devices hold. With the
arrays goes a record: the data position, the options of the run, and a digest of every
array, so that a damaged file is found and named instead of trained on.

On how many devices it was made does not matter: it is restored to wherever the state
lies that it is to replace.
"""

import dataclasses
import json
import os
import re
import shutil
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

import mpx

from ..precisions import Precision
from .config import RunConfig
from .digest import digests
from .errors import SetupError

VERSION = 2
# Options that may differ between a run and its continuation: they change neither the
# numbers nor the data.
FREE_OPTIONS = (
    "precision",
    "recipe",
    "data_path",
    "workers",
    "mesh",
    "processes",
    "distributed",
    "run_dir",
    "resume",
    "overwrite",
    "log_every",
    "checkpoint_every",
    "blame",
    "monitor",
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
            item_handlers={
                "state": ocp.StandardCheckpointHandler(use_ocdbt=False),
                "record": ocp.JsonCheckpointHandler(),
            },
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
        """Begins to write a checkpoint; waits for the one before.

        The state may be donated as soon as this returns.

        Raises:
            FloatingPointError: it holds NaN or infinities, or a scaling that no run can
                reach; the checkpoints before it stay.
        """
        if self.position == position:
            return
        state = mpx.guard(state)
        arrays = jax.tree.map(without_key, eqx.filter(state, eqx.is_array))
        record = {
            "version": VERSION,
            "position": position,
            "precision": self.precision,
            "options": self.options,
            "digests": digests(arrays),
        }
        record["checksum"] = checksum(record)
        self.manager.save(
            position,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(arrays), record=ocp.args.JsonSave(record)
            ),
        )

    def wait(self) -> None:
        """Waits until what was begun is on the disk."""
        self.manager.wait_until_finished()

    def link(self, folder: Path, before: int) -> None:
        """Makes links to the newest checkpoint of a position before this one.

        A folder with them is one that `Checkpoints` opens, and stays when the manager
        removes what is old.
        """
        known = [step for step in self.manager.all_steps() if step < before]
        if known:
            name = str(max(known))
            there = folder / "checkpoints" / self.precision / name
            shutil.copytree(self.folder / name, there, copy_function=link_or_copy)

    def restore(self, like: Any) -> tuple[Any, int]:
        """Reads the newest checkpoint.

        Args:
            like: a state of the same run; gives structure, shapes, dtypes and devices.

        Returns:
            The state, and the position of the next batch.

        Raises:
            SetupError: there is no checkpoint, it is damaged, or of another run.
        """
        self.manager.wait_until_finished()
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
        expected, found = record["digests"], digests(restored)
        names = sorted(expected.keys() | found.keys())
        wrong = [name for name in names if expected.get(name) != found.get(name)]
        if wrong:
            raise self._damaged(path, f"state/{wrong[0]} is not what was saved")
        return eqx.combine(
            jax.tree.map(with_key_of, arrays, restored), static
        ), position

    def _record(self, path: Path, position: int) -> dict[str, Any]:
        record = self._item(path, position, "record", ocp.args.JsonRestore())
        if not isinstance(record, dict) or "version" not in record:
            raise self._damaged(path, "its record lacks entries")
        if record["version"] != VERSION:
            raise SetupError(
                f"The checkpoint {path} has version {record['version']}; this program "
                f"reads version {VERSION}. Continue it with the program that wrote it."
            )
        if record.get("checksum") != checksum(record) or record["position"] != position:
            raise self._damaged(path, "its record is not as it was written")
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
            raise self._damaged(path, reason_of(error, path)) from error

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


def reason_of(error: BaseException, path: Path) -> str:
    """What went wrong in reading a checkpoint: in which file, where that was said."""
    chain: list[BaseException] = []
    following: BaseException | None = error
    while following is not None:
        chain.append(following)
        following = following.__cause__ or following.__context__
    inside = re.escape(str(path)) + r"/([^\s\"'`]*[^\s\"'`/.,:])"
    files = [file for link in chain for file in re.findall(inside, str(link))]
    # Orbax reads its own records without saying which; they are JSON.
    files += [str(file.relative_to(path)) for file in path.rglob("_*") if cut_off(file)]
    said = str(error).split("\n")[0].split(" See full ")[0][:200]
    return f"{max(files, key=len)}: {said}" if files else said


def link_or_copy(source: str, target: str) -> None:
    """Links a file; copies it where the file system has no links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def cut_off(file: Path) -> bool:
    """Whether a file of JSON is not whole."""
    try:
        json.loads(file.read_text())
    except ValueError:
        return True
    return False


def checksum(record: Mapping[str, Any]) -> int:
    """CRC-32 of a record, as JSON, but for the entry of that name."""
    rest = {name: value for name, value in record.items() if name != "checksum"}
    return zlib.crc32(json.dumps(rest, sort_keys=True).encode())


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
