"""Loops for a CPU whose compiler cannot write a part of a bfloat16 array."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import mpx
from mpx._autocast._stacks import has_wide_loops
from mpx._base.jax_compat import WIDENS_STACKS
from mpx._quantize import read_target
from mpx._settings._settings import Settings
from mpx._tools._counter._hlo import parse

from .counting import named, pairs, relative_error

TURNS, WIDTH, ROWS = 13, 8, 3  # no other size is a multiple of the turns
only_where_it_widens = pytest.mark.skipif(
    not WIDENS_STACKS, reason="XLA writes a part of a bfloat16 array since jaxlib 0.11"
)


def random(*shape, seed=0):
    return jax.random.normal(jax.random.key(seed), shape, np.float32) / 2


def cell(w, h, x):
    h = jnp.tanh(h @ w["h"] + x @ w["x"])
    return h, h


def recurrent(w, x):
    w = {name: a[0] for name, a in w.items()}
    return lax.scan(lambda h, x: cell(w, h, x), x[0], x)[1]


def lstm(w, x):
    w = {name: jnp.tile(a[0], 4) for name, a in w.items()}

    def turn(carry, gates):
        h, c = carry
        i, f, u, o = jnp.split(gates + h @ w["h"], 4, -1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(u)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    return lax.scan(turn, (x[0], x[0]), x @ w["x"])[1]


def nested(w, x):
    w = {name: a[0] for name, a in w.items()}

    def turn(h, x):
        return lax.scan(lambda h, x: cell(w, h, x), h, jnp.tile(x, (TURNS, 1, 1)))

    return lax.scan(turn, x[0], x)[1]


def block(x, w):
    scores = jax.nn.softmax((x @ w["x"]) @ x.T)
    return x + jax.nn.gelu(scores @ (x @ w["h"])), None


def layers_with(wrapped):
    return lambda w, x: lax.scan(wrapped(block), x[0], w)[0]


def checkpointed(policy=None):
    return layers_with(lambda f: jax.checkpoint(f, policy=policy))


@jax.custom_vjp
def scaled(x):
    return jnp.sin(x)


scaled.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (g * jnp.cos(x) / 2,))


def with_own_rule(w, x):
    w = {name: a[0] for name, a in w.items()}
    turn = jax.jit(lambda h, x: (scaled(h @ w["h"]), scaled(x @ w["x"])))
    return lax.scan(turn, x[0], x)[1]


def attending(w, x):
    def layer(x, w):
        q, k, v = (jnp.reshape(x @ a, (1, ROWS, 2, 4)) for a in (*w.values(), w["x"]))
        return x + jnp.reshape(mpx.nn.dot_product_attention(q, k, v), x.shape), None

    return lax.scan(layer, x[0], w)[0]


SAVEABLE = jax.checkpoint_policies
LOOPS = {
    "recurrent": recurrent,
    "lstm": lstm,
    "scan in a scan": nested,
    "layers": layers_with(lambda f: f),
    "checkpointed": checkpointed(),
    "dots saved": checkpointed(SAVEABLE.dots_saveable),
    "everything saved": checkpointed(SAVEABLE.everything_saveable),
    "rules of its own": with_own_rule,
    "attention": attending,
}


def loss_of(func):
    return lambda w, x: jnp.mean(jnp.square(func(w, x)))


def arguments():
    w = {n: random(TURNS, WIDTH, WIDTH, seed=i) / 4 for i, n in enumerate("hx")}
    return w, random(TURNS, ROWS, WIDTH, seed=2)


def reverse(loss):
    return jax.grad(loss, (0, 1))


def forward(loss):
    return lambda *args: jax.jvp(loss, args, args)


def forward_over_reverse(loss):
    return forward(reverse(loss))


def reverse_over_reverse(loss):
    gradient = reverse(loss)
    return reverse(lambda *args: sum(map(jnp.sum, jax.tree.leaves(gradient(*args)))))


def casts_of_stacks(func, *args):
    """The casts of whole stacks inside of the loops of a compiled program."""
    text = jax.jit(func).lower(*args).compile().as_text()
    bodies = {k: body.values() for k, body in parse(text).computations.items()}
    inside: set[str] = set()

    def enter(name):
        if name not in inside:
            inside.add(name)
            keys = ("calls", "to_apply", "body", "branch_computations")
            for called in (c for i in bodies[name] for k in keys for c in i.called(k)):
                enter(called)

    for instruction in (i for body in bodies.values() for i in body):
        if instruction.opcode == "while":
            enter(instruction.called("body")[0])
    return [
        str(i.results[0])
        for name in inside
        for i in bodies[name]
        if i.opcode == "convert" and math.prod(i.results[0].shape) % TURNS == 0
    ]


@only_where_it_widens
def test_of_what_is_cast_by_hand_stacks_are_cast_in_each_turn():
    def naive(w, x):
        narrow = jax.tree.map(lambda a: a.astype(jnp.bfloat16), (w, x))
        return loss_of(recurrent)(*narrow).astype(np.float32)

    assert casts_of_stacks(reverse(naive), *arguments())


@only_where_it_widens
@pytest.mark.parametrize(
    ("name", "derivative"),
    [
        *((name, reverse) for name in LOOPS),
        ("lstm", forward),
        ("layers", forward),
        ("recurrent", forward_over_reverse),
        ("recurrent", reverse_over_reverse),
        ("dots saved", reverse_over_reverse),
    ],
)
def test_no_loop_casts_a_whole_stack(name, derivative):
    loss = mpx.autocast(loss_of(LOOPS[name]), target="cpu")
    assert casts_of_stacks(derivative(loss), *arguments()) == []


@pytest.mark.parametrize("derivative", [reverse, forward_over_reverse])
@pytest.mark.parametrize("name", ["lstm", "layers", "dots saved"])
def test_derivatives_are_those_of_other_targets(name, derivative):
    loss = loss_of(LOOPS[name])
    exact = derivative(loss)(*arguments())
    for target in ("cpu", "h100"):
        found = derivative(mpx.autocast(loss, target=target))(*arguments())
        assert all(relative_error(a, b) < 2e-2 for a, b in pairs(found, exact))


def test_loops_keep_float32_under_vmap_and_shard_map_too():
    loss, (w, x) = loss_of(recurrent), arguments()
    cast = mpx.autocast(loss, target="cpu")
    mesh = jax.make_mesh((1,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    split = jax.shard_map(
        lambda w, x: lax.pmean(cast(w, x), "i"),
        mesh=mesh,
        in_specs=(P(), P(None, "i")),
        out_specs=P(),
    )
    expected = jax.grad(cast)(w, x)
    many = jax.vmap(jax.grad(cast), (None, 0))(w, x[None])
    for found in (jax.grad(split)(w, x), jax.tree.map(lambda a: a[0], many)):
        for a, b in pairs(found, expected):
            np.testing.assert_allclose(a, b, rtol=1e-2, atol=1e-4)


def test_infinities_stay_what_they_are():
    w, x = arguments()
    x = x.at[1, 0, 0].set(jnp.inf)
    losses = (mpx.autocast(loss_of(recurrent), target=t) for t in ("cpu", "h100"))
    ours, others = (jax.grad(loss)(w, x) for loss in losses)
    for a, b in pairs(ours, others):
        np.testing.assert_array_equal(np.isfinite(a), np.isfinite(b))


@pytest.mark.parametrize(
    ("target", "dtype"),
    [("cpu", jnp.bfloat16), ("cpu", np.float16), ("h100", jnp.bfloat16)],
)
def test_other_targets_and_float16_stack_what_is_half(target, dtype):
    loss = mpx.autocast(loss_of(LOOPS["layers"]), dtype, target=target)
    loops = named("scan", jax.grad(loss), *arguments())
    stacked = {v.aval.dtype for e in loops for v in e.outvars if v.aval.ndim == 3}
    is_wide = WIDENS_STACKS and target == "cpu" and dtype == jnp.bfloat16
    assert (jnp.dtype(dtype) in stacked) == (not is_wide)


def test_only_cpus_and_bfloat16_have_wide_loops():
    def is_wide(target, **options):
        return has_wide_loops(Settings.of(target=read_target(target, "t"), **options))

    assert is_wide("cpu") == is_wide("cpu bf16") == WIDENS_STACKS
    assert not any(map(is_wide, ("sm_90", "tpu v5e")))
    assert not is_wide("cpu", dtype=np.dtype(np.float16))
    assert not is_wide("cpu", is_enabled=False)
