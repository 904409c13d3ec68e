"""The peers' environment `.venv-peers`: the published MPX and JMP, and `libtpu`.

The published MPX installs a package `mpx`, as we do, so it cannot live in our
environment. Its own is made here on first use, from the exact versions of
`constraints.txt` here (the peers) and of the repository's `constraints.txt`
(everything else: the same JAX on both sides).

It also holds the TPU compiler, which our processes use from there: in `.venv` it would
make every start of JAX look for a TPU.
"""

from __future__ import annotations

import dataclasses
import hashlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
DIRECTORY = REPOSITORY / ".venv-peers"
_CONSTRAINTS = (
    REPOSITORY / "constraints.txt",
    Path(__file__).resolve().parent / "constraints.txt",
)
_PACKAGES = tuple("mixed-precision-for-JAX jmp jax equinox optax flax qwix".split())


@dataclasses.dataclass(frozen=True)
class Peers:
    """The peers' environment.

    Attributes:
        python: its interpreter.
        libtpu: its TPU compiler; None where there is no wheel for this machine.
        packages: a folder of packages that go before those of the interpreter.
    """

    python: Path
    libtpu: Path | None
    packages: Path | None = None


def installed_libtpu() -> Path | None:
    found = sorted(DIRECTORY.glob("lib/python*/site-packages/libtpu/libtpu.so"))
    return found[0] if found else None


def existing(packages: Path | None = None) -> Peers | None:
    """What is here already: a folder of packages, or the environment; else None.

    A folder is made by `pip install --target FOLDER --no-deps mixed-precision-for-JAX
    jmp`, for machines with JAX and without a package index.
    """
    if packages is not None:
        return Peers(Path(sys.executable), None, packages)
    if not (DIRECTORY / ".installed").is_file():
        return None
    return Peers(DIRECTORY / "bin" / "python", installed_libtpu())


def _install(python: Path, *packages: str) -> subprocess.CompletedProcess[str]:
    command = [str(python), "-m", "pip", "install", "--quiet", "--no-input"]
    command += ["--disable-pip-version-check"]
    for file in _CONSTRAINTS:
        command += ["--constraint", str(file)]
    return subprocess.run([*command, *packages], capture_output=True, text=True)


def prepare(say: Callable[[str], None] = print) -> Peers:
    """Makes the environment, or finds it as it was made.

    Raises:
        RuntimeError: the peers could not be installed; holds pip's last words.
    """
    python = DIRECTORY / "bin" / "python"
    stamp = DIRECTORY / ".installed"
    texts = [file.read_bytes() for file in _CONSTRAINTS]
    wanted = hashlib.sha256(b"\0".join([*texts, repr(_PACKAGES).encode()])).hexdigest()
    if stamp.is_file() and stamp.read_text() == wanted:
        return Peers(python, installed_libtpu())
    say("Making .venv-peers for the published MPX, JMP and the TPU compiler ...")
    subprocess.run([sys.executable, "-m", "venv", str(DIRECTORY)], check=True)
    result = _install(python, *_PACKAGES)
    if result.returncode:
        raise RuntimeError(
            "the peers could not be installed into .venv-peers; pip said: "
            f"{result.stderr.strip()[-800:]}"
        )
    result = _install(python, "libtpu")
    if result.returncode:
        say(f"No TPU compiler here: {result.stderr.strip().splitlines()[-1]}")
    stamp.write_text(wanted)
    return Peers(python, installed_libtpu())


def prepare_cuda(folder: Path, say: Callable[[str], None] = print) -> Path:
    """Puts JAX's CUDA plugin and its libraries into a folder of their own.

    A folder and no environment: put on the path of either environment, it makes JAX
    compile for CUDA there without a second copy of 5 GB.
    """
    if not (folder / "jax_cuda12_plugin").is_dir():
        say(f"Installing JAX's CUDA plugin into {folder} (5 GB) ...")
        result = _install(
            Path(sys.executable),
            "--target",
            str(folder),
            "jax-cuda12-plugin[with-cuda]",
        )
        if result.returncode:
            raise RuntimeError(
                f"JAX's CUDA plugin could not be installed into {folder}; pip said: "
                f"{result.stderr.strip()[-800:]}"
            )
    return folder
