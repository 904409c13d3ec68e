"""The way to the kernel of attention and back, with a stub in the place of cuDNN's."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpx.nn
from mpx.nn import _attention_kernel

from ..autocast.counting import equations, primitives, relative_error
from ..helpers import TOLERANCE, slow_but
from . import stub_kernel
from .attention_cases import BATCH, CASES, HEADS, KEYS, LENGTH, SIZE
from .cases import kept_arrays
from .test_attention import assert_close, cotangent_for, value_and_gradients

attend = mpx.nn.dot_product_attention
kernel = functools.partial(attend, implementation="cudnn")
products = functools.partial(attend, implementation="xla")


@pytest.fixture(autouse=True)
def stub(monkeypatch):
    monkeypatch.setattr(_attention_kernel, "call", stub_kernel.call)


def arrays_of(name="groups", dtype="bfloat16"):
    return CASES[name].arrays(dtype)


def loss(attention, **said):
    def of(arrays):
        out = attention(**arrays, **said).astype(jnp.float32)
        return jnp.sum(jnp.sin(out) * out)

    return of


def gradient(attention, arrays, **said):
    return jax.jit(jax.grad(loss(attention, **said)))(arrays)


def assert_as_by_products(make, *args, tolerance=1e-2):
    """A derivative by the kernel is that by products; `make` takes either."""
    found, expected = (jax.jit(make(f))(*args) for f in (kernel, products))
    assert relative_error(found, expected) < tolerance


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("one group", "bfloat16"),
        ("shared bias", "float16"),
        ("blind and causal", "float16"),
        ("lengths and a bias", "bfloat16"),
        ("causal window", "float16"),
        ("causal, fewer keys", "bfloat16"),
    ],
)
def test_values_and_gradients_are_exact(name, dtype):
    case = CASES[name]
    arrays, g = case.arrays(dtype), cotangent_for(dtype)
    out, _, gradients = case.exact(arrays, g)
    call = lambda **x: kernel(**x, **case.said())  # noqa: E731
    found, pulled = value_and_gradients(call, arrays, g)
    assert_close((found, *pulled), (out, *gradients), TOLERANCE[dtype] * 2)


def test_the_residual_is_the_kernels_float32():
    arrays = arrays_of("causal", "float16")
    found = kernel(**arrays, is_causal=True, return_residual=True)
    expected = products(**arrays, is_causal=True, return_residual=True)
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=1e-6)


@pytest.mark.parametrize("name", ["plain", "mask of keys", "shared bias"])
def test_kept_are_operands_the_result_and_a_number_for_each_row(name):
    arrays = arrays_of(name)
    query, rows = arrays["query"].shape, (BATCH, HEADS, LENGTH)
    rest = {n: arrays[n] for n in ("mask",) if n in arrays}
    floats = {n: x for n, x in arrays.items() if n != "mask"}
    kept = kept_arrays(lambda x: kernel(**x, **rest), floats)
    expected = [(x.dtype.name, x.shape) for x in arrays.values()]
    assert kept == sorted([*expected, ("bfloat16", query), ("float32", rows)])


# --- Where it is used -----------------------------------------------------------------


def lowered(func, platform, *args):
    traced = jax.jit(func).trace(*args)
    return traced.lower(lowering_platforms=(platform,)).as_text()


def test_the_platform_is_chosen_at_lowering():
    """The same traced program is compiled for what it runs on, here or elsewhere."""
    step, arrays = jax.grad(loss(attend)), arrays_of()
    on_cuda, on_cpu = (lowered(step, p, arrays) for p in ("cuda", "cpu"))
    assert "@_forward" in on_cuda and "@_backward" in on_cuda
    assert "@_forward" not in on_cpu and "@_backward" not in on_cpu
    found, expected = (jax.tree.leaves(gradient(f, arrays)) for f in (attend, products))
    assert_close(found, [np.float64(x) for x in expected], 1e-2)


@pytest.mark.parametrize(
    ("target", "is_used"), [("sm_80", True), ("sm_75", False), ("v5e", False)]
)
def test_the_target_says_whether_there_is_a_kernel(target, is_used):
    func = mpx.autocast(lambda x: attend(x, x, x), target=target)
    x = jnp.ones((1, 4, 2, 8))
    assert ("@_forward" in lowered(func, "cuda", x)) == is_used
    report = mpx.explain(func)(x).table(width=None)
    assert (f"one cuDNN kernel on {target.lower()}" in report) == is_used


def test_a_float32_model_takes_no_kernel_on_its_own():
    arrays = arrays_of(dtype="float32")
    assert stub_kernel.FORWARD not in primitives(loss(attend), arrays)


DROPOUT = {"dropout_rate": 0.5, "dropout_key": jax.random.key(0)}


@pytest.mark.parametrize(
    ("said", "dtype", "why"),
    [
        ({}, "float32", "needs float16 or bfloat16, not float32"),
        (DROPOUT, "bfloat16", "not a function of a key"),
    ],
    ids=["float32", "dropout"],
)
def test_it_is_an_error_to_ask_for_what_there_is_not(said, dtype, why):
    with pytest.raises(ValueError, match=f"kernel cannot be used: .*{why}"):
        kernel(**arrays_of(dtype=dtype), **said)


def test_what_jax_refuses_is_done_by_products(monkeypatch):
    def refuse(*args, **kwargs):
        raise NotImplementedError("The head dim must be <= 128\nand more.")

    monkeypatch.setattr(_attention_kernel, "call", refuse)
    arrays = arrays_of()
    np.testing.assert_array_equal(attend(**arrays), products(**arrays))
    with pytest.raises(ValueError, match="used: The head dim must be <= 128. Omit"):
        kernel(**arrays)


def test_a_kernel_that_keeps_more_is_not_used(monkeypatch):
    def call(*args):
        out = stub_kernel.call(*args)
        return out * jnp.cos(out)  # keeps another array of what the kernel computes

    monkeypatch.setattr(_attention_kernel, "call", call)
    with pytest.raises(ValueError, match="version of JAX keeps 4 arrays"):
        kernel(**arrays_of())


# --- Transforms -----------------------------------------------------------------------


def stacked(axes, name="shared bias", size=3):
    """Operands of several calls, with an axis for them where `axes` has one."""
    found = {}
    for seed, (operand, axis) in enumerate(axes.items()):
        several = [CASES[name].arrays("bfloat16", 7 * seed + i) for i in range(size)]
        xs = [x[operand] for x in several]
        found[operand] = xs[0] if axis is None else jnp.stack(xs, axis)
    return found


MAPPED = {
    "other axes": {"query": 2, "key": 1, "value": 4},
    "shared keys": {"query": 0, "key": None, "value": None},
    "shared query": {"query": None, "key": 0, "value": None},
    "shared bias": {"query": 0, "key": 0, "value": 0, "bias": None},
    "bias alone": {"query": None, "key": None, "value": None, "bias": 1},
}


@pytest.mark.parametrize(
    "axes", slow_but([MAPPED[n] for n in ("other axes", "bias alone")], MAPPED.values())
)
def test_vmap_is_one_call_with_all_batches_together(axes):
    arrays = stacked(axes)

    def mapped(attention):
        return jax.vmap(lambda x: loss(attention, is_causal=True)(x), (axes,))

    def total(attention):
        return lambda x: jnp.sum(mapped(attention)(x))

    names = primitives(jax.grad(total(kernel)), arrays)
    assert names.count(stub_kernel.FORWARD) == names.count(stub_kernel.BACKWARD) == 1

    assert_as_by_products(lambda f: jax.value_and_grad(total(f)), arrays)
    each = lambda f: jax.vmap(jax.grad(loss(f, is_causal=True)), (axes,))  # noqa: E731
    assert_as_by_products(each, arrays)


def test_masks_and_lengths_under_vmap():
    case = CASES["lengths"]
    arrays = {n: jnp.stack([x, x]) for n, x in case.arrays("bfloat16").items()}
    mask = CASES["blind"].arrays("bfloat16")["mask"]
    lengths = jnp.array([[2, 6], [0, 4]], jnp.int32)

    def call(attention):
        def one(x, lengths):
            return loss(attention, mask=mask, key_value_seq_lengths=lengths)(x)

        return jax.grad(lambda x: jnp.sum(jax.vmap(one)(x, lengths)))

    assert_as_by_products(call, arrays)


def in_scan(attention, arrays):
    key, value = arrays["key"], arrays["value"]

    def body(query, _):
        return attention(query, key, value), None

    return jax.lax.scan(body, arrays["query"], None, length=3)[0].astype(jnp.float32)


TRANSFORMS = {
    "remat": lambda attention, arrays: jax.checkpoint(loss(attention))(arrays),
    "scan": in_scan,
    "cond": lambda attention, arrays: jax.lax.cond(
        arrays["query"][0, 0, 0, 0] < 9, loss(attention), lambda _: 0.0, arrays
    ),
}


@pytest.mark.parametrize("name", slow_but(["remat", "scan"], TRANSFORMS))
def test_transforms(name):
    def total(attention):
        return lambda x: jnp.sum(TRANSFORMS[name](attention, x))

    arrays = arrays_of("plain")
    assert_as_by_products(lambda f: jax.grad(total(f)), arrays)
    assert stub_kernel.BACKWARD in primitives(jax.grad(total(kernel)), arrays)


def test_a_scan_keeps_no_probabilities():
    step = jax.grad(lambda x: jnp.sum(in_scan(attend, x)))
    jaxpr = jax.make_jaxpr(step)(arrays_of("plain"))
    scan = next(e for e in jaxpr.eqns if e.primitive.name == "scan")
    sizes = [v.aval.size for v in scan.outvars]
    assert max(sizes) == 3 * BATCH * LENGTH * HEADS * SIZE
    assert 3 * BATCH * HEADS * LENGTH * KEYS not in sizes


@pytest.mark.slow
def test_derivatives_of_derivatives_are_those_of_the_products():
    arrays = arrays_of("shared bias", "float16")

    def penalty(attention):
        def of(arrays):
            found = jax.grad(loss(attention, is_causal=True))(arrays)
            return sum(jnp.sum(x.astype(jnp.float32) ** 2) for x in found.values())

        return jax.grad(of)

    def along(attention):
        step = jax.grad(loss(attention, is_causal=True))
        return lambda x: jax.jvp(step, (x,), (jax.tree.map(jnp.ones_like, x),))[1]

    assert_as_by_products(penalty, arrays, tolerance=2e-2)
    assert_as_by_products(along, arrays, tolerance=2e-2)


def test_forward_mode_says_what_to_write():
    arrays = arrays_of()
    with pytest.raises(TypeError, match='no forward-mode.*implementation="xla"'):
        jax.jvp(loss(attend), (arrays,), (arrays,))
    value, dot = jax.jvp(loss(products), (arrays,), (arrays,))
    assert jnp.isfinite(value) and jnp.isfinite(dot)


# --- Meshes ---------------------------------------------------------------------------


def mesh_of(kind):
    devices = np.array(jax.devices()).reshape(2, 2, 2)[0]
    return jax.sharding.Mesh(devices, ("data", "model"), axis_types=(kind,) * 2)


@pytest.mark.parametrize("check_vma", slow_but([True], [True, False]))
def test_what_all_devices_share_has_the_sum_of_their_gradients(check_vma):
    """The kernel says of each gradient that it varies as its operand does."""
    P = jax.sharding.PartitionSpec
    arrays = arrays_of("shared bias")
    names = ("query", "key", "value", "bias")
    rows = P("data", None, "model")

    def total(attention):
        mapped = jax.shard_map(
            lambda *xs: attention(**dict(zip(names, xs, strict=True))),
            mesh=mesh_of(jax.sharding.AxisType.Auto),
            in_specs=(rows, rows, rows, P(None, "model")),
            out_specs=rows,
            check_vma=check_vma,
        )
        out = lambda x: mapped(*(x[n] for n in names)).astype(jnp.float32)  # noqa: E731
        return jax.grad(lambda x: jnp.sum(jnp.sin(out(x))))

    assert_as_by_products(total, arrays)


def test_explicit_axes():
    kind = jax.sharding.AxisType.Explicit
    P = jax.sharding.PartitionSpec
    mesh, arrays = mesh_of(kind), arrays_of("plain")
    expected = gradient(products, arrays, is_causal=True)
    with jax.set_mesh(mesh):
        sharding = jax.sharding.NamedSharding(mesh, P("data", None, "model"))
        placed = jax.device_put(arrays, sharding)
        found = gradient(kernel, placed, is_causal=True)
        assert all(x.sharding.is_equivalent_to(sharding, 4) for x in found.values())
    assert relative_error(found, expected) < 1e-2


# --- Under autocast -------------------------------------------------------------------


def in_float32(name="one group"):
    case = CASES[name]
    return loss(attend, **case.said()), case.arrays("float32")


def dtypes_of(func, *args, primitive=stub_kernel.FORWARD):
    return [
        str(e.invars[0].aval.dtype)
        for e, _ in equations(jax.make_jaxpr(func)(*args))
        if e.primitive.name == primitive
    ]


@pytest.mark.parametrize("dtype", slow_but(["float16"], ["bfloat16", "float16"]))
def test_a_float32_model_is_cast_and_takes_the_kernel(dtype):
    func, arrays = in_float32()
    step = jax.grad(mpx.autocast(func, dtype))
    assert dtypes_of(step, arrays) == [dtype]
    assert dtypes_of(step, arrays, primitive=stub_kernel.BACKWARD) == [dtype]
    found = jax.jit(step)(arrays)
    assert {x.dtype.name for x in found.values()} == {"float32"}
    assert relative_error(found, jax.jit(jax.grad(func))(arrays)) < TOLERANCE[dtype]


def under_vmap(arrays):
    return jnp.sum(jax.vmap(lambda x: attend(**x, is_causal=True))(arrays))


PROGRAMS = {
    "vmap": under_vmap,
    "scan": lambda x: jnp.sum(in_scan(attend, x)),
    "remat of jit": lambda x: jnp.sum(
        jax.checkpoint(jax.jit(lambda x: attend(**x)))(x)
    ),
    "half in it": lambda x: jnp.sum(
        attend(**mpx.cast_tree(x, jnp.bfloat16)).astype(jnp.float32)
    ),
    "autocast in it": lambda x: jnp.sum(mpx.autocast(lambda x: attend(**x))(x)),
}


@pytest.mark.parametrize("name", slow_but(["vmap", "half in it"], PROGRAMS))
def test_it_is_found_wherever_it_stands(name):
    func, arrays = PROGRAMS[name], arrays_of("plain", "float32")
    step = jax.grad(mpx.autocast(func))
    assert dtypes_of(step, arrays, primitive=stub_kernel.BACKWARD) == ["bfloat16"]
    expected = jax.jit(jax.grad(func))(arrays)
    assert relative_error(jax.jit(step)(arrays), expected) < 2e-2


def test_a_gradient_within_keeps_the_products():
    """What has been differentiated is a program like any other."""
    func, arrays = in_float32()
    step = mpx.autocast(jax.grad(func))
    assert stub_kernel.BACKWARD not in primitives(step, arrays)
    expected = jax.jit(jax.grad(func))(arrays)
    assert relative_error(jax.jit(step)(arrays), expected) < 2e-2


def test_regions_and_rules_decide():
    func, arrays = in_float32()
    name = "dot_product_attention"

    def switched_off(arrays):
        with mpx.autocast(enabled=False):
            return func(arrays)

    assert dtypes_of(mpx.autocast(switched_off), arrays) == []
    for precision in (mpx.Precision.FULL, mpx.Precision.DECLARED):
        rules = mpx.Rules(mpx.Rule(precision, primitive=name))
        step = mpx.autocast(func, rules=rules, strict=True)
        assert dtypes_of(step, arrays) == []
    seen = []
    rules = mpx.Rules(mpx.Rule(mpx.Precision.HALF, when=seen.append, primitive=name))
    mpx.autocast(func, rules=rules)(arrays)
    (candidate,) = seen
    assert candidate.primitive == name and candidate.kind.value == "half"
    assert candidate.multiplications == 2 * BATCH * HEADS * LENGTH * KEYS * SIZE


def test_a_rule_may_cast_its_operands():
    func, arrays = in_float32()

    def rewrite(candidate, operands):
        return [x.astype(jnp.float16) for x in operands], candidate.equation.params

    rules = mpx.Rules(mpx.Rule(rewrite, primitive="dot_product_attention"))
    assert dtypes_of(mpx.autocast(func, rules=rules), arrays) == ["float16"]


def test_explain_names_the_kernel_and_counts_its_products():
    func, arrays = in_float32()
    step = jax.grad(mpx.autocast(func, target="sm_90"))
    report = mpx.explain(step)(arrays)
    products = {o.primitive: o.flops for o in report.operations if o.flops}
    assert "dot_general" not in products
    size = 2 * BATCH * HEADS * LENGTH * KEYS * SIZE
    assert products[stub_kernel.FORWARD] == 2 * size
    assert products[stub_kernel.BACKWARD] == 5 * size
    table = report.table(width=None)
    assert "half: a matmul or convolution; one cuDNN kernel on sm_90" in table
    assert "part: of dot_product_attention" in table
    assert not report.findings


def test_explain_without_a_target_counts_what_the_default_device_computes():
    func, arrays = in_float32()
    report = mpx.explain(mpx.autocast(func))(arrays)
    names = [o.primitive for o in report.operations]
    assert names.count("dot_general") == 2 and stub_kernel.FORWARD not in names
    where = "one cuDNN kernel on CUDA, two matmuls elsewhere"
    assert where in report.table(width=None)
    count = sum(o.flops for o in report.operations if o.primitive == "dot_general")
    assert count == 4 * BATCH * HEADS * LENGTH * KEYS * SIZE


def test_jax_call_of_the_kernel_names_ours():
    def func(x):
        return jax.nn.dot_product_attention(x, x, x, implementation="cudnn")

    x = jnp.ones((1, 4, 2, 8))
    match = r"implementation=.cudnn.*Use `mpx.nn.dot_product_attention"
    with pytest.raises((NotImplementedError, RuntimeError), match=match):
        mpx.autocast(func)(x)
