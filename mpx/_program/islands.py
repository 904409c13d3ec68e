"""Finds islands: parts of a program between matmuls that are cheap to recompute.

An *island* (a recomputed region) is a connected part of a program without expensive
operations: softmax, a norm, gelu, dropout's scaling, a loss, however they are written.
Autodiff saves its intermediate values, in float32. Recomputing them from the island's
inputs, mostly the half-precision result of a matmul, costs a few operations and no
memory.

An island ends at every operation that is not cheap (matmuls, loops, random bits,
gathers, sums over devices), at residual additions, since the stream is saved anyway,
and at names (`jax.ad_checkpoint.checkpoint_name`), which are for the user's own
policies.

An island runs as a whole, so no path may leave it and come back. Hence equations are
joined only at the same *level*: the largest number of ends on any path to them. Effects
run in order, so they are ends on one long path. An island runs on one mesh and kind of
device, and ends where those change.
"""

import collections
import graphlib
import heapq
import itertools
from collections.abc import (
    Callable,
    Collection,
    Hashable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from typing import Any, NamedTuple, TypeVar

import jax
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from .._base.jax_compat import execution_key, open_jaxpr
from .._base.typing import Atom, Program
from .equations import (
    aval_of,
    count,
    is_multiplication,
    number_of,
    program_of,
    sub_jaxprs,
)
from .primitives import PrimitiveClass, properties

T = TypeVar("T")


class Island(NamedTuple):
    """A part of a program that runs as a whole.

    Attributes:
        equations: Its equations, in the order of the program.
        inputs: The variables that it reads from outside.
        outputs: Its variables that are read outside.
    """

    equations: tuple[JaxprEqn, ...]
    inputs: tuple[Var, ...]
    outputs: tuple[Var, ...]


def is_cheap(equation: JaxprEqn, with_lookups: bool = False) -> bool:
    """Returns whether an equation costs little more than reading its operands.

    With `with_lookups` gathers count, too; an embedding is part of no later island.
    """
    name = equation.primitive.name
    known = properties(name)
    if with_lookups and name == "gather":
        return True
    if equation.effects:
        return False
    if known.joins_regions:
        inner = open_jaxpr(program_of(equation)).eqns
        return not _is_placed(equation.params) and all(
            is_cheap(e, with_lookups) for e in inner
        )
    return known.is_cheap or is_multiplication(equation)


def _makes_data(equation: JaxprEqn) -> bool:
    """Returns whether an equation makes data from weights and constants.

    The batch may be a constant that the function closes over.
    """
    name = equation.primitive.name
    if name == "gather" or properties(name).kind is PrimitiveClass.HALF:
        return True
    return any(
        _makes_data(inner) for sub in sub_jaxprs(equation) for inner in sub.jaxpr.eqns
    )


def _is_placed(params: dict[str, Any]) -> bool:
    """Returns whether a jit has shardings or donated arguments."""
    places = (*params.get("in_shardings", ()), *params.get("out_shardings", ()))
    is_placed = any(isinstance(place, jax.sharding.Sharding) for place in places)
    return is_placed or any(params.get("donated_invars", ()))


def parts(
    jaxpr: Jaxpr, fixed: Iterable[Var], may_join: Callable[[JaxprEqn], bool]
) -> list[JaxprEqn | Island]:
    """Divides a program into islands and other equations.

    Args:
        jaxpr: The program.
        fixed: The inputs that are weights. Values computed from weights and constants
            alone, without matmuls, are part of no island.
        may_join: Whether an equation may be part of an island, if it is cheap.

    Returns:
        Islands and equations, each after its dependencies; the equations unchanged if
        there is no such order.
    """
    groups, copied = _groups(jaxpr, {*fixed, *jaxpr.constvars}, may_join)
    if all(isinstance(group, int) for group in groups):
        return list(jaxpr.eqns)
    ordered = _in_order(jaxpr, groups, copied)
    return list(jaxpr.eqns) if ordered is None else ordered


def _variables(equation: JaxprEqn) -> list[Var]:
    return [a for a in equation.invars if not isinstance(a, Literal)]


def _groups(
    jaxpr: Program, fixed: set[Var], may_join: Callable[[JaxprEqn], bool]
) -> tuple[list[int | list[int]], set[int]]:
    """Returns equations' positions, alone or grouped, and those to copy."""
    level: dict[Var, int] = {}
    home: dict[Var, Hashable] = {}  # where a variable is computed
    island: dict[Var, int] = {}  # the position where an island's variable is made
    islands: dict[int, list[int]] = {}  # all positions in the island of a position
    alone: list[int] = []
    copied: set[int] = set()
    effects = 0  # the level of the last one

    for position, equation in enumerate(jaxpr.eqns):
        inputs = _variables(equation)
        where = execution_key(equation)
        # Invariant: the level of a value is the largest number of barriers on a path to
        # it. Equations of one level have no barrier between them on any path, so no
        # path can leave an island and come back to it.
        here = max(
            (level.get(v, 0) + (home.get(v, where) != where) for v in inputs), default=0
        )
        is_fixed = all(v in fixed for v in inputs) and not _makes_data(equation)
        joins = is_cheap(equation) and may_join(equation)
        if is_fixed:
            fixed.update(equation.outvars)
            if joins:
                # A mask or positions from constants: each island that needs it computes
                # it again, so it is not an input to save.
                copied.add(position)
        if joins and not is_fixed:
            islands[position] = [position]
            for v in inputs:
                # A variable of a lower level has a barrier on some path to here. The
                # joined island would depend on its own outputs.
                if v in island and level[v] == here:
                    _merge(islands, island[v], position)
            island.update((v, position) for v in equation.outvars)
        else:
            if equation.effects:
                # Prints and callbacks run in order: each is a barrier after everything
                # before it.
                here = effects = max(here, effects) + 1
            # Values from weights alone are no barriers: they do not depend on an
            # island, so no path out of an island leads back through them.
            elif not is_fixed:
                here += 1
            alone.append(position)
        level.update((v, here) for v in equation.outvars)
        home.update((v, where) for v in equation.outvars)
    together = {id(whole): whole for whole in islands.values()}
    return [*alone, *map(sorted, together.values())], copied


def _merge(islands: dict[int, list[int]], one: int, other: int) -> None:
    """Merges the islands of two positions, moving the smaller into the larger."""
    small, large = sorted((islands[one], islands[other]), key=len)
    if small is not large:
        large += small
        islands.update(dict.fromkeys(small, large))


def _in_order(
    jaxpr: Program, groups: Sequence[int | list[int]], copied: Collection[int]
) -> list[JaxprEqn | Island] | None:
    """Orders islands and equations, as close to the program's order as possible.

    Returns None if a path leaves an island and comes back.
    """
    maker = {v: i for i, e in enumerate(jaxpr.eqns) for v in e.outvars}
    units = [[group] if isinstance(group, int) else group for group in groups]
    islands = [not isinstance(group, int) for group in groups]
    whole = [
        _with_copies(jaxpr, positions, maker, copied) if is_island else positions
        for positions, is_island in zip(units, islands, strict=True)
    ]
    unit_of = {position: n for n, unit in enumerate(units) for position in unit}
    used: set[Var] = {v for v in jaxpr.outvars if not isinstance(v, Literal)}
    needs: list[set[int]] = [set() for _ in units]
    roots = [unit_of[maker[v]] for v in used if v in maker]
    # Drop no unused equation (it may have an effect), only copies that all their
    # readers have made for themselves.
    roots += [n for n, p in enumerate(units) if islands[n] or p[0] not in copied]
    for n, positions in enumerate(whole):
        inputs = _inputs([jaxpr.eqns[i] for i in positions])
        used.update(inputs)
        needs[n].update(unit_of[maker[v]] for v in inputs if v in maker)
    # Equations with effects stay in order.
    effects = (i for i, equation in enumerate(jaxpr.eqns) if equation.effects)
    for first, second in itertools.pairwise(effects):
        needs[unit_of[second]].add(unit_of[first])
    firsts = [positions[0] for positions in units]
    try:
        # Copies that only islands use are made inside them.
        needed = reachable(roots, needs.__getitem__)
        order = _sorted(firsts, {n: needs[n] for n in needed})
    except graphlib.CycleError:
        return None
    found: list[JaxprEqn | Island] = []
    for n in order:
        equations = tuple(jaxpr.eqns[i] for i in whole[n])
        if islands[n]:
            # Not the copies: their readers outside use the original.
            made = (v for i in units[n] for v in jaxpr.eqns[i].outvars)
            outputs = tuple(v for v in made if v in used)
            found.append(Island(equations, tuple(_inputs(equations)), outputs))
        else:
            found.append(equations[0])
    return found


def _with_copies(
    jaxpr: Program,
    positions: list[int],
    maker: Mapping[Var, int],
    copied: Collection[int],
) -> list[int]:
    """Returns an island's positions, with those of the copies that it needs."""

    def made_by_copies(position: int) -> list[int]:
        makers = (maker.get(v, -1) for v in _variables(jaxpr.eqns[position]))
        return [position for position in makers if position in copied]

    return sorted(reachable(positions, made_by_copies))


def _inputs(equations: Sequence[JaxprEqn]) -> list[Var]:
    """Returns the inputs of some equations, in order of first use."""
    made = {v for equation in equations for v in equation.outvars}
    needed = dict.fromkeys(v for e in equations for v in _variables(e))
    return [v for v in needed if v not in made]


def _sorted(firsts: Sequence[int], needs: Mapping[int, set[int]]) -> list[int]:
    """Returns the units, each after its dependencies.

    Of several candidates the first in the program comes next: XLA's schedule begins
    from this order, and values that are computed early are stored for long.
    """
    sorter = graphlib.TopologicalSorter(needs)
    sorter.prepare()
    ready: list[tuple[int, int]] = []
    order: list[int] = []
    while sorter.is_active():
        for n in sorter.get_ready():
            heapq.heappush(ready, (firsts[n], n))
        order.append(heapq.heappop(ready)[1])
        sorter.done(order[-1])
    return order


def reachable(roots: Iterable[T], needs: Callable[[T], Iterable[T]]) -> set[T]:
    """Returns the roots and everything that they need, directly or indirectly."""
    found = set(roots)
    waiting = list(found)
    while waiting:
        new = set(needs(waiting.pop())) - found
        found |= new
        waiting += new
    return found


# --- Residual streams -----------------------------------------------------------------
#
# Finds the additions that add a branch to a stream. Islands end there, and a scan that
# carries such a sum carries the stream.


class Makers(NamedTuple):
    """The equations that make the values of a program, and their number of readers.

    Attributes:
        equations: The equation that makes each variable.
        readers: How many operands and results of the program each variable is.
    """

    equations: dict[Atom, JaxprEqn]
    readers: collections.Counter[Atom]


def makers_of(jaxpr: Jaxpr) -> Makers:
    """Finds the equations that make values, and how often values are read."""
    read = [atom for equation in jaxpr.eqns for atom in equation.invars]
    variables = (a for a in (*read, *jaxpr.outvars) if not isinstance(a, Literal))
    made: dict[Atom, JaxprEqn] = {
        v: equation for equation in jaxpr.eqns for v in equation.outvars
    }
    return Makers(made, collections.Counter(variables))


# How many steps back to search for one operand of a sum in the history of the other.
# unsure: enough for the models of the tests; a longer branch is not found as a residual
# stream
_ISLAND = 32


def is_residual(equation: JaxprEqn, makers: Makers, is_wanted_full: bool) -> bool:
    """Returns whether an equation of two computed values adds a branch to a stream.

    JAX's derivatives sum gradients by `add_any`. The sum of one weight's gradients,
    which ends in float32, is not a stream: a weight with many uses needs a float32 sum.
    """
    name = equation.primitive.name
    if name not in ("add", "add_any"):
        return False
    if name == "add_any" and is_wanted_full:
        return False
    first, second = equation.invars
    if aval_of(first).shape != aval_of(second).shape:
        return False
    if _is_gated(first, makers) and _is_gated(second, makers):
        return False  # `f * c + i * g` in a recurrent cell, `z * h + (1 - z) * n`
    return not (
        _is_made_of(second, first, makers) or _is_made_of(first, second, makers)
    )


def goes_around(equation: JaxprEqn, makers: Makers) -> bool:
    """Returns whether an operand of a sum skips a branch: it has other readers.

    This does not apply to a sum of two matmuls, as in a recurrent cell, to an
    associative scan, or to a sum over the iterations of a loop.
    """
    return any(_is_read_elsewhere(atom, makers) for atom in equation.invars)


def is_sum_of_products(equation: JaxprEqn, makers: Makers) -> bool:
    """Returns whether an equation adds two matmuls, as in a recurrent cell's gates."""
    return equation.primitive.name == "add" and all(
        _is_cast_matmul(atom, makers) for atom in equation.invars
    )


def _is_cast_matmul(atom: Atom, makers: Makers) -> bool:
    """Returns whether a value is the result of a matmul that sums, also rearranged."""
    maker = None if isinstance(atom, Literal) else makers.equations.get(atom)
    if maker is None:
        return False
    known = properties(maker.primitive.name)
    if known.rearranges:
        return _is_cast_matmul(maker.invars[0], makers)
    if known.program:  # `jnp.einsum` is a jit
        inner = open_jaxpr(program_of(maker))
        result = inner.outvars[[v is atom for v in maker.outvars].index(True)]
        return _is_cast_matmul(result, makers_of(inner))
    return known.kind is PrimitiveClass.HALF and not is_multiplication(maker)


def _is_read_elsewhere(value: Atom, makers: Makers) -> bool:
    while makers.readers[value] == 1:
        maker = makers.equations.get(value)
        if maker is None or not properties(maker.primitive.name).rearranges:
            return False
        value = maker.invars[0]
    return True


def looked_up(value: Atom, makers: Makers) -> Var | None:
    """Returns the looked-up table rows that a value consists of, possibly moved.

    Returns None for other values. A residual stream begins with token embeddings.
    """
    while not isinstance(value, Literal) and (maker := makers.equations.get(value)):
        if maker.primitive.name == "gather":
            return maker.outvars[0]
        if not properties(maker.primitive.name).moves:
            return None
        value = maker.invars[0]
    return None


def _is_gated(value: Atom, makers: Makers) -> bool:
    """Returns whether a value is an elementwise product of two computed values."""
    maker = makers.equations.get(value)
    if maker is None or maker.primitive.name != "mul":
        return False
    return all(
        not isinstance(a, Literal) and aval_of(a).shape == aval_of(value).shape
        for a in maker.invars
    )


def _is_made_of(value: Atom, part: Atom, makers: Makers) -> bool:
    """Returns whether a value depends on a part by elementwise operations only."""
    return any(found is part for found, _ in _elementwise(value, makers))


def is_made_of_product(value: Atom, makers: Makers) -> bool:
    """Returns whether a value is a matmul plus elementwise ops: bias, dropout."""
    makers_found = (maker for _, maker in _elementwise(value, makers) if maker)
    return any(_is_cast_matmul(maker.outvars[0], makers) for maker in makers_found)


def is_scaled(value: Atom, makers: Makers) -> bool:
    """Returns whether a value may be a small step, as in `x + dt * f(x)`.

    A half-precision sum would lose that. Dropout multiplies by a number above one.
    """
    found = _elementwise(value, makers)
    # A mask is a truth value.
    found = (maker for a, maker in found if maker and aval_of(a).dtype != bool)
    return any(_scales(maker, makers) for maker in found)


def _scales(equation: JaxprEqn, makers: Makers) -> bool:
    if equation.primitive.name in ("mul", "div"):
        return not _enlarges(equation, makers)
    if not properties(equation.primitive.name).joins_regions:
        return False
    inner = open_jaxpr(program_of(equation))
    return any(_scales(one, makers_of(inner)) for one in inner.eqns)


def _enlarges(equation: JaxprEqn, makers: Makers) -> bool:
    """Returns whether it multiplies by a number of at least one, as dropout does."""
    found = [number_of(a, makers.equations) for a in equation.invars]
    if equation.primitive.name == "div":
        return found[1] is not None and 0 < abs(found[1]) <= 1
    return any(number is not None and abs(number) >= 1 for number in found)


def _elementwise(value: Atom, makers: Makers) -> Iterator[tuple[Atom, JaxprEqn | None]]:
    """Yields a value's elementwise ancestors, with the equations that make them."""
    waiting, steps, size = [value], 0, count(aval_of(value).shape)
    while waiting and steps < _ISLAND:
        found, steps = waiting.pop(), steps + 1
        maker = makers.equations.get(found)
        yield found, maker
        if maker is None:
            continue
        is_moved = properties(maker.primitive.name).kind is PrimitiveClass.MOVE
        if is_moved or is_cheap(maker):  # `jnp.where` is a jit
            operands = (a for a in maker.invars if not isinstance(a, Literal))
            waiting += [a for a in operands if count(aval_of(a).shape) == size]


# --- What several kernels read --------------------------------------------------------
#
# XLA's compiler for GPUs makes several kernels of an island that reduces over rows and
# channels, as a group norm, or whose gradient is summed for several weights, as a
# convolution by shifts. It writes what they exchange: in float32, if nothing is done.
# What is found here is stored in half precision (`_autocast/_rewrites.py`).

# Operations that XLA does not compute twice: their results are written.
_COSTLY = frozenset(("erf", "logistic", "tanh"))
_EXPONENTIALS = frozenset(("exp", "exp2"))


def is_activation(equation: JaxprEqn) -> bool:
    """Returns whether an equation is an elementwise function, such as silu or tanh."""
    names = _names(equation)
    is_elementwise = not any(name.startswith("reduce") for name in names)
    return not names.isdisjoint(_COSTLY) and is_elementwise and is_cheap(equation)


def _names(equation: JaxprEqn) -> set[str]:
    """Returns the primitives of an equation, or of its program."""
    if not properties(equation.primitive.name).joins_regions:
        return {equation.primitive.name}
    return {e.primitive.name for e in open_jaxpr(program_of(equation)).eqns}


def is_summed_often(value: Atom, makers: Makers) -> bool:
    """Returns whether the gradient of a value is summed for several smaller ones.

    These are weights, biases and statistics. The gradient of a product and one bias is
    rounded already.
    """
    size = count(aval_of(value).shape)
    found = (maker for _, maker in _elementwise(value, makers) if maker)
    read = {a for maker in found if is_cheap(maker) for a in _variables(maker)}
    return sum(1 < count(aval_of(v).shape) < size for v in read) > 1


def sums_before(
    equation: JaxprEqn, makers: Makers, is_declared: Callable[[Atom], bool]
) -> list[Atom]:
    """Returns the sums of a product and something computed that a norm reads.

    Not those of a softmax, whose exponentials need all digits, and of a loss, which is
    computed where its terms are.

    Args:
        equation: The sum in the norm.
        makers: The equations that make the values of the program.
        is_declared: Whether a value is an input, such as a bias.

    Returns:
        The sums, in the shape in which the norm reads them if nothing else does.
    """
    (value,), (result,) = equation.invars, equation.outvars
    size, found = count(aval_of(value).shape), list[Atom]()
    waiting = [(value, value)] if count(aval_of(result).shape) > 1 else []
    for _ in range(_ISLAND * bool(waiting)):
        value, view = waiting.pop() if waiting else (result, result)
        maker = makers.equations.get(value, equation)
        if maker is equation or not is_cheap(maker):
            continue
        if not _names(maker).isdisjoint(_EXPONENTIALS):
            return []
        if maker.primitive.name == "add" and not any(map(is_declared, maker.invars)):
            found += [view] * _is_inner_sum(maker, makers)
            continue
        operands = [a for a in _variables(maker) if count(aval_of(a).shape) == size]
        is_same = properties(maker.primitive.name).is_free
        views = (view if is_same and makers.readers[a] == 1 else a for a in operands)
        waiting += zip(operands, views, strict=True)
    return found


def _is_inner_sum(equation: JaxprEqn, makers: Makers) -> bool:
    """Returns whether a sum is one of a product, and not of a residual stream."""
    is_stream = is_residual(equation, makers, False) and goes_around(equation, makers)
    return not is_stream and any(is_made_of_product(a, makers) for a in equation.invars)
