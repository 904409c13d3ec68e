"""Why a step went bad, found by running it again in other ways."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from ..._autocast import autocast, recomputing, with_dtype, with_rule
from ..._base.dtypes import half_precision_datatype
from ..._loss_scaling import AbstractLossScaling, StaticLossScaling
from ..._program import PRIMITIVES, divide, properties
from ..._settings import Policy, Precision, Rule, get_policy, settings_of, unwrapped
from ..._step import Options, gradient_function
from .._inspect import Operation, explain
from ._blame_report import AtLine, Culprit
from ._replay import Gradient, Replay, replayed

# ----------------------------------------------------------------------------
# Which rules of autocast may cure a step, those of the fewest FLOPs first.

# How many weights are tried of products that may take a value that does not fit.
_WEIGHTS = 4
_ALL = "*"


def candidate_rules(
    culprits: Sequence[Culprit], settings: Any, operations: Sequence[Operation]
) -> list[Rule]:
    """Rules that may cure the first culprit, in no order of width.

    Args:
        culprits: What went bad.
        settings: What the transform that made the function was told.
        operations: Those of the function.
    """
    first = culprits[0] if culprits else None
    every = Rule(Precision.FULL, primitive=_ALL)
    if first is None or first.primitive in ("input", "constant"):
        return [every]
    names = [first.primitive]
    if first.primitive == "convert_element_type":  # a cast, for a product mostly
        names += [n for n, known in PRIMITIVES.items() if known.is_quantizable]
    found: list[Rule] = []
    for place in _places(first, operations):
        for name in names:
            if settings.recipes and properties(name).is_quantizable:
                found.append(Rule(Precision.HALF, primitive=name, **place))
            found.append(Rule(Precision.FULL, primitive=name, **place))
    if first.scope:
        found.append(Rule(Precision.FULL, scope=first.scope))
    # What devices send is half precision, and may cancel long before it shows.
    names = sorted({o.primitive for o in operations if properties(o.primitive).sums})
    if names:
        sums = names[0] if len(names) == 1 else tuple(names)
        found.append(Rule(Precision.FULL, primitive=sums))
    return [*found, every]


def is_for_all(rule: Rule) -> bool:
    """Whether a rule of `candidate_rules` holds for the whole function."""
    return rule.primitive == _ALL


def _places(culprit: Culprit, operations: Sequence[Operation]) -> list[dict[str, Any]]:
    """What sets operations apart: scope, weight or line; then those everywhere."""
    scope = {"scope": culprit.scope} if culprit.scope else {}
    names = culprit.parameters[:1] or _readers(culprit, operations)
    weights = [{"parameter": name} for name in names]
    both = [{**scope, **weight} for weight in weights]
    places: list[dict[str, Any]] = [scope, *weights, *both]
    line = culprit.line or culprit.made_at
    # A line moves with the code: it is only for what has no other name.
    at_line = [{"when": AtLine(line)}] if line and not any(places) else []
    return [*filter(None, places), {}, *at_line]


def _readers(culprit: Culprit, operations: Sequence[Operation]) -> list[str]:
    """The weights of the products that may take what a cast made, by its type."""
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
    """Rules in the order of their shares of FLOPs, with the shares.

    A rule for one place that holds for no operation is left out. Where nothing is known
    of a rule it counts as one for all.

    Args:
        rules: The rules; of those of one share the first stays first.
        operations: Those of the function.
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
    """Whether a rule of `candidate_rules` holds for an operation of a report."""
    if isinstance(rule.when, AtLine) and not operation.source.endswith(rule.when.line):
        return False
    name = operation.primitive
    # A rule sees the product that blocks with scales were multiplied for.
    is_of_blocks = operation.is_low and name.startswith("scaled_matmul")
    seen = "dot_general" if is_of_blocks else name
    return rule._holds_at(seen, (operation.scope,), operation.parameters)


# ----------------------------------------------------------------------------

CALL = "`mpx.blame`"


@dataclasses.dataclass(frozen=True)
class StepOf:
    """A step of a user's: what is differentiated, how, and with what.

    Attributes:
        func: The loss function.
        scaling: The loss scaling that the step had.
        argnums: As in `gradient_function`.
        options: The options of the gradient function.
        args: Its arguments.
        kwargs: Those by name.
        count: How many of the arguments are the user's; None for all.
        pure: `pure(func)` is what is differentiated, where it is not `func` itself.
        args_with: `args_with(func)` are the arguments then.
        recomputes: Whether its derivative computes again what is cheap, as that of a
            function of autocast does: without it float32 holds twice the memory.
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
        """The step as a program."""
        func = self.func if self.pure is None else self.pure(self.func)
        func = recomputing(func) if self.recomputes else func

        def make(scaling: AbstractLossScaling | None) -> Gradient:
            return gradient_function(
                CALL, func, scaling, self.argnums, True, self.options
            )

        return replayed(make, self.scaling, self.args, self.kwargs)

    def in_float32(self) -> "StepOf":
        """The step in the precisions that the program declares."""
        step = self.changed(use_mixed_precision=False, policy=None, keep=None)
        return dataclasses.replace(step, recomputes=True)

    def changed(self, **options: Any) -> "StepOf":
        """The step with other options."""
        return dataclasses.replace(
            self, options=dataclasses.replace(self.options, **options)
        )

    def of(self, func: Callable[..., PyTree]) -> "StepOf":
        """The step with another function."""
        args = self.args if self.args_with is None else self.args_with(func)
        return dataclasses.replace(self, func=func, args=args)

    def cast_by(self, func: Callable[..., PyTree]) -> "StepOf":
        """The step with a function that casts itself."""
        step = self.of(func)
        return step.changed(policy=None, keep=None, accumulate_dtype=None)


def loss_scale_of(scaling: AbstractLossScaling | None) -> float:
    """The loss scale of a state; 1 if there is none."""
    return 1.0 if scaling is None else float(scaling.loss_scale)


def is_finite_at_one(step: StepOf, replay: Replay) -> bool:
    """Whether the step is good at a loss scale of 1."""
    one = step.scaling._at_scale(jnp.ones((), jnp.float32))
    if float(one.loss_scale) == 1:  # the same program, with another number
        arrays, _ = divide((one, step.args, step.kwargs))
        return not replay.bits(arrays).any()
    one = step.scaling.with_loss(StaticLossScaling(1.0))
    return not dataclasses.replace(step, scaling=one).replay().bad_places()


def curing_rule(
    step: StepOf, culprits: Sequence[Culprit]
) -> tuple[Rule | None, float | None]:
    """A rule of autocast with which the step is good, and its share of FLOPs.

    Rules are tried from the smallest share on.
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
    """The forward pass of a step's function; nothing where it cannot be looked at."""
    pure = step.func if step.pure is None else step.pure(step.func)
    try:
        found = explain(pure)(*step.args, **step.kwargs).operations
    # Whatever can go wrong in the code of others.
    except Exception:
        return ()
    return tuple(o for o in found if o.phase == "forward")


def is_finite_in_bfloat16(step: StepOf) -> bool:
    """Whether a step of an autocast function in float16 is good in bfloat16."""
    made = settings_of(step.func)
    if made is None or made.dtype != np.float16:
        return False
    return _is_good(step.of(with_dtype(step.func, np.dtype(jnp.bfloat16))))


def precision_advice(step: StepOf, culprits: Sequence[Culprit]) -> str:
    """What to do where no rule of autocast can be tried, or none helps."""
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
    """Whether a way to run a step can be run, and is good."""
    try:
        return not step.replay().bad_places()
    # Whatever a change of precision can break in the code of others.
    except Exception:
        return False
