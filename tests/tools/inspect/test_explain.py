"""What a report says of small programs, against numbers made by hand."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

import mpx
from tests.helpers import unchecked_annotations

W = jax.ShapeDtypeStruct((4, 4), jnp.float32)
X = jax.ShapeDtypeStruct((2, 4), jnp.float32)
HALF_X = jax.ShapeDtypeStruct((2, 4), jnp.bfloat16)


def of(report, primitive):
    return [o for o in report.operations if o.primitive == primitive]


def test_gradients_of_integers_have_the_dtype_that_jax_names():
    report = mpx.explain(lambda: jnp.zeros(3, jax.dtypes.float0))()
    (operation,) = report.operations
    assert (operation.precision, operation.outputs) == ("float0", ("float0[3]",))


def test_one_product():
    report = mpx.explain(lambda w, x: x @ w)(W, X)
    (product,) = report.operations
    assert product.primitive == "dot_general"
    assert product.number == 0
    assert product.inputs == ("float32[2,4]", "float32[4,4]")
    assert product.outputs == ("float32[2,4]",)
    assert product.precision == "float32"
    assert product.executions == 1
    assert product.flops == 2 * 2 * 4 * 4
    assert product.bytes == 4 * (8 + 16 + 8)
    assert product.parameters == ("args[0]",)
    assert product.phase == "forward"
    assert product.rule == "as written"
    assert product.reason == "`args[1]`, which is float32; `args[0]`, which is float32"
    assert report.totals.flops == 64
    assert report.totals.flops_by_precision == {"float32": 64}
    assert report.totals.half_flops_share == 0
    assert report.totals.casts == 0


def test_a_product_in_scan_in_jit_in_remat():
    @jax.checkpoint
    @jax.jit
    def f(w, x):
        return jax.lax.scan(lambda c, _: (c @ w, None), x, length=7)[0]

    (product,) = of(mpx.explain(f)(W, X), "dot_general")
    assert product.executions == 7
    assert product.unknown_loops == 0
    assert product.times == "7"
    assert product.flops == 7 * 64
    assert product.bytes == 7 * 128
    assert product.inside == ("remat2", "jit f", "scan body")
    assert product.parameters == ("args[0]",)


def test_half_precision_counts():
    def f(w, x):
        y = x.astype(jnp.float16) @ w.astype(jnp.float16)  # 64 FLOPs
        return y.astype(jnp.float32) + x  # 8 FLOPs

    totals = mpx.explain(f)(W, X).totals
    assert totals.flops_by_precision == {"float16": 64, "float32": 8}
    assert totals.half_flops_share == 64 / 72
    assert totals.casts == 3
    assert totals.cast_bytes == 16 * 6 + 8 * 6 + 8 * 6
    assert totals.operations == totals.executed == 5


def test_eight_bits_count_as_low():
    x = jax.ShapeDtypeStruct((2, 4), jnp.float8_e4m3fn)
    w = jax.ShapeDtypeStruct((4, 4), jnp.float8_e4m3fn)

    def dot(w, x):
        return jnp.dot(x, w, preferred_element_type=jnp.float32)

    totals = mpx.explain(dot)(w, x).totals
    assert totals.low_flops_share == 1
    assert totals.half_flops_share == 0


def test_branches_are_all_counted():
    def f(i, w, x):
        return jax.lax.switch(i, [lambda x: x @ w, lambda x: x + 1, lambda x: x], x)

    report = mpx.explain(f)(jax.ShapeDtypeStruct((), jnp.int32), W, X)
    (product,), (add,) = of(report, "dot_general"), of(report, "add")
    assert product.inside[-1] == "cond branch 1 of 3"
    assert add.inside[-1] == "cond branch 2 of 3"
    assert report.totals.flops == 64 + 8
    assert report.totals.in_branches == 2
    assert "branches" in str(report)


def test_a_while_loop_says_that_its_count_is_unknown():
    def f(w, x):
        def body(x):
            return jax.lax.scan(lambda c, _: (c @ w, None), x, length=3)[0]

        return jax.lax.while_loop(lambda x: x.sum() < 9, body, x)

    report = mpx.explain(f)(W, X)
    (product,) = of(report, "dot_general")
    assert (product.executions, product.unknown_loops) == (3, 1)
    assert product.times == "3 x ?"
    assert product.flops == 3 * 64
    assert report.totals.in_unknown_loops == report.totals.operations
    assert "unknown length" in str(report)


def test_custom_rules_and_their_backward_pass():
    @jax.custom_vjp
    def f(w, x):
        return x @ w

    f.defvjp(lambda w, x: (x @ w, (w, x)), lambda r, g: (r[1].T @ g, g @ r[0].T))
    report = mpx.explain(jax.grad(lambda w, x: f(w, x).sum()))(W, X)
    assert [o.phase for o in of(report, "dot_general")] == ["forward"] + 2 * [
        "backward"
    ]
    assert all(o.flops == 64 for o in of(report, "dot_general"))


def test_shard_map_counts_all_devices():
    mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = PartitionSpec("d")
    f = jax.shard_map(
        lambda x, w: x @ w, mesh=mesh, in_specs=(spec, None), out_specs=spec
    )
    x = jax.ShapeDtypeStruct((8, 4), jnp.float32)
    (product,) = of(mpx.explain(f)(x, W), "dot_general")
    assert product.inputs[0] == "float32[2,4]"
    assert product.executions == 4
    assert product.flops == 2 * 8 * 4 * 4


def test_a_checkpoint_is_computed_again():
    def f(w, x):
        return jax.checkpoint(lambda w, x: jnp.sin(x @ w))(w, x).sum()

    report = mpx.explain(jax.grad(f))(W, X)
    phases = [o.phase for o in of(report, "dot_general")]
    assert phases == ["forward", "recompute", "backward"]


def test_scopes_survive_gradients():
    def f(w, x):
        with jax.named_scope("encoder"), jax.named_scope("mlp"):
            x = jax.lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, length=2)[0]
        return x.sum()

    report = mpx.explain(jax.grad(f))(W, X)
    products = of(report, "dot_general")
    assert {o.phase for o in products} == {"forward", "backward"}
    assert {o.where for o in products} == {"encoder/mlp"}


class Block(eqx.Module):
    linear: eqx.nn.Linear
    name: str = eqx.field(default="block", static=True)

    def __call__(self, x):
        return jax.nn.relu(self.linear(x))


class Model(eqx.Module):
    blocks: list[Block]

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x


@pytest.fixture
def model(getkey):
    return Model([Block(eqx.nn.Linear(4, 4, key=getkey())) for _ in range(2)])


def test_without_named_scopes_functions_are_the_path(model):
    def loss(model, x):
        return jax.vmap(model)(x).sum()

    report = mpx.explain(jax.grad(loss))(model, X)
    products = of(report, "dot_general")
    assert {o.where for o in products} == {"loss/Model/Block/Linear"}
    assert {o.scope for o in products} == {""}
    assert {o.source.rpartition(":")[0] for o in products} == {
        "tests/tools/inspect/test_explain.py"
    }


def test_the_scope_of_an_einsum_is_not_a_place():
    def attention(x):
        return jnp.einsum("ij,kj->ik", x, x)

    assert of(mpx.explain(attention)(X), "dot_general")[0].where == "attention"


def test_weights_are_known_by_their_paths(model):
    def loss(model, x):
        return jax.vmap(model)(x).sum()

    report = mpx.explain(loss)(model, X)
    assert [o.parameters for o in of(report, "dot_general")] == [
        ("blocks[0].linear.weight",),
        ("blocks[1].linear.weight",),
    ]


def test_a_callable_tree_is_its_own_weights(model):
    report = mpx.explain(model)(jnp.ones(4))
    assert [o.parameters for o in of(report, "dot_general")] == [
        ("blocks[0].linear.weight",),
        ("blocks[1].linear.weight",),
    ]
    assert report.name == "Model"


def test_weights_are_followed_through_casts_slices_and_loops():
    def f(weights, x):
        def body(carry, w):
            return carry @ w.astype(jnp.bfloat16).T, None

        x = jax.lax.scan(body, x, weights["stack"])[0]
        w = jnp.concatenate([weights["a"], weights["b"]]).astype(jnp.bfloat16)
        return x @ w

    stack = jax.ShapeDtypeStruct((3, 4, 4), jnp.float32)
    part = jax.ShapeDtypeStruct((2, 4), jnp.float32)
    report = mpx.explain(f)({"stack": stack, "a": part, "b": part}, HALF_X)
    assert [o.parameters for o in of(report, "dot_general")] == [
        ("['stack']",),
        ("['a']", "['b']"),
    ]


@pytest.mark.parametrize(
    ("weights", "paths"),
    [
        (1, ["['w']"]),
        ("extra", ["['w']"]),
        ((1, "extra"), ["args[1]['w']", "kwargs['extra']['w']"]),
    ],
)
def test_weights_may_be_in_other_arguments(weights, paths):
    def f(x, params, *, extra):
        return x @ params["w"] @ extra["w"]

    report = mpx.explain(f, weights=weights)(X, {"w": W}, extra={"w": W})
    found = [path for o in of(report, "dot_general") for path in o.parameters]
    assert found == paths
    under = mpx.autocast(f, weights=weights)
    report = mpx.explain(under)(X, {"w": W}, extra={"w": W})
    found = [path for o in of(report, "dot_general") for path in o.parameters]
    assert found == paths


def test_what_is_computed_from_a_weight_is_none():
    def f(w, x):
        y = x @ jnp.tanh(w)
        return y + w[jnp.array([0, 2])]  # rows of an embedding are data

    report = mpx.explain(f)(W, X)
    assert of(report, "dot_general")[0].parameters == ()
    assert of(report, "gather")[0].parameters == ("args[0]",)
    assert of(report, "add")[-1].parameters == ()


@pytest.mark.third_party
def test_a_training_step(model):
    optimizer = optax.adam(1e-3)
    scaling = mpx.DynamicLossScaling()

    @eqx.filter_jit
    def step(model, state, scaling, x):
        result = mpx.filter_grad(lambda m, x: jax.vmap(m)(x).sum(), scaling)(model, x)
        return mpx.optimizer_step(model, optimizer, state, result)

    state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
    report = mpx.explain(step)(model, state, scaling, X)
    products = of(report, "dot_general")
    assert {o.precision for o in products} == {"float16"}
    assert len(products) == 5  # the first layer needs no gradient of its input
    assert report.totals.residual_bytes > 0
    assert not any(
        "explain" in line and "_inspect" in line for line in products[0].stack
    )


@pytest.mark.third_party
def test_a_module_of_nnx_stays_what_it_is():
    from flax import nnx

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(4, 4, rngs=rngs)
            self.norm = nnx.BatchNorm(4, rngs=rngs)

        def __call__(self, x):
            return self.norm(self.linear(x))

    net = Net(nnx.Rngs(0))
    before = net.norm.mean[...]
    report = mpx.explain(lambda net, x: net(x).sum())(net, jnp.ones((2, 4)))
    (product,) = of(report, "dot_general")
    assert product.where == "Net/Linear"
    assert product.parameters == ("linear.kernel",)
    assert net.norm.mean[...] is before


def test_nothing_runs():
    def f(x):
        jax.debug.callback(lambda: pytest.fail("it ran"))
        return jax.pure_callback(lambda x: pytest.fail("it ran"), x, x)

    assert of(mpx.explain(f)(jnp.ones(2)), "pure_callback")


def test_leaves_that_are_no_arrays():
    def f(config, x, *, scale):
        assert config["name"] == "mean"
        return {"y": getattr(jnp, config["name"])(x) * scale, "name": config["name"]}

    report = mpx.explain(f)({"name": "mean", "f": jnp.sin}, np.ones(3, "f"), scale=2.0)
    assert of(report, "reduce_sum")


def test_an_unknown_primitive_is_said_to_be_so():
    report = mpx.explain(jnp.linalg.eigh)(W)
    assert "eigh" in report.totals.not_counted
    assert "unknown and not counted: eigh" in str(report)


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: mpx.explain(3), r"`mpx.explain\(func\)` needs a function.*int 3"),
        (
            lambda: jax.jit(lambda x: mpx.explain(jnp.sin)(x) and x)(jnp.ones(2)),
            r"needs arrays or.*float32\[2\]",
        ),
    ],
)
def test_wrong_use_is_refused(call, match):
    with unchecked_annotations(), pytest.raises(TypeError, match=match):
        call()
