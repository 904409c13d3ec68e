"""The cause of a skipped step, found by replaying variants of it."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from ..._autocast import autocast, recomputing, with_dtype, with_rule
from ..._base.dtypes import half_precision_datatype
from ..._loss_scaling import AbstractLossScaling, NoLossScaling, StaticLossScaling
from ..._program import PRIMITIVES, divide, properties
from ..._settings import Policy, Precision, Rule, get_policy, settings_of, unwrapped
from ..._step import Options, gradient_function
from .._inspect import Operation, explain
from ._blame_report import AtLine, Culprit
from ._replay import Gradient, Replay, replayed

# --- Candidate rules of autocast, the fewest FLOPs first ------------------------------

# The most weights that are tried of matmuls that may take an overflowing cast.
_WEIGHTS = 4
_ALL = "*"


def candidate_rules(
    culprits: Sequence[Culprit], settings: Any, operations: Sequence[Operation]
) -> list[Rule]:
    """Returns rules that may cure the first culprit, unsorted.

    Args:
        culprits: The culprits.
        settings: The settings of the autocast function.
        operations: The operations of the function.
    """
    first = culprits[0] if culprits else None
    every = Rule(Precision.FULL, primitive=_ALL)
    if first is None or first.primitive in ("input", "constant"):
        return [every]
    names = [first.primitive]
    if first.primitive == "convert_element_type":  # a cast, mostly for a matmul
        names += [n for n, known in PRIMITIVES.items() if known.is_quantizable]
    found: list[Rule] = []
    for place in _places(first, operations):
        for name in names:
            if settings.recipes and properties(name).is_quantizable:
                found.append(Rule(Precision.HALF, primitive=name, **place))
            found.append(Rule(Precision.FULL, primitive=name, **place))
    if first.scope:
        found.append(Rule(Precision.FULL, scope=first.scope))
    # Devices communicate half precision, which may cancel long before it shows.
    names = sorted({o.primitive for o in operations if properties(o.primitive).sums})
    if names:
        sums = names[0] if len(names) == 1 else tuple(names)
        found.append(Rule(Precision.FULL, primitive=sums))
    return [*found, every]


def is_for_all(rule: Rule) -> bool:
    """Returns whether a rule of `candidate_rules` applies to the whole function."""
    return rule.primitive == _ALL


def _places(culprit: Culprit, operations: Sequence[Operation]) -> list[dict[str, Any]]:
    """Returns conditions of rules: scope, weight, both; none; the line."""
    scope = {"scope": culprit.scope} if culprit.scope else {}
    names = culprit.parameters[:1] or _readers(culprit, operations)
    weights = [{"parameter": name} for name in names]
    both = [{**scope, **weight} for weight in weights]
    places: list[dict[str, Any]] = [scope, *weights, *both]
    line = culprit.line or culprit.made_at
    # A line number changes with the code: it is the last resort.
    at_line = [{"when": AtLine(line)}] if line and not any(places) else []
    return [*filter(None, places), {}, *at_line]


def _readers(culprit: Culprit, operations: Sequence[Operation]) -> list[str]:
    """Returns the weights of matmuls whose operand may be the cast, by its type."""
    if culprit.primitive != "convert_element_type" or not culprit.results:
        return []
    made = culprit.results[0].type
    names = [
        name
        for operation in operations
        if made in operation.inputs and not operation.is_cast
        for name in operation.parameters[:1]
    ]
    return list(dict.fromkeys(names))[:_WEIGHTS]


def narrowest_first(
    rules: Sequence[Rule], operations: Sequence[Operation]
) -> list[tuple[Rule, float | None]]:
    """Returns rules sorted by their shares of FLOPs, with the shares.

    A rule for one place that applies to no operation is left out. A rule of unknown
    share is sorted as one for all.

    Args:
        rules: The rules; among equal shares the order stays.
        operations: The operations of the function.
    """
    total = sum(o.flops or 0 for o in operations)
    found: list[tuple[Rule, float | None]] = []
    for rule in dict.fromkeys(rules):
        own = [o for o in operations if _is_about(rule, o)]
        if own or not operations or rule._is_about_primitives:
            flops = sum(o.flops or 0 for o in own)
            found.append((rule, flops / total if own and total else None))
    return sorted(found, key=lambda pair: 1.0 if pair[1] is None else pair[1])


def _is_about(rule: Rule, operation: Operation) -> bool:
    """Returns whether a rule of `candidate_rules` applies to an operation."""
    if isinstance(rule.when, AtLine) and not operation.source.endswith(rule.when.line):
        return False
    name = operation.primitive
    # For scaled blocks, the rule is matched against the matmul they replaced.
    is_of_blocks = operation.is_low and name.startswith("scaled_matmul")
    seen = "dot_general" if is_of_blocks else name
    return rule._holds_at(seen, (operation.scope,), operation.parameters)


# --- Variants of a step ---------------------------------------------------------------

CALL = "`mpx.blame`"


@dataclasses.dataclass(frozen=True)
class StepOf:
    """A step: the differentiated function, options, and arguments.

    Attributes:
        func: The loss function.
        scaling: The loss scaling that the step had.
        argnums: As in `gradient_function`.
        options: The options of the gradient function.
        args: Its arguments.
        kwargs: Its keyword arguments.
        count: How many of the arguments are the user's; None for all.
        pure: If set, `pure(func)` is differentiated instead of `func`.
        args_with: If set, `args_with(func)` are the arguments of a changed `func`.
        recomputes: Whether the derivative recomputes cheap operations, as that of an
            autocast function does: without it float32 needs twice the memory.
    """

    func: Callable[..., PyTree]
    scaling: Any
    argnums: int | tuple[int, ...] | None
    options: Options
    args: tuple[PyTree, ...]
    kwargs: dict[str, PyTree]
    count: int | None = None
    pure: Callable[[Callable[..., PyTree]], Callable[..., PyTree]] | None = None
    args_with: Callable[[Callable[..., PyTree]], tuple[PyTree, ...]] | None = None
    recomputes: bool = False

    def replay(self) -> Replay:
        """Returns the step as a program."""
        func = self.func if self.pure is None else self.pure(self.func)
        func = recomputing(func) if self.recomputes else func

        def make(scaling: AbstractLossScaling | None) -> Gradient:
            if scaling is not None and scaling._by_loss:
                scaling = NoLossScaling()  # which sets no element to zero
            return gradient_function(
                CALL, func, scaling, self.argnums, True, self.options
            )

        return replayed(make, self.scaling, self.args, self.kwargs)

    def in_float32(self) -> "StepOf":
        """Returns the step in the precisions that the program declares."""
        step = self.changed(use_mixed_precision=False, policy=None, keep=None)
        return dataclasses.replace(step, recomputes=True)

    def changed(self, **options: Any) -> "StepOf":
        """Returns the step with other options."""
        return dataclasses.replace(
            self, options=dataclasses.replace(self.options, **options)
        )

    def of(self, func: Callable[..., PyTree]) -> "StepOf":
        """Returns the step with another function."""
        args = self.args if self.args_with is None else self.args_with(func)
        return dataclasses.replace(self, func=func, args=args)

    def cast_by(self, func: Callable[..., PyTree]) -> "StepOf":
        """Returns the step with a function that casts itself."""
        return self.of(func).changed(policy=None, keep=None, accumulate_dtype=None)


def loss_scale_of(scaling: AbstractLossScaling | None) -> float:
    """Returns the loss scale of a state; 1 without a state."""
    return 1.0 if scaling is None else float(scaling.loss_scale)


def is_finite_at_one(step: StepOf, replay: Replay) -> bool:
    """Returns whether the step is finite at a loss scale of 1."""
    one = step.scaling._at_scale(jnp.ones((), jnp.float32))
    if float(one.loss_scale) == 1:  # the same program, with another value
        arrays, _ = divide((one, step.args, step.kwargs))
        return not replay.bits(arrays).any()
    one = step.scaling.with_loss(StaticLossScaling(1.0))
    return not dataclasses.replace(step, scaling=one).replay().bad_places()


def curing_rule(
    step: StepOf, culprits: Sequence[Culprit]
) -> tuple[Rule | None, float | None]:
    """Returns a rule of autocast that makes the step finite, and its share of FLOPs.

    Rules are tried in the order of their shares; (None, None) if none is found.
    """
    if unwrapped(step.func)[0] is step.func:
        return None, None
    operations = _operations(step)
    rules = candidate_rules(culprits, settings_of(step.func), operations)
    for rule, share in narrowest_first(rules, operations):
        if _is_good(step.of(with_rule(step.func, rule))):
            return rule, share
    return None, None


def _operations(step: StepOf) -> tuple[Operation, ...]:
    """Returns the forward pass of a step's function; empty if `explain` fails."""
    pure = step.func if step.pure is None else step.pure(step.func)
    try:
        found = explain(pure)(*step.args, **step.kwargs).operations
    # The user's code may raise anything.
    except Exception:
        return ()
    return tuple(o for o in found if o.phase == "forward")


def is_finite_in_bfloat16(step: StepOf) -> bool:
    """Returns whether a float16 step of an autocast function is finite in bfloat16."""
    made = settings_of(step.func)
    if made is None or made.dtype != np.float16:
        return False
    return _is_good(step.of(with_dtype(step.func, np.dtype(jnp.bfloat16))))


def precision_advice(step: StepOf, culprits: Sequence[Culprit]) -> str:
    """Returns the advice if no rule of autocast can be tried, or none helps."""
    first = culprits[0] if culprits else None
    where = f" at {first.line}" if first is not None and first.line else ""
    made = settings_of(step.func)
    half = made.dtype if made is not None else None
    if made is None and step.options.use_mixed_precision:
        half = _dtype(step.options.policy)
        if _is_good(step.cast_by(autocast(step.func, half))):
            return (
                f"`mpx.autocast(loss, jnp.{half.name})` computes it without that: it "
                "uses float32 where half precision is not enough. Manually: "
                f"`mpx.force_full_precision` around the operation{where}."
            )
    if half == np.float16:
        wide = jnp.bfloat16
        inner, _ = unwrapped(step.func)
        if _is_good(step.cast_by(autocast(inner, wide))):
            return (
                "In bfloat16, whose range is that of float32, the step is finite: "
                "`mpx.autocast(loss)`."
            )
    return f"Compute the operation{where} in float32: `mpx.force_full_precision`."


def _dtype(policy: Policy | str | None) -> np.dtype:
    if isinstance(policy, str):
        policy = get_policy(policy)
    given = half_precision_datatype() if policy is None else policy.compute_dtype
    return np.dtype(given)


def _is_good(step: StepOf) -> bool:
    """Returns whether a variant of a step runs and is finite."""
    try:
        return not step.replay().bad_places()
    # A change of precision may break the user's code in any way.
    except Exception:
        return False
