"""What a replay costs: its compilations and its memory, beside those of the gradient.

A transformer, unrolled and as a scan, with a fault in one of its layers.
"""

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

import mpx
from mpx._tools._blame import _record, _replay

LAYERS, BATCH, LENGTH, WIDTH, HEADS, VOCABULARY = 4, 8, 128, 256, 4, 512


@dataclasses.dataclass
class Cost:
    """Compilations: seconds in all, and the largest program's bytes."""

    seconds: float = 0.0
    programs: int = 0
    bytes: int = 0

    def add(self, seconds: float, compiled: Any) -> None:
        self.seconds += seconds
        self.programs += 1
        sizes = compiled.memory_analysis()
        used = sizes.temp_size_in_bytes + sizes.output_size_in_bytes
        self.bytes = max(self.bytes, used + sizes.argument_size_in_bytes)


def norm(x):
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + 1e-6)


def block(h, p, f):
    split = lambda x: x.reshape(*x.shape[:-1], HEADS, -1)  # noqa: E731
    q, k, v = (split(x) for x in jnp.split(norm(h) @ p["qkv"], 3, axis=-1))
    scores = jnp.einsum("bthd,bshd->bhts", q, k) / (WIDTH / HEADS) ** 0.5
    seen = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))
    weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf))
    out = jnp.einsum("bhts,bshd->bthd", weights, v).reshape(h.shape)
    h = h + out @ p["out"]
    h = h + jax.nn.gelu(norm(h) @ p["up"]) @ p["down"]
    return h / f


def model_of(is_scan: bool) -> tuple[Any, tuple[Any, ...]]:
    keys = jax.random.split(jax.random.key(0), 6)

    def weight(key, *shape):
        return jax.random.normal(key, (LAYERS, *shape)) / shape[0] ** 0.5

    model = {
        "embed": jax.random.normal(keys[0], (VOCABULARY, WIDTH)),
        "qkv": weight(keys[1], WIDTH, 3 * WIDTH),
        "out": weight(keys[2], WIDTH, WIDTH),
        "up": weight(keys[3], WIDTH, 4 * WIDTH),
        "down": weight(keys[4], 4 * WIDTH, WIDTH),
    }

    def loss(model, tokens, f):
        h = model["embed"][tokens]
        layers = {k: v for k, v in model.items() if k != "embed"}
        if is_scan:
            body = lambda h, pf: (block(h, *pf), None)  # noqa: E731
            h, _ = jax.lax.scan(body, h, (layers, f))
        else:
            for i in range(LAYERS):
                h = block(h, jax.tree.map(lambda x, i=i: x[i], layers), f[i])
        logits = (h @ model["embed"].T).astype(jnp.float32)
        chosen = jnp.take_along_axis(logits, tokens[..., None], axis=-1)[..., 0]
        return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - chosen)

    tokens = jax.random.randint(keys[5], (BATCH, LENGTH), 0, VOCABULARY)
    f = jnp.ones(LAYERS).at[LAYERS // 2].set(0.0)
    return mpx.autocast(loss), (model, tokens, f)


@contextlib.contextmanager
def counted() -> Iterator[Cost]:
    """Counts what `mpx.blame` compiles, in this process."""
    cost, original = Cost(), jax.jit

    def jit(program: Any, **options: Any) -> Any:
        jitted = original(program, **options)
        known: dict[Any, Any] = {}

        def run(*args: Any) -> Any:
            leaves, tree = jax.tree.flatten(args)
            form = tree, tuple(map(jax.typeof, leaves))
            if form not in known:
                lowered = jitted.lower(*args)
                begin = time.perf_counter()
                known[form] = lowered.compile()
                cost.add(time.perf_counter() - begin, known[form])
            return known[form](*args)

        return run

    modules: tuple[Any, ...] = (_record, _replay)
    stand_in = type("jax", (), {**vars(jax), "jit": staticmethod(jit)})
    for module in modules:
        module.jax = stand_in
    try:
        yield cost
    finally:
        for module in modules:
            module.jax = jax


def measure(is_scan: bool) -> str:
    loss, args = model_of(is_scan)
    scaling = mpx.NoLossScaling()
    gradient = jax.jit(lambda s, *args: mpx.filter_value_and_grad(loss, s)(*args))
    lowered = gradient.lower(scaling, *args)
    begin = time.perf_counter()
    compiled, of_gradient = lowered.compile(), Cost()
    of_gradient.add(time.perf_counter() - begin, compiled)
    begin = time.perf_counter()
    with counted() as cost:
        report = mpx.blame(loss, scaling)(*args)
    seconds = time.perf_counter() - begin
    assert report.first is not None
    return (
        f"{'scan' if is_scan else 'unrolled':9} gradient: {of_gradient.seconds:.1f} s, "
        f"{of_gradient.bytes / 1e6:.0f} MB; blame: {cost.programs} programs, compiled "
        f"in {cost.seconds:.1f} s ({cost.seconds / of_gradient.seconds:.1f} times), "
        f"{seconds:.1f} s in all, largest {cost.bytes / 1e6:.0f} MB "
        f"({cost.bytes / of_gradient.bytes:.2f} times); {report.first.primitive} "
        f"{', '.join(report.first.inside)} at {report.first.line}"
    )
