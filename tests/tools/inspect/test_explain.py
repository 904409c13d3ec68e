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


def test_one_product_alone_and_in_scan_in_jit_in_remat():
    report = mpx.explain(lambda w, x: x @ w)(W, X)
    (product,) = report.operations
    assert (product.primitive, product.number) == ("dot_general", 0)
    assert product.inputs == ("float32[2,4]", "float32[4,4]")
    assert product.outputs == ("float32[2,4]",)
    assert (product.precision, product.rule) == ("float32", "as written")
    assert (product.executions, product.phase) == (1, "forward")
    assert product.flops == 2 * 2 * 4 * 4
    assert product.bytes == 4 * (8 + 16 + 8)
    assert product.parameters == ("args[0]",)
    assert product.reason == "`args[1]`, which is float32; `args[0]`, which is float32"
    totals = report.totals
    assert totals.flops == 64 and totals.flops_by_precision == {"float32": 64}
    assert totals.half_flops_share == totals.casts == 0

    @jax.checkpoint
    @jax.jit
    def f(w, x):
        return jax.lax.scan(lambda c, _: (c @ w, None), x, length=7)[0]

    (product,) = of(mpx.explain(f)(W, X), "dot_general")
    assert (product.executions, product.unknown_loops) == (7, 0)
    assert product.times == "7"
    assert (product.flops, product.bytes) == (7 * 64, 7 * 128)
    assert product.inside == ("remat2", "jit f", "scan body")
    assert product.parameters == ("args[0]",)


def test_flops_by_dtype():
    def f(w, x):
        y = x.astype(jnp.float16) @ w.astype(jnp.float16)  # 64 FLOPs
        return y.astype(jnp.float32) + x  # 8 FLOPs

    totals = mpx.explain(f)(W, X).totals
    assert totals.flops_by_precision == {"float16": 64, "float32": 8}
    assert totals.half_flops_share == 64 / 72
    assert totals.casts == 3
    assert totals.cast_bytes == 16 * 6 + 8 * 6 + 8 * 6
    assert totals.operations == totals.executed == 5
    x, w = (jax.ShapeDtypeStruct(s.shape, jnp.float8_e4m3fn) for s in (X, W))
    dot = lambda w, x: jnp.dot(x, w, preferred_element_type=jnp.float32)  # noqa: E731
    totals = mpx.explain(dot)(w, x).totals
    assert (totals.low_flops_share, totals.half_flops_share) == (1, 0)
    # Gradients of integers have the dtype that JAX names.
    report = mpx.explain(lambda: jnp.zeros(3, jax.dtypes.float0))()
    (operation,) = report.operations
    assert (operation.precision, operation.outputs) == ("float0", ("float0[3]",))


def test_branches_and_unknown_loops():
    def f(i, w, x):
        return jax.lax.switch(i, [lambda x: x @ w, lambda x: x + 1, lambda x: x], x)

    report = mpx.explain(f)(jax.ShapeDtypeStruct((), jnp.int32), W, X)
    (product,), (add,) = of(report, "dot_general"), of(report, "add")
    assert product.inside[-1] == "cond branch 1 of 3"
    assert add.inside[-1] == "cond branch 2 of 3"
    assert report.totals.flops == 64 + 8
    assert report.totals.in_branches == 2
    assert "branches" in str(report)

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


def test_phases_of_gradients_by_custom_rules_and_checkpoints():
    @jax.custom_vjp
    def f(w, x):
        return x @ w

    f.defvjp(lambda w, x: (x @ w, (w, x)), lambda r, g: (r[1].T @ g, g @ r[0].T))
    report = mpx.explain(jax.grad(lambda w, x: f(w, x).sum()))(W, X)
    found = [(o.phase, o.flops) for o in of(report, "dot_general")]
    assert found == [("forward", 64), ("backward", 64), ("backward", 64)]

    def f(w, x):
        return jax.checkpoint(lambda w, x: jnp.sin(x @ w))(w, x).sum()

    report = mpx.explain(jax.grad(f))(W, X)
    phases = [o.phase for o in of(report, "dot_general")]
    assert phases == ["forward", "recompute", "backward"]


def test_shard_map_counts_all_devices():
    mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = PartitionSpec("d")
    specs = {"in_specs": (spec, None), "out_specs": spec}
    f = jax.shard_map(lambda x, w: x @ w, mesh=mesh, **specs)
    x = jax.ShapeDtypeStruct((8, 4), jnp.float32)
    (product,) = of(mpx.explain(f)(x, W), "dot_general")
    assert product.inputs[0] == "float32[2,4]"
    assert (product.executions, product.flops) == (4, 2 * 8 * 4 * 4)


def test_scopes_survive_gradients_and_without_them_functions_are_the_path(model):
    def f(w, x):
        with jax.named_scope("encoder"), jax.named_scope("mlp"):
            x = jax.lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, length=2)[0]
        return x.sum()

    report = mpx.explain(jax.grad(f))(W, X)
    products = of(report, "dot_general")
    assert {o.phase for o in products} == {"forward", "backward"}
    assert {o.where for o in products} == {"encoder/mlp"}
    # Without named scopes functions are the path.
    report = mpx.explain(jax.grad(loss_of))(model, X)
    products = of(report, "dot_general")
    assert {o.where for o in products} == {"loss_of/Model/Block/Linear"}
    assert {o.scope for o in products} == {""}
    files = {o.source.rpartition(":")[0] for o in products}
    assert files == {"tests/tools/inspect/test_explain.py"}
    report = mpx.explain(lambda x: jnp.einsum("ij,kj->ik", x, x))(X)
    assert of(report, "dot_general")[0].where == ""  # not the scope of an einsum


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


def loss_of(model, x):
    return jax.vmap(model)(x).sum()


def test_weights_are_known_by_their_paths(model):
    reports = mpx.explain(loss_of)(model, X), mpx.explain(model)(jnp.ones(4))
    for report in reports:  # a callable tree is its own weights
        names = [o.parameters for o in of(report, "dot_general")]
        assert names == [(f"blocks[{i}].linear.weight",) for i in (0, 1)]
    assert report.name == "Model"


def test_weights_are_followed():
    def f(weights, x):
        def body(carry, w):
            return carry @ w.astype(jnp.bfloat16).T, None

        x = jax.lax.scan(body, x, weights["stack"])[0]
        w = jnp.concatenate([weights["a"], weights["b"]]).astype(jnp.bfloat16)
        return x @ w

    stack = jax.ShapeDtypeStruct((3, 4, 4), jnp.float32)
    part = jax.ShapeDtypeStruct((2, 4), jnp.float32)
    report = mpx.explain(f)({"stack": stack, "a": part, "b": part}, HALF_X)
    names = [o.parameters for o in of(report, "dot_general")]
    assert names == [("['stack']",), ("['a']", "['b']")]

    # What is computed from a weight is not a weight.
    def f(w, x):
        y = x @ jnp.tanh(w)
        return y + w[jnp.array([0, 2])]  # rows of an embedding are data

    report = mpx.explain(f)(W, X)
    assert of(report, "dot_general")[0].parameters == ()
    assert of(report, "gather")[0].parameters == ("args[0]",)
    assert of(report, "add")[-1].parameters == ()


BOTH = ["args[1]['w']", "kwargs['extra']['w']"]


@pytest.mark.parametrize(
    ("weights", "paths"),
    [(1, ["['w']"]), ("extra", ["['w']"]), ((1, "extra"), BOTH)],
)
def test_weights_may_be_in_other_arguments(weights, paths):
    def f(x, params, *, extra):
        return x @ params["w"] @ extra["w"]

    under = mpx.explain(mpx.autocast(f, weights=weights))
    for explained in mpx.explain(f, weights=weights), under:
        report = explained(X, {"w": W}, extra={"w": W})
        found = [path for o in of(report, "dot_general") for path in o.parameters]
        assert found == paths


@pytest.mark.third_party
def test_a_training_step(model):
    optimizer = optax.adam(1e-3)
    scaling = mpx.DynamicLossScaling()

    @eqx.filter_jit
    def step(model, state, scaling, x):
        result = mpx.filter_grad(loss_of, scaling)(model, x)
        return mpx.optimizer_step(model, optimizer, state, result)

    state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
    report = mpx.explain(step)(model, state, scaling, X)
    products = of(report, "dot_general")
    assert {o.precision for o in products} == {"float16"}
    assert len(products) == 5  # the first layer needs no gradient of its input
    assert report.totals.residual_bytes > 0
    stack = products[0].stack
    assert not any("explain" in line and "_inspect" in line for line in stack)


@pytest.mark.third_party
def test_a_module_of_nnx_stays_what_it_is():
    from flax import nnx

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(4, 4, rngs=rngs)
            self.norm = nnx.BatchNorm(4, rngs=rngs)

        def __call__(self, x):
            return self.norm(self.linear(x)).sum()

    net = Net(nnx.Rngs(0))
    before = net.norm.mean[...]
    report = mpx.explain(lambda net, x: net(x))(net, jnp.ones((2, 4)))
    (product,) = of(report, "dot_general")
    assert (product.where, product.parameters) == ("Net/Linear", ("linear.kernel",))
    assert net.norm.mean[...] is before


def test_nothing_runs_and_leaves_may_be_no_arrays():
    def f(x):
        jax.debug.callback(lambda: pytest.fail("it ran"))
        return jax.pure_callback(lambda x: pytest.fail("it ran"), x, x)

    assert of(mpx.explain(f)(jnp.ones(2)), "pure_callback")

    def f(config, x, *, scale):
        assert config["name"] == "mean"
        return {"y": getattr(jnp, config["name"])(x) * scale, "name": config["name"]}

    report = mpx.explain(f)({"name": "mean", "f": jnp.sin}, np.ones(3, "f"), scale=2.0)
    assert of(report, "reduce_sum")
    report = mpx.explain(jnp.linalg.eigh)(W)
    assert "eigh" in report.totals.not_counted
    assert "unknown and not counted: eigh" in str(report)


def test_wrong_use_is_refused():
    match = r"`mpx.explain\(func\)` needs a function.*int 3"
    with unchecked_annotations(), pytest.raises(TypeError, match=match):
        mpx.explain(3)
    with pytest.raises(TypeError, match=r"needs arrays or.*float32\[2\]"):
        jax.jit(lambda x: mpx.explain(jnp.sin)(x) and x)(jnp.ones(2))
