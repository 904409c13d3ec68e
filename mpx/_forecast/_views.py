"""`Forecast`: what a forecast holds, with the ways to show it and to keep it."""

import dataclasses
import html
import json
import math
import os
from typing import Any

from .._counter import Roof
from .._report_files import document, framed, save_as
from .._rules import Rules
from ._picture import picture
from ._report import Constant, Content, Estimate, KernelGroup, Matmul
from ._rules import where_it_pays
from ._tables import Table, sentences, tables, text, versions_text

_FORMAT, _VERSION = "mpx forecast", 2


@dataclasses.dataclass(frozen=True, repr=False)
class Forecast(Content):
    """The result of `mpx.forecast`: an estimate for each target and precision.

    It prints as sentences and tables, and a notebook shows the page. Tables mark which
    numbers are counted and which are modelled, as do the fields of `estimates`.
    """

    def __str__(self) -> str:
        """Sentences and tables."""
        return text(self)

    __repr__ = __str__

    @property
    def sentences(self) -> list[str]:
        """Returns one sentence per target and precision, except the baseline."""
        return sentences(self)

    def where_it_pays(self, precision: str, target: str = "") -> Rules:
        """Returns rules that keep matmuls in half precision if quantizing is slower.

        A matmul stays in half precision if quantizing its operands takes longer than 8
        bits save in the three matmuls of forward and backward pass. Quantizing is
        assumed to move as many bytes per number as in this step.

        Args:
            precision: A precision of the report, with a recipe.
            target: A target of the report; the first by default.

        Returns:
            Rules for `rules=` of `mpx.autocast`, which print with the lines and shapes
            that go back to half precision. Empty if no matmul of the step loses.

        Raises:
            ValueError: The report has no such estimate, or it quantizes nothing; the
                target is unknown.
        """
        return where_it_pays(self, precision, target)

    def to_json(self) -> str:
        """Returns the report as JSON, which `from_json` reads."""
        data = {"format": _FORMAT, "version": _VERSION} | dataclasses.asdict(self)
        for one in data["estimates"]:
            if one["memory"] is None:  # JSON has no infinity
                one["roofline"], one["time"] = None, [None, None]
        return json.dumps(data, indent=1, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> "Forecast":
        """Returns the report from the JSON that `to_json` wrote.

        Raises:
            ValueError: The text is not a forecast, or one of another version of mpx.
        """
        data: dict[str, Any] = json.loads(text)
        found = (data.pop("format", None), data.pop("version", None))
        if found != (_FORMAT, _VERSION):
            raise ValueError(
                "`from_json(text)` needs a forecast that this version of mpx wrote "
                f"(format {_FORMAT!r}, version {_VERSION}); got {found}."
            )
        for one in data["estimates"]:
            one["top"] = tuple(KernelGroup(**group) for group in one["top"])
            one["matmuls"] = tuple(Matmul(**matmul) for matmul in one["matmuls"])
            if one["memory"] is None:
                one["roofline"], one["time"] = math.inf, (math.inf, math.inf)
        for one in data["roofs"].values():
            one["peaks"] = {int(bits): peak for bits, peak in one["peaks"].items()}
        data["estimates"] = [_made(Estimate, one) for one in data["estimates"]]
        data["constants"] = [Constant(**one) for one in data["constants"]]
        data["roofs"] = {k: _made(Roof, one) for k, one in data["roofs"].items()}
        return _made(cls, data)

    def to_html(self) -> str:
        """Returns the report as one page of HTML that needs no network."""
        says = [*self.sentences, *self.notes, versions_text(self)]
        return document(
            "mpx._forecast",
            f"{self.name}: forecast",
            says="\n".join(f"<p>{html.escape(one)}</p>" for one in says),
            picture=picture(self),
            tables="\n".join(map(_html, tables(self))),
        )

    def to_svg(self) -> str:
        """Returns the picture as SVG: memory by part, and the range of the time."""
        return picture(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the report: a page, JSON, text, or the picture.

        Args:
            path: Ends with `.html`, `.json`, `.txt` or `.svg`.

        Raises:
            ValueError: It has another ending.
        """
        writers = {".html": self.to_html, ".json": self.to_json, ".svg": self.to_svg}
        writers[".txt"] = self.__str__
        save_as(path, writers, "`Forecast.save(path)`")

    def _repr_html_(self) -> str:
        """What a notebook shows: the page, in a frame of its own."""
        return framed(self.to_html(), self.name, height=720)


def _made(kind: Any, kept: dict[str, Any]) -> Any:
    """A dataclass of what JSON kept; its lists were tuples."""
    return kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in kept.items()})


def _html(table: Table) -> str:
    def row(cells: tuple[str, ...], tag: str) -> str:
        made = (f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells)
        return f"<tr>{''.join(made)}</tr>"

    body = "\n".join([row(table.heads, "th"), *(row(one, "td") for one in table.rows)])
    name = "numbers" if table.texts == 0 else "texts"
    title = f"<h2>{html.escape(table.title)}</h2>"
    return (
        f'{title}\n<div class="scroll"><table class="{name}">\n{body}\n</table></div>'
    )
