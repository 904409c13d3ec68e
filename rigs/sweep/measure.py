"""Measures a case: how far off `mpx.autocast` is, how far off the ideal, the verdict.

Values are those of the function under test; gradients those by the weights of both
products, by `x` and by a layer's parameters. Errors are norms relative to float32; of
results that are no floats, the fraction that differs.
"""

import dataclasses
import importlib.metadata
import math
import time
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import mpx
from rigs.sweep.case import Case, Program
from rigs.sweep.ideal import make_ideal

DTYPES = ("bfloat16", "float16")
FACTOR, FLOOR = 10, 0.02
"""An error is right up to FACTOR times the ideal's, or up to FLOOR."""

_SCALES = [2.0**n for n in range(10, -13, -2)]
# Without excess precision, XLA does not remove a rounding to half and back.
_OPTIONS = {
    "xla_allow_excess_precision": False,
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    "xla_cpu_parallel_codegen_split_count": 1,
}
if importlib.metadata.version("jaxlib").startswith(
    "0.10."
):  # a third of the time; see conftest.py
    _OPTIONS["xla_cpu_use_fusion_emitters"] = False
_QUIET = 1e-5  # of the largest gradient: smaller ones are compared with this


@dataclasses.dataclass(frozen=True)
class Errors:
    """Errors in one dtype, of values and gradients, each as (mpx, ideal)."""

    value: tuple[float, float]
    gradient: tuple[float, float]
    verdict: str  # right, wrong, overflows
    where: str = ""  # the worst leaf


@dataclasses.dataclass(frozen=True)
class Result:
    """The outcome of a case; `note` holds the message of what was raised."""

    name: str
    verdict: str  # right, wrong, overflows
    errors: dict[str, Errors]
    seconds: float = 0.0
    note: str = ""


def measure(case: Case) -> Result:
    """Runs a case in float32, as the ideal and under `mpx.autocast`, in both dtypes."""
    start = time.process_time()
    with (
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        program = case.build()
        errors, notes, raised = {}, [], False
        try:
            exact = _Variant(program, lambda f: f)
        except Exception as error:  # no derivative in JAX: compare values alone
            notes.append(f"without gradients: {_describe(error)}")
            program = dataclasses.replace(program, loss=None)
            exact = _Variant(program, lambda f: f)
        for dtype in DTYPES:
            try:
                errors[dtype] = _compare(program, exact, dtype)
            except Exception as error:
                notes.append(f"{dtype} raised {_describe(error)}")
                raised = True
    verdicts = [e.verdict for e in errors.values()] + ["wrong"] * raised
    verdict = next(v for v in ("wrong", "overflows", "right") if v in verdicts)
    seconds = time.process_time() - start
    return Result(case.name, verdict, errors, seconds, "; ".join(notes))


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0][:150]}"


class _Variant:
    """A program under a transform, compiled once; `scale` scales the loss."""

    def __init__(self, program: Program, transform: Callable[[Any], Any]) -> None:
        values = transform(program.values)
        loss = None if program.loss is None else transform(program.loss)

        def run(params: Any, x: Any, scale: Any) -> tuple[Any, Any]:
            results = values(params, x)
            if loss is None:
                return results, ()
            gradient = jax.grad(
                lambda arguments: scale * loss(*arguments), allow_int=True
            )((params, x))
            return results, gradient

        arguments = (program.params, program.x)
        lowered = jax.jit(run).lower(*arguments, jnp.float32(1))
        self._run = lowered.compile(_OPTIONS)
        self._arguments = arguments

    def __call__(self, scale: float) -> list[dict[str, Any]]:
        """Returns values and unscaled gradients by name."""
        values, gradients = self._run(*self._arguments, jnp.float32(scale))
        named = dict(jax.tree_util.tree_leaves_with_path(gradients))
        return [
            {str(i): np.asarray(v) for i, v in enumerate(values)},
            {
                jax.tree_util.keystr(path): np.asarray(g, np.float32) / scale
                for path, g in named.items()
                if g.dtype != jax.dtypes.float0
            },
        ]


def _compare(program: Program, exact: _Variant, dtype: str) -> Errors:
    ideal = _Variant(program, lambda f: make_ideal(f, dtype))
    half = _Variant(program, lambda f: mpx.autocast(f, dtype))
    for scale in _SCALES:
        right, best, found = exact(scale), ideal(scale), half(scale)
        fits = [_patterns(right) == _patterns(r) for r in (best, found)]
        # No scale of the loss changes values; bfloat16 is as wide as float32.
        is_hopeless = _patterns(right[:1]) != _patterns(best[:1]) or dtype == "bfloat16"
        if all(fits) or is_hopeless or program.loss is None:
            break
    errors = [_errors(r, b, f) for r, b, f in zip(right, best, found, strict=True)]
    if not fits[0]:  # what computes more in float32 than the ideal may be right still
        small = all(f <= FLOOR for leaves in errors for _, f, _ in leaves)
        verdict = "right" if fits[1] and small else "overflows"
    elif fits[1] and all(is_right(*e) for leaves in errors for _, *e in leaves):
        verdict = "right"
    else:
        verdict = "wrong"
    worst = [max(leaves, key=_excess, default=("", 0.0, 0.0)) for leaves in errors]
    (where_value, *value), (where_gradient, *gradient) = worst[0], worst[1]
    where = where_gradient if _excess(worst[1]) >= _excess(worst[0]) else where_value
    return Errors(tuple(value), tuple(gradient), verdict, where)


def is_right(found: float, ideal: float) -> bool:
    """Whether an error is small next to the ideal's."""
    return found <= max(FACTOR * ideal, FLOOR)


def _excess(leaf: tuple[str, float, float]) -> float:
    _, found, ideal = leaf
    return found / max(FACTOR * ideal, FLOOR)


def _patterns(result: list[dict[str, Any]]) -> list[bytes]:
    """Returns where values are NaN, and where infinite."""
    leaves = [v for part in result for v in part.values()]
    return [
        mask(v).tobytes()
        for v in leaves
        if v.dtype.kind == "f" or v.dtype.name == "bfloat16"
        for mask in (np.isnan, np.isposinf, np.isneginf)
    ]


def _errors(
    right: dict[str, Any], ideal: dict[str, Any], found: dict[str, Any]
) -> list[tuple[str, float, float]]:
    norms = [_norm(r) for r in right.values() if r.dtype.kind == "f"]
    quiet = _QUIET * max(norms, default=0.0)
    return [
        (name, _error(found[name], r, quiet), _error(ideal[name], r, quiet))
        for name, r in right.items()
    ]


def _norm(value: np.ndarray) -> float:
    value = np.where(np.isfinite(value), value, 0).astype(np.float64)
    return float(np.sqrt(np.sum(value**2)))


def _error(value: np.ndarray, right: np.ndarray, quiet: float) -> float:
    if value.shape != right.shape:
        return math.inf
    if right.dtype.kind != "f":
        return float(np.mean(value != right)) if right.size else 0.0
    value = value.astype(np.float32)
    shared = np.isfinite(value) & np.isfinite(right)
    if np.any(np.isnan(value) & np.isfinite(right)):
        return math.inf
    value, right = np.where(shared, value, 0), np.where(shared, right, 0)
    scale = max(_norm(right), quiet)
    error = _norm(value - right.astype(np.float64))
    return error / scale if scale else (math.inf if error else 0.0)
