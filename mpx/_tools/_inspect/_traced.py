"""Traces a call to a jaxpr, without running it, and names its parts for reports.

The inputs of the jaxpr have the paths of arguments; its operations have lines,
functions and scopes of the user's code.
"""

import dataclasses
import os
import re
from collections.abc import Callable, Iterable, Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr
from jax.tree_util import KeyPath
from jaxtyping import PyTree

from ..._autocast import Note, read_note
from ..._base.errors import describe
from ..._base.tree import path_text
from ..._base.typing import AnyArray
from ..._nnx_graph import places
from ..._program import (
    LIBRARIES,
    Call,
    DataScope,
    Frame,
    ScopeEntry,
    data_of,
    is_array_or_type,
    is_library,
    is_ours,
    named_like,
    real_path,
    user_frame,
)
from ..._quantize import Leg


@dataclasses.dataclass(frozen=True)
class Traced:
    """A call as a program."""

    jaxpr: ClosedJaxpr
    paths: tuple[str, ...]
    """For each input, where it is: `layers[0].weight`, `args[1]['image']`."""
    is_weight: tuple[bool, ...]
    """For each input, whether it is a weight."""
    inputs: tuple[AnyArray, ...]
    call: Call
    """What was traced: the inputs to the arrays of the result; it knows the rest."""


def _is_input(leaf: object) -> bool:
    """Returns whether a leaf becomes an input of the program."""
    # Excludes NumPy's objects, strings and dates.
    is_of_numpy = isinstance(leaf, np.ndarray | np.generic)
    return is_array_or_type(leaf) and not (is_of_numpy and leaf.dtype.kind in "OSUMm")


def trace(
    func: Callable[..., PyTree],
    args: tuple[PyTree, ...],
    kwargs: PyTree,
    wrap: Callable[[Callable[..., PyTree]], Callable[..., PyTree]],
    weights: tuple[int | str, ...],
    asked: str = "`mpx.explain(fn)(*args)`",
) -> Traced:
    """Traces a call of `wrap(func)` with abstract values.

    If `func` is a tree with arrays, such as an Equinox module, it is an input, and its
    arrays are the weights. Otherwise `weights` lists the positions or names of the
    arguments with weights. Errors name `asked`, the public call.
    """
    has_own = any(_is_input(leaf) for leaf in jax.tree.leaves(func))

    def called(own: PyTree, args: PyTree, kwargs: PyTree) -> PyTree:
        return wrap(own if has_own else func)(*args, **kwargs)

    tree = (func if has_own else None, args, kwargs)
    call = Call(*tree, _is_input, called)
    _refuse_tracers(jax.tree.leaves(tree), asked)
    pairs = zip(places(tree), call.form.are_arrays, strict=True)
    paths = (path for path, is_one in pairs if is_one)
    named = [input_name(path, () if has_own else weights) for path in paths]

    def flat(*arrays: AnyArray) -> list[AnyArray]:
        return call(*arrays)

    jaxpr = jax.make_jaxpr(named_like(flat, func, call.paths))(*call.arrays)
    return Traced(
        jaxpr,
        tuple(name for name, _ in named),
        tuple(is_weight for _, is_weight in named),
        tuple(call.arrays),
        call,
    )


def trace_gradient(traced: Traced) -> ClosedJaxpr:
    """Returns the program of a traced call's result and its gradient.

    The gradient is that of the floating weights, or of all inputs if there are none.
    """
    is_float = [jnp.issubdtype(x.dtype, jnp.inexact) for x in traced.inputs]
    chosen = [f and w for f, w in zip(is_float, traced.is_weight, strict=True)]
    if not any(chosen):
        chosen = is_float

    def gradient(*arrays: AnyArray) -> PyTree:
        weights, rest = eqx.partition(list(arrays), chosen)

        def loss(weights: PyTree) -> list[AnyArray]:
            results = map(jnp.asarray, traced.call(*eqx.combine(weights, rest)))
            return [x for x in results if jnp.issubdtype(x.dtype, jnp.inexact)]

        values, pull_back = jax.vjp(loss, weights)
        return values, pull_back([jnp.ones_like(x) for x in values])

    return jax.make_jaxpr(gradient)(*traced.inputs)


def input_name(path: KeyPath, weights: tuple[int | str, ...]) -> tuple[str, bool]:
    """Returns the path of an input of a `Call`, and whether it is a weight."""
    root, rest = path[0].idx, path[1:]
    if root == 0:
        return path_text(rest), True
    whole = ("args" if root == 1 else "kwargs") + jax.tree_util.keystr(rest)
    if (rest[0].idx if root == 1 else rest[0].key) not in weights:
        return whole, False
    # With weights in several arguments, the path includes the argument.
    return (path_text(rest[1:]) if len(weights) == 1 else "") or whole, True


def _refuse_tracers(leaves: list[object], asked: str) -> None:
    for leaf in leaves:
        if isinstance(leaf, Tracer):
            raise TypeError(
                f"{asked} needs arrays or `jax.ShapeDtypeStruct`s; got "
                f"{describe(leaf)} that JAX is tracing. Call it outside `jax.jit`, "
                "`jax.grad` and the like; use them inside `fn` instead."
            )


# --- Text of lines, functions and scopes ----------------------------------------------

# Scopes that are less specific than functions: Equinox has one around each kind of
# layer, and JAX around each einsum.
_LIBRARY_SCOPE = re.compile(r"eqx\.nn\..*|.*->.*")


def line_text(frames: Sequence[Frame]) -> str:
    """Returns the innermost line of the user's code: `model.py:41`; "" if unknown."""
    frame = user_frame(frames)
    return "" if frame is None else f"{short_path(frame.file)}:{frame.line}"


def stack_text(frames: Sequence[Frame]) -> tuple[str, ...]:
    """Returns the calls, the outermost first: `model.py:41 Block.__call__`."""
    return tuple(
        f"{short_path(frame.file)}:{frame.line} {frame.function}"
        for frame in frames
        if not is_ours(frame)
    )


def function_path(frames: Sequence[Frame]) -> str:
    """Returns the functions around an operation: `loss/Model/Attention/Linear`."""
    names: list[str] = []
    for frame in frames:
        name = "" if is_ours(frame) else _function_name(frame)
        if name and names[-1:] != [name]:
            names.append(name)
    return "/".join(names)


def scope_path(entries: Iterable[ScopeEntry]) -> str:
    """Returns the named scopes around an operation as a path."""
    names = [
        entry.name
        for entry in entries
        if not entry.is_transform
        and entry.name != RECOMPUTED
        and not isinstance(entry.name, DataScope)
        and not _LIBRARY_SCOPE.fullmatch(entry.name)
    ]
    # Derivatives of functions with custom rules repeat the scopes around them.
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
    """Returns `forward`, `backward` or `recompute`."""
    if any(entry.name == RECOMPUTED for entry in entries):
        return "recompute"
    if any(entry.is_transform and entry.name == "transpose" for entry in entries):
        return "backward"
    return "forward"


def innermost_note(entries: Iterable[ScopeEntry]) -> Note | None:
    """Returns autocast's note on an operation, the innermost of several."""
    notes = [read_note(entry.name) for entry in entries]
    return next((note for note in reversed(notes) if isinstance(note, Note)), None)


def leg_of(entries: Iterable[ScopeEntry]) -> Leg | None:
    """Returns the leg of a quantized product that an operation is in, or None."""
    return next(filter(None, (data_of(entry.name, Leg) for entry in entries)), None)


def short_path(file: str) -> str:
    """Returns a path without the parts specific to this machine."""
    path = real_path(file)
    for start in (*sorted(LIBRARIES, key=len, reverse=True), os.getcwd() + os.sep):
        if path.startswith(start):
            return path.removeprefix(start).removeprefix(f"site-packages{os.sep}")
    return os.path.basename(path) if os.path.isabs(path) else path


# Wrappers of libraries that are around every call.
_PLUMBING = frozenset(
    {
        "BoundMethod", "Module", "Partial", "filter_jit", "jaxtyped",
        "run_interceptors", "transform_with_state", "wrap_method",
        "GradFn", "UpdateContextManager",
    }
)  # fmt: skip


def _function_name(frame: Frame) -> str:
    """Returns a short name: `Block` for `Block.__call__`, `loss` for `f.<locals>.loss`.

    Of libraries only public names: `scale_by_adam` for
    `scale_by_adam.<locals>.update_fn`, "" for `_JitWrapper._call`.
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
