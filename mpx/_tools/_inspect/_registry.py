"""Findings of `mpx.explain`: probable mistakes in a program.

To add one, write a function and enter it below: in `OF_AN_OPERATION` if it depends on
one operation, in `OF_A_PROGRAM` if it is reported once per program. Facts of the whole
program are fields of `Whole`, computed in `_findings`.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, JaxprEqn

from ..._autocast import Note
from ..._program import (
    Visit,
    avals,
    distinct_equations,
    is_along_vmap,
    is_matmul,
    properties,
)
from ._costs import flops
from ._facts import Fact, Facts, promotion
from ._findings import (
    FINDING,
    LARGEST,
    deciding_comparisons,
    factored_products,
    hides_a_program,
    rounded_integers,
    unscaled_gradient,
    uses_half,
)
from ._report import HALF, Operation
from ._traced import innermost_note, leg_of, phase


@dataclasses.dataclass(frozen=True)
class Whole:
    """Facts of a program.

    Attributes:
        is_mixed: Whether it uses half precision.
        ends: The comparisons that end loops by rounded numbers, by the identities of
            their equations.
        rounded: Findings of matmuls whose rounding matters, by the same.
    """

    is_mixed: bool
    ends: frozenset[int]
    rounded: Mapping[int, str]


def whole_of(jaxpr: ClosedJaxpr, visits: Sequence[Visit[Fact]]) -> Whole:
    """Returns the facts of a program, which must be kept alive as long as they are."""
    if not any(uses_half(visit.equation) for visit in visits):
        return Whole(False, frozenset(), {})
    has_loops = any(visit.place.unknown_loops for visit in visits)
    ends = deciding_comparisons(jaxpr.jaxpr) if has_loops else frozenset[int]()
    rounded = {
        product: f"feeds {name}, which magnifies its rounding: compute it in float32"
        for product, name in factored_products(jaxpr).items()
    }
    for product, short in rounded_integers(jaxpr).items():
        text = f"may round integers: {short} holds those up to {LARGEST[short]}"
        rounded[product] = text
    return Whole(True, ends, rounded)


@dataclasses.dataclass(frozen=True)
class Seen:
    """An operation, with all that its findings depend on.

    Attributes:
        visit: Its equation, with scopes and loops.
        flow: The sources of the dtypes of the program.
        note: Autocast's note on it; None without one.
        precision: The dtype that it is computed in.
        program: The facts of the program.
    """

    visit: Visit[Fact]
    flow: Facts
    note: Note | None
    precision: str
    program: Whole

    @property
    def equation(self) -> JaxprEqn:
        """Returns its equation."""
        return self.visit.equation

    @property
    def is_forward(self) -> bool:
        """Returns whether it is in the forward pass."""
        return phase(self.visit.scopes) == "forward"


def _has_no_units(seen: Seen) -> str:
    slow = None if seen.note is None else seen.note.slow_leg
    is_it = slow is not None and slow is leg_of(seen.visit.scopes)
    is_it &= phase(seen.visit.scopes) != "recompute" and is_matmul(seen.equation)
    return "quantized, but computed without hardware for it" * is_it


def _is_rounded(seen: Seen) -> str:
    return seen.program.rounded.get(id(seen.equation), "") * seen.is_forward


def _hides_a_program(seen: Seen) -> str:
    is_cast = seen.program.is_mixed or seen.note is not None
    is_it = is_cast and hides_a_program(seen.equation)
    return "contains a program that cannot be inspected" * is_it


def _ends_a_loop(seen: Seen) -> str:
    is_it = id(seen.equation) in seen.program.ends
    return "ends a loop by half-precision matmuls" * is_it


def _is_left_wide(seen: Seen) -> str:
    """Returns the finding of a matmul under autocast, which leaves float64 unchanged.

    With x64, one array of NumPy's default dtype makes a whole program float64.
    """
    is_cast = seen.note is not None and not seen.note.is_switched_off
    if not is_cast or not is_matmul(seen.equation):
        return ""
    is_wide = any(a.dtype == jnp.float64 for a in avals(seen.equation.invars[:2]))
    return _matmul_in(seen.equation) * is_wide


def _is_a_wide_kernel(seen: Seen) -> str:
    """Returns the finding of a Pallas kernel that multiplies float32 only."""
    equation, is_cast = seen.equation, seen.note and not seen.note.is_switched_off
    if equation.primitive.name != "pallas_call" or not is_cast:
        return ""
    products = filter(is_matmul, distinct_equations(equation.params["jaxpr"]))
    operands = [avals(e.invars) for e in products if e.params.get("precision") is None]
    is_wide = {a.dtype for pair in operands for a in pair} == {jnp.dtype(jnp.float32)}
    is_it = is_wide and not any(str(a.dtype) in HALF for a in avals(equation.invars))
    return "a Pallas kernel that multiplies float32" * is_it


# Operations that lose precision or range in half precision.
_CRITICAL = frozenset(
    """
    acos acosh asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt cos cosh
    cumlogsumexp cumprod cumsum digamma erf_inv exp exp2 expm1 igamma igamma_grad_a
    igammac lgamma log log1p log2 polygamma polynomial pow random_gamma
    random_gamma_grad reduce_prod reduce_sum reduce_window_sum
    regularized_incomplete_beta rsqrt scatter-add scatter-mul scatter-sub sin sinh sqrt
    tan zeta
    """.split()
)


def _is_an_accident(seen: Seen) -> str:
    """Returns a promotion, wide matmul or critical operation that the program has."""
    if not seen.program.is_mixed or seen.note is not None:
        return ""
    equation, precision = seen.equation, seen.precision
    if promotion(equation, seen.visit.operands) is not None and seen.is_forward:
        return "half precision promoted"
    if id(equation) in seen.flow.promotions:
        return ""  # said of the operation that it was made for
    if is_matmul(equation) and precision in ("float32", "float64", "mixed"):
        return _matmul_in(equation)
    if precision not in HALF:
        return ""
    # Sums of one number occur if axes of length 1 are dropped.
    name = equation.primitive.name
    known = properties(name)
    is_range_short = precision == "float16" and name in ("integer_pow", "square")
    is_sum = known.is_sparse or (known.sums and is_along_vmap(equation))
    if (name in _CRITICAL or is_range_short or is_sum) and flops(equation) != 0:
        return f"{name} in {precision}"
    return ""


def _matmul_in(equation: JaxprEqn) -> str:
    dtypes = dict.fromkeys(str(a.dtype) for a in avals(equation.invars[:2]))
    return f"matmul in {' by '.join(dtypes)}"


OF_AN_OPERATION: tuple[Callable[[Seen], str], ...] = (
    _has_no_units,
    _is_rounded,
    _hides_a_program,
    _ends_a_loop,
    _is_left_wide,
    _is_a_wide_kernel,
    _is_an_accident,
)
"""Each returns the text of a finding, "" if none; the first text wins."""


def finding_of(seen: Seen) -> str:
    """Returns the finding of an operation; "" if none."""
    return next(filter(None, (find(seen) for find in OF_AN_OPERATION)), "")


Visits = Sequence[Visit[Fact]]


def _first_slow(visits: Visits, operations: Sequence[Operation]) -> int | None:
    """Returns the first float16 matmul that autocast emits for a CPU."""

    def is_slow(visit: Visit[Fact]) -> bool:
        note = innermost_note(visit.scopes)
        if note is None or note.platform != "cpu" or not is_matmul(visit.equation):
            return False
        return {str(a.dtype) for a in avals(visit.equation.invars[:2])} == {"float16"}

    found = (
        i for i, v in enumerate(visits) if is_slow(v) and not operations[i].finding
    )
    return next(found, None)


OF_A_PROGRAM: dict[str, Callable[[Visits, Sequence[Operation]], int | None]] = {
    "float16 on a CPU, which has no units for it": _first_slow,
    FINDING: lambda visits, _: unscaled_gradient(visits),
}
"""By its text, the function that returns the operation's index; the last wins."""
