"""Draws the rooms of mpx and what they import, floor by floor.

    python -m tests.rooms
    python -m tests.rooms --picture docs/pictures/rooms.svg

A room is an entry of `mpx/`. It is on the floor above the highest room that it imports.
Imports inside of functions count, those for type checkers do not. Prints each floor
with its rooms: modules, code lines, and the rooms that they import. The picture has the
same; `--root` is for another checkout.
"""

import argparse
import ast
import html
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
WIDTH, HEIGHT, GAP, ACROSS = 118, 34, 46, 10


class Room(NamedTuple):
    """An entry of `mpx/`: its modules, code lines, and the rooms that it imports."""

    modules: int
    lines: int
    imports: frozenset[str]


def rooms_of(root: Path = ROOT) -> dict[str, Room]:
    """Returns the rooms of a checkout by name, without `mpx/__init__.py`."""
    package = root / "mpx"
    entries = [p for p in package.iterdir() if p.suffix == ".py" or p.is_dir()]
    files = {
        path.stem: sorted(path.rglob("*.py")) if path.is_dir() else [path]
        for path in sorted(entries)
        if path.stem not in ("__init__", "__pycache__")
    }
    return {
        name: Room(
            len(modules),
            sum(map(_code_lines, modules)),
            frozenset(r for m in modules for r in _imports(m, package))
            & set(files) - {name},
        )
        for name, modules in files.items()
        if modules
    }


def floors_of(rooms: dict[str, Room]) -> list[list[str]]:
    """Returns the names of the rooms by floor, the lowest first.

    Raises:
        ValueError: Rooms import each other in a circle.
    """
    left, floors = dict(rooms), []
    while left:
        floor = sorted(n for n, room in left.items() if not room.imports & set(left))
        if not floor:
            raise ValueError(f"these rooms import each other in a circle: {set(left)}")
        floors.append(floor)
        for name in floor:
            del left[name]
    return floors


def _imports(file: Path, package: Path) -> Iterator[str]:
    """Yields the rooms that a module imports, and names that are not rooms."""
    parents = ("mpx", *file.relative_to(package).parts[:-1])
    todo: list[ast.AST] = [ast.parse(file.read_text())]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        todo += ast.iter_child_nodes(node)
        if isinstance(node, ast.ImportFrom):
            base = parents[: len(parents) - node.level + 1] if node.level else ()
            path = [*base, *(node.module or "").split(".")]
            path = [part for part in path if part]
            if path == ["mpx"]:
                yield from (alias.name for alias in node.names)
            elif path[:1] == ["mpx"]:
                yield path[1]


def _code_lines(file: Path) -> int:
    """Counts the lines of a module without docstrings, comments and blank lines."""
    text = file.read_text()
    kinds = ast.FunctionDef | ast.ClassDef | ast.Module
    nodes = [n for n in ast.walk(ast.parse(text)) if isinstance(n, kinds)]
    docs = [n.body[0] for n in nodes if ast.get_docstring(n) is not None]
    documented = {i for d in docs for i in range(d.lineno, (d.end_lineno or 0) + 1)}
    lines = enumerate(text.splitlines(), 1)
    code = {i for i, line in lines if line.strip() and line.strip()[0] != "#"}
    return len(code - documented)


def text_of(rooms: dict[str, Room]) -> str:
    """Returns the plan as text, the highest floor first."""
    floors = floors_of(rooms)
    lines = []
    for number, floor in reversed(list(enumerate(floors, 1))):
        for name in floor:
            room = rooms[name]
            size = f"{room.modules:3} modules {room.lines:6} lines"
            lines.append(
                f"{number:3}  {name:18} {size}  {' '.join(sorted(room.imports))}"
            )
    arrows = sum(len(room.imports) for room in rooms.values())
    lines.append(f"{len(rooms)} rooms, {len(floors)} floors, {arrows} arrows")
    return "\n".join(lines)


def picture_of(rooms: dict[str, Room]) -> str:
    """Returns the plan as SVG: a row for each floor, an arrow for each import."""
    rows = [
        floor[i : i + ACROSS]
        for floor in reversed(floors_of(rooms))
        for i in range(0, len(floor), ACROSS)
    ]
    width = max(map(len, rows)) * (WIDTH + 14) + 20
    height = len(rows) * (HEIGHT + GAP) + 10
    at = {}
    for y, row in enumerate(rows):
        start = (width - len(row) * (WIDTH + 14) + 14) / 2
        for x, name in enumerate(row):
            at[name] = (start + x * (WIDTH + 14), 10 + y * (HEIGHT + GAP))
    arrows, boxes = [], []
    for name, room in rooms.items():
        x, y = at[name]
        for other in sorted(room.imports):
            a, b = at[other]
            ends = (
                f'x1="{x + WIDTH / 2}" y1="{y + HEIGHT}" x2="{a + WIDTH / 2}" y2="{b}"'
            )
            arrows.append(f'<line {ends} stroke="#7a8ea0" stroke-opacity="0.45"/>')
        box = f'x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}" rx="4"'
        boxes.append(f'<rect {box} fill="#eef3f7" stroke="#345"/>')
        middle = f'x="{x + WIDTH / 2}" text-anchor="middle"'
        boxes.append(f'<text {middle} y="{y + 15}">{html.escape(name)}</text>')
        size = f"{room.modules} modules, {room.lines}"
        boxes.append(f'<text {middle} y="{y + 28}" fill="#567">{size}</text>')
    head = f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="11"'
    body = "\n".join((*arrows, *boxes))
    return f'<svg xmlns="http://www.w3.org/2000/svg" {head}>\n{body}\n</svg>\n'


def main() -> None:
    """Prints the plan, and writes the picture if a file is given."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--picture", type=Path, help="the SVG to write")
    parser.add_argument("--root", type=Path, default=ROOT)
    arguments = parser.parse_args()
    rooms = rooms_of(arguments.root)
    print(text_of(rooms))
    if arguments.picture:
        arguments.picture.write_text(picture_of(rooms))


if __name__ == "__main__":
    main()
