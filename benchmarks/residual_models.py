"""The training step of plain transformers, with the arms of either environment.

The step is Adam's, its buffers are donated. It imports nothing that the peers'
environment does not have.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

from . import transformers
from .problems import PROBLEMS
from .steps import LEARNING_RATE, Arm, ArrayStep, arrays_only

DROPOUT = 0.1
GPT = {"width": 768, "hidden": 3072, "heads": 12, "context": 512}


@dataclasses.dataclass(frozen=True)
class Case:
    """A training step to compile.

    Attributes:
        target: A name of `targets.TARGETS`.
        model: "desktop" or "base", of `PROBLEMS`; "gpt" or "gpt scan".
        blocks: How many blocks it has.
        batch: Images or texts per step.
        arm: The name of an arm.
    """

    target: str
    model: str
    blocks: int
    batch: int
    arm: str


def build(arm: Arm, case: Case, devices: list[Any] | None = None) -> ArrayStep:
    """The step of a case, with shapes for arguments; see `steps.build`."""
    optimizer = optax.adam(LEARNING_RATE)
    is_vit = case.model in PROBLEMS

    def initial(key: Any) -> tuple[Any, Any, Any]:
        model = _vit(arm, case, key) if is_vit else _gpt(arm, case, key)
        params = eqx.filter(model, eqx.is_inexact_array)
        return model, optimizer.init(params), arm.first_scaling()

    state = eqx.filter_eval_shape(initial, jax.random.key(0))
    batch: Any
    if is_vit:
        shape = (case.batch, *PROBLEMS[case.model].image_shape)
        labels = jax.ShapeDtypeStruct((case.batch,), np.int32)
        batch = (jax.ShapeDtypeStruct(shape, np.float32), labels)
    else:
        batch = jax.ShapeDtypeStruct((case.batch, GPT["context"] + 1), np.int32)
    step = arm.make_step(_vit_loss if is_vit else _gpt_loss, optimizer)
    return arrays_only(step, state, batch, devices)


def _full(arm: Arm) -> transformers.Full:
    if not arm.uses_mpx:
        return transformers.as_it_is
    import mpx

    return mpx.force_full_precision


def _vit(arm: Arm, case: Case, key: Any) -> transformers.ViT:
    problem = PROBLEMS[case.model]
    return transformers.ViT(problem, case.blocks, DROPOUT, key, _full(arm))


def _gpt(arm: Arm, case: Case, key: Any) -> transformers.GPT:
    is_scan = case.model == "gpt scan"
    return transformers.GPT(
        **GPT, blocks=case.blocks, key=key, scan=is_scan, full=_full(arm)
    )


def _vit_loss(model: Any, batch: Any) -> jax.Array:
    images, labels = batch
    keys = jax.random.split(jax.random.key(0), len(labels))
    return _cross_entropy(jax.vmap(model)(images, keys), labels)


def _gpt_loss(model: Any, texts: Any) -> jax.Array:
    return _cross_entropy(jax.vmap(model)(texts[:, :-1]), texts[:, 1:])


def _cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    losses = optax.softmax_cross_entropy_with_integer_labels(
        logits.astype(jnp.float32), labels
    )
    return jnp.mean(losses)
