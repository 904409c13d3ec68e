"""Models as functions of their layers: what a layer is, the arm says.

A model is a function of `layers` and data. `Weights` has them in a dict, and makes
each product with the arm's own function; `Shapes` runs the model to find what it needs;
the peers' (`peers.whole_steps`) have products of their libraries. So every arm runs
the same lines.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array

Product = Callable[[Array, Array], Array]
Attention = Callable[..., Array]
Block = Callable[["Layers", Array], Array]
# `jax.lax.scan`, or what runs its function with slices.
Loop = Callable[..., tuple[Array, None]]


class Layers(Protocol):
    """What a model asks for."""

    def weight(self, name: str, *shape: int) -> Array:
        """A weight."""

    def dense(self, name: str, x: Array, features: int) -> Array:
        """A linear layer without bias, of an arm that quantizes in 8 bits."""

    def convolve(
        self, name: str, x: Array, channels: int, window: int, stride: int = 1
    ) -> Array:
        """A convolution of [batch, height, width, channels], without bias."""

    def attend(self, *of: Array, is_causal: bool = True) -> Array:
        """Attention of [batch, length, heads, size] by cuDNN's kernel."""

    def at(self, name: str) -> Layers:
        """The layers of a part."""

    def scan(
        self, name: str, length: int, block: Block, x: Array, loop: Loop = jax.lax.scan
    ) -> Array:
        """The same part again and again, with stacked weights."""


def by_slices(
    turn: Callable[[Array, Any], tuple[Array, None]], x: Array, stacked: Any
) -> tuple[Array, None]:
    """A loop in Python over slices of stacked weights, with `jax.lax.scan`'s result."""
    for index in range(jax.tree.leaves(stacked)[0].shape[0]):
        x, _ = turn(x, jax.tree.map(lambda leaf: leaf[index], stacked))  # noqa: B023
    return x, None


def convolution(x: Array, weight: Array, stride: int) -> Array:
    """With a window that reaches over the edges."""
    return jax.lax.conv_general_dilated(
        x,
        weight.astype(x.dtype),
        (stride, stride),
        "SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )


def by_cudnn(query: Array, key: Array, value: Array, is_causal: bool = True) -> Array:
    """Attention, of half precision only."""
    return jax.nn.dot_product_attention(
        query, key, value, is_causal=is_causal, implementation="cudnn"
    )


@dataclasses.dataclass(frozen=True)
class Weights:
    """Layers with their weights at hand.

    Attributes:
        tree: Weights by name; of parts, dicts.
        product: Of a linear layer.
        attention: By cuDNN's kernel.
    """

    tree: Mapping[str, Any]
    product: Product = jnp.matmul
    attention: Attention = by_cudnn

    def weight(self, name: str, *shape: int) -> Array:
        return self.tree[name]

    def dense(self, name: str, x: Array, features: int) -> Array:
        return self.product(x, self.tree[name].astype(x.dtype))

    def convolve(
        self, name: str, x: Array, channels: int, window: int, stride: int = 1
    ) -> Array:
        return convolution(x, self.tree[name], stride)  # the same in arms by hand

    def attend(self, *of: Array, is_causal: bool = True) -> Array:
        return self.attention(*of, is_causal=is_causal)

    def at(self, name: str) -> Weights:
        return dataclasses.replace(self, tree=self.tree[name])

    def scan(
        self, name: str, length: int, block: Block, x: Array, loop: Loop = jax.lax.scan
    ) -> Array:
        def turn(x: Array, tree: Any) -> tuple[Array, None]:
            return block(dataclasses.replace(self, tree=tree), x), None

        return loop(turn, x, self.tree[name])[0]


@dataclasses.dataclass(frozen=True)
class Shape:
    """Of a weight that a model asked for.

    Attributes:
        shape: Its shape.
        fan_in: How many numbers each result of it sums; 0 for a vector.
    """

    shape: tuple[int, ...]
    fan_in: int


@dataclasses.dataclass(frozen=True)
class Shapes:
    """Layers whose weights are zeros, which note what is asked for.

    Attributes:
        tree: Shapes by name; of parts, dicts.
    """

    tree: dict[str, Any] = dataclasses.field(default_factory=dict)

    def weight(self, name: str, *shape: int) -> Array:
        # Of convolutions the fan-in has the window too; of experts not their number.
        fan_in = shape[-2] if len(shape) == 3 else math.prod(shape[:-1])
        self.tree[name] = Shape(shape, fan_in if len(shape) > 1 else 0)
        return jnp.zeros(shape)

    def dense(self, name: str, x: Array, features: int) -> Array:
        return jnp.matmul(x, self.weight(name, x.shape[-1], features).astype(x.dtype))

    def convolve(
        self, name: str, x: Array, channels: int, window: int, stride: int = 1
    ) -> Array:
        weight = self.weight(name, window, window, x.shape[-1], channels)
        return convolution(x, weight, stride)

    def attend(self, *of: Array, is_causal: bool = True) -> Array:
        return of[0]

    def at(self, name: str) -> Shapes:
        return Shapes(self.tree.setdefault(name, {}))

    def scan(
        self, name: str, length: int, block: Block, x: Array, loop: Loop = jax.lax.scan
    ) -> Array:
        x = block(self.at(name), x)
        self.tree[name] = jax.tree.map(
            lambda leaf: Shape((length, *leaf.shape), leaf.fan_in), self.tree[name]
        )
        return x


def shapes_of(model: Callable[..., Any], batch: Any) -> Shapes:
    """What `model(layers, batch)` asks for."""
    shapes = Shapes()
    jax.eval_shape(lambda batch: model(shapes, batch), batch)
    return shapes


def random_weights(model: Callable[..., Any], batch: Any, key: Array) -> dict[str, Any]:
    """Weights for `model(layers, batch)`: ones for vectors, else normal by fan-in."""
    found, structure = jax.tree.flatten(shapes_of(model, batch).tree)
    return jax.tree.unflatten(
        structure,
        [
            jax.random.normal(key, one.shape) / one.fan_in**0.5
            if one.fan_in
            else jnp.ones(one.shape)
            for one, key in zip(found, jax.random.split(key, len(found)), strict=True)
        ],
    )
