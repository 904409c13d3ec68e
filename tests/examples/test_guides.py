"""The guides: programs of at most 60 lines that run, each on a page."""

import doctest
import importlib.util
import re
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
    "pipeline_and_experts",
    "sharded_layouts",
    "with_accumulation",
    "with_evaluation",
    "with_grain",
    "with_layers",
    "with_lora",
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


def test_the_search_for_shown_output_finds_it():
    assert len(shown(ROOT / "examples/guides/with_monitor.py")) == 1


@pytest.mark.parametrize("guide", GUIDES, ids=lambda guide: guide.stem)
def test_a_guide_is_short_and_on_a_page(guide: Path):
    assert len(guide.read_text(encoding="utf-8").splitlines()) <= 60
    pages = (ROOT / "docs").rglob("*.md")
    included = f'--8<-- "examples/guides/{guide.name}"'
    assert any(included in page.read_text(encoding="utf-8") for page in pages)
