"""What `mpx.blame` found: plain data."""

import dataclasses
import enum

from .._rules import Candidate, Rule
from ._badness import Range


class Verdict(enum.Enum):
    """The cause of a skipped step."""

    NOTHING = "nothing is bad"
    """The replay is finite."""
    SCALE = "scale"
    """At a loss scale of 1 the step is finite: the scale was too large."""
    PRECISION = "precision"
    """In float32 the step is finite."""
    DATA = "data or mathematics"
    """In float32 the step is bad, too."""


@dataclasses.dataclass(frozen=True)
class AtLine:
    """The condition `when` of a rule for the operations of one line."""

    line: str

    def __call__(self, operation: Candidate) -> bool:
        """Whether an operation comes from the line."""
        return operation.line.endswith(self.line)

    def __str__(self) -> str:
        """The condition as code."""
        return f'lambda operation: operation.line.endswith("{self.line}")'


@dataclasses.dataclass(frozen=True)
class Culprit:
    """A value that went bad and reached the result, with its operation."""

    primitive: str
    """The operation as it was written: `dot_general`, or `input` or `constant`."""
    computed: str
    """The operation whose result is bad: a cast for it, perhaps; else the same."""
    kind: str
    """`nan`, `inf` or `nan and inf`; `large` where that was asked for."""
    scope: str
    """The named scopes around it, as a path."""
    function: str
    """The functions of the user's code around it, as a path."""
    line: str
    """The line of the user's code: `model.py:41`."""
    code: str
    """The text of that line, if it can be read."""
    phase: str
    """`forward` if the loss depends on it, so that the function has it without a
    derivative, too; `recompute` where a checkpoint repeats such an operation; else
    `backward`."""
    gradient: str
    """In the backward pass `wgrad` for the gradient of a weight, else `dgrad`."""
    parameters: tuple[str, ...]
    """The weights among its operands, or whose gradient it is."""
    inside: tuple[str, ...]
    """What it stands in, the outermost first: `scan, turn 3 of 12`."""
    devices: tuple[int, ...]
    """The devices of a `shard_map` on which it is bad; empty outside of one."""
    operands: tuple[Range, ...]
    """What numbers its operands held."""
    results: tuple[Range, ...]
    """What numbers it made."""
    reason: str
    """What happened, in words."""
    made_by: str
    """Of a value that does not fit in a format the operation that made it, else ""."""
    made_at: str
    """The line of that operation."""

    @property
    def direction(self) -> str:
        """`forward`, `backward (wgrad)`, `backward (dgrad)` or `recompute`."""
        return f"{self.phase} ({self.gradient})" if self.gradient else self.phase


@dataclasses.dataclass(frozen=True)
class Content:
    """All that a report holds; `BlameReport` is it with the ways to look at it."""

    name: str
    """The name of the function."""
    verdict: Verdict
    """Why the step went bad."""
    places: tuple[str, ...]
    """What is bad of the step's results: `the loss`, paths of gradients."""
    culprits: tuple[Culprit, ...]
    """Where it began: the first one first, others that are independent of it."""
    loss_scale: float
    """The loss scale of the replay."""
    rule: Rule | None
    """The rule of the fewest FLOPs that cures it, where the verdict is `precision` and
    one was found."""
    rows: tuple[int, ...]
    """The rows of the batch that do it, each alone, where the verdict is `data`."""
    advice: str
    """What to do, in words."""
    untried_rows: int = 0
    """How many more rows may do it: they were not tried, as 200 runs were used up."""
