r"""Any Optax transformation, with a state in 8 and 16 bits (`compress_state`).

The state of the inner transformation is stored in few bits between steps, and passed to
it in float32. Which arrays may become negative, and to which updates only add, is
proved from its program when the state is made (`_intervals`). From then on it is part
of the state (`CompressedArray.code`), where each step reads it.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.tree_util import KeyPath
from jaxtyping import Array, PyTree, UInt32

from .._base.errors import at_path, describe
from .._base.jax_compat import manual_axes, varying_axes
from .._base.tree import Guard, WeightsByPath, is_float_leaf, path_text
from .._step import Transformation, refuse_optimizer, was_skipped
from .._stored_weights import register_with_flax
from ._codes import (
    Code,
    CompressedArray,
    Noise,
    compressed,
    first_step,
    layout_of,
    scales_of,
    widened,
)
from ._intervals import Kind, kinds_of

# --- Inspecting a new state -----------------------------------------------------------
#
# Which arrays are like weights, which are never negative, and to which updates only
# add. The last two are proved from the program of `optimizer.update` (`kinds_of`),
# which is traced with gradients. These are like the weights, except for transformations
# whose `params` contain more than the differentiated weights.

CALL = "`mpx.compress_state(optimizer)`"
# At most this many parts of the weights are tried as the form of gradients.
# unsure: a limit on time; an optimizer of a fifth part of a model is refused
_PARTS = 4


class Weights:
    """The shapes of weights by their paths."""

    def __init__(self, params: PyTree) -> None:
        leaves = jax.tree_util.tree_leaves_with_path(params)
        self._by_path = WeightsByPath(
            (path, (getattr(leaf, "shape", None), _count_of_shards(leaf)))
            for path, leaf in leaves
        )

    def has_like(self, path: KeyPath, leaf: Any) -> bool:
        """Returns whether an array of a state is like a weight.

        Transformations keep trees like the weights: the array's path ends with that of
        a weight of the same shape.
        """
        return any(True for _ in self._like(path, leaf))

    def size_like(self, path: KeyPath, leaf: Any) -> int:
        """Returns the size of an array like a weight, over all shards; 0 for others."""
        return leaf.size * next(self._like(path, leaf), 0)

    def _like(self, path: KeyPath, leaf: Any) -> Iterator[int]:
        """Yields the number of shards of each weight that an array is like."""
        if is_float_leaf(leaf):
            for _, (shape, shards) in self._by_path.of(path):
                if shape == leaf.shape:
                    yield shards


def _count_of_shards(weight: Any) -> int:
    """Returns the number of shards of a weight inside `shard_map`, if JAX knows it.

    1 if not.
    """
    axes = varying_axes(weight) if isinstance(weight, jax.Array) else ()
    return jax.lax.axis_size(tuple(axes)) if axes else 1


def looked_at(
    optimizer: Any, params: PyTree, state: PyTree, extra: dict[str, PyTree]
) -> tuple[Weights, PyTree, PyTree]:
    """Returns the weights that gradients are like, a widened state, and its kinds.

    Gradients are like `params`, or like a part of them (the fast weights of
    `optax.lookahead`), or they have an axis of examples in front (for privacy): the
    first of these forms that `optimizer.update` accepts.
    """
    raised: list[Exception] = []
    for shape_of, part in itertools.product((_same, _one_example), _parts(params)):

        def grads(params: PyTree, shape_of: Any = shape_of, part: Any = part) -> PyTree:
            return jax.tree.map(lambda leaf: widened(shape_of(leaf)), part(params))

        try:
            weights = Weights(part(params))
            inner = _widened_state(state, weights)
            return weights, inner, _kinds(optimizer, params, inner, extra, grads, part)
        except Exception as error:
            raised.append(error)
    raise ValueError(
        f"{CALL} traces `optimizer.update(grads, state, params)` to prove which "
        "arrays are never negative, with gradients like `params`, like a part of "
        "them or with an axis of examples in front, and it raised; see the error "
        "above. If it needs more arguments, pass examples of them: "
        "`mpx.compress_state(optimizer, extra_args={'value': 0.0})`. Put "
        "transformations of the updates inside `mpx.master_weights`."
    ) from raised[0]


def _parts(params: PyTree) -> list[Callable[[PyTree], PyTree]]:
    """Returns functions that select weights with gradients: all, or one child."""
    children, form = jax.tree.flatten(params, is_leaf=lambda node: node is not params)
    parts = {}
    for place, child in enumerate(children):
        shapes = (*(getattr(leaf, "shape", None) for leaf in jax.tree.leaves(child)),)
        child_of = lambda p, place=place: form.flatten_up_to(p)[place]  # noqa: E731
        parts.setdefault((jax.tree.structure(child), shapes), child_of)
    return [_same, *[*parts.values()][:_PARTS]]


def _same(node: Any) -> Any:
    return node


def _one_example(leaf: Any) -> Any:
    return leaf[None] if eqx.is_array(leaf) else leaf


def _kinds(
    optimizer: Any,
    params: PyTree,
    state: PyTree,
    extra: dict[str, PyTree],
    grads: Callable[[PyTree], PyTree],
    part: Callable[[PyTree], PyTree],
) -> PyTree:
    """Returns the kinds of the arrays of a state, as a tree like it."""

    def init(params: PyTree) -> PyTree:
        return _widened_state(optimizer.init(params), Weights(part(params)))

    def update(params: PyTree, state: PyTree) -> PyTree:
        return optimizer.update(grads(params), state, params, **extra)[1]

    return kinds_of(init, update, params, state)


def _widened_state(state: PyTree, weights: "Weights") -> PyTree:
    """Casts arrays like weights to float32, the dtype that gradients will have."""

    def widen(path: KeyPath, leaf: Any) -> Any:
        return widened(leaf) if weights.has_like(path, leaf) else leaf

    return jax.tree_util.tree_map_with_path(widen, state, is_leaf=_is_array)


def _is_array(node: object) -> bool:
    return isinstance(node, CompressedArray)


# --- The transformation ---------------------------------------------------------------

Moments: TypeAlias = Literal["8bit", "16bit", "bfloat16"]
Where: TypeAlias = Callable[[str, Any], bool]
# As in bitsandbytes: smaller arrays are biases and norms, and take little memory.
_SMALLEST = 4096


class CompressedState(NamedTuple):
    """The state of `compress_state`.

    Attributes:
        inner_state: The state of the inner optimizer, with a `CompressedArray` for each
            array that is stored in few bits. See `full_state`.
        step: The number of the next step, counted from a hash of the weights.
        guard: Detects arithmetic on the state, which would compute with codes.
    """

    inner_state: PyTree
    step: UInt32[Array, ""]
    guard: Guard | None = None


def compress_state(
    optimizer: Any,
    moments: Moments = "8bit",
    *,
    where: Where | None = None,
    extra_args: dict[str, PyTree] | None = None,
) -> Transformation:
    r"""Wraps an Optax transformation to store its state in 8 and 16 bits.

    $$(u, o') = \operatorname{update}(\text{float32}(g), \operatorname{decode}(c), w),
        \qquad c \leftarrow \operatorname{encode}(o')$$

    An array of the state is compressed if it is like a weight (its path ends with that
    of a weight, and it has its shape) and has 4,096 numbers or more. It is divided into
    blocks of up to 128 numbers along the last axis, each with its largest magnitude $s$
    in float32. An integer $k$ encodes

    $$\pm s (k / L)^2 \quad\text{(signed)}, \qquad
        s (k / L)^4 \quad\text{(never negative)}$$

    with $L$ = 127 and 255 in 8 bits. A number between two of these is rounded to one of
    them stochastically, so that its mean is exact. Which arrays are never negative is
    proved from the program of `optimizer.update`. Adam then stores 2.06 bytes per
    weight instead of 8.

    Args:
        optimizer: An Optax transformation.
        moments: The format: `"8bit"` (the default); `"16bit"`, the same with $L$ =
            32,767 and 65,535; `"bfloat16"`, without blocks.
        where: A function of path and array that selects the arrays to compress; by
            default those above.
        extra_args: Examples of further arguments that `optimizer.update` needs, such as
            `{"value": 0.0}`. They are only traced; their values are not used.

    Returns:
        A pair `(init, update)` to use as an Optax transformation. `init(params, state)`
        starts from an uncompressed state. The state has `inner_state`, with a
        `mpx.quantization.CompressedArray` for each compressed array; `mpx.full_state`
        returns the state of `optimizer`.

    Raises:
        TypeError: `optimizer` has no `init` and `update`; in `update`, a state that
            `init` did not make.
        ValueError: `moments` is not one of the above; in `init`, `optimizer.update`
            cannot be traced, `state` is that of another optimizer or model, or `where`
            selects other than float32 arrays with an axis; in `update`, the state
            changed its structure.

    - **Sums and slow averages.** Arrays of which each update keeps 0.9995 or more
      (Adagrad, accumulated gradients, AdEMAMix' slow average) are stored in 16 bits; in
      8 bits they would be mostly noise. Factors must be constants to be known.
    - **Copies** of weights (masters, slow weights) stay in float32, unless `where`
      selects them; then they are stored as sums are.
    - Zeros stay zeros. A signed number below the smallest code, $6 \cdot 10^{-5} s$ in
      8 bits, becomes that or zero. A never-negative number does not become zero, since
      updates divide by its root; below its smallest code, $2 \cdot 10^{-10} s$, it
      becomes that.
    - An unchanged number keeps its code.
    - A block with a NaN or an infinity becomes NaN as a whole, as does a block of
      never-negative numbers with a negative number in it. Its scale is NaN, which
      `mpx.guard` and `check_update` of `mpx.optimizer_step` detect.
    - `optimizer` gets gradients, and the state's arrays like weights, in float32, even
      if weights are half precision. Arrays in float64 are stored unchanged.
    - A skipped step leaves the state bit-identical, and draws no noise. So does a step
      without an update inside `optax.MultiSteps`.
    - The noise is a hash of the step's number, the path and the index in the array: the
      same on any number of devices, and after a restart. Steps are counted from a hash
      of the weights, so members of a `jax.vmap` that start from other weights have
      other noise.
    - With `mpx.init_optimizer` codes and scales are sharded as the weight. A block
      across two shards has one scale, which is the same on both.
    - Inside `shard_map` blocks are those of shards: a state from outside needs shards
      of whole blocks, and one from inside is read inside, if shards cut its blocks.
      Indices are those in the shard, whose number is hashed, too, where `shard_map`
      checks on which axes values vary.
    - Put it inside `mpx.master_weights`, as close to the moments as possible.
    - Under `jax.jit` the program contains the update twice, once only for the scales.

    Examples:
        >>> import jax.numpy as jnp, mpx, optax
        >>> weights = jnp.ones((64, 128))
        >>> tx = mpx.compress_state(optax.sgd(1e-3, momentum=0.9))
        >>> state = tx.init(weights)
        >>> updates, state = tx.update(0.5 * weights, state, weights)
        >>> moment = state.inner_state[0].trace
        >>> moment.codes.dtype, str(moment.code)
        (dtype('int8'), '8 bits, signed')
        >>> mpx.full_state(state)[0].trace.dtype
        dtype('float32')
    """
    refuse_optimizer(optimizer, CALL)
    if moments not in get_args(Moments):
        raise ValueError(
            f"`moments` of {CALL} must be one of {', '.join(get_args(Moments))}; got "
            f"{moments!r}."
        )
    extra = dict(extra_args or {})

    def init(params: PyTree, state: PyTree | None = None) -> CompressedState:
        register_with_flax(CompressedArray, Guard)
        inner = optimizer.init(params)
        if state is not None:
            inner = _started_from(state, inner)
        weights, inner, kinds = looked_at(optimizer, params, inner, extra)
        leaves, form = jax.tree_util.tree_flatten_with_path(inner, is_leaf=_is_ours)
        step, stored = first_step(params), []
        for (key_path, leaf), kind in zip(
            leaves, form.flatten_up_to(kinds), strict=True
        ):
            path = path_text(key_path)
            if _is_chosen(key_path, leaf, kind, weights, where):
                noise = Noise(step, path, varying_axes(leaf))
                leaf = compressed(_not_folded(leaf), _code(moments, kind), noise)
            stored.append(leaf)
        guard = Guard(jnp.ones((), bool))
        step = step + jnp.uint32(1)
        return CompressedState(jax.tree.unflatten(form, stored), step, guard)

    def update(
        updates: PyTree,
        state: CompressedState,
        params: PyTree | None = None,
        **extra_args: PyTree,
    ) -> tuple[PyTree, CompressedState]:
        state = _with_arrays(state)
        updates = jax.tree.map(widened, updates)
        run = lambda inner: optimizer.update(updates, inner, params, **extra_args)  # noqa: E731
        new, stored = _run(run, state)
        skipped = was_skipped(state.inner_state, stored)
        step = state.step + jnp.uint32(1)
        if skipped is not None:
            step = jnp.where(skipped, state.step, step)
        return new, CompressedState(stored, step, state.guard)

    return Transformation(init, update)


def full_state(state: PyTree) -> PyTree:
    """Returns the uncompressed float32 state of an optimizer with `compress_state`.

    Use it for a checkpoint to continue from without compression, or with other
    `moments`: `compress_state(optimizer).init(params, full)`.

    Args:
        state: The state of an optimizer, which contains that of `compress_state`
            anywhere.

    Returns:
        The state with that of the inner optimizer in its place, and arrays in float32.

    Raises:
        ValueError: Arrays of a `mpx.quantization.CompressedArray` do not match its
            code.

    Examples:
        >>> import jax.numpy as jnp, mpx, optax
        >>> weights = jnp.ones((64, 128))
        >>> state = mpx.compress_state(optax.sgd(0.1, momentum=0.9)).init(weights)
        >>> mpx.full_state(state)[0].trace.shape
        (64, 128)
    """

    def full(node: PyTree) -> PyTree:
        if isinstance(node, CompressedState):
            return full_state(node.inner_state)
        return node.full() if isinstance(node, CompressedArray) else node

    return jax.tree.map(full, state, is_leaf=_is_ours)


def _is_ours(node: object) -> bool:
    return isinstance(node, CompressedState | CompressedArray)


def _not_folded(leaf: Array) -> Array:
    """Returns an array that XLA does not fold as a constant while it compiles `init`.

    XLA would encode zeros number by number: 28 s for 4 million. The array is not
    written to memory either.
    """
    if not isinstance(leaf, Tracer):
        return leaf
    yes = jax.lax.optimization_barrier(jnp.asarray(True))
    return jax.lax.select(yes, leaf, jnp.ones_like(leaf))


def _decoded(state: PyTree) -> PyTree:
    """Decodes a state for the inner optimizer; a `CompressedState` inside is kept."""
    return jax.tree.map(
        lambda node: node.full() if isinstance(node, CompressedArray) else node,
        state,
        is_leaf=_is_ours,
    )


def _is_chosen(
    path: KeyPath, leaf: Any, kind: Kind, weights: Weights, where: Where | None
) -> bool:
    """Returns whether an array of a state is stored in few bits."""
    if where is None:
        is_large = weights.size_like(path, leaf) >= _SMALLEST
        is_moment = is_large and leaf.dtype == np.float32 and not kind.is_copy
        # Blocks of shards are blocks of the whole array only if none is shorter.
        return is_moment and (not manual_axes() or layout_of(leaf.shape).is_even)
    if isinstance(leaf, CompressedState) or not eqx.is_array(leaf):
        return False
    chosen = bool(where(path_text(path), leaf))
    if chosen and not (is_float_leaf(leaf) and leaf.ndim and leaf.dtype == np.float32):
        raise ValueError(
            f"`where` of {CALL} must select float32 arrays with at least one axis; "
            f"got {describe(leaf)}{at_path(path_text(path))}."
        )
    return chosen


def _code(moments: Moments, kind: Kind) -> Code:
    if moments == "bfloat16":
        return Code(16, blocks=False)
    is_wide = kind.accumulates or kind.is_copy or moments == "16bit"
    return Code(16 if is_wide else 8, kind.signed)


def _started_from(state: PyTree, inner: PyTree) -> PyTree:
    """Returns an uncompressed state in the dtypes of `inner`, to start from."""
    state = full_state(state)
    given, wanted = (
        [getattr(leaf, "shape", ()) for leaf in jax.tree.leaves(tree)]
        for tree in (state, inner)
    )
    if jax.tree.structure(state) != jax.tree.structure(inner) or given != wanted:
        raise ValueError(
            f"`state` in `init(params, state)` of {CALL} must be that of the same "
            "optimizer for the same weights; got\n"
            f"  {jax.tree.structure(state)}\n"
            f"of shapes {given}, and `optimizer.init(params)` returns\n"
            f"  {jax.tree.structure(inner)}\n"
            f"of shapes {wanted}."
        )
    return jax.tree.map(
        lambda old, new: jnp.asarray(old, new.dtype) if is_float_leaf(new) else old,
        state,
        inner,
    )


def _with_arrays(state: Any) -> CompressedState:
    """Restores each `CompressedArray` of which Flax NNX made a dictionary."""
    if not isinstance(state, CompressedState):
        raise TypeError(
            f"`update` of {CALL} needs the state from its `init`; got "
            f"{describe(state)}. To start from an uncompressed state: "
            "`optimizer.init(params, state)`."
        )

    def restore(node: Any) -> Any:
        if not _is_dictionary(node):
            return node
        arrays = dict(node["arrays"])
        scales = arrays.pop("scales", None)
        ((name, codes),) = arrays.items()
        dtype = np.dtype(name.removeprefix("codes_"))
        code = Code(8 * dtype.itemsize, dtype.kind != "u", scales is not None)
        return CompressedArray(codes, scales, code)

    inner = jax.tree.map(
        restore, state.inner_state, is_leaf=lambda x: _is_ours(x) or _is_dictionary(x)
    )
    return state._replace(inner_state=inner)


def _is_dictionary(node: object) -> bool:
    return isinstance(node, Mapping) and node.keys() == {"arrays"}


def _run(
    update: Callable[[PyTree], tuple[PyTree, PyTree]], state: CompressedState
) -> tuple[PyTree, PyTree]:
    """Returns the updates and the new inner state, encoded like the one before.

    The scales of the new numbers must be known before any is encoded. A traced program
    contains the update twice: once only for the scales, and again after a barrier, for
    all its results. So the new numbers are never written in float32, and each of the
    two is one kernel. Values that depend on gradients only, such as their norm, do not
    pass the barrier and are computed once.
    """
    given = _decoded(state.inner_state)
    if not any(isinstance(x, Tracer) for x in jax.tree.leaves(given)):
        new, inner = update(given)
        return new, _stored(state, inner, {})
    again = eqx.filter_closure_convert(update, given)
    _, inner = again(given)
    scales = {
        place: scales_of(jnp.asarray(new, jnp.float32), old.code)
        for place, (_, old, new) in enumerate(_pairs(state.inner_state, inner))
        if isinstance(old, CompressedArray) and old.code.blocks
    }
    old, scales = jax.lax.optimization_barrier((_scales(state.inner_state), scales))
    behind = _with_scales(state.inner_state, old)
    new, inner = again(_decoded(behind))
    return new, _stored(state._replace(inner_state=behind), inner, scales)


def _scales(state: PyTree) -> list[Array | None]:
    nodes = jax.tree.leaves(state, is_leaf=_is_ours)
    return [node.scales for node in nodes if isinstance(node, CompressedArray)]


def _with_scales(state: PyTree, scales: Iterable[Array | None]) -> PyTree:
    """Replaces the scales of the arrays in few bits."""
    rest = iter(scales)
    return jax.tree.map(
        lambda node: (
            CompressedArray(node.codes, next(rest), node.code)
            if isinstance(node, CompressedArray)
            else node
        ),
        state,
        is_leaf=_is_ours,
    )


def _pairs(before: PyTree, after: PyTree) -> list[tuple[KeyPath, Any, Any]]:
    """Returns the paths and nodes of the state before an update, and those after it."""
    nodes, form = jax.tree_util.tree_flatten_with_path(before, is_leaf=_is_ours)
    try:
        new = form.flatten_up_to(after)
    except ValueError as error:
        raise ValueError(
            f"{CALL} needs an optimizer whose state keeps its structure; `update` "
            "changed it:\n"
            f"  {error}"
        ) from error
    return [(path, old, one) for (path, old), one in zip(nodes, new, strict=True)]


def _stored(
    state: CompressedState, inner: PyTree, scales: dict[int, Array | None]
) -> PyTree:
    """Returns the new inner state, encoded like the one before."""
    stored = []
    for place, (path, old, new) in enumerate(_pairs(state.inner_state, inner)):
        if isinstance(old, CompressedArray):
            noise = Noise(state.step, path_text(path), varying_axes(new))
            new = compressed(new, old.code, noise, old, scales.get(place))
        elif is_float_leaf(old) and is_float_leaf(new) and old.dtype != new.dtype:
            new = new.astype(old.dtype)
        stored.append(new)
    return jax.tree.unflatten(
        jax.tree.structure(state.inner_state, is_leaf=_is_ours), stored
    )
