"""A report of `mpx.blame` and the ways to look at it."""

import dataclasses

from ._report import Content, Culprit
from ._text import text_of


@dataclasses.dataclass(frozen=True)
class BlameReport(Content):
    """What `mpx.blame` found; print it."""

    @property
    def first(self) -> Culprit | None:
        """The first value that went bad; None if nothing is bad, or none was found."""
        return self.culprits[0] if self.culprits else None

    def __str__(self) -> str:
        """The report as text, in 100 columns."""
        return text_of(self)
