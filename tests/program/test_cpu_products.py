"""bfloat16 products in the form that CPUs have units for.

docs/numerics.md, "On a CPU".
"""

import contextlib
import functools
import io
import re

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import mpx
from mpx._base.jax_compat import HAS_CPU_FORM
from mpx._program import cpu_products as _cpu_products
from mpx._quantize import target_from

pytestmark = pytest.mark.skipif(
    not HAS_CPU_FORM, reason="XLA:CPU has these products since jaxlib 0.10.2"
)
CPU = "cpu bf16"
WITHOUT_LIBRARY = {"xla_cpu_experimental_ynn_fusion_type": ""}
AS_USUAL = {
    "xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"
}
HAS_UNITS = target_from(None).capability >= (1, 0)


def half(*shape, seed=0):
    return jax.random.normal(jax.random.key(seed), shape).astype(jnp.bfloat16)


def relative_error(found, exact):
    found, exact = (np.asarray(x, np.float64) for x in (found, exact))
    return np.linalg.norm(found - exact) / max(np.linalg.norm(exact), 1e-30)


def twin_of(function, *args):
    (equation,) = jax.make_jaxpr(function)(*args).eqns
    usual = equation.primitive
    primitive = _cpu_products.in_cpu_form(equation, args).primitive
    assert primitive is not usual and str(primitive) == str(usual)
    return lambda a, b: primitive.bind(a, b, **equation.params)


def under_each_transform(function, a, b):
    result, back = jax.vjp(function, a, b)

    def curved(a):
        def inner(a):
            return jnp.sum(jnp.square(function(a, b).astype(jnp.float32)))

        return jnp.sum(jax.grad(inner)(a).astype(jnp.float32))

    both = jnp.stack([a, -a]), jnp.stack([b, b])
    return {
        "reverse": back(result),
        "forward": jax.jvp(function, (a, b), (a, b)),
        "left mapped": jax.vmap(function, (0, None))(both[0], b),
        "right mapped": jax.vmap(function, (None, 1))(a, jnp.moveaxis(both[1], 0, 1)),
        "both mapped": jax.vmap(function)(*both),
        "second": jax.grad(curved)(a),
    }


def check_all(function, a, b):
    """As exact as one rounding for each product."""
    twin = twin_of(function, a, b)
    found = jax.jit(lambda a, b: under_each_transform(twin, a, b))(a, b)
    wide = a.astype(jnp.float32), b.astype(jnp.float32)
    exact = jax.jit(lambda a, b: under_each_transform(function, a, b))(*wide)
    for name, part in found.items():
        for x, y in zip(*map(jax.tree.leaves, (part, exact[name])), strict=True):
            assert x.dtype == jnp.bfloat16 and relative_error(x, y) < 6e-3, name
    assert (twin(a, b) == jax.jit(twin)(a, b)).all()


PRODUCTS = {
    "matrices": ((24, 40), (40, 16), (((1,), (0,)), ((), ()))),
    "first axes": ((40, 24), (40, 16), (((0,), (0,)), ((), ()))),
    "layer": ((3, 8, 40), (40, 16), (((2,), (0,)), ((), ()))),
    "scores": ((2, 8, 3, 16), (2, 6, 3, 16), (((3,), (3,)), ((0, 2), (0, 2)))),
    "two axes": ((3, 8, 4, 6), (5, 6, 4), (((3, 2), (1, 2)), ((), ()))),
    "all axes": ((5, 6, 7), (7, 5, 6), (((0, 1, 2), (1, 2, 0)), ((), ()))),
    "outer": ((5,), (6,), (((), ()), ((), ()))),
    "nothing": ((0, 5), (5, 3), (((1,), (0,)), ((), ()))),
    "sum of nothing": ((4, 0), (0, 3), (((1,), (0,)), ((), ()))),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_under_each_transform(name):
    left, right, numbers = PRODUCTS[name]
    check_all(lambda a, b: lax.dot_general(a, b, numbers), half(*left), half(*right))


# (window, stride, channels, features, padding, dilation), and how many products and
# convolutions the result and both gradients become.
CONVOLUTIONS = {
    "one place": ((1, 1, 32, 48, "SAME", 1), (3, 0)),
    "every other": ((1, 2, 32, 48, "VALID", 1), (3, 0)),
    "one place, padded": ((1, 1, 32, 48, [(1, 2), (0, 1)], 1), (3, 0)),
    "patches": ((4, 4, 3, 24, "SAME", 1), (3, 0)),
    "patches, cut": ((4, 4, 16, 24, [(0, 0), (-1, 3)], 1), (3, 0)),
    "many channels": ((3, 1, 128, 128, "SAME", 1), (27, 0)),
    "stride": ((3, 2, 64, 128, "VALID", 1), (9, 2)),
    "dilated": ((3, 1, 128, 64, "SAME", 2), (18, 1)),
    "few channels": ((3, 1, 16, 16, "SAME", 1), (0, 3)),
}


def convolved(x, w, order="NHWC", stride=1, padding="SAME", holes=1, **options):
    spec = (order, "HWIO" if order == "NHWC" else "OIHW", order)
    options |= {"rhs_dilation": (holes, holes), "dimension_numbers": spec}
    return lax.conv_general_dilated(x, w, (stride, stride), padding, **options)


@pytest.mark.parametrize("order", ["NHWC", "NCHW"])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions_become_products_where_these_win(name, order):
    (k, stride, c, n, padding, holes), counts = CONVOLUTIONS[name]
    x = half(2, 9, 8, c) if order == "NHWC" else half(2, c, 9, 8)
    w = half(k, k, c, n, seed=1) if order == "NHWC" else half(n, c, k, k, seed=1)
    function = lambda x, w: convolved(x, w, order, stride, padding, holes)  # noqa: E731
    twin = twin_of(function, x, w)
    lowered = jax.jit(lambda x, w: jax.vjp(twin, x, w)[1](twin(x, w))).lower(x, w)
    text = lowered.as_text()
    found = text.count("stablehlo.dot_general"), text.count("stablehlo.convolution")
    assert found == counts
    if order == "NHWC" or name == "patches":
        check_all(function, x, w)


@pytest.mark.parametrize("holes", [1, 2])
@pytest.mark.parametrize("k", [1, 2])
def test_holes_in_the_input_and_in_the_window(k, holes):
    options = {"padding": [(k, k)] * 2, "lhs_dilation": (2, 2), "holes": holes}
    function = functools.partial(convolved, **options)
    check_all(function, half(2, 5, 4, 32), half(k, k, 32, 48, seed=1))


def test_a_convolution_of_any_batch_is_exported():
    (batch,) = jax.export.symbolic_shape("batch")
    x = jax.ShapeDtypeStruct((batch, 4, 4, 32), jnp.float32)
    w = jnp.ones((1, 1, 32, 16))
    loss = mpx.autocast(lambda w, x: jnp.sum(convolved(x, w)), target=CPU)
    exported = jax.export.export(jax.jit(jax.grad(loss)))(w, x)
    found = exported.call(w, jnp.ones((3, 4, 4, 32)))
    assert relative_error(found, jnp.full(w.shape, 48.0)) < 5e-3


def test_groups_stay_convolutions():
    function = functools.partial(convolved, feature_group_count=4)
    check_all(function, half(2, 5, 5, 32), half(1, 1, 8, 64, seed=1))


# --- As autocast emits them -----------------------------------------------------------


def layer(w, x):
    return jnp.mean(jnp.square(jnp.tanh(x @ w["a"]) @ w["b"]))


WEIGHTS = {"a": jnp.eye(64) + 0.1, "b": jnp.eye(64) - 0.1}
X = jax.random.normal(jax.random.key(3), (4, 16, 64))


def on(target, function=layer, dtype=None):
    """The gradient of a function that autocast writes for a target."""
    return jax.grad(mpx.autocast(function, dtype, target=target))


def test_only_targets_that_want_the_form_have_it():
    def has_form(gradient):
        return "LayoutConstraint" in jax.jit(gradient).lower(WEIGHTS, X).as_text()

    for target, is_wanted in ((CPU, True), ("sm_90", False), ("tpu v5e", False)):
        assert has_form(on(target)) == is_wanted
    assert has_form(on("cpu")) == (jax.__version_info__ >= (0, 11))
    # float16 has no units, and other platforms get JAX's product from the same program.
    assert not has_form(on(CPU, dtype="float16"))
    traced = jax.jit(on(CPU)).trace(WEIGHTS, X)
    for_gpu = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "LayoutConstraint" not in for_gpu and "dot_general" in for_gpu


def test_a_program_s_own_algorithm_stays():
    def function(w, x):
        preset = lax.DotAlgorithmPreset.BF16_BF16_F32
        return jnp.sum(jnp.dot(x, w["a"], precision=preset))

    text = jax.jit(mpx.autocast(function, target=CPU)).lower(WEIGHTS, X).as_text()
    assert "LayoutConstraint" not in text


@pytest.mark.parametrize("options", [WITHOUT_LIBRARY, AS_USUAL])
def test_the_gradient_of_a_weight_is_summed_in_float32(options):
    """Without a flag of XLA, where plain JAX 0.11 and 0.12 are 2.7e-2 off."""
    x, g = half(4, 512, 64), half(4, 512, 48, seed=1)

    def loss(w):
        return jnp.sum((x.astype(jnp.float32) @ w) * g.astype(jnp.float32))

    found = jax.jit(on(CPU, loss), compiler_options=options)(jnp.zeros((64, 48)))
    x, g = (np.asarray(v, np.float64).reshape(2048, -1) for v in (x, g))
    assert relative_error(found, x.T @ g) < 4e-3


def attention(q, k, v):
    scores = jnp.einsum("bthd,bshd->bhts", q, k)
    return jnp.sum(jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores), v))


FORMS = {
    "layer": (layer, (WEIGHTS, X)),
    "matrices": (layer, (WEIGHTS, X[0])),
    "attention": (attention, (X.reshape(4, 16, 4, 16),) * 3),
    "turned": (lambda x, y: jnp.sum(x.swapaxes(1, 2) @ y), (X, X)),
}


@pytest.mark.parametrize("name", FORMS)
def test_the_library_takes_each_form(name):
    """A product that it leaves is a slow loop, or not implemented."""
    function, args = FORMS[name]
    gradient = jax.grad(mpx.autocast(function, target=CPU), tuple(range(len(args))))
    compiled = jax.jit(gradient, compiler_options=AS_USUAL).lower(*args).compile()
    text = compiled.as_text()
    products = re.findall(r"= (\w+)\[[\d,]*\]\S* dot\(%?([\w.]+), %?([\w.]+)\)", text)
    types = dict(re.findall(r"%?([\w.\-]+) = (\w+)\[", text))
    assert products
    for result, *operands in products:
        assert result == "f32"
        if HAS_UNITS:
            assert {types[x] for x in operands} == {"bf16"}
    if HAS_UNITS:
        assert text.count("kind=kCustom") >= len(set(products)) // 2 > 0
    jax.block_until_ready(compiled(*args))


def test_a_turned_operand_is_computed_by_the_library_or_at_all():
    """XLA folded a transpose into it: "UNIMPLEMENTED ... DotThunk" (jaxlib 0.10)."""
    x, y = half(2, 4, 16, 16), half(2, 4, 16, 32, seed=1)

    def loss(x, y):
        turned = x.swapaxes(2, 3) @ y
        return jnp.sum(turned * jnp.einsum("bhkn,bhkp->bhnp", x, y))

    args = x.astype(jnp.float32), y.astype(jnp.float32)
    exact = jax.grad(lambda x: jnp.sum(jnp.square(x.swapaxes(2, 3) @ args[1])))(args[0])
    for options in (AS_USUAL, WITHOUT_LIBRARY):
        step = jax.jit(on(CPU, loss), compiler_options=options)
        assert relative_error(step(*args), exact) < 1e-2


def saved(function, *args):
    with contextlib.redirect_stdout(io.StringIO()) as text:
        jax.ad_checkpoint.print_saved_residuals(function, *args)
    lines = text.getvalue().splitlines()
    return sorted(line.split()[0] for line in lines if "argument" not in line)


@pytest.mark.parametrize(
    "policy", ["dots_saveable", "dots_with_no_batch_dims_saveable", "nothing_saveable"]
)
def test_policies_of_checkpoints_know_the_product(policy):
    chosen = getattr(jax.checkpoint_policies, policy)
    for outside in (True, False):
        found = []
        for target in (CPU, "sm_90"):
            if outside:
                func = jax.checkpoint(mpx.autocast(layer, target=target), policy=chosen)
            else:
                func = mpx.autocast(jax.checkpoint(layer, policy=chosen), target=target)
            found.append(saved(func, WEIGHTS, X))
        assert found[0] == found[1]
        assert bool(found[0]) == (policy != "nothing_saveable")


def test_a_policy_that_moves_to_the_host_keeps_the_product():
    offload = jax.checkpoint_policies.offload_dot_with_no_batch_dims
    policy = offload("device", "pinned_host")
    func = jax.checkpoint(mpx.autocast(layer, target=CPU), policy=policy)
    expected = on(CPU)(WEIGHTS, X)
    found = jax.jit(jax.grad(func))(WEIGHTS, X)
    assert relative_error(found["a"], expected["a"]) < 1e-2


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_shardings_are_kept(kind):
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind, kind))
    step = jax.jit(on(CPU))
    expected = step(WEIGHTS, X)
    with jax.set_mesh(mesh):
        x = jax.device_put(X, NamedSharding(mesh, P("data")))
        specs = {"a": P(None, "model"), "b": P("model", None)}
        if kind is AxisType.Explicit:  # or the layer would have to say how it sums
            specs = {"a": P(None, None), "b": P(None, None)}
        put = lambda k, s: jax.device_put(WEIGHTS[k], NamedSharding(mesh, s))  # noqa: E731
        w = {k: put(k, s) for k, s in specs.items()}
        found, text = step(w, x), step.lower(w, x).compile().as_text()
    assert "all-gather" not in text
    for name, spec in specs.items():
        assert found[name].sharding.is_equivalent_to(NamedSharding(mesh, spec), 2)
        assert relative_error(found[name], expected[name]) < 5e-3


def test_in_shard_map():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    x = jax.random.normal(jax.random.key(4), (8, 16, 64))

    def by_hand(target):
        func = mpx.autocast(lambda *a: lax.pmean(layer(*a), "data"), target=target)
        specs = {"in_specs": (P(), P("data")), "out_specs": P()}
        mapped = jax.shard_map(func, mesh=mesh, **specs)
        return jax.tree.leaves(jax.jit(jax.grad(mapped))(WEIGHTS, x))

    for a, b in zip(by_hand(CPU), by_hand("sm_90"), strict=True):
        assert relative_error(a, b) < 5e-3


def test_within_another_autocast_and_switched_off():
    """A program that was emitted for a CPU is one like others."""
    exact = jax.grad(layer)(WEIGHTS, X)
    for dtype in ("float32", "float16"):
        found = mpx.autocast(on(CPU), dtype, target=CPU)(WEIGHTS, X)
        assert relative_error(found["a"], exact["a"]) < 1e-2


def test_without_jit_and_exported():
    with jax.disable_jit():
        eager = on(CPU)(WEIGHTS, X)
    assert relative_error(eager["a"], on(CPU)(WEIGHTS, X)["a"]) < 5e-3
    step = jax.jit(on(CPU))
    found = jax.export.export(step)(WEIGHTS, X).call(WEIGHTS, X)
    assert relative_error(found["a"], step(WEIGHTS, X)["a"]) < 5e-3


def test_lines_and_counts_are_those_of_the_product():
    def products(target):
        operations = mpx.explain(on(target))(WEIGHTS, X).operations
        products = [o for o in operations if o.primitive == "dot_general"]
        return sorted((o.flops, o.source, str(o.precision)) for o in products)

    assert len(products(CPU)) == 5
    assert products(CPU) == products("sm_90")


def test_infinity_and_nan_pass():
    x = X.at[0, 0, 0].set(jnp.inf).at[1, 0, 0].set(jnp.nan)
    found = mpx.autocast(lambda x: x @ WEIGHTS["a"], target=CPU)(x)
    assert jnp.isinf(found[0, 0]).any() and jnp.isnan(found[1, 0]).all()
    assert jnp.isfinite(found[2:]).all()
