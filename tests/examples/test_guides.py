"""The guides: programs of at most 60 lines that run, each on a page."""

import importlib.util
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GUIDES = sorted((ROOT / "examples" / "guides").glob("*_*.py"))
GUIDES = [guide for guide in GUIDES if guide.name != "__init__.py"]
SLOW = (
    "in_fp8",
    "in_two_precisions",
    "nnx_with_orbax",
    "with_evaluation",
    "with_grain",
    "with_monitor",
    "with_orbax",
    "with_stored_weights",
)


def marked(guide: Path):
    needs = {"with_keras": "keras"}.get(guide.stem)
    is_missing = needs is not None and importlib.util.find_spec(needs) is None
    reason = f"{needs} is not installed: it is in the environment of `make clients`"
    marks = [pytest.mark.skipif(is_missing, reason=reason)]
    if guide.stem in SLOW:
        marks.append(pytest.mark.slow)
    return pytest.param(guide, marks=marks)


@pytest.mark.third_party
@pytest.mark.parametrize("guide", [*map(marked, GUIDES)], ids=lambda guide: guide.stem)
def test_a_guide_runs(guide: Path, capsys):
    runpy.run_path(str(guide), run_name="__main__")
    assert "loss" in capsys.readouterr().out


@pytest.mark.parametrize("guide", GUIDES, ids=lambda guide: guide.stem)
def test_a_guide_is_short_and_on_a_page(guide: Path):
    assert len(guide.read_text(encoding="utf-8").splitlines()) <= 60
    pages = (ROOT / "docs").rglob("*.md")
    included = f'--8<-- "examples/guides/{guide.name}"'
    assert any(included in page.read_text(encoding="utf-8") for page in pages)
