"""JMP's names and signatures on top of mpx: `import mpx.compat.jmp as jmp`.

Everything that `jmp` 0.0.4 exports is here with the same fields, argument order, text
grammar and numerics; its development head differs from that release in comments only.
Differences, each a fixed defect of the original:

- `DynamicLossScale.min_loss_scale` survives jit, scan and checkpoints: it is a leaf
  (JMP drops it, and falls back to 1).
- A `DynamicLossScale` may be float16 or bfloat16 (JMP's `adjust` raises). It keeps its
  dtype, and stays finite; a float32 one stops at 2^126. Nor does it become zero: a
  `min_loss_scale` of zero means the dtype's smallest normal number. Its counter stays
  an integer, also where `period` is a float.
- `StaticLossScale` has its scale as a leaf, so checkpoints contain it.
- A scale of zero, NaN or infinity, or below zero, raises when it is made.
- `select_tree` and the casts do not change leaves that are neither arrays nor numbers.
  `select_tree` and `adjust` accept a Python bool; anything but a boolean scalar is a
  `TypeError`, not an `AssertionError`, and trees that do not match are a `ValueError`
  with the path of the leaf.
- The casts accept numpy scalars and `jax.ShapeDtypeStruct`, and do not change 8-bit
  formats. A cast to such a format saturates.
- `get_policy` also reads blanks and the names of all floating dtypes. A repeated key is
  a `ValueError`, and so is float64 if it is disabled in JAX (JMP takes the last key,
  and casts to float32). `Policy` also accepts names of dtypes, but no integer dtype.
"""

import dataclasses
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import PyTree

from .._base.dtypes import float_dtype, full_precision_of, half_precision
from .._base.errors import describe
from .._base.tree import all_finite, bool_scalar, select_tree as _select_tree
from .._base.typing import BoolLike
from .._settings import Policy as _Policy, cast_leaves, get_policy as _get_policy

# The release of JMP whose names these are.
__version__ = "0.0.4"

__all__ = (
    "all_finite",
    "DynamicLossScale",
    "LossScale",
    "NoOpLossScale",
    "select_tree",
    "StaticLossScale",
    "cast_to_full",
    "cast_to_half",
    "get_policy",
    "half_dtype",
    "Policy",
)

_NAMES = {"bfloat16": "bf16", "float16": "f16", "float32": "full", "float64": "f64"}


class Policy(_Policy):
    """Dtypes of parameters, computation and outputs; `str` gives JMP's short form.

    The fields are JAX's scalar types, as in JMP: `policy.compute_dtype(1)` is a number,
    and `policy.compute_dtype in {jnp.float16, jnp.bfloat16}` works. Everything else is
    as in `mpx.Policy`.
    """

    def __post_init__(self, *reserved: None) -> None:
        """Reads the dtypes, and replaces them by JAX's scalar types."""
        super().__post_init__(*reserved)
        for name in ("param_dtype", "compute_dtype", "output_dtype"):
            scalar_type = getattr(jnp, np.dtype(getattr(self, name)).name)
            object.__setattr__(self, name, scalar_type)

    def __str__(self) -> str:
        """Returns JMP's short form, which `get_policy` reads back."""
        names = (self.param_dtype, self.compute_dtype, self.output_dtype)
        names = (np.dtype(dtype).name for dtype in names)
        p, c, o = (_NAMES.get(name, name) for name in names)
        return f"p={p},c={c},o={o}"


def get_policy(policy_name: str) -> Policy:
    """Reads a policy from text; `half` is `half_dtype()`. See `mpx.get_policy`.

    Args:
        policy_name: The policy as text, such as "p=full,c=half,o=full".

    Returns:
        The policy, whose `str` is JMP's short form.

    Raises:
        ValueError: A key is unknown or repeated, a dtype does not exist, is not
            floating, or is float64 and not enabled in JAX.
        TypeError: `policy_name` is not a string.
    """
    with half_precision(half_dtype()):
        try:
            policy = _get_policy(policy_name)
        except TypeError as error:
            if not isinstance(policy_name, str):
                raise
            raise ValueError(str(error)) from None
    return Policy(policy.param_dtype, policy.compute_dtype, policy.output_dtype)


def half_dtype() -> Any:
    """Returns the half-precision dtype: bfloat16 on a default TPU, else float16."""
    return jnp.bfloat16 if jax.local_devices()[0].platform == "tpu" else jnp.float16


def cast_to_full(tree: PyTree) -> PyTree:
    """Casts float leaves to float32; see `mpx.cast_tree`."""
    return cast_leaves(tree, np.dtype(np.float32), None)


def cast_to_half(tree: PyTree) -> PyTree:
    """Casts float leaves to `half_dtype()`; see `mpx.cast_tree`."""
    return cast_leaves(tree, float_dtype(half_dtype(), "`jmp.cast_to_half`"), None)


def select_tree(pred: Any, a: PyTree, b: PyTree) -> PyTree:
    """Chooses one of two trees; see `mpx.select_tree`. Python numbers become arrays.

    Args:
        pred: One boolean, an array or Python's.
        a: The tree for True.
        b: The tree for False, of the same structure, shapes and dtypes.

    Returns:
        The chosen tree.

    Raises:
        TypeError: `pred` is not a boolean scalar.
        ValueError: The trees do not match; the message has the path.
    """
    a, b = jax.tree.map(_number_as_array, (a, b))
    return _select_tree(pred, a, b)


def _number_as_array(leaf: object) -> PyTree:
    return jnp.asarray(leaf) if isinstance(leaf, bool | int | float | complex) else leaf


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NoOpLossScale:
    """A loss scale that does nothing."""

    @property
    def loss_scale(self) -> int:
        """The scale, 1."""
        return 1

    def scale(self, tree: PyTree) -> PyTree:
        """Returns the tree unchanged."""
        return tree

    def unscale(self, tree: PyTree) -> PyTree:
        """Returns the tree unchanged."""
        return tree

    def adjust(self, grads_finite: BoolLike) -> "NoOpLossScale":
        """Returns itself."""
        return self


class _Scaling:
    """Multiplies as JMP does: the result has the dtype that JAX promotes to."""

    loss_scale: Any

    def scale(self, tree: PyTree) -> PyTree:
        """Returns every leaf times the scale."""
        return jax.tree.map(lambda x: x * self.loss_scale, tree)

    def unscale(self, tree: PyTree) -> PyTree:
        """Returns every leaf times the inverse of the scale."""
        inverse = 1 / self.loss_scale
        return jax.tree.map(lambda x: x * inverse, tree)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StaticLossScale(_Scaling):
    """A fixed scale: `scale` multiplies by it, `unscale` by its inverse.

    Args:
        loss_scale: The scale, stored unchanged.

    Raises:
        ValueError: The scale is not positive and finite.
    """

    loss_scale: Any

    def __post_init__(self) -> None:
        """Refuses a scale that no run can use."""
        _validate(self.loss_scale, "loss_scale", "StaticLossScale")

    def adjust(self, grads_finite: BoolLike) -> "StaticLossScale":
        """Returns itself."""
        return self


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DynamicLossScale(_Scaling):
    """A scale that grows after `period` good steps and falls at a non-finite one.

    The fields are JMP's; `period` and `factor` are static, the others leaves.

    Args:
        loss_scale: The initial scale; its dtype is kept.
        counter: Good steps already counted.
        period: Good steps until the scale grows.
        factor: The factor by which the scale grows, and the divisor by which it falls.
        min_loss_scale: The floor. Zero, or less than the smallest normal number of the
            scale's dtype, means that number.

    Raises:
        ValueError: `loss_scale` is not positive and finite, or `min_loss_scale` is
            negative or non-finite.

    Warns:
        UserWarning: A scale is an integer. `adjust` then raises, as in JMP.
    """

    loss_scale: Any
    counter: Any = dataclasses.field(default_factory=lambda: np.zeros([], np.int32))
    period: int | float = dataclasses.field(default=2000, metadata={"static": True})
    factor: int | float = dataclasses.field(default=2, metadata={"static": True})
    min_loss_scale: Any = dataclasses.field(
        default_factory=lambda: np.ones([], np.float32)
    )

    def __post_init__(self) -> None:
        """Refuses a scale that no run can use."""
        _validate(self.loss_scale, "loss_scale", "DynamicLossScale")
        _validate(self.min_loss_scale, "min_loss_scale", "DynamicLossScale", zero=True)
        for name in ("loss_scale", "min_loss_scale"):
            _warn_if_not_floating(getattr(self, name), name)

    def adjust(self, grads_finite: BoolLike) -> "DynamicLossScale":
        """Returns the next state; grows at the `period`-th good step in a row.

        Args:
            grads_finite: Whether the step was finite, one boolean.

        Returns:
            The new state; this one is unchanged.

        Raises:
            TypeError: `grads_finite` is not one boolean, or the scale is an integer.

        The scale does not grow past the largest number of its dtype, or past 2^126.
        """
        finite = bool_scalar(
            grads_finite, "`grads_finite` of `DynamicLossScale.adjust`"
        )
        scale = jnp.asarray(self.loss_scale)
        if not jnp.issubdtype(scale.dtype, jnp.floating):
            raise TypeError(
                "`mpx.compat.jmp.DynamicLossScale.adjust` needs a floating "
                f"`loss_scale`; got {describe(scale)}. Make it with `jnp.float32(...)`."
            )
        limits = jnp.finfo(scale.dtype)
        wide = scale.astype(full_precision_of(scale.dtype))
        grown = wide * self.factor
        grown = jnp.where(grown <= min(float(limits.max), 2.0**126), grown, wide)
        period = int(self.period)  # JMP takes floats, too
        grows = jnp.asarray(self.counter) == period - 1
        floor = jnp.asarray(self.min_loss_scale).astype(wide.dtype)
        fallen = jnp.maximum(floor, wide / self.factor)
        fallen = jnp.maximum(fallen, float(limits.smallest_normal))
        new = jnp.where(finite, jnp.where(grows, grown, wide), fallen)
        counter = (jnp.asarray(self.counter) + 1) % period
        counter = jnp.where(finite, counter, 0).astype(jnp.int32)
        return dataclasses.replace(
            self, loss_scale=new.astype(scale.dtype), counter=counter
        )


LossScale = NoOpLossScale | StaticLossScale | DynamicLossScale


def _is_number(value: object) -> bool:
    """Returns whether a field is a number, neither JAX's placeholder nor a tracer."""
    kinds = int | float | np.ndarray | np.generic | jax.Array
    return isinstance(value, kinds) and not isinstance(value, Tracer)


def _validate(value: object, name: str, owner: str, zero: bool = False) -> None:
    """Raises unless a number is finite and positive, or 0 if allowed."""
    if not _is_number(value):
        return
    array = np.asarray(value).astype(np.float64)
    low = array >= 0 if zero else array > 0
    if isinstance(value, bool) or not np.all(low & (array < np.inf)):
        raise ValueError(
            f"`{name}` of `mpx.compat.jmp.{owner}` must be "
            f"{'at least 0' if zero else 'positive'} and finite; got {value}."
        )


def _warn_if_not_floating(value: object, name: str) -> None:
    if _is_number(value) and not jnp.issubdtype(np.asarray(value).dtype, jnp.floating):
        warnings.warn(
            f"`{name}` of `mpx.compat.jmp.DynamicLossScale` should be floating, such "
            f"as `jnp.float32({value})`; got {describe(value)}.",
            stacklevel=4,
        )
