"""cuDNN's attention in one kernel, through `jax.nn.dot_product_attention`.

The kernel computes scores, softmax and the weighted sum of values block by block, on
the chip. Saved for backward: its operands, its result and one float32 for each row. JAX
has it for CUDA only, and not for all sizes: `find_kernel` returns it, or why it cannot
be used. It traces JAX's function, so sizes that a newer version accepts are accepted
here.

The kernel's operands differ from those of attention: a mask becomes a bias, and the
kernel's result of a row without a key is undefined. `prepare` makes operands for which
the kernel computes attention; such a row gets a query of zeros, so all its keys have
equal scores. The prepared operands are recomputed for the backward pass instead of
saved.

`jax.vjp` of the kernel returns a pullback whose residuals JAX's authors chose. Here the
two passes are separate, each in a choice of platforms, so the values passed between
them must have the same types on every platform: the operands, the result and one array
of the kernel's own, its rows. All other residuals are found in the program and
recomputed from the operands. If JAX saved more of the kernel's values, `find_kernel`
would return that as a reason.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.extend.core import ClosedJaxpr, JaxprEqn
from jaxtyping import Array, PyTree

from .._base.dtypes import is_half
from .._base.typing import AnyArray, Atom, Program
from .._program import aval_of, divide, is_inexact, sub_jaxprs
from .._quantize import Target, target_from
from ._attention_products import (
    AttentionOptions,
    Operands,
    visibility,
    within_lengths,
)

# The bias of a masked score: far below every score, and far from the end of the range,
# where cuDNN subtracts wrongly. The numbers are those of JAX's own masks.
_LOWEST = {"bfloat16": -(2.0**41), "float16": -(2.0**15)}

_FACTORS = ("query", "key", "value")


class _Native(NamedTuple):
    """The masking that the kernel itself does; the rest is in its bias."""

    is_causal: bool
    left: int | None
    with_lengths: bool
    with_bias: bool


def _native(options: AttentionOptions, x: Operands) -> _Native:
    """Returns the kernel's own masking, in combinations that JAX's own tests have."""
    _, _, length, keys = x.shape
    window = options.window
    is_causal = options.is_causal or (window is not None and window[1] == 0)
    has_mask = x.mask is not None or x.bias is not None
    native_causal = is_causal and length == keys
    is_alone = not has_mask and x.key_lengths is None
    left = window[0] if window is not None and native_causal and is_alone else None
    order_is_native = native_causal and (window is None or left is not None)
    has_order = is_causal or window is not None
    with_bias = has_mask or (has_order and not order_is_native)
    with_lengths = x.key_lengths is not None and not with_bias
    return _Native(native_causal, left, with_lengths, with_bias)


def prepare(options: AttentionOptions, x: Operands) -> Operands:
    """Returns operands for which `call` computes attention."""
    native = _native(options, x)
    if native.with_bias:
        return _with_bias(options, x, native)
    if native.with_lengths:
        return _with_lengths(x)
    return Operands(x.query, x.key, x.value)


def _with_bias(options: AttentionOptions, x: Operands, native: _Native) -> Operands:
    found = visibility(options, x)
    order_is_said = native.is_causal and options.window is None
    if order_is_said and found.given is not None and found.seen is not None:
        allowed = found.given | ~found.seen
    else:
        allowed = None if order_is_said else found.allowed
    query, bias, shape = x.query, x.bias, x.shape[2:]
    if found.seen is not None:
        query = jnp.where(found.seen.transpose(0, 2, 1, 3), query, 0)
    if bias is None:
        return Operands(query, x.key, x.value, mask=_spread(allowed, shape))
    lowest = jnp.asarray(_LOWEST[query.dtype.name], bias.dtype)
    bias = jnp.maximum(bias, lowest).astype(query.dtype)
    if found.seen is not None:
        bias = jnp.where(found.seen, bias, 0)
    if allowed is not None:
        bias = jnp.where(allowed, bias, lowest.astype(bias.dtype))
    return Operands(query, x.key, x.value, bias=_spread(bias, shape))


def _spread(x: Any, shape: tuple[int, int]) -> Array:
    return jnp.broadcast_to(x, (*x.shape[:2], *shape))


def _with_lengths(x: Operands) -> Operands:
    length, keys = x.shape[2:]
    key_lengths = jnp.clip(x.key_lengths, 0, keys)
    is_empty = key_lengths == 0
    queries = x.query_lengths
    return Operands(
        query=jnp.where(is_empty.reshape(-1, 1, 1, 1), 0, x.query),
        key=x.key,
        value=x.value,
        query_lengths=jnp.full_like(key_lengths, length)
        if queries is None
        else jnp.clip(queries, 0, length),
        key_lengths=jnp.where(is_empty, keys, key_lengths),
    )


def call(
    options: AttentionOptions,
    native: _Native,
    implementation: Literal["xla", "cudnn"] | None,
    x: Operands,
) -> Array:
    """Returns JAX's attention of prepared operands."""
    return jax.nn.dot_product_attention(
        x.query,
        x.key,
        x.value,
        bias=x.bias,
        mask=x.mask,
        scale=options.scale,
        is_causal=native.is_causal,
        query_seq_lengths=x.query_lengths,
        key_value_seq_lengths=x.key_lengths,
        local_window_size=None if native.left is None else (native.left, 0),
        implementation=implementation,
    )


@dataclasses.dataclass(frozen=True, eq=False)
class Kernel:
    """The kernel for operands of certain types.

    Attributes:
        options: The options of attention.
        native: The masking that the kernel itself does.
        program: From prepared operands, flat, to the result and the pullback's
            residuals.
        rows: The index of the rows among the residuals.
        structure: How residuals make a pullback.
    """

    options: AttentionOptions
    native: _Native
    program: ClosedJaxpr
    rows: int
    structure: Any

    def forward(self, x: Operands) -> tuple[Array]:
        """Returns the result."""
        out = call(self.options, self.native, "cudnn", prepare(self.options, x))
        return (within_lengths(out, x.query_lengths),)

    def forward_with_rows(self, x: Operands) -> tuple[Array, Array]:
        """Returns the result and the rows' logarithms."""
        operands = jax.tree.leaves(prepare(self.options, x))
        out, *residuals = core.jaxpr_as_fun(self.program)(*operands)
        return within_lengths(out, x.query_lengths), residuals[self.rows]

    def backward(
        self, x: Operands, out: Array, rows: Array, cotangent: Array
    ) -> tuple[Array, ...]:
        """Returns the gradients of the differentiable operands, in their order."""
        if self.native.with_bias and x.names != _FACTORS:
            # Or the compiler would save the bias that the forward pass made of a mask.
            names = [name for name in x.names if name not in _FACTORS]
            parts = jax.lax.optimization_barrier([getattr(x, n) for n in names])
            x = x._replace(**dict(zip(names, parts, strict=True)))

        def prepared(*arrays: Array) -> tuple[PyTree, Operands]:
            ready = prepare(self.options, with_differentiable(x, arrays))
            return differentiable(ready), ready

        arrays = differentiable(x)
        made, pullback, ready = jax.vjp(prepared, *arrays, has_aux=True)
        cotangent = within_lengths(cotangent, x.query_lengths)
        found = self._pullback(ready, out, rows)(cotangent)
        return pullback(found[: len(made)])

    def _pullback(
        self, ready: Operands, out: Array, rows: Array
    ) -> Callable[[Array], PyTree]:
        """Returns the kernel's pullback; recomputes residuals not from the kernel."""
        jaxpr = self.program.jaxpr
        result, *residuals = jaxpr.outvars
        known = jaxpr.replace(
            eqns=_without_kernel(jaxpr)[1],
            invars=[*jaxpr.invars, result, residuals[self.rows]],
            outvars=residuals,
        )
        evaluate = core.jaxpr_as_fun(ClosedJaxpr(known, self.program.consts))
        found = evaluate(*jax.tree.leaves(ready), out, rows)
        return jax.tree.unflatten(self.structure, found)


def differentiable(x: Operands) -> tuple[Array, ...]:
    """Returns query, key, value and, if there is one, bias."""
    arrays = x.query, x.key, x.value, x.bias
    return tuple(array for array in arrays if array is not None)


def with_differentiable(x: Operands, arrays: tuple[AnyArray, ...]) -> Operands:
    """Returns the operands with other arrays as the differentiable ones."""
    names = ("query", "key", "value", "bias")[: len(arrays)]
    return x._replace(**dict(zip(names, arrays, strict=True)))


def find_kernel(options: AttentionOptions, x: Operands) -> Kernel | str:
    """Returns the kernel, or the reason why it cannot be used.

    Args:
        options: The options of attention.
        x: The operands, or their types.
    """
    why_not = _refused(options, x)
    if why_not is not None:
        return why_not
    native = _native(options, x)
    try:
        ready = jax.eval_shape(functools.partial(prepare, options), x)
        traced = _result_and_pullback.trace(call, options, native, ready)
        structure = jax.tree.structure(traced.out_info[1])
        rows = _place_of_rows(traced.jaxpr.jaxpr, x.shape[:3])
        return Kernel(options, native, traced.jaxpr, rows, structure)
    # JAX raises these for sizes, old devices, and an installation without cuDNN.
    except (NotImplementedError, RuntimeError, ValueError) as error:
        return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")


def _refused(options: AttentionOptions, x: Operands) -> str | None:
    """Returns a reason against the kernel that needs no trace, or None."""
    if options.implementation not in (None, "cudnn"):
        return f'implementation="{options.implementation}"'
    if options.without_kernel:
        return options.without_kernel
    if x.keep is not None:
        return "dropout of the kernel is not a function of a key"
    if not is_half(x.query.dtype):
        return f"the kernel needs float16 or bfloat16, not {x.query.dtype}"
    if 0 in (*x.shape, x.query.shape[-1]):
        return "an operand is empty"
    target = kernel_target(options.target)
    if target is None:
        return None
    if target.platform != "cuda":
        return f"{target.name} has no cuDNN"
    if target.capability < (8, 0):
        return f"the kernel needs sm_80 or later, not {target.name}"
    return None


def kernel_target(said: Target | None) -> Target | None:
    """Returns the target device; None if it is known at lowering only.

    If JAX's default device is a GPU, it determines which sizes are accepted. If it is a
    CPU, the program may still be compiled ahead of time for a GPU.
    """
    if said is not None:
        return said
    found = target_from(None)
    return found if found.platform == "cuda" else None


# --- The kernel and its pullback, separately ------------------------------------------


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _result_and_pullback(
    call: Callable[..., Array],
    options: AttentionOptions,
    native: _Native,
    x: Operands,
) -> tuple[PyTree, PyTree]:
    """Returns the kernel's result and its pullback to the floats among its operands.

    Jitted, so that JAX caches the trace for equal arguments.
    """
    floats, form = divide(x, lambda leaf: is_inexact(jax.typeof(leaf)))

    def of_floats(*floats: AnyArray) -> PyTree:
        return call(options, native, "cudnn", form.filled(floats))

    return jax.vjp(of_floats, *floats)


def _place_of_rows(jaxpr: Program, shape: tuple[int, ...]) -> int:
    """Returns the index among the residuals of the one array from the kernel.

    Raises:
        NotImplementedError: The pullback saves other values of the kernel.
    """
    known, _ = _without_kernel(jaxpr)
    out, *residuals = jaxpr.outvars
    own = [v for v in residuals if _is_unknown(known, v) and v is not out]
    if len(set(own)) != 1:
        raise NotImplementedError(
            f"this version of JAX keeps {len(set(own))} arrays of the kernel's own"
        )
    kept = aval_of(own[0])
    if (kept.shape, kept.dtype) != (shape, np.float32):
        raise NotImplementedError(f"this version of JAX keeps {kept} of the kernel")
    return residuals.index(own[0])


def _without_kernel(jaxpr: Program) -> tuple[set[Atom], list[JaxprEqn]]:
    """Returns the variables that do not come from a kernel, and their equations."""
    known, equations = {*jaxpr.constvars, *jaxpr.invars}, []
    for equation in jaxpr.eqns:
        is_known = not any(_is_unknown(known, atom) for atom in equation.invars)
        if is_known and not _holds_kernel(equation):
            known.update(equation.outvars)
            equations.append(equation)
    return known, equations


def _is_unknown(known: set[Atom], atom: Atom) -> bool:
    return not isinstance(atom, core.Literal) and atom not in known


def _holds_kernel(equation: JaxprEqn) -> bool:
    if equation.primitive.name.startswith("dot_product_attention"):
        return True
    programs = sub_jaxprs(equation)
    return any(_holds_kernel(e) for sub in programs for e in sub.jaxpr.eqns)
