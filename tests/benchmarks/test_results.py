"""Results on disk, tables, and the page of the documentation."""

import doctest
import importlib

import pytest

from benchmarks import command, documentation, parts, results, summary
from benchmarks.counts import sweep
from benchmarks.tables import Table
from benchmarks.time import compiling as compile_time, host


def found_sweep(memory_of_ours=100):
    found = results.Results("sweep", "python -m benchmarks sweep", "compiled for X")
    found.versions = {"ours": {"jax": "1"}, "peers": {"jmp": "2"}}
    for arm, memory in (
        ("float32", 200),
        ("mpx float16", memory_of_ours),
        ("mpx bfloat16", 100),
        ("MPX float16", 110),
    ):
        for batch in sweep.BATCHES["desktop, mean"]:
            found.records.append(
                {
                    "model": "desktop, mean",
                    "arm": arm,
                    "batch": batch,
                    "blocks": 2,
                    "devices": 1,
                    "target": "v5e",
                    "program": f"{arm}{batch}",
                    "compiler": "libtpu 0",
                    "counts": {"memory": memory * batch, "traffic": memory * batch},
                }
            )
    return found


def test_results_survive_the_disk(tmp_path):
    found = found_sweep()
    found.write(tmp_path)
    assert results.read("sweep", tmp_path) == found
    assert results.read("host", tmp_path) is None
    assert found.versions_line() == "jax 1, jmp 2"


def test_known_counts_are_found_by_program_target_and_compiler(tmp_path):
    found = found_sweep()
    found.write(tmp_path)
    folders = [tmp_path, tmp_path / "missing"]
    log = tmp_path / "new" / "compiled.jsonl"
    known = results.KnownCounts(folders, log)
    assert len(known.counts) == len(found.records)
    key = ("float3264", "v5e", "libtpu 0")
    assert known.counts[key] == found.records[0]["counts"]

    known.add("another", "v5e", "libtpu 0", {"memory": 1})
    known.add("too large", "v5e", "libtpu 0", None)
    again = results.KnownCounts([log.parent], log)
    assert again.counts == {
        ("another", "v5e", "libtpu 0"): {"memory": 1},
        ("too large", "v5e", "libtpu 0"): None,
    }


def test_sweep_tables_goals_and_picture(tmp_path):
    found = found_sweep()
    (table,) = sweep.tables(found)
    assert [row[0] for row in table.rows] == ["64", "128", "256", "512"]
    assert table.rows[0][3:] == ["2.00", "2.00", "2.00", "2.00", "1.82", "1.82"]
    assert all(goal.met for goal in sweep.goals(found))
    assert not any(goal.met for goal in sweep.goals(found_sweep(memory_of_ours=120)))
    sweep.picture(found, tmp_path / "deep" / "sweep.png")
    assert (tmp_path / "deep" / "sweep.png").stat().st_size > 10_000


def test_what_does_not_fit_is_said():
    found = found_sweep()
    for record in found.records:
        if record["arm"] == "MPX float16" and record["batch"] == 512:
            record["counts"] = None
    (table,) = sweep.tables(found)
    assert table.rows[-1][-2:] == ["does not fit", ""]


def host_answers(trace):
    # Something else ran on the machine, in other rounds of one arm than of the other.
    for base, ours in ((3.0, 1.0), (1.0, 2.0), (1.0, 5.0)):
        yield [
            {"arm": "float32", "trace": base, "lower": base},
            {"arm": "mpx float16", "trace": trace * ours, "lower": ours},
        ]


@pytest.mark.parametrize(("trace", "met"), [(1.05, True), (1.2, False)])
def test_host_cost_compares_the_fastest_rounds(trace, met):
    found = results.Results("host", "test", "measured on X")
    found.records = host.records("ours", host_answers(trace))
    added = host.added(found, found.records[1], "trace")
    assert added == pytest.approx(trace - 1)
    assert [goal.met for goal in host.goals(found)] == [met, True]
    assert len(next(iter(host.tables(found))).rows) == 2


def test_markdown():
    table = Table("Title", ["name", "value"], [["a", "1"]], notes=["A note."])
    assert table.markdown().splitlines() == [
        "**Title**",
        "",
        "| name | value |",
        "|---|--:|",
        "| a | 1 |",
        "",
        "A note.",
    ]


def test_the_page_is_filled_from_the_results(tmp_path):
    found_sweep().write(tmp_path)
    page = "By hand.\n<!-- table sweep -->\nold\n<!-- end -->\nBy hand too.\n"
    filled = documentation.render(page, tmp_path)
    assert filled.startswith("By hand.\n<!-- table sweep -->\n")
    assert filled.endswith("<!-- end -->\nBy hand too.\n")
    assert "old" not in filled
    assert "`python -m benchmarks sweep`; compiled for X; jax 1, jmp 2." in filled
    assert documentation.render(filled, tmp_path) == filled


@pytest.mark.parametrize("path", documentation.PAGES, ids=lambda path: path.name)
def test_the_committed_pages_show_the_committed_results(path):
    page = path.read_text()
    assert documentation.render(page) == page, (
        "the page is not what benchmarks/results gives: run `python -m benchmarks docs`"
    )


def test_the_first_page_says_what_was_counted_and_what_was_measured():
    # By column: the last one is measured, the others are counted.
    head, _, *rows = summary.table().splitlines()
    assert head.endswith("| loss of a small GPT to float32 |") and len(rows) == 7
    below = documentation.README.read_text().partition("<!-- end -->")[2]
    assert "**counted in the program compiled for the device, not run" in below
    assert "The loss is measured" in below


@pytest.mark.parametrize(
    "name",
    [
        "tables",
        "numerics.interval",
        "numerics.recipes",
        "models.layers",
        "models.plain",
        "device.about",
    ],
)
def test_doctests(name):
    module = importlib.import_module(f"benchmarks.{name}")
    found = doctest.testmod(module, optionflags=doctest.ELLIPSIS)
    assert found.attempted and not found.failed


def test_every_result_has_a_table():
    assert set(parts.PARTS) | {"sizes", "device"} == set(documentation.MAKERS)
    for path in results.COMMITTED.glob("*.json"):
        found = results.read(path.stem)
        assert found is not None
        assert found.command and found.device and found.versions
        name = "device" if path.stem.startswith("device-") else path.stem
        assert parts.tables(found, documentation.MAKERS[name])


@pytest.mark.parametrize(("seconds", "met"), [(6.9, True), (7.1, False)])
def test_compile_time_compares_the_fastest_rounds(seconds, met):
    found = results.Results("compile-time", "test", "measured on X")
    found.records = [
        {"target": "h100", "arm": compile_time.NAIVE, "seconds": [1.0, 1.5]},
        {"target": "h100", "arm": "delayed", "seconds": [9.0, seconds]},
    ]
    assert [goal.met for goal in compile_time.goals(found)] == [met]
    (table,) = compile_time.tables(found)
    assert [row[2:] for row in table.rows] == [["1.00"] * 2, [f"{seconds:.2f}"] * 2]


def test_compile_time_without_results():
    found = results.Results("compile-time", "test", "measured on X")
    assert not [*compile_time.tables(found), *compile_time.goals(found)]


def test_the_recorded_command_says_nothing_of_the_machine(monkeypatch):
    words = ["wire", "--cuda-libraries", "a/folder/of/mine", "--out", "results"]
    monkeypatch.setattr("sys.argv", ["benchmarks", *words])
    assert command.Options().command == "python -m benchmarks wire --out results"
