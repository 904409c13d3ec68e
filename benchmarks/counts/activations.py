"""Whether products under a recipe keep their units, whatever activation follows.

Question: does every combination of an activation, a bias, a recipe and a way to write
the layers compile for a GPU, with all linear products as calls of the FP8 units?

XLA looks for activations behind a product, to compute them in the product's call. With
`gelu` behind one in FP8 whose result is wanted for the backward pass, too, jax 0.10.2
did not compile (`RET_CHECK ... !has_aux_output`). So each case here is a training step
of small blocks, with a bias and without, in a scan and in `jax.checkpoint`, in which
there are no products but linear ones.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

import mpx
import mpx.nn
from mpx._contract import compiled_products, parse

from ..counter import TARGETS
from ..models.frameworks import UNITS
from ..results import Results
from ..steps import ArrayStep, arrays_only
from ..tables import Goal, Table

FP8_CALL = "__cublas$lt$matmul$f8"
WIDTH, HIDDEN, TOKENS = 256, 512, 512
RECIPES = {"current": mpx.Float8CurrentScaling(), "delayed": mpx.DelayedScaling()}
# The function of the first product, and whether a second one is a gate.
ACTIVATIONS: dict[str, tuple[Callable[..., Any], bool]] = {
    "gelu": (jax.nn.gelu, False),
    "exact gelu": (lambda x: jax.nn.gelu(x, approximate=False), False),
    "silu": (jax.nn.silu, False),
    "relu": (jax.nn.relu, False),
    "swiglu": (jax.nn.silu, True),
    "geglu": (jax.nn.gelu, True),
}
# A function in plain JAX that autocast transforms; or layers of `mpx.nn`, in a context
# (current scaling) or in a transformed function (delayed scaling, for its state).
STYLES = ("autocast", "layers")


@dataclasses.dataclass(frozen=True)
class Case:
    """A training step to compile.

    Attributes:
        activation: A name of `ACTIVATIONS`.
        recipe: A name of `RECIPES`.
        style: A name of `STYLES`.
        target: A name of `frameworks.UNITS`.
    """

    activation: str
    recipe: str
    style: str
    target: str


CASES = [
    *itertools.starmap(Case, itertools.product(ACTIVATIONS, RECIPES, STYLES, ["h100"])),
    *(Case(name, "current", "autocast", "b200") for name in ACTIVATIONS),
]
# Each kind of block: whether it has biases, and how it is run.
BLOCKS = list(itertools.product((True, False), ("scan", "remat")))


# --- The step -------------------------------------------------------------------------


# With the flags that everyone has: what calls there are is the question.
VARIABLES = {"XLA_FLAGS": ""}
# Each case says its target to autocast.
SAYS_TARGET = True


def build(fields: dict[str, Any], devices: list[Any] | None = None) -> ArrayStep:
    """The step of a case, with shapes for arguments; see `steps.build`."""
    case = Case(**fields)
    recipe, target = RECIPES[case.recipe], UNITS[case.target]
    rules = mpx.Rules(mpx.Rule(mpx.Precision.LOW, primitive="dot_general"))

    def plain_loss(blocks: Any, x: Any) -> Any:
        for (_, form), layers in zip(BLOCKS, blocks, strict=True):
            x = _applied(case, form, layers, x)
        return jnp.mean(x.astype(jnp.float32) ** 2)

    in_context = case.style == "layers" and case.recipe == "current"
    loss = plain_loss
    if not in_context:
        loss = mpx.autocast(plain_loss, recipe=recipe, target=target, rules=rules)

    def step(blocks: Any, scaling: Any, x: Any) -> tuple[Any, ...]:
        differentiate = mpx.filter_value_and_grad(loss, scaling)
        if in_context:
            with (
                mpx.half_precision("bfloat16"),
                mpx.autocast(recipe=recipe, target=target, ambient=True),
            ):
                result = differentiate(blocks, x)
        else:
            result = differentiate(blocks, x)
        return result.grads, result.scaling, result.value

    blocks = jax.eval_shape(lambda: [_block(case, *kind) for kind in BLOCKS])
    x = jax.ShapeDtypeStruct((TOKENS, WIDTH), jnp.float32)
    scaling = mpx.NoLossScaling()
    if not in_context:
        scaling = jax.eval_shape(lambda: mpx.init_scaling(loss, blocks, x))
    return arrays_only(step, (blocks, scaling), x, devices)


def _block(case: Case, bias: bool, form: str) -> list[Any]:
    """The layers of a block; in a scan there are two of each, stacked."""
    gated = ACTIVATIONS[case.activation][1]
    shapes = [(WIDTH, HIDDEN)] * (1 + gated) + [(HIDDEN, WIDTH)]
    layers = []
    for inputs, outputs in shapes:
        layer: Any = mpx.nn.Linear(
            inputs, outputs, use_bias=bias, key=jax.random.key(0)
        )
        if case.style == "autocast":
            layer = (layer.weight.T, layer.bias)
        layers.append(layer)
    if form == "scan":
        return jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), layers)
    return layers


def _applied(case: Case, form: str, layers: list[Any], x: Any) -> Any:
    activation = ACTIVATIONS[case.activation][0]

    def linear(layer: Any, x: Any) -> Any:
        if case.style == "layers":
            return layer(x)
        weight, bias = layer
        y = x @ weight
        return y if bias is None else y + bias[None]

    def block(x: Any, layers: list[Any]) -> Any:
        first, *gate, last = layers
        hidden = activation(linear(first, x))
        for layer in gate:
            hidden = hidden * linear(layer, x)
        return x + linear(last, hidden)

    if form == "scan":
        return jax.lax.scan(lambda x, layers: (block(x, layers), None), x, layers)[0]
    return jax.checkpoint(block)(x, layers)


# --- What is counted and shown --------------------------------------------------------


def count(compiled: Any, fields: dict[str, Any]) -> dict[str, Any]:
    """How many products the program has, and how many are calls of the FP8 units.

    One in the body of a loop counts once.
    """
    kinds = collections.Counter(
        product.kind for product in compiled_products(parse(compiled.as_text()))
    )
    return {"products": sum(kinds.values()), "fast": kinds[FP8_CALL]}


def tables(found: Results) -> Iterator[Table]:
    """A row for each activation and device."""
    ways, rows = list(itertools.product(RECIPES, STYLES)), []
    every = found.counts_by("target", "activation", "recipe", arm="style")
    for target, name in dict.fromkeys(setup[:2] for setup in every):
        row = [TARGETS[target].title, name]
        for recipe, style in ways:
            one = every.get((target, name, recipe), {}).get(style)
            row.append(f"{one['fast']} of {one['products']}" if one else "")
        rows.append(row)
    if rows:
        yield Table(
            "Products on the FP8 units, by the activation behind them",
            ["compiled for", "activation", *map(", ".join, ways)],
            rows,
            notes=[
                f"Training steps of blocks of width {WIDTH} and hidden {HIDDEN}, "
                f"{TOKENS} tokens: with biases and without, in a scan and in "
                "`jax.checkpoint`. All products are of linear layers; one in the body "
                "of a loop counts once. *layers* are those of `mpx.nn`."
            ],
        )


def goals(found: Results) -> list[Goal]:
    """Every case compiles, with all products on the units."""
    counts = [r["counts"] for r in found.records if "activation" in r]
    fast, total = (sum(c[name] for c in counts) for name in ("fast", "products"))
    text = f"all products on the FP8 units behind any activation: {fast} of {total}"
    return [Goal(f"{text}, {len(counts)} programs", total > 0 and fast == total)]
