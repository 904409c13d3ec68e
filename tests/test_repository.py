"""What the repository promises about itself: imports, documentation, lock."""

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


@pytest.mark.parametrize("module", ["mpx", "mpx.compat.flax", "mpx.compat.jmp"])
def test_import_starts_no_backend_and_imports_no_framework(module: str):
    result = import_check(f"import {module}")
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("name", ["nn.Linear", "compat", "nnx.value_and_grad"])
def test_modules_are_there_without_an_import_of_their_own(name: str):
    result = run_python(f"import mpx\nmpx.{name}")
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("statement", "complaint"),
    [
        ("import jax; jax.numpy.zeros(1)", "no_such_platform"),
        ("import jax; jax.devices()", "no_such_platform"),
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


# The lock, and that of the packages of others that mpx is tried on.
LOCKS = ("constraints.txt", "tests/clients/constraints.txt")


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


def test_no_private_module_of_jax_is_used():
    files = sorted((ROOT / "mpx").rglob("*.py"))
    assert files
    wrong = [file for file in files if "jax._src" in file.read_text(encoding="utf-8")]
    assert not wrong
