"""Programs around a plant: where it stands, and how it is to be named there."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec as P

from .masks import MASKS

# Layers, rows and features; turns of an inner loop; devices.
LAYERS, ROWS, WIDTH, INNER, DEVICES = 4, 16, 32, 3, 8


@dataclasses.dataclass(frozen=True)
class Container:
    """A model of layers with a plant in one of them.

    Attributes:
        make: `make(planted)` gives `hidden(w, x, f)`.
        shape: The shape of `f`.
        inside: `inside(place)` is what has to be named, for a fault at a place in `f`.
        devices: Whether the first axis of `f` is of devices.
        directions: In which passes a plant may stand.
    """

    make: Callable[[Any], Any]
    shape: tuple[int, ...] = (LAYERS,)
    inside: Callable[[tuple[int, ...]], tuple[str, ...]] = lambda place: ()
    devices: bool = False
    directions: tuple[str, ...] = ("forward", "dgrad", "wgrad")


def layer(planted, on_weight, h, w, f):
    if on_weight:
        return jnp.tanh(h @ planted(w, f))
    return planted(jnp.tanh(h @ w), f)


def unrolled(step):
    def hidden(w, x, f):
        for i in range(LAYERS):
            x = step(x, w[i], f[i])
        return x

    return hidden


def scanned(step, wrap=lambda body: body):
    def hidden(w, x, f):
        body = wrap(lambda h, wf: (step(h, *wf), None))
        return jax.lax.scan(body, x, (w, f))[0]

    return hidden


def nested(step):
    def hidden(w, x, f):
        def outer(h, wf):
            w, f = wf
            return jax.lax.scan(lambda h, f: (step(h, w, f), None), h, f)[0], None

        return jax.lax.scan(outer, x, (w, f))[0]

    return hidden


def conditional(step):
    other = lambda h, w, f: jnp.tanh(h @ w)  # noqa: E731

    def branch(h, w, f):
        return jax.lax.cond(jnp.sum(f) < 2.0, lambda *a: step(*a), other, h, w, f)

    return unrolled(branch)


def looped(step):
    """A loop whose length only a run knows, of which nothing is differentiated."""

    def hidden(w, x, f):
        fixed = jax.lax.stop_gradient(w)

        def body(state):
            i, h = state
            return i + 1, step(h, fixed[i], f[i])

        start = (jnp.zeros((), jnp.int32), jax.lax.stop_gradient(x))
        _, h = jax.lax.while_loop(lambda state: state[0] < LAYERS, body, start)
        return jnp.tanh(x @ w[0]) * jax.lax.stop_gradient(h)

    return hidden


def jitted(step):
    return unrolled(jax.jit(step))


def with_jvp(step):
    """The forward pass in a function that has a rule for its tangents."""

    @jax.custom_jvp
    def ruled(h, w, f):
        return step(h, w, f)

    @ruled.defjvp
    def rule(primals, tangents):
        h, w, f = primals
        dh, dw, _ = tangents
        out = ruled(h, w, f)
        return out, (dh @ w + h @ dw) * (1.0 - jnp.tanh(h @ w) ** 2)

    return unrolled(lambda h, w, f: ruled(h, w, f))


def with_vjp(step):
    """The forward pass in a function that has a rule for its cotangents."""

    @jax.custom_vjp
    def ruled(h, w, f):
        return step(h, w, f)

    def pull(kept, cotangent):
        h, w, f = kept
        inner = cotangent * (1.0 - jnp.tanh(h @ w) ** 2)
        return inner @ w.T, h.T @ inner, jnp.zeros_like(f)

    ruled.defvjp(lambda *args: (step(*args), args), pull)
    return unrolled(lambda h, w, f: ruled(h, w, f))


def masked(step):
    """Each layer behind two parts with infinities that reach nothing."""
    parts = list(MASKS.values())

    def hidden(w, x, f):
        for i in range(LAYERS):
            x = step(parts[2 * i + 1](parts[2 * i](x)), w[i], f[i])
        return x

    return hidden


def masked_scan(step):
    def masked_step(h, w, f):
        for name in ("chosen", "online", "guarded", "running"):
            h = MASKS[name](h)
        return step(h, w, f)

    return scanned(masked_step)


def on_devices(step, wrap):
    def hidden(w, x, f):
        mesh = jax.make_mesh((DEVICES,), ("d",), axis_types=(AxisType.Auto,))
        local = lambda w, x, f: wrap(step)(w, x, f[0])  # noqa: E731
        specs = {"in_specs": (P(), P("d"), P("d")), "out_specs": P("d")}
        return jax.shard_map(local, mesh=mesh, **specs)(w, x, f)

    return hidden


def _turn(place):
    return (f"scan, iteration {place[-1]} of {LAYERS}",)


def _turns(place):
    i, j = place
    return f"scan, iteration {i} of {LAYERS}", f"scan, iteration {j} of {INNER}"


_FORWARD = {"directions": ("forward",)}
# JAX wants the gradient of a weight to be the same on all devices.
_ON_DEVICES = {"directions": ("forward", "dgrad"), "devices": True}
_ON_DEVICES["shape"] = (DEVICES, LAYERS)
CONTAINERS = {
    "unrolled": Container(unrolled),
    "scan": Container(scanned, inside=_turn),
    "scan, remat": Container(lambda step: scanned(step, jax.checkpoint), inside=_turn),
    "nested scan": Container(nested, (LAYERS, INNER), _turns),
    "remat": Container(lambda step: unrolled(jax.checkpoint(step))),
    "cond": Container(conditional, inside=lambda _: ("cond, branch 2 of 2",)),
    "while": Container(
        looped, inside=lambda p: (f"while, iteration {p[0]}",), **_FORWARD
    ),
    "jit": Container(jitted),
    "custom_jvp": Container(with_jvp, **_FORWARD),
    "custom_vjp": Container(with_vjp, **_FORWARD),
    "masked": Container(masked),
    "masked scan": Container(masked_scan, inside=_turn),
    "shard_map": Container(lambda step: on_devices(step, unrolled), **_ON_DEVICES),
    "shard_map, scan": Container(
        lambda step: on_devices(step, scanned), inside=_turn, **_ON_DEVICES
    ),
}
