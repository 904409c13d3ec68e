"""What is measured of one program, as a record that JSON can hold.

Errors are relative norms over all leaves against float32; of several seeds the median,
since that of one seed is noise, and where a number changes sides at the edge of a
branch (`relu`, `clip`) single seeds are off by ten times as much in every way of
casting. The largest one is kept, too. A compiled program is used for all seeds.

Host costs are CPU seconds of this process, the smallest of some rounds, with JAX's
caches cleared before each: what else runs on the machine hardly touches them.
"""

import collections
import functools
import gc
import time
from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jax.extend import core

import mpx

from . import gradients
from .gradients import QUANTIZERS, Result, Step
from .record import HALF, PRECISIONS, Built, Client

ROUNDS = 3
MOST_SCALES = 40
# Compiling is most of the time. What float32 and bfloat16 take to compile is measured,
# so they are compiled as users have it, and the others with less effort.
LESS = {"xla_backend_optimization_level": 0}
PRODUCTS = (
    "dot_general",
    "conv_general_dilated",
    "ragged_dot",
    "ragged_dot_general",
    "scaled_dot",
)


class Compiled:
    """A step that was traced once, and is called with the arrays of any seed."""

    def __init__(self, step: Step, built: Built, *, options: Any = None):
        """Traces and compiles the step; what are no arrays among its arguments stay."""
        arrays, static = eqx.partition(
            (step.state, built.params, built.batch), eqx.is_array
        )
        others: list[Any] = []

        def of_arrays(arrays: Any) -> Any:
            results = step.run(*eqx.combine(arrays, static))
            arrays, rest = eqx.partition(results, eqx.is_array)
            others.append(rest)
            return arrays

        self.step, self.function = step, of_arrays
        self.arrays = arrays
        self.traced = jax.jit(of_arrays).trace(arrays)
        self.rest = others[0]
        self.lowered = self.traced.lower()
        start = time.process_time()
        self.program = self.lowered.compile(compiler_options=options)
        self.compile_seconds = time.process_time() - start

    @property
    def equations(self) -> int:
        """How many equations the program has, those within others too."""
        return sum(1 for _ in _equations(self.traced.jaxpr.jaxpr))

    @property
    def products(self) -> dict[str, int]:
        """Its matrix products and convolutions by the dtypes of their operands."""
        counts: collections.Counter[str] = collections.Counter()
        for equation in _equations(self.traced.jaxpr.jaxpr):
            if equation.primitive.name in PRODUCTS:
                dtypes = {str(atom.aval.dtype) for atom in equation.invars[:2]}
                if all(dtype.startswith("float8") for dtype in dtypes):
                    dtypes = {"float8"}  # of data and of gradients
                counts[dtypes.pop() if len(dtypes) == 1 else "mixed"] += 1
        return dict(counts)

    def __call__(self, built: Built) -> Result:
        """Runs it as often as its state asks for, and until the scale fits."""
        state = eqx.filter(self.step.state, eqx.is_array)
        params, batch = eqx.filter((built.params, built.batch), eqx.is_array)
        for count in range(1, MOST_SCALES + 1):
            results = self.program((state, params, batch))
            state, result = eqx.combine(results, self.rest)
            state = eqx.filter(state, eqx.is_array)
            if count >= self.step.steps and bool(result.finite):
                break
        return jax.tree.map(_to_host, result)


def _to_host(leaf: Any) -> Any:
    if not eqx.is_array(leaf):
        return leaf
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf)


def _equations(jaxpr: Any) -> Iterator[Any]:
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            for item in value if isinstance(value, tuple | list) else (value,):
                if isinstance(item, core.ClosedJaxpr):
                    item = item.jaxpr
                if isinstance(item, core.Jaxpr):
                    yield from _equations(item)


def norm(tree: Any) -> float:
    """The norm of all floating point leaves together."""
    leaves = [x for x in jax.tree.leaves(tree) if _is_float(x)]
    return float(np.sqrt(sum(np.sum(np.abs(_wide(x)) ** 2) for x in leaves)))


def _is_float(x: Any) -> bool:
    return isinstance(x, np.ndarray) and jax.numpy.issubdtype(x.dtype, np.inexact)


def _wide(x: np.ndarray) -> np.ndarray:
    wide = np.complex128 if np.iscomplexobj(x) else np.float64
    return np.asarray(x).astype(wide)


def distance(found: Any, expected: Any) -> float:
    """The relative norm of the difference of two trees' floating point leaves."""
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    differences = [_wide(a) - _wide(b) for a, b in pairs if _is_float(b)]
    size = norm(expected)
    return norm(differences) / size if size else norm(differences)


def _errors(found: Result, expected: Result) -> dict[str, float]:
    value, reference = np.asarray(found.value, np.float64), float(expected.value)
    return {
        "loss": float(abs(value - reference) / (abs(reference) or 1.0)),
        "gradient": distance(found.grads, expected.grads),
        "outputs": distance(found.outputs, expected.outputs),
    }


def _together(errors: list[dict[str, float]]) -> dict[str, float]:
    """The medians over seeds, and the largest error of the gradient."""
    found = {name: float(np.median([e[name] for e in errors])) for name in errors[0]}
    return {**found, "worst gradient": max(e["gradient"] for e in errors)}


def kinds(tree: Any) -> Any:
    """Structure, dtypes and shapes of a tree."""
    leaves, treedef = jax.tree.flatten(tree)
    return str(treedef), [
        (str(x.dtype), x.shape) if isinstance(x, np.ndarray) else repr(x)
        for x in leaves
    ]


def compare(compiled: Compiled, seeds: list[Built], expected: list[Result]) -> Any:
    results = [compiled(built) for built in seeds]
    pairs = list(zip(results, expected, strict=True))
    same = all(kinds(a.outputs) == kinds(b.outputs) for a, b in pairs)
    record: dict[str, Any] = {
        "finite": all(bool(r.finite) and np.isfinite(r.value).all() for r in results),
        "same outputs": same,
        "same gradients": all(kinds(a.grads) == kinds(b.grads) for a, b in pairs),
        "compile": compiled.compile_seconds,
        "equations": compiled.equations,
    }
    try:
        record |= _together([_errors(a, b) for a, b in pairs])
    except ValueError:  # other structures, which `same outputs` says
        record |= dict.fromkeys(("loss", "gradient", "outputs"))
    return record


def failing(error: BaseException) -> dict[str, str]:
    """An error as one line."""
    text = " ".join(str(error).split())
    return {"error": f"{type(error).__name__}: {text[:300]}"}


def attempt(make: Callable[[], Any]) -> Any:
    """What a function gives, or its error."""
    try:
        return make()
    except Exception as error:  # whatever a package raises is a result
        return failing(error)


def products(built: Built, precision: str) -> dict[str, Any]:
    """The products of the gradient by dtype, and why some are in float32."""
    loss = gradients.wrapped(built, precision)
    operations = mpx.explain(gradients.gradient(loss))(
        None, built.params, built.batch
    ).operations
    counts: collections.Counter[str] = collections.Counter()
    reasons: collections.Counter[str] = collections.Counter()
    for operation in operations:
        if operation.primitive not in PRODUCTS:
            continue
        kind = "low" if operation.is_low else operation.precision
        counts[kind] += 1
        if kind == "float32":
            reasons[operation.reason] += 1
    return {"products": dict(counts), "reasons": dict(reasons)}


def host_seconds(step: Step, built: Built) -> float:
    """CPU seconds to trace and lower a step, the least of some rounds."""
    arrays, static = eqx.partition(
        (step.state, built.params, built.batch), eqx.is_array
    )

    def once() -> float:
        def of_arrays(arrays: Any) -> Any:
            return eqx.filter(step.run(*eqx.combine(arrays, static)), eqx.is_array)

        jax.clear_caches()
        gc.collect()
        gc.disable()  # as `timeit` does
        try:
            start = time.process_time()
            jax.jit(of_arrays).trace(arrays).lower()
            return time.process_time() - start
        finally:
            gc.enable()

    return min(once() for _ in range(ROUNDS))


def measure(
    client: Client,
    *,
    precisions: tuple[str, ...] = PRECISIONS,
    seeds: int | None = None,
    costs: bool = True,
) -> dict[str, Any]:
    """Measures a program in each precision.

    Args:
        client: The program.
        precisions: Which ones; recipes only if it has linear layers.
        seeds: How many sets of numbers its errors are taken over; its own if not given.
        costs: Whether to measure the host's time, too.

    Returns:
        A record: `float32`, `rounded` (float32 of rounded weights and inputs, which
        says how much of an error no arithmetic could avoid; `rounded current` and
        others where `faults` has a recipe), `naive bfloat16`, `region bfloat16`, ...
        and a part for each precision; a part that failed holds its `error`.
    """
    built = make_all(client, seeds or client.seeds)
    record = client.words
    record["float32"] = attempt(lambda: _reference(built, record))
    expected = record.pop("results", None)
    if expected is None:
        return record
    run = functools.partial(_run, built=built, expected=expected)
    for dtype in (d for d in HALF if d in precisions):
        record[f"naive {dtype}"] = attempt(
            functools.partial(run, gradients.naive, dtype)
        )
        if built[0].region is not None:
            inside = [b._replace(loss=b.region) for b in built]
            record[f"region {dtype}"] = attempt(
                functools.partial(run, gradients.autocast, dtype, built=inside)
            )
    for precision in precisions:
        if not client.has(precision):
            continue
        part = attempt(functools.partial(run, gradients.autocast, precision))
        if "error" not in part and precision != "float16":
            part |= attempt(functools.partial(products, built[0], precision))
        record[precision] = part
    if costs:
        record["host"] = attempt(lambda: _host(built[0]))
    return record


def make_all(client: Client, seeds: int) -> list[Built]:
    """The program with the numbers of several seeds, all of the first one's structure.

    A builder may define its classes inside, and then they are others at every call.
    """
    first, *others = (client.make(seed) for seed in range(seeds))
    structure = jax.tree.structure((first.params, first.batch))

    def hung(built: Built) -> Built:
        leaves = jax.tree.leaves((built.params, built.batch))
        params, batch = jax.tree.unflatten(structure, leaves)
        return first._replace(params=params, batch=batch)

    return [first, *map(hung, others)]


def _run(
    make: Callable[[Built, str], Step],
    precision: str,
    built: list[Built],
    expected: list[Result],
) -> dict[str, Any]:
    options = None if precision == "bfloat16" else LESS
    compiled = Compiled(make(built[0], precision), built[0], options=options)
    return {**compare(compiled, built, expected), "products": compiled.products}


def _reference(built: list[Built], record: dict[str, Any]) -> dict[str, Any]:
    """Runs float32, leaves the results in the record, and measures rounding alone."""
    compiled = Compiled(gradients.plain(built[0]), built[0])
    results = [compiled(b) for b in built]
    record["results"] = results
    rounded = [compiled(_rounded(b)) for b in built]
    record["rounded"] = _together(
        [_errors(a, b) for a, b in zip(rounded, results, strict=True)]
    )
    for recipe in set(record["faults"]) & set(QUANTIZERS):
        found = [rounded_by(b, QUANTIZERS[recipe]) for b in built]
        record[f"rounded {recipe}"] = compare(compiled, found, results)
    return {
        "value": float(results[0].value),
        "norm": norm(results[0].grads),
        "finite": all(bool(r.finite) for r in results),
        "compile": compiled.compile_seconds,
        "equations": compiled.equations,
    }


def _rounded(built: Built) -> Built:
    """The program with weights and inputs rounded to bfloat16."""
    half = mpx.cast_tree((built.params, built.batch), "bfloat16")
    params, batch = mpx.cast_tree(half, "float32")
    return built._replace(params=params, batch=batch)


def rounded_by(built: Built, quantizer: mpx.quantization.Quantizer) -> Built:
    """The program with weights and inputs rounded by hand as a recipe rounds them."""

    def rounded(x: Any) -> Any:
        if not eqx.is_inexact_array(x) or x.ndim == 0:
            return x
        length = x.shape[-1]
        padding = -length % max(quantizer.block, 1)
        padded = jax.numpy.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, padding)])
        return mpx.quantization.quantize_dequantize(padded, quantizer)[..., :length]

    params, batch = jax.tree.map(rounded, (built.params, built.batch))
    return built._replace(params=params, batch=batch)


def _host(built: Built) -> dict[str, float]:
    ours = Step(gradients.gradient(gradients.wrapped(built, "bfloat16")), None)
    return {
        "float32": host_seconds(gradients.plain(built), built),
        "bfloat16": host_seconds(ours, built),
    }
