"""What a program gets beside its operands: their slots, and the step's number."""

from collections.abc import Sequence
from typing import Any

import jax

from ._slots import Slots
from ._values import Value


class StateOperands:
    """What a program gets besides its operands.

    Attributes:
        arrays: What the program gets.
        form: All else that a rewritten program depends on.
    """

    def __init__(
        self, operands: Sequence[Value], *lengths: int, step: Any = None
    ) -> None:
        """Packs the slots of operands, and the number of the step.

        Args:
            operands: The operands.
            *lengths: The length of the scan that cuts them.
            step: The number of the training step; None if the program needs none.
        """
        self._slots = [v.slots for v in operands]
        self._lengths = lengths
        self.form = tuple(None if s is None else s.form for s in self._slots)
        packed = [
            {} if s is None else s.as_operands(bool(lengths)) for s in self._slots
        ]
        self.arrays, self._tree = jax.tree.flatten((packed, step))
        if step is not None:
            self.form += ("step",)

    def unpacked(self, arrays: Sequence[Any]) -> tuple[list[Slots | None], Any]:
        """The slots of the operands and the step, from what the program got."""
        packed, step = jax.tree.unflatten(self._tree, arrays)
        slots = [
            None if s is None else s.inside(own, self._lengths)
            for s, own in zip(self._slots, packed, strict=True)
        ]
        return slots, step
