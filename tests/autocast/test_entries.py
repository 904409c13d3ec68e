"""Weights that lie in pieces and enter `jax.shard_map` whole."""

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
from . import test_gathers as gathers
from .test_gathers import SHAPES, put

CURRENT, DELAYED = mpx.Float8CurrentScaling(), mpx.DelayedScaling(warm_start=True)
POLICY = "params=float32,compute=bfloat16,output=float32,reduce="
LAYERS = 3


def unchanged(w):
    return w


# Each of a weight that is not gathered by the program.
block, shared, jitted, in_remat = (
    functools.partial(model, unchanged)
    for model in (gathers.whole, gathers.shared, gathers.jitted, gathers.in_remat)
)


def mesh_of(kind=AxisType.Auto, shape=(4,), names=("data",)):
    devices = np.array(jax.devices()[: np.prod(shape)]).reshape(shape)
    return Mesh(devices, names, axis_types=(kind,) * len(names))


def arguments(mesh, stacked=()):
    keys = jax.random.split(jax.random.key(0), len(SHAPES) + 1)
    w = {}
    for key, (name, shape) in zip(keys, SHAPES.items(), strict=False):
        shape = (LAYERS, *shape) if name in stacked else shape
        spec = P(None, "data") if name in stacked else P("data")
        w[name] = put(jax.random.normal(key, shape) * 0.3, NamedSharding(mesh, spec))
    return w, put(jax.random.normal(keys[-1], (8, 16)), NamedSharding(mesh, P("data")))


def turned(w, x):
    """Each weight is used transposed."""
    return jax.nn.gelu(jnp.einsum("ij,kj->ik", x, w["first"].T)) @ jnp.copy(w["last"])


def looped(w, x):
    """Every turn uses the same weights."""
    return jax.lax.scan(lambda x, _: (block(w, x), None), x, length=2)[0]


def branched(w, x):
    """One branch of two has the products."""
    return jax.lax.cond(x[0, 0] < 100, block, lambda w, x: x, w, x)


def read(w, x):
    """A weight is read beside its product."""
    return block(w, x) + jnp.sin(w["first"]).sum()


def rounded(w, x):
    """The program casts a weight itself."""
    first = w["first"].astype(jnp.bfloat16)
    return jax.nn.gelu(x.astype(jnp.bfloat16) @ first).astype(x.dtype) @ w["last"]


def loss_in(mesh, model, check_vma=True):
    def local(w, x):
        y = model(w, x) @ w["head"]
        return jax.lax.pmean(jnp.mean(y**2), mesh.axis_names)

    in_specs = (P(), P("data"))
    return jax.shard_map(
        local, mesh=mesh, in_specs=in_specs, out_specs=P(), check_vma=check_vma
    )


def step_of(loss, recipe, policy):
    low = mpx.autocast(loss, recipe=recipe, target="H100")

    def step(scaling, w, x):
        return mpx.filter_value_and_grad(low, scaling, policy=policy)(w, x)

    def begin(w, x):
        is_delayed = isinstance(recipe, mpx.DelayedScaling)
        return mpx.init_scaling(low, w, x) if is_delayed else mpx.NoLossScaling()

    return begin, step


def gathered(loss, w, x, recipe=None, reduce="float32"):
    """In which dtypes weights are gathered, where the results have the same bits.

    Those of loss, gradients and scaling over two steps, as with weights that go in as
    float32.
    """
    found, dtypes = [], []
    for gather_dtype in ("", ",gather=float32"):
        begin, step = step_of(loss, recipe, POLICY + reduce + gather_dtype)
        scaling = begin(w, x)
        run, sent = compiled(step, scaling, w, x)
        first = run(scaling, w, x)
        second = run(first.scaling, w, x)
        assert first.finite and second.finite
        found.append(jax.tree.map(np.asarray, jax.tree.leaves((first, second))))
        gathers = [m for m in sent if m.kind == "all-gather" and m.bytes > 64]
        dtypes.append({m.dtype for m in gathers})
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)
    assert "f32" in dtypes[1]  # the compiler gathers what is used outside
    return dtypes[0]


@pytest.mark.parametrize(
    "model",
    slow_but([shared, in_remat], [shared, looped, jitted, turned, in_remat, branched]),
)
def test_it_goes_in_in_half_precision_however_it_gets_to_its_products(model):
    mesh = mesh_of()
    assert gathered(loss_in(mesh, model), *arguments(mesh)) == {"bf16"}


@pytest.mark.parametrize(
    ("recipe", "check_vma"),
    slow_but([(DELAYED, False)], itertools.product([CURRENT, DELAYED], [True, False])),
)
def test_a_recipe_quantizes_from_float32(recipe, check_vma):
    mesh = mesh_of()
    loss = loss_in(mesh, block, check_vma)
    assert gathered(loss, *arguments(mesh), recipe) == {"f32"}


def test_a_weight_of_which_more_is_read_goes_in_as_float32():
    mesh = mesh_of()
    assert gathered(loss_in(mesh, read), *arguments(mesh)) == {"bf16", "f32"}


@pytest.mark.slow
def test_a_weight_that_the_program_rounds_goes_in_so():
    mesh = mesh_of()
    assert gathered(loss_in(mesh, rounded), *arguments(mesh)) == {"bf16"}


@pytest.mark.parametrize(
    "kind", slow_but([AxisType.Explicit], [AxisType.Explicit, AxisType.Auto])
)
def test_a_weight_that_is_gathered_in_front_of_shard_map(kind):
    """As it must be over explicit axes."""
    mesh = mesh_of(kind)
    gather = {
        AxisType.Explicit: jax.sharding.reshard,
        AxisType.Auto: jax.lax.with_sharding_constraint,
    }[kind]
    with jax.set_mesh(mesh):
        inside = loss_in(mesh, block)

        def loss(w, x):
            return inside({name: gather(one, P()) for name, one in w.items()}, x)

        assert gathered(loss, *arguments(mesh)) == {"bf16"}


@pytest.mark.slow
def test_a_weight_of_which_each_device_of_an_axis_has_a_piece():
    mesh = mesh_of(shape=(2, 2), names=("data", "model"))

    def local(w, x):
        hidden = jax.nn.gelu(x @ w["first"])
        y = jax.lax.psum(hidden @ w["last"], "model") @ w["head"]
        return jax.lax.pmean(jnp.mean(y**2), "data")

    specs = {"first": P(None, "model"), "last": P("model"), "head": P()}
    in_specs = (specs, P("data"))
    loss = jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=P())
    assert gathered(loss, *arguments(mesh)) == {"bf16"}


@pytest.mark.slow
def test_each_layer_of_a_scan_enters_on_its_own():
    mesh = mesh_of()
    enter = jax.shard_map(
        lambda w, x: x + block(w, x),
        mesh=mesh,
        in_specs=(P(), P("data")),
        out_specs=P("data"),
    )

    def loss(w, x):
        layers = {name: w[name] for name in ("first", "last")}
        x, _ = jax.lax.scan(lambda x, w: (enter(w, x), None), x, layers)
        return jnp.mean((x @ w["head"]) ** 2)

    args = arguments(mesh, stacked=("first", "last"))
    assert gathered(loss, *args) == {"bf16"}


def stacked(w, x):
    """Layers that a scan cuts, each with a scale of its own."""
    layers = {name: w[name] for name in ("first", "last")}
    return jax.lax.scan(lambda x, w: (x + block(w, x), None), x, layers)[0]


def used_whole(w, x):
    """One stack is the weight of a product, too, and idle in the scan that cuts it."""
    first = w["first"]
    hidden = jnp.einsum("ij,ljk->ilk", x, first).sum(1)
    x = x + hidden[:, :16]
    return jax.lax.scan(lambda x, _: (x + jnp.tanh(x), None), x, first)[0]


def turned_stack(w, x):
    """Layers that are turned before they are cut."""
    layers = {name: jnp.transpose(w[name], (0, 2, 1)) for name in ("first", "last")}
    other = {"first": layers["last"], "last": layers["first"]}
    return jax.lax.scan(lambda x, w: (x + block(w, x), None), x, other)[0]


@pytest.mark.parametrize(
    "model", slow_but([stacked], [stacked, used_whole, turned_stack])
)
def test_layers_that_a_scan_cuts(model):
    mesh = mesh_of()
    args = arguments(mesh, stacked=("first", "last"))
    assert gathered(loss_in(mesh, model), *args) == {"bf16"}


@pytest.mark.slow
def test_each_layer_that_a_scan_cuts_has_a_scale():
    mesh = mesh_of()
    args = arguments(mesh, stacked=("first", "last"))
    assert gathered(loss_in(mesh, stacked), *args, DELAYED) == {"f32"}


@pytest.mark.slow
def test_gradients_that_are_summed_in_bfloat16():
    mesh = mesh_of()
    found = gathered(loss_in(mesh, block), *arguments(mesh), reduce="bfloat16")
    assert found == {"bf16"}


def test_a_function_without_gradients_gives_the_same_loss():
    mesh = mesh_of()
    loss = loss_in(mesh, block)
    begin, step = step_of(loss, CURRENT, POLICY + "float32")
    w, x = arguments(mesh)
    alone = jax.jit(mpx.autocast(loss, recipe=CURRENT, target="H100"))(w, x)
    assert jax.jit(step)(begin(w, x), w, x).value == alone
