"""`mpx.blame`: replays a skipped step to find its cause.

`blamed` runs variants of the step (loss scale 1, float32) for the verdict and describes
the culprits; `bad_rows` halves the batch to find the rows that cause it.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import KeyPath
from jaxtyping import PyTree

from ..._base.errors import describe
from ..._base.typing import AnyArray, DTypeLike, LeafPredicate
from ..._base.wraps import name_of, wraps
from ..._loss_scaling import AbstractLossScaling
from ..._settings import Policy
from ..._step import Accumulation, Options, gradient_function, positions_in_call
from ..._stored_weights import dequantize_weights
from .._inspect import input_name, share_text
from ._blame_report import Culprit, Verdict
from ._blame_views import BlameReport, rule_text
from ._describe import culprit_of
from ._replay import Replay, refuse_tracers
from ._verdict import (
    CALL,
    StepOf,
    curing_rule,
    is_finite_at_one,
    is_finite_in_bfloat16,
    is_for_all,
    loss_scale_of,
    precision_advice,
)

# --- Bad rows -------------------------------------------------------------------------
#
# The batch is halved. The program is compiled once: when a part of the batch is tried,
# its rows are repeated until the batch is full.

# The most runs of this search.
_RUNS = 200


def bad_rows(
    is_bad: Callable[[Sequence[AnyArray]], bool],
    inputs: Sequence[AnyArray],
    batch: Sequence[int],
) -> tuple[tuple[int, ...], int]:
    """Returns the rows that each make a step bad alone, and how many were not tried.

    Args:
        is_bad: Returns whether the step is bad with given inputs.
        inputs: The inputs of the step.
        batch: The positions of inputs whose first axis is the batch.

    Returns:
        The row numbers, and the number of rows of bad parts left when the runs are used
        up. Empty if no row, or every row, does it alone.
    """
    count = inputs[batch[0]].shape[0] if batch else 0
    found: list[int] = []
    runs = 0

    def of(rows: Sequence[int]) -> list[AnyArray]:
        index = np.resize(np.asarray(rows), count)
        chosen = list(inputs)
        for i in batch:
            x = jnp.asarray(inputs[i])
            # With explicit axes, JAX needs the sharding of the result.
            where = jax.typeof(x).sharding
            is_explicit = any(axis is not None for axis in where.spec)
            chosen[i] = x.at[index].get(out_sharding=where if is_explicit else None)
        return chosen

    todo = [list(range(count))] if count else []
    while todo and runs < _RUNS:
        rows = todo.pop()
        runs += 1
        if not is_bad(of(rows)):
            continue
        if len(rows) == 1:
            found.append(rows[0])
            continue
        middle = len(rows) // 2
        todo += [rows[middle:], rows[:middle]]
    if len(found) == count:
        return (), 0
    return tuple(sorted(found)), sum(map(len, todo))


def batch_inputs(inputs: Sequence[AnyArray], candidates: Sequence[int]) -> list[int]:
    """Returns the inputs that are cut into rows: with the most common first length."""
    shapes = {i: np.shape(inputs[i]) for i in candidates}
    lengths = [shape[0] for shape in shapes.values() if shape and shape[0] > 1]
    if not lengths:
        return []
    most = max(lengths, key=lambda n: (lengths.count(n), n))
    return [i for i, shape in shapes.items() if shape and shape[0] == most]


# --- Replaying and reporting ----------------------------------------------------------


def blame(
    func: Callable[..., PyTree],
    scaling: AbstractLossScaling | None,
    has_aux: bool = False,
    use_mixed_precision: bool = True,
    *,
    argnums: int | tuple[int, ...] | None = None,
    policy: Policy | str | None = None,
    keep: LeafPredicate | None = None,
    accumulate: int | Accumulation = 1,
    accumulate_dtype: DTypeLike | None = None,
    above: float | None = None,
) -> Callable[..., BlameReport]:
    """Returns a function that replays a skipped step to find its cause.

    A skipped step leaves weights and optimizer unchanged, so it can be replayed with
    the same batch. The report names the first NaN or infinite value that reached the
    loss or a gradient: its operation, scope, weight and line, forward or backward pass,
    the loop iteration, and the ranges of its operands. Non-finite values that do not
    reach them, such as a mask of -inf, are not named.

    Its verdict comes from running variants of the step: `scale` if it is finite at a
    loss scale of 1, `precision` if it is finite in float32 (then rules of
    `mpx.autocast` are tried), and `data or mathematics` if it is non-finite in float32,
    too (then the rows of the batch that cause it are searched).

    Pass it what was passed to the gradient function. It runs on the host and compiles
    several programs; it adds nothing to the training step.

    Args:
        func: The loss function, as in `mpx.filter_value_and_grad`.
        scaling: The loss scaling that the step *had*: after a skipped step that is
            `scaling.of_bad_step()`.
        has_aux: As in `mpx.filter_grad`, like the options below.
        use_mixed_precision: False runs in full precision.
        argnums: The differentiated arguments, as in `mpx.grad`; None for the arrays of
            the first argument, as in `mpx.filter_grad`.
        policy: The policy.
        keep: Selects leaves that are not cast.
        accumulate: Micro-batches.
        accumulate_dtype: The dtype in which the gradients of a weight's uses are
            summed.
        above: Values of larger magnitude also count as bad, anywhere; inside a loop or
            a branch only if they are among its results.

    Returns:
        A function of the arguments of `func` that returns a `mpx.reports.BlameReport`.

    Raises:
        TypeError: Called on arrays that JAX is tracing, or `above` is not a number;
            also what `mpx.filter_value_and_grad` raises.
        ValueError: `above` is not positive.

    Examples:
        >>> import jax.numpy as jnp, mpx
        >>> def loss(w, x):
        ...     return jnp.mean(jnp.log(w * x))
        >>> loss = mpx.autocast(loss)
        >>> w, x = jnp.ones(3), jnp.array([1.0, 0.0, 2.0])
        >>> report = mpx.blame(loss, mpx.NoLossScaling())(w, x)
        >>> report.verdict, report.first.primitive, report.first.reason, report.rows
        (<Verdict.DATA: 'data or mathematics'>, 'log', 'the logarithm of zero', (1,))
    """
    options = Options.of(locals())
    # Validate the options now, not at the first call.
    gradient_function(CALL, func, scaling, argnums, True, options)
    refuse_limit(above, CALL)

    @wraps(func)
    def replay(*args: PyTree, **kwargs: PyTree) -> BlameReport:
        refuse_tracers((scaling, args, kwargs), CALL)
        args, kwargs = dequantize_weights((args, kwargs))
        step = StepOf(func, scaling, argnums, options, args, kwargs)
        try:
            return blamed(step, above)
        except (TypeError, ValueError):
            _refuse_step(func, args, kwargs)
            raise

    return replay


def _refuse_step(
    func: Callable[..., PyTree], args: tuple[PyTree, ...], kwargs: dict[str, PyTree]
) -> None:
    """Raises if `func` is not a loss: it returns a model, or gradients."""
    try:
        result = eqx.filter_eval_shape(func, *args, **kwargs)
    except Exception:  # the first error is more helpful
        return
    is_pair = isinstance(result, tuple) and len(result) == 2  # a loss and `aux`
    shape = getattr(result[0] if is_pair else result, "shape", None)
    if result is None or shape == () or (shape is not None and not is_pair):
        return  # a loss that is wrong in another way
    raise TypeError(
        f"{CALL} needs a loss function, not a training step or a gradient function; "
        f"`{name_of(func)}` returns {describe(result)}. Pass the loss and its "
        "arguments: `mpx.blame(loss, scaling.of_bad_step())(model, batch)`."
    )


def blamed(step: StepOf, above: float | None) -> BlameReport:
    """Replays a step and returns the report."""
    replay, scale = step.replay(), loss_scale_of(step.scaling)
    name = name_of(step.func)
    nothing = BlameReport(name, Verdict.NOTHING, (), (), scale, None, (), _NOTHING)
    bad = replay.bad_places()
    if above is not None and not bad:
        culprits = _culprits(step, replay, above)
        advice = f"The step is finite. Values above {above:g} begin here."
        none = f"{_NOTHING} Nothing is above {above:g}."
        return dataclasses.replace(
            nothing, culprits=culprits, advice=advice if culprits else none
        )
    if not bad:
        return nothing
    places = tuple(replay.places[i] for i in sorted(bad))
    found = dataclasses.replace(nothing, places=places)

    def reported(step: StepOf, replay: Replay, **fields: Any) -> BlameReport:
        culprits = _culprits(step, replay, above)
        if not culprits:
            fields["advice"] = f"{_NOT_FOUND} {fields.get('advice', '')}".strip()
        return dataclasses.replace(found, culprits=culprits, **fields)

    if scale != 1 and is_finite_at_one(step, replay):
        return reported(step, replay, verdict=Verdict.SCALE, advice=_SCALE)
    control = step.in_float32()
    in_float32 = control.replay()
    if not in_float32.bad_places():
        return _of_precision(step, reported(step, replay))
    rows, untried = _rows(control, in_float32)
    fields = {"rows": rows, "untried_rows": untried}
    fields["advice"] = _DATA_ROWS if rows else _DATA
    return reported(control, in_float32, verdict=Verdict.DATA, **fields)


def _of_precision(step: StepOf, found: BlameReport) -> BlameReport:
    rule, share = curing_rule(step, found.culprits)
    is_everywhere = rule is not None and is_for_all(rule)
    in_bfloat16 = rule is not None and is_finite_in_bfloat16(step)
    if rule is None:
        advice = precision_advice(step, found.culprits)
    elif is_everywhere:
        # A rule for the whole program adds nothing to what float32 shows.
        rule, advice = None, _RANGE if in_bfloat16 else _EVERYWHERE
    else:
        part = "" if share is None else f", for {share_text(share)} of the FLOPs"
        advice = f"Finite in float32, and with this rule{part}:\n  {rule_text(rule)}"
        if in_bfloat16:
            advice += (
                "\nIn bfloat16, whose range is that of float32, it is finite without "
                'the rule: `mpx.autocast(loss, "bfloat16")`.'
            )
    return dataclasses.replace(
        found, verdict=Verdict.PRECISION, rule=rule, advice=advice
    )


_RANGE = (
    "Finite in float32, but with no rule for a part of it: values before the first bad "
    "one, and perhaps after it, are beyond the range of float16 (65504). In bfloat16, "
    "whose range is that of float32, the step is finite: "
    '`mpx.autocast(loss, "bfloat16")`.'
)
_EVERYWHERE = (
    "Finite in float32, but with none of the rules that were tried for a part of it. "
    "Run it in float32, `mpx.autocast(loss, enabled=False)`, and look for values of "
    "unusual size: `mpx.monitor`."
)
_NOTHING = (
    "The loss and all gradients are finite. Did the step have other weights, "
    "another batch or another loss scale?"
)
_NOT_FOUND = (
    "The step is non-finite as one program, but not operation by operation: XLA "
    "rounds differently there. No operation can be named."
)
_SCALE = (
    "At a loss scale of 1 the step is finite: the scale was too large, and has "
    "fallen since. Dynamic loss scaling tries a larger scale every `period` steps "
    "(2000), so occasional skipped steps are normal. No action is needed."
)
_DATA = "Non-finite in float32, too: no precision fixes it."
_DATA_ROWS = "Non-finite in float32, too, with each of these batch rows alone."


def _culprits(step: StepOf, replay: Replay, above: float | None) -> tuple[Culprit, ...]:
    names = _names(step, replay)
    weights = [name if is_weight else None for name, is_weight in names]
    texts = [name for name, _ in names]
    # The results to search from: with a limit, all of them.
    every = frozenset(range(len(replay.places)))
    causes = replay.causes(replay.bad_places() if above is None else every, above)
    found = [culprit_of(replay, cause, texts, weights, above) for cause in causes]
    return _each_once(found)


def _each_once(culprits: list[Culprit]) -> tuple[Culprit, ...]:
    """Returns culprits without repetitions: same operation, line, scope and weight.

    A literal of the forward pass has a copy in the derivative, which may make NaN of
    it. Culprits without a line are all kept.
    """
    kept: dict[object, Culprit] = {}
    holders = [c for c in culprits if c.primitive in ("constant", "select_n")]
    given = {c.line: c for c in holders if c.line}
    for number, culprit in enumerate(culprits):
        key: object = number
        if given.get(culprit.made_at, culprit) is not culprit:
            continue  # made of a constant that is reported anyway
        if culprit.line and culprit.primitive != "input":
            weights = () if culprit.primitive == "constant" else culprit.parameters
            key = (culprit.primitive, culprit.line, culprit.scope, weights)
        kept.setdefault(key, culprit)
    return tuple(kept.values())


def _names(step: StepOf, replay: Replay) -> list[tuple[str, bool]]:
    """Returns the name of each input of the replay, and whether it is a weight."""
    argnums = step.argnums
    positions = argnums if isinstance(argnums, tuple) else (argnums or 0,)
    inside = positions_in_call(positions, len(step.args), CALL)
    return [
        input_name(path, inside)
        if path[0].idx
        else (f"scaling{jax.tree_util.keystr(path[1:])}", False)
        for path in replay.paths
    ]


def _is_data(path: KeyPath, count: int) -> bool:
    """Returns whether an input of the replay is one of the user's arguments."""
    root, first, *_ = path
    return root.idx == 2 or (root.idx == 1 and first.idx < count)


def _rows(step: StepOf, replay: Replay) -> tuple[tuple[int, ...], int]:
    """Returns the batch rows that each make a step bad, and how many were not tried."""
    last = len(step.args) if step.count is None else step.count
    named = zip(replay.paths, _names(step, replay), strict=True)
    data = [
        i
        for i, (path, (_, is_weight)) in enumerate(named)
        if _is_data(path, last) and not is_weight
    ]
    batch = batch_inputs(replay.inputs, data)
    return bad_rows(
        lambda inputs: bool(replay.bits(inputs).any()), replay.inputs, batch
    )


def refuse_limit(above: object, call: str) -> None:
    """Raises if `above` is not a positive number."""
    if above is None:
        return
    if not isinstance(above, int | float) or isinstance(above, bool):
        raise TypeError(f"`above` of {call} must be a number; got {describe(above)}.")
    if not above > 0:
        raise ValueError(f"`above` of {call} must be positive; got {above}.")
