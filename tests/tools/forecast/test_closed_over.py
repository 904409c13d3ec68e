"""Arrays that a loss or a step closes over are in the memory, each once."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

import mpx
from mpx._tools._counter import TARGETS
from mpx._tools._counter._targets import why_missing

pytestmark = pytest.mark.third_party

N = 64
SIZE = 4 * N * N
FROZEN = [jax.random.normal(key, (N, N)) for key in jax.random.split(jax.random.key(0))]
TABLE = np.arange(SIZE // 8, dtype=np.float32).reshape(-1, N)  # half of `SIZE`
W = jax.ShapeDtypeStruct((N, 8), jnp.float32)
X = jax.ShapeDtypeStruct((32, N), jnp.float32)
ADAM = optax.adam(1e-3)
CLOSED = "closed-over arrays"


def net(w, x, frozen):
    for one in frozen:
        x = jnp.tanh(x @ one + (x @ w) @ w.T)
    return jnp.mean(x**2)


class Loss(eqx.Module):
    frozen: list

    def __call__(self, w, x):
        return net(w, x, self.frozen)


@jax.jit
def frozen_layer(x):
    return jnp.tanh(x @ FROZEN[0]) + TABLE


def by_reference(w, x):
    return net(w, x, FROZEN)


def in_jit(w, x):
    """One array in the function itself, and twice in one that it calls."""
    return net(w, frozen_layer(frozen_layer(x @ FROZEN[0])), [])


def in_loop(w, x):
    def body(x, _):
        return frozen_layer(x) + (x @ w) @ w.T @ FROZEN[1], None

    return jnp.mean(jax.lax.scan(body, x, None, length=3)[0] ** 2)


def in_checkpoint(w, x):
    return net(w, jax.checkpoint(frozen_layer)(x + (x @ w) @ w.T), FROZEN)


def in_branch(w, x):
    x = x + (x @ w) @ w.T
    return jnp.mean(jax.lax.cond(jnp.sum(x) > 0, frozen_layer, lambda x: x, x) ** 2)


def other_types():
    few, half = FROZEN[0].astype(jnp.int8), FROZEN[0].astype(jnp.bfloat16)

    def loss(w, x):
        y = x @ few.astype(jnp.float32) + x @ half.astype(jnp.float32)
        return net(w, y, []) + jnp.sum((y @ w) @ w.T)

    return loss


LOSSES = {
    "by reference": (by_reference, 2 * SIZE),
    "partial": (functools.partial(net, frozen=FROZEN), 2 * SIZE),
    "object": (Loss(FROZEN), 2 * SIZE),
    "numpy": (lambda w, x: net(w, x * TABLE * TABLE, []), SIZE // 2),
    "jit": (in_jit, SIZE + SIZE // 2),
    "loop": (in_loop, 2 * SIZE + SIZE // 2),
    "checkpoint": (in_checkpoint, 2 * SIZE + SIZE // 2),
    "branch": (in_branch, SIZE + SIZE // 2),
    "other types": (other_types(), SIZE // 4 + SIZE // 2),
}


CASES = [(name, "bfloat16") for name in LOSSES]
CASES += [(name, "float32") for name in ("jit", "loop", "checkpoint")]


@pytest.mark.parametrize(("name", "precision"), CASES)
def test_each_array_is_counted_once(on_cpu, name, precision):
    loss, size = LOSSES[name]
    (one,) = mpx.forecast(loss, ADAM, precisions=precision, **on_cpu)(W, X).estimates
    assert one.memory_by_part[CLOSED] == size
    assert sum(one.memory_by_part.values()) == one.memory
    assert one.memory_by_part["other arguments"] < 2 * X.size * 4


def test_a_step_needs_what_it_needs_where_arrays_are_arguments_and_small_ones_nothing(
    on_cpu,
):
    def loss(frozen, w, x):
        return jnp.mean((jnp.tanh(jnp.tanh(x @ w) @ frozen[0]) @ frozen[1]) ** 2)

    wide = jax.ShapeDtypeStruct((512, 512), jnp.float32)
    frozen = [jnp.ones((512, 512)), jnp.full((512, 512), 0.5)]
    asked = {"precisions": ("bfloat16", "delayed"), **on_cpu}
    closed = mpx.forecast(functools.partial(loss, frozen), ADAM, **asked)(wide, wide)
    given = mpx.forecast(lambda w, x, f: loss(f, w, x), ADAM, **asked)
    estimates = given(wide, wide, [wide, wide]).estimates
    for one, other in zip(closed.estimates, estimates, strict=True):
        assert (one.memory, one.traffic) == (other.memory, other.traffic)
        assert one.memory_by_part[CLOSED] == 2 * 4 * 512 * 512
        assert CLOSED not in other.memory_by_part
    assert CLOSED in str(closed)
    # Compilers look into indices; and they are no memory.
    places = jnp.arange(4)
    loss = lambda w, x: net(w, x, []) + jnp.sum(w[places])  # noqa: E731
    forecast = mpx.forecast(loss, ADAM, precisions="float32", **on_cpu)
    assert CLOSED not in forecast(W, X).estimates[0].memory_by_part


def step(w, state, x):
    grads = jax.grad(by_reference)(w, x)
    updates, state = ADAM.update(grads, state)
    return optax.apply_updates(w, updates), state


@pytest.mark.parametrize("wrap", ["plain", "jit", "equinox", "nnx"])
def test_of_a_step_of_ones_own(on_cpu, wrap):
    """Where JAX has made constants of them, too."""
    wraps = {"plain": lambda f: f, "jit": jax.jit, "equinox": eqx.filter_jit}
    func = wraps[wrap] if wrap in wraps else pytest.importorskip("flax.nnx").jit
    state = jax.eval_shape(ADAM.init, W)
    (one,) = mpx.forecast(func(step), **on_cpu)(W, state, X).estimates
    assert one.memory_by_part[CLOSED] == 2 * SIZE
    assert sum(one.memory_by_part.values()) == one.memory


def test_every_device_has_the_whole_of_them(on_cpu):
    """As JAX makes constants also of sharded arrays."""
    if jax.device_count() < 2:
        pytest.skip("needs two devices")
    types = {"axis_types": (AxisType.Auto,)}
    divided, there = (
        NamedSharding(make((2,), ("data",), **types), PartitionSpec("data"))
        for make in (AbstractMesh, jax.make_mesh)
    )
    x = jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=divided)
    for frozen in (FROZEN, [jax.device_put(one, there) for one in FROZEN]):
        loss = functools.partial(net, frozen=frozen)
        forecast = mpx.forecast(loss, ADAM, precisions="float32", **on_cpu)
        assert forecast(W, x).estimates[0].memory_by_part[CLOSED] == 2 * SIZE
    x = jax.device_put(jnp.ones(X.shape), there)
    text = jax.jit(lambda x: x @ frozen[0]).lower(x).compile().as_text()
    constants = [line for line in text.splitlines() if "constant(" in line]
    assert f"f32[{N},{N}]" in "".join(constants)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["h100", "v5e"])
def test_by_the_compiler_of_a_target(name):
    if why_missing(TARGETS[name]) is not None:
        pytest.skip(f"the compiler for {name} is not installed")
    asked = {"precisions": ("float32", "bfloat16"), "targets": name}
    for loss in (by_reference, in_loop):
        for one in mpx.forecast(loss, ADAM, **asked)(W, X).estimates:
            assert one.memory_by_part[CLOSED] >= 2 * SIZE
            assert one.memory > one.memory_by_part[CLOSED]
