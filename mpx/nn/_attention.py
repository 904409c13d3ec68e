"""Attention as one operation: its derivatives, its batches, its kernel.

There are two forms, and which one a call has is decided when it is traced:

* Where cuDNN's kernel may be used, forward and backward pass each choose at lowering
  (`jax.lax.platform_dependent`): the kernel for CUDA, two products elsewhere. It is a
  `jax.custom_vjp`, so `jax.jvp` of it raises. Derivatives of its derivative are those
  of the products.
* Else two products, with all derivatives.

`vmap` puts the batches together, so that there is one call of the form that the kernel
takes; and autocast finds this call in a program (`mpx._autocast._fused`), whatever was
mapped, and can make it again in another precision.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, PyTree

from .._ambient_record import ambient
from .._fused_operation import FusedOperation, fused_call, fused_operation
from .._quantize import Target
from .._typing import AnyArray
from ._attention_kernel import (
    Kernel,
    differentiable,
    find_kernel,
    kernel_target,
    with_differentiable,
)
from ._attention_operands import AttentionOptions, Operands, folded, unfolded
from ._attention_products import attend_by_products, decomposed
from ._attention_sharding import explicit_shardings, no_kernel_on, on_all_axes

_CALL = "`mpx.nn.dot_product_attention`"


def attend(options: AttentionOptions, x: Operands) -> tuple[Array, ...]:
    """Attention.

    Args:
        options: What it is told.
        x: Its operands, query, key and value in one dtype.

    Returns:
        The result in the shape and dtype of the query; with `with_residual` also the
        logarithms of the rows' sums, float32, of shape (batch, heads, query sequence).

    Raises:
        ValueError: The kernel was asked for, and there is none.
    """
    shardings = explicit_shardings(options, x)
    if shardings is None:
        return _attend(options, on_all_axes(x))
    # Each device has rows of the batch, or heads, and needs no other's: the compiler
    # sees that, and JAX's types do not.
    why_not = no_kernel_on(x)
    options = dataclasses.replace(options, without_kernel=why_not or "")
    one = functools.partial(_attend, options)
    spread: Callable[..., PyTree] = jax.sharding.auto_axes(one, out_sharding=shardings)
    return spread(x)


def _attend(options: AttentionOptions, x: Operands) -> tuple[Array, ...]:
    kernel = find_kernel(options, x)
    if isinstance(kernel, str) and options.implementation == "cudnn":
        # Under autocast it is asked again, in the precision that is chosen.
        if not ambient().is_tracing:
            raise ValueError(
                f'{_CALL} was told `implementation="cudnn"`, and cannot use cuDNN\'s '
                f"kernel: {kernel}. Leave it out to use the kernel only where it can "
                "be used."
            )
    if isinstance(kernel, str):
        return _forward(options, kernel)(x)
    with _explaining_forward_mode(), fused_call(_Attention(options, x.names)):
        return _with_kernel(options, kernel)(x)


@contextlib.contextmanager
def _explaining_forward_mode() -> Iterator[None]:
    try:
        yield
    except TypeError as error:
        if "forward-mode" not in str(error):
            raise
        raise TypeError(
            f"{_CALL} has no forward-mode derivative (`jax.jvp`, `jax.jacfwd`) where "
            "cuDNN's kernel may be used, which has none. Say "
            '`implementation="xla"`, or use `jax.grad` and its relatives.'
        ) from error


@dataclasses.dataclass(frozen=True)
class _Attention(FusedOperation):
    """What autocast knows of attention."""

    options: AttentionOptions
    names: tuple[str, ...]

    name = "dot_product_attention"
    factors = 3

    @property
    def text(self) -> str:
        return f"{self.options},{','.join(self.names)}"

    @property
    def platform(self) -> str | None:
        target = kernel_target(self.options.target)
        return None if target is None else target.platform

    @property
    def may_decompose(self) -> bool:
        return self.options.implementation != "cudnn"

    def bind(self, arrays: list[AnyArray], target: Target | None) -> tuple[Array, ...]:
        options = self._options(target)
        return attend(options, self._operands(arrays))

    def decompose(self, arrays: list[AnyArray]) -> tuple[Array, ...]:
        return decomposed(self.options, self._operands(arrays))

    def path(self, arrays: list[AnyArray], target: Target | None) -> str:
        options = self._options(target)
        kernel = find_kernel(options, self._operands(arrays))
        if isinstance(kernel, str):
            return f"two products: {kernel}"
        known = kernel_target(options.target)
        if known is None and options.implementation is None:
            return "one kernel of cuDNN on CUDA, two products elsewhere"
        return f"one kernel of cuDNN on {'CUDA' if known is None else known.name}"

    def multiplications(self, avals: list[Any]) -> int:
        batch, heads, length, keys = Operands(*avals).shape
        return 2 * batch * heads * length * keys * avals[0].shape[-1]

    def _options(self, target: Target | None) -> AttentionOptions:
        known = self.options.target
        return dataclasses.replace(self.options, target=target or known)

    def _operands(self, arrays: list[AnyArray]) -> Operands:
        return Operands(**dict(zip(self.names, arrays, strict=True)))


# --- The forward pass -----------------------------------------------------------------


def _forward(
    options: AttentionOptions, kernel: Kernel | str
) -> Callable[[Operands], tuple[Array, ...]]:
    """The forward pass, with the derivatives of the products.

    Args:
        options: What attention is told.
        kernel: The kernel for the operands, if there is one.
    """
    by_products = functools.partial(attend_by_products, options)

    @jax.custom_batching.custom_vmap
    def run(x: Operands) -> tuple[Array, ...]:
        if isinstance(kernel, str):
            return by_products(x)
        fast = kernel.forward_with_rows if options.with_residual else kernel.forward
        return _on_cuda(options, fast, by_products, x)

    @run.def_vmap
    def rule(size: int, batched: list[Operands], x: Operands) -> PyTree:
        whole = folded(size, batched[0], x, apart=False)
        results = _forward(options, find_kernel(options, whole))(whole)
        results = tuple(unfolded(size, result) for result in results)
        return results, (True,) * len(results)

    def operation(x: Operands) -> tuple[Array, ...]:
        with fused_operation(_Attention(options, x.names)):
            return run(x)

    differentiated = _differentiated(operation, by_products)

    def forward(x: Operands) -> tuple[Array, ...]:
        with fused_call(_Attention(options, x.names)):
            return differentiated(x)

    return forward


def _on_cuda(
    options: AttentionOptions,
    fast: Callable[..., PyTree],
    slow: Callable[..., PyTree],
    *operands: PyTree,
) -> PyTree:
    """Chooses at lowering, unless the kernel was asked for."""
    if options.implementation == "cudnn":
        return fast(*operands)
    return jax.lax.platform_dependent(*operands, cuda=fast, default=slow)


def _differentiated(
    function: Callable[..., PyTree], reference: Callable[..., PyTree]
) -> Callable[..., PyTree]:
    """A function with the derivatives of another one, which gives the same."""

    @jax.custom_jvp
    def differentiated(*args: PyTree) -> PyTree:
        return function(*args)

    def rule(primals: PyTree, tangents: PyTree) -> PyTree:
        leaves, tree = jax.tree.flatten(primals)
        dots = jax.tree.leaves(tangents)
        active = [i for i, dot in enumerate(dots) if not _is_zero(dot)]

        def of_active(*new: PyTree) -> PyTree:
            full = list(leaves)
            for i, leaf in zip(active, new, strict=True):
                full[i] = leaf
            return reference(*jax.tree.unflatten(tree, full))

        inputs, given = ([xs[i] for i in active] for xs in (leaves, dots))
        return jax.jvp(of_active, inputs, given)

    differentiated.defjvp(rule, symbolic_zeros=True)
    return differentiated


def _is_zero(dot: Any) -> bool:
    return isinstance(dot, SymbolicZero) or dot.dtype == jax.dtypes.float0


# --- With the kernel's backward pass --------------------------------------------------


def _with_kernel(
    options: AttentionOptions, kernel: Kernel
) -> Callable[[Operands], tuple[Array, ...]]:
    """Attention whose backward pass is the kernel's."""
    keeping = dataclasses.replace(options, with_residual=True)

    @jax.custom_vjp
    def function(x: Operands) -> tuple[Array, ...]:
        return _forward(options, kernel)(x)

    def forward(x: Operands) -> PyTree:
        out, rows = _forward(keeping, kernel)(x)
        results = (out, rows) if options.with_residual else (out,)
        return results, (x, out, rows)

    def backward(residuals: PyTree, cotangents: PyTree) -> tuple[Operands]:
        x, out, rows = residuals
        with fused_call(_Attention(options, x.names)):
            found = _backward(keeping, kernel)(x, out, rows, cotangents[0])
        return (with_differentiable(Operands(None, None, None), found),)

    function.defvjp(forward, backward)
    return function


def _backward(
    options: AttentionOptions, kernel: Kernel | str
) -> Callable[..., tuple[Array, ...]]:
    """The backward pass, a function of operands, results and cotangent."""

    def by_products(
        x: Operands, out: Array, rows: Array, cotangent: Array
    ) -> tuple[Array, ...]:
        alone = dataclasses.replace(options, with_residual=False)

        def of(*arrays: Array) -> Array:
            return attend_by_products(alone, with_differentiable(x, arrays))[0]

        return jax.vjp(of, *differentiable(x))[1](cotangent)

    @jax.custom_batching.custom_vmap
    def run(
        x: Operands, out: Array, rows: Array, cotangent: Array
    ) -> tuple[Array, ...]:
        arrays = x, out, rows, cotangent
        if isinstance(kernel, Kernel):
            return _on_cuda(options, kernel.backward, by_products, *arrays)
        return by_products(*arrays)

    @run.def_vmap
    def rule(size: int, batched: Any, x: Operands, *rest: Array) -> PyTree:
        whole = folded(size, batched[0], x, apart=True)
        flat = []
        for array, has_axis in zip(rest, batched[1:], strict=True):
            array = array if has_axis else array[None]
            array = jnp.broadcast_to(array, (size, *array.shape[1:]))
            flat.append(array.reshape(-1, *array.shape[2:]))
        found = _backward(options, find_kernel(options, whole))(whole, *flat)
        rows = [None] * 3
        if x.bias is not None:
            rows.append(x.bias.shape[1 if batched[0].bias else 0])
        results = tuple(
            unfolded(size, array, n) for array, n in zip(found, rows, strict=True)
        )
        return results, (True,) * len(results)

    return _differentiated(run, by_products)
