"""How the slots of a program's operands get into the program."""

from collections.abc import Sequence
from typing import Any

import jax

from ._slots import Slots
from ._values import Value


class Luggage:
    """The slots of a program's operands, which it gets besides them.

    Attributes:
        arrays: What the program gets.
        form: All else that a rewritten program depends on.
    """

    def __init__(self, operands: Sequence[Value], *lengths: int) -> None:
        """Packs the slots; `lengths` is that of the scan that cuts the operands."""
        self._slots = [v.slots for v in operands]
        self._lengths = lengths
        self.form = tuple(None if s is None else s.form for s in self._slots)
        packed = [
            {} if s is None else s.handed_over(bool(lengths)) for s in self._slots
        ]
        self.arrays, self._tree = jax.tree.flatten(packed)

    def unpacked(self, arrays: Sequence[Any]) -> list[Slots | None]:
        """The slots of the operands inside, from what the program got."""
        packed = jax.tree.unflatten(self._tree, arrays)
        return [
            None if s is None else s.inside(own, self._lengths)
            for s, own in zip(self._slots, packed, strict=True)
        ]
