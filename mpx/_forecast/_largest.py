"""The largest batch that fits, by a search over compiled programs; and which pays."""

import math
from collections.abc import Callable

_CLOSE = 1.05
_BELOW = 0.98
_SLOW = 0.55
_FARTHEST = 64
_MOST = 12
_Points = dict[int, int | None]


def largest_batch(
    memory_of: Callable[[int], int | None],
    limit: int,
    batch: int,
    known: int | None,
    unit: int = 1,
) -> int:
    """The largest batch whose program needs at most `limit` bytes, to 5 %.

    A secant method: each program is compiled just below the batch at which the line
    through two others meets the limit, and at last 5 % above one that fits. Memory is
    not linear near the limit, where XLA recomputes more to save some. So if a program
    leaves more than half of the interval, the next one halves it.

    Args:
        memory_of: Bytes of the program of a batch; None where it does not fit.
        limit: Bytes that there are.
        batch: One whose program is known.
        known: Its bytes; None where it does not fit.
        unit: What a batch must be a multiple of.

    Returns:
        The batch; 0 where not even one unit fits. After 12 programs that were not
        enough, the largest that is known to fit.
    """
    points: _Points = {batch: known}

    def fits(size: int) -> bool:
        if size not in points:
            points[size] = memory_of(size)
        found = points[size]
        return found is not None and found <= limit

    low, high = (batch, 0) if fits(batch) else (0, batch)
    halve = False
    for _ in range(_MOST):
        if high and (high - low <= unit or high <= low * _CLOSE):
            break
        guess = None if halve else _meeting(points, limit, low, high)
        size = _next(guess, low, high, unit)
        before = low, high
        low, high = (size, high) if fits(size) else (low, size)
        # The line of a single program may be far off: it gets a second try.
        halve = len(points) > 2 and _is_slow(before, (low, high))
    return low


def _is_slow(before: tuple[int, int], after: tuple[int, int]) -> bool:
    """Whether clearly more than half of the interval between the ends is left."""
    (old_low, old_high), (low, high) = before, after
    if not old_low or not old_high:
        return bool(old_high) and not low and high > old_high * _SLOW
    return math.log(high / low) > math.log(old_high / old_low) * _SLOW


def _next(guess: float | None, low: int, high: int, unit: int) -> int:
    """The next batch to compile: near the guess, else in the middle."""
    is_last = high <= low * _CLOSE**2  # what lies between ends the search
    if guess is None or (high and (is_last or guess >= high)):
        size = math.sqrt(low * high) if low else high / 2
    elif guess <= low * _CLOSE:
        size = low * _CLOSE  # one that does not fit ends the search
    elif high and guess >= high / _CLOSE:
        size = math.ceil(high / _CLOSE) + unit - 1  # one that fits does
    else:
        size = guess * _BELOW if guess * (1 - _BELOW) >= unit else guess
        size = max(size, high / 8) if not low else min(size, _FARTHEST * low)
    size = max(int(size) // unit * unit, low + unit)
    return min(size, high - unit) if high else size


def _meeting(points: _Points, limit: int, low: int, high: int) -> float | None:
    """Where the line through two programs meets the limit; None if that is unknown.

    A single program has the line through the origin.
    """
    known = sorted((b, m) for b, m in points.items() if m is not None)
    below = [one for one in known if one[0] <= low]
    above = [one for one in known if high and one[0] >= high]
    if not known:
        return None
    start, *others = above[:2] if not below else [below[-1], *(above[:1] or below[:-1])]
    slopes = [(m - start[1]) / (b - start[0]) for b, m in others]
    slopes = slopes or [start[1] / start[0]]
    # A flat piece of the curve says nothing of what comes after it.
    slope = max(slopes[-1], max(slopes) / 2)
    if slope > 0:
        return start[0] + (limit - start[1]) / slope
    return None if above else math.inf


def pays_from(ours: dict[int, float], base: dict[int, float]) -> int | None:
    """The batch from which a step is faster than the baseline; None if none is.

    Times grow about linearly with the batch, so lines through two of each are compared.

    Args:
        ours: Times by batch.
        base: Those of the baseline.
    """
    if len(ours) < 2 or len(base) < 2:
        return None
    (start, slope), (base_start, base_slope) = map(_line, (ours, base))
    if slope >= base_slope:
        return None
    return max(1, int((start - base_start) / (base_slope - slope)) + 1)


def _line(points: dict[int, float]) -> tuple[float, float]:
    (first, less), *_, (last, more) = sorted(points.items())
    slope = (more - less) / (last - first)
    return less - slope * first, slope
