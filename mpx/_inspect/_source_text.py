"""How lines of code, functions and scopes are written in a report."""

import os
import re
from collections.abc import Iterable, Sequence

from .._autocast import Note, read_note
from .._program import (
    LIBRARIES,
    DataScope,
    Frame,
    ScopeEntry,
    is_library,
    is_ours,
    real_path,
    user_frame,
)

# Scopes that say less than the functions do: Equinox has one around each kind of layer,
# and JAX around each einsum.
_LIBRARY_SCOPE = re.compile(r"eqx\.nn\..*|.*->.*")


def line_text(frames: Sequence[Frame]) -> str:
    """The innermost line that the user wrote: `model.py:41`; "" if none is known."""
    frame = user_frame(frames)
    return "" if frame is None else f"{short_path(frame.file)}:{frame.line}"


def stack_text(frames: Sequence[Frame]) -> tuple[str, ...]:
    """The calls, the outermost first: `model.py:41 Block.__call__`."""
    return tuple(
        f"{short_path(frame.file)}:{frame.line} {frame.function}"
        for frame in frames
        if not is_ours(frame)
    )


def function_path(frames: Sequence[Frame]) -> str:
    """The functions around an operation as a path: `loss/Model/Attention/Linear`."""
    names: list[str] = []
    for frame in frames:
        name = "" if is_ours(frame) else _function_name(frame)
        if name and names[-1:] != [name]:
            names.append(name)
    return "/".join(names)


def scope_path(entries: Iterable[ScopeEntry]) -> str:
    """The named scopes around an operation as a path."""
    names = [
        entry.name
        for entry in entries
        if not entry.is_transform
        and entry.name != RECOMPUTED
        and not isinstance(entry.name, DataScope)
        and not _LIBRARY_SCOPE.fullmatch(entry.name)
    ]
    # Derivatives of functions with rules of their own repeat the scopes around them.
    for length in range(len(names) // 2, 0, -1):
        start = 0
        while start + 2 * length <= len(names):
            middle, end = start + length, start + 2 * length
            if names[start:middle] == names[middle:end]:
                del names[middle:end]
            else:
                start += 1
    return "/".join(names)


RECOMPUTED = "rematted_computation"
"""The scope that `jax.checkpoint` puts around what it computes again."""


def phase(entries: Sequence[ScopeEntry]) -> str:
    """Whether an operation is of the forward or the backward pass."""
    if any(entry.name == RECOMPUTED for entry in entries):
        return "recompute"
    if any(entry.is_transform and entry.name == "transpose" for entry in entries):
        return "backward"
    return "forward"


def innermost_note(entries: Iterable[ScopeEntry]) -> Note | None:
    """What autocast noted on an operation; the last word where several did."""
    notes = [read_note(entry.name) for entry in entries]
    return next((note for note in reversed(notes) if isinstance(note, Note)), None)


def short_path(file: str) -> str:
    """A path without what is particular to this machine."""
    path = real_path(file)
    for start in (*sorted(LIBRARIES, key=len, reverse=True), os.getcwd() + os.sep):
        if path.startswith(start):
            return path.removeprefix(start).removeprefix(f"site-packages{os.sep}")
    return os.path.basename(path) if os.path.isabs(path) else path


# Wrappers of libraries, which are around every call.
_PLUMBING = frozenset(
    {
        "BoundMethod", "Module", "Partial", "filter_jit", "jaxtyped",
        "run_interceptors", "transform_with_state", "wrap_method",
        "GradFn", "UpdateContextManager",
    }
)  # fmt: skip


def _function_name(frame: Frame) -> str:
    """`Block.__call__` is `Block`, `make.<locals>.loss` is `loss`.

    Of libraries only what is public: `scale_by_adam.<locals>.update_fn` is
    `scale_by_adam`, and `_JitWrapper._call` is nothing.
    """
    in_library = is_library(frame)
    outer, _, inner = frame.function.rpartition(".<locals>.")
    name = (frame.function.partition(".<locals>.")[0] if in_library else inner) or outer
    owner, _, method = name.rpartition(".")
    if method.startswith("<"):  # lambdas, comprehensions, modules
        return ""
    if owner and (method.startswith("__") or (in_library and method.startswith("_"))):
        name = owner.rpartition(".")[2]
    is_hidden = in_library and (name.startswith("_") or name in _PLUMBING)
    return "" if is_hidden else name
