"""Converts a call with any PyTrees to a function of arrays, and back.

JAX traces functions of arrays. A user's function has trees of all kinds as arguments
and results, whose other leaves (a flag, a string, a dtype) are part of the program. In
errors the traced function has the name of the user's function.
"""

import dataclasses
import functools
import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.tree_util import KeyPath
from jaxtyping import PyTree

from .._base.typing import AnyArray

ARRAYS = jax.Array | np.ndarray | np.generic


def is_array(leaf: object) -> bool:
    """Returns whether a leaf is an array or a NumPy scalar."""
    return isinstance(leaf, ARRAYS)


def is_array_or_type(leaf: object) -> bool:
    """Returns whether a leaf is an array, or the type of an array."""
    return isinstance(leaf, ARRAYS | jax.ShapeDtypeStruct)


@dataclasses.dataclass(frozen=True)
class Form:
    """A tree without its arrays.

    Attributes:
        structure: The structure of the whole tree.
        leaves: Its leaves; None in place of arrays.
        are_arrays: For each leaf whether it is an array.
    """

    structure: Any
    leaves: tuple[object, ...]
    are_arrays: tuple[bool, ...]

    def filled(self, arrays: Sequence[object]) -> PyTree:
        """Returns the tree with these arrays."""
        missing = iter(arrays)
        pairs = zip(self.leaves, self.are_arrays, strict=True)
        full = [next(missing) if is_one else leaf for leaf, is_one in pairs]
        return jax.tree.unflatten(self.structure, full)


def divide(
    tree: PyTree, is_array: Callable[[object], bool] = is_array
) -> tuple[list[AnyArray], Form]:
    """Splits a tree into its arrays and the rest."""
    leaves, structure = jax.tree.flatten(tree)
    are_arrays = tuple(map(is_array, leaves))
    arrays, rest = [], []
    for leaf, is_one in zip(leaves, are_arrays, strict=True):
        arrays += [leaf] if is_one else []
        rest.append(None if is_one else leaf)
    return arrays, Form(structure, tuple(rest), are_arrays)


class Call:
    """A call as a function of its arrays, which returns the arrays of its result.

    Attributes:
        arrays: The arrays of the call, in the order of the tree.
        paths: The path of each array in `(func, args, kwargs)`.
        form: The rest of that tree.
        result: The rest of the last returned result.
    """

    def __init__(
        self,
        func: object,
        args: PyTree,
        kwargs: PyTree,
        is_array: Callable[[object], bool] = is_array,
        call: Callable[..., PyTree] | None = None,
    ) -> None:
        """Splits a call.

        Args:
            func: The function; if it is a tree, its arrays are included.
            args: Its positional arguments.
            kwargs: Its keyword arguments.
            is_array: Returns whether a leaf becomes an input.
            call: A function of `func, args, kwargs` to run; by default the call.
        """
        tree = (func, args, kwargs)
        self.arrays, self.form = divide(tree, is_array)
        paths = jax.tree_util.tree_leaves_with_path(tree)
        pairs = zip(paths, self.form.are_arrays, strict=True)
        self.paths = [path for (path, _), is_one in pairs if is_one]
        self.result: Form | None = None
        self._call = call or _called

    def __call__(self, *arrays: AnyArray) -> list[AnyArray]:
        """Returns the arrays of the result."""
        # Set while JAX traces. A cached trace runs no Python: each needs a new `Call`.
        found, self.result = divide(self._call(*self.form.filled(arrays)))
        return found

    def result_of(self, arrays: Sequence[object]) -> PyTree:
        """Returns the whole result, with these arrays."""
        assert self.result is not None, "the call has not run"
        return self.result.filled(arrays)


def _called(func: Callable[..., PyTree], args: PyTree, kwargs: PyTree) -> PyTree:
    return func(*args, **kwargs)


# --- Names in errors ------------------------------------------------------------------

# JAX names the function that it was tracing when a program needs the value of a tracer:
# `if jnp.sum(y) > 0`. It follows `__wrapped__`, and reads the names of arguments from a
# signature.


def named_like(
    flat: Callable[..., PyTree], func: Callable[..., PyTree], paths: Sequence[KeyPath]
) -> Callable[..., PyTree]:
    """Gives a function the name and source location of another one.

    Args:
        flat: A function of arrays.
        func: The user's function, which it calls.
        paths: The path of each array in `(func, args, kwargs)`.

    Returns:
        `flat`.
    """
    flat.__wrapped__ = _code_of(func)  # pyright: ignore[reportFunctionMemberAccess]
    names = dict.fromkeys(map(_namer(func), paths))
    if len(names) == len(paths):
        parameters = [
            inspect.Parameter(name, inspect.Parameter.POSITIONAL_ONLY) for name in names
        ]
        flat.__signature__ = (  # pyright: ignore[reportFunctionMemberAccess]
            inspect.Signature(parameters)
        )
    return flat


def _code_of(func: Any) -> Any:
    """Returns the function that defines a callable, possibly in its class."""
    while isinstance(func, functools.partial):
        func = func.func
    func = inspect.unwrap(func)
    return func if hasattr(func, "__code__") else type(func).__call__


def _namer(func: Callable[..., PyTree]) -> Callable[[KeyPath], str]:
    try:
        parameters = inspect.signature(func).parameters.values()
    except (TypeError, ValueError):
        parameters = ()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    known = [parameter.name for parameter in parameters if parameter.kind in kinds]

    def name(path: KeyPath) -> str:
        root, *rest = path
        if root.idx == 0:
            return _identifier(jax.tree_util.keystr(tuple(rest)))
        if root.idx == 2:
            return _identifier(str(rest[0].key) + jax.tree_util.keystr(tuple(rest[1:])))
        first, below = rest[0].idx, jax.tree_util.keystr(tuple(rest[1:]))
        given = known[first] if first < len(known) else f"args_{first}"
        return _identifier(f"{given}.{below}" if below else given)

    return name


def _identifier(text: str) -> str:
    """Returns an identifier: `model_layers_0_weight` for `model.layers[0].weight`."""
    return "_" * text[:1].isdigit() + re.sub(r"\W+", "_", text).strip("_") or "_"
