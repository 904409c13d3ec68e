"""A kernel of attention in the place of cuDNN's, for machines without a GPU.

It has what JAX's has: primitives without derivatives, a `jax.custom_vjp` around them,
residuals of its own, and no `vmap` worth having. It runs everywhere, or nowhere but on
CUDA, as its users like.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import mlir

from mpx.nn._attention_products import AttentionOptions, Operands, attend_by_products

FORWARD = "dot_product_attention_fwd_wrapper"
BACKWARD = "dot_product_attention_bwd_wrapper"


def _exact(options: AttentionOptions, arrays: list[Any]) -> tuple[Any, Any]:
    names = ("query", "key", "value", "bias", "mask", "query_lengths", "key_lengths")
    x = Operands(**{n: a for n, a in zip(names, arrays, strict=True) if a.size})
    return attend_by_products(options, x)


def _forward(*arrays: Any, options: Any, layout: int) -> list[Any]:
    del layout
    return list(_exact(options, list(arrays)))


def _backward(*arrays: Any, options: Any, layout: int) -> list[Any]:
    del layout
    *inputs, out, rows, cotangent = arrays
    del out, rows

    def of(*floats: Any) -> Any:
        return _exact(options, [*floats, *inputs[4:]])[0]

    return list(jax.vjp(of, *inputs[:4])[1](cotangent))


def _types(query: Any, *rest: Any, **params: Any) -> list[Any]:
    batch, length, heads, _ = query.shape
    return [query, query.update(shape=(batch, heads, length), dtype=jnp.float32)]


def _primitive(name: str, impl: Any, types: Any) -> Primitive:
    made = Primitive(name)
    made.multiple_results = True
    made.def_impl(jax.jit(impl, static_argnames=("options", "layout")))
    made.def_abstract_eval(types)
    run = jax.jit(impl, static_argnames=("options", "layout"))
    mlir.register_lowering(made, mlir.lower_fun(run, multiple_results=True))
    return made


_forward_p = _primitive(FORWARD, _forward, _types)
_backward_p = _primitive(BACKWARD, _backward, lambda *xs, **params: list(xs[:4]))


def call(
    options: AttentionOptions, native: Any, implementation: Any, x: Operands
) -> Any:
    """In the place of `mpx.nn._attention_kernel.call`."""
    assert implementation == "cudnn"
    window = None if native.left is None else (native.left, 0)
    told = AttentionOptions(options.scale, native.is_causal, window, with_residual=True)
    unused = jnp.zeros(0, x.query.dtype)

    @jax.custom_vjp
    def kernel(*arrays: Any) -> Any:
        return _forward_p.bind(*arrays, options=told, layout=0)[0]

    def forward(*arrays: Any) -> Any:
        out, rows = _forward_p.bind(*arrays, options=told, layout=0)
        return out, (*arrays, unused, rows, out)

    def backward(residuals: Any, cotangent: Any) -> Any:
        *arrays, _, rows, out = residuals
        found = _backward_p.bind(*arrays, out, rows, cotangent, options=told, layout=0)
        return (*found, *(None,) * (len(arrays) - 4))

    kernel.defvjp(forward, backward)
    given = (x.bias, x.mask, x.query_lengths, x.key_lengths)
    return kernel(x.query, x.key, x.value, *(unused if a is None else a for a in given))
