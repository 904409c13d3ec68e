"""What `mpx.forecast` says, beside speed-ups over bfloat16 that others have measured.

Each is a program of the sizes that were measured, by mpx: the matmuls of a layer, as
Transformer Engine times them; the experts of a layer, as torchao and a public trainer
of MoE models have them; and whole steps of Llama3-8B, on 8 devices by FSDP, or on one
for block formats. The others' numbers come from their programs, not from mpx's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax

from .models.layers import inner_product
from .results import Results
from .tables import Goal, Table, ratio

NAIVE = "bfloat16"
TE = "Transformer Engine, *GEMM Speedups Across Precisions*"
AO, AO_MOE = "torchao, *Quantized Training*", "torchao#3126"
TITAN = "torchtitan, nvfp4 page"
# Program, target, precision, published speed-up, who, and what of it was measured.
ROWS = (
    ("gemms", "h200", "delayed", 1.69, TE, "5B model, layer's matmuls"),
    ("gemms", "h200", "current", 1.58, TE, "5B model, layer's matmuls"),
    ("gemms", "h200", "block", 1.40, TE, "5B model, layer's matmuls"),
    ("gemms", "b300", "delayed", 1.64, TE, "5B model, layer's matmuls"),
    ("gemms", "b300", "current", 1.39, TE, "5B model, layer's matmuls"),
    ("gemms", "b300", "mxfp8", 1.42, TE, "5B model, layer's matmuls"),
    ("gemms", "b300", "nvfp4", 1.98, TE, "5B model, layer's matmuls"),
    ("llama 8", "h100", "current", 1.25, AO, "Llama3-8B on 8, tensor-wise"),
    ("llama 8", "h100", "current", 1.10, AO, "Llama3-8B on 8, row-wise (1)"),
    ("llama 8", "b200", "current", 1.254, AO, "Llama3-8B on 8, tensor-wise"),
    ("llama 1", "b200", "mxfp8", 1.281, TITAN, "Llama3-8B (2)"),
    ("llama 1", "b200", "nvfp4", 1.370, TITAN, "Llama3-8B (2)"),
    ("scout", "b200", "mxfp8", 1.431, AO_MOE, "Llama4 Scout, MoE layer"),
    ("ep1", "b200", "mxfp8", 0.749, "marin#7201", "MoE step, experts whole (3)"),
    ("ep4", "b200", "mxfp8", 1.082, "marin#7282", "MoE step, experts on 4 (3)"),
    ("ep64", "b200", "mxfp8", 1.308, "marin#7201", "MoE step, experts on 64 (3)"),
)
_KEYS = dict.fromkeys((program, target) for program, target, *_ in ROWS)
STEPS = list(dict.fromkeys(
    (program, target, precision)
    for program, target in _KEYS
    for precision in (NAIVE, *(r[2] for r in ROWS if r[:2] == (program, target)))
))  # fmt: skip
# Experts on a device, rows for each, width and hidden.
EXPERTS = {
    "scout": (8, 16_384, 5120, 8192),
    "ep1": (128, 512, 6144, 3072),
    "ep4": (16, 16_384, 2560, 1280),
    "ep64": (2, 32_768, 6144, 3072),
}
_TOKENS, _WIDTH, _HIDDEN = 15_872, 4096, 16_384
_GEMMS = ((_WIDTH, 3 * _WIDTH), (_WIDTH, _WIDTH), (_WIDTH, _HIDDEN), (_HIDDEN, _WIDTH))


FOR_CUDA, COMPILED_FOR = True, "NVIDIA H100, H200, B200, B300"


def measure(request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Forecasts each step, in a worker."""
    for program, target, precision in STEPS:
        if program == "gemms":
            report = _gradients(_gemms, _gemm_shapes(), precision, target)
        elif program in EXPERTS:
            shapes = _expert_shapes(*EXPERTS[program])
            report = _gradients(_experts, shapes, precision, target)
        else:
            report = _llama(precision, target, int(program[-1]))
        (one,) = report.estimates
        names = {"program": program, "target": target, "precision": precision}
        counted = {"traffic": one.traffic, "quantizing": one.quantizing}
        times = {"best": one.time[0], "worst": one.time[1], "roof": one.roofline}
        yield {"run": {**names, **counted, **times, "kernels": one.kernels}}


Loss = Callable[[Any, Any], Any]


def _gradients(loss: Loss, shapes: Any, precision: str, target: str) -> Any:
    """Forward pass and all gradients, without an optimizer."""
    import mpx

    from .our_arms import RECIPES

    recipes = {**RECIPES, "block": mpx.Float8BlockScaling()}
    options: dict[str, Any] = {}
    if precision != NAIVE:
        low = mpx.Rule(mpx.Precision.LOW, primitive="dot_general")
        options = {"recipe": recipes[precision], "rules": mpx.Rules(low)}
    cast = mpx.autocast(loss, target=target, **options)
    plain = mpx.NoLossScaling(skip=False)

    def first(arrays: Any, gradients: Any) -> Any:
        return mpx.init_scaling(cast, arrays, gradients).with_loss(plain)

    def step(arrays: Any, scaling: Any, gradients: Any) -> Any:
        gradient = mpx.filter_value_and_grad(cast, scaling, has_aux=True)
        result = gradient(arrays, gradients)
        return result.scaling, result.grads, result.aux

    scaling = jax.eval_shape(first, *shapes) if precision == "delayed" else plain
    return mpx.forecast(step, targets=target)(shapes[0], scaling, shapes[1])


def _shape(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def _gemm_shapes() -> Any:
    arrays = [{"x": _shape(_TOKENS, k), "w": _shape(k, n)} for k, n in _GEMMS]
    return arrays, [_shape(_TOKENS, n) for _, n in _GEMMS]


def _gemms(arrays: Any, gradients: Any) -> Any:
    # What is negated is no weight: inputs are among what is differentiated.
    results = [(-one["x"]) @ one["w"] for one in arrays]
    return sum(map(inner_product, results, gradients)), results


def _expert_shapes(experts: int, rows: int, width: int, hidden: int) -> Any:
    wide, narrow = _shape(experts, width, hidden), _shape(experts, hidden, width)
    x = _shape(experts, rows, width)
    return {"x": x, "gate": wide, "up": wide, "down": narrow}, x


def _experts(arrays: Any, gradient: Any) -> Any:
    x, each = -arrays["x"], jax.vmap(jnp.matmul)
    hidden = jax.nn.silu(each(x, arrays["gate"])) * each(x, arrays["up"])
    y = each(hidden, arrays["down"])
    return inner_product(y, gradient), y


def _llama(precision: str, target: str, devices: int) -> Any:
    """A step of Llama3-8B: 8,192 tokens a device, matmuls kept, the rest recomputed."""
    import mpx.nn

    from .models.arranged import Order, Sizes, llama
    from .models.weights import Weights, shapes_of

    keep = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    sizes = Sizes(4096, 14_336, 128_256, 32, heads=32, kernel=True, groups=8)
    sizes = dataclasses.replace(sizes, gathers=True)  # as others' losses do
    model = llama(sizes, Order(jax.lax.scan, policy=keep))
    mesh = jax.sharding.AbstractMesh((devices,), ("fsdp",))

    def placed(shape: tuple[int, ...], dtype: Any, axis: int) -> jax.ShapeDtypeStruct:
        if devices == 1:
            return _shape(*shape, dtype=dtype)
        place = jax.sharding.NamedSharding(mesh, jax.P(*[None] * axis, "fsdp"))
        return jax.ShapeDtypeStruct(shape, dtype, sharding=place)

    def weight(path: Any, one: Any) -> jax.ShapeDtypeStruct:
        # Of the blocks, which are stacked, the first axis is the layer.
        return placed(one.shape, jnp.float32, int(path[0].key == "blocks"))

    def loss(tree: Any, tokens: Any) -> Any:
        return model(Weights(tree, attention=mpx.nn.dot_product_attention), tokens)

    shape = (devices, 8193)
    found = shapes_of(model, _shape(*shape, dtype=jnp.int32)).tree
    tree = jax.tree_util.tree_map_with_path(weight, found)
    asked = {"precisions": precision, "residual_stream": "half", "targets": target}
    forecast = mpx.forecast(loss, optax.adamw(1e-3), **asked)
    return forecast(tree, placed(shape, jnp.int32, 0))


# --- What is shown --------------------------------------------------------------------


def _forecasts(found: Results) -> Iterator[tuple[tuple, float]]:
    times = {
        (r["program"], r["target"], r["precision"]): r["best"] + r["worst"]
        for r in found.records
    }
    for row in ROWS:
        program, target, precision, *_ = row
        base, own = (times.get((program, target, x)) for x in (NAIVE, precision))
        if base and own:
            yield row, base / own


def tables(found: Results) -> Iterator[Table]:
    """A row for each published speed-up."""
    rows = [
        [f"{what}, {target.upper()}, {precision}", who, ratio(published)]
        + [ratio(ours), f"{100 * (ours / published - 1):+.0f} %"]
        for (_, target, precision, published, who, what), ours in _forecasts(found)
    ]
    if rows:
        heads = "what, device, recipe of mpx | measured by | published | forecast | off"
        yield Table(
            "Speed-ups over bfloat16: published, and forecast", heads, rows, _NOTES
        )


_NOTES = (
    "*Published* is measured with others' programs, *forecast* (modelled, the middle "
    "of best and worst case) is of mpx's program of these sizes; no constant of the "
    "model is from these numbers. (1) Forecast with one scale "
    "for each tensor. (2) On one device, without FSDP. (3) One layer of experts "
    "without its routing; rows for each expert are assumed. mpx's block scaling does "
    "not reach the FP8 units of Hopper, so there it does not pay.",
)


def goals(found: Results) -> Iterator[Goal]:
    """15 on the right side of 1 (all but block scaling on Hopper), 13 within 20 %."""
    pairs = [(row[3], ours) for row, ours in _forecasts(found)]
    right = sum((a > 1) == (b > 1) for a, b in pairs)
    text = f"forecasts on the right side of 1: {right} of {len(pairs)}, at least 15"
    yield Goal(text, right >= 15)
    near = sum(abs(b / a - 1) <= 0.2 for a, b in pairs)
    yield Goal(
        f"forecasts within 20 %: {near} of {len(pairs)}, at least 13", near >= 13
    )
