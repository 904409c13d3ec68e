"""What autocast costs on the host: CPU seconds to trace and lower a gradient.

Question: how much longer does JAX need where `mpx.autocast` writes the function anew?
The blocks are those of the desktop ViT, a plain model, in a row or as one loop. Both
arms alternate, round by round, with JAX's caches cleared before each sample, as in
`time.host`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

from ..models.problems import PROBLEMS
from ..results import Results
from ..tables import Goal, Table
from .host import in_rounds

FORMS = {"unrolled": False, "scanned": True}
ARMS = ("float32", "autocast")
BLOCKS = 12
# How many times as long as without autocast it may take.
LIMITS = {"unrolled": 2.0, "scanned": 1.5}


def measure(request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields one answer per round with the seconds of every form and arm.

    Args:
        request: how many `rounds` and `blocks`.
    """
    import jax

    makers = []
    for (form, scan), arm in itertools.product(FORMS.items(), ARMS):
        function, arguments = _gradient(scan, arm, request["blocks"])
        made = lambda f=function, args=arguments: (jax.jit(f), args)  # noqa: E731
        makers.append(({"form": form, "arm": arm}, made))
    yield from in_rounds(makers, request["rounds"])


def _gradient(scan: bool, arm: str, blocks: int) -> tuple[Any, tuple[Any, ...]]:
    """The gradient of what the blocks make of tokens, and its arguments' types."""
    import equinox as eqx
    import jax
    import jax.numpy as jnp

    import mpx
    from examples.vit import AttentionBlock, MLPBlock

    config = PROBLEMS["desktop"].config(blocks, 0.0)

    def make(key: Any) -> tuple[Any, ...]:
        return AttentionBlock(config, key), MLPBlock(config, key)

    def make_all(keys: Any) -> Any:
        if scan:
            return eqx.filter_vmap(make)(keys)
        return [make(keys[i]) for i in range(blocks)]

    keys = jax.random.split(jax.random.key(0), blocks)
    layers = eqx.filter_eval_shape(make_all, keys)
    weights, static = eqx.partition(
        layers, lambda x: isinstance(x, jax.ShapeDtypeStruct)
    )

    def layer(x: Any, weights: Any, static: Any) -> tuple[Any, None]:
        attention, mlp = eqx.combine(weights, static)
        return jax.vmap(lambda x: mlp(attention(x)))(x), None

    def loss(weights: Any, x: Any) -> Any:
        if scan:
            x, _ = jax.lax.scan(lambda x, w: layer(x, w, static), x, weights)
        else:
            for pair in zip(weights, static, strict=True):
                x, _ = layer(x, *pair)
        return jnp.mean(x**2)

    tokens = jax.ShapeDtypeStruct((256, 64, config.width), "float32")
    function = mpx.autocast(loss) if arm == "autocast" else loss
    return jax.value_and_grad(function), (weights, tokens)


def records(answers: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """A record per form and arm with all its samples, in the order of the rounds."""
    rounds = [answer["round"] for answer in answers]
    return [
        {
            "form": column[0]["form"],
            "arm": column[0]["arm"],
            "seconds": [
                round(sample["trace"] + sample["lower"], 4) for sample in column
            ],
        }
        for column in zip(*rounds, strict=True)
    ]


def _forms(found: Results) -> Iterator[tuple[str, list[float], list[float]]]:
    """Each form with the seconds without autocast and with it."""
    seconds = {
        (record["form"], record["arm"]): record["seconds"]
        for record in found.records
        if "form" in record
    }
    for form in FORMS:
        if (form, "float32") in seconds:
            yield form, seconds[form, "float32"], seconds[form, "autocast"]


def _ratio(plain: list[float], cast: list[float]) -> float:
    """The ratio of the fastest rounds, see `host.added`."""
    return min(cast) / min(plain)


def tables(found: Results) -> list[Table]:
    """A row per form."""
    rows = [
        [
            form,
            f"{min(plain):.3f}",
            f"{min(cast):.3f}",
            f"{_ratio(plain, cast):.2f}",
        ]
        for form, plain, cast in _forms(found)
    ]
    if not rows:
        return []
    return [
        Table(
            title="CPU seconds to trace and lower the gradient of a ViT's blocks, "
            f"{BLOCKS} of them, {found.device}",
            columns="blocks | float32 | autocast bfloat16 | ratio",
            rows=rows,
            notes=["The fastest of alternating rounds."],
        )
    ]


def goals(found: Results) -> list[Goal]:
    """Autocast stays within the limits."""
    return [
        Goal(
            f"tracing and lowering a gradient under autocast at most {LIMITS[form]} "
            f"times as long, {form}: {_ratio(plain, cast):.2f}",
            _ratio(plain, cast) <= LIMITS[form],
        )
        for form, plain, cast in _forms(found)
    ]
