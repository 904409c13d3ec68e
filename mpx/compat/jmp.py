"""JMP's names and signatures on top of mpx: `import mpx.compat.jmp as jmp`.

Everything that `jmp` 0.0.4 exports is here with the same fields, argument order, text
grammar and numerics. What differs, each a defect of the original:

- `DynamicLossScale.min_loss_scale` survives jit, scan and checkpoints (JMP drops it,
  and falls back to 1).
- A `DynamicLossScale` may be float16 (JMP's `adjust` raises). It stays float16, and
  stays finite; a float32 one stops at 2^126.
- `StaticLossScale` has its scale as a leaf, so that checkpoints hold it.
- A scale of zero, NaN or infinity, or below zero, is refused when it is made.
- `select_tree` and the casts leave leaves alone that are no arrays, and raise with the
  path of leaves that do not match. `select_tree` takes a Python bool.
- `cast_to_full` and its relatives leave formats of 8 bits alone.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import PyTree

from .. import _policy
from .._cast import cast_leaves
from .._dtypes import float_dtype, half_precision
from .._tree import all_finite as all_finite, bool_scalar, select_tree as select_tree

_NAMES = {"bfloat16": "bf16", "float16": "f16", "float32": "full", "float64": "f64"}


class Policy(_policy.Policy):
    """Dtypes of parameters, computation and outputs; `str` gives JMP's short form.

    Everything else is as in `mpx.Policy`.
    """

    def __str__(self) -> str:
        """JMP's short form, which `get_policy` reads back."""
        names = (self.param_dtype, self.compute_dtype, self.output_dtype)
        p, c, o = (_short_name(np.dtype(dtype)) for dtype in names)
        return f"p={p},c={c},o={o}"


def _short_name(dtype: np.dtype) -> str:
    return _NAMES.get(dtype.name, dtype.name)


def get_policy(policy_name: str) -> Policy:
    """Reads a policy from text; `half` is `half_dtype()`. See `mpx.get_policy`.

    Args:
        policy_name: The policy as text, such as "p=full,c=half,o=full".

    Returns:
        The policy, whose `str` is JMP's short form.

    Raises:
        ValueError: A key is unknown or repeated, a dtype does not exist, or is float64
            and not enabled in JAX.
        TypeError: `policy_name` is not text, or a dtype is not floating.
    """
    with half_precision(half_dtype()):
        policy = _policy.get_policy(policy_name)
    return Policy(policy.param_dtype, policy.compute_dtype, policy.output_dtype)


def half_dtype() -> Any:
    """The half precision dtype of the default device: bfloat16 on TPU, else float16."""
    return jnp.bfloat16 if jax.local_devices()[0].platform == "tpu" else jnp.float16


def cast_to_full(tree: PyTree) -> PyTree:
    """Casts float leaves to float32; see `mpx.cast_tree`."""
    return cast_leaves(tree, np.dtype(np.float32), None)


def cast_to_half(tree: PyTree) -> PyTree:
    """Casts float leaves to `half_dtype()`; see `mpx.cast_tree`."""
    return cast_leaves(tree, float_dtype(half_dtype(), "`jmp.cast_to_half`"), None)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NoOpLossScale:
    """A loss scale that does nothing."""

    @property
    def loss_scale(self) -> int:
        """One."""
        return 1

    def scale(self, tree: PyTree) -> PyTree:
        """The tree."""
        return tree

    def unscale(self, tree: PyTree) -> PyTree:
        """The tree."""
        return tree

    def adjust(self, grads_finite: Any) -> "NoOpLossScale":
        """Itself."""
        return self


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StaticLossScale:
    """A fixed scale: `scale` multiplies by it, `unscale` by its inverse.

    Args:
        loss_scale: The scale, kept as it is given.

    Raises:
        ValueError: The scale is not positive and finite.
    """

    loss_scale: Any

    def __post_init__(self) -> None:
        """Refuses a scale that no run can use."""
        _validate(self.loss_scale, "loss_scale", "StaticLossScale")

    def scale(self, tree: PyTree) -> PyTree:
        """Every leaf times the scale."""
        return _times(tree, self.loss_scale)

    def unscale(self, tree: PyTree) -> PyTree:
        """Every leaf times the inverse of the scale."""
        return _times(tree, 1 / self.loss_scale)

    def adjust(self, grads_finite: Any) -> "StaticLossScale":
        """Itself."""
        return self


def _zero() -> Any:
    return np.zeros([], np.int32)


def _one() -> Any:
    return np.ones([], np.float32)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DynamicLossScale:
    """A scale that grows after `period` good steps and falls at a bad one.

    The fields are JMP's; `period` and `factor` are static, the others leaves.

    Args:
        loss_scale: The scale to start with; its dtype stays.
        counter: Good steps already made.
        period: Good steps until the scale grows.
        factor: What the scale is multiplied by when it grows, divided by when it falls.
        min_loss_scale: The floor.

    Raises:
        ValueError: `loss_scale` or `min_loss_scale` is not positive and finite.
    """

    loss_scale: Any
    counter: Any = dataclasses.field(default_factory=_zero)
    period: int = dataclasses.field(default=2000, metadata={"static": True})
    factor: int = dataclasses.field(default=2, metadata={"static": True})
    min_loss_scale: Any = dataclasses.field(default_factory=_one)

    def __post_init__(self) -> None:
        """Refuses a scale that no run can use."""
        _validate(self.loss_scale, "loss_scale", "DynamicLossScale")
        _validate(self.min_loss_scale, "min_loss_scale", "DynamicLossScale")

    def scale(self, tree: PyTree) -> PyTree:
        """Every leaf times the scale."""
        return _times(tree, self.loss_scale)

    def unscale(self, tree: PyTree) -> PyTree:
        """Every leaf times the inverse of the scale."""
        return _times(tree, 1 / self.loss_scale)

    def adjust(self, grads_finite: Any) -> "DynamicLossScale":
        """The next scale and counter; grows at the `period`-th good step in a row.

        Args:
            grads_finite: Whether the step was good, one boolean.

        Returns:
            The new state; this one stays as it is.

        Raises:
            TypeError: `grads_finite` is not one boolean.

        Growth past the largest number of the scale's dtype, or past 2^126, is left out.
        """
        finite = bool_scalar(
            grads_finite, "`grads_finite` of `DynamicLossScale.adjust`"
        )
        scale = jnp.asarray(self.loss_scale)
        wide = scale.astype(jnp.float32)
        grown = wide * self.factor
        largest = jnp.minimum(float(jnp.finfo(scale.dtype).max), 2.0**126)
        grown = jnp.where(grown <= largest, grown, wide)
        grows = jnp.asarray(self.counter) == self.period - 1
        floor = jnp.asarray(self.min_loss_scale).astype(jnp.float32)
        new = jnp.where(
            finite,
            jnp.where(grows, grown, wide),
            jnp.maximum(floor, wide / self.factor),
        )
        counter = (jnp.asarray(self.counter) + 1) % self.period
        counter = jnp.where(finite, counter, 0).astype(jnp.int32)
        return dataclasses.replace(
            self, loss_scale=new.astype(scale.dtype), counter=counter
        )


LossScale = NoOpLossScale | StaticLossScale | DynamicLossScale


def _times(tree: PyTree, factor: Any) -> PyTree:
    # As JMP multiplies: the result has the dtype that JAX promotes to.
    return jax.tree.map(lambda x: x * factor, tree)


def _validate(value: Any, name: str, owner: str) -> None:
    """Refuses what no run can use; anything that is no number is JAX's placeholder."""
    is_number = isinstance(value, int | float | np.ndarray | np.generic | jax.Array)
    if not is_number or isinstance(value, Tracer):
        return
    array = np.asarray(value).astype(np.float64)
    if isinstance(value, bool) or not np.all((array > 0) & (array < np.inf)):
        raise ValueError(
            f"`{name}` of `mpx.compat.jmp.{owner}` must be positive and finite; got "
            f"{value}."
        )
