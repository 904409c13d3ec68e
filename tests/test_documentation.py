"""The Python blocks of the README and of the guides run, page by page."""

from pathlib import Path

import pytest

from . import pages

WITH_CODE = [page for page in pages.PAGES if pages.blocks(page)]
# These train models.
SLOW = ("examples-", "coming-from-transformer-engine", "layers", "low-precision")
MARKED = [
    pytest.param(page, marks=pytest.mark.slow) if page.name.startswith(SLOW) else page
    for page in WITH_CODE
]


@pytest.mark.third_party  # they show Optax and Equinox
@pytest.mark.parametrize("page", MARKED, ids=lambda page: page.name)
def test_the_code_on_a_page_runs_and_prints_what_it_shows(
    page: Path, tmp_path: Path, monkeypatch
):
    monkeypatch.chdir(tmp_path)  # a block may write files
    for block, printed in pages.run(page):
        assert pages.is_shown(block, printed), printed


def test_pages_with_code_are_found():
    assert {"README.md", "tour.md"} <= {page.name for page in WITH_CODE}


def test_what_a_page_shows_is_compared(tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text("```python\nprint(1)\n```\n\n```text\n2\n```\n")
    ((block, printed),) = pages.run(page)
    assert not pages.is_shown(block, printed)
    pages.write(page)
    assert pages.is_shown(pages.blocks(page)[0], "1\n")
