"""Finds the source of an equation: the user's lines, named scopes, transforms."""

import contextlib
import dataclasses
import functools
import os
import re
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import jax
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, JaxprEqn

from .._base.jax_compat import open_jaxpr, raw_frames
from .._base.typing import Program


@dataclasses.dataclass(frozen=True)
class Frame:
    """One line of the user's code, or of a library other than JAX."""

    file: str
    line: int
    column: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


# JAX publishes frames without its own only as text (`summarize`).
_FRAME = re.compile(r"(?P<file>.*):(?P<line>\d+):(?P<column>\d+) \((?P<function>.*)\)")
_ALL_FRAMES = 1000


def source_frames(equation: JaxprEqn) -> tuple[Frame, ...]:
    """Returns the calls that led to an equation, outermost first, without JAX's."""
    text = source_info_util.summarize(equation.source_info, num_frames=_ALL_FRAMES)
    found = [_FRAME.fullmatch(line) for line in text.splitlines()]
    return tuple(
        Frame(m["file"], int(m["line"]), int(m["column"]), m["function"])
        for m in found
        if m is not None
    )


_PACKAGE = str(Path(__file__).resolve().parents[1]) + os.sep
LIBRARIES = tuple(
    {
        os.path.realpath(sysconfig.get_path(name)) + os.sep
        for name in ("stdlib", "platstdlib", "purelib", "platlib")
    }
)


def user_frame(frames: Sequence[Frame]) -> Frame | None:
    """Returns the innermost call in the user's code, else in a library; or None."""
    frames = [frame for frame in frames if not is_ours(frame)]
    own = [frame for frame in frames if not is_library(frame)]
    return (own or list(frames) or [None])[-1]


def line_of(equation: JaxprEqn) -> str:
    """Returns the user's line that an equation comes from; "" if unknown."""
    frame = user_frame(source_frames(equation))
    return "" if frame is None else str(frame)


@functools.lru_cache(maxsize=4096)
def real_path(path: str) -> str:
    """Resolves the symbolic links of a path, as in `LIBRARIES`."""
    return os.path.realpath(path)


def is_library(frame: Frame) -> bool:
    """Returns whether a frame is of Python's library, an installed package or mpx."""
    path = real_path(frame.file)
    return path.startswith((*LIBRARIES, _PACKAGE)) or "site-packages" in path


def is_ours(frame: Frame) -> bool:
    """Returns whether a frame is of mpx itself, whose wrappers enclose every call."""
    return real_path(frame.file).startswith(_PACKAGE)


Span = tuple[str, int | None, int | None, int | None, int | None]


def source_span(equation: JaxprEqn) -> Span | None:
    """Returns file, first and last line and column of the user's expression.

    It identifies equations of one expression: `x * scale` makes a cast of `x` and a
    multiplication with the same span, and the cast in `f(x) * scale` has another one.
    """
    frames = source_frames(equation)
    if not frames:
        return None
    innermost = frames[-1]
    for code, position in raw_frames(equation.source_info.traceback):
        # Raw frames begin with those of JAX and mpx.
        if code.co_filename != innermost.file:
            continue
        # `position` counts bytes, and an instruction of CPython has two.
        line, last, column, end = list(code.co_positions())[position // 2]
        if (line, column) == (innermost.line, innermost.column):
            return (innermost.file, line, last, column, end)
    return None


# Frames of JAX and mpx do not help the author of the program.
_INSIDE = tuple(
    f"{folder}{os.sep}"
    for folder in (Path(jax.__file__).parent, Path(__file__).parents[1])
)


def has_own_lines(equation: JaxprEqn) -> bool:
    """Returns whether code of neither JAX nor mpx is among an equation's frames."""
    frames = raw_frames(equation.source_info.traceback)
    return not all(is_inside(code.co_filename) for code, _ in frames)


def is_inside(file: str) -> bool:
    """Returns whether a file is of JAX or of mpx."""
    return file.startswith(_INSIDE)


# These evaluate existing programs, whose operations have their own lines.
_EVALUATES = tuple(
    os.path.join(_INSIDE[0], "_src", name) for name in ("core.py", "interpreters")
)


def frames_within(equation: JaxprEqn, function: tuple[str, int]) -> tuple[Frame, ...]:
    """Returns the calls that led to an equation from the function it was traced in.

    A function of JAX, `jnp.where` or `jax.nn.gelu`, is traced once for all its callers.
    If that happens while a program is differentiated or rewritten, its operations get
    the line of the first caller.

    Args:
        equation: The equation.
        function: File and line of the function, see `place_of`.
    """
    found, (file, _) = source_frames(equation), function
    if found and file.startswith(_INSIDE[0]) and not file.startswith(_EVALUATES):
        codes = [code for code, _ in raw_frames(equation.source_info.traceback)]
        if function not in ((one.co_filename, one.co_firstlineno) for one in codes):
            return ()
    return found


def with_lines_of(
    program: Program, call: JaxprEqn, *, all_of_it: bool = False
) -> ClosedJaxpr:
    """Returns a program whose operations have the source lines of its call.

    Args:
        program: The program, open or closed.
        call: The call that the program was traced for.
        all_of_it: Also replace the lines of operations that have their own.
    """
    jaxpr, traceback = open_jaxpr(program), call.source_info.traceback
    made = [
        e.replace(source_info=e.source_info.replace(traceback=traceback))
        if all_of_it or not has_own_lines(e)
        else e
        for e in jaxpr.eqns
    ]
    return ClosedJaxpr(jaxpr.replace(eqns=made), getattr(program, "consts", ()))


Data = TypeVar("Data")


class DataScope(str):
    """The name of a named scope that carries data besides its text.

    It stays on every equation that is traced in the scope, through autodiff, loops,
    batching and `jit`. A user's scope name never has this type. JAX compares names as
    strings, so names with different data must differ.
    """

    data: object

    def __new__(cls, text: str, data: object) -> "DataScope":
        """Creates a name with data."""
        self = super().__new__(cls, text)
        self.data = data
        return self


def data_scope(text: str, data: object) -> contextlib.AbstractContextManager[object]:
    """Returns a scope in which traced equations carry data."""
    return jax.named_scope(DataScope(text, data))


def data_of(scope: str, kind: type[Data]) -> Data | None:
    """Returns the data of this kind that the name of a scope carries, or None."""
    data = scope.data if isinstance(scope, DataScope) else None
    return data if isinstance(data, kind) else None


@dataclasses.dataclass(frozen=True)
class ScopeEntry:
    """An entry of a name stack: a named scope, or a transform such as `transpose`."""

    name: str
    is_transform: bool


def scopes(equation: JaxprEqn) -> tuple[ScopeEntry, ...]:
    """Returns the entries of an equation's own name stack, the outermost first.

    In a nested program they are relative to the equation that holds it.
    """
    stack = equation.source_info.name_stack.stack
    return tuple(
        # There is no public name for the two classes of entries (jax 0.10 to 0.12).
        ScopeEntry(entry.name, type(entry).__name__ != "Scope")
        for entry in stack
    )
