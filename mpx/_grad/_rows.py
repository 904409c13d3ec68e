"""Which arrays of a call have no batch axis: declared weights, and what cannot be cut.

`weights=` of an autocast function names its arguments in its own numbering. The call
may go through `functools.partial`, a bound method or decorators, which pass some
arguments on their own.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence

import equinox as eqx
import jax
import numpy as np
from jax.tree_util import KeyPath
from jaxtyping import PyTree

from .._errors import describe
from .._settings import MARK, Mark, parameters_of, weights_in_call
from ._inputs import input_path

# The places of a call's arguments: positions and names.
Places = frozenset[int | str]
_SHOWN = 3
_REMEDY = (
    "Name arrays without a batch axis: `mpx.Accumulation(steps, whole=lambda path, "
    "leaf: ...)`"
)


def declared_weights(
    func: Callable[..., PyTree], args: tuple[PyTree, ...], kwargs: dict[str, PyTree]
) -> Places:
    """The arguments of a call that `weights=` of the function names.

    By default no argument counts: the first one may as well be the batch.

    Args:
        func: The function.
        args: Its arguments.
        kwargs: Its keyword arguments.
    """
    mark, first, names = _marked(func)
    if mark is None or not mark.has_explicit_weights:
        return frozenset()
    by_name = {**dict.fromkeys(names), **kwargs}
    ordered, _ = parameters_of(mark.func)
    # A wrapper may pass more by position than the function takes, as `mpx.nnx` does.
    named: dict[int | str, str]
    named = {i: name for i, name in enumerate(ordered) if name in by_name}
    weights = tuple(named.get(place, place) for place in mark.weights)
    given = (None,) * first + tuple(args), by_name
    found = weights_in_call(mark.func, weights, *given, "`mpx.autocast`")
    inside = {place - first if isinstance(place, int) else place for place in found}
    return frozenset(
        place
        for place in inside
        if place in kwargs or (isinstance(place, int) and 0 <= place < len(args))
    )


def _marked(func: object) -> tuple[Mark | None, int, list[str]]:
    """The mark of an autocast function, and what is passed to it besides the call's.

    Returns:
        The mark, None for other functions; how many arguments are in front of those of
        the call; the names of others.
    """
    mark, first, names = None, 0, list[str]()
    while func is not None:
        mark = getattr(func, MARK, mark)
        # JAX copies the mark to what it makes of a function.
        if mark is not None and mark.made is func:
            break
        if isinstance(func, functools.partial | eqx.Partial):
            first += len(func.args)
            names += func.keywords
            func = func.func
        elif inspect.ismethod(func) or isinstance(func, eqx.Module):
            first += hasattr(func, "__self__")
            func = getattr(func, "__func__", getattr(func, "__wrapped__", None))
        else:
            func = getattr(func, "__wrapped__", None)
    return mark, first, names


def refuse_other_lengths(
    steps: int, rows: Sequence[tuple[KeyPath, jax.Array | np.ndarray]]
) -> None:
    """Raises for arrays that are to be cut, and have first axes of several lengths.

    Args:
        steps: The number of micro-batches.
        rows: The paths of the arrays, and the arrays.
    """
    by_length: dict[int, list[str]] = {}
    for path, leaf in rows:
        text = f"{describe(leaf)} at `{input_path(path)}`"
        by_length.setdefault(leaf.shape[0], []).append(text)
    if len(by_length) < 2:
        return
    found = (_few(texts) for texts in by_length.values())
    raise ValueError(
        f"`accumulate={steps}` splits arrays along their first axis, the batch, which "
        f"must be equally long in all of them; got {'; '.join(found)}. {_REMEDY}; "
        "arguments that hold weights: `mpx.autocast(func, weights=(0, 1))`. Several "
        "rows per example need an axis of their own: `x.reshape(batch, rows, ...)`."
    )


def _few(texts: list[str]) -> str:
    more = f" and {len(texts) - _SHOWN} more" if len(texts) > _SHOWN else ""
    return ", ".join(texts[:_SHOWN]) + more


def refuse_length(steps: int, path: KeyPath, leaf: jax.Array | np.ndarray) -> None:
    """Raises for an array of rows that micro-batches cannot share."""
    size = leaf.shape[0]
    if size == 0 or size % steps:
        raise ValueError(
            f"`accumulate={steps}` must divide the first axis of every array that is "
            f"split; got {describe(leaf)} at `{input_path(path)}`. Change the batch "
            f"size. {_REMEDY}."
        )


@contextlib.contextmanager
def in_micro_batch(
    steps: int, paths: Sequence[KeyPath], parts: Sequence[PyTree], are_cut: list[bool]
) -> Iterator[None]:
    """Says of an error that it was raised in a micro-batch, and what that holds.

    Args:
        steps: The number of micro-batches.
        paths: The paths of the leaves of the arguments.
        parts: The leaves of the micro-batch.
        are_cut: Which of them are a part of an array.
    """
    try:
        yield
    except Exception as error:
        cut = [
            f"{describe(part)} at `{input_path(path)}`"
            for path, part, is_cut in zip(paths, parts, are_cut, strict=True)
            if is_cut
        ]
        error.add_note(
            f"Raised in a micro-batch of `accumulate={steps}`, which gets a part of "
            f"each array with a batch axis: {_few(cut) or 'there is none'}. {_REMEDY}."
        )
        raise
