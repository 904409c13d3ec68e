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
    """In float32 the step is non-finite, too."""


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
    """The operation whose result is bad: the same, or a cast inserted for it."""
    kind: str
    """`nan`, `inf` or `nan and inf`; `large` if `above` is set."""
    scope: str
    """The named scopes around it, as a path."""
    function: str
    """The functions of the user's code around it, as a path."""
    line: str
    """The line of the user's code: `model.py:41`."""
    code: str
    """The text of that line, if it can be read."""
    phase: str
    """`forward` if the loss depends on it, so that it also exists without a derivative;
    `recompute` if a checkpoint repeats such an operation; else `backward`."""
    gradient: str
    """In the backward pass, `wgrad` for the gradient of a weight, else `dgrad`."""
    parameters: tuple[str, ...]
    """The weights among its operands, or those whose gradient it is."""
    inside: tuple[str, ...]
    """The loops and calls around it, outermost first: `scan, iteration 3 of 12`."""
    devices: tuple[int, ...]
    """The devices of a `shard_map` on which it is bad; empty outside of one."""
    operands: tuple[Range, ...]
    """The ranges of its operands."""
    results: tuple[Range, ...]
    """The ranges of its results."""
    reason: str
    """The cause as text."""
    made_by: str
    """The operation that made what this one cannot take: a number that overflows a
    format, a rounded zero, the infinity of a mask; else ""."""
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
    """The cause of the skipped step."""
    places: tuple[str, ...]
    """The non-finite results of the step: `the loss`, paths of gradients."""
    culprits: tuple[Culprit, ...]
    """The first bad values: the earliest first, then others independent of it."""
    loss_scale: float
    """The loss scale of the replay."""
    rule: Rule | None
    """The rule of the fewest FLOPs that fixes it, if the verdict is `precision` and one
    for a part of the function was found."""
    rows: tuple[int, ...]
    """The rows of the batch that cause it, each alone, if the verdict is `data`."""
    advice: str
    """The advice as text."""
    untried_rows: int = 0
    """The number of rows not tried, because 200 runs were used up."""
