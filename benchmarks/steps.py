"""One identical training step in different precisions and libraries.

Every arm is the same ViT, the same mean cross entropy in float32, Adam, and donated
buffers. What differs is only what its library tells its users to write. `float32`
is plain Equinox and uses no mpx at all.

The arms of the published packages live in `peer_arms`, because the published MPX is
imported as `mpx` too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from .problems import PROBLEMS, make_model

LEARNING_RATE = 1e-3
FIRST_SCALE = 2.0**15

Loss = Callable[[Any, Any], jax.Array]
StepFunction = Callable[[Any, Any, Any, Any], tuple[Any, Any, Any, jax.Array]]


@dataclasses.dataclass(frozen=True)
class Arm:
    """A way to write the training step.

    Attributes:
        name: the word on the command line and in tables.
        library: whose code it is, with `{version}` filled in by the worker.
        first_scaling: makes the state that the loss scaling starts with.
        make_step: from loss and optimizer to
            `model, opt_state, scaling, loss = step(model, opt_state, scaling, batch)`.
        uses_mpx: False where the model must not use mpx either.
    """

    name: str
    library: str
    first_scaling: Callable[[], Any]
    make_step: Callable[[Loss, optax.GradientTransformation], StepFunction]
    uses_mpx: bool = True


def loss_of_batch(model: Any, batch: tuple[Any, Any]) -> jax.Array:
    """Mean cross entropy in float32."""
    images, labels = batch
    logits = jax.vmap(model)(images).astype(jnp.float32)
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))


def _float32_step(loss: Loss, optimizer: optax.GradientTransformation) -> StepFunction:
    def step(model: Any, opt_state: Any, scaling: Any, batch: Any) -> tuple:
        value, grads = eqx.filter_value_and_grad(loss)(model, batch)
        updates, opt_state = optimizer.update(
            grads, opt_state, eqx.filter(model, eqx.is_inexact_array)
        )
        return eqx.apply_updates(model, updates), opt_state, scaling, value

    return step


FLOAT32 = Arm("float32", "equinox", lambda: None, _float32_step, uses_mpx=False)


@dataclasses.dataclass(frozen=True)
class Case:
    """One training step to measure.

    Attributes:
        problem: a name of `PROBLEMS`.
        arm: the name of an arm.
        batch: images per step, over all devices.
        blocks: transformer blocks.
        devices: how many devices share the batch (data-parallel).
    """

    problem: str
    arm: str
    batch: int
    blocks: int
    devices: int = 1


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


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct) or eqx.is_array(leaf)


def build(arm: Arm, case: Case, devices: list[Any] | None = None) -> ArrayStep:
    """The step of a case, with shapes for arguments.

    Args:
        arm: its code.
        case: its size.
        devices: compile-only devices that the shapes are placed on, `case.devices` of
            them; none leaves them where `jax.jit` puts them.
    """
    problem = PROBLEMS[case.problem]

    def initial(key: Any) -> tuple[Any, Any, Any]:
        model = make_model(problem, case.blocks, key, with_mpx=arm.uses_mpx)
        optimizer = optax.adam(LEARNING_RATE)
        opt_state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
        return model, opt_state, arm.first_scaling()

    state = eqx.filter_eval_shape(initial, jax.random.key(0))
    batch = (
        jax.ShapeDtypeStruct((case.batch, *problem.image_shape), np.float32),
        jax.ShapeDtypeStruct((case.batch,), np.int32),
    )
    return _arrays_only(arm, state, batch, devices)


def build_concrete(arm: Arm, case: Case, seed: int) -> ArrayStep:
    """The step of a case with random weights and images, to run it."""
    problem = PROBLEMS[case.problem]
    model = make_model(
        problem, case.blocks, jax.random.key(seed), with_mpx=arm.uses_mpx
    )
    opt_state = optax.adam(LEARNING_RATE).init(eqx.filter(model, eqx.is_inexact_array))
    random = np.random.default_rng(seed)
    images = random.standard_normal((case.batch, *problem.image_shape), np.float32)
    labels = random.integers(problem.classes, size=case.batch, dtype=np.int32)
    batch = (jnp.asarray(images), jnp.asarray(labels))
    return _arrays_only(arm, (model, opt_state, arm.first_scaling()), batch, None)


def _arrays_only(
    arm: Arm, state: Any, batch: Any, devices: list[Any] | None
) -> ArrayStep:
    step = arm.make_step(loss_of_batch, optax.adam(LEARNING_RATE))
    arrays, rest = eqx.partition(state, _is_array)

    def function(arrays: Any, batch: Any) -> tuple[Any, jax.Array]:
        *new_state, loss = step(*eqx.combine(arrays, rest), batch)
        return eqx.filter(tuple(new_state), _is_array), loss

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
