"""The process that measures, in our environment or in the peers'.

It reads one request from standard input and writes one JSON object a line to standard
output; what libraries print goes to standard error. Behind each answer to the request
it waits for a line, which says that it is its turn, or for the end of standard input.
The same file serves all environments: with our `mpx` as `python -m benchmarks.worker`,
and with the published MPX, whose package has the same name, as
`python -P benchmarks/worker.py` (the repository is then not on the path, so `mpx` is
the installed one).

A request is `{"task": ..., "arms": "ours" | "peers", "cases": [...], ...}`.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
_PACKAGES = (
    "jax jaxlib jax-cuda12-plugin jax-cuda13-plugin libtpu equinox optax flax qwix "
    "mixed-precision-for-JAX jmp torch"
).split()


def _add_package(name: str) -> None:
    """Makes a package of the repository importable, and nothing else of it."""
    if name in sys.modules:
        return
    folder = REPOSITORY / name
    spec = importlib.util.spec_from_file_location(
        name, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    if spec is None or spec.loader is None:
        raise FileNotFoundError(f"the worker needs the folder {folder}; it is missing")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)


def _check(side: str) -> None:
    """Whether the `mpx` of this environment is the one that was asked for."""
    if side == "torch":
        return
    import mpx

    ours = Path(str(mpx.__file__)).resolve().is_relative_to(REPOSITORY / "mpx")
    if ours != (side != "peers"):
        raise RuntimeError(
            f"the worker was asked for the arms of {side!r}, but `mpx` here is "
            f"{mpx.__file__}. Run it in the other environment."
        )


def versions() -> dict[str, str]:
    """What the numbers of this process depend on."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    library = os.environ.get("TPU_LIBRARY_PATH")
    if library and "libtpu" not in found:
        # Used from another environment: its metadata lies beside it.
        site = Path(library).resolve().parent.parent
        for metadata in site.glob("libtpu-*.dist-info"):
            found["libtpu"] = metadata.name.split("-")[1].removesuffix(".dist")
    return found


def _part(request: dict[str, Any]) -> Any:
    """The module that builds and counts the steps of a request; see `parts`."""
    return importlib.import_module(f"benchmarks.counts.{request['steps']}")


def _compiling_for(request: dict[str, Any], target: str) -> Any:
    """Tells our autocast which device is compiled for; it is not the one here."""
    if request["arms"] != "ours":
        return contextlib.nullcontext()  # no autocast
    import mpx

    return mpx.autocast(target=target, ambient=True)


def _compiled(lowered: Any, fields: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """What was compiled, and what there is to say beside."""
    return lowered.compile(), {}


def _count(request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Compiles each case for the target and counts; known programs are skipped."""
    import jax

    from benchmarks import results
    from benchmarks.counter import TARGETS, counter
    from benchmarks.fingerprint import fingerprint

    part, target = _part(request), TARGETS[request["target"]]
    compiler = results.compiler(versions(), target.platform)
    known = {tuple(pair) for pair in request.get("known", ())}
    compile = getattr(part, "compile", _compiled)
    for fields in request["cases"]:
        devices = counter.compile_only_devices(target, fields.get("devices", 1))
        with _compiling_for(request, target.name):
            step = part.build(fields, devices)
            lowered = step.jitted().trace(step.state, step.batch).lower()
        program = fingerprint(lowered)
        answer: dict[str, Any] = {"case": fields, "program": program}
        if (program, compiler) not in known:
            try:
                compiled, more = compile(lowered, fields)
            except jax.errors.JaxRuntimeError as error:
                if "RESOURCE_EXHAUSTED" not in str(error):
                    raise
                answer["counts"] = None  # does not fit into the device's memory
            else:
                answer["counts"] = {**part.count(compiled, fields), **more}
        yield answer


def _lower(request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Fingerprints of cases lowered for a target that need not be here."""
    from benchmarks.counter import TARGETS
    from benchmarks.fingerprint import fingerprint

    build = _part(request).build
    for fields in request["cases"]:
        target = TARGETS[fields["target"]]
        with _compiling_for(request, target.name):
            step = build(fields)
            traced = step.jitted().trace(step.state, step.batch)
        lowered = traced.lower(lowering_platforms=(target.platform,))
        yield {"case": fields, "program": fingerprint(lowered)}


# What answers a request. Any other task is a module, whose `measure` does.
TASKS = {"count": _count, "lower": _lower}


def main() -> None:
    """Answers the request on standard input."""
    # Only answers may reach the parent: what else prints goes to standard error.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    request = json.loads(sys.stdin.readline())
    _add_package("examples")
    _add_package("benchmarks")
    print(json.dumps({"versions": versions()}), file=answers, flush=True)
    _check(request["arms"])
    name = request["task"]
    task = TASKS.get(name) or importlib.import_module(f"benchmarks.{name}").measure
    for answer in task(request):
        print(json.dumps(answer), file=answers, flush=True)
        sys.stdin.readline()


if __name__ == "__main__":
    main()
