"""What the module `mpx.nn` promises as a whole."""

import re
import subprocess
import sys
from pathlib import Path

import jaxtyping

import mpx.nn

ROOT = Path(__file__).parents[2]


def public_names():
    names = [name for name in dir(mpx.nn) if not name.startswith("_")]
    return {name for name in names if getattr(mpx.nn, name) is not jaxtyping}


def test_every_name_is_on_its_page_and_nothing_else():
    page = (ROOT / "docs" / "api" / "nn.md").read_text(encoding="utf-8")
    documented = set(re.findall(r"^::: mpx\.nn\.(\w+)$", page, flags=re.MULTILINE))
    assert documented == public_names()
    assert {"softmax", "TransformerLayer"} <= documented


def test_it_is_imported_on_demand_and_starts_no_backend():
    code = (
        "import os, sys; os.environ['JAX_PLATFORMS'] = 'no_such_platform'\n"
        "import mpx; assert 'mpx.nn' not in sys.modules\n"
        "import mpx.nn\n"
        "assert not {'optax', 'flax'} & set(sys.modules)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
