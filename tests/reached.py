"""Records which tests reach a line; a plugin for `tests.planted` and `tests.of`.

Conditions, statements and functions of mpx are compiled with a note in front of each:
which one it is, and whether it held. So a condition that never fails is found in one
run of the tests, for all planted faults at once, and a fault is tried with the tests
that it may change.
"""

import ast
import builtins
import importlib.machinery
import json
import os
import subprocess
import sys
import types
from collections import defaultdict
from pathlib import Path
from typing import Any

FOLDER = "MPX_REACHED"  # the variable of the environment with the folder of records
Key = tuple[str, bool]  # a noted place, and whether it held
_FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef
_PLACES: list[str] = []
_NOW: set[tuple[int, bool]] = set()
_TESTS: dict[tuple[int, bool], list[str]] = defaultdict(list)
_SECONDS: dict[str, float] = {}


def place_of(file: str, node: ast.AST) -> str:
    """Names a node of a file, the same for its text and for what is compiled."""
    ends = (getattr(node, f"{end}lineno") for end in ("", "end_"))
    columns = (getattr(node, f"{end}col_offset") for end in ("", "end_"))
    return f"{file}:{'-'.join(map(str, (*ends, *columns)))}"


class _Noting(ast.NodeTransformer):
    """Puts the notes into a program."""

    def __init__(self, file: str) -> None:
        self._file = file

    def _note(self, node: Any, value: ast.expr, name: str = "__mpx_held__") -> Any:
        _PLACES.append(place_of(self._file, node))
        number = ast.Constant(len(_PLACES) - 1)
        call = ast.Call(ast.Name(name, ast.Load()), [number, value], [])
        return ast.fix_missing_locations(ast.copy_location(call, value))

    def visit_If(self, node: Any) -> Any:
        test = node.test
        self.generic_visit(node)
        node.test = self._note(test, node.test)
        return node

    visit_IfExp = visit_If

    def visit_BoolOp(self, node: Any) -> Any:
        values = list(node.values)
        self.generic_visit(node)
        pairs = list(zip(values, node.values, strict=True))
        # The last one decides whatever it is, and may be an array.
        last = self._note(*pairs[-1], name="__mpx_both__")
        node.values = [*(self._note(a, b) for a, b in pairs[:-1]), last]
        return node

    def visit_Expr(self, node: Any) -> Any:
        self.generic_visit(node)
        if not isinstance(node.value, ast.Call):
            return node
        true = ast.copy_location(ast.Constant(True), node)
        return [ast.copy_location(ast.Expr(self._note(node, true)), node), node]

    def visit_AugAssign(self, node: Any) -> Any:
        self.generic_visit(node)
        true = ast.copy_location(ast.Constant(True), node)
        return [ast.copy_location(ast.Expr(self._note(node, true)), node), node]

    def visit_FunctionDef(self, node: Any) -> Any:
        self.generic_visit(node)
        true = ast.copy_location(ast.Constant(True), node.body[0])
        note = ast.copy_location(ast.Expr(self._note(node, true)), node.body[0])
        node.body.insert(int(ast.get_docstring(node) is not None), note)
        return node

    visit_AsyncFunctionDef = visit_FunctionDef


def _held(place: int, value: Any) -> Any:
    _NOW.add((place, bool(value)))
    return value


def _both(place: int, value: Any) -> Any:
    _NOW.update(((place, True), (place, False)))
    return value


class _Loader(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname: str) -> types.CodeType:
        path = self.get_filename(fullname)
        tree = ast.parse(self.get_data(path))
        file = Path(path).relative_to(Path.cwd()).as_posix()
        return compile(_Noting(file).visit(tree), path, "exec", dont_inherit=True)


class _Finder:
    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] != "mpx":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.origin and spec.origin.endswith(".py"):
            spec.loader = _Loader(name, spec.origin)
        return spec


def pytest_configure() -> None:
    """Has mpx compiled with notes."""
    vars(builtins).update(__mpx_held__=_held, __mpx_both__=_both)
    sys.meta_path.insert(0, _Finder)  # type: ignore[arg-type]


def pytest_runtest_logreport(report: Any) -> None:
    """Writes down what a test reached, or, under "", what an import did."""
    _SECONDS[report.nodeid] = _SECONDS.get(report.nodeid, 0.0) + report.duration
    _keep(report.nodeid)


def pytest_runtest_logstart() -> None:
    """What was reached before the first test is of imports."""
    _keep("")


def _keep(test: str) -> None:
    for key in _NOW:
        if not _TESTS[key] or _TESTS[key][-1] != test:
            _TESTS[key].append(test)
    _NOW.clear()


def pytest_sessionfinish() -> None:
    """Writes the record of this process."""
    found = [[_PLACES[n], held, tests] for (n, held), tests in _TESTS.items()]
    file = Path(os.environ[FOLDER]) / f"{os.getpid()}.json"
    file.write_text(json.dumps({"found": found, "seconds": _SECONDS}))


def where(file: str, source: str, line: int) -> tuple[str, Key | None]:
    """Returns the function or class of a line, and the note that decides if it runs.

    The note is the nearest one, and None if importing the file runs the line.
    """
    node: ast.AST = ast.parse(source)
    names: list[str] = []
    key: Key | None = None
    while True:
        for field in ("body", "orelse", "handlers", "finalbody"):
            block: list[ast.AST] = getattr(node, field, [])
            found = [i for i, each in enumerate(block) if _holds(each, line)]
            if found:
                break
        else:
            return ".".join(names), key
        if isinstance(node, ast.If):
            key = place_of(file, node.test), field == "body"
        for each in block[: found[0]]:
            if isinstance(each, ast.If) and _leaves(each):
                key = place_of(file, each.test), False
        node = block[found[0]]
        if isinstance(node, _FUNCTION | ast.ClassDef):
            names.append(node.name)
        if isinstance(node, _FUNCTION | ast.AugAssign) or (
            isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
        ):
            key = place_of(file, node), True


def _holds(node: Any, line: int) -> bool:
    nodes = (node, *getattr(node, "decorator_list", []))
    return min(n.lineno for n in nodes) <= line <= node.end_lineno


def _leaves(node: ast.If) -> bool:
    """Whether what comes after a condition runs only if it does not hold."""
    exits = ast.Return | ast.Raise | ast.Continue | ast.Break
    return isinstance(node.body[-1], exits) and not node.orelse


def record(checkout: Path, folder: Path, tests: list[str], processes: int = 2) -> None:
    """Runs tests in a checkout, and keeps in a folder what they reach."""
    folder.mkdir(parents=True, exist_ok=True)
    quiet = ["-q", f"-n{processes}", "-p", "no:cacheprovider", "--no-header"]
    # Without jaxtyping's hook, which compiles mpx as well.
    plugin = ["-p", "tests.reached", "-o", "addopts=--import-mode=importlib"]
    subprocess.run(
        [sys.executable, "-m", "pytest", *quiet, *plugin, *tests],
        cwd=checkout,
        env={**os.environ, "PYTHONPATH": str(checkout), FOLDER: str(folder)},
        stdout=2,  # the standard error
        check=False,
    )


def _records(folder: Path) -> list[Any]:
    return [json.loads(file.read_text()) for file in folder.glob("*.json")]


def seconds_of(folder: Path) -> dict[str, float]:
    """Returns how long each test of a record took."""
    return {k: v for each in _records(folder) for k, v in each["seconds"].items()}


def read(folder: Path) -> dict[tuple[str, bool], list[str]]:
    """The tests, quick ones first, by the place that they reach and whether it held."""
    seconds = seconds_of(folder)
    found: dict[tuple[str, bool], set[str]] = defaultdict(set)
    for each in _records(folder):
        for place, held, tests in each["found"]:
            found[place, held].update(tests)
    return {k: sorted(v, key=lambda t: seconds.get(t, 0.0)) for k, v in found.items()}
