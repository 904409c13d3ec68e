"""What programs get besides operands: slots, stored weights, facts of the step."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
from jaxtyping import Array

from .._quantize import QuantizedArray
from ._slots import Slots


class StepValues(NamedTuple):
    """What a program is told of the training step.

    Attributes:
        number: The number of the step; None if the program needs none.
        scale: The scale of the loss; None if the program needs none.
    """

    number: Array | None = None
    scale: Array | None = None


NOTHING_KNOWN = StepValues()


class StateOperands:
    """What a program gets besides its operands.

    Their slots, the 8 bits that weights are stored in, and what is known of the step.

    Attributes:
        arrays: What the program gets.
        form: All else that a rewritten program depends on.
    """

    def __init__(
        self,
        slots: Sequence[Slots | None],
        *lengths: int,
        stored: Sequence[QuantizedArray | None] = (),
        step: StepValues = NOTHING_KNOWN,
    ) -> None:
        """Packs the slots of operands, what they are stored as, and the step.

        Args:
            slots: Those of each operand.
            *lengths: The length of the scan that slices them.
            stored: What each operand is stored as; nothing for none.
            step: What is known of the training step.
        """
        self._slots = list(slots)
        self._lengths = lengths
        self.form = tuple(None if s is None else s.form for s in self._slots)
        packed = [
            {} if s is None else s.as_operands(bool(lengths)) for s in self._slots
        ]
        self._stored = list(stored) or [None] * len(self._slots)
        # A scan slices the payload; the one scale is for all of its turns.
        given = [x.payload if x and lengths else x for x in self._stored]
        self.arrays, self._tree = jax.tree.flatten((packed, given, step))
        pairs = zip(step._fields, step, strict=True)
        self.form += tuple(name for name, x in pairs if x is not None)
        if any(self._stored):
            self.form += (jax.tree.structure(self._stored),)

    def unpacked(
        self, arrays: Sequence[Array]
    ) -> tuple[list[Slots | None], list[QuantizedArray | None], StepValues]:
        """The slots of each operand, what each is stored as, and facts of the step."""
        packed, given, step = jax.tree.unflatten(self._tree, arrays)
        slots = [
            None if s is None else s.inside(own, self._lengths)
            for s, own in zip(self._slots, packed, strict=True)
        ]
        if self._lengths:
            given = [
                None if x is None else dataclasses.replace(x, payload=payload)
                for x, payload in zip(self._stored, given, strict=True)
            ]
        return slots, given, step
