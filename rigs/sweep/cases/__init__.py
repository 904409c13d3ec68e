"""All cases, by name."""

import functools
import importlib

from rigs.sweep.case import Case

_FILES = (
    "numpy_elementwise",
    "numpy_reductions",
    "numpy_movement",
    "numpy_products",
    "nn",
    "lax",
    "programs",
    "scipy",
    "optax",
    "linen",
    "equinox",
    "haiku",
)


@functools.cache
def all_cases() -> dict[str, Case]:
    """Returns all cases by name, in the order of the files."""
    found: dict[str, Case] = {}
    for file in _FILES:
        for case in importlib.import_module(f"{__name__}.{file}").CASES:
            if case.name in found:
                raise ValueError(f"Case `{case.name}` is listed twice.")
            found[case.name] = case
    return found
