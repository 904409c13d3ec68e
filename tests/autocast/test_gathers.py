"""Weights that lie in pieces, and how they come together."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

import mpx

from ..collectives import compiled
from ..helpers import slow_but

RECIPES = {
    "current": mpx.Float8CurrentScaling(),
    "delayed": mpx.DelayedScaling(warm_start=True),
    "block": mpx.Float8BlockScaling(),
}
SHAPES = {"first": (16, 32), "last": (32, 16), "head": (16, 8)}
SHARD_MAP, RESHARD, CONSTRAINT = "shard_map", "reshard", "constraint"
WHOLE = "whole"  # nothing is gathered: where weights lie is the compiler's business
E4M3 = "f8e4m3fn"
POLICY = "params=float32,compute=bfloat16,output=float32,reduce=float32"


def mesh_for(how):
    kind = AxisType.Explicit if how == RESHARD else AxisType.Auto
    return Mesh(np.array(jax.devices()[:4]), ("data",), axis_types=(kind,))


def arguments(mesh, last=0):
    keys = jax.random.split(jax.random.key(0), len(SHAPES) + 1)
    pieces, whole = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
    w = {
        name: put(jax.random.normal(key, shape), whole if name == "head" else pieces)
        for key, (name, shape) in zip(keys, SHAPES.items(), strict=False)
    }
    x = np.array(jax.random.normal(keys[-1], (8, 16)))
    x[-1, 0] += last
    return w, put(x, pieces)


def put(x, sharding):
    """An array that all processes know, where its pieces lie."""
    x = np.asarray(x)
    return jax.make_array_from_callback(x.shape, sharding, x.__getitem__)


def gather(how, w):
    if how == WHOLE:
        return w
    if how == SHARD_MAP:
        return jax.lax.all_gather(w, "data", tiled=True)
    if how == RESHARD:
        return jax.sharding.reshard(w, P())
    return jax.lax.with_sharding_constraint(w, P())


def whole(gathered, w, x):
    return jax.nn.gelu(x @ gathered(w["first"])) @ gathered(w["last"])


def turned(gathered, w, x):
    """Each weight is transposed after it was gathered, twice."""
    return whole(lambda w: jnp.transpose(gathered(w).T), w, x)


def reshaped(gathered, w, x):
    """A product of a weight in another shape than the one that was gathered."""
    first = gathered(w["first"]).reshape(2, 8, 32)
    hidden = jax.nn.gelu(jnp.einsum("bij,ijk->bk", x.reshape(8, 2, 8), first))
    return hidden @ gathered(w["last"])


def twice(gathered, w, x):
    """A weight that is said twice to be whole."""
    return whole(lambda w: placed(gathered(w)), w, x)


def placed(w):
    return jax.lax.with_sharding_constraint(w, P())


def jitted(gathered, w, x):
    """The product is in a program of its own."""
    product = jax.jit(lambda x, w: x @ w)
    hidden = jax.nn.gelu(product(x, gathered(w["first"])))
    return product(hidden, gathered(w["last"]))


def in_remat(gathered, w, x):
    return jax.checkpoint(functools.partial(whole, gathered))(w, x)


def shared(gathered, w, x):
    """A weight has two uses."""
    first = gathered(w["first"])
    return (x @ first + jnp.sin(x) @ first) @ gathered(w["last"])


def loss_in(mesh, how, model):
    def loss(w, x):
        y = model(functools.partial(gather, how), w, x)
        value = jnp.mean((y @ w["head"]) ** 2)
        return jax.lax.pmean(value, "data") if how == SHARD_MAP else value

    if how != SHARD_MAP:
        return loss
    specs = {name: P("data") for name in SHAPES} | {"head": P()}
    in_specs = (specs, P("data"))
    return jax.shard_map(loss, mesh=mesh, in_specs=in_specs, out_specs=P())


def step_in(mesh, how, model, recipe, gather_dtype=""):
    low = mpx.autocast(loss_in(mesh, how, model), recipe=recipe)

    def step(scaling, w, x):
        call = mpx.filter_value_and_grad(low, scaling, policy=POLICY + gather_dtype)
        return call(w, x)

    def begin(w, x):
        is_delayed = isinstance(recipe, mpx.DelayedScaling)
        return mpx.init_scaling(low, w, x) if is_delayed else mpx.NoLossScaling()

    return begin, step


QUICK = [
    (SHARD_MAP, "current", whole),
    (CONSTRAINT, "delayed", twice),
    (RESHARD, "current", reshaped),
]
OTHERS = [
    (SHARD_MAP, "block", whole),
    (CONSTRAINT, "current", jitted),
    (RESHARD, "delayed", turned),
    (SHARD_MAP, "delayed", in_remat),
    (CONSTRAINT, "delayed", shared),
]


@pytest.mark.parametrize(("how", "name", "model"), slow_but(QUICK, [*QUICK, *OTHERS]))
def test_a_weight_that_travels_in_8_bits_has_the_bits_of_one_that_does_not(
    how, name, model
):
    """Of loss, gradients and scaling, over two steps."""
    mesh, found = mesh_for(how), []
    with jax.set_mesh(mesh):
        for gather_dtype in ("", ",gather=float32"):
            begin, step = step_in(mesh, how, model, RECIPES[name], gather_dtype)
            w, x = arguments(mesh)
            # Where the scaling of the second step lies, so that both are one program.
            scaling = jax.device_put(begin(w, x), NamedSharding(mesh, P()))
            run, sent = compiled(step, scaling, w, x)
            first = run(scaling, w, x)
            second = run(first.scaling, w, x)
            assert first.finite and second.finite
            found.append(jax.tree.map(np.asarray, jax.tree.leaves((first, second))))
            dtypes = {m.dtype for m in sent if m.kind == "all-gather" and m.bytes > 64}
            if gather_dtype:
                assert "f32" in dtypes and E4M3 not in dtypes
            else:
                assert dtypes == ({"bf16"} if name == "block" else {E4M3})
    if name != "block":  # which quantizes what has been rounded to bfloat16
        for one, other in zip(*found, strict=True):
            np.testing.assert_array_equal(one, other)


def test_what_is_not_finite_in_a_piece_makes_the_step_a_bad_one():
    mesh = mesh_for(SHARD_MAP)
    begin, step = step_in(mesh, SHARD_MAP, whole, RECIPES["current"])
    w, x = arguments(mesh)
    for value in (np.inf, np.nan):
        bad = w | {"last": w["last"].at[-1, 0].set(value)}
        assert not jax.jit(step)(begin(w, x), bad, x).finite


@pytest.mark.parametrize(
    ("style", "check_vma"),
    slow_but(
        [("autocast", True), ("explicit", False)],
        itertools.product(["autocast", "explicit"], [True, False]),
    ),
)
def test_a_weight_that_enters_shard_map_whole_is_cast_before_it_travels(
    style, check_vma
):
    mesh = mesh_for(CONSTRAINT)
    w, x = arguments(mesh)

    def local(w, x):
        y = whole(lambda w: w, w, x) @ w["head"]
        return jax.lax.pmean(jnp.mean(y**2), "data")

    specs = {"in_specs": (P(), P("data")), "out_specs": P(), "check_vma": check_vma}
    loss = jax.shard_map(local, mesh=mesh, **specs)
    found = []
    for gather_dtype in ("", ",gather=float32"):
        policy = POLICY + gather_dtype
        func = mpx.autocast(loss) if style == "autocast" else loss

        def step(w, x, func=func, policy=policy):
            return mpx.filter_grad(func, mpx.NoLossScaling(), policy=policy)(w, x).grads

        run, sent = compiled(step, w, x)
        found.append(jax.tree.map(np.asarray, run(w, x)))
        gathers = {m.dtype for m in sent if m.kind == "all-gather"}
        sums = {m.dtype for m in sent if m.kind == "all-reduce" and m.bytes > 64}
        assert gathers == ({"f32"} if gather_dtype else {"bf16"})
        assert sums == {"f32"}
    for one, other in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_array_equal(one, other)
