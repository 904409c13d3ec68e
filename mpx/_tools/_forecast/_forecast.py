"""`mpx.forecast`: estimates memory and time of a step on a device, without it."""

import contextlib
import dataclasses
import importlib.metadata
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from jaxtyping import PyTree

from ..._base.errors import describe
from ..._base.wraps import name_of
from .._counter import Device, Roof
from ._estimate import batch_of, estimate, resized
from ._forecast_report import Constant, Estimate, find_target, quantized
from ._forecast_views import Forecast, constant_text
from ._steps import AS_WRITTEN, ForecastStep, Variant, read_precisions

# --- The largest batch that fits, and the batch from which a precision pays -----------

_CLOSE = 1.05
_BELOW = 0.98
_SLOW = 0.55
_FARTHEST = 64
_MOST = 12
_Points = dict[int, int | None]


def largest_batch(
    memory_of: Callable[[int], int | None],
    limit: int,
    batch: int,
    known: int | None,
    unit: int = 1,
) -> int:
    """Returns the largest batch whose program needs at most `limit` bytes, to 5 %.

    A secant method: each program is compiled just below the batch at which the line
    through two others meets the limit, and at last 5 % above one that fits. Memory is
    not linear near the limit, where XLA recomputes more to save some. So if a program
    leaves more than half of the interval, the next one halves it.

    Args:
        memory_of: Returns the bytes of the program of a batch; None if it does not fit.
        limit: The bytes of the device.
        batch: A batch whose program is known.
        known: Its bytes; None if it does not fit.
        unit: The divisor of every batch.

    Returns:
        The batch; 0 if not even one unit fits. If 12 programs are not enough, the
        largest known to fit.
    """
    points: _Points = {batch: known}

    def fits(size: int) -> bool:
        if size not in points:
            points[size] = memory_of(size)
        found = points[size]
        return found is not None and found <= limit

    low, high = (batch, 0) if fits(batch) else (0, batch)
    halve = False
    for _ in range(_MOST):
        if high and (high - low <= unit or high <= low * _CLOSE):
            break
        guess = None if halve else _meeting(points, limit, low, high)
        size = _next(guess, low, high, unit)
        before = low, high
        low, high = (size, high) if fits(size) else (low, size)
        # The line through a single program may be far off: it gets a second try.
        halve = len(points) > 2 and _is_slow(before, (low, high))
    return low


def _is_slow(before: tuple[int, int], after: tuple[int, int]) -> bool:
    """Returns whether clearly more than half of the interval is left."""
    (old_low, old_high), (low, high) = before, after
    if not old_low or not old_high:
        return bool(old_high) and not low and high > old_high * _SLOW
    return math.log(high / low) > math.log(old_high / old_low) * _SLOW


def _next(guess: float | None, low: int, high: int, unit: int) -> int:
    """Returns the next batch to compile: near the guess, else in the middle."""
    is_last = high <= low * _CLOSE**2  # a batch between them ends the search
    if guess is None or (high and (is_last or guess >= high)):
        size = math.sqrt(low * high) if low else high / 2
    elif guess <= low * _CLOSE:
        size = low * _CLOSE  # if it does not fit, the search ends
    elif high and guess >= high / _CLOSE:
        size = math.ceil(high / _CLOSE) + unit - 1  # if it fits, the search ends
    else:
        size = guess * _BELOW if guess * (1 - _BELOW) >= unit else guess
        size = max(size, high / 8) if not low else min(size, _FARTHEST * low)
    size = max(int(size) // unit * unit, low + unit)
    return min(size, high - unit) if high else size


def _meeting(points: _Points, limit: int, low: int, high: int) -> float | None:
    """Returns the batch at which the line through two programs meets the limit.

    A single program has the line through the origin. None if unknown.
    """
    known = sorted((b, m) for b, m in points.items() if m is not None)
    below = [one for one in known if one[0] <= low]
    above = [one for one in known if high and one[0] >= high]
    if not known:
        return None
    start, *others = above[:2] if not below else [below[-1], *(above[:1] or below[:-1])]
    slopes = [(m - start[1]) / (b - start[0]) for b, m in others]
    slopes = slopes or [start[1] / start[0]]
    # A flat piece of the curve does not predict the rest.
    slope = max(slopes[-1], max(slopes) / 2)
    if slope > 0:
        return start[0] + (limit - start[1]) / slope
    return None if above else math.inf


def pays_from(ours: dict[int, float], base: dict[int, float]) -> int | None:
    """Returns the batch from which a step is faster than the baseline; None if none.

    Times grow about linearly with the batch, so lines through two of each are compared.

    Args:
        ours: Times by batch.
        base: Times of the baseline.
    """
    if len(ours) < 2 or len(base) < 2:
        return None
    (start, slope), (base_start, base_slope) = map(_line, (ours, base))
    if slope >= base_slope:
        return None
    return max(1, int((start - base_start) / (base_slope - slope)) + 1)


def _line(points: dict[int, float]) -> tuple[float, float]:
    (first, less), *_, (last, more) = sorted(points.items())
    slope = (more - less) / (last - first)
    return less - slope * first, slope


# --- `mpx.forecast` -------------------------------------------------------------------

_CALL = "`mpx.forecast`"
_NOTES = (
    "Counted numbers are read from the program that the target's compiler made; "
    "modelled ones follow from them and the constants. No device ran.",
    "Parts of memory are what is alive when most is in use. That moment differs "
    "between precisions: a part may grow where the total falls, and gradients that are "
    "not alive then are 0 B.",
    "Memory is that of the program, of a TPU without what is on the chip.",
)
_NOTES_TPU = (
    "For a TPU no code is generated: a Pallas kernel that needs more than the chip's "
    "memory would be refused only then.",
)
_NOTES_CUDA = (
    "On a GPU JAX reserves 75% of the device's "
    "unless XLA_PYTHON_CLIENT_MEM_FRACTION is set.",
    "Without a GPU XLA does not autotune: for GPUs, matmuls use cuBLAS "
    "(xla_gpu_enable_triton_gemm=false).",
)


def forecast(
    func: Callable[..., PyTree],
    optimizer: Any = None,
    *,
    targets: str | Sequence[str] = ("h100",),
    precisions: Any = ("float32", "bfloat16", "delayed"),
    has_aux: bool = False,
    largest_batch: bool = False,
    top: int = 10,
    constants: Mapping[str, Mapping[str, Any]] | None = None,
    **options: Any,
) -> Callable[..., Forecast]:
    """Returns a function that estimates memory and time of a training step on a device.

    From a loss and an optimizer it builds the step of `mpx.filter_value_and_grad` and
    `mpx.optimizer_step` in each precision. Without an optimizer `func` is a whole step,
    in the precision that it is written in; arguments that are returned in its result
    are donated. Nothing runs and nothing is allocated: the target's compiler compiles
    the step, and its needs are read from the program. The logger `mpx.forecast` names
    each program at level INFO, as it is compiled.

    Args:
        func: A loss, `loss(model, *batch)`, or a step. A loss must not be an autocast
            function.
        optimizer: An Optax transformation, or an `nnx.Optimizer`.
        targets: One or several of "h100", "h200", "b200", "b300", "l40s", "tpu v5e",
            "tpu v5p", "tpu v6e", "tpu7x", in any spelling that `mpx.autocast` takes.
        precisions: Any of `float32`, `bfloat16`, `float16`, recipes, and `delayed`,
            `current`, `block`, `mxfp8`, `nvfp4`, `row-wise`, `int8` for recipes with
            their defaults; or a dict from labels to options of `mpx.autocast`.
            `float32` is the loss without autocast; with half-precision weights it is
            labelled "as written".
        has_aux: Whether the loss returns `(loss, aux)`.
        largest_batch: Whether to search for the largest batch that fits, to 5%, which
            compiles about four more programs per precision. The batch is the first axis
            of the first array after the model, and of all others of its length.
        top: The number of kernel groups to list.
        constants: Fields of `Roof` to replace, by target: `{"h100": {"reads":
            (0.9, 0.8)}}`.
        **options: Options of `mpx.autocast`, for all precisions except float32.

    Returns:
        A function of the arguments of `func`, arrays or `jax.ShapeDtypeStruct`s, that
        returns a `Forecast`. With arrays sharded over a mesh (a
        `jax.sharding.AbstractMesh` is enough) the step is compiled for as many devices,
        optimizer state is sharded as by `mpx.init_optimizer`, and arrays that `func`
        closes over are on each device, as JAX puts constants.

    Raises:
        TypeError: `func` is not callable, or `optimizer` is not an optimizer.
        ValueError: A target, a precision or a constant is unknown; the loss is an
            autocast function.
        RuntimeError: The target's compiler is not installed (the message has the
            install command), or it refuses the step.

    Examples:
        >>> import jax, jax.numpy as jnp, mpx, optax
        >>> def loss(w, x):
        ...     return jnp.mean((x @ w) ** 2)
        >>> w = jax.ShapeDtypeStruct((4096, 4096), jnp.float32)
        >>> x = jax.ShapeDtypeStruct((512, 4096), jnp.float32)
        >>> report = mpx.forecast(loss, optax.adam(1e-3))  # (w, x), where CUDA's is
    """
    if not callable(func):
        raise TypeError(f"{_CALL} needs a loss or a step; got {describe(func)}.")
    are_several = isinstance(targets, Iterable) and not isinstance(targets, str)
    names = tuple(targets) if are_several else (targets,)
    words, given = f"`constants` of {_CALL}", (constants or {}).items()
    own = {find_target(name, words).name: dict(v) for name, v in given}
    read = (find_target(name, f"`targets` of {_CALL}") for name in names)
    known = {target.name: target for target in read}
    found = [_replaced(target, own) for target in known.values()]
    if not found:
        raise ValueError(f"`targets` of {_CALL} must have at least one; got none.")
    if unknown := own.keys() - {target.name for target in found}:
        raise ValueError(
            f"`constants` of {_CALL} must be of `targets`; got {min(unknown)!r}."
        )
    asked = [Variant(AS_WRITTEN, {})]
    if optimizer is not None:
        asked = read_precisions(precisions, options)
    elif options:
        raise TypeError(f"{_CALL} takes {', '.join(options)} only with an optimizer.")

    def report(*args: PyTree, **kwargs: PyTree) -> Forecast:
        step = ForecastStep(func, optimizer, has_aux, args, kwargs)
        step.check()
        named = [step.named(one) for one in asked]
        made: list[Estimate] = []
        for target in found:
            ours = [_estimate(step, one, target, top) for one in named]
            made += _with_largest(step, named, target, ours) if largest_batch else ours
        return Forecast(
            name=name_of(func),
            estimates=tuple(made),
            constants=tuple(one for t in found for one in _constants(t, own)),
            versions=_versions(),
            titles={target.name: target.title for target in found},
            roofs={target.name: target.roof for target in found},
            notes=_NOTES
            + _NOTES_TPU * any(t.platform == "tpu" for t in found)
            + _NOTES_CUDA * any(t.platform == "cuda" for t in found),
        )

    return report


def _estimate(step: ForecastStep, precision: Any, target: Device, top: int) -> Estimate:
    """Returns an estimate that lists its matmuls in 8 bits or less."""
    found = estimate(step, precision, target, top)
    if not any(map(found.flops.get, ("4 bits", "8 bits"))):
        return found
    return dataclasses.replace(found, matmuls=quantized(step, precision, target.name))


def _replaced(target: Device, own: Mapping[str, Mapping[str, Any]]) -> Device:
    """Returns a target with the user's constants."""
    given = own.get(target.name, {})
    names = {field.name for field in dataclasses.fields(Roof)}
    if wrong := given.keys() - names:
        raise ValueError(
            f"`constants` of {_CALL} must be of {', '.join(sorted(names))}; got "
            f"{min(wrong)!r}."
        )
    return dataclasses.replace(target, roof=dataclasses.replace(target.roof, **given))


def _constants(target: Device, own: Mapping[str, Any]) -> list[Constant]:
    sources = {**target.sources, **dict.fromkeys(own.get(target.name, {}), "given")}
    return [
        Constant(target.name, name, constant_text(target.roof, name), source)
        for name, source in sources.items()
    ]


def _with_largest(
    step: ForecastStep, asked: list[Variant], target: Device, ours: list[Estimate]
) -> list[Estimate]:
    """Returns the estimates with the largest batch and the one from which each pays."""
    batch = batch_of(step.args)
    if not batch:
        raise ValueError(
            f"`largest_batch` of {_CALL} needs an array after the model, whose first "
            "axis is the batch; got none."
        )
    found, points = [], [{batch: one} for one in ours]
    for precision, one, seen in zip(asked, ours, points, strict=True):

        def memory_of(size: int, how: Any = precision, seen: Any = seen) -> Any:
            other = dataclasses.replace(step, args=resized(step.args, size))
            seen[size] = estimate(other, how, target, 0)
            return seen[size].memory

        most = largest_batch(
            memory_of, target.roof.memory, batch, one.memory, step.devices
        )
        found.append(dataclasses.replace(one, largest_batch=most))
    names = [one.precision for one in ours]
    base = points[names.index("bfloat16") if "bfloat16" in names else 0]
    times = [
        {b: sum(e.time) for b, e in seen.items() if e.memory}
        for seen in (base, *points)
    ]
    return [
        dataclasses.replace(one, pays_from=pays_from(seen, times[0]))
        for one, seen in zip(found, times[1:], strict=True)
    ]


def _versions() -> dict[str, str]:
    found = {}
    for name in ("mpx-jax", "jax", "jaxlib", "libtpu", "jax-cuda12-plugin"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found
