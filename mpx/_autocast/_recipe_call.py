"""Calls a function under a recipe, or with the state of one.

Only such calls have weights that carry slots, an output layer that is quantized after
all because it is the only product, and the error if a recipe finds nothing to quantize.
"""

import collections
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import JaxprEqn
from jaxtyping import PyTree

from .._base.dtypes import is_half
from .._base.errors import listing, warn_user
from .._base.jax_compat import manual_axes, scope_names
from .._program import PrimitiveClass, distinct_equations, line_of, properties
from .._quantize import AbstractRecipe, Stored
from .._recipe_state import Slots, State, StateRequests, note_used
from .._settings import MARK, Precision, Rules, Weights, ambient
from ._context import Run, Value, declared
from ._decide import Note, Reason, read_note, taking_notes

# --- Why a recipe quantizes nothing ---------------------------------------------------
#
# The notes that `mpx.explain` reads contain the reason for each product. So the program
# is emitted once more with notes; nothing is recorded if a recipe finds products.

_LINES, _REASONS = 3, 4
_NOT_QUANTIZED = "not quantized: "
# By a part of the reason: its meaning, and the remedy.
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
    """Returns the message for a recipe that found nothing to quantize.

    Args:
        attempt: Emits the program.
        recipe: The recipe.
        weights: Positions and names of the arguments that contain parameters.
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
    """Counts the products of a program, by reason and by line."""
    found: dict[str, collections.Counter[str]] = {}

    def arrays() -> list[jax.Array]:
        return [x for x in jax.tree.leaves(attempt()) if isinstance(x, jax.Array)]

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


# --- The call -------------------------------------------------------------------------
Source = StateRequests | State | None


def counts_uses(source: Source) -> bool:
    """Returns whether the quantized uses of weights are recorded or prescribed."""
    return isinstance(source, StateRequests) or _is_frozen(source)


def _is_frozen(source: Source) -> bool:
    """Returns whether a state prescribes which uses of weights are quantized."""
    return isinstance(source, State) and bool(source.quantized)


def refuse_low(rules: Rules) -> None:
    """Raises if a rule sets low precision where no recipe is active."""
    if any(rule.precision is Precision.LOW for rule in rules.rules):
        raise ValueError(
            "`mpx.Precision.LOW` needs an active recipe; none is set. Pass one: "
            "`mpx.autocast(func, rules=..., recipe=...)`."
        )


def weight_of_recipe(
    run: Run,
    value: Value,
    name: str,
    owner: str,
    source: Source,
    stored: Stored | None,
) -> Value:
    """Prepares a parameter for products under a recipe.

    Args:
        run: The run.
        value: The parameter.
        name: Its path; empty if paths are not needed.
        owner: Distinguishes models of one kind, which have the same paths.
        source: The source of its slots.
        stored: Its stored form in 8 bits, if it has one.
    """
    target, array = run.settings.device, value.array
    if target.transposes_fp8 and is_half(value.dtype):
        # FP8 products need it transposed, and XLA would transpose all that the
        # optimizer computes with it, in float32: masters, moments, the selection for
        # skipped steps. The barrier prevents this: a Llama of 542 M moves 77 GB and not
        # 105 (jax 0.10.2, compiled for sm_90, November 2026).
        value = declared(jax.lax.optimization_barrier(array), name)
    value.stored = stored
    if run.uses.slots and jnp.issubdtype(value.dtype, jnp.number):
        # Under `shard_map` it is a piece of the weight. Integers are weights only after
        # the program has converted them.
        shape = array.shape if value.facts.is_declared and not manual_axes() else None
        value.slots = Slots.of_parameter(owner + name, source, shape)
        if shape is not None and (stored is None or value.copy is not None):
            value.slots = value.slots.measured(array, target)
        run.parameters.add(owner + name)
    return value


def call_with_recipe(
    attempt: Callable[[bool], tuple[PyTree, Run]],
    recipe: AbstractRecipe | None,
    source: Source,
    weights: Weights,
    spares_final: bool,
    func: Callable[..., PyTree],
) -> tuple[PyTree, Run]:
    """Calls a function, rewritten, so that the recipe quantizes something.

    Args:
        attempt: Rewrites and calls it; its argument is `spares_final`.
        recipe: The recipe; None if only a state is given.
        source: The source of slots.
        weights: Positions and names of the arguments that contain parameters.
        spares_final: Whether recipes do not quantize the output layer.
        func: The function; the error depends on whether it is an autocast function.

    Returns:
        The function's results, and the run.
    """
    is_frozen = _is_frozen(source)

    def finds_nothing(run: Run) -> bool:
        return recipe is not None and recipe not in run.used.recipes | run.used.one_row

    if ambient().takes_notes and recipe is not None and not is_frozen:
        # A failed attempt would appear in the report.
        runs: list[Run] = []
        jax.eval_shape(lambda: runs.append(attempt(spares_final)[1]))
        spares_final = spares_final and not finds_nothing(*runs)
    results, run = attempt(spares_final)
    if is_frozen:
        assert isinstance(source, State)
        _refuse_state_of_another_model(source, run)
    elif finds_nothing(run):
        # The output layer may be the only weight matmul.
        results, run = attempt(False)
        if finds_nothing(run):
            if getattr(func, MARK, None) is not None:
                raise ValueError(_twice(recipe))
            raise ValueError(why_nothing(lambda: attempt(False)[0], recipe, weights))
    if recipe is not None and recipe not in run.used.recipes and not is_frozen:
        warn_user(
            f"`mpx.autocast(..., recipe={type(recipe).__name__}(...))` quantized "
            "nothing: data has at most one row here, so its weight matmuls are "
            "computed in half precision. This is fine for the last batch of an "
            "epoch, or a single example."
        )
    # A state belongs to this program even if one row does not use it.
    used = run.used.recipes | run.used.one_row
    note_used(used, run.parameters, has_recipe=recipe is not None)
    return (marked(results) if isinstance(source, StateRequests) else results), run


def _refuse_state_of_another_model(state: State, run: Run) -> None:
    known = sorted({name.parameter for name in state.quantized or ()})
    if run.uses.slots and run.parameters.isdisjoint(known):
        raise ValueError(
            "`scaling` of `mpx.inference(func, scaling)` must be the state of this "
            f"model and argument; got one of the weights {listing(known)}, and "
            f"`func` has {listing(sorted(run.parameters)) or 'none'}."
        )


def _twice(recipe: object) -> str:
    return (
        f"`mpx.autocast(func, recipe={type(recipe).__name__}(...))` must get a "
        "function that is not an autocast function; got one, whose own precision "
        "applies to its matmuls. Set the recipe there, in its only `mpx.autocast`."
    )


# Names a result of an autocast function, while slots are collected.
_MARK = "mpx: what an autocast function returns"


def marked(results: PyTree) -> PyTree:
    """Marks one result, so that it is found in a program that calls the function."""
    leaves, tree = jax.tree.flatten(results)
    first = next((i for i, x in enumerate(leaves) if isinstance(x, jax.Array)), None)
    if first is not None:
        leaves[first] = checkpoint_name(leaves[first], _MARK)
    return jax.tree.unflatten(tree, leaves)


def is_marked(equation: JaxprEqn) -> bool:
    """Returns whether an equation marks a result of an autocast function."""
    return equation.primitive.name == "name" and equation.params.get("name") == _MARK
