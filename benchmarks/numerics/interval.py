"""A mean of few samples, and how far it can be trusted."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Interval:
    """A mean with its confidence interval, all in the unit of the samples."""

    mean: float
    low: float
    high: float

    def lies_within(self, limit: float) -> bool:
        return -limit <= self.low and self.high <= limit


def mean_interval(samples: Sequence[float], level: float = 0.95) -> Interval:
    r"""Student's t interval of a mean: $\bar d \pm t_{n-1} s / \sqrt n$.

    >>> mean_interval([1.0, 2.0, 3.0])
    Interval(mean=2.0, low=-0.48..., high=4.48...)

    Raises:
        ValueError: with fewer than two samples, there is no interval.
    """
    if len(samples) < 2:
        raise ValueError(
            "`mean_interval(samples)` needs at least two samples; got "
            f"{len(samples)}. Run more seeds."
        )
    from scipy.stats import t

    mean = statistics.fmean(samples)
    error = statistics.stdev(samples) / math.sqrt(len(samples))
    reach = float(t.ppf((1 + level) / 2, len(samples) - 1)) * error
    return Interval(mean, mean - reach, mean + reach)
