"""The public transform: a function whose operations run in the precision that suits."""

import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from .._cast import cast_of_inputs
from .._dtypes import float_dtype, is_half
from .._errors import describe
from .._nnx_graph import call_with_objects, has_nnx_objects
from .._tree import path_text
from .._typing import DTypeLike
from . import _control_flow, _custom_rules
from ._decisions import Decision
from ._interpreter import evaluate
from ._notes import RESULT, noted_cast
from ._plan import Wish, wish_for
from ._settings import Place, Run, Settings
from ._values import Value, declared, is_castable

# Stands for an array among the results of a traced function.
_ARRAY = object()

_REWRITES = {**_control_flow.REWRITES, **_custom_rules.REWRITES}


def autocast(
    func: Callable[..., Any] | None = None,
    dtype: DTypeLike = jnp.bfloat16,
    *,
    enabled: bool = True,
) -> Callable[..., Any]:
    """Runs a function in mixed precision, chosen operation by operation.

    Matrix products and convolutions run in half precision; sums, exponentials,
    logarithms, norms and whatever else loses digits or range run in float32; the rest
    follows its operands. It holds everywhere in the program: inside of jit, scan,
    while, cond, remat, shard_map, vmap and functions with derivative rules of their
    own.

    Inputs, weights and results keep their dtypes. Weights are cast where they are used,
    so that gradients come out, and are summed, in float32. float64, complex numbers
    and formats of 8 bits are never touched.

    Args:
        func: The function, or a callable PyTree such as an Equinox module, of any
            PyTrees. None gives a decorator; `dtype` is then a keyword.
        dtype: bfloat16 or float16. float16 overflows at 65504 and wants dynamic loss
            scaling.
        enabled: False gives `func` back as it is.

    Returns:
        A function of the same arguments that returns what `func` returns, in the same
        dtypes. It traces `func` at each call: arrays in its arguments are traced, as
        under `jax.jit`; wrap it in `jax.jit` to do so once.

    Raises:
        TypeError: `func` cannot be called.
        ValueError: `dtype` is neither float16 nor bfloat16.

    Examples:
        >>> import jax, jax.numpy as jnp, mpx
        >>> def loss(w, x):
        ...     return jnp.mean(jax.nn.softmax(x @ w))
        >>> w, x = jnp.ones((8, 4)), jnp.ones((2, 8))
        >>> print(jax.make_jaxpr(mpx.autocast(jnp.dot))(x, w))
        { lambda ; a:f32[2,8] b:f32[8,4]. let
            c:bf16[2,8] = convert_element_type[new_dtype=bfloat16 weak_type=False] a
            d:bf16[8,4] = convert_element_type[new_dtype=bfloat16 weak_type=False] b
            e:bf16[2,4] = dot_general[
              dimension_numbers=(([1], [0]), ([], []))
              preferred_element_type=bfloat16
            ] c d
            f:f32[2,4] = convert_element_type[new_dtype=float32 weak_type=False] e
          in (f,) }
        >>> jax.grad(mpx.autocast(loss))(w, x).dtype
        dtype('float32')
    """
    if func is None:
        return functools.partial(autocast, dtype=dtype, enabled=enabled)
    call = "`mpx.autocast(func, dtype)`"
    name = _dtype_name(func)
    if name is not None:
        raise TypeError(
            f"{call} needs a function first; got the dtype {name}. As a decorator it "
            f"takes keywords only: `@mpx.autocast(dtype=jnp.{name})`."
        )
    if not callable(func):
        raise TypeError(f"{call} needs a function; got {describe(func)}.")
    settings = Settings(dtype=_half(dtype, call))
    return _wrapped(func, settings) if enabled else func


def _wrapped(func: Callable[..., Any], settings: Settings) -> Callable[..., Any]:
    @functools.wraps(func, updated=())
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        _refuse_cast_inputs()
        return call_autocast(Run(settings, _REWRITES), func, args, kwargs)

    if isinstance(func, eqx.Module):
        # JAX would print the whole layer with all its fields in its messages.
        del wrapper.__wrapped__
    setattr(wrapper, _MARK, settings)
    setattr(wrapper, _INSIDE, func)
    return wrapper


def _refuse_cast_inputs() -> None:
    """Raises where a gradient function has cast what autocast is about to cast."""
    cast = cast_of_inputs()
    if cast is None:
        return
    call, dtype = cast
    raise ValueError(
        f"A function made by `mpx.autocast` needs inputs as they are; {call} has cast "
        f"them to {dtype.name}, because it could not see that the function, hidden in "
        f"a lambda perhaps, casts on its own. Give the autocast function itself to "
        f"{call}, put `mpx.autocast` around the outermost function, or switch the cast "
        'of inputs off: `policy="full"`.'
    )


# The attribute by which a function is known to be one that autocast made.
_MARK = "__mpx_autocast__"
# The attribute under which it has what it was made of.
_INSIDE = "__mpx_inside__"


def unwrapped(
    func: Callable[..., Any],
) -> tuple[Callable[..., Any], Callable[[Callable[..., Any]], Callable[..., Any]]]:
    """What autocast wrapped, and how to wrap it again; other functions as they are.

    For those who look into a callable PyTree: its arrays are not in the wrapper's.
    """
    if not hasattr(func, _MARK) or not hasattr(func, _INSIDE):
        return func, lambda same: same
    settings = getattr(func, _MARK)
    return getattr(func, _INSIDE), lambda new: _wrapped(new, settings)


def _dtype_name(value: Any) -> str | None:
    """The name of a dtype, which can be called, and None for other things."""
    if not isinstance(value, np.dtype | str | type):
        return None  # an instance may have a `dtype` and yet be a layer
    try:
        found = jnp.dtype(value)
    except TypeError:
        return None
    return None if found.kind == "O" else found.name


def _half(dtype: DTypeLike, call: str) -> np.dtype:
    found = float_dtype(dtype, call)
    if not is_half(found):
        raise ValueError(
            f"{call} computes in float16 or bfloat16; got {found.name}. For full "
            "precision call the function without it, or with `enabled=False`."
        )
    return found


def settings_of(func: Any) -> Settings | None:
    """What the transform that made a function was told; None for other functions."""
    while func is not None:
        settings = getattr(func, _MARK, None)
        if settings is not None:
            return settings
        is_partial = isinstance(func, functools.partial | eqx.Partial)
        func = func.func if is_partial else getattr(func, "__wrapped__", None)
    return None


def decisions_of(
    func: Callable[..., Any],
    settings: Settings,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> list[Decision]:
    """What autocast decides for each equation of a call, in the program's order.

    Nothing is computed: `jax.ShapeDtypeStruct` will do for arrays.
    """
    run = Run(settings, _REWRITES, is_recording=True)
    leaves, treedef = jax.tree.flatten((args, kwargs))
    is_array = [isinstance(x, _ARRAYS | jax.ShapeDtypeStruct) for x in leaves]

    def flat(arrays: list[Any]) -> Any:
        remaining = iter(arrays)
        full = [
            next(remaining) if a else x for x, a in zip(leaves, is_array, strict=True)
        ]
        args, kwargs = jax.tree.unflatten(treedef, full)
        results = call_autocast(run, func, args, kwargs)
        return [x for x in jax.tree.leaves(results) if isinstance(x, _ARRAYS)]

    jax.eval_shape(flat, [x for x, a in zip(leaves, is_array, strict=True) if a])
    assert run.decisions is not None
    return list(run.decisions.values())


_ARRAYS = jax.Array | np.ndarray | np.generic


def call_autocast(
    run: Run, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Calls a function, rewritten."""
    if has_nnx_objects((func, args, kwargs)):
        # As trees they would lose what the function changes in them.
        rewritten = functools.partial(call_autocast, run)
        return call_with_objects(rewritten, "`mpx.autocast`", func, args, kwargs)
    paths, treedef = jax.tree_util.tree_flatten_with_path((func, args, kwargs))
    leaves = [leaf for _, leaf in paths]
    is_array = [isinstance(x, _ARRAYS) for x in leaves]
    found: list[Any] = []

    def flat(*arrays: Any) -> list[Any]:
        remaining = iter(arrays)
        full = [
            next(remaining) if a else x for x, a in zip(leaves, is_array, strict=True)
        ]
        func, args, kwargs = jax.tree.unflatten(treedef, full)
        out, out_tree = jax.tree.flatten(func(*args, **kwargs))
        rest = [_ARRAY if isinstance(x, _ARRAYS) else x for x in out]
        found[:] = [out_tree, rest]
        return [x for x in out if isinstance(x, _ARRAYS)]

    closed = jax.make_jaxpr(flat)(
        *(x for x, a in zip(leaves, is_array, strict=True) if a)
    )
    values = [
        _input(path, leaf) for (path, leaf), a in zip(paths, is_array, strict=True) if a
    ]
    avals = closed.out_avals
    wishes = tuple(
        wish_for(aval.dtype) if is_castable(aval) else Wish.ANY for aval in avals
    )
    results = evaluate(run, Place(), closed.jaxpr, closed.consts, values, wishes)
    with noted_cast(RESULT):
        cast = [
            jnp.asarray(v.cast(aval.dtype)[0] if is_castable(aval) else v.array)
            for v, aval in zip(results, avals, strict=True)
        ]
    arrays = iter(cast)
    out_tree, rest = found
    return jax.tree.unflatten(
        out_tree, [next(arrays) if x is _ARRAY else x for x in rest]
    )


def _input(path: Any, leaf: Any) -> Value:
    """An argument; those of the function itself and the first one are parameters."""
    root, *rest = path
    if root.idx == 0:
        return declared(leaf, path_text(tuple(rest)))
    if root.idx == 1 and rest[0].idx == 0:
        return declared(leaf, path_text(tuple(rest[1:])))
    return declared(leaf)
