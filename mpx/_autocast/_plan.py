"""Looking ahead: in which precision the users of each value want it.

The plan of a program is made from its end to its beginning. A value is wanted in
float32 if somebody wants it so and nobody wants it in half: then the elementwise
operations before it run in float32 and a matrix product gives float32 directly,
instead of rounding a number that is then widened again.

The wish stops at *residual additions*, of two computed values neither of which is made
elementwise of the other: the float32 stream is no reason for the products that are
added to it to be written in float32. And at products that are scaled by a number, as
attention's scores are: rounded twice they are as good as rounded once, and a compiler
that sees the scores in half precision keeps them so until softmax's gradient.
"""

import enum
from typing import Any, NamedTuple

from jax.extend import core

from .._jax_compat import (
    composite_parameter,
    open_jaxpr,
    scan_counts,
    scope_names,
)
from ._classes import CLASSES, PrimitiveClass, class_of
from ._decisions import Precision
from ._region import settings_within
from ._settings import Run, Settings
from ._values import FULL, is_castable


class Wish(enum.Enum):
    """What the users of a value want it to be."""

    ANY = "any"
    FULL = "full"
    HALF = "half"

    def __or__(self, other: "Wish") -> "Wish":
        """What two users want together: half wins, for it is cheaper."""
        if Wish.HALF in (self, other):
            return Wish.HALF
        return Wish.FULL if Wish.FULL in (self, other) else Wish.ANY


class Plan(NamedTuple):
    """The wishes for the values of a program.

    Attributes:
        wishes: For each variable that somebody uses.
        inputs: For each input.
        are_declared: For each result whether it is an input or a constant, moved.
        residuals: The results of residual additions.
        scalings: The results of scaling a product by a number.
        jaxpr: The program, held so that its identity stays its own.
    """

    wishes: dict[Any, Wish]
    inputs: tuple[Wish, ...]
    are_declared: tuple[bool, ...]
    residuals: frozenset[Any]
    scalings: frozenset[Any]
    jaxpr: Any

    def wish(self, variable: Any) -> Wish:
        """What the users of a variable want."""
        return self.wishes.get(variable, Wish.ANY)


# Operations that only move the data of their first operand, or of each operand on its
# own.
MOVES = frozenset(
    """
    all_gather all_gather_invariant all_gather_reduced all_to_all broadcast_in_dim
    broadcast_to copy copy_p device_put dynamic_slice expand_dims gather
    layout_constraint name optimization_barrier pbroadcast pbroadcast_dynamic ppermute
    pvary relayout reshape reshard rev roll sharding_constraint slice split squeeze
    stop_gradient tile transpose unstack with_memory_space_constraint
    """.split()
)
# These put values side by side.
JOINS = frozenset("concatenate pad select_n stack".split())

# The parameter that holds the one program whose inputs are the operands.
PROGRAMS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "call": "call_jaxpr",
    "eval_jaxpr": "call_jaxpr",
    "remat": "jaxpr",
    "remat2": "jaxpr",
    "checkpoint": "jaxpr",
    "remat_opt": "fwd_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vmap_call": "call",
    "shard_map": "jaxpr",
    "composite": "jaxpr",
}


def program_of(equation: Any) -> Any:
    """The one program that an equation of `PROGRAMS` holds."""
    params, name = equation.params, equation.primitive.name
    parameter = composite_parameter(params) if name == "composite" else PROGRAMS[name]
    return params[parameter]


def wish_for(dtype: Any) -> Wish:
    """The wish of somebody who will cast to a dtype."""
    return Wish.FULL if dtype == FULL else Wish.HALF


def plan(
    run: Run,
    settings: Settings,
    jaxpr: Any,
    are_declared: tuple[bool, ...],
    results: tuple[Wish, ...],
) -> Plan:
    """Makes the plan of a program.

    Args:
        run: The run, which keeps plans.
        settings: What holds around the program.
        jaxpr: The program, open or closed.
        are_declared: For each input whether it is a declared value.
        results: What is wanted of each result.

    Returns:
        The plan.
    """
    jaxpr = open_jaxpr(jaxpr)
    if not settings.is_enabled:  # everything runs as it was written
        inputs, nothing = (Wish.ANY,) * len(jaxpr.invars), frozenset()
        are_declared = (False,) * len(jaxpr.outvars)
        return Plan({}, inputs, are_declared, nothing, nothing, jaxpr)
    key = (id(jaxpr), settings, are_declared, results)
    made = run.plans.get(key)
    if made is None:
        made = run.plans[key] = _make(run, settings, jaxpr, are_declared, results)
    return made


def _make(
    run: Run, settings: Settings, jaxpr: Any, are_declared: Any, results: Any
) -> Plan:
    known = _declared_variables(jaxpr, are_declared)
    makers = _makers(jaxpr)
    wishes: dict[Any, Wish] = {}
    residuals: set[Any] = set()
    scalings: set[Any] = set()

    def is_declared(atom: Any) -> bool:
        return isinstance(atom, core.Literal) or atom in known

    def wish(atom: Any, wanted: Wish) -> None:
        if not isinstance(atom, core.Literal):
            wishes[atom] = wishes.get(atom, Wish.ANY) | wanted

    for atom, wanted in zip(jaxpr.outvars, results, strict=True):
        wish(atom, wanted)
    for equation in reversed(jaxpr.eqns):
        outputs = tuple(wishes.get(v, Wish.ANY) for v in equation.outvars)
        declared = tuple(is_declared(atom) for atom in equation.invars)
        here = settings_within(settings, scope_names(equation))
        if not any(declared) and _is_residual(equation, outputs, makers):
            residuals.update(equation.outvars)
            wanted = _residual_wishes(here, outputs[0])
        elif _is_scaling(equation, makers):
            scalings.update(equation.outvars)
            wanted = (Wish.ANY if outputs[0] is Wish.FULL else outputs[0],) * 2
        else:
            wanted = _operand_wishes(run, here, equation, declared, outputs)
        for atom, one in zip(equation.invars, wanted, strict=True):
            if one is not Wish.ANY:
                wish(atom, one)
    return Plan(
        wishes,
        tuple(wishes.get(v, Wish.ANY) for v in jaxpr.invars),
        tuple(is_declared(atom) for atom in jaxpr.outvars),
        frozenset(residuals),
        frozenset(scalings),
        jaxpr,
    )


def _makers(jaxpr: Any) -> dict[Any, Any]:
    """The equation that each variable comes from."""
    return {v: equation for equation in jaxpr.eqns for v in equation.outvars}


# How far back to look for one operand of a sum among what made the other.
_ISLAND = 32


def _is_residual(
    equation: Any, outputs: tuple[Wish, ...], makers: dict[Any, Any]
) -> bool:
    """Whether an equation of two computed values adds a branch to a stream.

    JAX's derivatives sum gradients by `add_any`. The gradients of one weight, which end
    in float32, are no stream: a weight that is used many times needs a sum in float32.
    """
    name = equation.primitive.name
    if name not in ("add", "add_any"):
        return False
    if name == "add_any" and outputs[0] is Wish.FULL:
        return False
    first, second = equation.invars
    if first.aval.shape != second.aval.shape or not is_castable(first.aval):
        return False
    return not (
        _is_made_of(second, first, makers) or _is_made_of(first, second, makers)
    )


def _is_made_of(value: Any, part: Any, makers: dict[Any, Any]) -> bool:
    """Whether a value is made of another one by elementwise operations only."""
    waiting, steps = [value], 0
    while waiting and steps < _ISLAND:
        found, steps = waiting.pop(), steps + 1
        if found is part:
            return True
        maker = makers.get(found)
        if maker is None or CLASSES.get(maker.primitive.name) not in _ELEMENTWISE:
            continue
        waiting += [
            a
            for a in maker.invars
            if not isinstance(a, core.Literal) and a.aval.shape == value.aval.shape
        ]
    return False


_ELEMENTWISE = (
    PrimitiveClass.FULL,
    PrimitiveClass.PROMOTE,
    PrimitiveClass.FOLLOW,
    PrimitiveClass.CONVERT,
)


def _is_scaling(equation: Any, makers: dict[Any, Any]) -> bool:
    """Whether an equation multiplies or divides a product by a number."""
    if equation.primitive.name not in ("mul", "div"):
        return False
    first, second = equation.invars
    if isinstance(first, core.Literal) and equation.primitive.name == "mul":
        first, second = second, first
    return isinstance(second, core.Literal) and _is_product(first, makers)


def _is_product(atom: Any, makers: dict[Any, Any]) -> bool:
    """Whether a value is what a matrix product gave, moved perhaps."""
    maker = None if isinstance(atom, core.Literal) else makers.get(atom)
    if maker is None:
        return False
    name = maker.primitive.name
    if name in PROGRAMS:  # `jnp.einsum` is a jit
        inner = open_jaxpr(program_of(maker))
        result = inner.outvars[maker.outvars.index(atom)]
        return _is_product(result, _makers(inner))
    if name in MOVES:
        return _is_product(maker.invars[0], makers)
    return CLASSES.get(name) is PrimitiveClass.HALF


def _residual_wishes(settings: Settings, wanted: Wish) -> tuple[Wish, Wish]:
    if settings.residual_stream == "half" and settings.is_enabled:
        return Wish.HALF, Wish.HALF
    if wanted is Wish.FULL:
        return Wish.ANY, Wish.ANY
    return wanted, wanted


def _declared_variables(jaxpr: Any, are_declared: Any) -> set[Any]:
    known = {v for v, d in zip(jaxpr.invars, are_declared, strict=True) if d}
    known.update(jaxpr.constvars)
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        atoms = equation.invars
        if name in MOVES or name in JOINS:
            if all(isinstance(a, core.Literal) or a in known for a in atoms):
                known.update(equation.outvars)
        elif name == "convert_element_type":
            if not is_castable(atoms[0].aval):
                known.update(equation.outvars)
        elif name in PROGRAMS:
            inputs = tuple(isinstance(a, core.Literal) or a in known for a in atoms)
            inner = open_jaxpr(program_of(equation))
            if any(inputs) and len(inner.eqns) < 8:  # only ones that do little but move
                found = _declared_variables(inner, inputs)
                known.update(
                    outer
                    for outer, out in zip(equation.outvars, inner.outvars, strict=True)
                    if isinstance(out, core.Literal) or out in found
                )
    return known


def _operand_wishes(
    run: Run,
    settings: Settings,
    equation: Any,
    declared: tuple[bool, ...],
    outputs: tuple[Wish, ...],
) -> tuple[Wish, ...]:
    """What an equation wants of its operands."""
    name, count = equation.primitive.name, len(equation.invars)
    if name in PROGRAMS:
        inner = program_of(equation)
        return plan(run, settings, inner, declared, outputs).inputs
    loop = _LOOPS.get(name)
    if loop is not None:
        return loop(run, settings, equation, declared, outputs)
    if not settings.rules.looks_ahead:
        return (Wish.ANY,) * count
    kind = _planned_class(settings, name)
    wanted = Wish.ANY
    for output in outputs:
        wanted |= output
    if kind is PrimitiveClass.HALF:
        return (Wish.HALF,) * count
    if kind is PrimitiveClass.CONVERT:
        if is_castable(equation.outvars[0].aval):
            source, target = equation.invars[0].aval.dtype, equation.params["new_dtype"]
            return (wanted if source == target else wish_for(target),)
        return (Wish.ANY,)
    if kind in (PrimitiveClass.PROMOTE, PrimitiveClass.FOLLOW):
        if not any(is_castable(v.aval) for v in equation.outvars):
            return (Wish.ANY,) * count
        return (wanted,) * count
    if kind is PrimitiveClass.FULL:
        return (Wish.FULL,) * count
    # Opaque: declared dtypes.
    return tuple(
        wish_for(a.aval.dtype) if is_castable(a.aval) else Wish.ANY
        for a in equation.invars
    )


_PLANNED = {
    Precision.HALF: PrimitiveClass.HALF,
    Precision.LOW: PrimitiveClass.HALF,
    Precision.FULL: PrimitiveClass.FULL,
    Precision.FOLLOW: PrimitiveClass.PROMOTE,
    Precision.DECLARED: PrimitiveClass.OPAQUE,
}


def _planned_class(settings: Settings, name: str) -> PrimitiveClass | None:
    kind = class_of(name, settings.dtype)
    if kind is PrimitiveClass.CONVERT or name in MOVES:
        return kind
    if not settings.is_enabled:
        return PrimitiveClass.OPAQUE
    ruled = settings.rules.precision_of(name)
    return kind if ruled is None else _PLANNED[ruled]


def _scan_wishes(
    run: Run, settings: Settings, equation: Any, declared: Any, outputs: Any
) -> Any:
    n_consts, n_carry = scan_counts(equation.params)
    jaxpr = open_jaxpr(equation.params["jaxpr"])
    end = n_consts + n_carry
    inputs = (*declared[:n_consts], *(False,) * n_carry, *declared[end:])
    carried = carry_wishes(jaxpr.invars[n_consts:end])
    found = plan(run, settings, jaxpr, inputs, (*carried, *outputs[n_carry:])).inputs
    return (*found[:n_consts], *carried, *found[end:])


def _while_wishes(
    run: Run, settings: Settings, equation: Any, declared: Any, outputs: Any
) -> Any:
    params = equation.params
    first, second = params["cond_nconsts"], params["body_nconsts"]
    jaxpr = open_jaxpr(params["body_jaxpr"])
    carried = carry_wishes(jaxpr.invars[second:])
    inputs = (*declared[first : first + second], *(False,) * len(carried))
    found = plan(run, settings, jaxpr, inputs, carried).inputs
    return (*(Wish.ANY,) * first, *found[:second], *carried)


def _cond_wishes(
    run: Run, settings: Settings, equation: Any, declared: Any, outputs: Any
) -> Any:
    wanted = [Wish.ANY] * (len(equation.invars) - 1)
    for branch in equation.params["branches"]:
        found = plan(run, settings, branch, declared[1:], outputs).inputs
        wanted = [a | b for a, b in zip(wanted, found, strict=True)]
    return (Wish.ANY, *wanted)


def carry_wishes(variables: Any) -> tuple[Wish, ...]:
    """What a loop wants of the values it carries: their declared dtypes."""
    return tuple(
        wish_for(v.aval.dtype) if is_castable(v.aval) else Wish.ANY for v in variables
    )


_LOOPS = {"scan": _scan_wishes, "while": _while_wishes, "cond": _cond_wishes}
