"""Activations behind quantized products: the programs, their table and goal."""

import dataclasses
import functools
import itertools
import re

import pytest

from benchmarks import results
from benchmarks.counts import activations as activation_counts
from benchmarks.counts.activations import CASES, Case


def lowered(case: Case) -> str:
    step = activation_counts.build(dataclasses.asdict(case))
    traced = step.jitted().trace(step.state, step.batch)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(
    ("case", "layers"),
    [
        (Case("gelu", "current", "autocast", "h100"), 2),
        (Case("geglu", "current", "layers", "h100"), 3),
    ],
)
def test_every_product_of_a_step_is_quantized(case: Case, layers: int):
    """With its derivatives, and what `jax.checkpoint` computes again."""
    text = lowered(case)
    dots = [line for line in text.splitlines() if "dot_general" in line]
    assert all(len(re.findall(r"xf8E\dM\d", line)) == 2 for line in dots)
    # Each kind of block has biases or not.
    assert products_in(text) >= 2 * (3 * layers) + 2 * (3 * layers + 1)


def products_in(text: str) -> int:
    """How many products a program has if one in a function counts at each call."""
    _, *functions = re.split(r"func\.func \w+ @", text)
    bodies = {re.split(r"\W", body, maxsplit=1)[0]: body for body in functions}

    @functools.cache
    def count(name: str) -> int:
        calls = re.findall(r"call @(\w+)", bodies[name])
        return bodies[name].count("dot_general ") + sum(map(count, calls))

    return count("main")


def test_all_combinations_are_compiled_for_an_h100():
    found = {dataclasses.astuple(case) for case in CASES}
    product = itertools.product(
        activation_counts.ACTIVATIONS,
        activation_counts.RECIPES,
        activation_counts.STYLES,
    )
    assert found >= {(*names, "h100") for names in product}
    assert {case.activation for case in CASES if case.target == "b200"} == set(
        activation_counts.ACTIVATIONS
    )
    assert set(activation_counts.BLOCKS) == {
        *((bias, form) for bias in (True, False) for form in ("scan", "remat"))
    }


@pytest.mark.parametrize(("fast", "met"), [(25, True), (24, False)])
def test_the_table_and_the_goal(fast: int, met: bool):
    found = results.Results("recipe-counts", "test", "compiled for X")
    assert not list(activation_counts.tables(found))
    found.records = [
        {**dataclasses.asdict(case), "counts": {"products": 25, "fast": fast}}
        for case in CASES
    ]
    (table,) = activation_counts.tables(found)
    assert table.rows[0] == ["NVIDIA H100 80GB HBM3", "gelu", *[f"{fast} of 25"] * 4]
    assert len(table.rows) == 12 and table.rows[-1][-1] == ""
    (goal,) = activation_counts.goals(found)
    assert goal.met is met and "30 programs" in goal.text
