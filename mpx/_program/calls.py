"""A call with any PyTrees as a program of arrays, and back.

JAX traces functions of arrays. What a user calls has trees of all kinds as arguments
and results, whose other leaves (a flag, a string, a dtype) are part of the program.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from .._typing import AnyArray

ARRAYS = jax.Array | np.ndarray | np.generic


def is_array(leaf: object) -> bool:
    """Whether a leaf is an array, or a number of numpy's."""
    return isinstance(leaf, ARRAYS)


def is_array_or_type(leaf: object) -> bool:
    """Whether a leaf is an array, or stands for one that is not there."""
    return isinstance(leaf, ARRAYS | jax.ShapeDtypeStruct)


@dataclasses.dataclass(frozen=True)
class Form:
    """A tree without its arrays.

    Attributes:
        structure: The structure of the whole tree.
        leaves: Its leaves; None in place of arrays.
        are_arrays: For each leaf whether it is one.
    """

    structure: Any
    leaves: tuple[object, ...]
    are_arrays: tuple[bool, ...]

    def filled(self, arrays: Sequence[object]) -> PyTree:
        """The tree with these arrays."""
        missing = iter(arrays)
        pairs = zip(self.leaves, self.are_arrays, strict=True)
        full = [next(missing) if is_one else leaf for leaf, is_one in pairs]
        return jax.tree.unflatten(self.structure, full)


def divide(
    tree: PyTree, is_array: Callable[[object], bool] = is_array
) -> tuple[list[AnyArray], Form]:
    """The arrays of a tree, and the rest of it."""
    leaves, structure = jax.tree.flatten(tree)
    are_arrays = tuple(map(is_array, leaves))
    arrays, rest = [], []
    for leaf, is_one in zip(leaves, are_arrays, strict=True):
        arrays += [leaf] if is_one else []
        rest.append(None if is_one else leaf)
    return arrays, Form(structure, tuple(rest), are_arrays)


class Call:
    """A call as a function of the arrays in it, which gives the arrays of its result.

    Attributes:
        arrays: The arrays that it is called with, in the order of the tree.
        paths: For each of them its path in `(func, args, kwargs)`.
        form: The rest of that tree.
        result: The rest of what it returned when it last ran.
    """

    def __init__(
        self,
        func: object,
        args: PyTree,
        kwargs: PyTree,
        is_array: Callable[[object], bool] = is_array,
        call: Callable[..., PyTree] | None = None,
    ) -> None:
        """Takes a call apart.

        Args:
            func: The function; its own arrays go in, too, where it is a tree.
            args: Its positional arguments.
            kwargs: Its keyword arguments.
            is_array: Which leaves go in.
            call: What is done with `func, args, kwargs`; by default the call.
        """
        tree = (func, args, kwargs)
        self.arrays, self.form = divide(tree, is_array)
        paths = jax.tree_util.tree_leaves_with_path(tree)
        pairs = zip(paths, self.form.are_arrays, strict=True)
        self.paths = [path for (path, _), is_one in pairs if is_one]
        self.result: Form | None = None
        self._call = call or _called

    def __call__(self, *arrays: AnyArray) -> list[AnyArray]:
        """The arrays of the result."""
        # Left here while JAX traces. What JAX has traced before runs no Python, so each
        # trace needs a `Call` of its own.
        found, self.result = divide(self._call(*self.form.filled(arrays)))
        return found

    def result_of(self, arrays: Sequence[object]) -> PyTree:
        """The whole result, with these arrays."""
        assert self.result is not None, "the call has not run"
        return self.result.filled(arrays)


def _called(func: Callable[..., PyTree], args: PyTree, kwargs: PyTree) -> PyTree:
    return func(*args, **kwargs)
