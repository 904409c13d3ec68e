"""The package's counter, also where `mpx` is the published package of that name.

The counter imports nothing else of mpx, so it is loaded by its path, under a name of
this package.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

_MPX = Path(__file__).resolve().parent.parent / "mpx"


def _loaded(file: str, name: str) -> Any:
    path, name = _MPX / file, f"{__package__}.{name}"
    if name not in sys.modules:
        folder = [str(path.parent)] if path.name == "__init__.py" else None
        spec = importlib.util.spec_from_file_location(
            name, path, submodule_search_locations=folder
        )
        if spec is None or spec.loader is None:
            raise FileNotFoundError(f"benchmarks need {path}")
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


counter = _loaded("_tools/_counter/__init__.py", "_counter")
TARGETS: dict[str, Any] = counter.TARGETS
