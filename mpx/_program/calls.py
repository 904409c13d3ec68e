"""A call with any PyTrees as a program of arrays, and back.

JAX traces functions of arrays. What a user calls has trees of all kinds as arguments
and results, whose other leaves (a flag, a string, a dtype) are part of the program.
What is traced in place of a user's function is called as his is in errors.
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


# --- Names in errors ------------------------------------------------------------------

# JAX says which function it was tracing when a program asks for a number that only a
# run knows: `if jnp.sum(y) > 0`. It looks through `__wrapped__`, and reads the names of
# arguments from a signature.


def named_like(
    flat: Callable[..., PyTree], func: Callable[..., PyTree], paths: Sequence[KeyPath]
) -> Callable[..., PyTree]:
    """Gives a function the name and the place of another one.

    Args:
        flat: A function of arrays.
        func: The user's function, which it calls.
        paths: For each array its path in `(func, args, kwargs)`.

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
    """The function that a callable is written as, perhaps in its class."""
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
    """`model_layers_0_weight` for `model.layers[0].weight`."""
    return "_" * text[:1].isdigit() + re.sub(r"\W+", "_", text).strip("_") or "_"
