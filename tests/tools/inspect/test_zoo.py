"""Every program of the zoo can be explained: plain, differentiated, and under autocast.

The products that a report lists are compared with those that another walk over the
jaxpr counts, without any knowledge of what the primitives mean.
"""

import collections

import equinox as eqx
import jax
import pytest

import mpx
from tests.autocast.counting import PRODUCTS, products
from tests.autocast.zoo import PROGRAMS, cases, gradient


def listed(report):
    """The products in a report by operand dtypes, devices and solvers aside."""
    counts = collections.Counter()
    for operation in report.operations:
        if operation.primitive in PRODUCTS:
            dtypes = tuple(text.partition("[")[0] for text in operation.inputs[:2])
            counts[dtypes] += operation.executions
    return counts


def counted(func, *args):
    arrays, others = eqx.partition(args, eqx.is_array)

    def flat(arrays):
        leaves = jax.tree.leaves(func(*eqx.combine(arrays, others)))
        return [leaf for leaf in leaves if eqx.is_array(leaf)]

    counts = collections.Counter()
    for dtypes, times in products(flat, arrays):
        counts[dtypes] += times
    return counts


@pytest.mark.parametrize("name", cases())
def test_a_program_is_explained(name):
    program = PROGRAMS[name]
    with program.context():
        func, args = program.make()
        plain = mpx.explain(func)(*args)
        around = {place.split()[0] for o in plain.operations for place in o.inside}
        around |= {o.primitive for o in plain.operations}
        if around & {"shard_map", "custom_linear_solve", "pallas_call"}:
            # The other walk knows no devices, and enters kernels and what never runs.
            assert sum(listed(plain).values()) > 0 or not counted(func, *args)
        else:
            assert listed(plain) == counted(func, *args)
        derivative = gradient(func, program.argnums, forward_mode=program.forward_mode)
        for explained in (derivative, mpx.autocast(func)):
            report = mpx.explain(explained)(*args)
            assert report.operations
            assert mpx.reports.Report.from_json(report.to_json()) == report
            assert report.to_html()
            assert len(report.table(limit=5).splitlines()) > 8
            for operation in report.operations:
                assert operation.executions >= 1
                assert operation.phase in ("forward", "backward", "recompute")
                assert "mpx:" not in operation.where
