"""Numerics: errors of products, techniques of NVFP4, recipes, intervals of a mean."""

import itertools
import math

import numpy as np
import pytest

from benchmarks import results
from benchmarks.numerics import errors, recipes
from benchmarks.numerics.interval import mean_interval


def test_the_data_has_the_outliers_that_it_should():
    _, channels, g = errors.draw("channels", 0)
    _, tokens, _ = errors.draw("tokens", 0)
    _, scattered, _ = errors.draw("scattered", 0)
    for sizes in (np.std(channels, axis=0), np.std(tokens, axis=1)):
        assert np.mean(sizes > 10) == pytest.approx(errors.SHARE, rel=0.3)
        assert np.median(sizes) == pytest.approx(1, rel=0.1)
    assert 0.005 < np.mean(np.abs(scattered) > 10) < 0.01
    assert np.abs(g).max() > 10 * g.std()
    beside = errors.beside_outliers(tokens)
    rows = np.std(tokens, axis=1)
    assert beside.any() and (rows[beside] < 10).all()
    blocks = (rows > 10).reshape(-1, 16).any(axis=1)
    assert beside.sum() == 16 * blocks.sum() - (rows > 10).sum()


@pytest.mark.parametrize(
    ("arm", "least", "most"),
    [("bfloat16", 0, 0.003), ("current", 0.02, 0.08), ("delayed", 0.02, 0.15)],
)
def test_errors_of_products(arm, least, most):
    products = errors.products_of(errors.recipes().get(arm))
    arrays = errors.draw("scattered", 0)
    before = (errors.draw("scattered", 1),) if arm == "delayed" else ()
    pairs = zip(products(*arrays, *before), errors.exact(*arrays), strict=True)
    assert all(least < errors.distance(*pair) < most for pair in pairs)


@pytest.mark.exhaustive
def test_every_technique_of_nvfp4_does_what_it_is_for():
    known = errors.recipes()
    techniques = [errors.technique_of(known[arm]) for arm in ("nvfp4", errors.PLAIN)]
    with_all, plain = (found(*errors.draw("tokens", 0)) for found in techniques)
    assert with_all["zeros"] < 0.3 * plain["zeros"]
    assert with_all["mean gradient"] < 0.4 * plain["mean gradient"]
    assert with_all["two weights"] == 0 and plain["two weights"] > 0.1
    # What they cost.
    assert with_all["gradient"] > plain["gradient"]
    assert with_all["weight"] > plain["weight"]


def test_the_page_says_what_was_measured():
    """No technique lowers the error of one product; all goals are met."""
    found = results.read("errors")
    assert found is not None and all(goal.met for goal in errors.goals(found))
    for of in itertools.product(errors.DATA, errors.PRODUCTS):
        mean = {arm: np.mean(errors.samples(found, arm, *of)) for arm in errors.ARMS}
        for arm in ("nvfp4", *errors.WITHOUT):
            assert mean[errors.PLAIN] <= mean[arm]
        for arm in errors.EIGHT_BITS:
            assert mean["bfloat16"] < mean[arm] < mean[errors.PLAIN]


def compared(gap=0.001, seeds=3):
    result = results.Results("recipes", "test", "test")
    for seed, (place, arm) in itertools.product(range(seeds), enumerate(recipes.ARMS)):
        loss = (2.0 + seed) * (1 + gap * place + 1e-5 * seed * place)
        record = {"arm": arm, "seed": seed, "steps": 200, "loss": loss}
        result.records.append(record | {"curve": [3.0, loss], "skipped": 0})
    return result


def test_gaps_of_recipes_are_paired_and_an_interrupted_comparison_goes_on():
    lost = ("float32", 1)
    records = [r for r in compared().records if (r["arm"], r["seed"]) != lost]
    assert recipes.gaps(records, "float16") == pytest.approx([0.1, 0.102])
    assert recipes.gaps(records, "float32") == [0, 0]
    result = compared(seeds=2)
    assert recipes.missing(result, 2, 200) == []
    lost = [result.records.pop(3), result.records.pop()]
    expected = [(r["seed"], r["arm"]) for r in lost]
    assert recipes.missing(result, 2, 200) == expected
    assert len(recipes.missing(result, 3, 200)) == 2 + len(recipes.ARMS)
    assert len(recipes.missing(result, 2, 100)) == 2 * len(recipes.ARMS)


@pytest.mark.parametrize(("gap", "met"), [(0.0004, [True] * 10), (0.003, [True] * 1)])
def test_goals_of_recipes(gap, met):
    goals = list(recipes.goals(compared(gap)))
    assert [g.met for g in goals] == met + [False] * (10 - len(met))
    assert "nvfp4 to float32 within 1.5%, 3 seeds" in goals[-3].text


def test_table_picture_and_curve_of_recipes(tmp_path):
    result = compared()
    (table,) = recipes.tables(result)
    assert [row[0] for row in table.rows] == list(recipes.ARMS)
    assert table.rows[1][3] == "+0.101%" and table.rows[-3][-1] == "1.5%"
    recipes.picture(result, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
    curve = recipes.thinned([float(i) for i in range(200)])  # by means
    assert len(curve) == 29 and curve[0] == 3.0 and curve[-1] == 197.5


def test_interval_of_a_mean_is_students_t():
    # t(0.975, 4 degrees of freedom) = 2.776 (any table).
    samples = [0.1, -0.2, 0.3, 0.0, 0.05]
    interval = mean_interval(samples)
    mean = sum(samples) / 5
    deviation = math.sqrt(sum((x - mean) ** 2 for x in samples) / 4)
    reach = 2.776 * deviation / math.sqrt(5)
    assert interval.mean == pytest.approx(mean)
    assert interval.low == pytest.approx(mean - reach, abs=1e-4)
    assert interval.high == pytest.approx(mean + reach, abs=1e-4)
    assert not mean_interval([2.0, -2.0, 1.0, -1.0]).lies_within(0.5)
    with pytest.raises(ValueError, match="needs at least two samples; got 1"):
        mean_interval([0.3])
