"""Models as functions of their layers: what a layer is, the arm says.

A model is a function of `layers` and data. `Weights` has them in a dict, and makes
each product with the arm's own function; `Shapes` runs the model to find what it needs;
the peers' layers (`peers.eight_bits`) are those of their libraries. So every arm runs
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
Block = Callable[["Layers", Array], Array]


class Layers(Protocol):
    """What a model asks for."""

    def weight(self, name: str, *shape: int) -> Array:
        """A weight."""
        ...

    def dense(self, name: str, x: Array, features: int) -> Array:
        """A linear layer without bias, of an arm that quantizes in 8 bits."""
        ...

    def at(self, name: str) -> Layers:
        """The layers of a part."""
        ...

    def scan(self, name: str, length: int, block: Block, x: Array) -> Array:
        """The same part again and again, with stacked weights, by `jax.lax.scan`."""
        ...


@dataclasses.dataclass(frozen=True)
class Weights:
    """Layers with their weights at hand.

    Attributes:
        tree: Weights by name; of parts, dicts.
        product: Of a linear layer.
    """

    tree: Mapping[str, Any]
    product: Product = jnp.matmul

    def weight(self, name: str, *shape: int) -> Array:
        """A weight."""
        del shape
        return self.tree[name]

    def dense(self, name: str, x: Array, features: int) -> Array:
        """A linear layer."""
        return self.product(x, self.tree[name].astype(x.dtype))

    def at(self, name: str) -> Weights:
        """The layers of a part."""
        return Weights(self.tree[name], self.product)

    def scan(self, name: str, length: int, block: Block, x: Array) -> Array:
        """The part with each of its weights."""
        del length

        def turn(x: Array, tree: Any) -> tuple[Array, None]:
            return block(Weights(tree, self.product), x), None

        return jax.lax.scan(turn, x, self.tree[name])[0]


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
    """Layers without weights, which note what is asked for."""

    tree: dict[str, Any] = dataclasses.field(default_factory=dict)

    def weight(self, name: str, *shape: int) -> Array:
        """A weight of zeros."""
        # Of convolutions the fan-in has the window too; of experts not their number.
        fan_in = shape[-2] if len(shape) == 3 else math.prod(shape[:-1])
        self.tree[name] = Shape(shape, fan_in if len(shape) > 1 else 0)
        return jnp.zeros(shape)

    def dense(self, name: str, x: Array, features: int) -> Array:
        """A linear layer of zeros."""
        return jnp.matmul(x, self.weight(name, x.shape[-1], features).astype(x.dtype))

    def at(self, name: str) -> Shapes:
        """The layers of a part."""
        return Shapes(self.tree.setdefault(name, {}))

    def scan(self, name: str, length: int, block: Block, x: Array) -> Array:
        """The part once, with stacked weights."""
        x = block(self.at(name), x)
        self.tree[name] = jax.tree.map(
            lambda leaf: Shape((length, *leaf.shape), leaf.fan_in), self.tree[name]
        )
        return x


def random_weights(model: Callable[..., Any], batch: Any, key: Array) -> dict[str, Any]:
    """Weights for `model(layers, batch)`: ones for vectors, else normal by fan-in."""
    shapes = Shapes()
    jax.eval_shape(lambda batch: model(shapes, batch), batch)
    found, structure = jax.tree.flatten(shapes.tree)
    return jax.tree.unflatten(
        structure,
        [
            jax.random.normal(key, one.shape) / one.fan_in**0.5
            if one.fan_in
            else jnp.ones(one.shape)
            for one, key in zip(found, jax.random.split(key, len(found)), strict=True)
        ],
    )
