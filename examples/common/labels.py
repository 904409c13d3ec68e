"""The words in which an example speaks of its task."""

import dataclasses
import math

from .record import Result


@dataclasses.dataclass(frozen=True)
class Labels:
    """What stands in titles, tables and legends."""

    title: str
    """Model and data: `ViT on handwritten digits`."""
    items: str
    """What a step sees: `images`."""
    score: str
    """The heading of the column of the score, in two lines."""
    held_out: str
    """What is held out: `images`."""
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
