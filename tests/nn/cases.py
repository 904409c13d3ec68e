"""The functions of `mpx.nn` of one array, and what JAX has in their places."""

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import mpx.nn

WHERE = jnp.array([True, False, True, True, True, False, True, True])


@dataclasses.dataclass(frozen=True)
class FunctionCase:
    """A function, its counterpart for float32, and the float32 it keeps of a row."""

    name: str
    mine: Callable[..., Any]
    jax: Callable[..., Any]
    rows: int
    with_where: bool = True

    def pair(self, **options: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
        return (lambda x: self.mine(x, **options), lambda x: self.jax(x, **options))


def layer_norm(x, axis=-1):
    """Layer norm as Equinox computes it, along one axis."""
    norm = eqx.nn.LayerNorm(x.shape[axis], use_weight=False, use_bias=False)
    rows = jnp.moveaxis(x, axis, -1)
    flat = jax.vmap(norm)(rows.reshape(-1, rows.shape[-1]))
    return jnp.moveaxis(flat.reshape(rows.shape), -1, axis)


def rms_norm(x, axis=-1):
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis, keepdims=True) + 1e-5)


FUNCTIONS = {
    case.name: case
    for case in (
        FunctionCase("softmax", mpx.nn.softmax, jax.nn.softmax, 0),
        FunctionCase("log_softmax", mpx.nn.log_softmax, jax.nn.log_softmax, 2),
        FunctionCase("logsumexp", mpx.nn.logsumexp, jax.nn.logsumexp, 2),
        FunctionCase("mean", mpx.nn.mean, jnp.mean, 0),
        FunctionCase("variance", mpx.nn.variance, jnp.var, 0),
        FunctionCase("layer_norm", mpx.nn.layer_norm, layer_norm, 2, False),
        FunctionCase("rms_norm", mpx.nn.rms_norm, rms_norm, 1, False),
    )
}


def kept_arrays(func: Callable[..., Any], *args: Any) -> list[tuple[str, tuple]]:
    """Dtype and shape of everything that the pullback of a function holds."""

    def leaves(*args: Any) -> list[Any]:
        return jax.tree.leaves(jax.vjp(func, *args)[1])

    kept = jax.eval_shape(leaves, *args)  # traced, but not compiled
    return sorted((x.dtype.name, x.shape) for x in kept)


def relative_error(found: Any, exact: Any) -> float:
    """The largest difference over the largest number, or over 1 where that is 0."""
    found, exact = (np.asarray(x, np.float64) for x in (found, exact))
    return np.abs(found - exact).max() / (np.abs(exact).max() or 1)
