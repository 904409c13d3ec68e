"""One identical training step in different precisions and libraries.

Every arm has the same model, loss and optimizer, and donated buffers. What differs is
only what its library tells its users to write. `float32` is plain Equinox and uses no
mpx at all.

The arms of the published packages live in `peers.arms`, because the published MPX is
imported as `mpx` too.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from .models import transformers

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

    def full(self) -> transformers.Full:
        """What its models put around a function that computes in full precision."""
        if not self.uses_mpx:
            return transformers.as_it_is
        import mpx  # ours, or the published one

        return mpx.force_full_precision


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


def to_bfloat16(leaf: Any) -> Any:
    """A leaf in bfloat16, if it is an array of floating point numbers."""
    return leaf.astype(jnp.bfloat16) if eqx.is_inexact_array(leaf) else leaf


def no_scaling(loss: Loss, model: Any, batch: Any) -> None:
    """The state of a step that scales nothing."""


FLOAT32 = Arm("float32", no_scaling, _float32_step, uses_mpx=False)
# What one writes without a library: all weights and inputs cast, whatever they are for.
NAIVE = Arm("naive bfloat16", no_scaling, _naive_step, uses_mpx=False)


REPOSITORY = Path(__file__).resolve().parent.parent


def known_arms(which: str = "ARMS") -> dict[str, Arm]:
    """The arms of this environment: ours, or where `mpx` is the published one."""
    import mpx

    is_ours = Path(str(mpx.__file__)).resolve().is_relative_to(REPOSITORY / "mpx")
    name = ".our_arms" if is_ours else ".peers.arms"
    return getattr(importlib.import_module(name, __package__), which)


@dataclasses.dataclass(frozen=True)
class ArrayStep:
    """A training step as a function of arrays only, ready for `jax.jit`.

    Attributes:
        function: of `(model, opt_state, scaling)` and the batch, arrays only.
        state: its first argument, as shapes or as arrays.
        batch: its second argument.
        out_shardings: for `jax.jit`; None on one ordinary device.
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
