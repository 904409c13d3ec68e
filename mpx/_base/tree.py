"""Leaves and paths of PyTrees: find float leaves, check finiteness, choose a tree.

A *float leaf* is a JAX or NumPy array, a NumPy scalar or a `jax.ShapeDtypeStruct` with
dtype float16, bfloat16, float32 or float64. Integers, booleans, PRNG keys, complex
numbers, Python scalars, callables, strings and None are not float leaves. Nor are
formats of 8 bits and fewer, which are meaningless without their scale.
"""

import abc
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Generic, NoReturn, Self, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.tree_util import KeyPath
from jaxtyping import Array, Bool, PyTree

from .errors import at_path, describe
from .jax_compat import stack
from .typing import BoolLike, BoolScalar

# Dtypes and not their names, which NumPy builds again on each access.
_FLOATS = frozenset(
    np.dtype(x) for x in (jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64)
)


def is_float_leaf(leaf: object) -> bool:
    """Returns whether a leaf is an array of float16, bfloat16, float32 or float64."""
    return (
        isinstance(leaf, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct)
        and leaf.dtype in _FLOATS
    )


def is_inexact_leaf(leaf: object) -> bool:
    """Returns whether a leaf is a real or complex array of more than 8 bits."""
    return is_float_leaf(leaf) or (
        isinstance(leaf, jax.Array | np.ndarray | np.generic)
        and jnp.issubdtype(leaf.dtype, jnp.complexfloating)
    )


def is_trainable(leaf: object) -> bool:
    """Returns whether a leaf is a JAX array to differentiate by.

    Formats of 8 bits and fewer are not, because they need a scale.
    """
    return isinstance(leaf, jax.Array) and is_inexact_leaf(leaf)


W = TypeVar("W")


class WeightsByPath(Generic[W]):
    """Finds the weights that an array of an optimizer's state may belong to.

    Transformations store trees of the weights' structure, so the array's path ends with
    the path of its weight: `[0].mu['b']['a']` belongs to `['b']['a']`, and not to
    `['a']`.

    Args:
        weights: The path of each weight, and data about it.
    """

    def __init__(self, weights: Iterable[tuple[KeyPath, W]]) -> None:
        self._whole: dict[KeyPath, list[W]] = {}
        self._parts: dict[KeyPath, list[W]] = {}
        for path, weight in weights:
            self._whole.setdefault(path, []).append(weight)
            if len(path) > 1:
                self._parts.setdefault(path[1:], []).append(weight)

    def __iter__(self) -> Iterator[W]:
        """Yields the data of the weights, in order."""
        return (weight for several in self._whole.values() for weight in several)

    def of(self, path: KeyPath) -> Iterator[tuple[KeyPath, W]]:
        """Yields weights whose path is an end of `path`, with that end, longest first.

        If there are none, yields those whose path without its first key is such an end:
        state for a part of the weights, such as the fast weights of `optax.lookahead`.
        """
        for known in (self._whole, self._parts):
            found = False
            for start in range(len(path) + 1):
                for weight in known.get(path[start:], ()):
                    found = True
                    yield path[start:], weight
            if found:
                return


@jax.tree_util.register_pytree_with_keys_class
class NamedLeaves:
    """Leaves that were extracted from an object, as one node of a tree.

    It replaces the object where JAX needs a tree, with the same paths:
    `args[0].layers[0].kernel`.

    Args:
        label: Distinguishes the nodes of one tree.
        names: The name of each leaf, such as `layers[0].kernel`.
        leaves: The leaves.
    """

    def __init__(
        self, label: int, names: Sequence[str] = (), leaves: Sequence[object] = ()
    ) -> None:
        self.label = label
        self.names = tuple(names)
        self.leaves = tuple(leaves)

    def tree_flatten_with_keys(self) -> PyTree:
        """Returns the leaves, each with its name as key."""
        keys = [jax.tree_util.GetAttrKey(name) for name in self.names]
        return list(zip(keys, self.leaves, strict=True)), (self.label, self.names)

    @classmethod
    def tree_unflatten(
        cls, form: tuple[int, tuple[str, ...]], leaves: Sequence[object]
    ) -> Self:
        """Rebuilds the node with other leaves."""
        label, names = form
        return cls(label, names, leaves)


@jax.tree_util.register_pytree_with_keys_class
class ModelState(NamedLeaves):
    """Named leaves that a model updates as it runs: statistics, random streams."""


class Whole(eqx.Module):
    """A module whose arrays are meaningless alone, such as codes without their scale.

    Casts do not enter it. It is not an array; its error where one is needed names the
    conversion.
    """

    # NumPy, too, defers operators to it.
    __array_ufunc__ = None

    @abc.abstractmethod
    def _words(self) -> str:
        """Returns the error message: it is not an array, and the fix."""

    def _refused(self, *_: object, **__: object) -> NoReturn:
        raise TypeError(self._words())

    __array__ = __jax_array__ = __getitem__ = __neg__ = __abs__ = _refused
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _refused
    __truediv__ = __rtruediv__ = __floordiv__ = __mod__ = __pow__ = __rpow__ = _refused
    __matmul__ = __rmatmul__ = __lt__ = __le__ = __gt__ = __ge__ = _refused

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            is_of_arrays = not name.startswith("_") and hasattr(jax.Array, name)
            words = f": {self._words()}" if is_of_arrays else "."
            kind = type(self).__name__
            raise AttributeError(f"A `{kind}` has no attribute {name!r}{words}")


@jax.tree_util.register_pytree_with_keys_class
class Guard:
    """A boolean beside arrays that are meaningless alone, to detect arithmetic.

    `jax.tree.map(lambda a, b: 0.99 * a + 0.01 * b, ...)` computes with every array.
    Codes of 8 bits and their scale, combined separately, would become garbage of the
    same dtypes. Arithmetic changes the boolean's dtype, so rebuilding the tree raises.
    Functions that move arrays unchanged (select, shard, stack, copy, save) or make
    zeros like them keep it. A plain sum of two trees does, too, and a result cast back
    to each leaf's dtype; these are not detected.

    Args:
        leaf: The boolean.
    """

    def __init__(self, leaf: object) -> None:
        self.leaf = leaf

    def tree_flatten_with_keys(self) -> PyTree:
        """Returns the boolean as the only leaf."""
        return [(jax.tree_util.GetAttrKey("leaf"), self.leaf)], None

    @classmethod
    def tree_unflatten(cls, _: None, leaves: Any) -> Any:
        """Rebuilds the guard; raises if the boolean was computed with."""
        (leaf,) = leaves
        is_array = isinstance(leaf, jax.Array | np.ndarray | np.generic)
        if is_array and leaf.dtype not in (np.bool_, jax.dtypes.float0):
            raise TypeError(
                "The arrays of a quantized array, a stored weight or a compressed "
                "optimizer state are codes and scales, which are meaningless alone, "
                "but `jax.tree.map` computed with each (a boolean that detects it "
                f"became {describe(leaf)}). Compute with the values: "
                "`mpx.quantization.dequantize_weights(model)`, "
                "`quantized.dequantize()`, `mpx.full_state(opt_state)`, or for a "
                "running average of weights `mpx.full_weights(model, opt_state)`."
            )
        return cls(leaf)


def is_whole(node: object) -> bool:
    """Returns whether a tree node must not be split into its arrays."""
    return isinstance(node, Whole)


def keeps_dtypes(node: object) -> bool:
    """Returns whether casts of inputs do not enter a tree node."""
    return is_whole(node) or is_model_state(node)


def is_model_state(node: object) -> bool:
    """Returns whether a tree node is a model's state: Equinox's, or from NNX."""
    return isinstance(node, eqx.nn.State | eqx.nn.StateIndex | ModelState)


class Filled:
    """Arrays filled with one number, made once for each shape and dtype.

    Layers repeat, so a model's leaves have few shapes. An operation of a leaf with the
    scalar itself would broadcast it again for every leaf.

    Args:
        number: Returns the number as a scalar of a dtype.
    """

    def __init__(self, number: Callable[[np.dtype], Array]) -> None:
        self._number = number
        self._made: dict[tuple[tuple[int, ...], np.dtype], Array] = {}

    def like(self, leaf: Array) -> Array:
        """Returns the array with the shape and dtype of a leaf."""
        key = leaf.shape, leaf.dtype
        if key not in self._made:
            self._made[key] = jax.lax.broadcast(self._number(leaf.dtype), leaf.shape)
        return self._made[key]


def path_text(path: KeyPath) -> str:
    """Formats a key path as in code: `layers[0].weight`."""
    return jax.tree_util.keystr(path).removeprefix(".")


def leaves_with_paths(tree: PyTree) -> Iterator[tuple[str, PyTree]]:
    """Yields the path and the value of every leaf."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        yield path_text(path), leaf


def finite_by_leaf(tree: PyTree) -> list[BoolScalar]:
    """Returns for each leaf, in the order of `jax.tree.leaves`, whether it is finite.

    Leaves that cannot be NaN or infinite (integers, keys, strings, ...) count as
    finite.
    """
    return [_is_finite(leaf) for leaf in jax.tree.leaves(tree)]


def _is_finite(leaf: object) -> BoolScalar:
    if isinstance(leaf, float | complex) and not isinstance(leaf, np.generic):
        return jnp.asarray(bool(np.isfinite(leaf)))
    if isinstance(leaf, jax.Array | np.ndarray | np.generic) and jnp.issubdtype(
        leaf.dtype, jnp.inexact
    ):
        array = leaf if isinstance(leaf, jax.Array) else jnp.asarray(leaf)
        if array.dtype.itemsize == 1:  # isfinite is not defined for every such format
            array = array.astype(jnp.float32)
        if jnp.issubdtype(array.dtype, jnp.complexfloating):
            return _is_finite(array.real) & _is_finite(array.imag)
        # Primitives: tracing `jnp.all(jnp.isfinite(...))` takes several times as long.
        flags = jax.lax.is_finite(array)
        return jax.lax.reduce_and(flags, axes=tuple(range(flags.ndim)))
    return jnp.asarray(True)


def all_finite(tree: PyTree) -> Bool[Array, ""]:
    r"""Returns whether all numbers in a tree are finite (not NaN or infinite).

    $$\bigwedge_{x \in \text{leaves}} \bigwedge_i \operatorname{isfinite}(x_i)$$

    Args:
        tree: Any PyTree. Real and complex arrays of every width and Python's floats and
            complex numbers are checked; all other leaves count as finite.

    Returns:
        A boolean scalar array.

    An empty tree and an array of size zero are finite.

    Examples:
        >>> import jax.numpy as jnp, mpx
        >>> bool(mpx.all_finite({"w": jnp.ones(3), "name": "dense"}))
        True
        >>> bool(mpx.all_finite({"w": jnp.array([1.0, jnp.inf])}))
        False
    """
    flags = [f for f in finite_by_leaf(tree) if not _is_known_true(f)]
    return stack(flags).all() if flags else jnp.asarray(True)


def _is_known_true(flag: BoolScalar) -> bool:
    return not isinstance(flag, Tracer) and bool(flag)


def bool_scalar(value: BoolLike, caller: str) -> BoolScalar:
    """Reads a boolean scalar that a user gave: a Python bool or a boolean array."""
    is_bool = isinstance(value, bool | np.bool_) or (
        isinstance(value, jax.Array | np.ndarray)
        and value.dtype == np.bool_
        and value.ndim == 0
    )
    if not is_bool:
        raise TypeError(
            f"{caller} needs one boolean (a scalar array of dtype bool, or True or "
            f"False); got {describe(value)}. Reduce it first, for example with "
            "`mpx.all_finite(grads)`."
        )
    return jnp.asarray(value)


def select_tree(pred: BoolLike, a: PyTree, b: PyTree) -> PyTree:
    r"""Chooses one of two trees, leaf by leaf, without computing with the values.

    $$\text{out} = a \text{ if pred else } b$$

    Args:
        pred: A boolean scalar, an array or Python's.
        a: The tree for True. Non-array leaves (functions, strings, Python numbers) are
            taken from it.
        b: The tree for False, of the same structure, shapes and dtypes. Its non-array
            leaves must be equal to those of `a`.

    Returns:
        A tree of the same structure and shapes, of JAX arrays. Dtypes are kept, except
        that numpy's 64-bit arrays become 32-bit if 64 bits are disabled in JAX.

    Raises:
        TypeError: `pred` is not a boolean scalar.
        ValueError: The trees differ in structure, shape, dtype or in a non-array leaf.

    The chosen tree is returned bit for bit, with NaN, -0.0 and PRNG keys unchanged.

    Examples:
        >>> import jax.numpy as jnp, mpx
        >>> mpx.select_tree(jnp.array(False), {"w": jnp.ones(2)}, {"w": jnp.zeros(2)})
        {'w': Array([0., 0.], dtype=float32)}
    """
    call = "`mpx.select_tree(pred, a, b)`"
    pred = bool_scalar(pred, f"`pred` of {call}")
    structure_a, structure_b = jax.tree.structure(a), jax.tree.structure(b)
    if structure_a != structure_b:
        raise ValueError(
            f"{call} needs two trees of the same structure; got\n"
            f"  a: {structure_a}\n"
            f"  b: {structure_b}\n"
            "Build both from the same model or optimizer state."
        )
    pairs = list(zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))
    for number, (leaf_a, leaf_b) in enumerate(pairs):
        problem = _why_no_choice(leaf_a, leaf_b)
        if problem:
            path, _ = jax.tree_util.tree_leaves_with_path(a)[number]
            raise ValueError(
                f"{call} {problem[0]}; got {describe(leaf_a)} and {describe(leaf_b)}"
                f"{at_path(path_text(path))}. {problem[1]}"
            )
    leaves = [_select_leaf(pred, leaf_a, leaf_b) for leaf_a, leaf_b in pairs]
    return jax.tree.unflatten(structure_a, leaves)


def _why_no_choice(a: Any, b: Any) -> tuple[str, str] | None:
    """Returns what is wrong with two leaves and how to fix it; None if nothing is."""
    is_array_a, is_array_b = _is_any_array(a), _is_any_array(b)
    if is_array_a and is_array_b:
        if a.dtype == b.dtype and a.shape == b.shape:
            return None
    elif not is_array_a and not is_array_b:
        if a is b or (type(a) is type(b) and a == b):
            return None
        rule = "cannot choose between non-array leaves"
        return rule, "Make them equal, or arrays."
    return "needs equal shapes and dtypes", "Cast one of them first."


def _is_any_array(leaf: object) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray | np.generic)


def _select_leaf(pred: BoolScalar, a: object, b: object) -> PyTree:
    if isinstance(a, jax.Array) and isinstance(b, jax.Array):
        return jax.lax.select(pred, a, b)
    return (
        jax.lax.select(pred, jnp.asarray(a), jnp.asarray(b)) if _is_any_array(a) else a
    )
