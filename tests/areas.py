"""Which tests look at which part of `mpx`: the map of `tests.of` and `tests.planted`.

A key is a folder or file below `mpx/`. A file belongs to the longest key that holds it.
`tests/test_of.py` checks that every file has an area and that every path exists.
"""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

AREAS = {
    # Programs, and what autocast makes of them.
    "_autocast": "tests/autocast tests/test_inference.py tests/test_weight_amaxes.py "
    "tests/test_recipe_state.py tests/test_recipe_scaling.py "
    "tests/inspect/test_decisions.py tests/benchmarks/test_wire.py",
    "_ambient.py": "tests/test_rounding_step.py tests/test_transformer_engine.py "
    "tests/test_missing_scales.py tests/test_evaluation.py tests/nn/test_recipes.py",
    "_ambient_record.py": "tests/test_house.py tests/autocast tests/nn/test_recipes.py",
    "_cpu_convolution.py": "tests/test_cpu_products.py",
    "_cpu_form.py": "tests/test_cpu_products.py tests/test_xla.py",
    "_cpu_products.py": "tests/test_cpu_products.py tests/test_xla.py",
    "_forced.py": "tests/test_forced.py tests/test_x64.py tests/test_bad_input.py",
    "_forced_program.py": "tests/test_forced.py",
    "_fused_operation.py": "tests/nn tests/inspect tests/autocast/test_kernels.py",
    "_jax_compat.py": "tests/test_xla.py tests/program tests/test_function.py "
    "tests/autocast/test_entries.py tests/autocast/test_control_flow.py "
    "tests/autocast/test_custom_rules.py tests/grad/test_transforms.py "
    "tests/inspect/test_costs.py tests/quantize/test_derivatives.py",
    "_program": "tests/program tests/autocast",
    "_rules.py": "tests/autocast/test_rules.py tests/grad/test_rules_and_scale.py "
    "tests/autocast/test_strict.py tests/forecast/test_report.py",
    "_settings.py": "tests/autocast tests/test_bad_input.py",
    # Values, dtypes and functions.
    "__init__.py": "tests/test_repository.py tests/test_registries.py "
    "tests/test_paper.py",
    "_cast.py": "tests/test_cast.py tests/test_paper.py tests/test_bad_input.py",
    "_dtypes.py": "tests/test_dtypes.py tests/test_cast.py tests/test_x64.py",
    "_errors.py": "tests/test_bad_input.py tests/test_bad_gradients.py "
    "tests/nnx/test_bad_input.py tests/quantize/test_bad_input.py",
    "_function.py": "tests/test_function.py tests/test_bad_input.py",
    "_nnx_graph": "tests/nnx",
    "_policy.py": "tests/test_policy.py tests/grad/test_options.py "
    "tests/test_bad_input.py",
    "_tree.py": "tests/test_tree.py tests/test_cast.py tests/test_bad_input.py",
    "_typing.py": "tests/test_function.py tests/test_cast.py",
    "_wraps.py": "tests/test_function.py tests/test_forced.py "
    "tests/autocast/test_entries.py",
    # Low precision.
    "_few_bits": "tests/few_bits",
    "_flax_arrays.py": "tests/compat/test_flax.py tests/test_state.py",
    "_payloads.py": "tests/test_stored_products.py",
    "_quantize": "tests/quantize tests/autocast tests/reference",
    "_recipe_state": "tests/test_recipe_state.py tests/test_weight_amaxes.py "
    "tests/autocast tests/test_recipe_scaling.py tests/test_inference.py",
    "_scaling": "tests/test_recipe_scaling.py tests/test_inference.py "
    "tests/test_init_scaling.py tests/test_bad_input.py",
    "_stored_weights.py": "tests/test_stored_weights.py tests/test_stored_products.py",
    "quantization.py": "tests/test_repository.py tests/test_registries.py",
    # A training step.
    "_check.py": "tests/test_step_checks.py tests/test_bad_losses.py "
    "tests/test_recipe_overflow.py tests/test_bad_input.py",
    "_grad": "tests/grad tests/test_bad_gradients.py tests/test_bad_input.py",
    "_init_optimizer.py": "tests/test_init_optimizer.py",
    "_loss_scaling": "tests/test_loss_scaling.py tests/test_state.py tests/grad "
    "tests/test_bad_input.py",
    "_master_weights.py": "tests/master_weights tests/test_stored_weights.py "
    "tests/few_bits",
    "_new_weight.py": "tests/master_weights tests/few_bits/test_small_weights.py "
    "tests/few_bits/test_together.py",
    "_optimizer.py": "tests/test_optimizer.py tests/test_step_checks.py "
    "tests/test_bad_input.py",
    "_skipped.py": "tests/few_bits tests/master_weights",
    "_state_bytes.py": "tests/few_bits",
    "_wire": "tests/benchmarks/test_wire.py tests/test_devices.py tests/grad "
    "tests/test_stored_products.py",
    # Tools.
    "__main__.py": "tests/test_main.py",
    "_blame": "tests/blame tests/test_tools_on_targets.py tests/test_bad_input.py",
    "_contract": "tests/contract",
    "_counter": "tests/forecast tests/contract/test_hlo.py tests/benchmarks",
    "_doctor.py": "tests/test_main.py",
    "_forecast": "tests/forecast tests/test_tools_on_targets.py",
    "_guard.py": "tests/test_guard.py tests/faults",
    "_hlo_text.py": "tests/contract tests/forecast/test_counting.py",
    "_inspect": "tests/inspect tests/test_tools_on_targets.py tests/test_bad_input.py",
    "_report_files.py": "tests/inspect/test_page.py tests/forecast/test_report.py "
    "tests/blame/test_blame.py",
    "_watch": "tests/watch tests/test_tools_on_targets.py tests/test_bad_input.py",
    "reports.py": "tests/test_repository.py tests/test_registries.py",
    # Public packages.
    "compat": "tests/compat tests/test_paper.py",
    "contrib": "tests/contrib",
    "nn": "tests/nn",
    "nnx": "tests/nnx",
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
