"""The Python blocks of the README and of the guides run, page by page."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
GUIDES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: Path) -> list[tuple[int, str]]:
    """The Python blocks of a page, each with the line it starts at."""
    text = page.read_text(encoding="utf-8")
    found = BLOCK.finditer(text)
    return [(text.count("\n", 0, match.start(1)), match[1]) for match in found]


PAGES_WITH_CODE = [page for page in GUIDES if blocks(page)]
# These train models.
SLOW = ("examples-", "coming-from-transformer-engine", "layers", "low-precision")
MARKED = [
    pytest.param(page, marks=pytest.mark.slow) if page.name.startswith(SLOW) else page
    for page in PAGES_WITH_CODE
]


@pytest.mark.third_party  # they show Optax and Equinox
@pytest.mark.parametrize("page", MARKED, ids=lambda page: page.name)
def test_the_code_on_a_page_runs(page: Path, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a block may write files
    namespace: dict[str, object] = {"__name__": page.stem}
    for line, code in blocks(page):
        # Empty lines in front, so that a traceback names the line of the page.
        exec(compile("\n" * line + code, str(page), "exec"), namespace)


def test_pages_with_code_are_found():
    assert {"README.md", "tour.md"} <= {page.name for page in PAGES_WITH_CODE}
