"""What the repository promises about itself: imports, documentation, lock."""

import ast
import dataclasses
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import jaxtyping
import pytest

import mpx

ROOT = Path(__file__).parents[1]

# No backend can be started under this name, so whatever needs one fails.
NO_BACKEND = {"JAX_PLATFORMS": "no_such_platform"}
NOT_IMPORTED = ("optax", "flax", "haiku", "jmp")


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    """Runs code in a new interpreter in which no backend can be started."""
    return subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | NO_BACKEND,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )


def import_check(statement: str) -> subprocess.CompletedProcess[str]:
    return run_python(
        f"import sys\n{statement}\n"
        f"found = sorted(set({NOT_IMPORTED!r}) & set(sys.modules))\n"
        "sys.exit(f'imported: {found}' if found else 0)"
    )


def test_import_starts_no_backend_and_imports_no_framework():
    result = import_check("import mpx, mpx.compat.flax, mpx.compat.jmp")
    assert result.returncode == 0, result.stderr


# Most programs need ten; what only some need has a module of its own.
MOST_NAMES = 64


def test_all_that_is_public_is_in_all_but_the_modules_imported_on_demand():
    """Which need what `import mpx` does not: `mpx.nnx` wants Flax.

    They are there without an import of their own; `mpx.nnx`, too, as
    `test_the_adapter_is_imported_on_demand` shows.
    """
    on_demand = {"compat", "contrib", "nn", "nnx", "quantization", "reports"}
    assert len(set(mpx.__all__)) == len(mpx.__all__) <= MOST_NAMES
    assert {f"mpx.{name}" for name in {*mpx.__all__, *on_demand}} == public_names()
    modules = {f"mpx.{name}" for name in on_demand}
    result = run_python(
        "import sys\nfrom mpx import *\nautocast, explain\n"
        f"assert not {modules} & sys.modules.keys()\n"
        "import mpx\nmpx.compat\n"
        "assert 'mpx.nn' not in sys.modules\nmpx.nn.Linear"
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("statement", "complaint"),
    [
        ("import jax; jax.numpy.zeros(1)", "no_such_platform"),
        pytest.param(
            "import jax; jax.devices()", "no_such_platform", marks=pytest.mark.slow
        ),
        ("import mpx, optax", "imported: ['optax']"),
    ],
)
def test_the_import_check_can_fail(statement: str, complaint: str):
    result = import_check(statement)
    assert result.returncode != 0
    assert complaint in result.stderr


def documented_names() -> set[str]:
    """The objects that the pages of the API show, by their mkdocstrings directives."""
    pages = sorted((ROOT / "docs" / "api").glob("*.md"))
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    return set(re.findall(r"^::: ([\w.]+)$", text, flags=re.MULTILINE))


def public_names() -> set[str]:
    names = [name for name in dir(mpx) if not name.startswith("_")]
    # The jaxtyping hook of the tests imports jaxtyping into every module.
    return {f"mpx.{name}" for name in names if getattr(mpx, name) is not jaxtyping}


def test_every_public_symbol_is_on_a_page():
    documented = documented_names()
    # A module is on a page when something of it is.
    parents = {name.rpartition(".")[0] for name in documented}
    grandparents = {name.rpartition(".")[0] for name in parents}
    missing = public_names() - documented - parents - grandparents
    assert not missing, f"add `::: NAME` to a page in docs/api/ for {sorted(missing)}"


def test_the_check_of_public_symbols_sees_symbols():
    assert {"mpx.DynamicLossScaling", "mpx.filter_grad"} <= public_names()


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        (mpx.Rule, {"precision", "primitive", "scope", "parameter", "when"}),
        (mpx.Rules, {"rules", "looks_ahead", "like_pytorch"}),
        (
            mpx.reports.StepRecord,
            {field.name for field in dataclasses.fields(mpx.reports.StepRecord)},
        ),
        (mpx.GradientResult, {"count", "index"}),  # of a tuple
    ],
)
def test_a_class_shows_what_users_say_and_read(kind: type, wanted: set[str]):
    """What only the library calls of it has an underscore, or is a function."""
    shown = {*dir(kind), *kind.__annotations__}
    assert {n for n in shown if not n.startswith("_")} == wanted


# The lock, and that of the packages of others that mpx is tried on.
LOCKS = ("constraints.txt", "rigs/clients/constraints.txt")


def locked_lines(lock: str) -> list[str]:
    text = (ROOT / lock).read_text(encoding="utf-8")
    return [line for line in text.splitlines() if line and not line.startswith("#")]


@pytest.mark.parametrize("lock", LOCKS)
def test_the_lock_holds_exact_versions_and_no_addresses(lock):
    line = re.compile(r"[a-z0-9-]+==[0-9][0-9a-z.]*( ; [\w .'<>=!]+)?")
    wrong = [entry for entry in locked_lines(lock) if not line.fullmatch(entry)]
    assert not wrong


@pytest.mark.parametrize("lock", LOCKS)
def test_the_lock_covers_what_pyproject_asks_for(lock):
    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    extras, is_ours = project["optional-dependencies"], lock == LOCKS[0]
    wanted = [*project["dependencies"]]
    for name, extra in extras.items():
        wanted += extra if is_ours == (name != "clients") else []
    names = {re.match(r"[A-Za-z0-9-]+", text).group().lower() for text in wanted}
    locked = {entry.partition("==")[0] for entry in locked_lines(lock)}
    assert names - locked == ({"mpx-jax"} if is_ours else set())


def test_programs_of_others_are_tried_with_the_jax_of_the_lock():
    """For the oldest Python, which both locks serve."""
    ours = {line.partition(" ;")[0] for line in locked_lines(LOCKS[0])}
    theirs = [line for line in locked_lines(LOCKS[1]) if line.startswith("jax")]
    assert {"jax", "jaxlib"} <= {line.partition("==")[0] for line in theirs}
    assert {line for line in theirs if re.match("jax(lib)?==", line)} <= ours


def test_the_version_is_the_same_everywhere():
    with (ROOT / "pyproject.toml").open("rb") as file:
        version = tomllib.load(file)["project"]["version"]
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {version}\n" in citation
    assert mpx.__version__ == version


def test_the_repository_has_one_address():
    """A placeholder, until one edit fills it in all three (CONTRIBUTING.md)."""
    files = ("README.md", "pyproject.toml", "mkdocs.yml")
    address = re.compile(r"https://github\.com/[\w.-]+/[\w-]+")
    found = [set(address.findall((ROOT / name).read_text("utf-8"))) for name in files]
    assert found[0] == found[1] == found[2] and len(found[0]) == 1


def imports_of_others(file: Path) -> list[tuple[int, str, str]]:
    """What a file of mpx imports from modules beside or above it: line, module, name.

    Not what it has from modules of its own package.
    """
    package = file.relative_to(ROOT).parts[:-1]
    found = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.ImportFrom):
            continue
        base = package[: len(package) - node.level + 1] if node.level else ()
        module = (*base, *(node.module or "").split("."))
        is_own = len(package) > 1 and module[: len(package)] == package
        if module[0] == "mpx" and module[-1] and not is_own:
            name = ".".join(module)
            found += [(node.lineno, name, alias.name) for alias in node.names]
    return found


def test_no_module_imports_a_name_with_an_underscore_from_another_package():
    """Names with an underscore belong to their module; modules, to their package.

    The second half is in the contracts of import-linter.
    """
    wrong = [
        f"{file.relative_to(ROOT)}:{line} imports {module}.{name}"
        for file in sorted((ROOT / "mpx").rglob("*.py"))
        for line, module, name in imports_of_others(file)
        if name.startswith("_")
    ]
    assert not wrong


@pytest.mark.parametrize(
    ("folder", "private"),
    [("examples", r"mpx(\.\w+)*\._.*"), ("benchmarks", r"mpx\.\w+\._.*")],
)
def test_examples_import_what_is_public_and_benchmarks_faces(folder, private):
    files = sorted((ROOT / folder).rglob("*.py"))
    imported = {
        f"{node.module}.{alias.name}"
        for file in files
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }
    assert imported
    assert not [name for name in imported if re.fullmatch(private, name)]


def test_the_check_of_imports_sees_imports():
    nnx = {
        name for _, _, name in imports_of_others(ROOT / "mpx" / "nnx" / "_gradients.py")
    }
    assert {"gradient_function", "describe"} <= nnx
    inside = imports_of_others(ROOT / "mpx" / "_step" / "_engine.py")
    modules = {module for _, module, _ in inside}
    assert "mpx._autocast" in modules and "mpx._step._inputs" not in modules


def test_each_package_has_a_contract_that_it_is_imported_by_its_face():
    with (ROOT / "pyproject.toml").open("rb") as file:
        contracts = tomllib.load(file)["tool"]["importlinter"]["contracts"]
    protected = {
        name: contract["allowed_importers"]
        for contract in contracts
        if contract["type"] == "protected"
        for name in contract["protected_modules"]
    }
    inits = [*ROOT.glob("mpx/*/__init__.py"), *ROOT.glob("mpx/_tools/*/__init__.py")]
    names = {".".join(path.parent.relative_to(ROOT).parts) for path in inits}
    # The modules of the one are imported one by one; the other is a folder of packages.
    packages = names - {"mpx._base", "mpx._tools"}
    assert len(packages) == len(names) - 2 > 10
    assert protected == {f"{package}.*": [package] for package in packages}


def test_no_private_module_of_jax_is_used():
    files = sorted((ROOT / "mpx").rglob("*.py"))
    assert files
    wrong = [file for file in files if "jax._src" in file.read_text(encoding="utf-8")]
    assert not wrong


def test_the_prose_of_the_package_has_no_people_and_no_speech_in_it():
    """Programs have no persons in them; values are stored, printed and written."""
    words = re.compile(r"\b(nobody|somebody|anybody|whoever|lies|told|stands)\b", re.I)
    found = [
        f"{file.relative_to(ROOT)}:{number}: {match[0]}"
        for file in sorted((ROOT / "mpx").rglob("*.py"))
        for number, line in enumerate(file.read_text().splitlines(), 1)
        if (match := words.search(line))
    ]
    assert words.search("# Nobody is told.") and not found


# --- Workarounds ----------------------------------------------------------------------

# What was measured with a version says so: `jax 0.10.2`, `jaxlib 0.10.2`, `jax 0.10 to
# 0.12`. Mere differences between versions have a file of their own.
MEASURED_WITH = re.compile(r"\bjax(?:lib)? 0\.\d+(?:\.\d+| to 0\.\d+)")
DIFFERENCES = "_base/jax_compat.py"


def workarounds() -> list[list[str]]:
    """The rows of the list: what, where, with which version, try without it when."""
    text = (ROOT / "docs/contributing/internals.md").read_text()
    table = text.partition("## Workarounds")[2].partition("\n## ")[0]
    rows = [line for line in table.splitlines() if line.startswith("| ")][1:]
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows]


def test_every_workaround_in_the_list_is_in_the_code():
    assert len(workarounds()) > 20, "the search itself is broken"
    for what, where, version, until in workarounds():
        names = re.findall(r"`([^`]+)`", where)
        files = [ROOT / "mpx" / name for name in names if name.endswith(".py")]
        assert files and all(file.is_file() for file in files), where
        text = "".join(file.read_text() for file in files)
        for name in names:
            assert name.endswith(".py") or re.search(rf"\b{name}\b", text), where
        assert MEASURED_WITH.match(version), f"{what}: measured with what?"
        assert until


def test_what_was_measured_with_a_version_is_in_the_list():
    listed = {name for _, where, *_ in workarounds() for name in where.split("`")}
    found = set()
    for file in (ROOT / "mpx").rglob("*.py"):
        # In comments a line may end between the name and the number.
        text = re.sub(r"\s+(?:# )?", " ", file.read_text())
        if MEASURED_WITH.search(text):
            found.add(file.relative_to(ROOT / "mpx").as_posix())
    assert len(found) > 15, "the search itself is broken"
    assert found <= listed | {DIFFERENCES}, (
        "tell docs/contributing/internals.md of these"
    )


def test_no_page_and_no_result_names_a_folder_of_the_machine_that_made_it():
    made = [*ROOT.glob("docs/**/*.md"), *ROOT.glob("[bt]e*/**/*.json")]
    absolute = re.compile(r"(?<![\w.])/[\w.+/-]+/(?:\.venv|site-packages)")
    named = {str(path): absolute.search(path.read_text()) for path in made}
    assert len(named) > 30
    assert not {path: found[0] for path, found in named.items() if found}


# Lines of all modules of benchmarks. More since 2026-11-28: trainings of 3,000 steps,
# where there were 150, `benchmarks cpu`, the first that measures time, and
# `counts.rewrites`, which decides whether each rewrite for XLA still pays. Then whole
# steps on TPUs, of seven kinds of model, and gradient errors by depth; integers and
# rows in each, and products by leg.
MOST_LINES_OF_BENCHMARKS = 9_600


def test_benchmarks_do_not_grow():
    files = (ROOT / "benchmarks").rglob("*.py")
    count = sum(len(path.read_text().splitlines()) for path in files)
    assert count <= MOST_LINES_OF_BENCHMARKS, "take something out first"
