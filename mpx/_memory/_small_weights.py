r"""bfloat16 weights with 16, 8 or no bits beside them, which move as float32 ones.

A bfloat16 is the upper half of a float32, so a float32 master has 16 bits more than its
weight, the *low bits*. With all 16 the master is exact; with 8 or none it is rounded
randomly, and its mean is exact. What float32 masters share is here, too: `NewWeight`,
an update that contains the new weight, and functions of trees of weights.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, NoReturn, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jaxtyping import Array, Float32, PyTree, UInt32

from .._base.errors import at_path, describe, warn_user
from .._base.jax_compat import varying_axes
from .._base.tree import is_float_leaf, path_text, select_tree
from .._base.typing import BoolScalar
from .._step import was_skipped
from .._stored_weights import is_stored
from ._codes import (
    Noise,
    bits_of,
    first_step,
    is_half_leaf,
    joined,
    round_randomly,
    split,
    widened,
)

# --- NewWeight ------------------------------------------------------------------------
#
# Optax transformations return an array to add to a weight. No such array can give a
# weight that is rounded by rules of its own or stored in two parts.

CALL = "`mpx.master_weights(optimizer)`"
_INSIDE = (
    "put transformations of updates (`optax.add_decayed_weights`, `clip`, "
    "`MultiSteps`, `mpx.skip_nonfinite`, noise) inside: "
    "`mpx.master_weights(optax.chain(...))`"
)


class NewWeight:
    """An update that contains the new weight: `weight + update` returns it.

    Args:
        value: The new weight.
        weight: The weight that it was computed for and must be added to.
        by_master: Returns the new weight, or the one before, from the master that is
            chosen; None if there is none.
        full: Returns the weight in float32, as the optimizer's state has it.
    """

    # numpy leaves the sum to this class, too.
    __array_ufunc__ = None
    __slots__ = ("_by_master", "_weight", "full", "value")

    def __init__(
        self, value: Array, weight: object, full: Any, by_master: Any = None
    ) -> None:
        self.value, self._weight, self._by_master = value, weight, by_master
        self.full = full

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weight."""
        return self.value.shape

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the weight."""
        return self.value.dtype

    def chosen(self, apply: BoolScalar) -> Array:
        """Returns the new weight, or the weight as it was if a step is skipped.

        XLA's compiler for TPUs computes the optimizer twice, and copies its state, if
        weights and masters are chosen separately. There `by_master` chooses.
        """
        keep = functools.partial(select_tree, a=self.value, b=self._weight)
        if self._by_master is None:
            return keep(apply)
        return lax.platform_dependent(apply, tpu=self._by_master, default=keep)

    def __radd__(self, weight: object) -> Array:
        return self._applied_to(weight)

    def __add__(self, weight: object) -> Array:
        return self._applied_to(weight)

    def __repr__(self) -> str:
        # JAX prints it in errors.
        return f"NewWeight({describe(self.value)}: {_INSIDE})"

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"An update of {CALL} has no {name!r}: {_INSIDE}.")

    def _applied_to(self, weight: Any) -> Array:
        if weight is self._weight or _are_equal(weight, self._weight):
            return self.value
        raise ValueError(
            f"An update of {CALL} contains the new value of a weight, and must be "
            f"added to that weight, {describe(self._weight)}; got "
            f"{describe(weight)}. Apply it before the weights are cast or changed, "
            f"and {_INSIDE}."
        )

    def _refused(self, *_: object) -> NoReturn:
        raise TypeError(
            f"An update of {CALL} does not support arithmetic: it contains the new "
            f"value of the weight. So {_INSIDE}."
        )

    __mul__ = __rmul__ = __sub__ = __rsub__ = __neg__ = __truediv__ = _refused
    __rtruediv__ = __pow__ = __abs__ = __lt__ = __gt__ = __le__ = __ge__ = _refused


def _are_equal(one: Any, other: Any) -> bool:
    """Returns whether two arrays are known to be bit-identical."""
    arrays = one, other
    if any(isinstance(x, Tracer) or not eqx.is_array(x) for x in arrays):
        return False
    if not all(x.is_fully_addressable for x in arrays):  # parts on other processes
        return False
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    a, b = map(np.asarray, arrays)
    return a.tobytes() == b.tobytes()


# --- Trees of weights and masters -----------------------------------------------------


def is_leaf(node: object) -> bool:
    """Returns whether a node of a tree of weights is one weight, or None."""
    return node is None or is_stored(node)


def has_master(weight: object) -> bool:
    """Returns whether a weight is narrower than float32, so that it has a master."""
    return is_stored(weight) or is_half_leaf(weight)


def map_weights(function: Callable[..., PyTree], *trees: PyTree) -> PyTree:
    """Maps over weights; a stored weight is one leaf, and so is None."""
    return jax.tree.map(function, *trees, is_leaf=is_leaf)


def values_of(weight: Any) -> Any:
    """Returns the values of a stored weight in float32, and others unchanged."""
    return weight._full() if is_stored(weight) else weight


def full_weight(weight: Any, low: Array | None) -> Any:
    """Returns a half-precision weight in float32, with its low bits if it has any.

    Other weights are returned unchanged.
    """
    if not is_half_leaf(weight):
        return weight
    if low is None:
        return jnp.asarray(weight, jnp.float32)
    if low.dtype == np.int8:
        low = low.astype(jnp.int16) << np.int16(8)
    return joined(weight, low)


def moved(master: Any, update: Any) -> Any:
    """Returns a master after its update, in its dtype; unchanged if either is None."""
    if master is None or update is None:
        return master
    return (master + widened(update)).astype(master.dtype)


def refuse_masters(params: PyTree, masters: PyTree) -> None:
    """Raises unless masters have the structure and shapes of the weights."""
    structures = [jax.tree.structure(tree, is_leaf) for tree in (params, masters)]
    if structures[0] != structures[1]:
        raise ValueError(
            f"`masters` in `init` of {CALL} must have the structure of `params`; "
            "got\n"
            f"  params: {structures[0]}\n"
            f"  masters: {structures[1]}"
        )
    leaves = jax.tree.leaves(masters, is_leaf=is_leaf)
    for (path, weight), given in zip(
        jax.tree_util.tree_leaves_with_path(params, is_leaf), leaves, strict=True
    ):
        is_float = is_stored(given) or is_float_leaf(given)
        if has_master(weight) and not (is_float and given.shape == weight.shape):
            raise ValueError(
                f"`masters` in `init` of {CALL} must have the shapes of `params`; "
                f"got {describe(given)} for "
                f"{describe(weight)}{at_path(path_text(path))}."
            )


def refuse_no_weights(params: PyTree | None) -> None:
    """Raises if an update got no weights."""
    if params is None:
        raise ValueError(
            f"`update` of {CALL} needs the weights: "
            "`optimizer.update(grads, state, params)`."
        )


# --- Low bits ------------------------------------------------------------------------

Bits: TypeAlias = Literal[16, 8, 0]
_DTYPES = {16: np.dtype(np.int16), 8: np.dtype(np.int8)}
# Names of low bits in a state. A template may cast a restored array, but with other
# bits it has another name, and does not fit.
_NAMES = {16: "int16", 8: "int8", 0: "none"}


class SmallWeightsState(NamedTuple):
    """The state of `master_weights` with `bits` below 32.

    Attributes:
        low_bits: One tree like the weights, by the dtype of its leaves: `"int16"`,
            `"int8"` or `"none"`. A leaf has the bits that bfloat16 omits from a weight;
            None where nothing is kept. For float32 weights see `full_weights`.
        inner_state: The state of the inner optimizer.
        step: The number of the next step that draws noise, counted from a hash of the
            weights; None with 16 bits, which draw none.
    """

    low_bits: dict[str, PyTree]
    inner_state: PyTree
    step: UInt32[Array, ""] | None


class SmallWeights:
    """The `init` and `update` of `master_weights` with `bits` below 32."""

    def __init__(self, optimizer: Any, bits: Bits) -> None:
        self._optimizer, self._bits = optimizer, bits

    def init(self, params: PyTree, masters: PyTree | None = None) -> SmallWeightsState:
        """Returns the first state; `masters` are the weights in float32, if known."""
        given = params if masters is None else masters
        refuse_masters(params, given)
        low = map_weights(self._start, _paths(params), params, given)
        if not self._bits and masters is not None:
            self._warn_of_masters(params, masters)
        step = None if self._bits == 16 else first_step(given)
        inner = self._optimizer.init(map_weights(full_weight, params, low))
        return SmallWeightsState({_NAMES[self._bits]: low}, inner, step)

    def _warn_of_masters(self, params: PyTree, masters: PyTree) -> None:
        def is_lost(weight: Any, master: Any) -> bool:
            if not is_half_leaf(weight):
                return False
            is_other = jnp.asarray(weight, jnp.float32) != values_of(master)
            return isinstance(is_other, Tracer) or bool(jnp.any(is_other))

        if any(jax.tree.leaves(map_weights(is_lost, params, masters))):
            warn_user(
                f"`init(params, masters)` of {CALL} with bits=0 starts from `params`: "
                "nothing is kept beside them, and what bfloat16 leaves out of "
                "`masters` is lost, up to 1/512 of each. `bits=8` keeps 1/65,536, "
                "`bits=16` all; without `masters` nothing is said."
            )

    def _start(self, path: str, weight: Any, master: Any) -> Array | None:
        """Returns the low bits of a weight with this master, None if it has none."""
        is_float16 = is_half_leaf(weight) and weight.dtype != jnp.bfloat16
        if is_float16 or is_stored(weight):
            raise ValueError(
                f"`bits={self._bits}` of {CALL} needs bfloat16 for weights below "
                f"float32; got {describe(weight)}{at_path(path)}. Make it "
                "bfloat16, or use float32 masters, `bits=32`."
            )
        if not is_half_leaf(weight):
            return None
        return self._difference(weight, jnp.asarray(values_of(master), jnp.float32))

    def update(
        self,
        updates: PyTree,
        state: SmallWeightsState,
        params: PyTree | None = None,
        **extra_args: PyTree,
    ) -> tuple[PyTree, SmallWeightsState]:
        """Returns the new weights, as updates, and the new state."""
        low_bits = self._low_bits(state, params)
        full = map_weights(full_weight, params, low_bits)
        updates, inner = self._optimizer.update(
            map_weights(widened, updates), state.inner_state, full, **extra_args
        )
        skipped = was_skipped(state.inner_state, inner)
        step = state.step

        def write(path: str, weight: Any, master: Any, update: Any, low: Any) -> Any:
            if not is_half_leaf(weight) or update is None:
                return _Written(update, low)
            new, kept = self._split(moved(master, update), path, step)
            if skipped is not None:
                new, kept = select_tree(skipped, (weight, low), (new, kept))
            return _Written(NewWeight(new, weight, lambda _: widened(new)), kept)

        written = map_weights(write, _paths(params), params, full, updates, low_bits)
        if step is not None:
            after = step + jnp.uint32(1)
            step = after if skipped is None else jnp.where(skipped, step, after)
        pick = lambda i: jax.tree.map(lambda x: x[i], written, is_leaf=_is_written)  # noqa: E731
        return pick(0), SmallWeightsState({_NAMES[self._bits]: pick(1)}, inner, step)

    def _split(
        self, master: Float32[Array, "..."], path: str, step: Array | None
    ) -> tuple[Array, Array | None]:
        """Returns the weight and the low bits of a master."""
        if step is not None:
            noise = Noise(step, f"weight {path}", varying_axes(master))
            master = round_randomly(master, 16 - self._bits, noise)
        weight, low = split(master)
        if self._bits == 16:
            return weight, low
        return weight, (low >> np.int16(8)).astype(jnp.int8) if self._bits else None

    def _difference(self, weight: Array, master: Float32[Array, "..."]) -> Array | None:
        """Returns the low bits; zero where the weight is not the master's nearest."""
        if not self._bits:
            return None
        shift = 16 - self._bits
        # 8 bits are rounded to the nearest; 16 are exact.
        rest = bits_of(master) + np.uint32((1 << shift) >> 1)
        rest = rest - bits_of(jnp.asarray(weight, jnp.float32))
        rest = lax.bitcast_convert_type(rest, jnp.int32) >> np.int32(shift)
        half = 1 << (self._bits - 1)
        is_near = (rest >= -half) & (rest <= half) & jnp.isfinite(master)
        kept = jnp.where(is_near, jnp.minimum(rest, half - 1), 0)
        return kept.astype(_DTYPES[self._bits])

    def _low_bits(self, state: Any, params: PyTree | None) -> PyTree:
        """Returns the low bits of a state, checked to be those of these weights.

        Raises:
            TypeError: The state is that of another transformation.
            ValueError: The state is that of other bits or other weights.
        """
        if not isinstance(state, SmallWeightsState):
            raise TypeError(
                f"`update` of {CALL} with bits={self._bits} needs the state from its "
                f"`init`; got {describe(state)}. To start from another one: "
                "`init(params, mpx.full_weights(params, other_state))`."
            )
        refuse_no_weights(params)
        name, found = _NAMES[self._bits], state.low_bits
        if not isinstance(found, Mapping) or [*found] != [name]:
            kept = [*found] if isinstance(found, Mapping) else describe(found)
            raise ValueError(
                f"`update` of {CALL} with bits={self._bits} needs a state whose "
                f"`low_bits` has the one key {name!r}; got {kept}. To start from other "
                "bits: `init(params, mpx.full_weights(params, other_state))`. To a "
                "state that was saved without a key, add it: "
                f"`state._replace(low_bits={{{name!r}: state.low_bits}})`."
            )
        low_bits = found[name]
        start = functools.partial(map_weights, self._start, _paths(params))
        made = jax.eval_shape(lambda p: start(p, p), params)
        wanted, found = (
            {path_text(path): (leaf.shape, leaf.dtype) for path, leaf in leaves}
            for leaves in map(jax.tree_util.tree_leaves_with_path, (made, low_bits))
        )
        if wanted != found:
            path = min(p for p in wanted | found if wanted.get(p) != found.get(p))
            raise ValueError(
                f"`update` of {CALL} with bits={self._bits} needs the weights passed "
                "to `init` and the state from it; the state of the "
                f"weight{at_path(path)} must be {wanted.get(path, 'missing')}; got "
                f"{found.get(path, 'missing')}. Make a new state with "
                "`init(params)`, or cast the model back."
            )
        return low_bits


class _Written(NamedTuple):
    """A step's update of a weight, and the new low bits beside it."""

    update: Any
    low: Any


def _is_written(node: object) -> bool:
    return isinstance(node, _Written)


def _paths(params: PyTree) -> PyTree:
    """Returns a tree like the weights of their paths."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: path_text(path), params, is_leaf=is_leaf
    )
