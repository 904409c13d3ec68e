"""Which rows of a batch make a step bad, by halving the batch.

The program is not compiled again: where a part of the batch is tried, its rows are
repeated until the batch is full.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from .._typing import AnyArray

# How many runs are spent on it.
_RUNS = 200


def bad_rows(
    is_bad: Callable[[Sequence[AnyArray]], bool],
    inputs: Sequence[AnyArray],
    batch: Sequence[int],
) -> tuple[tuple[int, ...], int]:
    """The rows that make a step bad, each alone, and how many were not tried alone.

    Args:
        is_bad: Whether a step is bad with these inputs.
        inputs: The inputs that it had.
        batch: The places of those whose first axis is that of the batch.

    Returns:
        Their numbers, and how many rows of bad parts are left when the runs are used
        up. Nothing where no row does it alone, or every row does.
    """
    count = inputs[batch[0]].shape[0] if batch else 0
    found: list[int] = []
    runs = 0

    def of(rows: Sequence[int]) -> list[AnyArray]:
        index = np.resize(np.asarray(rows), count)
        chosen = list(inputs)
        for i in batch:
            x = jnp.asarray(inputs[i])
            # On explicit axes it has to be told where the rows are to be.
            where = jax.typeof(x).sharding
            is_explicit = any(axis is not None for axis in where.spec)
            chosen[i] = x.at[index].get(out_sharding=where if is_explicit else None)
        return chosen

    todo = [list(range(count))] if count else []
    while todo and runs < _RUNS:
        rows = todo.pop()
        runs += 1
        if not is_bad(of(rows)):
            continue
        if len(rows) == 1:
            found.append(rows[0])
            continue
        middle = len(rows) // 2
        todo += [rows[middle:], rows[:middle]]
    if len(found) == count:
        return (), 0
    return tuple(sorted(found)), sum(map(len, todo))


def batch_inputs(inputs: Sequence[AnyArray], candidates: Sequence[int]) -> list[int]:
    """Which inputs are cut into rows: those with the most common first length."""
    shapes = {i: np.shape(inputs[i]) for i in candidates}
    lengths = [shape[0] for shape in shapes.values() if shape and shape[0] > 1]
    if not lengths:
        return []
    most = max(lengths, key=lambda n: (lengths.count(n), n))
    return [i for i, shape in shapes.items() if shape and shape[0] == most]
