"""What a person sees on the terminal: a progress bar per precision and a table."""

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator

import jax
import rich.box
from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from .config import Precision, RunConfig
from .labels import Labels
from .record import Result, Row

Show = Callable[[Row, float], None]
# Where there is no terminal, progress comes as so many lines.
LINES = 6
FILE_WIDTH = 100
UNKNOWN = "unknown"


class TwoLineProgress(Progress):
    """A bar, and below it the metrics: both fit into 80 columns."""

    def get_renderables(self) -> Iterable[RenderableType]:
        yield self.make_tasks_table(self.tasks)
        for task in self.tasks:
            yield Text(f"{'':<9}{task.fields['metrics']}")


class Display:
    """Prints with rich; on a terminal in place, into a file line by line."""

    def __init__(self, quiet: bool = False, stderr: bool = False):
        self.console = Console(quiet=quiet, stderr=stderr, highlight=False)
        if not self.console.is_terminal:
            self.console.width = max(self.console.width, FILE_WIDTH)

    def introduce(
        self, labels: Labels, data: str, details: str, notes: Iterable[str] = ()
    ) -> None:
        """Says what is going to happen."""
        devices = jax.local_devices()
        self.console.print(
            f"[bold]{labels.title}[/]: {data}\n"
            f"[dim]{details} · {len(devices)} x {devices[0].device_kind}[/]"
        )
        for note in notes:
            self.console.print(f"[yellow]Note:[/] {note}")

    @contextlib.contextmanager
    def training(
        self, precision: Precision, config: RunConfig, labels: Labels, position: int
    ) -> Iterator[Show]:
        """Shows the progress of one precision; call what it gives at every look."""
        progress = TwoLineProgress(
            TextColumn(f"[bold]{precision:<8}[/]"),
            BarColumn(bar_width=40),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        task = progress.add_task(
            precision, total=config.steps, completed=position, metrics="compiling"
        )
        next_line = position

        def show(row: Row, items_per_second: float) -> None:
            nonlocal next_line
            metrics = describe_row(row, items_per_second, labels.items)
            progress.update(task, completed=row.step, metrics=metrics)
            is_last = row.step == config.steps
            if not self.console.is_terminal and (row.step >= next_line or is_last):
                next_line = row.step + math.ceil(config.steps / LINES)
                step = f"{row.step}/{config.steps}"
                self.console.print(f"{precision:<8} {step:>11} {metrics}")

        with progress:
            yield show

    def summarize(self, results: Iterable[Result], labels: Labels) -> None:
        """Prints the table."""
        table = Table(
            title="Same data, same initial model",
            title_justify="left",
            title_style="bold",
            box=rich.box.SIMPLE_HEAD,
        )
        table.add_column("precision", no_wrap=True)
        for heading in (
            labels.score,
            "final\nloss",
            "skipped\nsteps",
            "parameters",
            "step\nmemory",
            "step\ntime",
        ):
            table.add_column(heading, justify="right", no_wrap=True)
        for result in results:
            table.add_row(
                result.precision,
                labels.table_score(result),
                UNKNOWN if result.final_loss is None else f"{result.final_loss:.4f}",
                f"{result.skipped} of {result.steps:,}",
                f"{result.parameters:,}",
                describe_bytes(result.step_bytes),
                describe_seconds(result.step_seconds),
            )
        self.console.print(table)


def describe_row(row: Row, items_per_second: float, items: str) -> str:
    """The metrics of a step in one line."""
    return (
        f"loss {row.loss:6.4f}  accuracy {row.accuracy:6.1%}  "
        f"scale {describe_scale(row.loss_scale):>4}  skipped {row.skipped:>2}  "
        f"{items_per_second:7,.0f} {items}/s"
    )


def describe_scale(scale: float) -> str:
    """A power of two as one, any other number as it is."""
    exponent = math.log2(scale)
    return f"2^{exponent:.0f}" if exponent.is_integer() and exponent else f"{scale:g}"


def describe_bytes(count: int | None) -> str:
    """Bytes for people."""
    if count is None:
        return UNKNOWN
    for unit, size in (("GB", 1e9), ("MB", 1e6)):
        if count >= size:
            return f"{count / size:,.1f} {unit}"
    return f"{count / 1e3:,.1f} kB"


def describe_seconds(seconds: float | None) -> str:
    """The duration of a step for people."""
    return UNKNOWN if seconds is None else f"{seconds * 1e3:,.1f} ms"
