"""Starting workers and reading what they answer."""

from __future__ import annotations

import collections
import contextlib
import json
import math
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Generator, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from .peers.environment import REPOSITORY, Peers

Side = Literal["ours", "newest", "peers", "torch"]

# Environments that a target of the Makefile makes: ours with the newest JAX, PyTorch's.
MADE = {side: REPOSITORY / f".venv-{side}" for side in ("newest", "torch")}

# Variables that would change what is compiled, or whose packages are imported.
_CLEARED = ("PYTHONPATH", "XLA_FLAGS", "TPU_LIBRARY_PATH")
_CLEARED += ("JAX_PLATFORMS", "JAX_PLATFORM_NAME")

# No chip is opened: ask no metadata server, share the library freely.
_COMPILE_ONLY = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_LOG_DIR": "disabled",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}


def side_of(arm: str) -> Side:
    """Whose code an arm is; Flax is with us, the others of the peers are not."""
    return "peers" if arm.startswith(("MPX ", "JMP ", "Qwix ")) else "ours"


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
    turns: bool = False,
    patience: Callable[[], float] = lambda: math.inf,
) -> Generator[dict[str, Any], None, None]:
    """Runs one worker and yields its answers as they come; the first is its versions.

    Args:
        side: whose code it measures.
        request: see `worker`; `arms` is filled in.
        peers: the peers' environment; our side needs it for its TPU compiler only.
        compile_only: hide accelerators, so that compiling opens none.
        libraries: a folder with JAX's CUDA plugin, to compile for CUDA.
        variables: further environment variables.
        turns: the worker stops after each answer until the next one is asked for, but
            not after the versions: workers prepare themselves at the same time.
        patience: seconds within which the next answer must come; asked before each.

    Raises:
        WorkerError: with the last lines of its standard error.
    """
    environment = {k: v for k, v in os.environ.items() if k not in _CLEARED}
    if compile_only:
        environment |= _COMPILE_ONLY
        if peers and peers.libtpu is not None:
            environment["TPU_LIBRARY_PATH"] = str(peers.libtpu)
    if libraries is not None:
        environment["PYTHONPATH"] = str(libraries.resolve())
        environment["XLA_FLAGS"] = "--xla_gpu_enable_triton_gemm=false"
    environment |= variables or {}
    if side == "ours":
        command = [sys.executable, "-m", "benchmarks.worker"]
    elif side in MADE:
        command = [str(MADE[side] / "bin" / "python"), "-m", "benchmarks.worker"]
    elif peers is None:
        raise WorkerError("the worker for peers needs their environment; got None")
    else:
        worker = Path(__file__).resolve().with_name("worker.py")
        command = [str(peers.python), "-P", str(worker)]
        if peers.packages is not None:
            environment["PYTHONPATH"] = str(peers.packages.resolve())
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    process = subprocess.Popen(
        command, cwd=REPOSITORY, env=environment, text=True, **pipes
    )
    if process.stdin is None or process.stdout is None or process.stderr is None:
        raise WorkerError("the worker has no pipes")
    # Read both at once: a full pipe of errors would block the worker.
    errors: collections.deque[str] = collections.deque(maxlen=30)
    reader = threading.Thread(target=errors.extend, args=(process.stderr,))
    reader.start()
    try:
        print(json.dumps({**request, "arms": side}), file=process.stdin, flush=True)
        if not turns:
            process.stdin.close()
        for line in read_lines(process, patience):
            answer = json.loads(line)
            yield answer
            if turns and "versions" not in answer:
                with contextlib.suppress(BrokenPipeError):  # it says why it ended
                    print(file=process.stdin, flush=True)
    finally:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        if process.poll() is None:
            process.kill()
        process.wait()
        reader.join()
        process.stderr.close()
    if process.returncode:
        raise WorkerError(
            f"the worker for {side} ended with status {process.returncode}:\n"
            + "".join(errors)
        )


def in_turns(
    workers: Mapping[str, Generator[dict[str, Any], None, None]],
) -> Iterator[tuple[str, dict[str, Any]]]:
    """One answer of each after the other, and so on, until all have ended."""
    waiting = dict(workers)
    try:
        while waiting:
            for side in list(waiting):
                answer = next(waiting[side], None)
                if answer is None:
                    del waiting[side]
                else:
                    yield side, answer
    finally:
        for answers in workers.values():
            answers.close()


def read_lines(
    process: subprocess.Popen[str], patience: Callable[[], float]
) -> Iterator[str]:
    """Yields what a process prints, and waits for its end.

    Args:
        process: With a pipe for its standard output.
        patience: Seconds within which the next line must come; asked before each.

    Raises:
        WorkerError: It did not come, and the process was killed.
    """
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def read() -> None:
        for line in process.stdout or ():
            lines.put(line)
        lines.put(None)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        while True:
            seconds = patience()
            try:
                timeout = None if seconds == math.inf else max(seconds, 0.0)
                line = lines.get(timeout=timeout)
            except queue.Empty:
                raise WorkerError(
                    f"nothing came within {max(seconds, 0.0):.0f} s; it was killed"
                ) from None
            if line is None:
                break
            yield line
        process.wait()
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        reader.join()
        if process.stdout is not None:
            process.stdout.close()
