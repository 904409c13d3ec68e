"""The tests of a line: the map of areas, the note that decides, and the record."""

import re
import shutil
from pathlib import Path

import pytest

from tests import of, reached
from tests.areas import AREAS, ROOT, area_of, files_of

SOURCE = '''\
LIMIT = 3


class Counter:
    def count(self, items, strict):
        """Counts items."""
        if strict:
            raise ValueError("strict")
        total = 0
        for item in items:
            if item > LIMIT:
                total += item
            else:
                print(item)
        return total
'''
# The notes of SOURCE by the line that they decide for; None for an import.
NOTED = {
    1: None,
    4: None,
    5: ("5-15-4-20", True),  # the function
    7: ("5-15-4-20", True),
    8: ("7-7-11-17", True),  # the condition
    9: ("7-7-11-17", False),  # what comes after it
    10: ("7-7-11-17", False),
    12: ("12-12-16-29", True),  # the statement
    14: ("14-14-16-27", True),
    15: ("7-7-11-17", False),
}


def test_every_file_has_an_area():
    files = sorted((ROOT / "mpx").rglob("*.py"))
    by_area = [file for area in AREAS for file in files_of(area)]
    assert len(files) > 100 and sorted(by_area) == files


def test_every_path_of_the_map_exists():
    paths = {f"mpx/{area}" for area in AREAS} | set(" ".join(AREAS.values()).split())
    assert sorted(path for path in paths if not (ROOT / path).exists()) == []


def test_a_file_belongs_to_the_longest_key(monkeypatch):
    inside = {"_step/_engine.py": "", "_st": ""}
    monkeypatch.setattr("tests.areas.AREAS", AREAS | inside)
    assert area_of("mpx/_step/_engine.py") == "_step/_engine.py"
    assert area_of("mpx/_step/_inputs.py") == "_step"
    assert ROOT / "mpx/_step/_engine.py" not in files_of("_step")
    with pytest.raises(KeyError, match="enter it in tests/areas.py"):
        area_of("mpx/_new.py")


@pytest.mark.parametrize("line", NOTED)
def test_the_note_that_decides_for_a_line(line):
    name, key = reached.where("f", SOURCE, line)
    noted = NOTED[line]
    assert key == (noted and (f"f:{noted[0]}", noted[1]))
    assert name == ("" if line == 1 else "Counter" if line == 4 else "Counter.count")


def test_a_line_is_followed_through_an_edit():
    edited = SOURCE.replace("LIMIT = 3", "# New.\nLIMIT = 3").replace("> LIMIT", ">= 9")
    assert [of.line_before(SOURCE, edited, n) for n in (2, 12, 16)] == [1, 11, 15]


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A small `mpx` with two tests, and a map for it."""
    for name in ("mpx/a.py", "mpx/__init__.py", "tests/__init__.py", "conftest.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(SOURCE if name == "mpx/a.py" else "")
    shutil.copy(ROOT / "tests/reached.py", tmp_path / "tests")
    (tmp_path / "tests/test_a.py").write_text(
        "from mpx.a import Counter\n\n\n"
        "def test_small():\n    assert Counter().count([1], False) == 0\n\n\n"
        "def test_large():\n    assert Counter().count([4], False) == 4\n"
    )
    monkeypatch.setattr(of, "ROOT", tmp_path)
    monkeypatch.setattr(of, "CACHE", tmp_path / ".reached_cache")
    monkeypatch.setitem(AREAS, "a.py", "tests/test_a.py")
    monkeypatch.chdir(tmp_path)
    # The other plugins take two seconds to import.
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTEST_PLUGINS", "xdist.plugin")
    return tmp_path


def test_a_record_has_the_tests_that_reach_a_line(checkout: Path, capsys, monkeypatch):
    def printed(line, *options):
        code = of.main([f"mpx/a.py:{line}", *options])
        text = capsys.readouterr().out
        return code, re.findall(r"tests/test_a.py\S*", text), text

    code, tests, text = printed(12)
    assert (code, tests) == (0, ["tests/test_a.py"]) and "--run finds those" in text

    small, large = "tests/test_a.py::test_small", "tests/test_a.py::test_large"
    assert printed(12, "--run", "--processes", "0")[:2] == (0, [large])
    monkeypatch.setattr(reached, "record", None)  # it is not run again
    assert printed(14, "--run")[:2] == (0, [small])
    code, tests, _ = printed(15)
    assert code == 0 and sorted(tests) == [large, small]
    assert printed(8)[:2] == (1, [])
    assert "importing mpx runs it" in printed(1)[2]

    (checkout / "mpx/a.py").write_text("\n" + SOURCE)
    code, tests, text = printed(13)
    assert (code, tests) == (0, [large]) and "before the last edit" in text


@pytest.mark.parametrize(
    "place", ["mpx/_settings/_cast.py", "tests/of.py:1", "mpx/_settings/_cast.py:9999"]
)
def test_a_place_that_is_not_a_line_of_mpx_is_refused(place, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit):
        of.main([place])
    assert re.search("must be a line|has [0-9]+ lines", capsys.readouterr().err)
