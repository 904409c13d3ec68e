"""Starting workers and reading what they answer."""

from __future__ import annotations

import collections
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from . import targets
from .peers import REPOSITORY, Peers

Side = Literal["ours", "peers"]

# Variables that would change what is compiled, or whose packages are imported.
_CLEARED = (
    "PYTHONPATH",
    "XLA_FLAGS",
    "JAX_PLATFORMS",
    "JAX_PLATFORM_NAME",
    "TPU_LIBRARY_PATH",
)


class WorkerError(RuntimeError):
    """A worker ended before it had answered everything."""


def ask(
    side: Side,
    request: dict[str, Any],
    peers: Peers | None,
    *,
    compile_only: bool = True,
    libraries: Path | None = None,
    variables: Mapping[str, str] | None = None,
) -> Iterator[dict[str, Any]]:
    """Runs one worker and yields its answers as they come; the first is its versions.

    Args:
        side: whose code it measures.
        request: see `worker`; `arms` is filled in.
        peers: the peers' environment; our side needs it for its TPU compiler only.
        compile_only: hide accelerators, so that compiling opens none.
        libraries: a folder with JAX's CUDA plugin, to compile for CUDA.
        variables: further environment variables.

    Raises:
        WorkerError: with the last lines of its standard error.
    """
    environment = {k: v for k, v in os.environ.items() if k not in _CLEARED}
    if compile_only:
        environment |= targets.environment(peers.libtpu if peers else None)
    if libraries is not None:
        environment["PYTHONPATH"] = str(libraries.resolve())
        environment |= targets.CUDA_ENVIRONMENT
    environment |= variables or {}
    if side == "ours":
        command = [sys.executable, "-m", "benchmarks.worker"]
    elif peers is None:
        raise WorkerError("the worker for peers needs their environment; got None")
    else:
        worker = Path(__file__).resolve().with_name("worker.py")
        command = [str(peers.python), "-P", str(worker)]
    process = subprocess.Popen(
        command,
        cwd=REPOSITORY,
        env=environment,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    if process.stdin is None or process.stdout is None or process.stderr is None:
        raise WorkerError("the worker has no pipes")
    # Read both at once: a full pipe of errors would block the worker.
    errors: collections.deque[str] = collections.deque(maxlen=30)
    reader = threading.Thread(target=errors.extend, args=(process.stderr,))
    reader.start()
    try:
        json.dump({**request, "arms": side}, process.stdin)
        process.stdin.close()
        for line in process.stdout:
            yield json.loads(line)
        process.wait()
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        reader.join()
        process.stdout.close()
        process.stderr.close()
    if process.returncode:
        raise WorkerError(
            f"the worker for {side} ended with status {process.returncode}:\n"
            + "".join(errors)
        )
