"""`Report`: what a report holds, with the ways to show it and to keep it."""

import dataclasses
import json
import os
from collections.abc import Iterator
from typing import Any

from .._report_files import framed, save_as
from ._page import page
from ._report import Content, Island, Operation, Totals
from ._table import rich_text, show, text

_FORMAT = "mpx report"
_VERSION = 3


@dataclasses.dataclass(frozen=True, repr=False)
class Report(Content):
    """The result of `mpx.explain`: every operation of a program, and totals.

    It prints as a sentence, the totals, and a table 100 columns wide: findings first,
    then the most expensive operations, equal ones in one line. `save` writes all of it;
    a notebook shows the page.

    Examples:
        >>> import jax.numpy as jnp, mpx
        >>> x = jnp.ones((8, 8), jnp.bfloat16)
        >>> report = mpx.explain(lambda x: x @ x)(x)
        >>> report.totals.half_flops_share
        1.0
        >>> report.operations[0].inputs
        ('bfloat16[8,8]', 'bfloat16[8,8]')
    """

    @property
    def findings(self) -> tuple[Operation, ...]:
        """The operations that deserve attention, those of most FLOPs first."""
        found = [operation for operation in self.operations if operation.finding]
        return tuple(sorted(found, key=lambda o: -(o.flops or 0)))

    def table(self, limit: int | None = 30, width: int | None = 100) -> str:
        """Returns the report as text.

        Args:
            limit: The number of operation lines, findings first and then those of most
                FLOPs; None for all, in program order.
            width: The maximal width of lines. Below 180 the columns of bytes, runs,
                types, places and weights are omitted. None for all columns at full
                width.

        Returns:
            A sentence, the totals and the operations, one line each, equal ones
            together; the reason of a finding is below its line.
        """
        return text(self, limit, width)

    def show(self, limit: int | None = 30, width: int | None = None) -> None:
        """Prints the report, in colours where rich is installed.

        Args:
            limit: As in `table`.
            width: As in `table`; None for the terminal's width.
        """
        show(self, limit, width)

    def to_json(self) -> str:
        """Returns the report as JSON, which `mpx.reports.Report.from_json` reads."""
        data = {"format": _FORMAT, "version": _VERSION} | dataclasses.asdict(self)
        return json.dumps(data, indent=1)

    @classmethod
    def from_json(cls, text: str) -> "Report":
        """Returns the report from the JSON that `to_json` wrote.

        Args:
            text: The JSON.

        Returns:
            An equal report.

        Raises:
            ValueError: The text is not a report, or one of another version of mpx.
        """
        data = json.loads(text)
        found = (
            (data.get("format"), data.get("version")) if isinstance(data, dict) else 0
        )
        if found != (_FORMAT, _VERSION):
            raise ValueError(
                "`mpx.reports.Report.from_json(text)` needs a report that this "
                f"version of mpx wrote (format {_FORMAT!r}, version {_VERSION}); got "
                f"{found}. Make a new one with `mpx.explain`."
            )
        operations = tuple(_from_dict(Operation, entry) for entry in data["operations"])
        totals = _from_dict(Totals, data["totals"])
        islands = tuple(_from_dict(Island, entry) for entry in data["islands"])
        unused_rules = tuple(data["unused_rules"])
        return cls(data["name"], operations, totals, unused_rules, islands)

    def to_html(self) -> str:
        """Returns the report as one page of HTML that needs no network."""
        return page(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the report to a file: a page, JSON, or the whole table as text.

        Args:
            path: Ends with `.html`, `.json` or `.txt`.

        Raises:
            ValueError: It has another ending.
        """
        writers = {
            ".html": self.to_html,
            ".json": self.to_json,
            ".txt": lambda: self.table(limit=None, width=None),
        }
        save_as(path, writers, "`mpx.reports.Report.save(path)`")

    def __str__(self) -> str:
        """The totals and the most expensive operations."""
        return self.table()

    __repr__ = __str__

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        """What rich prints, with colours, as wide as it has room."""
        yield rich_text(self, 30, options.max_width)

    def _repr_html_(self) -> str:
        """What a notebook shows: the page, in a frame of its own."""
        return framed(page(self), self.name, height=720)


def _from_dict(kind: type[Any], entry: dict[str, Any]) -> Any:
    """Makes a dataclass of what JSON kept; its lists were tuples."""
    return kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in entry.items()})
