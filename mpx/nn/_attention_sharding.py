"""Attention over a mesh of devices: rows of the batch and heads may be apart.

On automatic axes there is nothing to do: JAX's kernel says how it is split. In
`jax.shard_map` each device calls it for its own part, and what is the same on all of
them has gradients that must be summed. On explicit axes the kernel has no types, and is
called with the axes made automatic.
"""

from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec as P

from .._jax_compat import as_varying, varying_axes
from ._attention_operands import AttentionOptions, Operands


def on_all_axes(x: Operands) -> Operands:
    """Operands that vary on the same axes of `shard_map`, so that gradients are summed.

    The kernel's types say of each gradient that it varies as its operand does.
    """
    axes = frozenset[str]().union(*(varying_axes(getattr(x, n)) for n in x.names))
    return jax.tree.map(lambda array: as_varying(array, axes), x) if axes else x


def explicit_shardings(
    options: AttentionOptions, x: Operands
) -> tuple[NamedSharding, ...] | None:
    """How the results lie on devices, where that is part of types."""
    sharding: Any = getattr(jax.typeof(x.query), "sharding", None)
    if sharding is None or not sharding.mesh.explicit_axes:
        return None
    batch, length, heads, _ = _axes(x.query)
    rows = NamedSharding(sharding.mesh, P(batch, heads, length))
    return (sharding, rows) if options.with_residual else (sharding,)


def no_kernel_on(x: Operands) -> str | None:
    """Why operands on explicit axes cannot go through the kernel, if so."""
    if any(_axes(array)[i] for array in (x.query, x.key, x.value) for i in (1, 3)):
        return "a sequence or head is split over devices"
    if x.bias is not None:
        # XLA stops the process at the sum of a bias' gradient (jax 0.10.2, Nov. 2026).
        return "a bias on explicit mesh axes"
    return None


def _axes(x: object) -> tuple[Any, ...]:
    """The mesh axes that each of the four axes of an array is split over."""
    spec = jax.typeof(x).sharding.spec
    return (*spec, *(None,) * 4)[:4]
