r"""Master weights in the optimizer, for models whose own weights are half precision.

The model stores $p$ (bfloat16, float16, or 8 bits, see
`mpx.quantization.quantize_weights`), the optimizer's state stores the *masters* $m$
(float32) beside its moments, and after every step

$$p = \operatorname{round}(m)$$

bit for bit (in 8 bits by their scale). No array $u$ can achieve that: an Optax
transformation returns an *update* $u$, and its caller computes $p + u$. Optax computes
the sum in the promoted dtype and casts; Equinox does not cast, so a float32 update
makes the model float32. In half precision a sum does not reach every number: from 1,
the only one that bfloat16 reaches below $2^{-8}$ is zero. So an update is a
`NewWeight`, an object for which `p + u` returns the new weight unchanged.

Sharp edges:

- A `NewWeight` is not an array: put `master_weights` outermost (or last in a chain),
  and transformations of updates (clipping, schedules, `mpx.skip_nonfinite`,
  `optax.MultiSteps`) inside it. Apply the updates in the function that computed them,
  not outside its `jit`.
- A weight that differs from its rounded master was changed from outside, and takes
  precedence: the master restarts from it. So a model that was loaded without its
  optimizer's state, or a clipped weight, is never silently overwritten.
- The inner optimizer gets float32: masters, gradients, and moments made from them.
"""

import functools
import itertools
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import KeyPath
from jaxtyping import Array, PyTree

from .._base.errors import at_path, describe
from .._base.tree import path_text, select_tree
from .._base.typing import AnyArray, BoolScalar
from .._step import Transformation, refuse_optimizer, was_skipped
from .._stored_weights import Range, StoredWeight, is_stored
from ._codes import widened
from ._small_weights import (
    CALL,
    NewWeight,
    SmallWeights,
    SmallWeightsState,
    full_weight,
    has_master,
    is_leaf,
    map_weights,
    moved,
    refuse_masters,
    refuse_no_weights,
    values_of,
)


class MasterWeightsState(NamedTuple):
    """The state of `master_weights`.

    Attributes:
        masters: Like the weights, in float32; None for weights without a master. For
            the whole model see `full_weights`.
        inner_state: The state of the inner optimizer.
        ranges: For each weight in 8 bits with one scale, the two numbers from which the
            next scale is computed; None for other weights.
    """

    masters: PyTree
    inner_state: PyTree
    ranges: PyTree


def master_weights(
    optimizer: Any, *, bits: Literal[32, 16, 8, 0] = 32
) -> Transformation:
    r"""Wraps an Optax transformation to keep float32 masters of narrower weights.

    $$m \leftarrow m + u, \quad p \leftarrow \operatorname{round}(m) \qquad
        (u, o') = \operatorname{update}(\text{float32}(g), o, m)$$

    For models whose weights $p$ are bfloat16 or float16: they need no cast in the
    forward pass, and half the bytes where they are gathered. Also for weights stored in
    8 bits by `mpx.quantization.quantize_weights`. Without masters, a bfloat16 weight
    stops changing once its updates are below $2^{-9}$ of it.

    Args:
        optimizer: An Optax transformation.
        bits: The number of bits stored beside each weight. 32 (the default): a float32
            copy. For bfloat16 weights only, 16: the bits that bfloat16 omits, which
            with the weight are exactly the float32 master; 8: the upper ones of them,
            rounded stochastically; 0: nothing, the weight itself is rounded
            stochastically. See below.

    Returns:
        A pair `(init, update)` to use as an Optax transformation, the outermost one or
        the last of a chain, also in `optax.multi_transform` and `optax.masked`.
        `init(params, masters)` starts from full-precision weights (with `bits=0`, which
        keeps nothing of them, it warns); without `masters`, masters have the values of
        `params`. The state has `masters` (float32, like the
        weights) and `inner_state`. Apply the updates with `optax.apply_updates`,
        `eqx.apply_updates`, `mpx.optimizer_update` or `mpx.optimizer_step`: the weights
        are then the rounded masters, bit for bit.

    Raises:
        TypeError: `optimizer` has no `init` and `update`; in `update`, the state has
            other `bits`.
        ValueError: `bits` is not 32, 16, 8 or 0. In `update`: `params` is missing, or
            the weights do not have the structure, shapes and dtypes that `init` got. In
            `init`: `masters` do not; or weights are float16 or 8 bits and `bits` is not
            32.

    - Weights of other dtypes (float32, float64, complex) have no copy: their master is
      None, and their updates are those of `optimizer`. Leaves that are None stay None.
    - Extra arguments are passed unchanged to `optimizer.update`.
    - A weight that differs from its rounded master was changed from outside (loaded,
      clipped): its master restarts from it, element by element. In 8 bits a change
      within the rounding error is not detected.
    - A skipped step leaves masters and weights unchanged. (On TPUs, a NaN that this
      optimizer did not write may become another NaN, and a subnormal number 0.) Put
      `mpx.skip_nonfinite` inside: `mpx.master_weights(mpx.skip_nonfinite(optimizer))`.
    - Weights in 8 bits with one scale (`mpx.quantization.TensorQuantizer`) are written
      with a scale known before the step: the power of two that leaves room for 4 to 8
      times the largest master of two steps before. Larger values saturate, and their
      masters keep them. An infinity or a NaN becomes NaN. A weight with another scale
      than the previous step wrote counts as changed from outside, and its own scale is
      used.
    - A master beyond the range of the weight's dtype gives an infinite weight;
      `check_update` of `mpx.optimizer_step` skips such a step.

    With fewer `bits` the state has no `masters`, and

    $$\operatorname{bits}(m) = 2^{16} \operatorname{bits}(p) + r, \qquad
        -2^{15} \le r < 2^{15}$$

    - `bits=16` stores $r$: 4 bytes a weight instead of 6. Weights and their movement
      are those of float32 masters, except that $p$ rounds ties away from zero.
    - `bits=8` stores $r$ in steps of 256, `bits=0` nothing. $m$ is rounded to one of
      its two neighbours, up with the probability of its distance from the lower one, so
      its mean is exact. The noise is a hash of the step's number, the weight's path and
      the index in it: the same on any number of devices, and after a restart. Steps are
      counted from a hash of the weights, so members of a `jax.vmap` that start from
      other weights have other noise. Inside `shard_map` the index is that in the shard,
      whose number is hashed, too.
    - A weight changed from outside is used unchanged. The bits stored beside it stay;
      they are less than half of the distance to its neighbour. Zeros stay zeros.
    - Infinities and NaN are unchanged. Numbers too large for a finite bfloat16 give an
      infinite weight; with `bits=0`, the largest finite one.

    Examples:
        >>> import jax.numpy as jnp, mpx, optax
        >>> weights = jnp.ones(2, jnp.bfloat16)
        >>> tx = mpx.master_weights(optax.sgd(1e-3))
        >>> state = tx.init(weights)
        >>> for _ in range(3):
        ...     updates, state = tx.update(jnp.ones(2), state, weights)
        ...     weights = optax.apply_updates(weights, updates)
        >>> state.masters
        Array([0.99700004, 0.99700004], dtype=float32)
        >>> weights
        Array([0.996094, 0.996094], dtype=bfloat16)
    """
    refuse_optimizer(optimizer, CALL)
    if isinstance(bits, bool) or bits not in (32, 16, 8, 0):
        raise ValueError(f"`bits` of {CALL} must be 32, 16, 8 or 0; got {bits!r}.")
    if bits != 32:
        small = SmallWeights(optimizer, bits)
        return Transformation(small.init, small.update)

    def init(params: PyTree, masters: PyTree | None = None) -> MasterWeightsState:
        given = params if masters is None else masters
        refuse_masters(params, given)
        masters = map_weights(_master, params, given)
        inner = optimizer.init(_inner_weights(masters, params))
        return MasterWeightsState(masters, inner, map_weights(_range, masters, params))

    def update(
        updates: PyTree,
        state: MasterWeightsState,
        params: PyTree | None = None,
        **extra_args: PyTree,
    ) -> tuple[PyTree, MasterWeightsState]:
        _refuse_weights(state.masters, params)
        masters = map_weights(_followed, state.masters, params, state.ranges)
        updates, inner = optimizer.update(
            map_weights(widened, updates),
            state.inner_state,
            _inner_weights(masters, params),
            **extra_args,
        )
        new_masters = map_weights(moved, masters, updates)
        written = map_weights(_written, new_masters, updates, params, state.ranges)
        # From the masters before the step: ranges of those after it could not be
        # computed in the kernel that computes them.
        ranges = map_weights(_range, masters, written)
        skipped = was_skipped(state.inner_state, inner)
        if skipped is not None:
            written = map_weights(functools.partial(_kept, skipped), written, params)
            ranges = select_tree(skipped, state.ranges, ranges)
        rest = new_masters, masters, state.masters, state.ranges
        make = functools.partial(_update, skipped)
        new = map_weights(make, written, updates, params, *rest)
        return new, MasterWeightsState(new_masters, inner, ranges)

    return Transformation(init, update)


def full_weights(model: PyTree, opt_state: PyTree) -> PyTree:
    """Returns a model with weights replaced by their float32 masters.

    Use it where full precision is needed: for a running average, or a checkpoint to
    continue from in another precision. `masters` itself has None for float32 biases and
    norms, which frameworks treat as a layer without them.

    Args:
        model: The model, or its parameters, as passed to the optimizer's `init`; leaves
            that are not weights are unchanged.
        opt_state: The optimizer's state, which contains that of `master_weights`
            anywhere: in a chain, a `MultiSteps`, several in `optax.multi_transform`.

    Returns:
        The model, with all weights in float32: their masters, and the values of frozen
        weights, which have none (`optax.partition`, `optax.masked`, None in `init`).

    Raises:
        ValueError: The state does not know a weight in half precision or in 8 bits, has
            no master at all, or one of another shape.

    Examples:
        >>> import jax, jax.numpy as jnp, mpx, optax
        >>> model = {"w": jnp.ones(2, jnp.bfloat16), "bias": jnp.zeros(1)}
        >>> tx = mpx.master_weights(optax.adam(1e-3))
        >>> whole = mpx.full_weights(model, tx.init(model))
        >>> whole["w"].dtype, whole["bias"].dtype
        (dtype('float32'), dtype('float32'))
    """
    kinds = MasterWeightsState, SmallWeightsState
    is_state = lambda node: isinstance(node, kinds)  # noqa: E731
    states = list(filter(is_state, jax.tree.leaves(opt_state, is_leaf=is_state)))
    masters: dict[tuple[str, ...], Any] = {}
    without: set[tuple[str, ...]] = set()
    for state in states:
        found = jax.tree_util.tree_leaves_with_path(_kept_by(state), is_leaf=_is_empty)
        for path, master in found:
            place = (*map(str, path),)
            if _is_empty(master):
                without.add(place)
            else:
                masters[place] = master
    knows_weights = bool(masters) or any(map(_keeps_nothing, states))

    def full(path: KeyPath, leaf: Any) -> Any:
        if not has_master(leaf):
            return leaf
        place = (*map(str, path),)
        master = masters.get(place)
        if master is None and knows_weights:
            if any(place[:n] in without for n in range(len(place) + 1)):
                return full_weight(values_of(leaf), None)
        if master is None or master.shape != leaf.shape:
            raise ValueError(
                "`mpx.full_weights(model, opt_state)` needs this model's state of "
                f"an optimizer with {CALL}; got "
                f"{describe(leaf)}{at_path(path_text(path))} with "
                f"{'no master' if master is None else describe(master)}."
            )
        return master if master.dtype == np.float32 else full_weight(leaf, master)

    return jax.tree_util.tree_map_with_path(full, model, is_leaf=is_stored)


def _kept_by(state: Any) -> PyTree:
    """Returns the masters or low bits of a state, as a tree like the weights."""
    if isinstance(state, MasterWeightsState):
        return state.masters
    (kept,) = state.low_bits.values()
    return kept


def _keeps_nothing(state: Any) -> bool:
    return isinstance(state, SmallWeightsState) and "none" in state.low_bits


def _is_empty(node: object) -> bool:
    """Returns whether a node, None or `optax.MaskedNode()`, replaces a master."""
    return node is None or (isinstance(node, tuple) and not node)


def _master(weight: object, given: PyTree) -> Array | None:
    if not has_master(weight):
        return None
    # A copy, so that the model and the state of its optimizer can both be donated.
    return jnp.array(values_of(given), jnp.float32)


def _inner_weights(masters: PyTree, params: PyTree) -> PyTree:
    """Returns the weights for the inner optimizer: masters, and weights without one."""

    def choose(master: object, weight: object) -> PyTree:
        return weight if master is None or weight is None else master

    return map_weights(choose, masters, params)


def _followed(master: Any, weight: Any, known: Range | None) -> Any:
    """Returns the master, and the weight where it is not the rounded master.

    It compares bits: that is exact, and XLA may remove a cast to half precision and
    back, but not one whose bits are read.
    """
    if master is None or weight is None:
        return master
    if isinstance(weight, StoredWeight):
        is_own = weight._is_rounded(master, known)
        return jnp.where(is_own, master, weight._full())
    is_own = _bits(master.astype(weight.dtype)) == _bits(weight)
    return jnp.where(is_own, master, jnp.asarray(weight, jnp.float32))


def _bits(weight: AnyArray) -> Array:
    return jax.lax.bitcast_convert_type(weight, jnp.uint16)


def _written(master: Any, update: object, weight: Any, known: Range | None) -> Any:
    """Returns the weight of a master; None if it has no master or no update.

    A stored weight without an update is returned unchanged.
    """
    if master is None or update is None or weight is None:
        return weight if is_stored(weight) else None
    if isinstance(weight, StoredWeight):
        return weight._with(master, known)
    return master.astype(weight.dtype)


def _range(master: Any, weight: Any) -> Range | None:
    return weight._range(master) if isinstance(weight, StoredWeight) else None


def _kept(skipped: BoolScalar, written: Any, weight: Any) -> Any:
    return select_tree(skipped, weight, written) if is_stored(written) else written


def _update(
    skipped: BoolScalar | None, written: Any, update: object, weight: Any, *rest: Any
) -> PyTree:
    if written is None or update is None or weight is None:
        return update
    master, followed, before, known = rest

    full = functools.partial(jax.lax.select, on_true=master, on_false=before)

    def by_master(number: int, apply: BoolScalar) -> Array:
        if not is_stored(weight):
            # Rounding `followed` gives the weight, but for another NaN.
            return jax.lax.select(apply, master, followed).astype(weight.dtype)
        chosen = weight._with(full(apply), known)
        kept = apply if skipped is None else apply & ~skipped
        return jax.tree.leaves(select_tree(kept, chosen, weight))[number]

    leaves, form = jax.tree.flatten(written)
    each = zip(leaves, jax.tree.leaves(weight), itertools.count(), strict=False)
    made = [NewWeight(a, b, full, functools.partial(by_master, i)) for a, b, i in each]
    return jax.tree.unflatten(form, made)


def _refuse_weights(masters: PyTree, params: PyTree | None) -> None:
    """Raises unless the weights have the structure, shapes and dtypes of `init`'s."""
    refuse_no_weights(params)
    structures = [jax.tree.structure(tree, is_leaf) for tree in (masters, params)]
    if structures[0] != structures[1]:
        raise ValueError(
            f"`update` of {CALL} needs weights of the structure passed to `init`; "
            "got\n"
            f"  masters: {structures[0]}\n"
            f"  weights: {structures[1]}\n"
            "Make a state with `init(params)` of this model."
        )
    pairs = zip(
        jax.tree_util.tree_leaves_with_path(params, is_leaf),
        jax.tree.leaves(masters, is_leaf=is_leaf),
        strict=True,
    )
    for (path, weight), master in pairs:
        fits = (
            not has_master(weight)
            if master is None
            else has_master(weight) and weight.shape == master.shape
        )
        if not fits and weight is not None:
            kept = "no master" if master is None else f"the master {describe(master)}"
            raise ValueError(
                f"`update` of {CALL} needs weights of the shapes and dtypes passed "
                f"to `init`; got {describe(weight)} for "
                f"{kept}{at_path(path_text(path))}. Make a new state with "
                "`init(params)`, or cast the model back."
            )
