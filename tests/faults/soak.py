"""Many small steps on eight devices, with a NaN now and then, and checkpoints between.

The weights lie in pieces (FSDP), the loss is float16 with dynamic loss scaling, and the
batch of a step is made on the devices from the number of the step, so that nothing has
to come from the host. A bad step has one NaN, in the rows of one device.

What must come out: the weights, moments and counts of a run that never saw the bad
batches, bit for bit; as many skipped steps as there were faults; and the loss scale of
`tests.reference.loss_scaling`.
"""

import dataclasses
import gc
import resource
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import mpx
from examples.runs.digest import digests
from tests.reference.loss_scaling import Oracle

ROWS, WIDTH, PERIOD = 16, 16, 20
# Far from where a gradient of this model overflows, so that only faults are skipped.
FIRST, LARGEST = 2.0**10, 2.0**12


@dataclasses.dataclass
class Soak:
    steps: int
    faults: int
    skipped: int
    restored: int
    traces: int
    arrays: tuple[int, int]
    """Live arrays after a tenth of the steps, and at the end."""
    megabytes: tuple[float, float]
    """The peak of memory of the process, likewise."""
    scale_is_right: bool
    is_equal: bool
    calls_the_host: bool

    def summary(self) -> str:
        return (
            f"{self.steps:,} steps, {self.faults} faults, {self.skipped} skipped; "
            f"{self.restored} times saved and restored; "
            f"{'all' if self.is_equal else 'NOT all'} arrays equal to those of a run "
            "without the bad batches; "
            f"scale {'right' if self.scale_is_right else 'WRONG'}; "
            f"{self.traces} trace; "
            f"{'it CALLS the host' if self.calls_the_host else 'no call of the host'}; "
            f"live arrays {self.arrays[0]} to {self.arrays[1]}; "
            f"peak memory {self.megabytes[0]:.0f} to {self.megabytes[1]:.0f} MB"
        )


def fault_row(step: Any, seed: int = 7) -> Any:
    """The row that is bad in a step, or -1: about one step of 23 is. On the devices."""
    key = jax.random.fold_in(jax.random.key(seed), step)
    row = jax.random.randint(key, (), 0, 23 * ROWS)
    return jnp.where(row < ROWS, row, -1)


@mpx.autocast(dtype=jnp.float16)
def loss(weights: Any, x: Any, y: Any) -> Any:
    hidden = jax.nn.relu(x @ weights["first"])
    return jnp.mean((hidden @ weights["last"] - y) ** 2)


class Trainer:
    def __init__(self) -> None:
        devices = jax.devices()[:8]
        auto = (AxisType.Auto,)
        self.mesh = jax.make_mesh((len(devices),), ("fsdp",), auto, devices=devices)
        self.divided = NamedSharding(self.mesh, P("fsdp"))
        self.optimizer = optax.adamw(1e-3)
        self.traces = 0
        self.step: Any = jax.jit(self._step, donate_argnums=0)

    def initial(self, with_faults: bool) -> Any:
        keys = jax.random.split(jax.random.key(0))
        first, last = (jax.random.normal(key, (WIDTH, WIDTH)) / 4 for key in keys)
        weights = {"first": first, "last": last}
        weights = jax.device_put(weights, self.divided)
        state = mpx.init_optimizer(self.optimizer, weights)
        scaling = mpx.DynamicLossScaling(FIRST, period=PERIOD, max_loss_scaling=LARGEST)
        count = jnp.zeros((), jnp.int32)  # the number of the next batch
        rest = scaling, count, jnp.asarray(with_faults)
        rest = jax.device_put(rest, NamedSharding(self.mesh, P()))
        return weights, state, *rest

    def _step(self, state: Any) -> Any:
        self.traces += 1
        weights, opt_state, scaling, count, with_faults = state
        # One program for both runs: two would round in two ways.
        is_left_out = lambda count: (fault_row(count) >= 0) & ~with_faults  # noqa: E731
        count = jax.lax.while_loop(is_left_out, lambda count: count + 1, count)
        key = jax.random.fold_in(jax.random.key(1), count)
        x = jax.random.normal(key, (ROWS, WIDTH))
        is_bad_row = jnp.arange(ROWS)[:, None] == fault_row(count)
        x = jnp.where(is_bad_row, jnp.nan, x)
        x = jax.lax.with_sharding_constraint(x, self.divided)
        result = mpx.value_and_grad(loss, scaling)(weights, x, -x)
        new = mpx.optimizer_step(weights, self.optimizer, opt_state, result)
        return *new, count + 1, with_faults


def faults_in(steps: int) -> np.ndarray:
    return np.asarray(jax.vmap(fault_row)(jnp.arange(steps)) >= 0)


def soak(steps: int, pieces: int = 10) -> Soak:
    """Runs it, and beside it the run without the bad batches."""
    bad = faults_in(steps)
    trainer = Trainer()
    state, expected = trainer.initial(True), trainer.initial(False)
    compiled = trainer.step.lower(state).compile().as_text()
    seen: list[tuple[int, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        for piece in range(pieces):
            with jax.transfer_guard("disallow"):
                for _ in range(steps // pieces):
                    state = trainer.step(state)
            state = through_disk(state, Path(folder) / str(piece))
            gc.collect()
            seen.append((len(jax.live_arrays()), peak_megabytes()))
    for _ in range(steps - int(bad.sum())):
        expected = trainer.step(expected)
    oracle = Oracle(FIRST, 1.0, LARGEST, 2.0, 0.5, PERIOD)
    for is_bad in bad:
        oracle.step(not is_bad, is_loss_finite=not is_bad)
    scaling = state[2]
    same = [digests(s[:2]) for s in (state, expected)]
    is_right, is_equal = float(scaling.loss_scale) == oracle.scale, same[0] == same[1]
    counts = steps, int(bad.sum()), int(scaling.skipped), pieces, trainer.traces
    arrays, megabytes = zip(seen[0], seen[-1], strict=True)
    calls = calls_the_host(compiled)
    return Soak(*counts, arrays, megabytes, is_right, is_equal, calls)


def through_disk(state: Any, path: Path) -> Any:
    """Saves and restores, to where everything lay."""
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, state)
        checkpointer.wait_until_finished()
        shapes = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
        restored = checkpointer.restore(path, shapes)
    if digests(restored) != digests(state):
        raise AssertionError("what was restored is not what was saved")
    return restored


def calls_the_host(compiled: str) -> bool:
    """Whether a compiled program waits for Python or sends it something."""
    words = ("callback", "outfeed", "infeed", " send(", " recv(")
    return any(word in compiled for word in words)


def peak_megabytes() -> float:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6
