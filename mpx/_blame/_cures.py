"""Which rules of autocast may cure a step, those of the fewest FLOPs first."""

from collections.abc import Sequence
from typing import Any

from .._inspect import Operation
from .._program import PRIMITIVES, properties
from .._rules import Precision, Rule
from ._report import AtLine, Culprit

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
