"""`mpx.forecast`: what a step would need and gain, on hardware that is not there."""

import contextlib
import dataclasses
import importlib.metadata
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from jaxtyping import PyTree

from .._counter import Roof, Target
from .._errors import describe
from .._wraps import name_of
from ._estimate import batch_of, estimate, resized
from ._largest import largest_batch as search, pays_from
from ._matmuls import quantized
from ._report import Constant, Estimate, find_target
from ._steps import AS_WRITTEN, Precision, Step, read_precisions
from ._tables import constant_text
from ._views import Forecast

_CALL = "`mpx.forecast`"
_NOTES = (
    "Counted numbers are read from the program that the target's compiler made; "
    "modelled ones follow from them and the constants. No device ran.",
    "Parts of memory are what is alive when most is in use. That moment differs "
    "between precisions: a part may grow where the total falls, and gradients that are "
    "not alive then are 0 B.",
    "Memory is that of the program. On a GPU JAX reserves 75% of the device's "
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
            `current`, `block`, `mxfp8`, `nvfp4` for recipes with their defaults; or a
            dict from labels to options of `mpx.autocast`. `float32` is the loss without
            autocast; with half-precision weights it is labelled "as written".
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
    asked = [Precision(AS_WRITTEN, {})]
    if optimizer is not None:
        asked = read_precisions(precisions, options)
    elif options:
        raise TypeError(f"{_CALL} takes {', '.join(options)} only with an optimizer.")

    def report(*args: PyTree, **kwargs: PyTree) -> Forecast:
        step = Step(func, optimizer, has_aux, args, kwargs)
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
            notes=_NOTES,
        )

    return report


def _estimate(step: Step, precision: Any, target: Target, top: int) -> Estimate:
    """An estimate that names the matmuls that it has in 8 bits or less."""
    found = estimate(step, precision, target, top)
    if not any(map(found.flops.get, ("4 bits", "8 bits"))):
        return found
    return dataclasses.replace(found, matmuls=quantized(step, precision, target.name))


def _replaced(target: Target, own: Mapping[str, Mapping[str, Any]]) -> Target:
    """A target with the user's constants."""
    given = own.get(target.name, {})
    names = {field.name for field in dataclasses.fields(Roof)}
    if wrong := given.keys() - names:
        raise ValueError(
            f"`constants` of {_CALL} must be of {', '.join(sorted(names))}; got "
            f"{min(wrong)!r}."
        )
    return dataclasses.replace(target, roof=dataclasses.replace(target.roof, **given))


def _constants(target: Target, own: Mapping[str, Any]) -> list[Constant]:
    sources = {**target.sources, **dict.fromkeys(own.get(target.name, {}), "given")}
    return [
        Constant(target.name, name, constant_text(target.roof, name), source)
        for name, source in sources.items()
    ]


def _with_largest(
    step: Step, asked: list[Precision], target: Target, ours: list[Estimate]
) -> list[Estimate]:
    """The estimates with the largest batch that fits, and from where each pays."""
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

        most = search(memory_of, target.roof.memory, batch, one.memory, step.devices)
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
