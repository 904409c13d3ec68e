"""Strict mode: what happens by accident, or without mpx knowing it, is an error."""

from typing import Any

from jax.extend.core import JaxprEqn

from .._errors import describe, listing
from .._program import aval_of, count, source_span
from .._quantize import AbstractProduct, Path, path_of
from ._choice import Case, Choice
from ._decisions import Reason, line_of
from ._demand import Demand
from ._rules import Rules
from ._values import FULL, Provenance, Value, is_castable

_CALL = "`mpx.autocast(..., strict=True)`"


def refuse_unknown(case: Case, choice: Choice) -> None:
    """Raises for a primitive that mpx does not know."""
    if choice.reason is Reason.UNKNOWN:
        raise NotImplementedError(
            f"{_CALL} met the primitive `{case.name}`{_where(case.equation)}, which it "
            "does not know. Say what to do with it in `rules=`: "
            f'`mpx.Rule(mpx.Precision.DECLARED, primitive="{case.name}")` leaves it as '
            "it was written."
        )


def refuse_accident(case: Case, choice: Choice) -> None:
    """Raises where something small makes a half precision value float32.

    Small is what is less than the result, or was broadcast: a scalar, a bias. If it was
    computed from what was computed in half (a mean), or if the users of the result want
    float32, nothing happens by accident. A residual stream is not small.
    """
    if choice.dtype != FULL or choice.rule is not None:
        return
    if choice.reason is Reason.PROMOTED and case.demand is not Demand.FULL:
        culprit = _small_and_full(case)
    else:
        culprit = None
    if culprit is None and _was_widened_here(case):
        culprit = next(v for v in case.operands if v.widened_by is None)
    if culprit is None:
        return
    half = case.settings.dtype.name
    raise ValueError(
        f"{_CALL}: `{case.name}`{_where(case.equation)} makes a half precision value "
        f"float32, because of {describe(culprit.array)}. Write that operand as a "
        f"Python number, or cast it to {half}; if float32 is what you want, cast the "
        'other operand: `x.astype("float32")`.'
    )


def _small_and_full(case: Case) -> Value | None:
    """An operand that alone is to blame for float32, if there is one."""
    size = max((count(aval_of(v).shape) for v in case.equation.outvars), default=0)
    values = case.castable
    has_half = any(
        v.facts.provenance is Provenance.HALF and count(v.array.shape) == size
        for v in values
    )
    wide = [v for v in values if v.facts.provenance is Provenance.FULL]
    is_small = all(
        v.facts.is_fixed and (count(v.array.shape) < size or v.facts.is_broadcast)
        for v in wide
    )
    return wide[0] if has_half and wide and is_small else None


def _was_widened_here(case: Case) -> bool:
    """Whether JAX's promotion cast an operand for the sake of a small one.

    The cast and the operation then come from one expression of the program.
    """
    widened = [v for v in case.castable if v.widened_by is not None]
    others = [v for v in case.castable if v.widened_by is None]
    size = max((count(aval_of(v).shape) for v in case.equation.outvars), default=0)
    if not widened or not others or not is_castable(case.equation.outvars[0].aval):
        return False
    if any(count(v.array.shape) == size and not v.facts.is_broadcast for v in others):
        return False
    here = source_span(case.equation)
    return here is not None and all(source_span(v.widened_by) == here for v in widened)


def refuse_slow(case: Case, product: AbstractProduct) -> None:
    """Raises where a recipe is emulated on the device that is compiled for."""
    path, why = path_of(product)
    if Path(path) not in (Path.FP8_UNITS, Path.BLOCK_UNITS):
        raise ValueError(
            f"{_CALL}: the product{_where(case.equation)} is not computed on the "
            f"device's units of low precision, but {path}: {why}. Choose another "
            "recipe, leave the product in half precision "
            "(`mpx.Rule(mpx.Precision.HALF, ...)`), or leave `strict` out."
        )


def refuse_unused(rules: Rules, used: set[Any]) -> None:
    """Raises for rules that held for no operation."""
    unused = [str(rule) for rule in rules.rules if rule not in used]
    if unused:
        raise ValueError(
            f"{_CALL} has rules that hold for no operation: {listing(unused)}. Look at "
            "`mpx.explain(func)(*args)` for names of primitives, scopes and parameters."
        )


def _where(equation: JaxprEqn) -> str:
    line = line_of(equation)
    return f" at {line}" if line else ""
