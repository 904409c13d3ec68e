"""Operations that go wrong where their second operand is 0, and do not where it is 1.

Each stands on a line of its own, in a scope of its own, so that it is known which
operation, line and scope are to be named.
"""

import dataclasses
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Plant:
    """A fault.

    Attributes:
        op: `op(h, f)`, of the shape of `h`, bad where `f` is 0.
        kind: `nan`, `inf`, `overflow` of float16, `underflow` in it, or `rounding` in
            bfloat16.
        primitives: The operations of which one has to be named.
    """

    op: Callable[[Any, Any], Any]
    kind: str
    primitives: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.op.__name__


def zero_by_zero(h, f):
    return h * (f / f)


def root_of_negative(h, f):
    return h * jnp.sqrt(f - 0.5)


def log_of_negative(h, f):
    return h + jnp.log(f - 0.5)


def power_of_negative(h, f):
    return h * (f - 0.5) ** 0.25


def by_zero(h, f):
    return (h + 4.0) / f


def log_of_zero(h, f):
    return h + jnp.log(f)


def inverse_root_of_zero(h, f):
    return h * jax.lax.rsqrt(f)


def large_exponential(h, f):
    return h + jnp.exp(200.0 * (1.0 - f))


def large_product(h, f):
    return jnp.dot((h + 4.0) * (3e4 - (3e4 - 1.0) * f), jnp.ones((32, 32), h.dtype) / 8)


def large_factor(h, f):
    return (h + 4.0) * (3e4 - (3e4 - 1.0) * f)


def as_stored(x):
    """A number as its dtype has it: XLA computes on in float32 where it can."""
    return jax.lax.optimization_barrier(x)


def log_of_small(h, f):
    return h + 0.05 * jnp.log(as_stored(jnp.exp(-20.0 * (1.0 - f))))


def by_small(h, f):
    return (h + 4.0) / as_stored(jnp.exp(-20.0 * (1.0 - f)))


def one_minus(h, f):
    return (h + 4.0) / as_stored(1.0 - as_stored(0.5 + 0.499 * (1.0 - f)))


def by_epsilon(h, f):
    return h + (1.0 - f) * (h * 0.0) / as_stored(h * 0.0 + f + 1e-8)


PLANTS = {
    plant.name: plant
    for plant in (
        Plant(zero_by_zero, "nan", ("div",)),
        Plant(root_of_negative, "nan", ("sqrt",)),
        Plant(log_of_negative, "nan", ("log",)),
        Plant(power_of_negative, "nan", ("pow",)),
        Plant(by_zero, "inf", ("div",)),
        Plant(log_of_zero, "inf", ("log",)),
        Plant(inverse_root_of_zero, "inf", ("rsqrt",)),
        Plant(large_exponential, "inf", ("exp",)),
        Plant(large_product, "overflow", ("dot_general", "mul")),
        Plant(large_factor, "overflow", ("mul",)),
        Plant(log_of_small, "underflow", ("log",)),
        Plant(by_small, "underflow", ("div",)),
        Plant(by_epsilon, "underflow", ("div",)),
        Plant(one_minus, "rounding", ("div",)),
    )
}


def forward(plant: Plant) -> Callable[[Any, Any], Any]:
    def planted(h, f):
        with jax.named_scope("plant"):
            return plant.op(h, f)

    return planted


def backward(plant: Plant) -> Callable[[Any, Any], Any]:
    """Nothing in the forward pass, and the plant on the cotangent."""

    @jax.custom_vjp
    def identity(h, f):
        return h

    def pull(f, cotangent):
        return plant.op(cotangent, f.astype(cotangent.dtype)), jnp.zeros_like(f)

    identity.defvjp(lambda h, f: (h, f), pull)

    def planted(h, f):
        with jax.named_scope("plant"):
            return identity(h, f)  # of a rule JAX knows where it was called

    return planted


def line_of(function: Callable[..., Any], text: str = "return") -> str:
    """The line of a function that begins or ends with a text, as reports have it."""
    lines, first = inspect.getsourcelines(function)
    stripped = [line.strip() for line in lines]
    found = (line.startswith(text) or line.endswith(text) for line in stripped)
    (number,) = (i for i, is_found in enumerate(found) if is_found)
    file = Path(inspect.getfile(function)).name
    return f"tests/tools/blame/{file}:{first + number}"
