"""`mpx.expect`: claims about a compiled step, for the tests of a training program.

Nothing runs. Two states of a program are read: matmuls (`products`) as JAX lowered
them, so that a test on a laptop is valid for an accelerator; memory, collectives, calls
and donation as the compiler of the platform made them.

Sharp edges: a low-precision matmul of dequantized operands has their dtype, until a
compiler that knows the pattern makes a call of it (`product_calls`). A loop of unknown
iterations counts once, and every branch of a conditional counts. A compiler may do a
half-precision sum between devices in float32, as the CPU's does.
"""

import dataclasses
import fnmatch
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from ..._base.dtypes import float_dtype
from ..._base.errors import describe, listing, read_texts
from ..._base.typing import DTypeLike
from .._counter import COLLECTIVES, Instruction
from ._operations import (
    Operation,
    Program,
    as_program,
    collectives,
    compiled_products,
    custom_calls,
    host_transfers,
    largest_results,
    products,
)

# --- Checks: one for each claim, which returns None or what violates it ---------------

_LISTED = 12


@dataclasses.dataclass(frozen=True)
class Violation:
    """A claim that is not met.

    Attributes:
        claim: The argument of `mpx.expect` that made it.
        found: What was expected and what came.
        operations: The violating operations of a program, as `mpx.expect` finds them,
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
    """Checks the bytes of temporaries, of arguments, or the peak."""
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
    """Checks the share of the FLOPs whose operands have one of the dtypes."""
    every = [x for x in products(program.lowered_module) if not except_in(x)]
    if not every:
        return Violation("products", "the program contains no matmul.")
    wrong = [x for x in every if not dtypes.issuperset(x.dtypes)]
    total = sum(x.flops for x in every)
    bad = sum(x.flops for x in wrong)
    # Matmuls of empty arrays have no FLOPs, but may have the wrong dtype.
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
    """Checks that the compiler computes each matmul by a call of a given pattern."""
    every = [x for x in compiled_products(program.compiled_module) if not except_in(x)]
    if not every:
        return Violation("product_calls", "the compiled program contains no matmul.")
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
    """Checks that collectives of more than one number have the allowed dtypes."""
    # The compiler joins the collectives of several arrays; each array is checked.
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
    """Checks that each pattern is called at least once."""
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
    """Checks that no pattern is called."""
    calls = custom_calls(program.compiled_module)
    wrong = [x for x in calls if _matches(x.kind, patterns)]
    found = f"no call of {_either(patterns)} expected; got"
    return _unless_empty("forbidden_calls", found, wrong)


def check_host_callbacks(program: Program) -> Violation | None:
    """Checks that nothing calls the host's Python."""
    wrong = host_transfers(program.compiled_module)
    return _unless_empty("host_callbacks", "none expected; got", wrong)


def check_donation(program: Program) -> Violation | None:
    """Checks that each donated argument's buffer is used for a result."""
    leaves = jax.tree.leaves(program.arguments)
    donated = [i for i, leaf in enumerate(leaves) if leaf.donated]
    if not donated:
        found = "no argument is donated. Pass `donate_argnums=` to `jax.jit`."
        return Violation("donated_are_aliased", found)
    module = program.compiled_module
    parameters, aliased = module.parameters, module.aliased
    expected = f"{len(donated)} donated arrays aliased to results expected"
    if len(parameters) != len(leaves):  # JAX drops unused arguments
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
    """Returns an argument of the program, as an error shows it."""
    return Operation(f"`{parameter.op_name}`", (), parameter.results, "", "")


def _matches(target: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(target, pattern) for pattern in patterns)


def _either(names: Iterable[str]) -> str:
    return " or ".join(sorted(names))


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names)) or "none"


# --- `mpx.expect` ---------------------------------------------------------------------


class ContractError(AssertionError):
    """Raised when a claim of `mpx.expect` or `mpx.expect_close` is not met.

    An `AssertionError`, so that test runners report a failure and not an error, but
    raised explicitly: `python -O` does not disable it.

    Attributes:
        violations: One for each claim that is not met, with `claim` (the argument's
            name), `found` (the number and the limit) and `operations`.
    """

    def __init__(self, violations: Sequence[Violation], count: int) -> None:
        self.violations = tuple(violations)
        lines = [f"{number}. {each}" for number, each in enumerate(violations, 1)]
        head = f"{len(violations)} of {count} claims are not met:"
        super().__init__("\n".join([head, *lines]))


def expect(
    program: object,
    *args: PyTree,
    temporaries_at_most: int | None = None,
    arguments_at_most: int | None = None,
    memory_at_most: int | None = None,
    products: DTypeLike | Sequence[DTypeLike] | None = None,
    products_share: float = 1.0,
    products_except: str | Sequence[str] | Callable[[Any], bool] = (),
    product_calls: str | Sequence[str] | None = None,
    collectives: Mapping[str, DTypeLike | Sequence[DTypeLike]] | None = None,
    collectives_except: str | Sequence[str] | Callable[[Any], bool] = (),
    required_calls: str | Sequence[str] = (),
    forbidden_calls: str | Sequence[str] = (),
    host_callbacks: bool = True,
    donated_are_aliased: bool = False,
) -> None:
    """Raises an error unless a compiled step meets every given claim.

    The step is traced, lowered and, for all claims except `products`, compiled. It does
    not run, so abstract arguments (`jax.ShapeDtypeStruct`) are enough.

    Args:
        program: A jitted function (also of Equinox or Flax NNX), or the result of its
            `lower` or of `lower(...).compile()`.
        *args: The arguments of a jitted function. With keyword arguments, pass
            `step.lower(*args, **kwargs)`.
        temporaries_at_most: Bytes of temporary buffers.
        arguments_at_most: Bytes of all arguments.
        memory_at_most: Bytes of arguments, results and temporaries, less what results
            share with donated arguments: the step's peak memory.
        products: The dtypes that both operands of a matmul or convolution may have.
            Integer matmuls are ignored.
        products_share: The share of the FLOPs that `products` applies to, with loops
            counted by their iterations; all by default.
        products_except: Operations that `products` and `product_calls` ignore: named
            scopes, `"head"` or `"decoder/head"`, or a function of the operation (with
            `kind`, `dtypes`, `op_name`, `source`, `flops`).
        product_calls: Targets of the custom calls by which the compiler must compute
            every matmul: `"__cublas$lt$matmul$f8"`. In these and the following patterns
            `*` and `?` match any text and any character.
        collectives: For an operation (`"all-gather"`, `"all-reduce"`, ...) the dtypes
            that it may communicate; `()` forbids it. Other operations and scalars are
            unrestricted.
        collectives_except: Operations that `collectives` ignores: named scopes, or a
            function of the operation on one array (with `kind`, `dtypes`, `bytes`,
            `op_name`, `source`), `lambda x: x.bytes <= 4096`.
        required_calls: Targets of custom calls that must be present.
        forbidden_calls: Targets of custom calls that must not be present.
        host_callbacks: False forbids calls of the host's Python: `jax.debug.print`,
            `jax.pure_callback`, `jax.experimental.io_callback`.
        donated_are_aliased: True requires donated arguments, and a result in the buffer
            of each of them.

    Raises:
        ContractError: A claim is not met. The message lists each offending operation
            with its dtypes, shapes, scopes and source line, as far as the compiler kept
            them, and the expected number beside the one found.
        TypeError: `program` cannot be compiled, or a claim is of the wrong kind.
        ValueError: There is no claim, or one that cannot be checked: `products` of a
            program that is already compiled.

    A program without any matmul fails `products` and `product_calls`, and one without
    donation fails `donated_are_aliased`.

    Examples:
        >>> import jax, jax.numpy as jnp, mpx
        >>> x = jax.ShapeDtypeStruct((8, 8), jnp.bfloat16)
        >>> mpx.expect(jax.jit(jnp.matmul), x, x, products="bfloat16")
        >>> wide = jax.ShapeDtypeStruct((8, 8), jnp.float32)
        >>> try:
        ...     mpx.expect(jax.jit(jnp.matmul), wide, wide, products="bfloat16")
        ... except mpx.reports.ContractError as error:
        ...     print(error.violations[0].operations[0].dtypes)
        ('float32', 'float32')
    """
    claims = _memory_claims(
        temporaries_at_most=temporaries_at_most,
        arguments_at_most=arguments_at_most,
        memory_at_most=memory_at_most,
    )
    except_in = _except_in(products_except, "products_except")
    share = _share(products_share)
    if products is not None:
        dtypes = _names(products, "products")
        claims.append(lambda p: check_products(p, dtypes, share, except_in))
    if product_calls is not None:
        calls = _patterns(product_calls, "product_calls")
        claims.append(lambda p: check_product_calls(p, calls, except_in))
    if collectives is not None:
        allowed = _allowed(collectives)
        leaves_out = _except_in(collectives_except, "collectives_except")
        claims.append(lambda p: check_collectives(p, allowed, leaves_out))
    if required_calls:
        required = _patterns(required_calls, "required_calls")
        claims.append(lambda p: check_required_calls(p, required))
    if forbidden_calls:
        forbidden = _patterns(forbidden_calls, "forbidden_calls")
        claims.append(lambda p: check_forbidden_calls(p, forbidden))
    if not host_callbacks:
        claims.append(check_host_callbacks)
    if donated_are_aliased:
        claims.append(check_donation)
    _raise_unless_all_hold(claims, program, args)


Claim = Callable[[Program], Violation | None]


def _raise_unless_all_hold(
    claims: Sequence[Claim], program: object, args: tuple[PyTree, ...]
) -> None:
    if not claims:
        raise ValueError(
            "`mpx.expect` needs at least one claim; got none. Pass one, for example "
            '`products="bfloat16"` or `host_callbacks=False`.'
        )
    found = as_program(program, args)
    violations = [broken for claim in claims if (broken := claim(found)) is not None]
    if violations:
        raise ContractError(violations, len(claims))


def _memory_claims(**limits: int | None) -> list[Claim]:
    def claim(name: str, limit: int) -> Claim:
        return lambda program: check_memory(name, program, limit)

    for name, limit in limits.items():
        is_whole = isinstance(limit, int) and not isinstance(limit, bool)
        if limit is not None and (not is_whole or limit < 0):
            raise TypeError(
                f"`{name}` of `mpx.expect` must be a number of bytes, an int; got "
                f"{describe(limit)}."
            )
    return [claim(name, x) for name, x in limits.items() if x is not None]


def _share(share: object) -> float:
    if not isinstance(share, int | float) or not 0 < share <= 1:
        raise ValueError(
            "`products_share` of `mpx.expect` must be a share of the FLOPs, above 0 "
            f"and at most 1; got {describe(share)}."
        )
    return share


def _except_in(value: object, name: str) -> Callable[[Operation], bool]:
    """Returns a predicate of operations that a claim ignores: by scope, or as given."""
    if callable(value):
        return lambda operation: bool(value(operation))
    scopes = _patterns(value, name)
    return lambda operation: any(operation.is_within(scope) for scope in scopes)


def _patterns(value: object, name: str) -> tuple[str, ...]:
    must = f"`{name}` of `mpx.expect` must be a string, or a list or tuple of strings"
    return read_texts(value, must)


def _names(dtypes: object, name: str) -> frozenset[str]:
    """Returns the names of one or several dtypes."""
    several = isinstance(dtypes, list | tuple | set | frozenset)
    return frozenset(_name(x, name) for x in (dtypes if several else (dtypes,)))


def _name(dtype: Any, name: str) -> str:
    try:
        return float_dtype(dtype, f"`{name}` of `mpx.expect`").name
    except TypeError:  # it exists, but floats are not cast to it
        return jnp.dtype(dtype).name


def _allowed(collectives: object) -> dict[str, frozenset[str]]:
    if not isinstance(collectives, Mapping):
        raise TypeError(
            "`collectives` of `mpx.expect` must map operations to dtypes, as in "
            f'`{{"all-gather": "bfloat16"}}`; got {describe(collectives)}.'
        )
    unknown = [kind for kind in collectives if kind not in COLLECTIVES]
    if unknown:
        raise ValueError(
            f"`collectives` of `mpx.expect` must be of {listing(COLLECTIVES)}; got "
            f"{listing(unknown)}."
        )
    return {kind: _names(x, "collectives") for kind, x in collectives.items()}
