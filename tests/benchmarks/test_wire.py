"""What steps on four devices send: dtypes in every layout and precision, and counts.

A CPU's compiler widens collectives of half precision, so what is read is the program
as its partitioner leaves it, which is that of all platforms.
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import mpx
from benchmarks import results
from benchmarks.counts import wire
from benchmarks.counts.wire import AUTOCAST, CURRENT, DELAYED, EXPLICIT, FLOAT32
from benchmarks.models import layouts
from benchmarks.models.layouts import LAYOUTS
from tests import collectives
from tests.helpers import slow_but

pytestmark = pytest.mark.third_party
SIZES = layouts.Sizes(width=32, hidden=64, heads=2, blocks=1, context=8, batch=16)
GATHER = "all-gather"
SMALL = 512  # bytes: norms, biases, flags and amaxes


@functools.cache
def partitioned(layout, arm, policy=None):
    make = wire.gradient_of(arm, policy)
    step = layouts.build(make, LAYOUTS[layout], SIZES, jax.devices()[:4])

    options = {"donate_argnums": 0, "out_shardings": step.out_shardings}
    return collectives.partitioned(step.function, step.state, step.batch, **options)


def large(messages, kinds):
    """Dtypes of what is no norm, bias, flag or embedding, which stay float32.

    Nor the gradients of the rows of the embedding, which a scatter adds up.
    """
    rows = 4 * SIZES.batch * SIZES.context * SIZES.width
    others = (4 * layouts.BYTES * SIZES.width, rows)
    found = [x for x in messages if x.kind in kinds and x.bytes > SMALL]
    return {x.dtype for x in found if x.dtype != "f32" or x.bytes not in others}


AT_ONCE = ("data parallel, in order", "fsdp, shared", "fsdp, reshard")
CASES = [(layout, AUTOCAST) for layout in LAYOUTS]
CASES += [(f"fsdp, {how}", EXPLICIT) for how in ("constraint", "shard_map")]
CASES += [("fsdp, constraint", DELAYED), ("fsdp, shard_map", CURRENT)]
CASES += [("fsdp, entry", CURRENT)]


QUICK = [(name, AUTOCAST) for name in AT_ONCE]
QUICK += [("fsdp, shard_map", EXPLICIT), ("fsdp, constraint", DELAYED), CASES[-1]]


@pytest.mark.parametrize(("layout", "arm"), slow_but(QUICK, CASES))
def test_weights_travel_in_few_bits_and_gradients_are_summed_in_float32(layout, arm):
    """Half precision, and 8 bits of what a recipe quantizes: all but the last."""
    found, laid = partitioned(layout, arm), LAYOUTS[layout]
    if laid.is_divided and (laid.gathers or laid.shares):
        # Elsewhere the compiler chooses what travels.
        is_low = arm in (CURRENT, DELAYED) and not laid.shares
        travels = {"bf16", "f8e4m3fn"} if is_low else {"bf16"}
        if is_low and laid.gathers == "entry":  # it quantizes what has gone in
            travels, is_low = {"f32"}, False
        assert large(found, ("all-gather",)) == travels
        half = {x.bytes for x in found if x.kind == GATHER and x.dtype == "bf16"}
        assert not is_low or half == {2 * layouts.BYTES * SIZES.width}
    sums = ("all-to-all",) if laid.in_order else wire.SUMS
    assert large(found, sums) == {"f32"}


@pytest.mark.parametrize("arm", slow_but([AUTOCAST], [EXPLICIT, AUTOCAST]))
def test_no_activation_is_gathered_for_a_gradient(arm):
    """As that of a bias was on explicit axes, broadcast to no sharding."""
    found = (partitioned("fsdp, reshard", one) for one in (arm, FLOAT32))
    some, most = (sum(x.times for x in one if x.kind == GATHER) for one in found)
    assert 0 < some <= most


def test_gradients_and_weights_travel_in_the_dtypes_that_the_policy_says():
    text = "params=float32,compute=bfloat16,output=float32,{}"
    for dtype, name in (("bfloat16", "bf16"), ("float32", "f32")):
        policy = text.format(f"reduce={dtype}")
        found = partitioned("fsdp, constraint", AUTOCAST, policy)
        assert large(found, wire.SUMS) == {name}
    found = partitioned("fsdp, shard_map", AUTOCAST, text.format("gather=float32"))
    assert large(found, ("all-gather",)) == {"f32"}


def test_a_sum_that_jax_makes_in_float32_refuses_another_dtype():
    def local(w, x):
        return jax.lax.pmean((x @ w).mean(), "data")

    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("data",))
    specs = {"in_specs": (P(), P("data")), "out_specs": P()}
    loss = jax.shard_map(local, mesh=mesh, check_vma=False, **specs)
    policy = "params=float32,compute=bfloat16,output=float32,reduce=bfloat16"
    call = mpx.filter_grad(mpx.autocast(loss), mpx.NoLossScaling(), policy=policy)
    with pytest.raises(ValueError, match="is not possible .* check_vma=False"):
        call(jnp.ones((8, 4)), jnp.ones((8, 8)))


@pytest.mark.slow
def test_micro_batches_on_their_own_devices_are_summed_once():
    layout, key = "fsdp, shared", jax.random.key(0)
    found = partitioned(layout, DELAYED)
    assert {x.times for x in found} == {1}
    amaxes = [x for x in found if x.dtype == "s32" and x.kind == "all-reduce"]
    assert len(amaxes) == 1
    params = jax.eval_shape(lambda: layouts.initial(SIZES, LAYOUTS[layout], key))
    weights = sum(4 * leaf.size for leaf in jax.tree.leaves(params))
    summed = sum(x.bytes for x in found if x.kind in wire.SUMS and x.dtype == "f32")
    assert summed == pytest.approx(weights, rel=0.01)


@pytest.mark.slow
def test_gradients_are_those_of_one_device():
    """Where the casts stand on the way changes no number but by rounding."""
    one = dataclasses.replace(LAYOUTS["data parallel"], gathers="")
    params = layouts.initial(SIZES, one, jax.random.key(0))
    texts = jax.random.randint(jax.random.key(1), (SIZES.batch, 9), 0, 256)
    grads = []
    for laid, count in ((one, 1), (LAYOUTS["fsdp, constraint"], 4)):
        mesh = jax.sharding.Mesh(np.array(jax.devices()[:count]), ("data",))
        specs = jax.tree.map(laid.spec, params)
        placed = [
            jax.tree.map(
                lambda x, s, m=mesh: jax.device_put(x, NamedSharding(m, s)), *one
            )
            for one in ((params, specs), (texts, P("data")))
        ]
        loss = mpx.autocast(layouts.loss_in(laid, mesh, SIZES, specs))
        grad = jax.jit(lambda *a, f=loss: mpx.filter_grad(f, mpx.NoLossScaling())(*a))
        grads.append(jax.tree.map(np.asarray, grad(*placed).grads))
    for first, second in zip(*map(jax.tree.leaves, grads), strict=True):
        assert np.abs(first - second).max() <= 0.02 * np.abs(first).max() + 1e-6


HLO = """HloModule m
%body (p: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  ROOT %r = f32[8]{0} all-reduce(%x), replica_groups={{0,1,2,3}}, to_apply=%add
}
ENTRY %main (a: bf16[4,8]) -> f32[8] {
  %a = bf16[4,8]{1,0} parameter(0)
  %g = (bf16[4,8], bf16[16,8]) all-gather-start(%a), replica_groups=[1,4]<=[4]
  %w = f32[8]{0} while(%a), body=%body, backend_config={"known_trip_count":{"n":"3"}}
  ROOT %s = f32[2]{0} reduce-scatter(%w), replica_groups={{0,1},{2,3}}, to_apply=%add
}
"""


def test_bytes_of_a_ring():
    by_kind = {x.kind: x for x in wire.counter.messages(HLO, 4)}
    assert by_kind["all-gather"].sent == 16 * 8 * 2 * 3 / 4
    assert by_kind["all-reduce"].sent == 3 * 32 * 2 * 3 / 4
    assert by_kind["reduce-scatter"].sent == 32 / 2


@pytest.mark.parametrize("met", [True, False])
def test_tables_and_goals(met):
    found = results.Results("wire", "test", "compiled for X")
    for case in wire.CASES:
        share = {FLOAT32: 1, CURRENT: 0.25, DELAYED: 0.25}.get(case.arm, 0.5)
        sent = {"all-gather": {"bf16": 100e6 * (share if met else 2 - share)}}
        sent["reduce-scatter"] = {"f32": 100e6}
        counts = {"sent": sent, "small": 1, "collectives": 3}
        found.records.append({**dataclasses.asdict(case), "counts": counts})
    first, *_ = wire.tables(found)
    assert len(first.rows) == len(LAYOUTS) * len(wire.ARMS)
    assert all(goal.met for goal in wire.goals(found)) == met
    assert list(wire.goals(found))


@pytest.mark.parametrize("recipe", [None, mpx.Float8CurrentScaling()])
@pytest.mark.parametrize("is_said", [False, True])
def test_convolutions_are_summed_in_half_precision_unless_float32_is_said(
    recipe, is_said
):
    """XLA casts the operands of one that gives float32, and computes it in float32."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    w = {"filter": jnp.ones((3, 3, 8, 8)), "out": jnp.ones((8, 4))}
    w = jax.device_put(w, NamedSharding(mesh, P()))
    x = jax.device_put(jnp.ones((8, 4, 4, 8)), NamedSharding(mesh, P("data")))
    names = {"dimension_numbers": ("NHWC", "HWIO", "NHWC")}

    def loss(w, x):
        y = jax.lax.conv_general_dilated(x, w["filter"], (1, 1), "SAME", **names)
        return jnp.mean((y @ w["out"]) ** 2)

    low = mpx.autocast(loss, recipe=recipe, target="sm_90")
    dtypes = "params=float32,compute=bfloat16,output=float32,reduce=float32"
    policy = dtypes if is_said else None

    @jax.jit
    def step(scaling, w, x):
        return mpx.filter_grad(low, scaling, policy=policy)(w, x).grads

    lowered = step.trace(mpx.NoLossScaling(), w, x).lower(lowering_platforms=("cuda",))
    text = lowered.as_text()
    results = re.findall(r"stablehlo.convolution.*-> tensor<[0-9x]*x(\w+)>", text)
    assert "bf16" in results and ("f32" in results) == is_said
