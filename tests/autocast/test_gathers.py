"""Weights in pieces: how they are gathered, or enter `jax.shard_map` whole."""

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
from .counting import pairs

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
POLICIES = POLICY, f"{POLICY},gather=float32"
LAYERS = 3


def mesh_for(how):
    kind = AxisType.Explicit if how == RESHARD else AxisType.Auto
    return Mesh(np.array(jax.devices()[:4]), ("data",), axis_types=(kind,))


def arguments(mesh, last=0, size=1.0, whole=("head",), stacked=()):
    keys = jax.random.split(jax.random.key(0), len(SHAPES) + 1)
    w = {}
    for key, (name, shape) in zip(keys, SHAPES.items(), strict=False):
        shape = (LAYERS, *shape) if name in stacked else shape
        pieces = P(None, "data") if name in stacked else P("data")
        where = NamedSharding(mesh, P() if name in whole else pieces)
        w[name] = put(jax.random.normal(key, shape) * size, where)
    x = np.array(jax.random.normal(keys[-1], (8, 16)))
    x[-1, 0] += last
    return w, put(x, NamedSharding(mesh, P("data")))


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
    return whole(lambda w: jnp.transpose(gathered(w).T), w, x)


def reshaped(gathered, w, x):
    """A product of a weight in another shape than the one that was gathered."""
    first = gathered(w["first"]).reshape(2, 8, 32)
    hidden = jax.nn.gelu(jnp.einsum("bij,ijk->bk", x.reshape(8, 2, 8), first))
    return hidden @ gathered(w["last"])


def twice(gathered, w, x):
    placed = lambda w: jax.lax.with_sharding_constraint(gathered(w), P())  # noqa: E731
    return whole(placed, w, x)


def jitted(gathered, w, x):
    product = jax.jit(lambda x, w: x @ w)
    hidden = jax.nn.gelu(product(x, gathered(w["first"])))
    return product(hidden, gathered(w["last"]))


def in_remat(gathered, w, x):
    return jax.checkpoint(functools.partial(whole, gathered))(w, x)


def shared(gathered, w, x):
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


def step_of(loss, recipe, policy=POLICY, target=None):
    low = mpx.autocast(loss, recipe=recipe, target=target)

    def step(scaling, w, x):
        return mpx.filter_value_and_grad(low, scaling, policy=policy)(w, x)

    def begin(w, x):
        is_delayed = isinstance(recipe, mpx.DelayedScaling)
        return mpx.init_scaling(low, w, x) if is_delayed else mpx.NoLossScaling()

    return begin, step


def two_steps(loss, args, *options):
    """The dtypes of gathered weights; loss, gradients and scaling of two steps."""
    begin, step = step_of(loss, *options)
    # Where the scaling of the second step lies, so that both are one program.
    whole = NamedSharding(args[1].sharding.mesh, P())
    scaling = jax.device_put(begin(*args), whole)
    run, sent = compiled(step, scaling, *args)
    first = run(scaling, *args)
    second = run(first.scaling, *args)
    assert first.finite and second.finite
    dtypes = {m.dtype for m in sent if m.kind == "all-gather" and m.bytes > 64}
    return dtypes, jax.tree.map(np.asarray, jax.tree.leaves((first, second)))


def assert_equal(found, expected):
    for one, other in pairs(found, expected):
        np.testing.assert_array_equal(one, other)


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
    mesh = mesh_for(how)
    with jax.set_mesh(mesh):
        loss, args = loss_in(mesh, how, model), arguments(mesh)
        (dtypes, found), (plain, expected) = (
            two_steps(loss, args, RECIPES[name], policy) for policy in POLICIES
        )
    assert dtypes == ({"bf16"} if name == "block" else {E4M3})
    assert "f32" in plain and E4M3 not in plain
    if name != "block":  # which quantizes what has been rounded to bfloat16
        assert_equal(found, expected)


def test_a_weight_whose_piece_is_not_finite_makes_the_step_a_bad_one():
    mesh = mesh_for(SHARD_MAP)
    begin, step = step_of(loss_in(mesh, SHARD_MAP, whole), RECIPES["current"])
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

    loss = enter(mesh, whole, check_vma)
    found = []
    for policy in POLICIES:
        func = mpx.autocast(loss) if style == "autocast" else loss

        def step(w, x, func=func, policy=policy):
            return mpx.filter_grad(func, mpx.NoLossScaling(), policy=policy)(w, x).grads

        run, sent = compiled(step, w, x)
        found.append(jax.tree.map(np.asarray, run(w, x)))
        gathers = {m.dtype for m in sent if m.kind == "all-gather"}
        sums = {m.dtype for m in sent if m.kind == "all-reduce" and m.bytes > 64}
        assert gathers == ({"bf16"} if policy == POLICY else {"f32"})
        assert sums == {"f32"}
    assert_equal(*found)


# --- Weights that enter `jax.shard_map` whole -----------------------------------------

CURRENT, DELAYED = RECIPES["current"], RECIPES["delayed"]


def unchanged(w):
    return w


def transposed(gathered, w, x):
    return jax.nn.gelu(jnp.einsum("ij,kj->ik", x, w["first"].T)) @ jnp.copy(w["last"])


def looped(gathered, w, x):
    turn = lambda x, _: (whole(gathered, w, x), None)  # noqa: E731
    return jax.lax.scan(turn, x, length=2)[0]


def branched(gathered, w, x):
    block = functools.partial(whole, gathered)
    return jax.lax.cond(x[0, 0] < 100, block, lambda w, x: x, w, x)


def read(gathered, w, x):
    return whole(gathered, w, x) + jnp.sin(w["first"]).sum()


def rounded(gathered, w, x):
    first = w["first"].astype(jnp.bfloat16)
    return jax.nn.gelu(x.astype(jnp.bfloat16) @ first).astype(x.dtype) @ w["last"]


def stacked(gathered, w, x):
    """Layers that a scan cuts, each with a scale of its own."""
    layers = {name: w[name] for name in STACKED}
    turn = lambda x, w: (x + whole(gathered, w, x), None)  # noqa: E731
    return jax.lax.scan(turn, x, layers)[0]


def used_whole(gathered, w, x):
    """One stack is the weight of a product, too, and idle in the scan that cuts it."""
    hidden = jnp.einsum("ij,ljk->ilk", x, w["first"]).sum(1)
    x = x + hidden[:, :16]
    return jax.lax.scan(lambda x, _: (x + jnp.tanh(x), None), x, w["first"])[0]


def turned_stack(gathered, w, x):
    first, last = (jnp.transpose(w[name], (0, 2, 1)) for name in STACKED)
    return stacked(gathered, {"first": last, "last": first}, x)


STACKED = ("first", "last")
OF_STACKS = (stacked, used_whole, turned_stack)


def enter(mesh, model, check_vma=True):
    def local(w, x):
        y = model(unchanged, w, x) @ w["head"]
        return jax.lax.pmean(jnp.mean(y**2), mesh.axis_names)

    specs = {"in_specs": (P(), P("data")), "out_specs": P(), "check_vma": check_vma}
    return jax.shard_map(local, mesh=mesh, **specs)


def in_pieces(mesh, stacked=()):
    return arguments(mesh, size=0.3, whole=(), stacked=stacked)


def gathered(loss, args, recipe=None, reduce="float32"):
    """The dtypes of gathered weights, if two steps have the bits of float32 ones."""
    reduced = [p.replace("reduce=float32", f"reduce={reduce}") for p in POLICIES]
    (dtypes, found), (plain, expected) = (
        two_steps(loss, args, recipe, policy, "H100") for policy in reduced
    )
    assert_equal(found, expected)
    assert "f32" in plain  # the compiler gathers what is used outside
    return dtypes


HALF, WIDE = {"bf16"}, {"f32"}
SLOW, REST = pytest.mark.slow, pytest.mark.exhaustive


@pytest.mark.parametrize(
    ("model", "recipe", "dtypes"),
    [
        (shared, None, HALF),
        (in_remat, None, HALF),
        (read, None, HALF | WIDE),
        (stacked, None, HALF),
        pytest.param(looped, None, HALF, marks=SLOW),
        pytest.param(branched, None, HALF, marks=SLOW),
        pytest.param(rounded, None, HALF, marks=SLOW),
        pytest.param(used_whole, None, HALF, marks=SLOW),
        pytest.param(stacked, DELAYED, WIDE, marks=SLOW),
        pytest.param(jitted, None, HALF, marks=REST),
        pytest.param(transposed, None, HALF, marks=REST),
        pytest.param(turned_stack, None, HALF, marks=REST),
    ],
)
def test_a_weight_enters_in_half_precision_unless_more_is_read(model, recipe, dtypes):
    mesh = mesh_for(CONSTRAINT)
    args = in_pieces(mesh, STACKED if model in OF_STACKS else ())
    assert gathered(enter(mesh, model), args, recipe) == dtypes


@pytest.mark.parametrize(
    ("recipe", "check_vma"),
    slow_but([(DELAYED, False)], itertools.product([CURRENT, DELAYED], [True, False])),
)
def test_a_recipe_quantizes_an_entering_weight_from_float32(recipe, check_vma):
    mesh = mesh_for(CONSTRAINT)
    assert gathered(enter(mesh, whole, check_vma), in_pieces(mesh), recipe) == WIDE


@pytest.mark.parametrize("how", slow_but([RESHARD], [RESHARD, CONSTRAINT]))
def test_a_weight_that_is_gathered_in_front_of_shard_map(how):
    """As it must be over explicit axes."""
    mesh = mesh_for(how)
    with jax.set_mesh(mesh):
        inside = enter(mesh, whole)

        def loss(w, x):
            return inside({name: gather(how, one) for name, one in w.items()}, x)

        assert gathered(loss, in_pieces(mesh)) == HALF


@pytest.mark.slow
def test_a_weight_of_which_each_device_of_an_axis_has_a_piece():
    devices = np.array(jax.devices()[:4]).reshape(2, 2)
    mesh = Mesh(devices, ("data", "model"), axis_types=(AxisType.Auto,) * 2)

    def local(w, x):
        hidden = jax.nn.gelu(x @ w["first"])
        y = jax.lax.psum(hidden @ w["last"], "model") @ w["head"]
        return jax.lax.pmean(jnp.mean(y**2), "data")

    in_specs = {"first": P(None, "model"), "last": P("model"), "head": P()}, P("data")
    loss = jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=P())
    assert gathered(loss, in_pieces(mesh)) == HALF


@pytest.mark.slow
def test_each_layer_of_a_scan_enters_on_its_own():
    mesh = mesh_for(CONSTRAINT)
    enter = jax.shard_map(
        lambda w, x: x + whole(unchanged, w, x),
        mesh=mesh,
        in_specs=(P(), P("data")),
        out_specs=P("data"),
    )

    def loss(w, x):
        layers = {name: w[name] for name in STACKED}
        x, _ = jax.lax.scan(lambda x, w: (enter(w, x), None), x, layers)
        return jnp.mean((x @ w["head"]) ** 2)

    assert gathered(loss, in_pieces(mesh, STACKED)) == HALF


@pytest.mark.slow
def test_gradients_of_entering_weights_that_are_summed_in_bfloat16():
    mesh = mesh_for(CONSTRAINT)
    loss = enter(mesh, whole)
    assert gathered(loss, in_pieces(mesh), reduce="bfloat16") == HALF


def test_a_function_of_entering_weights_gives_the_same_loss_without_gradients():
    mesh = mesh_for(CONSTRAINT)
    loss, args = enter(mesh, whole), in_pieces(mesh)
    begin, step = step_of(loss, CURRENT, POLICY, "H100")
    alone = jax.jit(mpx.autocast(loss, recipe=CURRENT, target="H100"))(*args)
    assert jax.jit(step)(begin(*args), *args).value == alone
