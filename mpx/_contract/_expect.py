"""`mpx.expect`: claims about a compiled step, for the tests of those who train with it.

Nothing runs. Two states of a program are read: *products* as JAX lowered them, so that
a test on a laptop says what holds on an accelerator; memory, collectives, calls and
donation as the compiler of the platform made them.

Sharp edges: a low-precision product that is written with dequantized operands has their
dtype, until a compiler that knows the pattern makes a call of it (`product_calls`). A
loop whose trips are not known counts once, and of a conditional every branch counts. A
compiler may carry a half-precision sum in float32 between devices, as the CPU's does.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import PyTree

from .._dtypes import float_dtype
from .._errors import describe, listing, read_texts
from .._typing import DTypeLike
from . import _claims
from ._claims import Violation
from ._operations import COLLECTIVES, Operation
from ._program import Program, as_program


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
        claims.append(lambda p: _claims.check_products(p, dtypes, share, except_in))
    if product_calls is not None:
        calls = _patterns(product_calls, "product_calls")
        claims.append(lambda p: _claims.check_product_calls(p, calls, except_in))
    if collectives is not None:
        allowed = _allowed(collectives)
        leaves_out = _except_in(collectives_except, "collectives_except")
        claims.append(lambda p: _claims.check_collectives(p, allowed, leaves_out))
    if required_calls:
        required = _patterns(required_calls, "required_calls")
        claims.append(lambda p: _claims.check_required_calls(p, required))
    if forbidden_calls:
        forbidden = _patterns(forbidden_calls, "forbidden_calls")
        claims.append(lambda p: _claims.check_forbidden_calls(p, forbidden))
    if not host_callbacks:
        claims.append(_claims.check_host_callbacks)
    if donated_are_aliased:
        claims.append(_claims.check_donation)
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
        return lambda program: _claims.check_memory(name, program, limit)

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
    """Whether an operation is left out of a claim, by its scopes or as asked."""
    if callable(value):
        return lambda operation: bool(value(operation))
    scopes = _patterns(value, name)
    return lambda operation: any(operation.is_within(scope) for scope in scopes)


def _patterns(value: object, name: str) -> tuple[str, ...]:
    must = f"`{name}` of `mpx.expect` must be a string, or a list or tuple of strings"
    return read_texts(value, must)


def _names(dtypes: object, name: str) -> frozenset[str]:
    """The names of dtypes: one, or several of them."""
    several = isinstance(dtypes, list | tuple | set | frozenset)
    return frozenset(_name(x, name) for x in (dtypes if several else (dtypes,)))


def _name(dtype: Any, name: str) -> str:
    try:
        return float_dtype(dtype, f"`{name}` of `mpx.expect`").name
    except TypeError:  # it exists, and is no dtype that floats are cast to
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
