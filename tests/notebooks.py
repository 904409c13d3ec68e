"""Runs notebooks from top to bottom, and keeps what their cells show.

Jupyter is not needed: cells are Python, what they print is a stream, and what their
last line gives is shown as text, as a picture or as HTML. `make notebooks` writes the
outputs into the files.
"""

import ast
import base64
import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "examples" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


def read(path: Path) -> dict[str, Any]:
    """A notebook, as JSON has it."""
    return json.loads(path.read_text(encoding="utf-8"))


def code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    """Its cells of Python."""
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def run(notebook: dict[str, Any], name: str) -> list[list[dict[str, Any]]]:
    """Runs all cells in one namespace; the outputs of each."""
    namespace: dict[str, Any] = {"__name__": name}
    return [
        _outputs("".join(cell["source"]), namespace, number)
        for number, cell in enumerate(code_cells(notebook), 1)
    ]


def _outputs(source: str, namespace: dict[str, Any], number: int) -> list[Any]:
    body = ast.parse(source).body
    last = body.pop() if body and isinstance(body[-1], ast.Expr) else None
    name = f"cell {number}"
    printed, value = io.StringIO(), None
    with contextlib.redirect_stdout(printed):
        exec(compile(ast.Module(body, []), name, "exec"), namespace)
        if last is not None:
            expression = ast.Expression(last.value)
            value = eval(compile(expression, name, "eval"), namespace)
    found: list[Any] = []
    if text := printed.getvalue():
        lines = text.splitlines(keepends=True)
        found.append({"output_type": "stream", "name": "stdout", "text": lines})
    if value is not None:
        found.append(
            {
                "output_type": "execute_result",
                "execution_count": number,
                "metadata": {},
                "data": _shown(value),
            }
        )
    return found


def _shown(value: Any) -> dict[str, Any]:
    data: dict[str, Any] = {"text/plain": repr(value).splitlines(keepends=True)}
    if hasattr(value, "savefig"):
        picture = io.BytesIO()
        value.savefig(picture, format="png", dpi=80, metadata={"Software": None})
        data["image/png"] = base64.b64encode(picture.getvalue()).decode()
    elif hasattr(value, "_repr_html_"):
        data["text/html"] = value._repr_html_().splitlines(keepends=True)
    return data


def write(path: Path) -> None:
    """Runs a notebook and puts the outputs into its file."""
    notebook = read(path)
    cells = code_cells(notebook)
    for number, (cell, outputs) in enumerate(
        zip(cells, run(notebook, path.stem), strict=True), 1
    ):
        cell |= {"outputs": outputs, "execution_count": number}
    text = json.dumps(notebook, indent=1, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    for name in sys.argv[1:]:
        write(Path(name))
