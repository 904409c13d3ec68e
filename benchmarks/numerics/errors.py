r"""How far are the products of a linear layer from unquantized ones, by recipe?

Question: what is the relative error of $y = x w$, $dx = g w^T$ and $dw = x^T g$ on data
with outliers, and what does each technique of NVFP4 buy?

The data: weights are normal, gradients are Student's t with 3 degrees of freedom (a
heavy tail), inputs are normal with 1% of outliers, which are 30 times as large:

* `channels`: whole columns of x, the same features of all tokens,
* `tokens`: whole rows of x, all features of a few tokens,
* `scattered`: single numbers of x.

An error is the norm of the difference to float64 products over the norm of these.
Delayed scaling has its scales from a draw before. None of NVFP4's techniques is for a
smaller error of one product, so what each is for is measured, too:

* The Hadamard transform: how many numbers beside an outlier become zero. They are lost
  in every step; transformed, they are noisy instead.
* Stochastic rounding: the error that is left in the mean of many quantizations of one
  gradient, which is what adds up over steps.
* Square blocks: how far the weight of the backward pass is from that of the forward
  pass, without which dx is the derivative of another function than y.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterator
from typing import Any

from ..results import Results
from ..tables import Goal, Table
from .interval import mean_interval

SEEDS = 20
DRAWS = 64  # quantizations of one gradient
TOKENS, WIDTH, OUT = 512, 256, 256
SHARE, FACTOR = 0.01, 30.0
DATA = ("channels", "tokens", "scattered")
PRODUCTS = ("forward", "dgrad", "wgrad")
WITHOUT = {
    "nvfp4 without Hadamard": "disable_rht",
    "nvfp4 without stochastic rounding": "disable_stochastic_rounding",
    "nvfp4 without square blocks": "disable_2d_quantization",
}
PLAIN = "nvfp4 without all three"
INT8 = "int8, one scale"
EIGHT_BITS = ("delayed", "current", "row-wise", "block", "mxfp8", "int8")
ARMS = ("bfloat16", *EIGHT_BITS, INT8, "nvfp4", *WITHOUT, PLAIN)
WITH_TECHNIQUES = ("nvfp4", PLAIN)


def recipes() -> dict[str, Any]:
    """The recipe of each arm but bfloat16."""
    import mpx
    from examples.precisions import AUTOCAST, RECIPES

    found: dict[str, Any] = {arm: AUTOCAST[arm]["recipe"] for arm in RECIPES}
    found[INT8] = mpx.Int8CurrentScaling(one_scale=True)
    for arm, option in WITHOUT.items():
        found[arm] = mpx.NVFP4BlockScaling(**{option: True})
    found[PLAIN] = mpx.NVFP4BlockScaling(**dict.fromkeys(WITHOUT.values(), True))
    return found


def draw(kind: str, seed: int) -> tuple[Any, Any, Any]:
    """Weight, input and gradient; those of data are numbers of bfloat16."""
    import ml_dtypes
    import numpy as np

    random = np.random.default_rng((DATA.index(kind), seed))
    x = random.standard_normal((TOKENS, WIDTH))
    shape = {"channels": (1, WIDTH), "tokens": (TOKENS, 1), "scattered": x.shape}[kind]
    count = round(SHARE * math.prod(shape))
    chosen = random.permutation(math.prod(shape)) < count
    x = np.where(chosen.reshape(shape), FACTOR * x, x)
    w = random.standard_normal((WIDTH, OUT)) / math.sqrt(WIDTH)
    g = random.standard_t(3, (TOKENS, OUT)) / TOKENS
    half = (a.astype(ml_dtypes.bfloat16).astype(np.float32) for a in (x, g))
    return w.astype(np.float32), *half


def exact(w: Any, x: Any, g: Any) -> tuple[Any, Any, Any]:
    """The three products in float64."""
    import numpy as np

    w, x, g = (np.asarray(a, np.float64) for a in (w, x, g))
    return x @ w, g @ w.T, x.T @ g


def products_of(recipe: Any) -> Callable[..., Any]:
    """The three products by autocast, jitted; the recipe may be None."""
    import jax
    import jax.numpy as jnp

    import mpx

    layer = mpx.autocast(lambda w, x: x @ w, jnp.bfloat16, recipe=recipe)

    def products(w: Any, x: Any, g: Any) -> tuple[Any, Any, Any]:
        y, pullback = jax.vjp(layer, w, x)
        dw, dx = pullback(g)
        return y, dx, dw

    if not isinstance(recipe, mpx.DelayedScaling):
        return jax.jit(products)

    def inner(w: Any, x: Any, g: Any) -> Any:
        return jnp.vdot(layer(w, x), g)

    @jax.jit
    def delayed(w: Any, x: Any, g: Any, before: Any) -> tuple[Any, Any, Any]:
        scaling = mpx.init_scaling(inner, *before)
        step = mpx.filter_value_and_grad(inner, scaling, policy="full")
        return mpx.inference(products, step(*before).scaling)(w, x, g)

    return delayed


def measure(request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields one answer per data and seed; runs in a worker."""
    known = recipes()
    products = {arm: products_of(known.get(arm)) for arm in ARMS}
    techniques = {arm: technique_of(known[arm]) for arm in WITH_TECHNIQUES}
    for seed in range(SEEDS):
        for kind in DATA:
            arrays, before = draw(kind, seed), draw(kind, SEEDS + seed)
            expected = exact(*arrays)
            for arm in ARMS:
                found = products[arm](*arrays, *((before,) if arm == "delayed" else ()))
                pairs = zip(PRODUCTS, found, expected, strict=True)
                record = {"arm": arm, "data": kind, "seed": seed}
                yield {"run": record | {p: distance(a, b) for p, a, b in pairs}}
        for arm, measured in techniques.items():
            record = {"arm": arm, "data": "techniques", "seed": seed}
            yield {"run": record | measured(*draw("tokens", seed))}


def technique_of(recipe: Any) -> Callable[..., dict[str, float]]:
    """Measures what is not seen in one product, see above."""
    import jax
    import numpy as np

    import mpx

    weight = recipe.quantizer(mpx.quantization.Role.WEIGHT)
    axes = ((-2, -1),) * 2 if weight.block_dimensions == 2 else (-2, -1)
    gradient = recipe.quantizer(mpx.quantization.Role.GRADIENT)
    keys = jax.random.split(jax.random.key(0), DRAWS)

    @jax.jit
    def quantized(g: Any, key: Any) -> Any:
        key = key if gradient.stochastic_rounding else None
        return mpx.quantization.quantize_dequantize(g, gradient, key=key)

    def measured(w: Any, x: Any, g: Any) -> dict[str, float]:
        forward, backward = (
            mpx.quantization.quantize_dequantize(w, weight, axis=a) for a in axes
        )
        tokens = recipe.quantizer(
            mpx.quantization.Role.INPUT, leg=mpx.quantization.Leg.WGRAD
        )
        kept = np.asarray(mpx.quantization.quantize_dequantize(x, tokens, axis=0))
        draws = [np.asarray(quantized(g[:64], key), np.float64) for key in keys]
        return {
            "zeros": float(np.mean(kept[beside_outliers(x)] == 0)),
            "gradient": distance(draws[0], g[:64]),
            "mean gradient": distance(sum(draws) / DRAWS, g[:64]),
            "weight": distance(forward, w),
            "two weights": distance(backward, forward),
        }

    return measured


def beside_outliers(x: Any) -> Any:
    """The ordinary tokens whose block of 16 holds an outlier."""
    import numpy as np

    size = np.linalg.norm(x, axis=1)
    is_outlier = size > math.sqrt(FACTOR) * np.median(size)
    in_block = is_outlier.reshape(-1, 16).any(axis=1)
    return np.repeat(in_block, 16) & ~is_outlier


def distance(found: Any, expected: Any) -> float:
    """The norm of the difference, over the norm of what was expected."""
    import numpy as np

    found, expected = (np.asarray(a, np.float64) for a in (found, expected))
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def samples(found: Results, arm: str, data: str, what: str) -> list[float]:
    """One number per seed, in the order of the seeds."""
    return [r[what] for r in found.records if (r["arm"], r["data"]) == (arm, data)]


# What a technique is for, and what it costs: words, arm without, data, number.
Measured = tuple[str, str, str, str]
_MEAN = f"error of the mean of {DRAWS} quantizations of a gradient"
_APART = "from the weight of forward to that of backward"
TECHNIQUES: dict[str, tuple[Measured, Measured]] = {
    "Hadamard transform": (
        ("numbers beside an outlier that become zero", PLAIN, "techniques", "zeros"),
        ("error of wgrad, tokens", "nvfp4 without Hadamard", "tokens", "wgrad"),
    ),
    "stochastic rounding": (
        (_MEAN, PLAIN, "techniques", "mean gradient"),
        ("error of one of them", PLAIN, "techniques", "gradient"),
    ),
    "square blocks": (
        (_APART, PLAIN, "techniques", "two weights"),
        ("error of the weight", PLAIN, "techniques", "weight"),
    ),
}


def tables(found: Results) -> Iterator[Table]:
    """Errors by recipe and data, and what the techniques of NVFP4 do."""
    pairs = list(itertools.product(DATA, PRODUCTS))
    rows = [
        [arm]
        + [
            f"{100 * statistics.fmean(samples(found, arm, *pair)):.2f}"
            for pair in pairs
        ]
        for arm in ARMS
    ]
    seeds = len({r["seed"] for r in found.records})
    yield Table(
        f"Relative error of a linear layer's products in percent, {TOKENS} tokens, "
        f"{WIDTH} to {OUT} features, mean over {seeds} seeds",
        ["recipe", *map(": ".join, pairs)],
        rows,
    )
    rows = []
    for technique, parts in TECHNIQUES.items():
        row = [technique]
        for words, without, data, number in parts:
            pair = [samples(found, arm, data, number) for arm in ("nvfp4", without)]
            row += [words, *(f"{100 * statistics.fmean(x):.1f}%" for x in pair)]
        rows.append(row)
    yield Table(
        "What NVFP4's techniques are for, and what they cost",
        "technique | for | with | without | at the price | with | without",
        rows,
    )


def goals(found: Results) -> Iterator[Goal]:
    """Each technique does what it is for, beyond the noise of the seeds."""
    for technique, ((words, without, data, number), _) in TECHNIQUES.items():
        ours, theirs = (samples(found, a, data, number) for a in ("nvfp4", without))
        if len(ours) > 1:
            less = mean_interval([b - a for a, b in zip(ours, theirs, strict=True)])
            means = [100 * statistics.fmean(x) for x in (ours, theirs)]
            text = (
                f"with {technique}, {words}: {means[0]:.1f}%, without {means[1]:.1f}%"
            )
            yield Goal(text, less.low > 0)
