"""The guides, programs of at most 60 lines, and the notebooks run as they are shown."""

import doctest
import importlib.util
import re
import runpy
from pathlib import Path

import pytest

from .. import notebooks

ROOT = Path(__file__).parents[2]
GUIDES = sorted((ROOT / "examples" / "guides").glob("*_*.py"))
GUIDES = [guide for guide in GUIDES if guide.name != "__init__.py"]
SLOW = "in_fp8 in_two_precisions nnx_with_orbax pipeline_and_experts sharded_layouts"
SLOW += " on_a_tpu with_accumulation with_evaluation with_export with_grain"
SLOW += " with_layers with_lora with_monitor with_orbax with_reinforcement"
SLOW += " with_stored_weights"
EXHAUSTIVE = ["rollout_mismatch"]  # 80 s of a core


def marked(guide: Path):
    needs = {"with_keras": "keras"}.get(guide.stem)
    is_missing = needs is not None and importlib.util.find_spec(needs) is None
    reason = f"{needs} is not installed: it is in the environment of `make clients`"
    marks = [pytest.mark.skipif(is_missing, reason=reason)]
    marks += [pytest.mark.slow] * (guide.stem in SLOW.split())
    marks += [pytest.mark.exhaustive] * (guide.stem in EXHAUSTIVE)
    return pytest.param(guide, marks=marks)


@pytest.mark.third_party
@pytest.mark.parametrize("guide", [*map(marked, GUIDES)], ids=lambda guide: guide.stem)
def test_a_guide_runs(guide: Path, capsys):
    runpy.run_path(str(guide), run_name="__main__")
    printed = capsys.readouterr().out
    assert "loss" in printed
    check = doctest.OutputChecker().check_output
    for output in shown(guide):
        assert check(output, printed, doctest.ELLIPSIS), printed


def shown(guide: Path) -> list[str]:
    """What pages show of what it prints: the block of text after the program."""
    after = re.compile(
        rf'^--8<-- "examples/guides/{guide.name}"\n```\n\n```text\n(.*?)^```$',
        re.MULTILINE | re.DOTALL,
    )
    pages = (ROOT / "docs").rglob("*.md")
    return [text for page in pages for text in after.findall(page.read_text("utf-8"))]


@pytest.mark.parametrize("guide", GUIDES, ids=lambda guide: guide.stem)
def test_a_guide_is_short_and_on_a_page(guide: Path):
    assert len(guide.read_text(encoding="utf-8").splitlines()) <= 60
    pages = (ROOT / "docs").rglob("*.md")
    included = f'--8<-- "examples/guides/{guide.name}"'
    assert any(included in page.read_text(encoding="utf-8") for page in pages)
    if guide.stem == "with_monitor":  # the search for shown output finds it
        assert len(shown(guide)) == 1


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
