"""What a probe is: it is asked of the values of a program as they are computed.

`probe.py` runs a program with one.
"""

import abc
import contextlib
import dataclasses
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, TypeAlias

from jax.extend.core import JaxprEqn
from jaxtyping import PyTree

from .._jax_compat import bind_equation
from .._typing import AnyArray
from .flow import Location

Records: TypeAlias = dict[Hashable, PyTree]
"""Trees of arrays by a name that is the probe's own."""


@dataclasses.dataclass(frozen=True)
class Tagged:
    """An array on its way through a program, and what a probe knows of it."""

    array: AnyArray
    tag: Any


class Probe(abc.ABC):
    """What is asked of the values of a program. One probe serves one trace."""

    @abc.abstractmethod
    def constant(self, array: object) -> object:
        """The tag of a literal, or of an array that the program holds."""

    @abc.abstractmethod
    def transfer(
        self, equation: JaxprEqn, place: Location, operands: Sequence[Tagged]
    ) -> Sequence[object]:
        """The tags of the results of an operation."""

    @abc.abstractmethod
    def observe(
        self,
        equation: JaxprEqn,
        place: Location,
        operands: Sequence[Tagged],
        results: Sequence[Tagged],
    ) -> Records:
        """The records of an operation."""

    def compute(self, equation: JaxprEqn, arrays: Sequence[AnyArray]) -> list[AnyArray]:
        """The results of an operation; those of its primitive unless overridden."""
        return bind_equation(equation, *arrays)

    def turns(self, equation: JaxprEqn) -> int | None:
        """At most how often a `while` loop turns, to stack its records; None: joins."""
        return None

    def meet(self, values: Sequence[Tagged]) -> None:
        """Is told what a program begins with, and what its equations give."""
        del values

    def keep(self, records: Records, found: Records) -> None:
        """Takes what an equation recorded to the records before it."""
        records |= found

    def inside(self, *, is_apart: bool = False) -> contextlib.AbstractContextManager:
        """Around a program within, whose arrays are not to be used outside.

        Args:
            is_apart: Whether those of outside are not to be used in it, either.
        """
        del is_apart
        return contextlib.nullcontext()

    def carried(self, equation: JaxprEqn, place: Location, tag: Any) -> object:
        """The tag in a turn of a loop of what it carries and begins with."""
        return tag

    def cut(self, tag: Any) -> object:
        """The tag of a part that a turn of a scan takes of what is stacked."""
        return tag

    def stacked(self, tag: Any) -> object:
        """The tag of what the turns of a scan give, stacked."""
        return tag

    def stack(self, key: Hashable, axis: str) -> None:
        """Is told that a record gets a new first axis: `turn` or `device`."""
        del key, axis

    def join(self, before: PyTree, now: PyTree) -> PyTree:
        """Joins the records of two turns of a `while` loop; None leaves them out."""
        return None

    def chosen(self, tags: Sequence[Any]) -> object:
        """The tag of a result of a conditional, of those that its branches give."""
        return tags[0]

    @contextlib.contextmanager
    def branches(self) -> Iterator[Callable[[], None]]:
        """Around branches of which one is taken.

        Yields:
            What is called before each of them.
        """
        yield lambda: None
