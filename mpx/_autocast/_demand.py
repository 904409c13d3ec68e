"""Demands: the precision in which the users of each value read it.

They flow from the end of a program to its beginning, and decide which values may be
stored in half precision, and which must not be moved in it:

- Where all users cast a value to half precision, operations that only select values
  (relu, max pooling, a mask) select rounded ones: the same values in half the bytes.
- Where a user reads a value in float32, it is moved (sliced, transposed) in float32,
  even if a product returned it in half precision. So the gradients of its parts are
  summed in float32, and those that nearly cancel leave a correct difference.
- On a TPU, where the users of a matmul subtract its maximum, as a softmax does, it is
  scaled and masked in half precision, without another rounding: XLA's compiler for TPUs
  (libtpu 0.0.42) writes what a softmax reads in the dtype that it has.
"""

import enum
import functools
import operator
from collections.abc import Iterable, Mapping, Sequence, Set
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from .._base.jax_compat import open_jaxpr, scope_names
from .._base.typing import Atom, Aval, Program
from .._program import (
    BackwardFlow,
    PrimitiveClass,
    SubJaxpr,
    accesses_of_wide_only,
    aval_of,
    avals,
    backward,
    goes_around,
    is_activation,
    is_along_vmap,
    is_made_of_product,
    is_multiplication,
    is_reference,
    is_residual,
    is_scaled,
    is_sum_of_products,
    is_summed_often,
    looked_up,
    makers_of,
    only_picks,
    program_of,
    properties,
    scaled_product,
    sub_jaxprs,
    subtracts_maximum,
    sums_before,
)
from .._settings import Precision, Settings
from ._context import FULL, Run, hands_on, is_castable, is_tpu, keeps_scores


class Demand(enum.Flag):
    """What the users of a value read; nothing if there are none."""

    HALF = enum.auto()
    """One casts it to the half precision that is computed in."""
    FULL = enum.auto()
    """One reads all of its digits, or casts it to the other half precision."""
    SHIFT = enum.auto()
    """One subtracts its maximum from it, in float32."""


WIDE = Demand.FULL | Demand.SHIFT
UNREAD, BOTH = Demand(0), Demand.HALF | Demand.FULL

# The demand on each result of a program, or of an equation.
Wanted = tuple[Demand, ...]


class Demands(NamedTuple):
    """The demands on the values of a program.

    Attributes:
        dtype: The half precision that is computed in around the program.
        jaxpr: The program, held so that its id stays unique.
        demands: The demand on each variable that is used.
        readers: How often each variable is an operand, or a result of the program.
        residuals: The results of residual additions.
        beginnings: The rows of tables that residual additions add to.
        sums: The sums of two products, which are stored in half precision.
        factors: The numbers that matmuls are multiplied by before they are rounded.
        scaled: The results of these multiplications.
        unbiased: The results of residual additions to which a bias is added.
        handed: What kernels hand on in half precision: True for the value itself, False
            for its gradient only.
        moved_weights: The inputs that are read in half precision, and that an equation
            moves, or an inner program may move: stacks of weights perhaps.
        has_loop: Whether the program has a scan, of layers perhaps.
    """

    dtype: np.dtype
    jaxpr: Jaxpr
    demands: dict[Var, Demand]
    readers: Mapping[Atom, int]
    residuals: Set[Var] = frozenset()
    beginnings: Set[Var] = frozenset()
    sums: Set[Var] = frozenset()
    factors: Mapping[Atom, float] = MappingProxyType({})
    scaled: Set[Var] = frozenset()
    unbiased: Set[Var] = frozenset()
    handed: Mapping[Atom, bool] = MappingProxyType({})
    moved_weights: tuple[Var, ...] = ()
    has_loop: bool = False

    @property
    def inputs(self) -> Wanted:
        """The demand on each input."""
        return tuple(map(self.demand, self.jaxpr.invars))

    def demand(self, variable: Var) -> Demand:
        """Returns the demand of a variable's users."""
        return self.demands.get(variable, UNREAD)

    def wanted(self, equation: JaxprEqn, dtype: np.dtype) -> Wanted:
        """Returns the demands on the results of an equation, computed in a dtype."""
        demands = map(self.demand, equation.outvars)
        return tuple(_seen_from(dtype, demand, self.dtype) for demand in demands)

    def is_shared(self, variable: Var) -> bool:
        """Returns whether a value has several uses, some of them in float32."""
        is_read_wide = bool(WIDE & self.demand(variable))
        return is_read_wide and self.readers.get(variable, 0) > 1

    def is_read_once(self, atom: Atom) -> bool:
        """Returns whether a value of the program has one use."""
        return not isinstance(atom, Literal) and self.readers.get(atom) == 1


def together(demands: Sequence[Demand]) -> Demand:
    """Returns the joint demand on several values."""
    return functools.reduce(operator.or_, demands) if demands else UNREAD


def demand_for(aval: Aval, half: np.dtype) -> Demand:
    """Returns the demand of a cast to the dtype of a type.

    Args:
        aval: The type.
        half: The half precision that is computed in. The other one has precision, or
            range, that this one lacks.
    """
    if not is_castable(aval):
        return UNREAD
    return Demand.HALF if aval.dtype == half else Demand.FULL


def demands_for(avals: Iterable[Aval], half: np.dtype) -> Wanted:
    """Returns the demands of casts to the dtypes of types."""
    return tuple(demand_for(aval, half) for aval in avals)


def _seen_from(dtype: np.dtype, demand: Demand, half: np.dtype) -> Demand:
    """Converts a demand to a region that computes in another half precision."""
    return demand if dtype == half or not demand else Demand.FULL


def half_dtype_of(equation: JaxprEqn, settings: Settings) -> np.dtype:
    """Returns the half precision of all operands if they share one, else autocast's."""
    avals_of = [aval for aval in avals(equation.invars) if is_castable(aval)]
    dtypes = {aval.dtype for aval in avals_of}
    if len(dtypes) == 1 and FULL not in dtypes:
        return np.dtype(dtypes.pop())
    return settings.dtype


def demands_of(
    run: Run,
    settings: Settings,
    jaxpr: Program,
    are_declared: tuple[bool, ...],
    results: Wanted,
) -> Demands:
    """Determines the demands on the values of a program.

    Args:
        run: The run, which caches them.
        settings: The settings around the program.
        jaxpr: The program, open or closed.
        are_declared: For each input whether it is a declared value.
        results: The demand on each result.

    Returns:
        The demands.
    """
    jaxpr = open_jaxpr(jaxpr)
    if not settings.is_enabled:  # everything runs as it was written
        return Demands(settings.dtype, jaxpr, {}, {})
    # The cached demands hold their program, so the id is unique.
    key = (id(jaxpr), settings, are_declared, results)
    made = run.demands.get(key)
    if made is None:
        flow = _DemandFlow(run, settings, jaxpr, are_declared)
        made = run.demands[key] = flow.plan(results)
    return made


class _DemandFlow(BackwardFlow[Demand]):
    """The flow of demands through one program; inner programs have their own.

    Attributes:
        residuals: The results of residual additions.
        beginnings: The rows of tables that residual additions add to.
        sums: The sums of two products.
        factors: The numbers that matmuls are multiplied by.
        scaled: The results of these multiplications.
        summed: The sums that norms read, and beginnings of streams.
        handed: What kernels hand on in half precision.
        shifted: The values whose maximum is subtracted from them.
        moved: The operands that an equation moves, or an inner program may move.
    """

    nothing = UNREAD

    def __init__(
        self,
        run: Run,
        settings: Settings,
        jaxpr: Jaxpr,
        are_declared: tuple[bool, ...],
    ) -> None:
        self.residuals: set[Var] = set()
        self.beginnings: set[Var] = set()
        self.sums: set[Var] = set()
        self.factors: dict[Atom, float] = {}
        self.scaled: set[Var] = set()
        self.unbiased: set[Var] = set()
        self.summed: set[Atom] = set()
        self.handed: dict[Atom, bool] = {}
        self.shifted: set[Atom] = set()
        self.moved: set[Atom] = set()
        self._run, self._settings, self._jaxpr = run, settings, jaxpr
        self._declared = _declared_variables(jaxpr, are_declared)
        self.makers = makers_of(jaxpr)

        self._keeps_scores = functools.cache(keeps_scores)
        self._hands_on = functools.cache(hands_on)

    def plan(self, results: Wanted) -> Demands:
        """Returns the demands on the values of the program."""
        demands = backward(self._jaxpr, results, self)
        moved = (v for v in self._jaxpr.invars if v in self.moved)
        return Demands(
            self._settings.dtype,
            self._jaxpr,
            demands,
            self.makers.readers,
            self.residuals,
            self.beginnings,
            self.sums,
            self.factors,
            self.scaled,
            self.unbiased,
            self.handed,
            tuple(v for v in moved if demands.get(v) == Demand.HALF),
            any(e.primitive.name == "scan" for e in self._jaxpr.eqns),
        )

    def is_declared(self, atom: Atom) -> bool:
        """Returns whether a value is an input or a constant, moved perhaps."""
        return isinstance(atom, Literal) or atom in self._declared

    def operands(
        self, equation: JaxprEqn, results: Sequence[Demand]
    ) -> Sequence[Demand]:
        """Returns the demands of an equation on its operands."""
        here = self._settings.at(scope_names(equation))
        # Convert in both directions at the border of a region.
        if here.dtype == self._settings.dtype:
            return self._operands(equation, here, results)
        results = [_seen_from(here.dtype, d, self._settings.dtype) for d in results]
        found = self._operands(equation, here, results)
        return [_seen_from(self._settings.dtype, d, here.dtype) for d in found]

    def _operands(
        self, equation: JaxprEqn, here: Settings, results: Sequence[Demand]
    ) -> Sequence[Demand]:
        declared = tuple(map(self.is_declared, equation.invars))
        is_full = bool(results) and results[0] == Demand.FULL
        is_half = here.has_half_stream and here.is_enabled
        if is_half and any(declared) and self._adds_bias_to_residual(equation, here):
            self.residuals.update(equation.outvars)
            return Demand.FULL, Demand.FULL
        if not any(declared) and self._is_residual(equation, is_full, here):
            # `backward` calls this once per equation, when the demands of all users
            # are known.
            if equation.outvars[0] not in self.unbiased:
                self.residuals.update(equation.outvars)
            found = {a: looked_up(a, self.makers) for a in equation.invars}
            self.beginnings.update(v for v in found.values() if v is not None)
            if here.residual_stream == "half" and self._hands_on(here):
                read = (a for a in found if not found[a] and self.makers.readers[a] > 1)
                self.summed.update(a for a in read if not is_scaled(a, self.makers))
            if is_half:
                return Demand.HALF, Demand.HALF
        elif is_sum_of_products(equation, self.makers):
            self.sums.update(equation.outvars)
        if self._hands_on(here):
            self._hand_on(equation, here, results)
        known = properties(equation.primitive.name)
        if known.moves or sub_jaxprs(equation):
            self.moved.update(a for a in equation.invars if not isinstance(a, Literal))
        scores = self._keeps_scores(here) and self._of_scores(equation, here, results)
        if scores:
            return scores
        if known.kind is not PrimitiveClass.RECURSE:
            found = _operand_demands(here, equation, results)
            if equation.primitive.name == "pallas_call":
                blocks = blocks_in_half(here, equation, results)
                pairs = zip(found, operands_in_half(equation, blocks), strict=True)
                return [Demand.HALF if is_half else d for d, is_half in pairs]
            return found
        found = [UNREAD] * len(equation.invars)
        for sub in sub_jaxprs(equation):
            if sub.role == "condition":  # of a loop: it has demands of its own
                continue
            inputs = self._inputs_of(sub, here, declared, results)
            for place, demand in zip(sub.operands, inputs, strict=True):
                if place is not None:
                    found[place] |= demand
        return found

    def _hand_on(
        self, equation: JaxprEqn, here: Settings, results: Sequence[Demand]
    ) -> None:
        """Notes what kernels hand on to each other: see `islands`."""
        is_half, is_read = here.residual_stream == "half", False
        if is_activation(equation):
            is_read, value = results[0] == BOTH, equation.invars[0]
            if value in self.makers.equations and is_summed_often(value, self.makers):
                self.handed.setdefault(value, False)
        elif is_half and equation.primitive.name == "reduce_sum":
            self.summed.update(sums_before(equation, self.makers, self.is_declared))
        if is_half:
            found = (v for v in equation.outvars if is_read or v in self.summed)
            self.handed.update((v, True) for v in found if aval_of(v).dtype == FULL)

    def _of_scores(
        self, equation: JaxprEqn, here: Settings, results: Sequence[Demand]
    ) -> Sequence[Demand]:
        """Returns the demands of an operation on scores; nothing for others."""
        if subtracts_maximum(equation, self.makers):
            self.shifted.add(equation.invars[0])
            return Demand.SHIFT, Demand.FULL
        if equation.primitive.name == "reduce_max":
            return (Demand.SHIFT,) if equation.invars[0] in self.shifted else ()
        if Demand.SHIFT not in together(results) or Demand.FULL in together(results):
            return ()
        found = scaled_product(equation, self.makers)
        if found is None or not _is_cast_to_half(self.makers.equations[found[0]], here):
            return ()
        self.factors[found[0]] = found[1]
        self.scaled.update(equation.outvars)
        return (together(results),) * 2

    def _is_residual(self, equation: JaxprEqn, is_full: bool, here: Settings) -> bool:
        if not (
            is_residual(equation, self.makers, is_full)
            and goes_around(equation, self.makers)
            and is_castable(aval_of(equation.outvars[0]))
        ):
            return False
        # An addition to a half-precision stream may be half, too, without loss.
        if not (here.has_half_stream and here.is_enabled):
            return True
        branches = [a for a in equation.invars if is_made_of_product(a, self.makers)]
        if here.residual_stream == "blocks" and equation.primitive.name == "add":
            branches *= not any(is_scaled(a, self.makers) for a in branches)
        return bool(branches)

    def _adds_bias_to_residual(self, equation: JaxprEqn, here: Settings) -> bool:
        """Returns whether an equation adds to a residual addition that only it reads.

        The stream in `x + h @ w + b` is the whole sum.
        """
        if equation.primitive.name != "add":
            return False
        for atom in equation.invars:
            is_read_here = not self.is_declared(atom) and self.makers.readers[atom] == 1
            maker = self.makers.equations.get(atom) if is_read_here else None
            if maker is None or any(map(self.is_declared, maker.invars)):
                continue
            if self._is_residual(maker, False, here):
                self.unbiased.update(maker.outvars)
                return True
        return False

    def _inputs_of(
        self,
        sub: SubJaxpr,
        settings: Settings,
        declared: tuple[bool, ...],
        results: Sequence[Demand],
    ) -> Sequence[Demand]:
        """Returns an inner program's demands; a loop's carry has its declared dtype."""
        variables = sub.jaxpr.invars
        wanted = [UNREAD if i is None else results[i] for i in sub.results]
        inside = [i is not None and declared[i] for i in sub.operands]
        for output, where in sub.carried:
            wanted[output] = demand_for(aval_of(variables[where]), settings.dtype)
            # It may be declared before the first iteration only.
            inside[where] = False
        made = demands_of(self._run, settings, sub.jaxpr, tuple(inside), tuple(wanted))
        inputs = list(made.inputs)
        for output, where in sub.carried:
            inputs[where] = wanted[output]
        return inputs

    def transfer(
        self, equation: JaxprEqn, results: Sequence[Demand]
    ) -> Sequence[Demand]:
        """Returns the demands of an operation on its operands."""
        return _operand_demands(self._settings, equation, results)


def _declared_variables(jaxpr: Jaxpr, are_declared: Sequence[bool]) -> set[Var]:
    # A value declared here must be so when it is emitted (`_move` and `_join` of
    # `_emit`, `converted` of `_rewrites`): residual additions are found by it.
    known = {v for v, d in zip(jaxpr.invars, are_declared, strict=True) if d}
    known.update(jaxpr.constvars)
    for equation in jaxpr.eqns:
        properties_of = properties(equation.primitive.name)
        atoms = equation.invars
        if properties_of.moves or properties_of.joins:
            if all(isinstance(a, Literal) or a in known for a in atoms):
                known.update(equation.outvars)
        elif properties_of.kind is PrimitiveClass.CONVERT:
            if not is_castable(aval_of(atoms[0])):
                known.update(equation.outvars)
        elif properties_of.program:
            inputs = tuple(isinstance(a, Literal) or a in known for a in atoms)
            inner = open_jaxpr(program_of(equation))
            # unsure: a limit on tracing time, not measured; a longer program hides a
            # weight
            if any(inputs) and len(inner.eqns) < 8:  # only ones that do little else
                found = _declared_variables(inner, inputs)
                known.update(
                    outer
                    for outer, out in zip(equation.outvars, inner.outvars, strict=True)
                    if isinstance(out, Literal) or out in found
                )
    return known


def _operand_demands(
    settings: Settings, equation: JaxprEqn, outputs: Sequence[Demand]
) -> tuple[Demand, ...]:
    """Returns the demands of an operation on its operands."""
    name, count = equation.primitive.name, len(equation.invars)
    if not settings.rules.looks_ahead:
        return (UNREAD,) * count
    known = properties(name)
    kind = known.kind if settings.is_enabled else PrimitiveClass.OPAQUE
    wanted = together(outputs)
    if kind is PrimitiveClass.MOVE:
        is_sum = known.sums and is_along_vmap(equation)
        return (Demand.FULL if is_sum else wanted,) * count
    if kind is PrimitiveClass.CONVERT:
        source, result = avals((equation.invars[0], equation.outvars[0]))
        if source.dtype == result.dtype:
            return (wanted,)
        return (demand_for(result, settings.dtype) or Demand.FULL,)
    rule = settings.rules._first_of(name) if settings.rules.rules else None
    if rule is not None:
        is_sure = rule.precision is Precision.HALF and rule._is_about_primitives
        is_sure = is_sure and settings.is_enabled and _is_of_half(equation, settings)
        return (Demand.HALF if is_sure else BOTH,) * count
    if kind is PrimitiveClass.HALF:
        is_sure = _is_cast_to_half(equation, settings)
        return (Demand.HALF if is_sure else BOTH,) * count
    if kind is PrimitiveClass.FULL:
        is_picked = only_picks(equation) and Demand.FULL not in wanted
        return (wanted if is_picked else Demand.FULL,) * count
    # Declared dtypes.
    return demands_for(avals(equation.invars), settings.dtype)


class _KernelFlow(BackwardFlow[Demand]):
    """The flow of demands through a Pallas kernel, whose operands are references.

    The demand on a reference is that on what is read of it.
    """

    nothing = UNREAD

    def __init__(self, dtype: np.dtype, jaxpr: Jaxpr) -> None:
        self._settings = Settings(dtype=dtype)
        self._refused = accesses_of_wide_only(jaxpr)

    def operands(
        self, equation: JaxprEqn, results: Sequence[Demand]
    ) -> Sequence[Demand]:
        """Returns the demands of an equation on its operands."""
        kind = properties(equation.primitive.name).kind
        is_program = kind is PrimitiveClass.RECURSE
        follow = super().operands if is_program else self.transfer
        return follow(equation, results)

    def transfer(
        self, equation: JaxprEqn, results: Sequence[Demand]
    ) -> Sequence[Demand]:
        """Returns the demands of an operation on its operands."""
        found = _operand_demands(self._settings, equation, results)
        is_access = equation.primitive.name in ("get", "swap")
        is_known = is_access and id(equation) not in self._refused
        own = together(results) if is_known else Demand.FULL
        pairs = zip(equation.invars, found, strict=True)
        return [own if is_reference(a) else d for a, d in pairs]


def blocks_in_half(
    settings: Settings, equation: JaxprEqn, results: Sequence[Demand]
) -> list[bool]:
    """Returns which operands and results of a Pallas kernel are in half precision.

    On TPUs, in bfloat16: the operands that it only multiplies, and the results that it
    does not read again, and whose users multiply them.

    Args:
        settings: The settings that apply to the kernel.
        equation: Its call.
        results: The demand on each of its results.

    Returns:
        A truth value for each operand that has blocks, then for each result.
    """
    mapping: Any = equation.params["grid_mapping"]
    is_ours = settings.is_enabled and settings.dtype == jnp.bfloat16
    is_ours = is_ours and not settings.rules._first_of("pallas_call")
    if not (is_ours and is_tpu(settings)) or equation.params["input_output_aliases"]:
        return [False] * len(mapping.block_mappings)
    jaxpr: Jaxpr = equation.params["jaxpr"]
    demands = backward(jaxpr, (), _KernelFlow(settings.dtype, jaxpr))
    inside = [demands.get(v, UNREAD) for v in jaxpr.invars]
    wanted = [Demand.HALF] * mapping.num_inputs
    wanted += [UNREAD if d == Demand.HALF else None for d in results]
    blocks = zip(
        mapping.block_mappings,
        inside[mapping.num_index_operands :],
        wanted,
        strict=False,  # scratch arrays come last
    )
    return [b.array_aval.dtype == FULL and d == w for b, d, w in blocks]


def operands_in_half(equation: JaxprEqn, blocks: list[bool]) -> list[bool]:
    """Returns for each operand whether it is; grid bounds and indices have no blocks.

    Args:
        equation: The call of a kernel.
        blocks: What `blocks_in_half` returns.
    """
    count: int = equation.params["grid_mapping"].num_inputs
    return [False] * (len(equation.invars) - count) + blocks[:count]


def _is_cast_to_half(equation: JaxprEqn, settings: Settings) -> bool:
    """Returns whether a product certainly casts its operands to half precision."""
    return (
        not is_multiplication(equation)
        and not asks_for_precision(equation.params.get("precision"))
        and _is_of_half(equation, settings)
    )


def _is_of_half(equation: JaxprEqn, settings: Settings) -> bool:
    """Returns whether an operation cast to half precision gets the active one."""
    are_castable = all(map(is_castable, avals(equation.invars[:2])))
    return are_castable and half_dtype_of(equation, settings) == settings.dtype


# JAX's names for the highest precision.
_HIGHEST = ("highest", "float32", "fp32")


def asks_for_precision(precision: object) -> bool:
    """Returns whether the program sets a higher precision than JAX's default."""
    if precision is None:
        return False
    if not isinstance(precision, tuple):
        return True  # an algorithm, which belongs to certain dtypes
    # Set for the whole program by `jax.default_matmul_precision`, it does not mark this
    # product.
    config: Any = jax.config
    if config.jax_default_matmul_precision in _HIGHEST:
        return False
    return any(p is jax.lax.Precision.HIGHEST for p in precision)
