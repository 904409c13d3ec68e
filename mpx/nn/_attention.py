"""Attention as one operation: its derivatives, its batches, its kernel.

There are three forms, chosen when a call is traced:

* If cuDNN's kernel may be used, forward and backward pass each choose at lowering
  (`jax.lax.platform_dependent`): the kernel for CUDA, two matmuls elsewhere. It is a
  `jax.custom_vjp`, so `jax.jvp` of it raises. Derivatives of its derivative are those
  of the matmuls.
* Likewise with JAX's kernel for TPUs, which is chosen at once (`_on_tpu`).
* Otherwise two matmuls, with all derivatives.

`vmap` merges the batches, so that there is one call of the form that the kernel
accepts. Autocast finds this call in a program (`mpx._autocast._fused`), also under
`vmap`, and can repeat it in another precision.

Over a mesh of devices the batch and heads may be sharded. On automatic axes JAX's
kernel defines its partitioning. In `jax.shard_map` each device calls it for its part,
and gradients of replicated operands must be summed. On explicit axes the kernel has no
types; the axes are made automatic for it.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.sharding import NamedSharding, PartitionSpec as P
from jaxtyping import Array, PyTree

from .._autocast import FusedOperation, fused_operation
from .._base.jax_compat import as_varying, explaining, varying_axes
from .._base.typing import AnyArray
from .._quantize import Target
from .._settings import ambient
from ._attention_kernel import (
    Kernel,
    differentiable,
    find_kernel,
    kernel_target,
    with_differentiable,
)
from ._attention_products import (
    AttentionOptions,
    Operands,
    attend_by_products,
    decomposed,
    folded,
    unfolded,
)
from ._attention_tpu import attend_on_tpu, why_not_on_tpu

_CALL = "`mpx.nn.dot_product_attention`"
_FORWARD_MODE = (
    (TypeError,),
    ("forward-mode",),
    f"{_CALL} has no forward-mode derivative (`jax.jvp`, `jax.jacfwd`) where a "
    'kernel may be used, which has none. Pass `implementation="xla"`, or use '
    "`jax.grad` and the like.",
)


def attend(options: AttentionOptions, x: Operands) -> tuple[Array, ...]:
    """Computes attention.

    Args:
        options: The options.
        x: The operands, with query, key and value in one dtype.

    Returns:
        The result in the shape and dtype of the query; with `with_residual` also the
        logarithms of the rows' sums, float32, of shape (batch, heads, query sequence).

    Raises:
        ValueError: `implementation="cudnn"`, and the kernel cannot be used.
    """
    shardings = explicit_shardings(options, x)
    if shardings is None:
        return _attend(options, on_all_axes(x))
    # Each device has its own rows of the batch, or heads, and needs no others: the
    # compiler infers that, but JAX's types do not.
    why_not = no_kernel_on(x)
    options = dataclasses.replace(options, without_kernel=why_not or "")
    one = functools.partial(_attend, options)
    spread: Callable[..., PyTree] = jax.sharding.auto_axes(one, out_sharding=shardings)
    return spread(x)


def _attend(options: AttentionOptions, x: Operands) -> tuple[Array, ...]:
    why_not = why_not_on_tpu(options, x)
    if why_not is None:
        with explaining(*_FORWARD_MODE):
            return (_on_tpu(options, x),)
    kernel = find_kernel(options, x)
    is_asked_for = options.implementation not in (None, "xla")
    if isinstance(kernel, str) and is_asked_for:
        # Under autocast the kernel is looked up again, in the chosen precision.
        if not ambient().is_tracing:
            reason = kernel if options.implementation == "cudnn" else why_not
            raise ValueError(
                f'{_CALL} got `implementation="{options.implementation}"`, but the '
                f"kernel cannot be used: {reason}. Omit it to use the kernel only "
                "where possible."
            )
    if isinstance(kernel, str):
        return _forward(options, kernel)(x)
    with (
        explaining(*_FORWARD_MODE),
        fused_operation(_operation(options, x.names), is_call=True),
    ):
        return _with_kernel(options, kernel)(x)


def _operation(options: AttentionOptions, names: tuple[str, ...]) -> FusedOperation:
    """Describes attention with operands of these names to autocast."""
    compiled_for = kernel_target(options.target)

    def towards(target: Target | None) -> AttentionOptions:
        return dataclasses.replace(options, target=target or options.target)

    def operands(arrays: list[AnyArray]) -> Operands:
        return Operands(**dict(zip(names, arrays, strict=True)))

    def path(arrays: list[AnyArray], target: Target | None) -> str:
        why_not = why_not_on_tpu(towards(target), operands(arrays))
        kernel = find_kernel(towards(target), operands(arrays))
        known = kernel_target(towards(target).target)
        if why_not is None:
            return "one Pallas kernel on TPUs"
        if known is not None and known.platform == "tpu":
            return f"two matmuls: {why_not}"
        if isinstance(kernel, str):
            return f"two matmuls: {kernel}"
        if known is None and options.implementation is None:
            return "one cuDNN kernel on CUDA, two matmuls elsewhere"
        return f"one cuDNN kernel on {'CUDA' if known is None else known.name}"

    def multiplications(avals: list[Any]) -> int:
        batch, heads, length, keys = Operands(*avals).shape
        return 2 * batch * heads * length * keys * avals[0].shape[-1]

    return FusedOperation(
        name="dot_product_attention",
        factors=3,
        text=f"{options},{','.join(names)}",
        platform=None if compiled_for is None else compiled_for.platform,
        may_decompose=options.implementation != "cudnn",
        bind=lambda arrays, target: attend(towards(target), operands(arrays)),
        decompose=lambda arrays: decomposed(options, operands(arrays)),
        path=path,
        multiplications=multiplications,
    )


# --- The forward pass -----------------------------------------------------------------


def _forward(
    options: AttentionOptions, kernel: Kernel | str
) -> Callable[[Operands], tuple[Array, ...]]:
    """Returns the forward pass, with the derivatives of the matmuls.

    Args:
        options: The options of attention.
        kernel: The kernel for the operands, or why it cannot be used.
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
        with fused_operation(_operation(options, x.names)):
            return run(x)

    differentiated = _differentiated(operation, by_products)

    def forward(x: Operands) -> tuple[Array, ...]:
        with fused_operation(_operation(options, x.names), is_call=True):
            return differentiated(x)

    return forward


def _on_cuda(
    options: AttentionOptions,
    fast: Callable[..., PyTree],
    slow: Callable[..., PyTree],
    *operands: PyTree,
) -> PyTree:
    """Chooses at lowering, unless `implementation` is "cudnn"."""
    if options.implementation == "cudnn":
        return fast(*operands)
    return jax.lax.platform_dependent(*operands, cuda=fast, default=slow)


def _differentiated(
    function: Callable[..., PyTree], reference: Callable[..., PyTree]
) -> Callable[..., PyTree]:
    """Returns `function` with the derivatives of `reference`, an equal function."""

    @jax.custom_jvp
    def differentiated(*args: PyTree) -> PyTree:
        return function(*args)

    def rule(primals: PyTree, tangents: PyTree) -> PyTree:
        leaves, tree = jax.tree.flatten(primals)
        dots = jax.tree.leaves(tangents)
        active = [not _is_zero(dot) for dot in dots]
        inputs, rest = eqx.partition(leaves, active)

        def of_active(new: PyTree) -> PyTree:
            return reference(*jax.tree.unflatten(tree, eqx.combine(new, rest)))

        return jax.jvp(of_active, (inputs,), (eqx.filter(dots, active),))

    differentiated.defjvp(rule, symbolic_zeros=True)
    return differentiated


def _is_zero(dot: Any) -> bool:
    return isinstance(dot, SymbolicZero) or dot.dtype == jax.dtypes.float0


def _on_tpu(options: AttentionOptions, x: Operands) -> Array:
    """Returns attention by JAX's kernel for TPUs; see `_attention_tpu`.

    Its passes have no derivatives, and get those of the matmuls.
    """
    kernel, trees = functools.partial(attend_on_tpu, options), []

    def by_products(*arrays: Array) -> Array:
        return attend_by_products(options, Operands(*arrays))[0]

    def with_pullback(*arrays: Array) -> PyTree:
        out, pullback = jax.vjp(kernel, *arrays)
        leaves, tree = jax.tree.flatten(pullback)
        trees[:] = [tree]
        return out, leaves

    def with_products(*arrays: Array) -> PyTree:
        fixed = map(jax.lax.stop_gradient, arrays)
        return by_products(*arrays), with_pullback(*fixed)[1]

    def pulled(leaves: PyTree, arrays: PyTree, cotangent: Array) -> PyTree:
        return jax.tree.unflatten(trees[0], leaves)(cotangent)

    def pulled_by_products(leaves: PyTree, arrays: PyTree, cotangent: Array) -> PyTree:
        return jax.vjp(by_products, *arrays)[1](cotangent)

    function = jax.custom_vjp(kernel)

    def forward(*arrays: Array) -> PyTree:
        out, leaves = _differentiated(with_pullback, with_products)(*arrays)
        return out, (leaves, arrays)

    def backward(residuals: PyTree, cotangent: Array) -> PyTree:
        return _differentiated(pulled, pulled_by_products)(*residuals, cotangent)

    function.defvjp(forward, backward)
    return function(x.query, x.key, x.value)


# --- With the kernel's backward pass --------------------------------------------------


def _with_kernel(
    options: AttentionOptions, kernel: Kernel
) -> Callable[[Operands], tuple[Array, ...]]:
    """Returns attention whose backward pass is the kernel's."""
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
        with fused_operation(_operation(options, x.names), is_call=True):
            found = _backward(keeping, kernel)(x, out, rows, cotangents[0])
        return (with_differentiable(Operands(None, None, None), found),)

    function.defvjp(forward, backward)
    return function


def _backward(
    options: AttentionOptions, kernel: Kernel | str
) -> Callable[..., tuple[Array, ...]]:
    """Returns the backward pass, a function of operands, results and cotangent."""

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


# --- Over a mesh of devices -----------------------------------------------------------


def on_all_axes(x: Operands) -> Operands:
    """Makes operands vary on the same axes of `shard_map`, so gradients are summed.

    By the kernel's types each gradient varies on the axes of its operand.
    """
    axes = frozenset[str]().union(*(varying_axes(getattr(x, n)) for n in x.names))
    return jax.tree.map(lambda array: as_varying(array, axes), x) if axes else x


def explicit_shardings(
    options: AttentionOptions, x: Operands
) -> tuple[NamedSharding, ...] | None:
    """Returns the results' shardings, or None without explicit mesh axes."""
    sharding: Any = getattr(jax.typeof(x.query), "sharding", None)
    if sharding is None or not sharding.mesh.explicit_axes:
        return None
    batch, length, heads, _ = _axes(x.query)
    rows = NamedSharding(sharding.mesh, P(batch, heads, length))
    return (sharding, rows) if options.with_residual else (sharding,)


def no_kernel_on(x: Operands) -> str | None:
    """Returns why the kernel cannot take operands on explicit axes, or None."""
    if any(_axes(array)[i] for array in (x.query, x.key, x.value) for i in (1, 3)):
        return "a sequence or head is sharded over devices"
    if x.bias is not None:
        # XLA aborts the process at the sum of a bias' gradient (jax 0.10.2, Nov. 2026).
        return "a bias on explicit mesh axes"
    return None


def _axes(x: object) -> tuple[Any, ...]:
    """Returns the mesh axes that each of an array's four axes is sharded over."""
    spec = jax.typeof(x).sharding.spec
    return (*spec, *(None,) * 4)[:4]
