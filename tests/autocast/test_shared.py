"""What a product gave and several read: their gradients are summed in float32.

The gradient of a cross entropy by its logits is p - 1 at the label: p by way of the
softmax, -1 by way of the lookup. Rounded to bfloat16 before they meet, they are 1 and
-1 where p is 0.999, and nothing is left of what such a token teaches.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.nn import logsumexp
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import mpx
from rigs.sweep.ideal import make_ideal

from ..helpers import slow_but
from .counting import jitted, relative_error

pytestmark = pytest.mark.third_party
ROWS, CLASSES = 64, 10
SHARDING = NamedSharding(Mesh(np.array(jax.devices()[:4]), ("data",)), P("data"))
LABELS = np.arange(ROWS) % CLASSES
ONE_HOT = np.eye(CLASSES, dtype="f4")[LABELS]


def sure():
    """Weights, and rows whose logits are about 9 for the label and 0 for others."""
    noise = jax.random.normal(jax.random.key(0), (ROWS, CLASSES)) / 100
    return 9 * jnp.eye(CLASSES), ONE_HOT + noise


def normalizers(y):
    return logsumexp(y, -1)


def picked(y):
    return jnp.take_along_axis(y, LABELS[:, None], 1)[:, 0]


@jax.custom_jvp
def by_jvp_rule(y):
    return normalizers(y)


by_jvp_rule.defjvp(lambda x, dot: jax.jvp(normalizers, x, dot))


@jax.custom_vjp
def by_vjp_rule(y):
    return normalizers(y)


by_vjp_rule.defvjp(
    lambda y: (normalizers(y), y), lambda y, g: (jax.nn.softmax(y) * g[:, None],)
)


def on_devices(y):
    mesh, spec = SHARDING.mesh, SHARDING.spec
    return jax.shard_map(normalizers, mesh=mesh, in_specs=spec, out_specs=spec)(y)


def optax_cross_entropy(y):
    return optax.softmax_cross_entropy_with_integer_labels(y, LABELS)


NORMALIZERS = {
    "plain": normalizers,
    "by hand": lambda y: (
        jnp.log(jnp.sum(jnp.exp(y - y.max(-1, keepdims=True)), -1)) + y.max(-1)
    ),
    "jit": jax.jit(normalizers),
    "checkpoint": jax.checkpoint(normalizers),
    "vmap of checkpoint": jax.vmap(jax.checkpoint(logsumexp)),
    "cond": lambda y: jax.lax.cond(y[0, 0] < 99, normalizers, lambda y: y.sum(-1), y),
    "rows of a scan": lambda y: jax.lax.map(logsumexp, y),
    "constant of a scan": lambda y: jax.lax.scan(
        lambda c, _: (c + normalizers(y) / 2, None), jnp.zeros(ROWS), length=2
    )[0],
    "JVP rule": by_jvp_rule,
    "VJP rule": by_vjp_rule,
    "shard_map": on_devices,
    "name": lambda y: normalizers(checkpoint_name(y, "logits")),
    "sharding": lambda y: normalizers(jax.lax.with_sharding_constraint(y, SHARDING)),
    "reshape": lambda y: normalizers(y.reshape(8, -1, CLASSES)).reshape(ROWS),
}
LOOKUPS = {
    "index": lambda y: y[jnp.arange(ROWS), LABELS],
    "product": lambda y: jnp.einsum("nc,nc->n", y, ONE_HOT),
    "checkpoint": jax.checkpoint(picked),
}
PRODUCTS = {
    "jit": jax.jit(jnp.dot),
    "checkpoint": jax.checkpoint(jnp.dot),
    "results of a scan": lambda x, w: jax.lax.map(
        lambda x: x @ w, x.reshape(4, -1, CLASSES)
    ).reshape(ROWS, CLASSES),
    "bias": lambda x, w: x @ w + 0.1 * w[0],
}
WAYS = {
    **{name: (jnp.dot, f, picked) for name, f in NORMALIZERS.items()},
    **{f"lookup by {name}": (jnp.dot, normalizers, f) for name, f in LOOKUPS.items()},
    **{f"product by {name}": (f, normalizers, picked) for name, f in PRODUCTS.items()},
    # Which is all of the loss.
    "optax": (jnp.dot, optax_cross_entropy, lambda y: 0.0),
}
QUICK = ["plain", "checkpoint", "VJP rule", "rows of a scan", "lookup by product"]
OTHER_WAYS = [way for way in WAYS if way != "optax"]


def loss_of(way):
    product, normalizer, lookup = WAYS[way]

    def loss(w, x):
        y = product(x, w)
        return jnp.mean(normalizer(y) - lookup(y))

    return loss


def errors(loss, **options):
    """Ours and the ideal's, of the gradient by the weights."""
    w, x = sure()
    exact = jitted(jax.grad(loss))(w, x)
    dtype = options.get("dtype", "bfloat16")
    return [
        relative_error(jitted(jax.grad(f))(w, x), exact)
        for f in (mpx.autocast(loss, **options), make_ideal(loss, dtype))
    ]


@pytest.mark.parametrize(
    ("way", "dtype"),
    slow_but(
        [("plain", "float16"), *((way, "bfloat16") for way in QUICK)],
        [("plain", "float16"), *((way, "bfloat16") for way in OTHER_WAYS)],
    ),
)
def test_a_sure_token_keeps_its_gradient(way, dtype):
    """A naive cast is off by 0.95 in bfloat16, and by 0.06 in float16."""
    ours, ideal = errors(loss_of(way), dtype=dtype)
    assert ours < 1.5 * ideal + 0.001 < 0.03


@pytest.mark.parametrize(
    ("way", "options"),
    [
        ("plain", {"residuals": "fast"}),
        ("plain", {"residual_stream": "half"}),
        ("optax", {}),
    ],
)
def test_a_sure_token_keeps_its_gradient_in_each_setting(way, options):
    ours, ideal = errors(loss_of(way), **options)
    assert ours < 1.5 * ideal < 0.03


@pytest.mark.parametrize(
    "recipe", [mpx.Float8CurrentScaling(), mpx.MXFP8BlockScaling()]
)
def test_it_holds_under_a_recipe(recipe):
    """The logits are those of the last product, which is not quantized."""
    w, x = sure()

    def of_last(w, x):
        y = (x @ w["middle"]) @ w["last"]
        return jnp.mean(normalizers(y) - picked(y))

    weights = {"middle": jnp.eye(CLASSES), "last": w}
    exact = jitted(jax.grad(of_last))(weights, x)["last"]
    low = mpx.autocast(of_last, recipe=recipe)
    found = mpx.filter_grad(low, mpx.NoLossScaling())(weights, x).grads["last"]
    assert relative_error(found, exact) < 0.1


def test_a_carry_that_the_program_declares_in_half():
    """It is no residual stream, unless that is to be half precision."""
    in_float32 = jax.checkpoint(lambda y: normalizers(y.astype(jnp.float32)))

    def loss(w, x):
        begun = (x @ w).astype(jnp.bfloat16)
        y, _ = jax.lax.scan(lambda y, _: (-y, None), begun, length=2)
        return jnp.mean(in_float32(y) - picked(y.astype(jnp.float32)))

    w, x = sure()
    exact = jitted(jax.grad(loss_of("plain")))(w, x)
    assert relative_error(jitted(jax.grad(mpx.autocast(loss)))(w, x), exact) < 0.03


def test_what_waits_for_the_backward_pass_is_half_precision():
    """Also of what two islands read, one of which is a softmax and one a norm."""

    def loss(w, x):
        y = x @ w
        normed = (y - y.mean(-1, keepdims=True)) / (1 + y.std(-1, keepdims=True))
        return jnp.sum((jax.nn.softmax(y) @ w) * jnp.cumsum(y, 0)) + jnp.sum(normed @ w)

    args = jnp.eye(32), jnp.ones((8, 32))
    low = mpx.autocast(loss)
    pulled = jax.tree.leaves(jax.vjp(low, *args)[1])
    wide = [x for x in pulled if x.dtype == jnp.float32 and x.shape == (8, 32)]
    # The cumulative sum, and zeros, which a compiled program does not write.
    assert sum(bool(x.any()) for x in wide) == 1


def test_second_derivatives_and_tangents():
    w, x = sure()
    loss = loss_of("plain")
    low = mpx.autocast(loss)
    curve = lambda f: lambda w: jax.grad(lambda w: jnp.sum(jax.grad(f)(w, x) ** 2))(w)  # noqa: E731
    for transform in (curve, lambda f: jax.jacfwd(lambda w: f(w, x))):
        exact, found = (jitted(transform(f))(w) for f in (loss, low))
        assert relative_error(found, exact) < 0.06
