"""The Python blocks of the README and of the guides run, page by page."""

import re
from pathlib import Path

import pytest

from mpx._quantize import Target, target_from

from . import pages

WITH_CODE = [page for page in pages.PAGES if pages.blocks(page)]
# These train models.
SLOW = (
    "coming-from-flax-fp8",
    "coming-from-transformer-engine",
    "devices",
    "examples",
    "explicit",
    "formats",
    "layers",
    "low-precision",
    "numerics",
    "troubleshooting",
)
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


def test_a_diff_is_run_before_and_after(tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text("```diff\n a = 1\n-print(a)\n+print(-a)\n```\n")
    assert [printed for _, printed in pages.run(page)] == ["1\n-1\n"]
    page.write_text("<!-- not run: needs a GPU -->\n\n```python\nnothing\n```\n")
    assert pages.blocks(page) == []


def test_the_first_page_counts_the_programs_of_others():
    text = (pages.ROOT / "docs" / "works-with.md").read_text(encoding="utf-8")
    programs = re.findall(r"^\| ([\w-]+): (\w+) \| (?!no float32)", text, re.MULTILINE)
    readme = pages.PAGES[0].read_text(encoding="utf-8")
    count = f"{len(programs)} unmodified programs of {len(dict(programs))} packages"
    assert count in readme


def test_the_table_of_hardware_is_what_mpx_knows_of_it():
    rows = re.findall(r"^\| (NVIDIA|TPU) \|(.*)\|$", pages.PAGES[0].read_text(), re.M)
    cells = {kind: text.split("|") for kind, text in rows}
    half, eight, block = (cells["NVIDIA"][i] for i in (1, 2, 3))

    def known(cell: str) -> list[Target]:
        return [target_from(name) for name in re.findall(r"[A-Z]+\d+", cell)]

    assert [target.has_fp8_units for target in known(half)] == [False]
    assert [target.has_fp8_units for target in known(eight)] == [True] * 3
    assert [target.has_block_units for target in known(eight)] == [False] * 3
    assert [target.has_block_units for target in known(block)] == [True]
    (name,) = re.findall(r"TPU\d+x", cells["TPU"][2])
    assert target_from(name).has_fp8_units
    assert not target_from("tpu v6e").has_fp8_units


# Generated: the page from other packages' programs, and what stands between marks. The
# pages for maintainers are not counted either.
NOT_COUNTED = {"works-with.md", "internals.md", "moved.md"}
GENERATED = r"<!-- (table [\w-]+|sweep: begin) -->.*?<!-- (end|sweep: end) -->"
MOST_WORDS = 31_900  # 1,100 for serving and reinforcement learning, a guide each


def hand_written(text: str) -> str:
    return re.sub(GENERATED, "", text, flags=re.DOTALL)


def test_the_documentation_stays_short():
    words = {
        str(page.relative_to(pages.ROOT)): len(hand_written(page.read_text()).split())
        for page in pages.PAGES
        if page.name not in NOT_COUNTED
    }
    longest = sorted(words.items(), key=lambda item: -item[1])[:5]
    assert sum(words.values()) <= MOST_WORDS, longest
    assert hand_written("a <!-- table x -->\n| 1 |\n<!-- end --> b") == "a  b"


def test_the_changelog_is_one_page():
    text = (pages.ROOT / "CHANGELOG.md").read_text()
    assert text.startswith("# Changelog") and len(text.split()) <= 700


def test_errors_of_recipes_are_those_of_the_programs():
    table = (pages.ROOT / "docs" / "works-with.md").read_text(encoding="utf-8")
    row = r"current: error, ratio to bfloat16's \| (\S+) in .* (\d+) .*, (\S+) to (\S+)"
    (found,) = re.findall(row, table)
    times, programs, low, high = found
    choose, numerics = (
        " ".join((pages.ROOT / "docs" / name).read_text(encoding="utf-8").split())
        for name in ("choose.md", "numerics.md")
    )
    said = f"{times} times that in FP8 (median over {programs} programs, range"
    assert f"{said} {low} to {high};" in choose
    said = f"{times} times bfloat16's under current scaling (median; range"
    assert f"{said} {low} to {high})" in numerics


def test_links_of_the_first_page_lead_somewhere():
    """Those of the site are checked by `mkdocs build --strict`."""
    text = (pages.ROOT / "README.md").read_text(encoding="utf-8")
    links = re.findall(r"\]\(\s*([^)\s]+)\s*\)|(?:src|srcset)=\"([^\"]+)\"", text)
    inside = ["".join(link) for link in links if "://" not in "".join(link)]
    assert inside
    for link in inside:
        path, _, anchor = link.partition("#")
        target = pages.ROOT / (path or "README.md")
        assert target.exists(), link
        heads = (
            re.findall(r"^#+ (.*)$", target.read_text("utf-8"), re.M) if anchor else []
        )
        slugs = {
            re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads
        }
        assert not anchor or anchor in slugs, link
