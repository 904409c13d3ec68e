"""Every primitive of the installed JAX has a class."""

import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from mpx._autocast import _classes
from mpx._autocast._classes import CLASSES, PrimitiveClass, class_of

# Imports every module, which the other tests of this process need not suffer.
_SEARCH = """
import gc, importlib, pkgutil
import equinox.internal, jax
from jax.extend.core import Primitive

for module in pkgutil.walk_packages(jax.__path__, "jax.", onerror=lambda _: None):
    if "test" in module.name or ".tools" in module.name:
        continue  # these start programs, or need what is not installed
    try:
        importlib.import_module(module.name)
    except (ImportError, RuntimeError, AttributeError):
        continue  # bindings for a device or a package that is not here
for found in gc.get_objects():
    if isinstance(found, Primitive):
        print(found.name)
"""


def test_every_primitive_of_jax_and_equinox_has_a_class():
    search = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _SEARCH],
        capture_output=True,
        text=True,
        check=True,
    )
    found = set(search.stdout.split())
    assert len(found) > 300, "the search itself is broken"
    assert {"dot_general", "scan", "fft", "while", "psum", "pallas_call"} <= found
    missing = sorted(x for x in found if class_of(x, np.dtype(jnp.bfloat16)) is None)
    assert not missing, f"give these a class in mpx/_autocast/_classes.py: {missing}"


def test_no_primitive_stands_in_two_tables():
    tables = [
        value
        for name, value in vars(_classes).items()
        if name.isupper() and name.startswith("_") and isinstance(value, str)
    ]
    names = " ".join(tables).split()
    assert len(names) == len(set(names)) == len(CLASSES)


@pytest.mark.parametrize(
    ("name", "dtype", "expected"),
    [
        ("dot_general", jnp.float16, PrimitiveClass.HALF),
        ("exp", jnp.bfloat16, PrimitiveClass.FULL),
        ("add", jnp.bfloat16, PrimitiveClass.PROMOTE),
        ("tanh", jnp.bfloat16, PrimitiveClass.FOLLOW),
        ("convert_element_type", jnp.bfloat16, PrimitiveClass.CONVERT),
        ("scan", jnp.bfloat16, PrimitiveClass.RECURSE),
        ("svd", jnp.bfloat16, PrimitiveClass.OPAQUE),
        # 40.3**3 and 255.9**2 overflow float16 and are nothing to bfloat16.
        ("integer_pow", jnp.bfloat16, PrimitiveClass.PROMOTE),
        ("integer_pow", jnp.float16, PrimitiveClass.FULL),
        ("square", jnp.float16, PrimitiveClass.FULL),
        # Since jax 0.11: in the derivatives of tanh and others, of numbers within ±1.
        ("one_minus_square", jnp.float16, PrimitiveClass.FOLLOW),
        ("polynomial", jnp.bfloat16, PrimitiveClass.FULL),
        ("made_up_by_a_user", jnp.bfloat16, None),
    ],
)
def test_class_of(name, dtype, expected):
    assert class_of(name, np.dtype(dtype)) is expected
