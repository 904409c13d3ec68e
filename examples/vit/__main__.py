"""The command line: `python -m examples.vit`."""

import os
import shlex
import signal
import sys
from types import FrameType

from rich.markup import escape

from .config import Config, parse_config
from .datasets import load_data
from .display import Display
from .errors import SetupError
from .plot import plot_run
from .record import RunFolder
from .train import Interrupted, train

# The exit status of a program that Ctrl-C ended, as shells have it.
INTERRUPTED_STATUS = 128 + signal.SIGINT


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


def run(config: Config, display: Display, stop: StopRequest) -> None:
    """Trains every precision, then writes and prints what came out."""
    data = load_data(config)
    folder = RunFolder(config)
    display.introduce(config, data)
    for precision in config.precisions:
        result, _ = train(
            config,
            precision,
            data,
            folder=folder,
            display=display,
            should_stop=lambda: stop.requested,
        )
        folder.add_result(result)
    folder.write_results(finished=True)
    plot_run(folder, data.name)
    display.summarize(folder.results.values())
    display.console.print(
        f"Picture {folder.picture_path}, metrics {folder.metrics_path}, "
        f"results {folder.results_path}",
        soft_wrap=True,
    )


def resuming_command() -> str:
    """What to type to continue this run."""
    options = [a for a in sys.argv[1:] if a not in ("--resume", "--overwrite")]
    arguments = shlex.join([*options, "--resume"])
    if "MAKELEVEL" in os.environ:
        return f"make train ARGS={shlex.quote(arguments)}"
    return f"python -m examples.vit {arguments}"


def main() -> int:
    """Runs the program; returns its exit status."""
    stop = StopRequest()
    display = Display()
    try:
        run(parse_config(), display, stop)
    except Interrupted as interrupted:
        display.console.print(
            f"[yellow]Stopped.[/] {interrupted.precision} is saved after step "
            f"{interrupted.position}. Continue with: {escape(resuming_command())}",
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


if __name__ == "__main__":
    sys.exit(main())
