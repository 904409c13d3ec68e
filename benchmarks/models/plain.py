"""The training step of plain transformers, with the arms of either environment.

The step is Adam's, its buffers are donated. It imports nothing that the peers'
environment does not have.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import equinox as eqx
import jax
import optax

from ..steps import LEARNING_RATE, Arm, ArrayStep, Loss, built
from . import transformers
from .arranged import cross_entropy
from .problems import PROBLEMS

# Which ViTs there are: the problem, the dropout, and whether a token of its own is what
# is classified, and not the mean. The MPX paper's have one, and it says nothing of
# dropout. With that token they have 65 and 197 tokens, of which XLA pads half-precision
# products.
VITS = {
    **{name: (problem, 0.1, False) for name, problem in PROBLEMS.items()},
    **{f"{name}, mean": (problem, 0.0, False) for name, problem in PROBLEMS.items()},
    **{f"{name}, token": (problem, 0.1, True) for name, problem in PROBLEMS.items()},
    **{f"paper {name}": (problem, 0.0, True) for name, problem in PROBLEMS.items()},
}
GPT = {"width": 768, "hidden": 3072, "heads": 12, "context": 512}
GPTS = {
    "gpt": GPT,
    "gpt scan": GPT,
    "tiny gpt": {"width": 16, "hidden": 32, "heads": 2, "context": 8},
}


def title(model: str) -> str:
    """A model in words.

    >>> title("paper desktop")
    'desktop ViT (width 256, hidden 800) on CIFAR-100, 65 tokens'
    """
    if model in GPTS:
        sizes = GPTS[model]
        scanned = ", scanned" if model == "gpt scan" else ""
        return f"GPT (width {sizes['width']}, context {sizes['context']}){scanned}"
    problem, dropout, class_token = VITS[model]
    height, width, _ = problem.image_shape
    tokens = (height // problem.patch) * (width // problem.patch) + class_token
    more = f", dropout {dropout}" if dropout else ""
    return problem.title + more + (f", {tokens} tokens" if class_token else "")


@dataclasses.dataclass(frozen=True)
class Case:
    """A training step to compile.

    Attributes:
        target: A name of `targets.TARGETS`.
        model: A name of `VITS` or `GPTS`.
        blocks: How many blocks it has.
        batch: Images or texts per step.
        arm: The name of an arm.
        devices: How many devices share the batch (data-parallel).
    """

    target: str
    model: str
    blocks: int
    batch: int
    arm: str
    devices: int = 1


def build(
    arm: Arm, case: Case, devices: list[Any] | None = None, seed: int | None = None
) -> ArrayStep:
    """The step of a case; see `steps.built`."""
    loss, optimizer = _loss(case), optax.adam(LEARNING_RATE)

    def initial(key: Any) -> tuple[tuple[Any, Any, Any], Any]:
        batch = _random_batch(case, key)
        model = _model(arm, case, key)
        params = eqx.filter(model, eqx.is_inexact_array)
        first_scaling = arm.first_scaling(loss, model, batch)
        return (model, optimizer.init(params), first_scaling), batch

    return built(initial, arm.make_step(loss, optimizer), devices, seed)


def _random_batch(case: Case, key: Any) -> Any:
    if case.model in VITS:
        problem = VITS[case.model][0]
        images = jax.random.normal(key, (case.batch, *problem.image_shape))
        return images, jax.random.randint(key, (case.batch,), 0, problem.classes)
    shape = (case.batch, GPTS[case.model]["context"] + 1)
    return jax.random.randint(key, shape, 0, transformers.BYTES)


def _model(arm: Arm, case: Case, key: Any) -> Any:
    return (_vit if case.model in VITS else _gpt)(arm, case, key)


def _loss(case: Case) -> Loss:
    if case.model not in VITS:
        return _gpt_loss
    return _dropping_loss if VITS[case.model][1] else _vit_loss


def _vit(arm: Arm, case: Case, key: Any) -> transformers.ViT:
    problem, dropout, class_token = VITS[case.model]
    return transformers.ViT(
        problem, case.blocks, dropout, key, arm.full(), class_token=class_token
    )


def _gpt(arm: Arm, case: Case, key: Any) -> transformers.GPT:
    sizes, is_scan = GPTS[case.model], case.model == "gpt scan"
    return transformers.GPT(
        **sizes, blocks=case.blocks, key=key, scan=is_scan, full=arm.full()
    )


def _vit_loss(model: Any, batch: Any) -> jax.Array:
    images, labels = batch
    return cross_entropy(jax.vmap(model)(images), labels)


def _dropping_loss(model: Any, batch: Any) -> jax.Array:
    images, labels = batch
    keys = jax.random.split(jax.random.key(0), len(labels))
    return cross_entropy(jax.vmap(model)(images, keys), labels)


def _gpt_loss(model: Any, texts: Any) -> jax.Array:
    return cross_entropy(jax.vmap(model)(texts[:, :-1]), texts[:, 1:])
