"""The statistics of the comparison of recipes, and which runs are left to do."""

import pytest

from benchmarks.numerics import recipes
from benchmarks.results import Results


def found(gap=0.001, seeds=3):
    result = Results("recipes", "test", "test")
    for seed in range(seeds):
        for place, arm in enumerate(recipes.ARMS):
            loss = (2.0 + seed) * (1 + gap * place + 1e-5 * seed * place)
            record = {"arm": arm, "seed": seed, "steps": 200, "loss": loss}
            result.records.append(record | {"curve": [3.0, loss], "skipped": 0})
    return result


def test_gaps_are_relative_and_paired():
    result = found()
    result.records = [
        r for r in result.records if (r["arm"], r["seed"]) != ("float32", 1)
    ]
    assert recipes.gaps(result.records, "float16") == pytest.approx([0.1, 0.102])
    assert recipes.gaps(result.records, "float32") == [0, 0]


def test_an_interrupted_comparison_goes_on():
    result = found(seeds=2)
    assert recipes.missing(result, 2, 200) == []
    lost = [result.records.pop(3), result.records.pop()]
    expected = [(r["seed"], r["arm"]) for r in lost]
    assert recipes.missing(result, 2, 200) == expected
    assert len(recipes.missing(result, 3, 200)) == 2 + len(recipes.ARMS)
    assert len(recipes.missing(result, 2, 100)) == 2 * len(recipes.ARMS)


@pytest.mark.parametrize(("gap", "met"), [(0.0004, [True] * 7), (0.003, [True] * 1)])
def test_goals(gap, met):
    goals = list(recipes.goals(found(gap)))
    assert [g.met for g in goals] == met + [False] * (7 - len(met))
    assert "within 1.5%, 3 seeds" in goals[-1].text


def test_table_and_picture(tmp_path):
    result = found()
    (table,) = recipes.tables(result)
    assert [row[0] for row in table.rows] == list(recipes.ARMS)
    assert table.rows[1][3] == "+0.101%" and table.rows[-1][-1] == "1.5%"
    recipes.picture(result, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_a_curve_is_thinned_by_means():
    curve = recipes.thinned([float(i) for i in range(200)])
    assert len(curve) == 29 and curve[0] == 3.0 and curve[-1] == 197.5
