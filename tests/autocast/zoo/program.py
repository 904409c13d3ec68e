"""What one program of the zoo is, and how it is differentiated.

A program is a function `fn(*args) -> (loss, outputs)`: the loss is a scalar, the
outputs are any tree (logits, new statistics, indices, a key, a string). `gradient`
makes of it one function that gives loss, outputs and gradients, whether it is plain,
cast before it is differentiated, or differentiated before it is cast.

A product (a matrix product or a convolution) of float32 operands that autocast has to
leave alone is an *exclusion*; each has a reason, and a program names those it has.
"""

import contextlib
import dataclasses
import functools
import zlib
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

OUTER = "an outer product"
PRECISE = "asks for the highest precision"
SOLVE = "inside custom_linear_solve"
KERNEL = "inside pallas_call"

Function = Callable[..., Any]
Built = tuple[Function, tuple[Any, ...]]


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """The largest errors, as relative norms over all leaves against float32."""

    value: float
    gradient: float


@dataclasses.dataclass(frozen=True)
class Program:
    """A small program.

    Attributes:
        name: its name, which also seeds its numbers.
        build: makes the function and its arguments from a key.
        argnums: the arguments whose floating point (and complex) leaves are
            differentiated.
        bfloat16: what bfloat16 may cost.
        float16: what float16 may cost, where its loss is scaled.
        loss_scale: the scale of the loss in float16.
        forward_mode: differentiate forwards, as loops without a known end need it.
        context: what it is built and run in: 64 bits, a mesh.
        third_party: it needs JAX's standard dtype promotion.
        excluded: why products of its gradient stay in float32
            (`counting.reason_to_stay`).
        derived: float32 products that JAX makes of what stays in float32 (a solver, an
            outer product) when it differentiates what autocast made.
    """

    name: str
    build: Callable[[jax.Array], Built]
    argnums: tuple[int, ...] = (0,)
    bfloat16: Tolerance = Tolerance(value=8e-3, gradient=1.1e-2)
    float16: Tolerance = Tolerance(value=1e-3, gradient=1.6e-3)
    loss_scale: float = 2.0**10
    forward_mode: bool = False
    context: Callable[[], contextlib.AbstractContextManager[Any]] = (
        contextlib.nullcontext
    )
    third_party: bool = False
    excluded: frozenset[str] = frozenset()
    derived: int = 0

    def make(self) -> Built:
        """The function and its arguments, the same ones at every call.

        The trees are new: Equinox lets a model's state be used only once.
        """
        fn, args = _built(self)
        return fn, jax.tree.map(lambda x: x, args)


@functools.cache
def _built(program: Program) -> Built:
    with program.context():
        return program.build(jax.random.key(zlib.crc32(program.name.encode())))


def program(
    *excluded: str,
    args: Callable[[jax.Array], tuple[Any, ...]] | None = None,
    loss_of: Callable[[Any], jax.Array] | None = None,
    **options: Any,
) -> Callable[[Function], Program]:
    """Makes a program of a function of a key, with that function's name.

    With `args`, which makes the arguments from a key, the function is the program
    itself; with `loss_of`, the loss of its outputs, it gives only these.
    """

    def decorate(function: Function) -> Program:
        def with_loss(*given: Any) -> tuple[jax.Array, Any]:
            outputs = function(*given)
            return loss_of(outputs), outputs

        found = function if loss_of is None else with_loss
        build = function if args is None else lambda key: (found, args(key))
        name = function.__name__
        return Program(name, build, excluded=frozenset(excluded), **options)

    return decorate


def gradient(
    fn: Function,
    argnums: tuple[int, ...],
    *,
    scale: float = 1.0,
    forward_mode: bool = False,
) -> Function:
    """A function that gives `(loss, outputs, gradients)` of the program `fn`.

    The loss is multiplied with `scale`, and the gradients are divided by it. Leaves
    that are not differentiated are None in the gradients.
    """

    def with_gradient(*args: Any) -> Any:
        chosen = tuple(args[i] for i in argnums)
        weights, others = eqx.partition(chosen, eqx.is_inexact_array)

        def scaled(weights: Any) -> tuple[jax.Array, Any]:
            given = list(args)
            for i, arg in zip(argnums, eqx.combine(weights, others), strict=True):
                given[i] = arg
            loss, outputs = fn(*given)
            return loss * scale, (loss, outputs)

        derivative = jax.jacfwd if forward_mode else jax.grad
        grads, (loss, outputs) = derivative(scaled, has_aux=True)(weights)
        return loss, outputs, jax.tree.map(lambda g: g / scale, grads)

    return with_gradient


def normal(key: jax.Array, *shape: int, scale: float = 1.0) -> jax.Array:
    return scale * jax.random.normal(key, shape, jnp.float32)


def weight(key: jax.Array, *shape: int) -> jax.Array:
    """A weight matrix that keeps the size of what it is multiplied with."""
    return normal(key, *shape, scale=shape[-2] ** -0.5)


def mean_square(x: jax.Array) -> jax.Array:
    return jnp.mean(jnp.square(x))


def near_one(x: jax.Array) -> jax.Array:
    return mean_square(x - 1)


def drawn(
    w: tuple[int, ...], x: tuple[int, ...], scale: float = 1.0
) -> Callable[[jax.Array], tuple[Any, ...]]:
    """Makes weights and a batch of these shapes from a key."""

    def args(key: jax.Array) -> tuple[Any, ...]:
        keys = jax.random.split(key)
        return scale * weight(keys[0], *w), normal(keys[1], *x)

    return args
