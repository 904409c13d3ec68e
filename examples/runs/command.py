"""The program around a training: interruptions, errors, what came out."""

import logging
import os
import shlex
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, Protocol

import jax
from rich.markup import escape

from . import processes
from .bad_steps import BadStep, read_bad_steps
from .config import RunConfig
from .display import Display, Labels
from .errors import SetupError
from .folder import RunFolder
from .mesh import MeshConfig
from .recorder import Interrupted

# The exit status of a program that Ctrl-C ended, as shells have it.
INTERRUPTED_STATUS = 128 + signal.SIGINT


class Stop(Protocol):
    """Something that may ask to stop."""

    @property
    def requested(self) -> bool: ...


class StopRequest:
    """Turns the first Ctrl-C (or SIGTERM) into a wish, the second into the usual."""

    def __init__(self) -> None:
        self.requested = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self.request)

    def request(self, number: int, frame: FrameType | None) -> None:
        """The signal handler."""
        del frame
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        # Not print: the signal may have come in the middle of one.
        os.write(2, b"\nFinishing this step, then saving. Ctrl-C again: stop now.\n")


def train_all(
    config: RunConfig,
    labels: Labels,
    display: Display,
    stop: Stop,
    train: Callable[..., Any],
) -> None:
    """Trains every precision, then writes and prints what came out.

    Args:
        config: the run.
        labels: the words for it.
        display: prints.
        stop: asked before every step.
        train: `train(precision, folder=..., display=..., should_stop=...)` returns a
            result and the metrics of every step.
    """
    from .plot import plot_run  # here: benchmarks import the examples without it

    folder = RunFolder(config)
    display.introduce(config, labels)
    for precision in config.precisions:
        if precision not in folder.results:  # resumed
            result, _ = train(
                precision,
                folder=folder,
                display=display,
                should_stop=lambda: stop.requested,
            )
            folder.add_result(result)
    folder.write_results(finished=True)
    plot_run(folder, labels)
    display.summarize(folder.results.values(), labels)
    display.console.print(
        f"Picture {folder.picture_path}, metrics {folder.metrics_path}, "
        f"results {folder.results_path}",
        soft_wrap=True,
    )


def blame_all(
    config: RunConfig, step: int, display: Display, blame: Callable[[BadStep], Any]
) -> None:
    """Makes a skipped step again in each precision that has kept it, and reports.

    Args:
        config: the run.
        step: the number of the step.
        display: prints.
        blame: makes the step again and returns the report of `mpx.blame`.
    """
    for bad in read_bad_steps(config, step):
        head = f"{bad.precision}, step {bad.step}, loss scale {bad.loss_scale:g}"
        display.console.rule(escape(head))
        report = blame(bad)
        text = str(report)
        display.console.print(text, markup=False, highlight=False, soft_wrap=True)
        report.save(bad.path / "blame.html")


def resuming_command(module: str, target: str) -> str:
    """What to type to continue this run."""
    options = [a for a in sys.argv[1:] if a not in ("--resume", "--overwrite")]
    arguments = shlex.join([*options, "--resume"])
    if "MAKELEVEL" in os.environ:
        return f"make {target} ARGS={shlex.quote(arguments)}"
    return f"python -m {module} {arguments}"


def main(
    run: Callable[[Any, Display, Stop], None],
    parse_config: Callable[[], Any],
    module: str,
    target: str,
) -> int:
    """Runs a program; returns its exit status.

    Args:
        run: does all the work.
        parse_config: reads the command line.
        module: the program's name for `python -m`.
        target: the program's target of the Makefile.
    """
    # Orbax warns that it does not merge files which we do not want to be merged.
    logging.getLogger("absl").setLevel(logging.ERROR)
    stop: Stop = StopRequest()
    display = Display()
    try:
        config = parse_config()
        if isinstance(config, MeshConfig):
            if processes.is_launcher(config):
                return processes.launch(config.processes, module)
            processes.join(config)
        if jax.process_count() > 1:
            stop = processes.AgreedStop()
            display = Display(quiet=jax.process_index() > 0)
        run(config, display, stop)
    except Interrupted as interrupted:
        display.console.print(
            f"[yellow]Stopped.[/] {interrupted.precision} is saved after step "
            f"{interrupted.position}. Continue with: "
            f"{escape(resuming_command(module, target))}",
            soft_wrap=True,
        )
        return INTERRUPTED_STATUS
    except (SetupError, FloatingPointError) as error:
        # Reading a damaged checkpoint leaves other reads behind that fail later, when
        # nobody waits for them; their complaints would bury the message.
        sys.unraisablehook = lambda _: None
        console = Display(stderr=True).console
        console.print("[red]Error:[/]", escape(str(error)), soft_wrap=True)
        return 2
    return 0
