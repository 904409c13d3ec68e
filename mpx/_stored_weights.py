r"""Weights that are stored in 8 bits: `quantize_weights` and `dequantize_weights`.

For a weight $m$ (float32, in the state of `mpx.master_weights`) the model has

$$p = \operatorname{quantize}(m)$$

a byte per value instead of four. The model's weights may be replicated, or gathered in
every step, while their float32 copies are sharded beside the moments.

Any function trains on such a model. `mpx.autocast` and the gradient functions
dequantize their arguments, and gradients are those of the dequantized values, in the
dtype of the original weight. A product under a recipe whose weights have one scale and
the same format reads the payload directly, without dequantizing or quantizing (see the
last section). Other recipes quantize the values again.

A weight with one scale is written with a scale that is known before the step, so that
the optimizer's kernel writes it:

$$s = 2^{\lfloor \log_2(\mathrm{MAX} / 4 a) \rfloor}, \qquad
a = \max |m| \text{ two steps before}$$

A power of two, so that values do not depend on the scale: E4M3 rounds all values above
2^-11 of the largest to the same number of digits under any of these scales.

Sharp edges:

- A value that grows to more than four times `a` in two steps saturates until the scale
  has followed; its master keeps it.
- Only `mpx.master_weights` can update them: 8 bits are too coarse for a step.
- JAX's own gradient functions raise; they would give zeros, in 8 bits.
- `jax.tree.map` may move its arrays, not compute with them: average
  `dequantize_weights(model)`, or the masters. Anything else raises.
- A stored weight is not an array, and arithmetic on it raises; for functions that mpx
  does not call, `dequantize_weights` gives arrays.
"""

import contextlib
import dataclasses
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.tree_util import KeyPath
from jaxtyping import Array, PyTree

from ._base.errors import at_path, describe, listing, warn_user
from ._base.tree import Guard, Whole, is_float_leaf, is_whole, path_text
from ._base.typing import LeafPredicate
from ._nnx_graph import is_nnx_module
from ._quantize import (
    QuantizedArray,
    Quantizer,
    Stored,
    TensorQuantizer,
    quantize,
)
from ._settings import Payloads as Payloads, unkeyed, with_unkeyed

# --- Flax: register classes that `flax.serialization` writes as their arrays ----------
#
# Flax raises for unregistered classes. So they are registered where such objects are
# made, if the program has imported Flax by then; mpx never imports it.


def register_with_flax(*classes: type) -> None:
    """Registers classes with Flax, if it is imported; may be called repeatedly."""
    serialization: Any = sys.modules.get("flax.serialization")
    register = getattr(serialization, "register_serialization_state", None)
    if register is None:  # not imported, or only in part
        return
    for cls in classes:
        register(cls, _written, _restored, override=True)


def _written(node: PyTree) -> dict[str, object]:
    return {str(i): leaf for i, leaf in enumerate(jax.tree.leaves(node))}


def _restored(target: PyTree, state: Any) -> PyTree:
    leaves, tree = jax.tree.flatten(target)
    found = [state.get(str(i)) for i in range(len(leaves))]
    types = [
        [(x.shape, x.dtype) for x in xs if x is not None] for xs in (leaves, found)
    ]
    if len(state) != len(leaves) or types[0] != types[1]:
        raise ValueError(
            f"`flax.serialization.from_state_dict(target, state)`: {describe(target)} "
            "must be stored as in the state. Make the target like the saved one, by "
            "`mpx.quantization.quantize_weights(model, quantizer)` or "
            "`mpx.compress_state(optimizer).init(params)`."
        )
    return jax.tree.unflatten(tree, found)


# --- Stored weights -------------------------------------------------------------------

_CALL = "`mpx.quantization.quantize_weights(model, quantizer, ...)`"
_FLOAT32 = np.dtype("float32")
# A written weight has room for values this many times as large as the largest of its
# master two steps before, and a little more, as scales are powers of two.
# unsure: a weight that grows by more than 4 times in two steps saturates; not searched
# for
_ROOM = 4.0
# Replaces the largest magnitude of an all-zero master: E4M3 then represents values up
# to 0.4 and down to 4e-6 (2e-6 with three digits less).
# unsure: guesses the size of a weight that starts at zero
_OF_ZEROS = 0.1


class Range(NamedTuple):
    """The inputs of a weight's scale that are known before the weight is written.

    Attributes:
        amax: The largest finite magnitude of the master before the step.
        inverse_scale: That of the weight which the step wrote. A weight with another
            one was not written by the optimizer.
    """

    amax: Array
    inverse_scale: Array


class StoredWeight(Whole):
    """A weight in 8 bits, an immutable PyTree, made by `quantize_weights`.

    It supports jit, donation, sharding and checkpoints like its arrays. It has no
    arithmetic: `mpx.autocast`, the gradient functions and
    `mpx.quantization.dequantize_weights` convert it to an array.

    Attributes:
        quantized: Payload and scales.
        quantizer: The quantizer that made them, used again after the next step (with
            one scale for all, only its format is used, with a scale known before the
            step).
        axis: The axis that blocks are along.
    """

    quantized: QuantizedArray
    quantizer: Quantizer = eqx.field(static=True)
    axis: int = eqx.field(static=True, default=-1)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weight."""
        return self.quantized.shape

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return self.quantized.ndim

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the weight before quantization, and of its gradient."""
        return self.quantized.dtype

    @property
    def nbytes(self) -> int:
        """The bytes of payload and scales together."""
        return self.quantized.nbytes

    def dequantize(self) -> Array:
        """Returns the weight as an array of `dtype`; do not differentiate it."""
        payload = _refuse_derivative(self.quantized.payload)
        return dataclasses.replace(self.quantized, payload=payload).dequantize()

    def _words(self) -> str:
        return (
            f"A stored weight, {self.dtype}{list(self.shape)} in 8 bits, does not "
            "support arithmetic. Use it in autocast functions, or convert it: "
            "`mpx.quantization.dequantize_weights(model)`; to train, use "
            "`mpx.filter_value_and_grad` and `mpx.master_weights(optimizer)`."
        )

    def _range(self, master: Array) -> Range | None:
        """Returns what `_with` needs in the next step; computed as the master is read.

        Args:
            master: In float32, as it was before the step.
        """
        if self.quantizer.block_dimensions:
            return None
        sizes = jnp.abs(master)
        amax = jnp.max(jnp.where(sizes < jnp.inf, sizes, 0.0), initial=0.0)
        return Range(amax, self.quantized.inverse_scale)

    def _scale(self, known: Range | None) -> Array | None:
        """Returns the scale to write the next weight with; None: from its own values.

        A power of two, so that a value is rounded to the same one under any of them.
        """
        if known is None or self.quantizer.block_dimensions:
            return None
        largest = self.quantizer.format.largest
        limit = largest * self.quantized.inverse_scale
        amax = jnp.where(self._is_written(known), known.amax, limit)
        amax = jnp.where(amax > 0, amax, _OF_ZEROS)
        amax = _ROOM * jnp.maximum(amax, self.quantizer.amax_epsilon)
        rounded = dataclasses.replace(
            self.quantizer, scales="power of two", amax_epsilon=0.0
        )
        return rounded._scale(jnp.minimum(amax, jnp.finfo(_FLOAT32).max))

    def _with(self, x: Array, known: Range | None = None) -> "StoredWeight":
        """Returns a weight that is stored in the same way, from float32 values.

        Args:
            x: The values. Those beyond the range become the largest of the format.
            known: Sets the scale, so that no operation waits for all of `x`; None: the
                scale is computed from `x`.
        """
        scale = self._scale(known)
        quantized = quantize(x, self.quantizer, axis=self.axis, scale=scale)
        guard = self.quantized.guard
        quantized = dataclasses.replace(quantized, dtype=self.dtype, guard=guard)
        return StoredWeight(quantized, self.quantizer, self.axis)

    def _full(self) -> Array:
        """Returns the stored values, in float32."""
        return dataclasses.replace(self.quantized, dtype=_FLOAT32).dequantize()

    def _is_written(self, known: Range) -> Array:
        """Returns whether the optimizer wrote this weight."""
        return self.quantized.inverse_scale == known.inverse_scale

    def _is_rounded(self, x: Array, known: Range | None = None) -> Array:
        """Returns whether float32 values are within the rounding of the stored ones.

        In a weight that the optimizer wrote, the largest value of the format also
        matches larger ones.

        The bits are not compared: a compiler that divides differently for the scale
        would change all of them.
        """
        payload, number = self.quantized.payload, self._full()
        ones = dataclasses.replace(
            self.quantized, payload=jnp.ones_like(payload), dtype=_FLOAT32
        )
        digits = jnp.finfo(payload.dtype).nmant
        smallest = self.quantized.format.smallest_normal * 2.0**-digits
        relative = jnp.maximum(jnp.abs(x), jnp.abs(number)) * 2.0 ** -(digits + 1)
        absolute = ones.dequantize() * (smallest / 2)
        # Slightly more, for the rounding of the scales.
        is_near = jnp.abs(x - number) <= jnp.maximum(relative, absolute) * (1 + 2**-10)
        if known is None:
            return is_near
        is_cut = jnp.abs(payload.astype(_FLOAT32)) == self.quantized.format.largest
        is_beyond = (jnp.abs(x) > jnp.abs(number)) & (jnp.sign(x) == jnp.sign(number))
        return is_near | (is_cut & is_beyond & self._is_written(known))


@jax.custom_jvp
def _refuse_derivative(payload: Array) -> Array:
    return payload


@_refuse_derivative.defjvp
def _refuse_derivative_rule(primals: PyTree, tangents: PyTree) -> PyTree:
    raise TypeError(
        "A stored weight has no derivative: numbers of 8 bits have no useful "
        "tangents. Use `mpx.filter_grad` or the like, which differentiate with "
        "respect to the dequantized weight, or `jax.grad` of a function of "
        "`mpx.quantization.dequantize_weights(model)`."
    )


def is_stored(node: object) -> bool:
    """Returns whether a node of a tree is a weight in 8 bits."""
    return isinstance(node, StoredWeight)


def quantize_weights(
    model: PyTree,
    quantizer: Quantizer | None = None,
    *,
    where: LeafPredicate | None = None,
    axis: int = -1,
) -> PyTree:
    r"""Quantizes weights of a model to 8 bits, to store them so.

    $$p = \operatorname{quantize}(w)$$

    Args:
        model: Any PyTree.
        quantizer: `mpx.quantization.TensorQuantizer` (the default, in E4M3),
            `mpx.quantization.BlockQuantizer` or `mpx.quantization.MXFP8Quantizer`,
            without stochastic rounding.
        where: Stores the float leaves for which `where(path, leaf)` is True, with a
            path such as `layers[0].weight`. By default all with two axes or more,
            embeddings included.
        axis: The axis that blocks are along, as in `mpx.quantization.quantize`.

    Returns:
        The model with a `mpx.quantization.StoredWeight` in place of each such leaf.
        Autocast functions and the gradient functions accept it; its gradients are
        arrays. To update it, wrap the optimizer in `mpx.master_weights`.

    Raises:
        TypeError: `quantizer` is not a quantizer, `where` is not a function, or the
            model is a Flax NNX module (pass its state from `nnx.split` instead).
        ValueError: The quantizer does not have 8 bits or rounds stochastically; an axis
            is not divisible into its blocks; or there is nothing to store.

    An infinity or a NaN becomes NaN, with its block if it has one. Numbers below
    2^-126, which are subnormal in float32, become 0; a warning names weights without
    larger ones. Stored weights are unchanged.

    Examples:
        >>> import jax.numpy as jnp, mpx
        >>> model = {"w": jnp.eye(64), "b": jnp.zeros(64)}
        >>> stored = mpx.quantization.quantize_weights(model)
        >>> stored["w"].nbytes, stored["w"].quantized.payload.dtype
        (4100, dtype(float8_e4m3fn))
        >>> mpx.quantization.dequantize_weights(stored)["w"].dtype
        dtype('float32')
    """
    quantizer = TensorQuantizer() if quantizer is None else quantizer
    _check(quantizer, where)
    register_with_flax(StoredWeight, QuantizedArray, Guard)
    found = False
    lost: list[str] = []

    def store(path: KeyPath, leaf: PyTree) -> PyTree:
        nonlocal found
        found |= is_stored(leaf)
        if is_nnx_module(leaf):
            raise TypeError(
                f"{_CALL} got {describe(leaf)}, a Flax NNX object, which changes in "
                "place. Split it, and store its parameters: `graphdef, params, rest "
                "= nnx.split(model, nnx.Param, ...)`."
            )
        if not is_float_leaf(leaf):
            return leaf
        is_meant = leaf.ndim > 1 if where is None else where(path_text(path), leaf)
        if not is_meant:
            return leaf
        found = True
        try:
            quantized = quantize(leaf, quantizer, axis=axis)
        except ValueError as error:
            raise ValueError(f"{_CALL}{at_path(path_text(path))}: {error}") from error
        if _is_subnormal(leaf):
            lost.append(path_text(path) or "model")
        return StoredWeight(quantized, quantizer, axis)

    stored = jax.tree_util.tree_map_with_path(store, model, is_leaf=_is_leaf)
    if not found:
        which = "with two axes or more" if where is None else "that `where` names"
        raise ValueError(f"{_CALL} found no float array {which}.")
    if lost:
        warn_user(
            f"{_CALL} stores zeros for {listing(lost)}: all numbers there are below "
            "2^-126, subnormal in float32, for which there is no scale. Exclude "
            "them by `where=`, or multiply them by a constant first."
        )
    return stored


def dequantize_weights(model: PyTree) -> PyTree:
    """Converts weights that are stored in 8 bits back to arrays.

    Args:
        model: Any PyTree.

    Returns:
        The tree with an array of the original dtype in place of each
        `mpx.quantization.StoredWeight`; the same object if it has none. Flax NNX
        modules, which change in place, are unchanged.

    Examples:
        >>> import jax.numpy as jnp, mpx
        >>> from mpx.quantization import dequantize_weights, quantize_weights
        >>> stored = quantize_weights(jnp.array([[1.0, 0.3], [2.0, -4.0]]))
        >>> dequantize_weights(stored).round(3).tolist()
        [[1.0, 0.286...], [2.0, -4.0]]
    """
    if not any(map(is_stored, jax.tree.leaves(model, is_leaf=_is_leaf))):
        return model
    return jax.tree.map(
        lambda node: node.dequantize() if is_stored(node) else node,
        model,
        is_leaf=_is_leaf,
    )


def _is_subnormal(x: Array | np.ndarray) -> bool:
    """Returns whether the largest magnitude of an array is subnormal in float32."""
    if isinstance(x, Tracer | jax.ShapeDtypeStruct) or not x.size:
        return False
    x = jnp.asarray(x)
    dtype, smallest = x.dtype, jnp.finfo(jnp.float32).smallest_normal
    if jnp.finfo(dtype).smallest_normal > smallest:  # all of float16 are normal there
        return False
    # By their bits, which have the same order: XLA treats subnormal values as zeros.
    unsigned = np.dtype(f"uint{8 * dtype.itemsize}")
    bits = jax.lax.bitcast_convert_type(x, unsigned)
    magnitudes = bits & np.array(np.iinfo(unsigned).max >> 1, unsigned)
    limit = np.asarray(smallest, dtype).view(unsigned)
    return 0 < int(jnp.max(magnitudes)) < int(limit)


def _is_leaf(node: object) -> bool:
    return is_whole(node) or is_nnx_module(node)


def _check(quantizer: object, where: object) -> None:
    if not isinstance(quantizer, Quantizer):
        raise TypeError(
            f"`quantizer` of {_CALL} must be a quantizer such as "
            f"`mpx.quantization.TensorQuantizer()`; got {describe(quantizer)}."
        )
    fits = quantizer.format.has_nan and quantizer.scale_from == "amax"
    if not fits or quantizer.stochastic_rounding or quantizer.hadamard:
        raise ValueError(
            f"`quantizer` of {_CALL} must be of FP8 with scales of the weight, and "
            "round to nearest; got "
            f"{quantizer}. Use `mpx.quantization.TensorQuantizer()`."
        )
    if where is not None and not callable(where):
        raise TypeError(
            f"`where` of {_CALL} must be a function `where(path, leaf) -> bool`; got "
            f"{describe(where)}."
        )


# --- Payloads: the 8 bits of dequantized arrays, for products that can read them ------
#
# Functions compute with arrays, so a stored weight is dequantized when a function is
# called. A product under a recipe of the same format reads the payload and its one
# inverse scale instead; the array is then unused, and never made under `jax.jit`. Its
# gradient still goes to the array.
#
# An array and its payload are paired by the identity of the array, from the gradient
# function, which dequantizes and differentiates, to the autocast function in it.
#
# Sharp edge: a trace in between (`jax.jit`, `jax.checkpoint` or `jax.shard_map` around
# the autocast function, inside of the gradient function) makes new arrays without a
# known payload: a recipe quantizes them like other weights.


def dequantized(tree: PyTree) -> tuple[PyTree, Payloads]:
    """Returns a tree with arrays for stored weights, and the known payloads.

    Args:
        tree: Any PyTree.

    Returns:
        The result of `dequantize_weights`, and the payloads of arrays with one scale:
            those of `tree` and those set by `reading`.
    """
    arrays = dequantize_weights(tree)
    known = unkeyed().payloads
    if arrays is tree:
        return tree, known
    pairs = zip(
        jax.tree.leaves(tree, is_leaf=is_whole),
        jax.tree.leaves(arrays, is_leaf=is_whole),
        strict=True,
    )
    own = {
        id(array): (array, dataclasses.replace(node.quantized, guard=None))
        for node, array in pairs
        if is_stored(node) and _has_one_scale(node.quantized)
    }
    return arrays, {**known, **own}


def reading(payloads: Payloads) -> contextlib.AbstractContextManager[None]:
    """Makes these payloads known to autocast functions that are called inside."""
    return with_unkeyed(payloads=payloads)


def standing_for(
    arrays: PyTree, others: PyTree
) -> contextlib.AbstractContextManager[None]:
    """Gives arrays, such as tracers of a derivative, the payloads of other arrays.

    Args:
        arrays: The arrays, as a function gets them.
        others: Arrays of the same structure, whose payloads may be known.
    """
    known = unkeyed().payloads
    if not known:
        return contextlib.nullcontext()
    pairs = zip(jax.tree.leaves(arrays), jax.tree.leaves(others), strict=True)
    more = {
        id(array): (array, known[id(other)][1])
        for array, other in pairs
        if id(other) in known
    }
    return reading({**known, **more})


def payload_of(array: object, payloads: Mapping[int, Any]) -> Stored | None:
    """Returns the payload of an array; None if unknown."""
    found = payloads.get(id(array))
    return None if found is None else found[1]


def _has_one_scale(quantized: QuantizedArray) -> bool:
    is_whole = not quantized.axes and quantized.tensor_inverse_scale is None
    return is_whole and not quantized.inverse_scale.shape
