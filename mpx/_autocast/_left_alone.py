"""Why a recipe quantizes nothing: the reasons that the products of the program have.

They are in the notes that `mpx.explain` reads. So the program is emitted once more with
notes, and nothing is recorded where a recipe finds its products.
"""

import collections
from collections.abc import Callable

import jax
from jaxtyping import PyTree

from .._errors import listing
from .._jax_compat import scope_names
from .._program import PrimitiveClass, distinct_equations, line_of, properties
from .._settings import Weights
from ._decide import Reason
from ._notes import Note, read_note, taking_notes

_LINES, _REASONS = 3, 4
_NOT_QUANTIZED = "not quantized: "
# By the reason, of which a part will do: what it means, and what to do.
_REMEDIES = {
    Reason.PRECISION.value: (
        "omit `precision=` and `jax.default_matmul_precision`, or add "
        "`mpx.Rule(mpx.Precision.LOW, ...)`"
    ),
    "an activation matmul": (
        "weights are computed from {weights} and constants alone. A weight divided by "
        "a value computed from data counts as data: divide the matmul's result "
        "instead. Arguments with masks are weights, too: `weights=(0, 1)`"
    ),
    "a matmul of weights only": (
        "weights are computed from {weights}; arrays that a function closes over are "
        "constants. Pass them as arguments"
    ),
    "a matmul with a vector": "put `jax.vmap` inside `mpx.autocast`",
    "a function with a custom derivative rule": "quantize outside of it",
    "a convolution needs": "use `mpx.Float8CurrentScaling()`",
    "too small to pay": "quantize it by `mpx.Rule(mpx.Precision.LOW, ...)`",
    "dtype": "autocast casts float32, bfloat16 and float16",
    Reason.REGION.value: "omit `enabled=False`",
    Reason.RULE.value: "change the rule",
}


def why_nothing(attempt: Callable[[], PyTree], recipe: object, weights: Weights) -> str:
    """The message for a recipe that found nothing to quantize.

    Args:
        attempt: Emits the program.
        recipe: The recipe.
        weights: Positions and names of the arguments that hold parameters.
    """
    places = f"argument {listing(list(map(str, weights)))} (set by `weights=`)"
    whose = f"the arrays of {places if weights else 'the function itself'}"
    found = _products(attempt)
    total = sum(lines.total() for lines in found.values())
    parts = [
        f"`mpx.autocast(..., recipe={type(recipe).__name__}(...))` found no weight "
        f"matmul to quantize{f' among {total} matmuls' if total else ''}."
    ]
    if not found:
        parts.append(f"There is no matmul or convolution. Weights are {whose}.")
    rows = sorted(found.items(), key=lambda row: -row[1].total())
    for reason, lines in rows[:_REASONS]:
        matching = (text for part, text in _REMEDIES.items() if part in reason)
        remedy = f": {next(matching, '')}".removesuffix(": ").format(weights=whose)
        where = [line for line in lines if line]
        more = ", ..." if len(where) > _LINES else ""
        known = f" ({', '.join(where[:_LINES])}{more})" if where else ""
        parts.append(f"{lines.total()} of {total}: {reason}{known}{remedy}.")
    if len(rows) > _REASONS:
        parts.append(f"And {len(rows) - _REASONS} other reasons: see `mpx.explain`.")
    return " ".join(parts)


def _products(attempt: Callable[[], PyTree]) -> dict[str, collections.Counter[str]]:
    """By reason, the lines of the products of a program, and how many stand there."""
    found: dict[str, collections.Counter[str]] = {}

    def arrays() -> list[jax.Array]:
        leaves = jax.tree.leaves(attempt())
        return [x for x in leaves if isinstance(x, jax.Array)]

    with taking_notes():
        jaxpr = jax.make_jaxpr(arrays)()
    for equation in distinct_equations(jaxpr.jaxpr):
        notes = [read_note(scope) for scope in scope_names(equation)]
        note = next((n for n in reversed(notes) if isinstance(n, Note)), None)
        if note is None or note.primitive != equation.primitive.name:
            continue
        if properties(note.primitive).kind is PrimitiveClass.HALF:
            reason = note.reason.partition(_NOT_QUANTIZED)[2] or note.reason
            lines = found.setdefault(reason, collections.Counter())
            lines[line_of(equation)] += 1
    return found
