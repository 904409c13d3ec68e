"""One function for each claim: what of a program breaks it, or None."""

import dataclasses
import fnmatch
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax

from .._hlo_text import Instruction
from ._operations import (
    Operation,
    collectives,
    compiled_products,
    custom_calls,
    host_transfers,
    largest_results,
    products,
)
from ._program import Program

_LISTED = 12


@dataclasses.dataclass(frozen=True)
class Violation:
    """A claim that does not hold.

    Attributes:
        claim: The argument of `mpx.expect` that made it.
        found: What was expected and what came.
        operations: What breaks it: operations of a program, as `mpx.expect` finds them,
            or layers that are too far apart, each a `mpx.reports.Closeness`.
    """

    claim: str
    found: str
    operations: tuple[Any, ...] = ()

    def __str__(self) -> str:
        lines = [f"`{self.claim}`: {self.found}"]
        lines += [f"     {operation}" for operation in self.operations[:_LISTED]]
        if len(self.operations) > _LISTED:
            lines.append(f"     and {len(self.operations) - _LISTED} more")
        return "\n".join(lines)


def check_memory(claim: str, program: Program, limit: int) -> Violation | None:
    """The bytes of temporaries, of arguments, or of all that is held at once."""
    bytes_of = program.bytes_of[claim]
    if bytes_of <= limit:
        return None
    found = f"at most {limit:,} bytes expected; got {bytes_of:,}."
    if claim == "arguments_at_most":
        leaves = [_argument(x) for x in program.compiled_module.parameters.values()]
        leaves.sort(key=lambda x: sum(a.bits for a in x.results), reverse=True)
        return Violation(claim, f"{found} The largest:", tuple(leaves[:5]))
    largest = tuple(largest_results(program.compiled_module, 5))
    return Violation(claim, f"{found} The largest arrays:", largest)


def check_products(
    program: Program,
    dtypes: frozenset[str],
    share: float,
    except_in: Callable[[Operation], bool],
) -> Violation | None:
    """The share of the FLOPs whose operands have one of the dtypes."""
    every = [x for x in products(program.lowered_module) if not except_in(x)]
    if not every:
        return Violation("products", "the program contains no matmul.")
    wrong = [x for x in every if not dtypes.issuperset(x.dtypes)]
    total = sum(x.flops for x in every)
    bad = sum(x.flops for x in wrong)
    # A product of empty arrays has no share, and is right or wrong all the same.
    got = 1 - bad / total if total else float(not wrong)
    if (not wrong) if share == 1 else got >= share:
        return None
    wrong.sort(key=lambda x: x.flops, reverse=True)
    return Violation(
        "products",
        f"{share:.2%} of the FLOPs with operands of {_either(dtypes)} expected; got "
        f"{got:.2%}, {total - bad:,} of {total:,}. The others:",
        tuple(wrong),
    )


def check_product_calls(
    program: Program, patterns: Sequence[str], except_in: Callable[[Operation], bool]
) -> Violation | None:
    """The compiler computes each product by a call of one of these."""
    every = [x for x in compiled_products(program.compiled_module) if not except_in(x)]
    if not every:
        found = "the compiled program contains no matmul."
        return Violation("product_calls", found)
    wrong = [x for x in every if not _matches(x.kind, patterns)]
    return _unless_empty(
        "product_calls",
        f"every matmul as a call of {_either(patterns)} expected; {len(wrong)} of "
        f"{len(every)} are not:",
        wrong,
    )


def check_collectives(
    program: Program,
    allowed: Mapping[str, frozenset[str]],
    except_in: Callable[[Operation], bool],
) -> Violation | None:
    """Collectives of more than one number carry only what is allowed."""
    # The compiler joins those of several arrays to one; each array is looked at.
    wrong = [
        one
        for x in collectives(program.compiled_module)
        for one in (dataclasses.replace(x, operands=(array,)) for array in x.operands)
        if x.kind in allowed
        and not allowed[x.kind].issuperset(one.dtypes)
        and not except_in(one)
    ]
    rules = "; ".join(
        f"{kind} of {_either(dtypes) if dtypes else 'nothing'}"
        for kind, dtypes in allowed.items()
    )
    return _unless_empty("collectives", f"only {rules} expected; got", wrong)


def check_required_calls(program: Program, patterns: Sequence[str]) -> Violation | None:
    """Each pattern is called at least once."""
    calls = custom_calls(program.compiled_module)
    missing = [p for p in patterns if not any(_matches(x.kind, [p]) for x in calls)]
    if not missing:
        return None
    return Violation(
        "required_calls",
        f"a call of each of {_listed(patterns)} expected; {_listed(missing)} "
        f"missing. The calls of the program: {_listed({x.kind for x in calls})}.",
    )


def check_forbidden_calls(
    program: Program, patterns: Sequence[str]
) -> Violation | None:
    """No pattern is called."""
    calls = custom_calls(program.compiled_module)
    wrong = [x for x in calls if _matches(x.kind, patterns)]
    found = f"no call of {_either(patterns)} expected; got"
    return _unless_empty("forbidden_calls", found, wrong)


def check_host_callbacks(program: Program) -> Violation | None:
    """Nothing calls the host's Python."""
    wrong = host_transfers(program.compiled_module)
    return _unless_empty("host_callbacks", "none expected; got", wrong)


def check_donation(program: Program) -> Violation | None:
    """The buffers of all donated arguments hold a result."""
    leaves = jax.tree.leaves(program.arguments)
    donated = [i for i, leaf in enumerate(leaves) if leaf.donated]
    if not donated:
        found = "no argument is donated. Pass `donate_argnums=` to `jax.jit`."
        return Violation("donated_are_aliased", found)
    module = program.compiled_module
    parameters, aliased = module.parameters, module.aliased
    expected = f"{len(donated)} donated arrays aliased to results expected"
    if len(parameters) != len(leaves):  # JAX drops arguments that are not used
        if len(aliased) >= len(donated):
            return None
        names = _listed(parameters[i].op_name or f"argument {i}" for i in aliased)
        return Violation(
            "donated_are_aliased",
            f"{expected}; got {len(aliased)}: {names}. Arrays among the arguments that "
            f"the program does not use: {len(leaves) - len(parameters)}.",
        )
    wrong = [_argument(parameters[i]) for i in donated if i not in aliased]
    return _unless_empty(
        "donated_are_aliased",
        f"{expected}; {len(wrong)} are not (a result needs the shape, the dtype and "
        "the sharding of the argument):",
        wrong,
    )


def _unless_empty(
    claim: str, found: str, wrong: Sequence[Operation]
) -> Violation | None:
    return Violation(claim, found, tuple(wrong)) if wrong else None


def _argument(parameter: Instruction) -> Operation:
    """An argument of the program, as an error shows it."""
    return Operation(f"`{parameter.op_name}`", (), parameter.results, "", "")


def _matches(target: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(target, pattern) for pattern in patterns)


def _either(names: Iterable[str]) -> str:
    return " or ".join(sorted(names))


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names)) or "none"
