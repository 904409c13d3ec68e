"""The interval of a mean."""

import math

import pytest

from benchmarks.numerics.interval import mean_interval


def test_interval_is_students_t():
    # t(0.975, 4 degrees of freedom) = 2.776 (any table).
    samples = [0.1, -0.2, 0.3, 0.0, 0.05]
    interval = mean_interval(samples)
    mean = sum(samples) / 5
    deviation = math.sqrt(sum((x - mean) ** 2 for x in samples) / 4)
    reach = 2.776 * deviation / math.sqrt(5)
    assert interval.mean == pytest.approx(mean)
    assert interval.low == pytest.approx(mean - reach, abs=1e-4)
    assert interval.high == pytest.approx(mean + reach, abs=1e-4)


def test_one_sample_has_no_interval():
    with pytest.raises(ValueError, match="needs at least two samples; got 1"):
        mean_interval([0.3])


def test_a_mean_near_zero_with_a_wide_interval_is_not_enough():
    assert not mean_interval([2.0, -2.0, 1.0, -1.0]).lies_within(0.5)
