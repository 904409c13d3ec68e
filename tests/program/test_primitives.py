"""The book of primitives: each stands in it once, and what reads it finds all."""

import pytest

from mpx._autocast import _control_flow, _custom_rules, _emit, _loops
from mpx._inspect import _costs
from mpx._program import PRIMITIVES, Flops, PrimitiveClass, primitives, properties


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
    assert _costs._COUNTS.keys() == set(Flops) - {Flops.UNKNOWN}


def test_every_primitive_that_autocast_computes_with_is_counted():
    computed = (
        PrimitiveClass.HALF,
        PrimitiveClass.FULL,
        PrimitiveClass.MOVE,
        PrimitiveClass.CONVERT,
    )
    uncounted = names(flops=Flops.UNKNOWN)
    # Sparse products depend on data; mpx's own attention is never in a program whole.
    missing = {name for name in uncounted if PRIMITIVES[name].kind in computed}
    assert missing == {"bcoo_dot_general", "dot_product_attention"}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("dot_general", PrimitiveClass.HALF),
        ("exp", PrimitiveClass.FULL),
        ("add", PrimitiveClass.FULL),
        ("tanh", PrimitiveClass.FULL),
        ("reshape", PrimitiveClass.MOVE),
        ("psum", PrimitiveClass.MOVE),
        ("convert_element_type", PrimitiveClass.CONVERT),
        ("scan", PrimitiveClass.RECURSE),
        ("svd", PrimitiveClass.OPAQUE),
        ("made_up_by_a_user", PrimitiveClass.OPAQUE),
    ],
)
def test_class(name, expected):
    assert properties(name).kind is expected
