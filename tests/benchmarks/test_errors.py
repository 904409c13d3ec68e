"""Errors of products on data with outliers, and what techniques of NVFP4 are for."""

import numpy as np
import pytest

from benchmarks import results
from benchmarks.numerics import errors


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
    for found, expected in zip(
        products(*arrays, *before), errors.exact(*arrays), strict=True
    ):
        assert least < errors.distance(found, expected) < most


@pytest.mark.exhaustive
def test_every_technique_of_nvfp4_does_what_it_is_for():
    known = errors.recipes()
    with_all, plain = (
        errors.technique_of(known[arm])(*errors.draw("tokens", 0))
        for arm in ("nvfp4", errors.PLAIN)
    )
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
    for kind in errors.DATA:
        for product in errors.PRODUCTS:
            mean = {
                arm: np.mean(errors.samples(found, arm, kind, product))
                for arm in errors.ARMS
            }
            for arm in ("nvfp4", *errors.WITHOUT):
                assert mean[errors.PLAIN] <= mean[arm]
            for arm in errors.EIGHT_BITS:
                assert mean["bfloat16"] < mean[arm] < mean[errors.PLAIN]
