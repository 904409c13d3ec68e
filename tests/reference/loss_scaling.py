"""Dynamic loss scaling in plain Python, one branch for each rule of the specification.

Scales are Python floats. The sequences that the tests make are products of powers of
two, which float64 and float32 hold exactly, so that comparisons are for equality.
"""

import dataclasses


@dataclasses.dataclass
class Oracle:
    """The state of dynamic loss scaling; `step` changes it in place."""

    scale: float
    floor: float
    cap: float
    growth: float
    backoff: float
    period: int
    hysteresis: int = 1
    good: int = 0
    tolerated: int = 0
    steps: int = 0
    skipped: int = 0
    skipped_in_a_row: int = 0
    last_finite: int = 0
    floored: int = 0
    bad_losses: int = 0

    def step(self, is_finite: bool, is_loss_finite: bool = True) -> float:
        """Advances by one training step and returns the new scale."""
        self.steps += 1
        if is_finite:
            self._good_step()
        else:
            self.skipped += 1
            self.skipped_in_a_row += 1
            if is_loss_finite:
                self._bad_step()
            else:
                self.bad_losses += 1  # which says nothing about the scale
        return self.scale

    def _good_step(self) -> None:
        self.last_finite = self.steps
        self.skipped_in_a_row = 0
        self.floored = 0
        if self.tolerated:
            # This step refills the tolerance and does nothing else.
            self.tolerated = 0
            self.good = 0
            return
        self.good += 1
        if self.good >= self.period:
            self.scale = min(self.scale * self.growth, self.cap)
            self.good = 0

    def _bad_step(self) -> None:
        self.good = 0
        if self.tolerated < self.hysteresis - 1:
            self.tolerated += 1
            self.floored = 0
            return
        self.floored = self.floored + 1 if self.scale <= self.floor else 0
        self.scale = max(self.scale * self.backoff, self.floor)
