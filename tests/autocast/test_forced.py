"""What `force_full_precision` keeps, and what it traces how often."""

import functools
import itertools

import equinox as eqx
import flax.linen as linen
import haiku
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import mpx

from ..helpers import HALF, assert_same_bits, slow_but
from ..nn.cases import kept_arrays
from .counting import equations

ROWS, WIDTH = 16, 32
X = jax.random.normal(jax.random.key(0), (ROWS, WIDTH))


def norm(x):
    centred = x - jnp.mean(x, -1, keepdims=True)
    return centred / jnp.sqrt(jnp.mean(jnp.square(centred), -1, keepdims=True) + 1e-6)


def summed(func, *rest):
    weights = jnp.cos(jnp.arange(X.size, dtype=jnp.float32)).reshape(X.shape)
    return lambda x: jnp.sum(func(x, *rest).astype(jnp.float32) * weights)


def labelled_loss(x):
    labels = jnp.arange(ROWS)
    return optax.softmax_cross_entropy_with_integer_labels(x, labels)[:, None]


FUNCTIONS = {
    "norm": lambda: norm,
    "softmax": lambda: jax.nn.softmax,
    "softmax of columns": lambda: functools.partial(jax.nn.softmax, axis=0),
    "a lambda": lambda: lambda x: jnp.tanh(x) * jnp.exp(x),
    "a vmapped layer": lambda: jax.vmap(eqx.nn.LayerNorm(WIDTH)),
    "a loss of labels": lambda: labelled_loss,
}


QUICK = [("norm", "float16"), ("softmax", "bfloat16"), ("a lambda", "bfloat16")]
QUICK += [("a vmapped layer", "float16")]


@pytest.mark.parametrize(
    ("name", "dtype"),
    slow_but(QUICK, zip(FUNCTIONS, itertools.cycle(HALF), strict=False)),
)
def test_values_and_gradients_are_those_of_casting(name, dtype):
    func, x = FUNCTIONS[name](), X.astype(dtype)
    forced = mpx.force_full_precision(func, dtype)
    cast = mpx.cast_function(func, "float32", dtype)
    # Operation by operation, since compilers add up in another order.
    with jax.disable_jit():
        found, expected = (jax.value_and_grad(summed(f))(x) for f in (forced, cast))
    assert_same_bits(found, expected)
    big = lambda f: {d for d, shape in kept_arrays(f, x) if shape == X.shape}  # noqa: E731
    found, wide = big(forced), big(cast)
    assert "float32" not in found and "float32" in wide


@pytest.mark.parametrize("name", ["norm", "a vmapped layer"])
def test_under_transforms(name):
    x = X.astype(jnp.bfloat16)
    func = mpx.force_full_precision(FUNCTIONS[name](), x.dtype)
    gradient = jax.jit(jax.grad(summed(func)))
    many = jnp.stack([x, 2 * x])
    slow = [jax.jit(jax.grad(jax.checkpoint(summed(func))))(y) for y in many]
    for found in (jax.vmap(gradient)(many), jax.lax.map(gradient, many), slow):
        for one, y in zip(found, many, strict=True):
            pair = (g.astype(np.float32) for g in (one, gradient(y)))
            np.testing.assert_allclose(*pair, atol=2e-2)
    _, tangent = jax.jvp(summed(func), (x,), (x,))
    assert jnp.isfinite(tangent)


traced = []


def counted_norm(x):
    traced.append(x.shape)
    return norm(x)


CLOSURES = {
    "softmax": lambda b: lambda x: jax.nn.softmax(x + b),
    "norm": lambda b: lambda x: norm(x) * b,
    "gelu": lambda b: lambda x: jax.nn.gelu(x + b),
}


def loss_of_closure(name, b, force=mpx.force_full_precision):
    return summed(force(CLOSURES[name](b)))(X.astype(jnp.bfloat16))


@functools.cache
def gradient_of_closure(name):
    cast = lambda f: lambda x: f(x.astype(jnp.float32))  # noqa: E731
    return jax.jit(jax.grad(lambda b: loss_of_closure(name, b, cast)))(jnp.cos(X))


def scanned(f):
    return lambda b: jax.lax.scan(lambda c, b: (c + f(b), None), 0.0, b[None])[0]


@pytest.mark.parametrize(
    ("name", "transform"),
    [
        ("softmax", lambda f: f),
        ("norm", jax.jit),
        ("gelu", jax.checkpoint),
        ("softmax", scanned),
        ("norm", lambda f: lambda b: jax.vmap(f)(b[None])[0]),
    ],
    ids=["plain", "jit", "remat", "scan", "vmap"],
)
def test_a_function_may_close_over_a_weight(name, transform):
    """Which is differentiated, in half precision or not."""
    forced = transform(functools.partial(loss_of_closure, name))
    run = jax.jit(lambda b: [d(forced)(b) for d in (jax.grad, jax.jacfwd)])
    for got in run(jnp.cos(X)):
        np.testing.assert_allclose(got, gradient_of_closure(name), atol=2e-2)


def test_equal_layers_are_traced_once():
    def layers(x):
        for _ in range(5):
            x = mpx.force_full_precision(counted_norm, x.dtype)(x)
        return x

    x = X.astype(jnp.float16)
    lowered = jax.jit(jax.grad(summed(layers))).lower(x)
    assert traced == [X.shape]
    assert lowered.as_text().count("stablehlo.sqrt") <= 2  # forward, and again backward
    jax.jit(layers).lower(x[:4])
    assert traced == [X.shape, (4, WIDTH)]


def test_what_layers_have_in_common_is_not_their_weights():
    first, second = eqx.nn.LayerNorm(WIDTH), eqx.nn.LayerNorm(WIDTH)
    second = eqx.tree_at(lambda n: n.weight, second, 3 * second.weight)

    @jax.jit
    def both(layers, x):
        return [mpx.force_full_precision(n, x.dtype)(x) for n in layers]

    a, b = both((first, second), X[0].astype(jnp.float16))
    np.testing.assert_allclose(3 * a, b, rtol=2e-3)


@pytest.mark.parametrize("numbers", [(2, 2.0), (0.0, -0.0), (1, True)], ids=str)
def test_numbers_that_are_equal_but_not_the_same(numbers):
    def copied(x, number):
        return jnp.copysign(x, number) if isinstance(number, float) else x * 2

    x = X.astype(jnp.float16)
    for number in numbers:
        expected = copied(x.astype(jnp.float32), number)
        for func in (
            lambda x, n=number: mpx.force_full_precision(copied, "float32")(x, n),
            mpx.force_full_precision(functools.partial(copied, number=number), "f32"),
        ):
            assert_same_bits(jax.jit(func)(x), expected)


def test_products_are_not_repeated():
    w = jnp.ones((WIDTH, WIDTH))
    func = mpx.force_full_precision(lambda x: jax.nn.softmax(x @ w), "float32")
    found = equations(jax.make_jaxpr(jax.grad(summed(func)))(X.astype(jnp.bfloat16)))
    assert sum(e.primitive.name == "dot_general" for e, _ in found) == 2


@pytest.mark.parametrize("target", ["tpu v5e", "h100"])
def test_on_a_tpu_jax_keeps_what_it_likes(target):
    x = X.astype(jnp.bfloat16)
    for residuals in (None, "small", "fast"):
        said = {} if residuals is None else {"residuals": residuals}
        with mpx.autocast(target=target, ambient=True, **said):
            kept = kept_arrays(mpx.force_full_precision(norm, x.dtype), x)
        keeps_half = residuals == "small" or (residuals is None and target == "h100")
        assert (("float32", X.shape) in kept) != keeps_half


def test_what_is_traced_in_float32_is_left_alone():
    func = mpx.force_full_precision(norm, "float32")
    assert str(jax.make_jaxpr(func)(X)) == str(jax.make_jaxpr(norm)(X))


def test_a_result_of_any_kind():
    def func(x):
        return {"sum": jnp.sum(x), "name": "x", "shape": x.shape, "none": None}

    seen = []

    @jax.jit
    def run(x):
        seen.append(mpx.force_full_precision(func, "float32")(x))
        return seen[0]["sum"]

    run(X.astype(jnp.float16))
    seen[0].pop("sum")
    assert seen[0] == {"name": "x", "shape": X.shape, "none": None}


# --- What is no program ---------------------------------------------------------------


def test_a_function_that_looks_at_values_runs_as_it_is():
    def func(x):
        return x if x.sum() > 1e9 else jnp.exp(x)

    x = X.astype(jnp.float16)
    found = jax.grad(summed(mpx.force_full_precision(func, "float32")))(x)
    assert_same_bits(found, jax.grad(summed(mpx.cast_function(func, "float32")))(x))


def test_an_error_is_the_function_s_own():
    def func(x):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        jax.jit(mpx.force_full_precision(func, "float32"))(X.astype(jnp.float16))


def test_nothing_of_a_call_is_kept():
    @jax.jit
    def run(w, x):
        def scaled(x):
            return jax.nn.softmax(x * w)

        return jax.grad(summed(mpx.force_full_precision(scaled, "float32")))(x)

    with jax.checking_leaks():
        run(jnp.ones(()), X.astype(jnp.float16))
        layer = mpx.force_full_precision(eqx.nn.LayerNorm(WIDTH), "float32")
        jax.jit(lambda x: layer(x))(X[0].astype(jnp.float16))


def test_an_object_of_which_jax_knows_nothing_runs_as_it_is():
    class Counted:
        def __init__(self):
            self.sums = []

        def __call__(self, x):
            self.sums.append(jnp.sum(x))
            return jnp.exp(x) * jnp.tanh(x)

    def loss(x):
        layer = Counted()
        y = mpx.force_full_precision(layer, "float32")(x)
        return jnp.sum(y) + layer.sums[0]  # what it keeps is not lost

    assert jnp.isfinite(jax.jit(jax.grad(loss))(X.astype(jnp.float16))).all()


def test_a_function_of_autocast_s_runs_as_it_is():
    product = lambda x: jnp.exp(x @ jnp.ones((WIDTH, WIDTH)))  # noqa: E731
    x = X.astype(jnp.float16)
    for func in (product, mpx.autocast(product)):
        found = jax.jit(mpx.force_full_precision(func, "float32"))(x)
        np.testing.assert_allclose(found, product(x.astype(jnp.float32)), rtol=0.2)


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_on_several_devices(kind):
    kind = getattr(jax.sharding.AxisType, kind)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))
    x, forced = X.astype(jnp.bfloat16), mpx.force_full_precision(norm, jnp.bfloat16)
    gradient = jax.grad(summed(forced))
    expected = jax.jit(gradient)(x)
    with jax.set_mesh(mesh):
        sharded = jax.device_put(x, jax.NamedSharding(mesh, P("data")))
        assert_same_bits(jax.jit(gradient)(sharded), expected)
        if kind is jax.sharding.AxisType.Auto:
            both = jax.shard_map(forced, in_specs=P("data"), out_specs=P("data"))
            assert_same_bits(jax.jit(jax.grad(summed(both)))(sharded), expected)


def test_gradients_of_many_uses_are_summed_in_full_precision():
    class Twice(eqx.Module):
        norm: eqx.nn.LayerNorm

        def __call__(self, x):
            forced = mpx.force_full_precision(self.norm, x.dtype)
            first, second = (forced(y).astype(jnp.float32) for y in (x, jnp.sin(x)))
            return jnp.sum(first * second)

    model = Twice(eqx.nn.LayerNorm(WIDTH))
    found, policy = [], "params=float32,compute=bfloat16,output=float32"
    for residuals in ("small", "fast"):
        with mpx.autocast(residuals=residuals, ambient=True):
            gradient = mpx.filter_grad(
                lambda model, x: model(x),
                mpx.NoLossScaling(skip=False),
                policy=policy,
                accumulate_dtype="float32",
            )
            found.append(eqx.filter_jit(gradient)(model, X[0]).grads)
    for a, b in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-2, atol=1e-2)


class Linen(linen.Module):
    @linen.compact
    def __call__(self, x):
        x = mpx.force_full_precision(linen.LayerNorm(), x.dtype)(x)
        x = mpx.force_full_precision(lambda x: linen.LayerNorm()(x), x.dtype)(x)
        x = mpx.force_full_precision(functools.partial(jax.nn.softmax, axis=0))(x)
        return mpx.force_full_precision(linen.BatchNorm(False), x.dtype)(x)


class Softmax(linen.Module):
    def __call__(self, x):
        return mpx.force_full_precision(jax.nn.softmax, x.dtype)(x)


def some_differ(a, b):
    return not jax.tree.all(jax.tree.map(jnp.array_equal, a, b))


@pytest.mark.third_party
def test_modules_of_flax_linen():
    x = X.astype(jnp.float16)
    variables = jax.jit(Linen().init)(jax.random.key(0), x)
    apply = jax.jit(functools.partial(Linen().apply, mutable=["batch_stats"]))
    found, state = apply(variables, x)
    assert found.dtype == np.float16
    assert set(variables["params"]) == {"LayerNorm_0", "LayerNorm_1", "BatchNorm_0"}
    # A function of JAX's own is a program there, too.
    kept = kept_arrays(Softmax().apply, {}, x)
    assert ("float32", X.shape) not in kept and ("float16", X.shape) in kept
    assert some_differ(variables["batch_stats"], state["batch_stats"])


class Nnx(nnx.Module):
    def __init__(self):
        self.norm = nnx.BatchNorm(WIDTH, rngs=nnx.Rngs(0))

    def __call__(self, x):
        x = mpx.force_full_precision(lambda x: self.norm(x), x.dtype)(x)
        return mpx.force_full_precision(self.norm, x.dtype)(x)


@pytest.mark.third_party
def test_modules_of_flax_nnx():
    model = Nnx()
    nnx.jit(lambda model, x: model(x))(model, X.astype(jnp.float16))
    assert not jnp.array_equal(model.norm.mean[...], jnp.zeros(WIDTH))


@pytest.mark.third_party
def test_modules_of_haiku():
    def forward(x):
        norm = haiku.LayerNorm(-1, True, True)
        x = mpx.force_full_precision(norm, x.dtype)(x)
        batch_norm = lambda x: haiku.BatchNorm(True, True, 0.9)(x, True)  # noqa: E731
        return mpx.force_full_precision(batch_norm)(x)

    func, x = haiku.transform_with_state(forward), X.astype(jnp.float16)
    params, state = jax.jit(func.init)(jax.random.key(0), x)
    assert len(params) == 2
    _, after = jax.jit(func.apply)(params, state, None, x)
    assert some_differ(state, after)


def test_under_autocast():
    def loss(w, x):
        x = mpx.force_full_precision(norm, x.dtype)((x @ w).astype(jnp.bfloat16))
        return jnp.sum(jnp.square(x.astype(jnp.float32)))

    found = jax.make_jaxpr(jax.grad(mpx.autocast(loss)))(jnp.eye(WIDTH), X)
    products = [e for e, _ in equations(found) if e.primitive.name == "dot_general"]
    assert {a.aval.dtype.name for e in products for a in e.invars} == {"bfloat16"}


def test_in_a_report():
    loss = lambda x: jnp.sum(mpx.force_full_precision(jax.nn.softmax, "f32")(x))  # noqa: E731
    report = mpx.explain(loss)(X.astype(jnp.float16))
    (exponential,) = [o for o in report.operations if o.primitive == "exp"]
    assert exponential.precision == "float32"
    assert exponential.reason.startswith("cast to float32")
    assert not exponential.reason.endswith(" at ")
    assert "test_forced.py" in exponential.source
