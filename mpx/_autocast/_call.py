"""Calling a function, rewritten: trace it, emit it again, put the results together."""

import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn
from jax.tree_util import KeyPath
from jaxtyping import PyTree

from .._ambient_record import ambient, trace, with_ambient
from .._dtypes import is_half
from .._errors import listing, warn_user
from .._jax_compat import manual_axes, with_weak_type
from .._named_like import named_like
from .._nnx_graph import call_with_objects, has_nnx_objects, is_nnx_object
from .._payloads import Payloads, dequantized, payload_of
from .._program import Call
from .._quantize import AbstractRecipe, target_from
from .._recipe_state import (
    Slots,
    State,
    StateRequests,
    is_random,
    note_used,
    with_step,
)
from .._rules import Precision
from .._settings import (
    Settings,
    Weights,
    region,
)
from .._tree import path_text
from .._typing import AnyArray, Aval
from . import _control_flow, _custom_rules, _loops
from ._context import (
    FLOAT16,
    ONE_ROW,
    Place,
    Programs,
    Run,
    Value,
    declared,
    is_castable,
)
from ._demand import Demand, demand_for, demands_of
from ._emit import evaluate
from ._fused import or_fused
from ._notes import (
    RESULT,
    note_float16,
    note_unused,
    noted_cast,
    refuse_unused,
    warn_of_unused,
)
from ._products import recipes_in
from ._reach import reach_of_results

_REWRITES = {
    **_control_flow.REWRITES,
    **_loops.REWRITES,
    **{name: or_fused(name, f) for name, f in _custom_rules.REWRITES.items()},
}


def call_autocast(
    settings: Settings,
    weights: Weights,
    programs: Programs,
    func: Callable[..., PyTree],
    args: tuple[PyTree, ...],
    kwargs: dict[str, PyTree],
    spares_final: bool = True,
) -> PyTree:
    """Calls a function, rewritten.

    Args:
        settings: What the transform was told.
        weights: Positions and names of the arguments that hold parameters.
        programs: Where programs that were rewritten are kept.
        func: The function; where it is a tree, it holds parameters, too.
        args: Its arguments.
        kwargs: Its keyword arguments.
        spares_final: Whether recipes leave the final projection alone.

    Returns:
        What the function returns, in the same dtypes.
    """
    (func, args, kwargs), payloads = dequantized((func, args, kwargs))
    around = ambient()
    settings = dataclasses.replace(settings, wire=around.wire)
    if has_nnx_objects((func, args, kwargs)):
        return _call_with_objects(
            settings, weights, programs, func, args, kwargs, spares_final
        )
    source = None if around.source is None else around.source.take()
    # It says which uses of weights are quantized.
    frozen = source if isinstance(source, State) and source.quantized else None
    value = functools.partial(_input, weights, source, payloads)
    recipe = settings.recipe

    def attempt(
        spares_final: bool, step: Callable[[], AnyArray | None]
    ) -> tuple[PyTree, Run]:
        runs: list[Run] = []

        def run_of(jaxpr: Jaxpr) -> Run:
            recipes = recipes_in(jaxpr).union(settings.recipes)
            rules = settings.rules.rules
            if not recipes and any(r.precision is Precision.LOW for r in rules):
                raise ValueError(
                    "`mpx.Precision.LOW` quantizes by the recipe that holds, and there "
                    "is none. Say one: `mpx.autocast(func, rules=..., recipe=...)`."
                )
            has_slots = frozen is not None or isinstance(source, StateRequests)
            options = programs, recipes, spares_final
            run = Run(settings, _REWRITES, *options, has_slots=has_slots)
            run.needs_parameters |= around.takes_notes
            if is_random(recipes):
                run.step = step()
            runs.append(run)
            return run

        return _call(run_of, func, args, kwargs, value, trace), runs[0]

    def finds_nothing(run: Run) -> bool:
        return recipe is not None and run.used.isdisjoint((recipe, (ONE_ROW, recipe)))

    sparing = functools.partial(attempt, spares_final)
    if around.takes_notes and recipe is not None and frozen is None:
        # What is emitted in vain would stand in the report.
        runs: list[Run] = []
        jax.eval_shape(lambda: runs.append(with_step(sparing)[1]))
        sparing = functools.partial(attempt, spares_final and not finds_nothing(*runs))
    results, run = with_step(sparing)
    if frozen is not None:
        _refuse_state_of_another_model(frozen, run)
    elif finds_nothing(run):
        # The only product of a weight, perhaps, is the final projection.
        results, run = with_step(functools.partial(attempt, False))
        if finds_nothing(run):
            raise ValueError(_nothing_to_quantize(recipe, weights))
    if recipe is not None and recipe not in run.used and frozen is None:
        warn_user(
            f"`mpx.autocast(..., recipe={type(recipe).__name__}(...))` quantized "
            "nothing: data has one row here, or none, and its products with weights "
            "are computed in half precision. Nothing is wrong if this is the last "
            "batch of an epoch, or a single example."
        )
    if settings.is_strict:
        refuse_unused(settings.rules, run.used)
    elif settings.is_enabled and not around.takes_notes and not _is_ambient(settings):
        warn_of_unused(settings.rules, run.used)
    if FLOAT16 in run.used:
        note_float16()
    # A state is of this program, also where one row has no use for it.
    found = (x[1] if isinstance(x, tuple) else x for x in run.used)
    note_used(x for x in found if isinstance(x, AbstractRecipe))
    note_unused(rule for rule in settings.rules.rules if rule not in run.used)
    return marked(results) if isinstance(source, StateRequests) else results


def _is_ambient(settings: Settings) -> bool:
    """Whether the rules are for many functions, each of which has use for some."""
    return settings.rules is ambient().settings.rules


def _refuse_state_of_another_model(state: State, run: Run) -> None:
    known = sorted({name.parameter for name in state.quantized or ()})
    if run.has_slots and run.parameters.isdisjoint(known):
        raise ValueError(
            "`mpx.inference(func, scaling)` got the state of another model, or of "
            f"another argument: it is of the weights {listing(known)}, and `func` has "
            f"{listing(sorted(run.parameters)) or 'none'}."
        )


def _nothing_to_quantize(recipe: object, weights: Weights) -> str:
    places = f"argument {listing(list(map(str, weights)))} (`weights=` says which)"
    return (
        f"`mpx.autocast(..., recipe={type(recipe).__name__}(...))` found no product of "
        f"data with a weight to quantize. Weights are the arrays of "
        f"{places if weights else 'the function itself'}; arrays that a function "
        "closes over are constants. A weight that is divided by something of the data "
        "is data: divide the product by it. Products with a single vector are left "
        "alone: put `jax.vmap` inside of `mpx.autocast`. So is what stands in a "
        "function with a derivative rule of its own, and what is float64. "
        "`mpx.explain` of the function without the recipe shows its products."
    )


# The name of a result of an autocast function, while slots are collected.
_MARK = "mpx: what an autocast function returns"


def marked(results: PyTree) -> PyTree:
    """Results, one of which can be found in a program that calls the function."""
    leaves, tree = jax.tree.flatten(results)
    first = next((i for i, x in enumerate(leaves) if isinstance(x, jax.Array)), None)
    if first is not None:
        leaves[first] = checkpoint_name(leaves[first], _MARK)
    return jax.tree.unflatten(tree, leaves)


def is_marked(equation: JaxprEqn) -> bool:
    """Whether an equation marks a result of an autocast function."""
    is_name = equation.primitive.name == "name"
    return is_name and equation.params.get("name") == _MARK


# Stands for a leaf that is no weight; not None, which is no leaf at all.
NO_MASTER = object()


def call_with_masters(
    func: Callable[..., PyTree],
    args: Sequence[PyTree],
    kwargs: dict[str, PyTree],
    masters: Sequence[PyTree],
    dtype: np.dtype,
) -> PyTree:
    """Calls a function of half precision weights, each use of which is cast on its own.

    A weight that is cast once and used many times gets its gradients summed in half
    precision: 4,096 uses with gradient 1 give 2,048 in float16, where 2,048 + 1 is
    2,048. Here the program is emitted as it was written, but for the weights, whose
    masters go in: they are declared values, cast where they are used, and what JAX
    sums on the way back are cotangents of the masters. The values are the same, bit for
    bit.

    Args:
        func: The function.
        args: Its positional arguments, weights in half precision.
        kwargs: Its keyword arguments; no weights are among them.
        masters: Like `args`, with `NO_MASTER` for what is no weight.
        dtype: The precision in which gradients are summed.

    Returns:
        What `func` returns.
    """
    half = np.dtype(np.float16)
    settings = Settings(dtype=half, is_enabled=False, wire=ambient().wire)
    found, _ = jax.tree_util.tree_flatten_with_path((None, tuple(masters)))
    wide = {path: master for path, master in found if master is not NO_MASTER}

    def value(run: Run, path: KeyPath, leaf: AnyArray) -> Value:
        master = wide.get(path)
        if master is None or leaf.dtype == master.dtype or not is_half(leaf.dtype):
            return declared(leaf)
        facts = declared(leaf).facts._replace(is_weight=True)
        return Value(jax.lax.convert_element_type(master, dtype), facts)

    run = Run(settings, _REWRITES)
    return _call(lambda _: run, func, tuple(args), kwargs, value, jax.make_jaxpr)


def call_recomputing(
    residuals: str,
    func: Callable[..., PyTree],
    args: tuple[PyTree, ...],
    kwargs: dict[str, PyTree],
) -> PyTree:
    """Calls a function as written; its derivative keeps as little as autocast's.

    Args:
        residuals: As in `Settings`.
        func: The function, of PyTrees.
        args: Its arguments.
        kwargs: Its keyword arguments.
    """
    settings = Settings(is_enabled=False, residuals=residuals)
    run = Run(settings, _REWRITES, only_recomputes=True)

    def value(run: Run, path: KeyPath, leaf: AnyArray) -> Value:
        return declared(leaf)

    return _call(lambda _: run, func, args, kwargs, value, jax.make_jaxpr)


def _call(
    run_of: Callable[[Jaxpr], Run],
    func: Callable[..., PyTree],
    args: tuple[PyTree, ...],
    kwargs: dict[str, PyTree],
    value: Callable[[Run, KeyPath, AnyArray], Value],
    trace: Callable[..., PyTree],
) -> PyTree:
    """Calls a function, traced by `trace`, with the values that `value` makes.

    The run is made when its program is known.
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
    _tell_demands(run, call.paths, closed, values)
    with _done_for_others():
        results = _results(run, closed, values)
    return call.result_of(results)


def _call_with_objects(
    settings: Settings,
    weights: Weights,
    programs: Programs,
    func: Any,
    args: PyTree,
    kwargs: PyTree,
    spares_final: bool,
) -> PyTree:
    """The same for NNX objects, which as trees would lose what changes in them."""
    written = type(func).__call__ if is_nnx_object(func) else func
    if is_nnx_object(func):
        weights = (0, *(w + 1 if isinstance(w, int) else w for w in weights))
        func, args = (
            (lambda func, *args, **kwargs: func(*args, **kwargs)),
            (func, *args),
        )

    def rewritten(pure: Any, args: PyTree, kwargs: PyTree) -> PyTree:
        pure.__wrapped__ = written  # for errors of tracing
        return call_autocast(
            settings, weights, programs, pure, args, kwargs, spares_final
        )

    return call_with_objects(rewritten, "`mpx.autocast`", func, args, kwargs)


def _done_for_others() -> contextlib.AbstractContextManager[object]:
    """Within another autocast function, what this one emits is left as it is."""
    if not ambient().is_tracing:
        return contextlib.nullcontext()
    return region(Settings.of(is_enabled=False))


def half_inputs(
    func: Callable[..., PyTree], args: PyTree, kwargs: PyTree
) -> dict[KeyPath, np.dtype]:
    """The float32 arguments of an autocast function that all uses cast, and to what.

    Args:
        func: The function.
        args: Its arguments; types of them will do.
        kwargs: Its keyword arguments.

    Returns:
        The half precision dtypes, by paths into `(args, kwargs)`.
    """
    found: list[dict[KeyPath, np.dtype]] = []
    with with_ambient(asks_demands=found.append, is_first_step=True):
        jax.eval_shape(func, *args, **kwargs)
    return found[0] if len(found) == 1 else {}


def _tell_demands(
    run: Run, paths: Sequence[KeyPath], closed: ClosedJaxpr, values: list[Value]
) -> None:
    """Says what is wanted of each input, where somebody asks."""
    asks = ambient().asks_demands
    if asks is None:
        return
    are_declared = tuple(v.facts.is_declared for v in values)
    wanted = tuple(demand_for(aval, run.settings.dtype) for aval in closed.out_avals)
    ahead = demands_of(run, run.settings, closed.jaxpr, are_declared, wanted)
    triples = zip(paths, values, ahead.inputs, strict=True)
    asks(
        {
            (type(path[0])(path[0].idx - 1), *path[1:]): run.settings.dtype
            for path, value, demand in triples
            if path[0].idx and demand == Demand.HALF and value.dtype == np.float32
        }
    )


def _results(run: Run, closed: ClosedJaxpr, values: list[Value]) -> list[AnyArray]:
    avals = closed.out_avals
    demands = tuple(demand_for(aval, run.settings.dtype) for aval in avals)
    place = Place(run.settings)
    if run.has_recipe and run.spares_final:
        place = dataclasses.replace(place, reach=reach_of_results(avals))
    results = evaluate(run, place, closed, values, demands)
    with noted_cast(RESULT):
        return [_result(v, aval) for v, aval in zip(results, avals, strict=True)]


def _result(value: Value, aval: Aval) -> AnyArray:
    """A result in the dtype that it was written in, weakly typed if it was so."""
    array = value.cast(aval.dtype) if is_castable(aval) else value.array
    array = jnp.asarray(array)
    is_weak = getattr(aval, "weak_type", False)
    is_same = getattr(jax.typeof(array), "weak_type", False) == is_weak
    return array if is_same else with_weak_type(array, is_weak)


def _input(
    weights: Weights,
    source: StateRequests | State | None,
    payloads: Payloads,
    run: Run,
    path: KeyPath,
    leaf: object,
) -> Value:
    """An argument; those of the function itself, too, are parameters."""
    root, *rest = path
    below, position = rest, None
    if root.idx:
        position = rest[0].idx if root.idx == 1 else rest[0].key
        if position not in weights:
            return declared(leaf)
        below = rest[1:]
    # Equal layers are rewritten once if nobody asks which parameters are theirs.
    name = path_text(tuple(below)) if run.needs_parameters else ""
    value = declared(leaf, name)
    if not value.facts.is_declared:
        return value
    target = run.settings.target or target_from(None) if run.has_recipe else None
    array = value.array
    if target and target.transposes_fp8 and is_half(value.dtype):
        # Products in FP8 want it transposed, and XLA would transpose, in float32, all
        # that the optimizer computes with it: masters, moments, what skips a step. The
        # barrier keeps this apart: a Llama of 542 M moves 77 GB and not 105 (jax
        # 0.10.2, compiled for sm_90, November 2026).
        value = declared(jax.lax.optimization_barrier(array), name)
    value.facts = value.facts._replace(is_weight=True)
    if run.has_recipe:
        value.stored = payload_of(leaf, payloads)
    if run.has_slots:
        # Two models of one kind have the same paths.
        owner = "" if root.idx == 0 or position == weights[0] else f"[{position!r}]"
        value.slots = Slots.of_parameter(owner + name, source)
        # Under `shard_map` it is a piece of the weight.
        if target and not manual_axes() and value.stored is None:
            value.slots = value.slots.measured(array, target)
        run.parameters.add(owner + name)
    return value
