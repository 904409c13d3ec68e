"""The state of an optimizer lies where the weights lie."""

import functools
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import mpx
from mpx._memory._init_optimizer import layouts_of

from ..step.cases import same_bits

# Optax's Adam and others mix dtypes.
pytestmark = pytest.mark.third_party

SPECS = {"embed": P("tensor", "fsdp"), "layer": {"kernel": P("fsdp"), "bias": P()}}
TRANSFORMATIONS = {
    "sgd": optax.sgd(0.1),
    "adam": optax.adam(0.1),
    "adamw": optax.adamw(0.1, mask=lambda p: jax.tree.map(lambda x: x.ndim > 1, p)),
    "clipped": optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1)),
    "multi_steps": optax.MultiSteps(optax.adam(0.1), 2),
    "masked": optax.masked(optax.adam(0.1), {"embed": True, "layer": False}),
    "labelled": optax.multi_transform(
        {"a": optax.adam(0.1), "b": optax.sgd(0.1, momentum=0.9)},
        {"embed": "a", "layer": "b"},
    ),
    "ema": optax.chain(optax.sgd(0.1), optax.ema(0.9)),
    "noise": optax.chain(optax.add_noise(0.1, 0.5, jax.random.key(0)), optax.lion(0.1)),
    "adafactor": optax.adafactor(0.1, min_dim_size_to_factor=2),
    "lbfgs": optax.scale_by_lbfgs(3),
    "skip": mpx.skip_nonfinite(optax.adam(0.1)),
    "masters": mpx.master_weights(optax.adam(0.1)),
}
every_transformation = pytest.mark.parametrize(
    "optimizer", TRANSFORMATIONS.values(), ids=TRANSFORMATIONS
)


def mesh_of(kind=AxisType.Auto):
    return jax.make_mesh((4, 2), ("fsdp", "tensor"), axis_types=(kind,) * 2)


def weights(kind=AxisType.Auto, dtype=jnp.float32):
    mesh = mesh_of(kind)
    full = {
        "embed": np.arange(8 * 12).reshape(8, 12) / 7,
        "layer": {"kernel": np.ones((12, 16)) / 3, "bias": np.zeros(40)},
    }
    put = lambda x, spec: jax.device_put(x.astype(dtype), NamedSharding(mesh, spec))  # noqa: E731
    return jax.tree.map(put, full, SPECS)


def divided_like_weights(state, largest=40):
    """No device holds more of an array than of the weight that it is for."""
    shards = {(8, 12): (4, 3), (12, 16): (3, 16), (40,): (40,)}
    shards |= {(8,): (4,), (12,): (3,), (16,): (16,)}  # Adafactor's
    seen = 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        shape, name = leaf.shape, jax.tree_util.keystr(path)
        shard = leaf.sharding.shard_shape(shape)
        if leaf.size > 16 or len(shape) > 1:
            extra = len(shape) - 2 if len(shape) > 2 else 0
            extra += shape[-1:] == (40,) and len(shape) == 2
            assert shard == shape[:extra] + shards[shape[extra:]], name
            seen += 1
    return seen


def dtype_for(optimizer):
    return jnp.bfloat16 if "Master" in type(optimizer).__name__ else jnp.float32


def raw(tree):
    is_key = lambda x: x.dtype.name == "key<fry>"  # noqa: E731
    return jax.tree.map(lambda x: jax.random.key_data(x) if is_key(x) else x, tree)


@every_transformation
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_every_array_of_the_state_lies_as_its_weight_does(optimizer, kind):
    w = weights(kind, dtype_for(optimizer))
    state = mpx.init_optimizer(optimizer, w)
    expected = optimizer.init(jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), w))
    assert jax.tree.structure(state) == jax.tree.structure(expected)
    assert same_bits(raw(state), raw(expected))
    assert divided_like_weights(state) or optimizer is TRANSFORMATIONS["sgd"]
    # All lie on the mesh: what Orbax wants of a state that several processes save.
    assert all(len(x.sharding.device_set) == 8 for x in jax.tree.leaves(state))


@every_transformation
def test_under_jit_the_compiler_finds_the_same_places(optimizer):
    """Where `optimizer.init` alone puts everything whole on each device."""
    w = weights(dtype=dtype_for(optimizer))
    state = jax.jit(functools.partial(mpx.init_optimizer, optimizer))(w)
    expected = jax.jit(optimizer.init)(w)
    assert same_bits(raw(state), raw(expected))
    divided_like_weights(state)
    moments = [x for x in jax.tree.leaves(expected) if x.shape == (8, 12)]
    if "Master" not in type(optimizer).__name__:
        assert all(x.sharding.is_fully_replicated for x in moments)


def test_under_jit_on_explicit_axes():
    w = weights(AxisType.Explicit)
    with jax.set_mesh(mesh_of(AxisType.Explicit)):
        assert divided_like_weights(init_of(TRANSFORMATIONS["adafactor"])(w))


each_way = pytest.mark.parametrize("under_jit", [False, True])


def init_of(optimizer, under_jit=True, **options):
    init = functools.partial(mpx.init_optimizer, optimizer, **options)
    return jax.jit(init) if under_jit else init


@pytest.mark.parametrize("wrap", [lambda tx: tx, mpx.compress_state])
@each_way
def test_the_state_of_a_part_of_the_weights_lies_as_that_part(wrap, under_jit):
    embed = jnp.ones((64, 128), device=weights()["embed"].sharding)
    w = optax.LookaheadParams.init_synced({"embed": embed})
    optimizer = wrap(optax.lookahead(optax.adam(0.1), 5, 0.5))
    state = init_of(optimizer, under_jit)(w)
    found = [x for x in jax.tree.leaves(state) if x.shape == (64, 128)]
    assert len(found) == 2
    assert all(x.sharding.shard_shape(x.shape) == (32, 32) for x in found)


def test_weights_that_are_not_finite_do_not_reach_the_state_under_jit():
    w = jax.tree.map(lambda x: x * jnp.nan, weights())
    assert bool(mpx.all_finite(init_of(TRANSFORMATIONS["adafactor"])(w)))


@each_way
def test_state_in_pieces_of_weights_that_are_whole(under_jit):
    """Half-precision weights on every device, masters and moments divided."""
    optimizer, mesh = mpx.master_weights(optax.adam(0.1)), mesh_of()
    w = jax.device_put(weights(dtype=jnp.bfloat16), NamedSharding(mesh, P()))
    layout = jax.tree.map(lambda spec: NamedSharding(mesh, spec), SPECS)
    state = init_of(optimizer, under_jit, shardings=layout)(w)
    assert divided_like_weights(state) == 9
    one = init_of(optimizer, False, shardings=NamedSharding(mesh, P("fsdp")))
    state = one({"embed": w["embed"]})
    assert state.masters["embed"].sharding.shard_shape((8, 12)) == (2, 12)


def test_stored_weights_have_masters_and_moments_in_pieces():
    w = weights(dtype=jnp.bfloat16)
    stored = jax.jit(mpx.quantization.quantize_weights)(w)
    layout = jax.tree.map(lambda x: x.sharding, w)
    init = init_of(mpx.master_weights(optax.adam(0.1)), False, shardings=layout)
    state = init(stored, w)
    assert divided_like_weights(state) == 9
    assert same_bits(state.masters, jax.tree.map(lambda x: x.astype(jnp.float32), w))


def test_a_step_keeps_the_layout_and_agrees_with_one_device():
    w, optimizer = weights(), optax.adamw(0.1)
    grads = jax.tree.map(jnp.ones_like, w)
    whole = jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), w)
    update = functools.partial(mpx.optimizer_update, grads_finite=True)
    step = jax.jit(update, static_argnums=1)
    state = mpx.init_optimizer(optimizer, w)
    new, after = step(w, optimizer, state, grads)
    assert divided_like_weights(after) == divided_like_weights(state) == 6
    one = mpx.init_optimizer(optimizer, whole)
    assert all(len(x.devices()) == 1 for x in jax.tree.leaves(one))
    expected, _ = step(whole, optimizer, one, jax.tree.map(jnp.ones_like, whole))
    assert same_bits(new, expected)


def test_weights_of_which_one_path_ends_as_another_one():
    mesh = mesh_of()
    put = lambda spec: jax.device_put(jnp.ones((8, 8)), NamedSharding(mesh, spec))  # noqa: E731
    w = {"w": put(P("fsdp")), "layer": {"w": put(P(None, "fsdp"))}}
    mu = mpx.init_optimizer(optax.adam(0.1), w)[0].mu
    assert mu["w"].sharding.spec == P("fsdp")
    assert mu["layer"]["w"].sharding.spec == P(None, "fsdp")


@pytest.mark.parametrize("spec", [P("fsdp", "tensor"), P(None, ("fsdp", "tensor"))])
def test_codes_and_scales_are_found_by_their_class(spec):
    """Not by the key `arrays`, which weights may have; and as the longest path's."""
    sharding = NamedSharding(mesh_of(), spec)
    own = jnp.ones((64, 1024), device=sharding)
    other = jax.device_put(jnp.ones((64, 256)), NamedSharding(mesh_of(), P()))
    w = Holder({"a": own, "z": {"a": other}}), {"a": other}
    moment = mpx.init_optimizer(mpx.compress_state(optax.trace(0.9)), w)
    moment = moment.inner_state.trace[0].arrays
    assert moment["a"].codes.sharding == sharding
    assert moment["a"].scales.sharding == sharding
    assert moment["z"]["a"].scales.sharding.is_fully_replicated
    plain = mpx.init_optimizer(optax.trace(0.9), w).trace[0].arrays
    assert plain["a"].sharding == sharding


class Holder(eqx.Module):
    arrays: dict


def test_layouts_are_found_in_linear_time():
    def calls(count):
        shape = jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=whole)
        w = {f"layer {i}": {"a": shape, "b": shape} for i in range(count)}
        state = jax.eval_shape(optax.sgd(0.1, momentum=0.9).init, w)
        counted = []
        sys.setprofile(lambda *_: counted.append(1))
        try:
            layouts_of(state, w, whole)
        finally:
            sys.setprofile(None)
        return len(counted)

    whole = NamedSharding(mesh_of(), P())
    assert calls(300) < 11 * calls(30)


@each_way
def test_an_array_that_fits_no_weight_is_an_error(under_jit):
    optimizer = optax.flatten(optax.adam(0.1))
    match = r"no weight that matches float32\[328\] at .*mu`\. "
    with pytest.raises(ValueError, match=match):
        init_of(optimizer, under_jit)(weights())
    whole = NamedSharding(mesh_of(), P())
    state = mpx.init_optimizer(optimizer, weights(), otherwise=whole)
    assert state[0].mu.sharding == whole


def test_an_array_of_another_shape_than_its_weight_names_it():
    strange = optax.GradientTransformation(
        lambda w: jax.tree.map(lambda x: jnp.zeros((77, 3)), w), lambda *a: a
    )
    match = r"float32\[77,3\] at `\['embed'\]`, of the weight float32"
    with pytest.raises(ValueError, match=match):
        mpx.init_optimizer(strange, weights())


def test_bad_arguments():
    match = r"init_optimizer` needs an Optax transf.* int 3"
    with pytest.raises(TypeError, match=match):
        mpx.init_optimizer(3, weights())
    one = NamedSharding(mesh_of(), P())
    with pytest.raises(ValueError, match=r"must be a tree like `params`, or a"):
        mpx.init_optimizer(optax.adam(0.1), weights(), shardings={"other": one})
