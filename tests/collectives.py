"""The collectives of a step as XLA's partitioner leaves them, on all platforms alike.

A CPU's compiler widens those of half precision afterwards.
"""

import pathlib
import tempfile
import uuid
from collections.abc import Callable
from typing import Any

import jax

from benchmarks.counts import wire


def partitioned(
    function: Callable[..., Any], *args: Any, devices: int = 4, **options: Any
) -> list[wire.counter.Message]:
    """What a function sends, compiled for these arguments and with options of jit."""
    return compiled(function, *args, devices=devices, **options)[1]


def compiled(
    function: Callable[..., Any], *args: Any, devices: int = 4, **options: Any
) -> tuple[Any, list[wire.counter.Message]]:
    """The same, and the compiled function."""

    def run(*args: Any) -> Any:
        return function(*args)

    # A name of its own: what is in the cache of programs is not compiled again.
    run.__name__ = f"step_{uuid.uuid4().hex}"
    with tempfile.TemporaryDirectory() as folder:
        dump = {"xla_dump_to": folder, "xla_dump_hlo_pass_re": "spmd-partitioning"}
        found = jax.jit(run, **options).lower(*args).compile(compiler_options=dump)
        (path,) = pathlib.Path(folder).glob("*after_spmd-partitioning*")
        return found, wire.counter.messages(path.read_text(), devices)
