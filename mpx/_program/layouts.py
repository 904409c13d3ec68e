"""Barriers on gradients of products, where XLA would arrange or order them badly.

They are put where the operands are read: a product of other arrays for everything but
derivatives, whose barriers are on the gradients of these arrays.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array

from .._base.jax_compat import layouts_are_said
from .._base.typing import AnyArray

# Named like JAX's copy of an array, which it is for everything but gradients.
_copy = Primitive("copy_p")
_copy.multiple_results = True


def with_flat_gradient(filters: AnyArray) -> Array:
    """Returns filters whose gradient is computed in their own layout.

    cuDNN returns a filter's gradient with the output features first. XLA gives that
    layout to all that is computed from it: Adam's two moments and the weight are
    transposed and transposed back, instead of the one gradient. A barrier on the flat
    gradient keeps the layout out of the optimizer: a step of AdamW for three filters of
    3 x 3 x 1280 x 1280, compiled for an H100, moves 2.2 GB instead of 3.1 (jaxlib
    0.10.2, November 2026).
    """
    return _copy.bind(filters, is_gradient=False)[0]


def flat(gradient: AnyArray) -> Array:
    """Returns a filter's gradient behind a barrier, in the order of its axes."""
    return _copy.bind(gradient, is_gradient=True)[0]


def with_gradients_at_once(*arrays: AnyArray) -> Sequence[Array]:
    """Returns arrays whose gradients are all computed before one is read.

    XLA computes the gradient of a head's weight at the very end of a step, and keeps
    the gradient of the logits until then: 0.4 of the 9.0 GB of a Llama of 8 layers with
    8,192 tokens and 32,000 classes (jaxlib 0.10.2, for an H100, November 2026).
    """
    return _copy.bind(*arrays, is_gradient=False)


@_copy.def_impl
def _(*arrays: Array, **_: bool) -> Sequence[Array]:
    return arrays


@_copy.def_abstract_eval
def _(*avals: Any, **_: bool) -> Sequence[Any]:
    return avals


def _lowered(context: Any, *arrays: Any, is_gradient: bool) -> Any:
    def through_barrier(*arrays: Array) -> Sequence[Array]:
        if len(arrays) > 1:
            return jax.lax.optimization_barrier(arrays)
        return [
            jax.lax.optimization_barrier(x.reshape(-1)).reshape(x.shape) for x in arrays
        ]

    # To be flattened, sharded axes would be gathered.
    if not is_gradient or (len(arrays) == 1 and not layouts_are_said(context)):
        return arrays
    return mlir.lower_fun(through_barrier, multiple_results=True)(context, *arrays)


def _derived(arrays: Any, tangents: Any, **params: bool) -> tuple[Any, Any]:
    # If one of them is a constant, it has no gradient to wait for.
    if not any(type(dot) is ad.Zero for dot in tangents):
        tangents = _copy.bind(*tangents, **params)
    return _copy.bind(*arrays, **params), tangents


def _transposed(gradients: Any, *_: Any, is_gradient: bool) -> Any:
    if any(type(gradient) is ad.Zero for gradient in gradients):
        return gradients
    return _copy.bind(*gradients, is_gradient=True)


def _batched(arrays: Any, axes: Any, **params: bool) -> tuple[Any, Any]:
    return _copy.bind(*arrays, **params), axes


ad.primitive_jvps[_copy] = _derived
ad.primitive_transposes[_copy] = _transposed
batching.primitive_batchers[_copy] = _batched
mlir.register_lowering(_copy, _lowered)
