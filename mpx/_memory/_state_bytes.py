"""The bytes of weights and optimizer state, by part (`state_bytes`)."""

import dataclasses
import math
from typing import Any

import jax
from jax.tree_util import GetAttrKey, KeyPath
from jaxtyping import PyTree

from .._base.errors import describe
from .._base.tree import Guard, WeightsByPath, path_text
from ._codes import CompressedArray


@dataclasses.dataclass(frozen=True)
class StateBytes:
    """The bytes of weights and of their optimizer's state.

    Attributes:
        weights: The number of values of the weights.
        parts: For each part its name (`weights`, or the field of the optimizer's state,
            such as `mu`), the dtype or code in which it is stored, and its bytes.
    """

    weights: int
    parts: tuple[tuple[str, str, int], ...]

    @property
    def total(self) -> int:
        """The bytes of all parts."""
        return sum(size for _, _, size in self.parts)

    @property
    def per_weight(self) -> float:
        """The bytes of all parts per value of the weights."""
        return self.total / self.weights

    def __str__(self) -> str:
        rows = [*self.parts, ("all", "", self.total)]
        texts = [
            (name, how, f"{size:,}", f"{size / self.weights:.2f}")
            for name, how, size in rows
        ]
        texts.insert(0, ("part", "stored as", "bytes", "for each weight"))
        sizes = [max(map(len, column)) for column in zip(*texts, strict=True)]
        lines = [
            "  ".join(
                f"{x:{side}{n}}" for x, side, n in zip(row, "<<>>", sizes, strict=True)
            )
            for row in texts
        ]
        return "\n".join(lines)


def state_bytes(model: PyTree, opt_state: PyTree) -> StateBytes:
    """Counts the bytes of weights and of their optimizer's state, by part.

    Args:
        model: The weights: arrays, or their shapes from `jax.eval_shape`.
        opt_state: The state of the optimizer, likewise.

    Returns:
        The bytes of the weights, and of each field of the optimizer's state.

    Raises:
        ValueError: `model` has no array.

    Scalars, counts and keys are parts, too. An array on several devices is counted
    once, however it is sharded. Non-array leaves are omitted.

    Examples:
        >>> import jax.numpy as jnp, mpx, optax
        >>> weights = {"w": jnp.ones((64, 128), jnp.bfloat16)}
        >>> tx = mpx.master_weights(mpx.compress_state(optax.trace(0.9)), bits=16)
        >>> print(mpx.state_bytes(weights, tx.init(weights)))
        part      stored as        bytes  for each weight
        weights   bfloat16        16,384             2.00
        low_bits  int16           16,384             2.00
        trace     8 bits, signed   8,448             1.03
        step      uint32               4             0.00
        all                       41,220             5.03
    """
    leaves = jax.tree_util.tree_leaves_with_path(model)
    arrays = [(path, leaf) for path, leaf in leaves if _is_array(leaf)]
    count = sum(math.prod(leaf.shape) for _, leaf in arrays)
    if not count:
        raise ValueError(
            "`mpx.state_bytes(model, opt_state)` needs a model with arrays, or their "
            f"shapes; got {describe(model)}."
        )
    found: dict[tuple[str, str], int] = {}

    def add(name: str, how: str, size: int) -> None:
        found[name, how] = found.get((name, how), 0) + size

    for _, leaf in arrays:
        add("weights", str(leaf.dtype), _size(leaf))
    weights = WeightsByPath(leaves)
    is_ours = lambda node: isinstance(node, CompressedArray | Guard)  # noqa: E731
    for path, leaf in jax.tree_util.tree_leaves_with_path(opt_state, is_leaf=is_ours):
        if isinstance(leaf, CompressedArray):
            add(_field(path, weights), str(leaf.code), leaf.nbytes)
        elif _is_array(leaf):
            add(_field(path, weights), str(leaf.dtype), _size(leaf))
    return StateBytes(count, tuple((*key, size) for key, size in found.items()))


def _is_array(leaf: object) -> bool:
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def _size(leaf: Any) -> int:
    return math.prod(leaf.shape) * leaf.dtype.itemsize


def _field(path: KeyPath, weights: WeightsByPath[Any]) -> str:
    """Returns the field of a state that an array is in: the last name in its path."""
    for end, _ in weights.of(path):
        path = path[: len(path) - len(end)]
        break
    names = [key.name for key in path if isinstance(key, GetAttrKey)]
    return names[-1] if names else path_text(path) or "state"
