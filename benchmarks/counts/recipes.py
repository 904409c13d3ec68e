"""Which units the linear layers of a step run on under a recipe, and what they keep.

Questions: does the compiler make a call of the fast units of every product of a linear
layer? And how many bytes wait for the backward pass?

The step of an unmodified transformer (`frameworks`) is compiled for a device that is
not here. The floating point operations of the products that became such calls (CUDA),
or have FP8 operands (TPU), stand against those of all linear layers by the sizes of the
model: forward, gradient of the input, gradient of the weight. The final projection is
not quantized unless a rule says so, and is then left out of both.

The bytes are those of what `jax.vjp` keeps of a stack of products alone, against the
same under autocast in bfloat16.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

import mpx
from mpx._contract import Operation, compiled_products, parse

from .. import processes
from ..counter import TARGETS
from ..models import frameworks as recipe_models
from ..models.frameworks import BATCH, SIZE, Case, linear_flops
from ..our_arms import RECIPES
from ..results import Results
from ..steps import ArrayStep
from ..tables import Goal, Table

PER_TENSOR = ("delayed", "current")
BLOCKS = ("mxfp8", "nvfp4")
FP8_CALL = "__cublas$lt$matmul$f8"
BLOCK_CALL = "__cudnn$blockScaledDot"
CASES = [
    *(
        Case(framework, recipe, "h100", head)
        for framework in recipe_models.FRAMEWORKS
        for recipe in PER_TENSOR
        for head in (False, True)
    ),
    *(
        Case("Equinox", recipe, "b200", head)
        for recipe in BLOCKS
        for head in (False, True)
    ),
    *(Case("Equinox", recipe, "tpu7x") for recipe in PER_TENSOR),
]


# With the flags that everyone has: what calls there are is the question.
VARIABLES = {"XLA_FLAGS": ""}
# Each case says its target to autocast.
SAYS_TARGET = True


def build(fields: dict[str, Any], devices: list[Any] | None = None) -> ArrayStep:
    """The step of a case."""
    return recipe_models.build(Case(**fields), devices)


def count(compiled: Any, fields: dict[str, Any]) -> dict[str, Any]:
    """What the compiler made of the products of a case."""
    return count_text(compiled.as_text(), Case(**fields))


def count_text(text: str, case: Case) -> dict[str, Any]:
    """The same, of an optimized program's text."""
    products = compiled_products(parse(text))
    kinds = collections.Counter(kind_of(product) for product in products)
    fast = sum(flops_of(x) for x in products if is_fast(kind_of(x), case))
    return {
        "linear_flops": linear_flops(SIZE, case.head),
        "fast_flops": fast,
        "products": dict(sorted(kinds.items())),
    }


def kind_of(product: Operation) -> str:
    """The call or instruction, with the dtypes of the operands."""
    return f"{product.kind} {' x '.join(product.dtypes[:2])}"


def is_fast(kind: str, case: Case) -> bool:
    """Whether a kind of product runs on the units that the recipe is for."""
    if case.target == "tpu7x":
        return kind.count("float8") == 2
    return kind.startswith(f"{fast_call(case)} ")


def fast_call(case: Case) -> str:
    """The call of CUDA's libraries that the recipe is for."""
    return FP8_CALL if case.recipe in PER_TENSOR else BLOCK_CALL


def flops_of(product: Operation) -> int:
    """FLOPs of a product of a linear layer, from its sizes alone.

    Of [m, k], [k, n] and [m, n], the sizes multiply to (m k n)^2. A call for CUDA with
    a batch is a long sum in parts, and has the batch in all three.
    """
    result = product.results[0]
    arrays = (*product.operands[:2], result)
    sizes = math.prod(math.prod(array.shape) for array in arrays)
    is_in_parts = product.kind.startswith("__") and len(result.shape) == 3
    return 2 * math.isqrt(sizes // (result.shape[0] if is_in_parts else 1))


# --- What is kept ---------------------------------------------------------------------

TOKENS = 1024
LIMITS = {"delayed": 0.51, "current": 0.51, "mxfp8": 0.52, "nvfp4": 0.30}


def in_a_row(weights: dict[str, Any], x: Any) -> Any:
    """Linear layers one after the other, each with an input of its own."""
    for name in ("value", "output", "in", "out"):
        x = x @ weights[name]
    return x


def with_attention(weights: dict[str, Any], x: Any) -> Any:
    """Those of a block: queries, keys and values come from the same input."""
    parts = (x @ weights[name] for name in ("query", "key", "value"))
    for name in ("output", "in", "out"):
        x = (sum(parts) if name == "output" else x) @ weights[name]
    return x


STACKS = {"in a row": in_a_row, "with attention": with_attention}


def kept_bytes(stack: Any, recipe: str | None) -> int:
    """Bytes that the products of a stack keep for the backward pass."""
    width, hidden = SIZE.width, SIZE.hidden
    shapes = dict.fromkeys(("query", "key", "value", "output"), (width, width))
    shapes |= {"in": (width, hidden), "out": (hidden, width)}
    if stack is in_a_row:
        shapes = {k: v for k, v in shapes.items() if k not in ("query", "key")}
    weights = {
        name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()
    }
    x = jax.ShapeDtypeStruct((TOKENS, width), jnp.bfloat16)
    every = mpx.Rules(mpx.Rule(mpx.Precision.LOW, parameter="*"))  # the last one, too
    options = {} if recipe is None else {"recipe": RECIPES[recipe], "rules": every}
    func = mpx.autocast(stack, **options)
    func = mpx.inference(func, mpx.init_scaling(func, weights, x))
    kept = jax.eval_shape(lambda *args: jax.vjp(func, *args)[1], weights, x)
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(kept))


def measure(request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields what each stack keeps under each recipe; runs in a worker."""
    for name, stack in STACKS.items():
        base = kept_bytes(stack, None)
        for recipe in RECIPES:
            kept = {"stack": name, "recipe": recipe}
            kept |= {"bytes": kept_bytes(stack, recipe), "bfloat16": base}
            yield {"kept": kept}


def more_records() -> list[dict[str, Any]]:
    """The bytes that are kept, which nothing is compiled for."""
    _, *answers = processes.ask("ours", {"task": "kept"}, None)
    return [answer["kept"] for answer in answers]


# --- What is shown --------------------------------------------------------------------


def tables(found: Results) -> list[Table]:
    """Units and calls of each step, and the bytes of each stack."""
    size = SIZE
    units = Table(
        title=f"Linear layers of a training step: {size.blocks} blocks, width "
        f"{size.width}, hidden {size.hidden}, batch {BATCH} of {size.context}",
        columns="compiled for | model | recipe | final projection | FLOPs on the units "
        "| calls | other products",
        rows=[_units_row(record) for record in found.records if "framework" in record],
        notes=[
            "FLOPs of the three products of each linear layer that the compiler made "
            f"`{FP8_CALL}` of (H100), `{BLOCK_CALL}` (B200), or left with FP8 operands "
            "(TPU7x). Other products are attention's and, unless it is quantized, the "
            "final projection's three."
        ],
    )
    kept = Table(
        title="Bytes that linear layers keep for the backward pass, against bfloat16",
        columns=["recipe", *STACKS, "goal"],
        rows=[
            [
                recipe,
                *(f"{_share(found, stack, recipe):.3f}" for stack in STACKS),
                f"{limit}",
            ]
            for recipe, limit in LIMITS.items()
            if any(record.get("stack") for record in found.records)
        ],
        notes=[
            f"{TOKENS} tokens of width {size.width}, hidden {size.hidden}. The goal is "
            "for layers *in a row*, each with an input of its own. *With attention*, "
            "queries, keys and values have one input, which bfloat16 keeps once; "
            "quantized it is kept three times as traced, with one scale, and the "
            "compiler keeps one of them."
        ],
    )
    return [units, kept]


def _units_row(record: dict[str, Any]) -> list[str]:
    case, counts = _case(record), record["counts"]
    products = counts["products"]
    fast = sum(n for kind, n in products.items() if is_fast(kind, case))
    return [
        TARGETS[case.target].title,
        case.framework,
        case.recipe,
        "quantized" if case.head else "left out",
        f"{counts['fast_flops'] / counts['linear_flops']:.1%}",
        str(fast),
        str(sum(products.values()) - fast),
    ]


def _case(record: dict[str, Any]) -> Case:
    names = [field.name for field in dataclasses.fields(Case)]
    return Case(**{name: record[name] for name in names})


def _share(found: Results, stack: str, recipe: str) -> float:
    (record,) = (
        record
        for record in found.records
        if record.get("stack") == stack and record["recipe"] == recipe
    )
    return record["bytes"] / record["bfloat16"]


def goals(found: Results) -> Iterator[Goal]:
    """All FLOPs on the units; bytes within their limits."""
    for record in found.records:
        if "framework" not in record:
            continue
        counts = record["counts"]
        share = counts["fast_flops"] / counts["linear_flops"]
        head = ", final projection too" if record["head"] else ""
        device = TARGETS[record["target"]].title
        yield Goal(
            f"100% of linear FLOPs on the units of {device}: "
            f"{record['framework']}, {record['recipe']}{head}: {share:.2%}",
            counts["fast_flops"] == counts["linear_flops"],
        )
    for recipe, limit in LIMITS.items():
        share = _share(found, "in a row", recipe)
        text = f"bytes kept at most {limit} of bfloat16's: {recipe}: {share:.3f}"
        yield Goal(text, share <= limit)
