"""The largest batch that fits, by bisection on compiled programs; and which pays."""

from collections.abc import Callable

_CLOSE = 1.05
_MOST = 10


def largest_batch(
    memory_of: Callable[[int], int | None],
    limit: int,
    batch: int,
    known: int | None,
    unit: int = 1,
) -> int:
    """The largest batch whose program needs at most `limit` bytes, to 5 %.

    Memory grows about linearly with the batch, so each program that is compiled is at
    the batch at which the line through two others meets the limit.

    Args:
        memory_of: Bytes of the program of a batch; None where it does not fit.
        limit: Bytes that there are.
        batch: One whose program is known.
        known: Its bytes; None where it does not fit.
        unit: What a batch must be a multiple of.

    Returns:
        The batch; 0 where not even one unit fits.
    """
    points: dict[int, int | None] = {batch: known}

    def fits(size: int) -> bool:
        if size not in points:
            points[size] = memory_of(size)
        found = points[size]
        return found is not None and found <= limit

    low, high = (batch, 0) if fits(batch) else (0, batch)
    for _ in range(_MOST):
        if high and (high - low <= unit or high <= low * _CLOSE):
            break
        size = _next(points, limit, low, high, unit)
        if fits(size):
            low = size
        else:
            high = size
    return low


def _next(
    points: dict[int, int | None], limit: int, low: int, high: int, unit: int
) -> int:
    """Where the line through the largest known programs meets the limit."""
    known = sorted((b, m) for b, m in points.items() if m is not None)
    guess = 2 * low if not high else (low + high) // 2
    if len(known) > 1:
        (first, less), (second, more) = known[-2:] if not high else known[:2]
        if more > less:
            guess = first + (limit - less) * (second - first) // (more - less)
    # A little inside of the open interval, so that each program tells something.
    guess = max(guess // unit * unit, low + max(unit, low // 40 // unit * unit))
    return min(guess, high - unit) if high else min(guess, 64 * max(low, unit))


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
