"""Casts the float leaves of any PyTree.

Float leaves are arrays of float16, bfloat16, float32 and float64 (JAX, numpy, numpy
scalars, `jax.ShapeDtypeStruct`). float64 is cast like the others, so a numpy array with
numpy's default dtype never silently promotes a half-precision program; use `keep` to
exclude it. Everything else is returned as the same object: integers and booleans, PRNG
keys, complex numbers, formats of 8 bits and fewer, Python scalars (which are weakly
typed), functions, strings, None, and quantized arrays with their scales.

Values are rounded to nearest, ties to even; float64 may be rounded to float32 on the
way. Values beyond the target's range become infinite in float16 and bfloat16. In 8-bit
formats they, and infinity itself, *saturate* to the largest finite value: most of these
formats have no infinity. NaN stays NaN.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.tree_util import KeyPath
from jaxtyping import PyTree

from .._base.dtypes import float_dtype, half_precision_datatype
from .._base.errors import describe
from .._base.tree import is_float_leaf, is_whole, keeps_dtypes, path_text
from .._base.typing import DTypeLike, LeafPredicate
from .._base.wraps import wraps


def cast_tree(
    tree: PyTree, dtype: DTypeLike, *, keep: LeafPredicate | None = None
) -> PyTree:
    """Casts the float leaves of a tree to a dtype.

    Args:
        tree: Any PyTree; numpy arrays stay numpy arrays.
        dtype: A floating dtype or its name ("float16", "bf16", "half", ...).
        keep: Leaves for which `keep(path, leaf)` is True are not cast; the path is a
            string such as `layers[0].weight`. By default all are cast.

    Returns:
        The tree with the same structure. A leaf that has the dtype already, or is not
        a float leaf, is the same object.

    Raises:
        ValueError: The dtype does not exist, or is float64 and not enabled in JAX.
        TypeError: The dtype is not floating, or is meaningless without a scale
            (float8_e8m0fnu, formats of 4 and 6 bits); or `keep` is not a function.

    At the edges: zeros keep their sign (formats named `fnuz` have no -0), NaN stays
    NaN, overflow gives infinity in 16 bits and saturates in 8.

    Examples:
        >>> import jax.numpy as jnp, mpx
        >>> mpx.cast_tree({"step": 3, "w": jnp.ones(2)}, "bfloat16")
        {'step': 3, 'w': Array([1, 1], dtype=bfloat16)}
    """
    return cast_leaves(tree, float_dtype(dtype, "`mpx.cast_tree(tree, dtype)`"), keep)


def cast_leaves(tree: PyTree, dtype: np.dtype, keep: LeafPredicate | None) -> PyTree:
    """Casts like `cast_tree`, to a dtype that is already read."""
    if keep is None:
        return jax.tree.map(lambda leaf: cast_leaf(leaf, dtype), tree, is_leaf=is_whole)

    if not callable(keep):
        raise TypeError(
            "`keep` of `mpx.cast_tree` and the like must be a function `keep(path, "
            f"leaf) -> bool`; got {describe(keep)}. For one leaf: `keep=lambda path, "
            "leaf: path == 'layers[0].weight'`."
        )

    def cast(path: KeyPath, leaf: object) -> PyTree:
        if is_float_leaf(leaf) and keep(path_text(path), leaf):
            return leaf
        return cast_leaf(leaf, dtype)

    return jax.tree_util.tree_map_with_path(cast, tree, is_leaf=is_whole)


def cast_leaf(leaf: Any, dtype: np.dtype) -> PyTree:
    """Casts one leaf if it is a float leaf of another dtype."""
    if not is_float_leaf(leaf) or leaf.dtype == dtype:
        return leaf
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf.update(dtype=dtype)
    if dtype.itemsize == 1:
        leaf = _saturate(leaf, dtype)
    if isinstance(leaf, np.ndarray | np.generic):
        with np.errstate(over="ignore"):  # overflow to infinity is documented
            return leaf.astype(dtype)
    # The primitive: tracing `astype` takes several times as long, per leaf.
    return jax.lax.convert_element_type(leaf, dtype)


def _saturate(leaf: Any, dtype: np.dtype) -> PyTree:
    # astype alone gives NaN (e4m3fn) or infinity (e5m2) beyond the largest value.
    largest = float(ml_dtypes.finfo(dtype).max)
    clip: Any = np.clip if isinstance(leaf, np.ndarray | np.generic) else jnp.clip
    # If the source's range is smaller, as float16 to bfloat16-like formats, the bound
    # rounds to infinity in the source's dtype and clipping changes nothing.
    bound: Any = leaf.dtype.type(largest)
    return clip(leaf, -bound, bound)


def cast_to_half_precision(x: PyTree, *, keep: LeafPredicate | None = None) -> PyTree:
    """Casts float leaves to `half_precision_datatype()`; see `cast_tree`."""
    return cast_leaves(x, half_precision_datatype(), keep)


def cast_to_full_precision(x: PyTree, *, keep: LeafPredicate | None = None) -> PyTree:
    """Casts float leaves to float32; see `cast_tree`. float64 becomes float32, too."""
    return cast_leaves(x, np.dtype(np.float32), keep)


def cast_to_float16(x: PyTree, *, keep: LeafPredicate | None = None) -> PyTree:
    """Casts float leaves to float16; from 65520 on they are infinite; see `cast_tree`.

    65504 is the largest finite value; larger values below 65520 are rounded to it.
    """
    return cast_leaves(x, np.dtype(np.float16), keep)


def cast_to_bfloat16(x: PyTree, *, keep: LeafPredicate | None = None) -> PyTree:
    """Casts float leaves to bfloat16; see `cast_tree`."""
    return cast_leaves(x, np.dtype(jnp.bfloat16), keep)


def cast_to_float32(x: PyTree, *, keep: LeafPredicate | None = None) -> PyTree:
    """Casts float leaves to float32; the same as `cast_to_full_precision`."""
    return cast_leaves(x, np.dtype(np.float32), keep)


# --- Functions: cast their inputs and results -----------------------------------------
#
# JAX computes in the dtype of the operands, so casting its inputs moves a function to
# another precision. Use `force_full_precision` for critical operations inside
# half-precision code: sums, means, norms, softmax, losses.


def cast_function(
    func: Callable[..., PyTree], dtype: DTypeLike, return_dtype: DTypeLike | None = None
) -> Callable[..., PyTree]:
    """Wraps a function to compute in `dtype` and return `return_dtype`.

    1. cast every float leaf of the arguments to `dtype` (see `cast_tree`), and of
       `func` itself if it is a callable PyTree such as an Equinox layer;
    2. call `func`;
    3. cast every float leaf of the result, any PyTree, to `return_dtype`
       (`dtype` if None).

    Equinox's `State` is passed and returned unchanged: statistics stay in full
    precision.

    The function keeps its name and docstring. Constants inside `func` keep their dtype
    and may promote: a float32 array in a closure makes the result of a half-precision
    operation float32 before it is cast back.

    Args:
        func: A function or a callable PyTree.
        dtype: The floating dtype to compute in, or its name.
        return_dtype: The floating dtype of the result, or its name; `dtype` if None.

    Returns:
        A function of the same arguments.

    Raises:
        TypeError: `func` is not callable, or a dtype is not floating.
        ValueError: A dtype does not exist, or is float64 and not enabled in JAX.

    Both errors are raised immediately, not at the first call.

    Examples:
        >>> import jax.numpy as jnp, mpx
        >>> mpx.cast_function(jnp.sin, "float16")(jnp.ones(2)).dtype
        dtype('float16')
    """
    call = "`mpx.cast_function(func, dtype, return_dtype)`"
    compute = float_dtype(dtype, call)
    result = compute if return_dtype is None else float_dtype(return_dtype, call)
    refuse_uncallable(func, call)

    @wraps(func)
    def wrapper(*args: PyTree, **kwargs: PyTree) -> PyTree:
        return call_in(func, args, kwargs, compute, result)

    return wrapper


def refuse_uncallable(func: object, call: str) -> None:
    """Raises if `func` is not callable."""
    if not callable(func):
        raise TypeError(
            f"{call} needs a function or a callable PyTree as `func`; got {func!r}."
        )


def call_in(
    func: Callable[..., PyTree],
    args: tuple[PyTree, ...],
    kwargs: dict[str, PyTree],
    compute: np.dtype,
    result: np.dtype,
) -> PyTree:
    """Casts a function and its arguments to a dtype, and its result to another one."""
    func, args, kwargs = _cast((func, args, kwargs), compute)
    return _cast(func(*args, **kwargs), result)


def _cast(tree: PyTree, dtype: np.dtype) -> PyTree:
    """Casts float leaves except those of Equinox's model state, which stay float32."""

    def cast(node: object) -> PyTree:
        return node if keeps_dtypes(node) else cast_leaf(node, dtype)

    return jax.tree.map(cast, tree, is_leaf=keeps_dtypes)
