"""Calls a function rewritten: traces it, emits it again, rebuilds its results.

`call_autocast` is the transform. `call_with_masters` casts half-precision weights at
each use, `call_as_written` provides the loss scale to derivative rules, and
`call_recomputing` only recomputes islands.
"""

import contextlib
import dataclasses
import functools
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.tree_util import KeyPath
from jaxtyping import PyTree

from .._base.dtypes import is_half
from .._base.jax_compat import with_weak_type
from .._base.tree import path_text
from .._base.typing import AnyArray, Aval
from .._nnx_graph import call_with_objects, has_nnx_objects, is_nnx_object
from .._program import Call, named_like
from .._quantize import HalfCopy
from .._recipe_state import (
    NOTHING_KNOWN,
    State,
    StepAsked,
    StepValues,
    asked_for_step,
    in_one_array,
    is_random,
    known_scale,
    with_step,
)
from .._settings import (
    Payloads,
    Settings,
    Weights,
    ambient,
    note_float16,
    recipes_in,
    region,
    settings_of,
    trace,
    unkeyed,
    with_ambient,
)
from .._stored_weights import StoredWeight, dequantized, payload_of
from . import _control_flow, _custom_rules, _loops
from ._context import Place, Programs, Run, Uses, Value, declared, is_castable
from ._decide import RESULT, note_unused, noted_cast, refuse_unused, warn_of_unused
from ._demand import Demand, demands_for, demands_of
from ._emit import evaluate
from ._fused import or_fused
from ._reach import Origin, reach_of_results
from ._recipe_call import (
    Source,
    call_with_recipe,
    counts_uses,
    refuse_low,
    weight_of_recipe,
)
from ._unscaled_rules import may_see_scale, run_as_written

_REWRITES = {
    **_control_flow.REWRITES,
    **_loops.REWRITES,
    **{name: or_fused(name, f) for name, f in _custom_rules.REWRITES.items()},
}


class Invocation(NamedTuple):
    """A call of a function that is to be rewritten.

    Attributes:
        settings: The options of the transform.
        weights: Positions and names of the arguments that contain parameters.
        programs: The store of rewritten programs.
        func: The function; the arrays of a callable PyTree are parameters, too.
        args: Its arguments.
        kwargs: Its keyword arguments.
        spares_final: Whether recipes do not quantize the output layer.
    """

    settings: Settings
    weights: Weights
    programs: Programs
    func: Callable[..., PyTree]
    args: tuple[PyTree, ...]
    kwargs: dict[str, PyTree]
    spares_final: bool = True


def call_autocast(call: Invocation) -> PyTree:
    """Calls a function rewritten; returns its results in the same dtypes."""
    # The features in use are determined here, once: from the context (`Ambient`), from
    # the arguments, and in `run_of` from the program, whose regions may have recipes.
    # After that a value, the settings or `run.uses` contain them.
    #
    # Each call takes one state from the source, as many as `mpx.init_scaling` counted.
    # So NNX objects, which call again, come before `take`, and both attempts under a
    # recipe share one state.
    around, payloads = ambient(), unkeyed().payloads
    settings = dataclasses.replace(call.settings, wire=around.wire)
    given: PyTree = (call.func, call.args, call.kwargs)
    has_objects = "flax.nnx" in sys.modules and has_nnx_objects(given)
    if has_objects or any(map(_is_stored, jax.tree.leaves(given, is_leaf=_is_stored))):
        given, payloads = dequantized(given)
    if has_objects:
        return _call_with_objects(call, *given)
    func, args, kwargs = given
    source = None if around.source is None else around.source.take()
    if isinstance(source, State):
        source = in_one_array(source, settings.device, given)
    value = functools.partial(_input, call.weights, source, payloads)

    def run_of(spares_final: bool, known: StepValues, jaxpr: Jaxpr) -> Run:
        recipes = recipes_in(jaxpr).union(settings.recipes)
        if settings.rules.rules and not recipes:
            refuse_low(settings.rules)
        has_slots = source is not None and counts_uses(source)
        uses = Uses.of(settings, recipes, has_slots)
        run = Run(settings, _REWRITES, uses, call.programs, spares_final)
        run.scale = known.scale
        run.scales = source.vector if isinstance(source, State) else None
        if recipes and is_random(recipes):
            run.step = asked_for_step() if known.number is None else known.number
        return run

    def attempt(spares_final: bool) -> tuple[PyTree, Run]:
        def rewritten(known: StepValues) -> tuple[PyTree, Run]:
            made = functools.partial(run_of, spares_final, known)
            return _call(made, func, args, kwargs, value, trace)

        return rewritten(NOTHING_KNOWN) if around.step is None else with_step(rewritten)

    if settings.recipe is None and source is None:
        results, run = attempt(call.spares_final)
    else:
        results, run = call_with_recipe(
            attempt, settings.recipe, source, call.weights, call.spares_final, call.func
        )
    if settings.rules.rules:
        _tell_of_rules(settings, run)
    if run.used.computes_float16:
        note_float16()
    return results


def _is_stored(node: object) -> bool:
    return isinstance(node, StoredWeight)


def _tell_of_rules(settings: Settings, run: Run) -> None:
    """Reports rules that matched no operation."""
    # Ambient rules are for many functions, each of which needs some of them.
    is_ambient = settings.rules is ambient().settings.rules
    if settings.is_strict:
        refuse_unused(settings.rules, run.used.rules)
    elif settings.is_enabled and not run.uses.notes and not is_ambient:
        warn_of_unused(settings.rules, run.used.rules)
    note_unused(rule for rule in settings.rules.rules if rule not in run.used.rules)


# Marks a leaf that is not a weight; not None, which is not a leaf.
NO_MASTER = object()


def call_with_masters(
    func: Callable[..., PyTree],
    args: Sequence[PyTree],
    kwargs: dict[str, PyTree],
    masters: Sequence[PyTree],
    dtype: np.dtype,
) -> PyTree:
    """Calls a function of half-precision weights, casting each use separately.

    A weight that is cast once and used many times gets its gradients summed in half
    precision: 4,096 uses with gradient 1 give 2,048 in float16, where 2,048 + 1 is
    2,048. Here the program is emitted as written, except that the weights are replaced
    by their masters: declared values, cast at each use. So JAX sums the cotangents of
    the masters. The values are the same, bit for bit.

    Args:
        func: The function.
        args: Its positional arguments, weights in half precision.
        kwargs: Its keyword arguments, without weights.
        masters: Like `args`, with `NO_MASTER` for leaves that are not weights.
        dtype: The precision in which gradients are summed.

    Returns:
        The result of `func`.
    """
    half = np.dtype(np.float16)
    settings = Settings(dtype=half, is_enabled=False, wire=ambient().wire)
    found, _ = jax.tree_util.tree_flatten_with_path((None, tuple(masters)))
    wide = {path: master for path, master in found if master is not NO_MASTER}

    def value(run: Run, path: KeyPath, leaf: AnyArray) -> Value:
        master = wide.get(path)
        if master is None or leaf.dtype == master.dtype or not is_half(leaf.dtype):
            return declared(leaf)
        facts = declared(leaf).facts._replace(origin=Origin.WEIGHT)
        return Value(jax.lax.convert_element_type(master, dtype), facts)

    run = Run(settings, _REWRITES, Uses.of(settings))
    run.scale = known_scale()
    return _call(lambda _: run, func, tuple(args), kwargs, value, jax.make_jaxpr)[0]


def call_as_written(
    func: Callable[..., PyTree], *args: PyTree, **kwargs: PyTree
) -> PyTree:
    """Calls a function as written, except for VJP rules that may need the loss scale.

    Autocast functions handle the rules of all that they call. A function that cannot be
    traced without values is called unchanged, with its rules.

    Args:
        func: The function, of PyTrees, called in a gradient function.
        *args: Its arguments.
        **kwargs: Its keyword arguments.

    Returns:
        The result of `func`.

    Raises:
        StepAsked: It has such a rule, and the scale is not known yet.
    """
    settings, scale = settings_of(func), known_scale()
    is_done = settings is not None and settings.is_enabled
    is_asked = ambient().gives_scale or scale is not None
    if is_done or not is_asked or ambient().is_tracing or unkeyed().payloads:
        return func(*args, **kwargs)
    call = Call(func, args, kwargs)
    flat = functools.partial(Call.__call__, call)
    try:
        closed = jax.make_jaxpr(named_like(flat, func, call.paths))(*call.arrays)
    except Exception:
        # It needs values, or is wrong. Unchanged, it runs or raises its own error.
        return func(*args, **kwargs)
    rules = _custom_rules.rules_of_users(closed)
    if scale is None and any(map(may_see_scale, rules)):
        raise StepAsked
    if scale is None or not rules:
        results = run_as_written(closed, call.arrays)
    else:
        settings = Settings(dtype=np.dtype(np.float16), is_enabled=False)
        run = Run(settings, _REWRITES, Uses.of(settings), scale=scale)
        results = _results(run, closed, list(map(declared, call.arrays)))
    return call.result_of(results)


def call_recomputing(
    residuals: str,
    func: Callable[..., PyTree],
    args: tuple[PyTree, ...],
    kwargs: dict[str, PyTree],
) -> PyTree:
    """Calls a function as written; its derivative saves as little as autocast's.

    Args:
        residuals: As in `Settings`.
        func: The function, of PyTrees.
        args: Its arguments.
        kwargs: Its keyword arguments.
    """
    settings = Settings(is_enabled=False, residuals=residuals)
    run = Run(settings, _REWRITES, Uses.of(settings), only_recomputes=True)

    def value(run: Run, path: KeyPath, leaf: AnyArray) -> Value:
        return declared(leaf)

    return _call(lambda _: run, func, args, kwargs, value, jax.make_jaxpr)[0]


def _call(
    run_of: Callable[[Jaxpr], Run],
    func: Callable[..., PyTree],
    args: tuple[PyTree, ...],
    kwargs: dict[str, PyTree],
    value: Callable[[Run, KeyPath, AnyArray], Value],
    trace: Callable[..., PyTree],
) -> tuple[PyTree, Run]:
    """Calls a function, traced by `trace`, with the values that `value` makes.

    The run is made when its program is known, and returned after the results.
    """
    call = Call(func, args, kwargs)
    traced: list[weakref.ref[AnyArray]] = []

    def flat(*arrays: AnyArray) -> list[AnyArray]:
        traced[:] = map(weakref.ref, arrays)
        return call(*arrays)

    closed = trace(named_like(flat, func, call.paths))(*call.arrays)
    run = run_of(closed.jaxpr)
    run.traced = tuple(traced)
    values = [value(run, *pair) for pair in zip(call.paths, call.arrays, strict=True)]
    asks = ambient().asks_demands
    if asks is not None:
        asks(_asked_demands(run, call.paths, closed, values))
    with _done_for_others():
        results = _results(run, closed, values)
    return call.result_of(results), run


def _call_with_objects(
    call: Invocation, func: Any, args: PyTree, kwargs: PyTree
) -> PyTree:
    """Calls a function of NNX objects, whose mutations would be lost in PyTrees."""
    weights = call.weights
    written = type(func).__call__ if is_nnx_object(func) else func
    if is_nnx_object(func):
        weights = (0, *(w + 1 if isinstance(w, int) else w for w in weights))
        func, args = (
            (lambda func, *args, **kwargs: func(*args, **kwargs)),
            (func, *args),
        )

    def rewritten(pure: Any, args: PyTree, kwargs: PyTree) -> PyTree:
        pure.__wrapped__ = written  # for errors of tracing
        given = dict(weights=weights, func=pure, args=args, kwargs=kwargs)
        return call_autocast(call._replace(**given))

    return call_with_objects(rewritten, "`mpx.autocast`", func, args, kwargs)


def _done_for_others() -> contextlib.AbstractContextManager[object]:
    """Returns a context in which an outer autocast function changes nothing."""
    if not ambient().is_tracing:
        return contextlib.nullcontext()
    return region(Settings.of(is_enabled=False))


def half_inputs(
    func: Callable[..., PyTree], args: PyTree, kwargs: PyTree
) -> dict[KeyPath, np.dtype]:
    """Finds the float32 arguments of an autocast function that all uses cast.

    Args:
        func: The function.
        args: Its arguments, or their types.
        kwargs: Its keyword arguments.

    Returns:
        The half-precision dtypes, by paths into `(args, kwargs)`.
    """
    found: list[dict[KeyPath, np.dtype]] = []
    with with_ambient(asks_demands=found.append, is_first_step=True):
        jax.eval_shape(func, *args, **kwargs)
    return found[0] if len(found) == 1 else {}


def _asked_demands(
    run: Run, paths: Sequence[KeyPath], closed: ClosedJaxpr, values: list[Value]
) -> dict[KeyPath, np.dtype]:
    """Returns the inputs that all uses cast, as `half_inputs` does."""
    are_declared = tuple(v.facts.is_declared for v in values)
    wanted = demands_for(closed.out_avals, run.settings.dtype)
    ahead = demands_of(run, run.settings, closed.jaxpr, are_declared, wanted)
    triples = zip(paths, values, ahead.inputs, strict=True)
    return {
        (type(path[0])(path[0].idx - 1), *path[1:]): run.settings.dtype
        for path, value, demand in triples
        if path[0].idx and demand == Demand.HALF and value.dtype == np.float32
    }


def _results(run: Run, closed: ClosedJaxpr, values: list[Value]) -> list[AnyArray]:
    avals = closed.out_avals
    demands = demands_for(avals, run.settings.dtype)
    place = Place(run.settings)
    if run.uses.recipes and run.spares_final:
        place = dataclasses.replace(place, reach=reach_of_results(avals))
    results = evaluate(run, place, closed, values, demands)
    with noted_cast(RESULT) if run.uses.notes else contextlib.nullcontext():
        return [_result(v, aval) for v, aval in zip(results, avals, strict=True)]


def _result(value: Value, aval: Aval) -> AnyArray:
    """Returns a result in its declared dtype, and as weakly typed as declared."""
    array = value.cast(aval.dtype) if is_castable(aval) else value.array
    array = jnp.asarray(array)
    is_weak = getattr(aval, "weak_type", False)
    is_same = getattr(jax.typeof(array), "weak_type", False) == is_weak
    return array if is_same else with_weak_type(array, is_weak)


def _input(
    weights: Weights,
    source: Source,
    payloads: Payloads,
    run: Run,
    path: KeyPath,
    leaf: object,
) -> Value:
    """Returns the value of an argument; the function's own arrays are parameters."""
    root, *rest = path
    below, position = rest, None
    if root.idx:
        position = rest[0].idx if root.idx == 1 else rest[0].key
        if position not in weights:
            return declared(leaf)
        below = rest[1:]
    # Equal layers are rewritten once unless something depends on parameters' paths.
    name = path_text(tuple(below)) if run.uses.parameters else ""
    value = declared(leaf, name)
    stored = payload_of(leaf, payloads) if payloads else None
    if run.uses.recipes:
        # Two models of one kind have the same paths.
        owner = "" if root.idx == 0 or position == weights[0] else f"[{position!r}]"
        value = weight_of_recipe(run, value, name, owner, source, stored)
    elif not value.facts.is_declared:
        return declared(leaf)
    elif isinstance(stored, HalfCopy):
        value.stored = stored
    value.facts = value.facts._replace(origin=Origin.WEIGHT)
    return value
