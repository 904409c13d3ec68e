"""Tables: the same rows for the terminal and for the documentation."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table as RichTable


@dataclasses.dataclass(frozen=True)
class Table:
    """A titled table; the first column is text, the others are right-aligned.

    Attributes:
        title: what the rows are, with the device in words.
        columns: their heads, or all of them in one text with bars between.
        rows: cells as text.
        notes: sentences below it.
    """

    title: str
    columns: Sequence[str] | str
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()

    def rich(self) -> RichTable:
        """For the terminal."""
        from rich.table import Table as RichTable  # not in every environment

        table = RichTable(
            title=self.title,
            title_justify="left",
            title_style="bold",
            caption="\n".join(self.notes) or None,
            caption_justify="left",
        )
        for index, column in enumerate(self.heads):
            table.add_column(column, justify="right" if index else "left")
        for row in self.rows:
            table.add_row(*row)
        return table

    def markdown(self) -> str:
        """For the documentation."""
        lines = [f"**{self.title}**", "", "| " + " | ".join(self.heads) + " |"]
        lines.append("|---" + "|--:" * (len(self.heads) - 1) + "|")
        lines += ["| " + " | ".join(row) + " |" for row in self.rows]
        for note in self.notes:
            lines += ["", note]
        return "\n".join(lines)

    @property
    def heads(self) -> Sequence[str]:
        """Of the columns."""
        is_text = isinstance(self.columns, str)
        return self.columns.split(" | ") if is_text else self.columns


@dataclasses.dataclass(frozen=True)
class Goal:
    """Something the benchmark must show.

    Attributes:
        text: what must hold, and what was measured.
        met: whether it holds.
    """

    text: str
    met: bool


def megabytes(count: float) -> str:
    """Bytes as text, in units of 10^6 bytes.

    >>> megabytes(1_425_124_352)
    '1425.1'
    """
    return f"{count / 1e6:.1f}"


def ratio(value: float) -> str:
    """A ratio as text.

    >>> ratio(1.6349)
    '1.63'
    """
    return f"{value:.2f}"


def signed_percent(share: float) -> str:
    """A share as text, with its sign.

    >>> signed_percent(0.0271), signed_percent(-0.001)
    ('+2.7%', '-0.1%')
    """
    return f"{100 * share:+.1f}%"
