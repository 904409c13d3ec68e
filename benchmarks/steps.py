"""One identical training step in different precisions and libraries.

Every arm is the same ViT, the same mean cross entropy in float32, the same optimizer,
and donated buffers. What differs is only what its library tells its users to write.
`float32` is plain Equinox and uses no mpx at all.

There are two recipes. `adam` is the bare step: Adam, no dropout. `job` is the step of
the main job (`examples.vit`, preset `cifar100`): clipping, AdamW with a schedule and
decay of matrices only, dropout.

The arms of the published packages live in `peers.arms`, because the published MPX is
imported as `mpx` too.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from examples.presets import CIFAR100, CIFAR100_MODEL

from .models.problems import PROBLEMS, Problem, make_model

Recipe = Literal["adam", "job"]

LEARNING_RATE = 1e-3
FIRST_SCALE = 2.0**15

Loss = Callable[[Any, Any], jax.Array]
StepFunction = Callable[[Any, Any, Any, Any], tuple[Any, Any, Any, jax.Array]]


@dataclasses.dataclass(frozen=True)
class Arm:
    """A way to write the training step.

    Attributes:
        name: the word on the command line and in tables.
        first_scaling: makes the state that the scaling starts with, from the loss, the
            model and a batch.
        make_step: from loss and optimizer to
            `model, opt_state, scaling, loss = step(model, opt_state, scaling, batch)`.
        uses_mpx: False where the model must not use mpx either.
    """

    name: str
    first_scaling: Callable[[Loss, Any, Any], Any]
    make_step: Callable[[Loss, optax.GradientTransformation], StepFunction]
    uses_mpx: bool = True


def mean_loss(model: Any, batch: tuple[Any, Any]) -> jax.Array:
    """Mean cross entropy in float32, without dropout."""
    images, labels = batch
    return _cross_entropy(jax.vmap(model)(images), labels)


def mean_loss_with_dropout(model: Any, batch: tuple[Any, Any]) -> jax.Array:
    """Mean cross entropy in float32, with a key for every image."""
    images, labels = batch
    keys = jax.random.split(jax.random.key(0), len(labels))
    return _cross_entropy(jax.vmap(model)(images, keys), labels)


def _cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    logits = logits.astype(jnp.float32)
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))


def make_optimizer(recipe: Recipe) -> optax.GradientTransformation:
    """Adam, or what the main job trains CIFAR-100 with."""
    if recipe == "adam":
        return optax.adam(LEARNING_RATE)
    job = CIFAR100
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, job["learning_rate"], job["warmup_steps"], job["steps"]
    )
    adamw = optax.adamw(
        schedule,
        weight_decay=job["weight_decay"],
        mask=lambda params: jax.tree.map(lambda leaf: leaf.ndim > 1, params),
    )
    return optax.chain(optax.clip_by_global_norm(job["clip"]), adamw)


def _float32_step(loss: Loss, optimizer: optax.GradientTransformation) -> StepFunction:
    def step(model: Any, opt_state: Any, scaling: Any, batch: Any) -> tuple:
        value, grads = eqx.filter_value_and_grad(loss)(model, batch)
        updates, opt_state = optimizer.update(
            grads, opt_state, eqx.filter(model, eqx.is_inexact_array)
        )
        return eqx.apply_updates(model, updates), opt_state, scaling, value

    return step


def _cast(loss: Loss) -> Loss:
    """The loss of model and batch in bfloat16."""
    return lambda *both: loss(*jax.tree.map(to_bfloat16, both))


def _naive_step(loss: Loss, optimizer: optax.GradientTransformation) -> StepFunction:
    return _float32_step(_cast(loss), optimizer)


def _checked_naive_step(
    loss: Loss, optimizer: optax.GradientTransformation
) -> StepFunction:
    cast_loss = _cast(loss)

    def step(model: Any, opt_state: Any, scaling: Any, batch: Any) -> tuple:
        value, grads = eqx.filter_value_and_grad(cast_loss)(model, batch)
        model, opt_state, _ = checked_update(optimizer, model, opt_state, grads)
        return model, opt_state, scaling, value

    return step


def checked_update(
    optimizer: optax.GradientTransformation, model: Any, opt_state: Any, grads: Any
) -> tuple[Any, Any, jax.Array]:
    """Model and optimizer state after a step, or as they were.

    They stay as they were if a gradient is not finite; the third result says whether
    all are finite.
    """
    leaves = jax.tree.leaves(grads)
    finite = jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in leaves]).all()
    params, rest = eqx.partition(model, eqx.is_inexact_array)
    updates, new_state = optimizer.update(grads, opt_state, params)
    new = eqx.apply_updates(params, updates), new_state
    params, opt_state = jax.tree.map(
        lambda new, old: jnp.where(finite, new, old), new, (params, opt_state)
    )
    return eqx.combine(params, rest), opt_state, finite


def to_bfloat16(leaf: Any) -> Any:
    """A leaf in bfloat16, if it is an array of floating point numbers."""
    return leaf.astype(jnp.bfloat16) if eqx.is_inexact_array(leaf) else leaf


def no_scaling(loss: Loss, model: Any, batch: Any) -> None:
    """The state of a step that scales nothing."""


FLOAT32 = Arm("float32", no_scaling, _float32_step, uses_mpx=False)
# What one writes without a library: all weights and inputs cast, whatever they are for.
NAIVE = Arm("naive bfloat16", no_scaling, _naive_step, uses_mpx=False)
# The same with what mpx does besides: gradients are checked, and the step skipped.
CHECKED = Arm(
    "naive bfloat16, checked", no_scaling, _checked_naive_step, uses_mpx=False
)


REPOSITORY = Path(__file__).resolve().parent.parent


def known_arms() -> dict[str, Arm]:
    """The arms of this environment: ours, or where `mpx` is the published one."""
    import mpx

    is_ours = Path(str(mpx.__file__)).resolve().is_relative_to(REPOSITORY / "mpx")
    name = ".our_arms" if is_ours else ".peers.arms"
    return importlib.import_module(name, __package__).ARMS


@dataclasses.dataclass(frozen=True)
class Case:
    """One training step to measure.

    Attributes:
        problem: a name of `PROBLEMS`.
        arm: the name of an arm.
        batch: images per step, over all devices.
        blocks: transformer blocks.
        devices: how many devices share the batch (data-parallel).
        recipe: `"adam"` or `"job"`, see above.
    """

    problem: str
    arm: str
    batch: int
    blocks: int
    devices: int = 1
    recipe: Recipe = "adam"


@dataclasses.dataclass(frozen=True)
class ArrayStep:
    """A training step as a function of arrays only, ready for `jax.jit`.

    Attributes:
        function: of `(model, opt_state, scaling)` and the batch, arrays only.
        state: its first argument, as shapes or as arrays.
        batch: its second argument.
        in_shardings: for `jax.jit`; None on one ordinary device.
        out_shardings: the same.
    """

    function: Callable[[Any, Any], tuple[Any, jax.Array]]
    state: Any
    batch: Any
    out_shardings: Any = None

    def jitted(self) -> Any:
        """A new jitted function, which shares no trace with an earlier one."""

        # A function of its own: `jax.jit` keys its caches by the function's identity.
        def train_step(state: Any, batch: Any) -> tuple[Any, jax.Array]:
            return self.function(state, batch)

        if self.out_shardings is None:
            return jax.jit(train_step, donate_argnums=0)
        return jax.jit(train_step, donate_argnums=0, out_shardings=self.out_shardings)


def is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct) or eqx.is_array(leaf)


def build(
    arm: Arm, case: Case, devices: list[Any] | None = None, seed: int | None = None
) -> ArrayStep:
    """The step of a case; see `built`."""

    def initial(key: Any) -> tuple[Any, Any]:
        batch = random_images(PROBLEMS[case.problem], case.batch, key)
        return _initial_state(arm, case, batch, key), batch

    step = arm.make_step(_loss(case), make_optimizer(case.recipe))
    return built(initial, step, devices, seed)


def built(
    initial: Callable[[Any], tuple[tuple, Any]],
    step: Callable[..., tuple],
    devices: list[Any] | None = None,
    seed: int | None = None,
) -> ArrayStep:
    """A step with shapes for arguments, or with random arrays, to run it.

    Args:
        initial: from a key to the state and the batch.
        step: `*new_state, loss = step(*state, batch)`.
        devices: compile-only devices that the shapes are placed on, as many as share
            the batch; none leaves them where `jax.jit` puts them.
        seed: of the arrays; none has shapes.
    """
    if seed is None:
        state, batch = eqx.filter_eval_shape(initial, jax.random.key(0))
    else:
        state, batch = initial(jax.random.key(seed))
    return arrays_only(step, state, batch, devices)


def random_images(problem: Problem, batch: int, key: Any) -> tuple[Any, Any]:
    """Random images and labels."""
    images = jax.random.normal(key, (batch, *problem.image_shape))
    return images, jax.random.randint(key, (batch,), 0, problem.classes)


def _initial_state(arm: Arm, case: Case, batch: Any, key: Any) -> tuple[Any, Any, Any]:
    dropout = CIFAR100_MODEL["dropout"] if case.recipe == "job" else 0.0
    config = PROBLEMS[case.problem].config(case.blocks, dropout)
    model = make_model(PROBLEMS[case.problem], config, key, with_mpx=arm.uses_mpx)
    params = eqx.filter(model, eqx.is_inexact_array)
    scaling = arm.first_scaling(_loss(case), model, batch)
    return model, make_optimizer(case.recipe).init(params), scaling


def _loss(case: Case) -> Loss:
    return mean_loss if case.recipe == "adam" else mean_loss_with_dropout


def arrays_only(
    step: Callable[..., tuple], state: tuple, batch: Any, devices: list[Any] | None
) -> ArrayStep:
    """A step as a function of arrays.

    Args:
        step: `*new_state, loss = step(*state, batch)`.
        state: its first arguments, PyTrees with or without other things than arrays.
        batch: its last one.
        devices: see `built`.
    """
    arrays, rest = eqx.partition(state, is_array)

    def function(arrays: Any, batch: Any) -> tuple[Any, jax.Array]:
        *new_state, loss = step(*eqx.combine(arrays, rest), batch)
        return eqx.filter(tuple(new_state), is_array), loss

    if devices is None:
        return ArrayStep(function, arrays, batch)
    if len(devices) == 1:
        everywhere = divided = SingleDeviceSharding(devices[0])
    else:
        mesh = Mesh(np.array(devices), ("data",))
        everywhere = NamedSharding(mesh, PartitionSpec())
        divided = NamedSharding(mesh, PartitionSpec("data"))
    return ArrayStep(
        function,
        _placed(arrays, everywhere),
        _placed(batch, divided),
        out_shardings=None if len(devices) == 1 else everywhere,
    )


def _placed(tree: Any, sharding: Any) -> Any:
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        tree,
    )
