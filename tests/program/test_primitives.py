"""The book of primitives: each stands in it once, and what reads it finds all."""

import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from mpx._autocast import _control_flow, _custom_rules, _emit, _loops
from mpx._inspect import _costs
from mpx._program import PRIMITIVES, Flops, PrimitiveClass, class_of, primitives

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
    assert not missing, f"give these a word in mpx/_program/primitives.py: {missing}"


def test_a_primitive_stands_in_one_group():
    before = dict(PRIMITIVES)
    with pytest.raises(ValueError, match="exp stands in two groups"):
        primitives._group("exp", PrimitiveClass.FULL)
    assert before == PRIMITIVES


def names(**known):
    return {
        name
        for name, record in PRIMITIVES.items()
        if all(getattr(record, field) == value for field, value in known.items())
    }


def test_functions_for_primitives_are_for_those_that_the_book_has():
    modules = (_control_flow, _loops, _custom_rules)
    programs = {name for module in modules for name in module.REWRITES}
    assert programs == names(kind=PrimitiveClass.RECURSE)
    scatters = names(combines=True, writes_part=True)
    assert _emit._SCATTERS.keys() == scatters
    assert _emit._ARITHMETIC.keys() <= names(flops=Flops.ELEMENTWISE)
    assert _costs._COUNTS.keys() == set(Flops) - {Flops.UNKNOWN}


def test_every_primitive_that_autocast_computes_with_is_counted():
    computed = (
        PrimitiveClass.HALF,
        PrimitiveClass.FULL,
        PrimitiveClass.PROMOTE,
        PrimitiveClass.FOLLOW,
        PrimitiveClass.CONVERT,
    )
    uncounted = names(flops=Flops.UNKNOWN)
    # Sparse products depend on data; mpx's own attention is never in a program whole.
    missing = {name for name in uncounted if PRIMITIVES[name].kind in computed}
    assert missing == {"bcoo_dot_general", "dot_product_attention"}


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
