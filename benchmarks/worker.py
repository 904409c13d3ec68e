"""The process that measures, in our environment or in the peers'.

It reads one request from standard input and writes one JSON object a line to standard
output; what libraries print goes to standard error. The same file serves both
environments: with our `mpx` as `python -m benchmarks.worker`, and with the published
MPX, whose package has the same name, as `python -P benchmarks/worker.py` (the
repository is then not on the path, so `mpx` is the installed one).

A request is `{"task": ..., "arms": "ours" | "peers", "cases": [...], ...}`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# From a case's fields, and devices or none, to its step; and from what was compiled of
# it to its counts.
Build = Callable[..., Any]
Count = Callable[[Any, dict[str, Any]], dict[str, Any]]

REPOSITORY = Path(__file__).resolve().parent.parent
_PACKAGES = (
    "jax",
    "jaxlib",
    "jax-cuda12-plugin",
    "jax-cuda13-plugin",
    "libtpu",
    "equinox",
    "optax",
    "flax",
    "qwix",
    "mixed-precision-for-JAX",
    "jmp",
)


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


def _arms(which: str) -> dict[str, Any]:
    """The arms of this environment, after a look at whose `mpx` it has."""
    import mpx

    ours = Path(str(mpx.__file__)).resolve().is_relative_to(REPOSITORY / "mpx")
    if ours != (which == "ours"):
        raise RuntimeError(
            f"the worker was asked for the arms of {which!r}, but `mpx` here is "
            f"{mpx.__file__}. Run it in the other environment."
        )
    module = "our_arms" if which == "ours" else "peers.arms"
    return importlib.import_module(f"benchmarks.{module}").ARMS


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


def _vit_steps(request: dict[str, Any]) -> tuple[Build, Count]:
    """The steps of the Vision Transformers, in this environment's arms."""
    from benchmarks import steps
    from benchmarks.counts import program as counts

    arms = _arms(request["arms"])

    def build(fields: dict[str, Any], devices: Any = None) -> Any:
        case = steps.Case(**fields)
        return steps.build(arms[case.arm], case, devices)

    def count(compiled: Any, fields: dict[str, Any]) -> dict[str, Any]:
        return dataclasses.asdict(counts.count(compiled))

    return build, count


def _recipe_steps(request: dict[str, Any]) -> tuple[Build, Count]:
    """The steps of the transformers of bytes, under recipes."""
    from benchmarks.counts import recipes as recipe_counts

    return recipe_counts.build, recipe_counts.count


def _eight_bit_steps(request: dict[str, Any]) -> tuple[Build, Count]:
    """The steps of wide models, ours and the peers'."""
    from benchmarks.counts import cost
    from benchmarks.models import eight_bits as eight_bit_models

    def build(fields: dict[str, Any], devices: Any = None) -> Any:
        return eight_bit_models.build(eight_bit_models.Case(**fields), devices)

    return build, cost.count


def _whole_steps(request: dict[str, Any]) -> tuple[Build, Count]:
    """The steps of whole models, ours and the peers'."""
    from benchmarks.counts import cost
    from benchmarks.models import whole_steps

    def build(fields: dict[str, Any], devices: Any = None) -> Any:
        return whole_steps.build(whole_steps.Case(**fields), devices)

    def count(compiled: Any, fields: dict[str, Any]) -> dict[str, Any]:
        return cost.counts_and_units(compiled, fields["target"])[0]

    return build, count


def _half_steps(request: dict[str, Any]) -> tuple[Build, Count]:
    """The steps of models of many kinds, in half precision."""
    from benchmarks.counts import half as half_counts

    return _residual_steps(request)[0], half_counts.count


def _residual_steps(request: dict[str, Any]) -> tuple[Build, Count]:
    """The steps of plain transformers, in this environment's arms."""
    from benchmarks.counts import program as counts
    from benchmarks.models import plain as residual_models

    arms = _arms(request["arms"])

    def build(fields: dict[str, Any], devices: Any = None) -> Any:
        case = residual_models.Case(**fields)
        return residual_models.build(arms[case.arm], case, devices)

    def count(compiled: Any, fields: dict[str, Any]) -> dict[str, Any]:
        products = counts.products(compiled.as_text())
        return {**dataclasses.asdict(counts.count(compiled)), "products": products}

    return build, count


def _activation_steps(request: dict[str, Any]) -> tuple[Build, Count]:
    """The steps of blocks with different activations, under recipes."""
    from benchmarks.counts import activations as activation_counts

    return activation_counts.build, activation_counts.count


def _attention_steps(request: dict[str, Any]) -> tuple[Build, Count]:
    """The steps whose attention is written in different ways."""
    from benchmarks.counts import attention as attention_counts

    return attention_counts.build, attention_counts.count


def _product_steps(request: dict[str, Any]) -> tuple[Build, Count]:
    """One linear layer of many sizes, forward and backward."""
    from benchmarks.counts import products as product_counts

    return product_counts.build, product_counts.count


def _wire_steps(request: dict[str, Any]) -> tuple[Build, Count]:
    """The steps of one transformer in many layouts."""
    from benchmarks.counts import wire

    return wire.build, wire.count


def _monitor_steps(request: dict[str, Any]) -> tuple[Build, Count]:
    """Steps as they are, and the same watched by `mpx.monitor`."""
    from benchmarks.counts import monitor, program as counts

    arms = _arms(request["arms"])

    def build(fields: dict[str, Any], devices: Any = None) -> Any:
        return monitor.build(arms, fields, devices)

    def count(compiled: Any, fields: dict[str, Any]) -> dict[str, Any]:
        return dataclasses.asdict(counts.count(compiled))

    return build, count


STEPS = {
    "vit": _vit_steps,
    "recipes": _recipe_steps,
    "residuals": _residual_steps,
    "activations": _activation_steps,
    "attention": _attention_steps,
    "eight bits": _eight_bit_steps,
    "half": _half_steps,
    "whole": _whole_steps,
    "products": _product_steps,
    "wire": _wire_steps,
    "monitor": _monitor_steps,
}


# A device of each platform.
_USUAL = {"cpu": "cpu", "cuda": "h100", "tpu": "v5e"}


def _compiling_for(request: dict[str, Any], target: str) -> Any:
    """Tells our autocast which device is compiled for; it is not the one here."""
    told = request.get("steps") in ("recipes", "activations")
    if request["arms"] != "ours" or told:
        return contextlib.nullcontext()  # no autocast, or it has been told
    import mpx

    return mpx.autocast(target=target, ambient=True)


def _compiling(request: dict[str, Any], lower: Callable[..., Any]) -> Any:
    """What compiles a lowered case, and what it says of that beside."""
    from benchmarks.counts import cost

    if request.get("steps") == "eight bits":
        return cost.Timed(lower).compile
    if request.get("steps") == "whole":
        return cost.compile_twice
    return lambda lowered, fields: (lowered.compile(), {})


def _count(request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Compiles each case for the target and counts; known programs are skipped."""
    import jax

    from benchmarks import results
    from benchmarks.counts import program as counts, targets

    build, count = STEPS[request.get("steps", "vit")](request)
    target = targets.TARGETS[request["target"]]
    compiler = results.compiler(versions(), target.platform)
    known = {tuple(pair) for pair in request.get("known", ())}
    lower = _lowering(request, build)
    compile = _compiling(request, lower)
    for fields in request["cases"]:
        lowered = lower(fields)
        program = counts.fingerprint(lowered)
        answer: dict[str, Any] = {"case": fields, "program": program}
        if (program, compiler) not in known:
            try:
                compiled, more = compile(lowered, fields)
            except jax.errors.JaxRuntimeError as error:
                if "RESOURCE_EXHAUSTED" not in str(error):
                    raise
                answer["counts"] = None  # does not fit into the device's memory
            else:
                answer["counts"] = {**count(compiled, fields), **more}
        yield answer


def _lowering(request: dict[str, Any], build: Build) -> Callable[..., Any]:
    """What lowers a case for the target of a request."""
    from benchmarks.counts import targets

    target = targets.TARGETS[request["target"]]

    def lower(fields: dict[str, Any]) -> Any:
        devices = targets.compile_only_devices(target, fields.get("devices", 1))
        with _compiling_for(request, target.name):
            step = build(fields, devices)
            return step.jitted().trace(step.state, step.batch).lower()

    return lower


def _kernels(request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The kernels of each case, compiled for a GPU."""
    from benchmarks.counts import kernels

    build, _ = STEPS[request["steps"]](request)
    lower = _lowering(request, build)
    for fields in request["cases"]:
        found = kernels.kernels_of(lower(fields).compile().as_text())
        yield {"case": fields, "kernels": [dataclasses.asdict(one) for one in found]}


def _lower(request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Fingerprints of cases lowered for a platform that need not be here."""
    from benchmarks.counts import program as counts, targets

    build, _ = STEPS[request.get("steps", "vit")](request)
    for fields in request["cases"]:
        named = targets.TARGETS.get(fields.get("target"))
        platform = request["platform"] if named is None else named.platform
        with _compiling_for(request, fields.get("target") or _USUAL[platform]):
            step = build(fields)
            traced = step.jitted().trace(step.state, step.batch)
        lowered = traced.lower(lowering_platforms=(platform,))
        yield {"case": fields, "program": counts.fingerprint(lowered)}


def _host(request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    from benchmarks.time import host as host_cost

    yield from host_cost.measure(_arms(request["arms"]), request)


def _autocast_host(request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    from benchmarks.time import autocast as autocast_host

    yield from autocast_host.measure(request)


def _device(request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    from benchmarks.device import measure

    yield from measure.measure(_arms(request["arms"]), request)


def _folds(request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    from benchmarks.numerics import folds

    yield from folds.measure(request)


def _recipes(request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    from benchmarks.numerics import recipes

    yield from recipes.measure(request)


def _errors(request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    from benchmarks.numerics import errors

    yield from errors.measure(request)


def _kept(request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    from benchmarks.counts import recipes as recipe_counts

    yield from recipe_counts.measure_kept()


def _compile_time(request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    from benchmarks.time import compiling as compile_time

    yield from compile_time.measure(request)


def _versions(request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield from ()


TASKS = {
    "count": _count,
    "kernels": _kernels,
    "lower": _lower,
    "host": _host,
    "autocast host": _autocast_host,
    "device": _device,
    "folds": _folds,
    "recipes": _recipes,
    "errors": _errors,
    "kept": _kept,
    "compile time": _compile_time,
    "versions": _versions,
}


def main() -> None:
    """Answers the request on standard input."""
    # Only answers may reach the parent: what else prints goes to standard error.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    request = json.load(sys.stdin)
    _add_package("examples")
    _add_package("benchmarks")
    print(json.dumps({"versions": versions()}), file=answers, flush=True)
    for answer in TASKS[request["task"]](request):
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
