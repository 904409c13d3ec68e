"""The package's counter, also where `mpx` is the published package of that name.

The counter is a folder that imports nothing of mpx, so it is loaded by its path.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent.parent / "mpx" / "_forecast" / "_counter"


def _loaded() -> Any:
    name = f"{__package__}._counter"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(
            name, FOLDER / "__init__.py", submodule_search_locations=[str(FOLDER)]
        )
        if spec is None or spec.loader is None:
            raise FileNotFoundError(f"benchmarks need the folder {FOLDER}")
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


counter = _loaded()
TARGETS: dict[str, Any] = counter.TARGETS
