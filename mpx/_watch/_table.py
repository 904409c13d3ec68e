"""A table whose first column gives way where there is no room for all."""

from collections import Counter
from collections.abc import Iterable, Sequence


def table(
    rows: Sequence[Sequence[str]], width: int, least: int, *, ends_with_text: bool
) -> list[str]:
    """The lines of a table, numbers to the right.

    Args:
        rows: The cells, the head first; of equal numbers.
        width: How wide a line may be.
        least: How wide the first column is at least, if it needs to be.
        ends_with_text: Whether the last column is text, and not a number.
    """
    sizes = [max(map(len, column)) for column in zip(*rows, strict=True)]
    room = max(width - sum(sizes[1:]) - 2 * (len(sizes) - 1), least)
    first = min(sizes[0], room)
    lines = []
    for name, *cells in rows:
        found = [x.rjust(n) for x, n in zip(cells, sizes[1:], strict=True)]
        if ends_with_text:
            found[-1] = cells[-1]
        line = "  ".join([_cut(name, first).ljust(first), *found])
        lines.append(line.rstrip()[:width])
    return lines


def numbered(names: Iterable[tuple[str, object]]) -> list[str]:
    """Names with numbers behind those that come again of the same kind."""
    seen: Counter[tuple[str, object]] = Counter()
    found = []
    for name in names:
        seen[name] += 1
        found.append(name[0] + (f" #{seen[name]}" if seen[name] > 1 else ""))
    return found


def _cut(text: str, size: int) -> str:
    """The end of a path says more than its beginning."""
    return text if len(text) <= size else "…" + text[len(text) - size + 1 :]
