"""The notebooks run from top to bottom, and show what they show."""

from pathlib import Path

import pytest

from .. import notebooks

# The two that train the examples take a minute; `make notebooks` runs all five.
CHEAP = {
    "reading_explain": (),
    "autocast_in_five_minutes": (pytest.mark.slow,),
    "break_and_mend": (pytest.mark.exhaustive,),
}
PATHS = [notebooks.FOLDER / f"{name}.ipynb" for name in CHEAP]
MARKED = [pytest.param(p, marks=CHEAP[p.stem], id=p.stem) for p in PATHS]


@pytest.mark.third_party
@pytest.mark.parametrize("path", MARKED)
def test_a_notebook_runs_and_its_outputs_are_kept(path: Path):
    notebook = notebooks.read(path)
    kept = [cell["outputs"] for cell in notebooks.code_cells(notebook)]
    found = notebooks.run(notebook, path.stem)
    assert [kinds(outputs) for outputs in found] == [kinds(one) for one in kept]


def kinds(outputs: list) -> list[list[str]]:
    return [sorted(output.get("data", ["stream"])) for output in outputs]


def test_there_are_notebooks_with_outputs():
    assert len(notebooks.NOTEBOOKS) == 5
    for path in notebooks.NOTEBOOKS:
        cells = notebooks.code_cells(notebooks.read(path))
        assert cells[-1]["outputs"], path
        assert path.stat().st_size < 400_000
