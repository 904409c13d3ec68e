"""A report of `mpx.blame` and the ways to look at it."""

import dataclasses
import json
import math
import os
from typing import Any

from .._report_files import framed, save_as
from ._page import page
from ._report import Content, Culprit
from ._text import rule_text, text_of


@dataclasses.dataclass(frozen=True)
class BlameReport(Content):
    """The result of `mpx.blame`; print it, or `save` it as a page."""

    @property
    def first(self) -> Culprit | None:
        """The first value that went bad; None if there is none, or none was found."""
        return self.culprits[0] if self.culprits else None

    def to_json(self) -> str:
        """Returns the report as JSON, with null for non-finite numbers."""
        data = {"format": "mpx blame", "version": 1} | dataclasses.asdict(self)
        data |= {
            "verdict": self.verdict.value,
            "rule": None if self.rule is None else rule_text(self.rule),
        }
        return json.dumps(_plain(data), indent=1)

    def to_html(self) -> str:
        """Returns the report as one page of HTML that needs no network."""
        return page(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the report to a file: a page, JSON, or text.

        Args:
            path: Ends with `.html`, `.json` or `.txt`.

        Raises:
            ValueError: It has another ending.
        """
        writers = {".html": self.to_html, ".json": self.to_json, ".txt": self.__str__}
        save_as(path, writers, "`mpx.reports.BlameReport.save(path)`")

    def __str__(self) -> str:
        """The report as text, in 100 columns."""
        return text_of(self)

    def _repr_html_(self) -> str:
        """What a notebook shows: the page, in a frame of its own."""
        return framed(page(self), self.name, height=480)


def _plain(value: Any) -> Any:
    """What JSON can hold of a tree."""
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
