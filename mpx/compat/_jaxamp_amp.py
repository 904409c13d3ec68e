"""jaxamp's casting of operations by a policy, see `mpx.compat.jaxamp`.

A policy is a dictionary. Its keys are primitives (`jax.lax.dot_general_p`) and names of
scopes (`jax.named_scope`), its values are functions that cast the operands of one
operation. For each operation the outermost scope that stands in the policy counts, then
the primitive, then the key `"amp_default"`.

Programs within the program (jit, scan, cond, remat, custom rules) are gone into, unless
the policy keeps them as they are: `{jax.lax.scan_p: use_original_precision}`. What only
moves data, and casts that the program asks for, run in whatever precision they get.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core
from jaxtyping import PyTree

from .._autocast import autocast
from .._dtypes import float_dtype, is_half
from .._errors import describe
from .._program import PrimitiveClass, aval_of, properties
from .._rules import Candidate, Precision, Rule, Rules
from .._tree import is_float_leaf
from .._typing import AnyArray, DTypeLike

PolicyFunction = Callable[..., tuple[Sequence[Any], Mapping[str, Any]]]


def use_original_precision(
    compute_dtype: object,
    original_dtypes: Sequence[Any],
    *invars: object,
    **bind_params: object,
) -> tuple[list[Any], dict[str, Any]]:
    """Casts operands to the dtypes of the original program, as a policy function."""
    cast = [_cast(x, dtype) for x, dtype in zip(invars, original_dtypes, strict=True)]
    return cast, bind_params


def use_compute_precision(
    compute_dtype: Any,
    original_dtypes: Sequence[Any],
    *invars: object,
    **bind_params: object,
) -> tuple[list[Any], dict[str, Any]]:
    """Casts operands to `compute_dtype`, as a policy function.

    It casts float operands and parameters, and sets `preferred_element_type` if all
    operands are floats. Integers, keys and complex numbers are unchanged; jaxamp makes
    complex numbers real.
    """
    params = {name: _cast(value, compute_dtype) for name, value in bind_params.items()}
    if "preferred_element_type" in params and all(map(is_float_leaf, invars)):
        params["preferred_element_type"] = np.dtype(compute_dtype)
    return [_cast(x, compute_dtype) for x in invars], params


def _use_float32(_: object, *args: Any, **params: object) -> Any:
    return use_compute_precision(jnp.float32, *args, **params)


def _cast(value: PyTree, dtype: DTypeLike) -> PyTree:
    if not is_float_leaf(value) or not jnp.issubdtype(dtype, jnp.floating):
        return value
    return value if value.dtype == dtype else lax.convert_element_type(value, dtype)


_LOW = (lax.add_p, lax.sub_p, lax.dot_general_p, lax.conv_general_dilated_p)
_HIGH = (lax.exp_p, lax.log_p, lax.mul_p, lax.div_p)

default_amp_policy: dict[Any, PolicyFunction] = {
    **dict.fromkeys(_LOW, use_compute_precision),
    "amp_default": use_original_precision,
    "amp_stop": use_original_precision,
    **dict.fromkeys(_HIGH, _use_float32),
}


def amp_stop(f: Callable[..., PyTree] | None = None) -> Any:
    """Switches the default policy's casts off, for a region or a function.

    Args:
        f: The function; None returns a context manager.

    Returns:
        The function, or the context manager.

    Examples:
        >>> import jax, jax.numpy as jnp, mpx.compat.jaxamp as jaxamp
        >>> def f(x):
        ...     with jaxamp.amp_stop():
        ...         return x @ x
        >>> "f16" in str(jax.make_jaxpr(jaxamp.amp(f))(jnp.ones((2, 2))))
        False
    """
    scope = jax.named_scope("amp_stop")
    return scope if f is None else scope(f)


def amp(
    sentinal: Callable[..., PyTree] | None = None,
    *,
    compute_dtype: Any = jnp.float16,
    amp_policy: Mapping[Any, PolicyFunction] = default_amp_policy,
) -> Callable[..., PyTree]:
    """Wraps a function to run in mixed precision, operation by operation, by a policy.

    Args:
        sentinal: The function, of any PyTrees; None returns a decorator. (The name is
            jaxamp's.)
        compute_dtype: The floating dtype that is passed to policy functions.
        amp_policy: Policy functions by primitive or by name of a scope. Each is called
            as `f(compute_dtype, original_dtypes, *invars, **bind_params)` and returns
            the operands and the parameters to use.

    Returns:
        A function of the same arguments, whose results keep their dtypes.

    Raises:
        TypeError: The function is not callable, `compute_dtype` is not floating, or the
            policy is not a mapping from primitives and strings to functions.
        ValueError: The policy casts the operands of an equation that contains a
            program.

    Examples:
        >>> import jax, jax.numpy as jnp, mpx.compat.jaxamp as jaxamp
        >>> product = jaxamp.amp(jax.jit(jnp.dot))
        >>> jax.make_jaxpr(product)(jnp.ones((2, 2)), jnp.ones((2, 2))).out_avals
        [ShapedArray(float32[2,2])]
    """
    call = "`mpx.compat.jaxamp.amp`"
    dtype = float_dtype(compute_dtype, f"`compute_dtype` of {call}")
    _refuse_policy(amp_policy, call)
    if sentinal is None:
        return functools.partial(amp, compute_dtype=dtype, amp_policy=amp_policy)
    if not callable(sentinal):
        raise TypeError(f"{call} needs a function; got {describe(sentinal)}.")

    # Policy functions get the dtype that was given; autocast itself wants one of two.
    half = dtype if is_half(dtype) else np.dtype(jnp.float16)
    return autocast(sentinal, half, rules=_rules(amp_policy, dtype))


def _rules(policy: Mapping[Any, PolicyFunction], dtype: object) -> Rules:
    """One rule for all operations, and those that leave whole programs alone."""

    def rewrite(
        candidate: Candidate, operands: list[AnyArray]
    ) -> tuple[Sequence[AnyArray], dict[str, Any]]:
        equation = candidate.equation
        keys = (*candidate.scopes, equation.primitive, "amp_default")
        key = next((key for key in keys if key in policy), None)
        function = use_original_precision if key is None else policy[key]
        original = [aval_of(atom).dtype for atom in equation.invars]
        cast, params = function(dtype, original, *operands, **equation.params)
        return cast, dict(params)

    whole = tuple(
        key.name
        for key, function in policy.items()
        if _holds_program(key) and function is use_original_precision
    )
    left_alone = (Rule(Precision.DECLARED, primitive=whole),) if whole else ()
    return Rules(*left_alone, Rule(rewrite, primitive="*"))


def _holds_program(key: Any) -> bool:
    is_scope = isinstance(key, str)
    return not is_scope and properties(key.name).kind is PrimitiveClass.RECURSE


def _refuse_policy(policy: object, call: str) -> None:
    if not isinstance(policy, Mapping):
        raise TypeError(
            f"`amp_policy` of {call} must be a dictionary; got {describe(policy)}."
        )
    for key, function in policy.items():
        is_key = isinstance(key, str | core.Primitive)
        if not is_key or not callable(function):
            raise TypeError(
                f"`amp_policy` of {call} must map primitives (`jax.lax.add_p`) and "
                f"names of scopes to policy functions; got {key!r}: {function!r}."
            )
        if _holds_program(key) and function is not use_original_precision:
            raise ValueError(
                f"`amp_policy` of {call} must not cast the operands of `{key}`: it "
                "contains a program with fixed dtypes, which `amp` transforms. Omit "
                "it, or use `use_original_precision`."
            )
