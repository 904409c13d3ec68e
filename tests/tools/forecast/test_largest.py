"""The largest batch, and the batch from which a precision pays."""

import pytest

from mpx._tools._forecast._forecast import largest_batch, pays_from

LIMIT = 84_978_434_048  # of an H100
WEIGHTS, ROW = 1_400_000_000, 252_000_000


def linear(batch):
    return WEIGHTS + ROW * batch


def heavy(batch):
    """Weights take most of the memory."""
    return 70_000_000_000 + ROW // 4 * batch


def floor(batch):
    """XLA recomputes more above 60 GB, as long as that saves anything."""
    return min(linear(batch), max(60_000_000_000, int(0.8 * linear(batch))))


def floor_at_the_limit(batch):
    return min(linear(batch), max(LIMIT - 10, linear(batch) - 8 * ROW))


def jump(batch):
    return linear(batch) + (20_000_000_000 if batch > 250 else 0)


def jump_down(batch):
    """Another algorithm for large batches."""
    return linear(batch) - (15_000_000_000 if batch > 100 else 0)


def concave(batch):
    return WEIGHTS + int(4_000_000_000 * batch**0.5)


def convex(batch):
    return WEIGHTS + ROW * batch // 4 + 900_000 * batch**2


def steps(batch):
    return WEIGHTS + 64 * ROW * -(-batch // 64)


def fails(batch):
    """The compiler refuses what is far too large."""
    return linear(batch) if linear(batch) < 1.01 * LIMIT else None


def refuses(batch):
    """The compiler refuses whatever does not fit."""
    return linear(batch) if linear(batch) <= LIMIT else None


# The most programs that a search may compile, from any start that fits.
CURVES = {linear: 3, heavy: 4, floor: 5, floor_at_the_limit: 3, jump_down: 5}
CURVES |= {fails: 3, refuses: 3}
# Steeper bends than any that XLA makes.
CURVES |= {steps: 6, concave: 6, jump: 7, convex: 8}


def search(curve, start, limit=LIMIT, unit=1):
    asked = []

    def memory(batch):
        asked.append(batch)
        return curve(batch)

    return largest_batch(memory, limit, start, curve(start), unit), asked


def is_within(found, curve, limit=LIMIT, unit=1):
    """Whether a batch fits, and one 5 % above, or one unit, does not."""

    def fits(batch):
        memory = curve(batch)
        return memory is not None and memory <= limit

    return (not found or fits(found)) and not fits(max(int(found * 1.05), found + unit))


@pytest.mark.parametrize("start", [1, 8, 64, 256, 500, 3000])
@pytest.mark.parametrize("curve", CURVES)
def test_few_programs_whatever_the_curve(curve, start):
    found, asked = search(curve, start)
    assert is_within(found, curve)
    if start >= 500:  # a batch that does not fit
        assert len(asked) <= 7, asked
        return
    assert len(asked) <= CURVES[curve], asked
    assert len(set(asked)) == len(asked) and start not in asked


@pytest.mark.parametrize("start", [1, 8, 96, 100, 5000])
@pytest.mark.parametrize("most", [0, 1, 7, 97, 1000, 30_000])
def test_small_and_large_answers(start, most):
    found, asked = search(lambda b: 1000 + 10 * b, start, 1000 + 10 * most)
    assert most / 1.05 - 1 <= found <= most
    assert len(asked) <= 5


def test_units_refused_programs_and_memory_that_does_not_change():
    found, asked = search(lambda batch: batch, 8, 1003, unit=8)
    assert not any(size % 8 for size in (found, *asked))
    assert 1003 / 1.05 - 8 <= found <= 1003
    found, asked = search(lambda b: b if b <= 100 else None, 200, 10_000)
    assert 95 <= found <= 100 and len(asked) <= 6
    found, asked = search(lambda batch: 10, 8, 1000)
    assert found >= 1000 and len(asked) <= 12


def test_where_it_pays():
    base = {8: 10.0, 16: 18.0}  # 2 + b
    assert pays_from({8: 8.0, 16: 12.0}, base) == 5  # 4 + b / 2
    assert pays_from({8: 5.0, 16: 9.0}, base) == 1
    assert pays_from({8: 12.0, 16: 22.0}, base) is None
    assert pays_from({8: 5.0}, base) is None
