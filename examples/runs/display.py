"""What a person sees on the terminal: a progress bar per precision and a table."""

import contextlib
import dataclasses
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

from ..precisions import Precision
from .config import RunConfig
from .folder import Result, Row

Show = Callable[[Row, float], None]
"""Shows the last row of a window of steps, and the seconds that one step took."""
# Where there is no terminal, progress comes as so many lines.
LINES = 6
FILE_WIDTH = 100
UNKNOWN = "unknown"

ON_A_CPU = (
    "This was a CPU{ratios}. Some have units for bfloat16 (`python -m mpx doctor`), "
    "which FP8 is emulated by; none has them for float16. Step memory is that of the "
    "programs compiled for this CPU, not what a GPU or TPU needs."
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Labels:
    """The words in which an example speaks of its run."""

    title: str
    """Model and data: `ViT on handwritten digits`."""
    data: str
    """How much data there is."""
    notes: tuple[str, ...] = ()
    """What to know about the data that was found."""
    items: str
    """What a step sees: `images`."""
    items_per_step: int
    passes: float | None = None
    """How often the run sees every item of the data; None where that is random."""
    held_out: str
    """What is held out: `images`."""
    score: str
    """The heading of the column of the score, in two lines."""
    shows_bits: bool = False
    """Whether the score is the loss in bits, not the accuracy."""

    def table_score(self, result: Result) -> str:
        """The score as the table has it."""
        if self.shows_bits:
            return f"{result.test_loss / math.log(2):.3f}"
        return f"{result.test_accuracy:.2%}"

    def legend(self, result: Result) -> str:
        """The score as the legend of the picture has it."""
        if self.shows_bits:
            bits = result.test_loss / math.log(2)
            return f"{bits:.2f} bits per byte on held-out {self.held_out}"
        return f"{result.test_accuracy:.1%} on held-out {self.held_out}"


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
        self.labels: Labels | None = None

    def introduce(self, config: RunConfig, labels: Labels) -> None:
        """Says what is going to happen; the words are those of what comes."""
        self.labels = labels
        devices = jax.devices()
        sizes = dataclasses.asdict(config.model).items()
        model = ", ".join(f"{name} {size}" for name, size in sizes)
        run = f"{config.steps:,} steps of {labels.items_per_step:,} {labels.items}"
        if labels.passes is not None:
            run += f" ({labels.passes:.3g} passes)"
        self.console.print(
            f"[bold]{labels.title}[/]: {labels.data}\n"
            f"[dim]{model} · {run} · {len(devices)} x {devices[0].device_kind}[/]"
        )
        for note in labels.notes:
            self.console.print(f"[yellow]Note:[/] {note}")

    @contextlib.contextmanager
    def training(
        self, precision: Precision, steps: int, position: int
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
            precision, total=steps, completed=position, metrics="compiling"
        )
        next_line = position

        def show(row: Row, seconds: float) -> None:
            nonlocal next_line
            if self.labels is None:
                return
            labels = self.labels
            metrics = describe_row(row, labels.items_per_step / seconds, labels.items)
            progress.update(task, completed=row.step, metrics=metrics)
            is_last = row.step == steps
            if not self.console.is_terminal and (row.step >= next_line or is_last):
                next_line = row.step + math.ceil(steps / LINES)
                step = f"{row.step}/{steps}"
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
        if jax.local_devices()[0].platform == "cpu":
            text = ON_A_CPU.format(ratios=describe_ratios(results))
            self.console.print(f"[dim]{text}[/]")


def describe_ratios(results: Iterable[Result]) -> str:
    """The times of steps relative to float32, as they were measured, in words."""
    seconds = {r.precision: r.step_seconds for r in results if r.step_seconds}
    full = seconds.pop("float32", None)
    if full is None or not seconds:
        return ""
    ratios = ", ".join(f"{name} {took / full:.2f}" for name, took in seconds.items())
    return f", and a step took, relative to float32: {ratios}"


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
