"""The statistics of the five-fold comparison."""

import math

import pytest

from benchmarks.numerics import folds
from benchmarks.results import Results


def test_interval_is_students_t():
    # t(0.975, 4 degrees of freedom) = 2.776 (any table).
    samples = [0.1, -0.2, 0.3, 0.0, 0.05]
    interval = folds.mean_interval(samples)
    mean = sum(samples) / 5
    deviation = math.sqrt(sum((x - mean) ** 2 for x in samples) / 4)
    reach = 2.776 * deviation / math.sqrt(5)
    assert interval.mean == pytest.approx(mean)
    assert interval.low == pytest.approx(mean - reach, abs=1e-4)
    assert interval.high == pytest.approx(mean + reach, abs=1e-4)


def test_one_sample_has_no_interval():
    with pytest.raises(ValueError, match="needs at least two samples; got 1"):
        folds.mean_interval([0.3])


def run(fold, precision, correct, seed=0):
    return {
        "fold": fold,
        "seed": seed,
        "precision": precision,
        "steps": 10,
        "correct": correct,
        "images": 200,
        "skipped": 0,
    }


def test_differences_pair_fold_and_seed():
    records = [
        run(0, "float16", 198),
        run(0, "float32", 196),
        run(1, "float32", 190),
        run(1, "float16", 189),
        run(0, "float16", 200, seed=1),  # its partner is missing
        run(1, "bfloat16", 200),
    ]
    assert folds.differences(records, "float16") == pytest.approx([1.0, -0.5])
    assert folds.differences(records, "bfloat16") == pytest.approx([5.0])


@pytest.mark.parametrize(
    ("loss", "expected"), [(0, [True] * 5), (4, [True, True, False, True, True])]
)
def test_goals(loss, expected):
    found = Results("folds", "test", "test")
    for fold in folds.FOLDS:
        found.records += [
            run(fold, "float32", 197),
            run(fold, "float16", 197 - loss if fold else 197),
            run(fold, "bfloat16", 197),
        ]
    goals = list(folds.goals(found))
    assert [goal.met for goal in goals] == expected
    (table,) = folds.tables(found)
    assert [row[0] for row in table.rows] == list(folds.PRECISIONS)


def test_a_mean_near_zero_with_a_wide_interval_is_not_enough():
    assert not folds.mean_interval([2.0, -2.0, 1.0, -1.0]).lies_within(folds.LIMIT)
