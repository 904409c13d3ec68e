"""Which product carries the error of a recipe: one weight's products at a time.

The rest of the program is in bfloat16, so that the first line, nothing quantized, is
what each other one is compared with.
"""

from collections.abc import Iterator
from typing import Any

import mpx

from . import gradients, measure
from .record import Client


def carriers(client: Client, recipe: str, seeds: int) -> Iterator[tuple[str, float]]:
    """Gradient errors with the products of one parameter quantized, and of all.

    Args:
        client: The program.
        recipe: One of `gradients.RECIPES` that needs no state.
        seeds: How many numbers each error is taken over.
    """
    built = measure.make_all(client, seeds)
    compiled = measure.Compiled(gradients.plain(built[0]), built[0])
    expected = [compiled(b) for b in built]
    loss, made = built[0].loss, gradients.RECIPES[recipe]()

    def error(wrapped: Any) -> float:
        step = gradients.Step(gradients.gradient(wrapped), None)
        compiled = measure.Compiled(step, built[0], options=measure.LESS)
        return measure.compare(compiled, built, expected)["gradient"]

    yield "nothing", error(mpx.autocast(loss))
    whole = mpx.autocast(loss, recipe=made)
    yield "everything", error(whole)
    report = mpx.explain(gradients.gradient(whole))(
        None, built[0].params, built[0].batch
    )
    found = {p for o in report.operations if o.is_low for p in o.parameters}
    for parameter in sorted(found):
        rules = mpx.Rules(mpx.Rule(made, parameter=parameter))
        yield parameter, error(mpx.autocast(loss, rules=rules))
