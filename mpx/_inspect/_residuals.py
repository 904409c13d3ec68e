"""How many bytes autodiff keeps from the forward pass for the backward pass.

Operations of the backward pass are known by the transform `transpose` on their name
stack. A *residual* is a value that an operation of the forward pass makes and an
operation of the backward pass reads; each is counted once, inputs and constants of the
program not at all, as they are there anyway, nor an array that one number fills, which
a compiler writes where it is read. A scan hands its residuals out stacked,
so the lengths of scans are in. Of programs one after the other (the micro-batches of an
accumulation are one program, run again and again) the largest counts.
"""

from jax.extend import core
from jax.extend.core import JaxprEqn, Var

from .._jax_compat import open_jaxpr
from .._program import aval_of, scopes, sub_jaxprs
from .._typing import Program
from ._costs import bytes_of
from ._source_text import phase


def residual_bytes(jaxpr: Program) -> int | None:
    """The bytes that a program keeps for its backward pass; None if it has none."""
    made: set[Var] = set()
    kept: set[Var] = set()
    inside: list[int] = []
    has_backward = False
    for equation in open_jaxpr(jaxpr).eqns:
        if phase(scopes(equation)) != "forward":
            has_backward = True
            kept |= {v for v in equation.invars if not isinstance(v, core.Literal)}
        else:
            made |= set(equation.outvars) - _filled(equation)
            found = [residual_bytes(sub.jaxpr) for sub in sub_jaxprs(equation)]
            inside += [count for count in found if count is not None]
    if not has_backward and not inside:
        return None
    own = sum(bytes_of(aval_of(v)) for v in made & kept)
    return own + max(inside, default=0)


def _filled(equation: JaxprEqn) -> set[Var]:
    """The results of an equation that are filled by one number."""
    if equation.primitive.name == "broadcast_in_dim":
        is_number = isinstance(equation.invars[0], core.Literal)
        return set(equation.outvars) if is_number else set()
    if equation.primitive.name != "custom_jvp_call":
        return set()
    (sub,) = sub_jaxprs(equation)
    inside = set[object]().union(*map(_filled, sub.jaxpr.eqns))
    pairs = zip(equation.outvars, sub.jaxpr.outvars, strict=True)
    return {outer for outer, inner in pairs if inner in inside}
