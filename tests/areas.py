"""Which tests look at which part of `mpx`: the map of `tests.of` and `tests.planted`.

A key is a folder or file below `mpx/`. A file belongs to the longest key that holds it.
`tests/test_of.py` checks that every file has an area and that every path exists.
"""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

AREAS = {
    "__init__.py": "tests/test_repository.py tests/test_registries.py "
    "tests/test_paper.py",
    "__main__.py": "tests/tools/test_main.py",
    "quantization.py": "tests/test_repository.py tests/test_registries.py",
    "reports.py": "tests/test_repository.py tests/test_registries.py",
    "compat": "tests/compat tests/test_paper.py",
    "contrib": "tests/contrib",
    "nn": "tests/nn",
    "nnx": "tests/nnx",
    "_tools": "tests/tools",
    "_tools/_blame": "tests/tools/blame tests/tools/test_on_targets.py "
    "tests/test_bad_input.py",
    "_tools/_counter": "tests/tools/forecast tests/tools/expect/test_hlo.py "
    "tests/benchmarks",
    "_tools/_expect": "tests/tools/expect",
    "_tools/_export": "tests/tools/export",
    "_tools/_forecast": "tests/tools/forecast tests/tools/test_on_targets.py",
    "_tools/_guard.py": "tests/tools/test_guard.py tests/faults",
    "_tools/_inspect": "tests/tools/inspect tests/tools/test_on_targets.py "
    "tests/test_bad_input.py",
    "_tools/_report_files.py": "tests/tools/inspect/test_page.py "
    "tests/tools/forecast/test_report.py tests/tools/blame/test_blame.py",
    "_tools/_watch": "tests/tools/watch tests/tools/test_on_targets.py "
    "tests/test_bad_input.py",
    "_memory": "tests/memory tests/stored_weights",
    "_step": "tests/step tests/test_bad_input.py",
    "_autocast": "tests/autocast tests/step/test_inference.py tests/recipe_state "
    "tests/step/test_recipe_scaling.py tests/tools/inspect/test_decisions.py "
    "tests/benchmarks/test_wire.py",
    "_autocast/_contexts.py": "tests/step/test_rounding_step.py "
    "tests/test_transformer_engine.py "
    "tests/step/test_evaluation.py tests/nn/test_recipes.py",
    "_autocast/_forced.py": "tests/autocast/test_forced.py tests/test_x64.py "
    "tests/test_bad_input.py",
    "_autocast/_fused.py": "tests/nn tests/tools/inspect "
    "tests/autocast/test_kernels.py",
    "_recipe_state": "tests/recipe_state tests/autocast "
    "tests/step/test_recipe_scaling.py tests/step/test_inference.py",
    "_loss_scaling": "tests/loss_scaling tests/step tests/test_bad_input.py",
    "_wire.py": "tests/benchmarks/test_wire.py tests/step "
    "tests/stored_weights/test_stored_products.py",
    "_stored_weights.py": "tests/stored_weights tests/compat/test_flax.py",
    "_settings": "tests/settings tests/autocast tests/test_bad_input.py",
    "_settings/_cast.py": "tests/settings tests/test_paper.py tests/test_bad_input.py",
    "_settings/_policy.py": "tests/settings/test_policy.py tests/step/test_options.py "
    "tests/test_bad_input.py",
    "_quantize": "tests/quantize tests/autocast tests/reference",
    "_program": "tests/program tests/autocast",
    "_program/cpu_products.py": "tests/program/test_cpu_products.py tests/test_xla.py",
    "_nnx_graph": "tests/nnx",
    "_base": "tests/base tests/settings tests/test_x64.py tests/test_bad_input.py",
    "_base/errors.py": "tests/test_bad_input.py tests/step/test_bad_gradients.py "
    "tests/nnx/test_bad_input.py tests/quantize/test_bad_input.py",
    "_base/jax_compat.py": "tests/test_xla.py tests/program "
    "tests/settings/test_function.py tests/autocast/test_gathers.py "
    "tests/autocast/test_control_flow.py tests/autocast/test_custom_rules.py "
    "tests/step/test_transforms.py tests/tools/inspect/test_costs.py "
    "tests/quantize/test_derivatives.py",
    "_base/wraps.py": "tests/settings/test_function.py tests/autocast/test_forced.py "
    "tests/autocast/test_gathers.py",
}


def area_of(file: Path | str) -> str:
    """Returns the area of a file, given as a path from the root of the repository."""
    parts = Path(file).parts[1:]
    for length in range(len(parts), 0, -1):
        if (area := "/".join(parts[:length])) in AREAS:
            return area
    raise KeyError(f"{file} has no area: enter it in tests/areas.py")


def files_of(area: str) -> list[Path]:
    """Returns the files of an area, without those of areas inside of it."""
    path = ROOT / "mpx" / area
    files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
    return [file for file in files if area_of(file.relative_to(ROOT)) == area]
