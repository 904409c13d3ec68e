"""Kinds of input: what stands in front of a function so that half precision hurts.

A kind gives the values of `x`, and what is done with the product of `x` and the weights
before the function reads it, in float32: an offset is added there, not in front of the
product, where rounding the operand would hide everything behind it.

A *domain* maps real numbers to those that a function accepts: `positive`, `unit`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Array = Any

DOMAINS: dict[str, Callable[[Array], Array]] = {
    "real": lambda h: h,
    "positive": lambda h: jax.nn.softplus(h) + 1e-3,
    "above_one": lambda h: jax.nn.softplus(h) + 1.001,
    "unit": jax.nn.sigmoid,
    "open": lambda h: 0.98 * jnp.tanh(h),  # between -1 and 1
}


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of input.

    Attributes:
        draw: Gives `x` as a NumPy array of `shape` and the number of arguments.
        lift: Gives the function's arguments, of the product's slices.
        shape: Rows and columns of one argument.
        centred: Whether results are compared after their mean was subtracted.
        identity: Whether the weights are the identity, so that equal inputs of the
            product stay equal.
    """

    draw: Callable[[np.random.Generator, tuple[int, int], int], np.ndarray]
    lift: Callable[[list[Array], str], list[Array]]
    shape: tuple[int, int] = (64, 16)
    centred: bool = False
    identity: bool = True

    @property
    def is_long(self) -> bool:
        """Whether the product is turned around: its rows are the function's columns."""
        return self.shape[1] > 256


def _normal(rng: np.random.Generator, shape: tuple[int, int], n: int) -> np.ndarray:
    return rng.normal(size=(n, *shape))


def _ties(rng: np.random.Generator, shape: tuple[int, int], n: int) -> np.ndarray:
    x = np.round(rng.normal(size=(n, *shape)) * 2) / 2
    same = rng.uniform(size=shape) < 0.5
    return np.where(same, x[:1], x)


def _saturated(rng: np.random.Generator, shape: tuple[int, int], n: int) -> np.ndarray:
    return 6 * rng.choice([-1, 1], size=(n, *shape)) + rng.normal(size=(n, *shape))


def _wide(rng: np.random.Generator, shape: tuple[int, int], n: int) -> np.ndarray:
    return rng.uniform(-1, 1, size=(n, *shape))


def _integers(rng: np.random.Generator, shape: tuple[int, int], n: int) -> np.ndarray:
    return rng.integers(0, 256, size=(n, *shape)).astype(float)


def _zero(rng: np.random.Generator, shape: tuple[int, int], n: int) -> np.ndarray:
    x = rng.normal(size=(n, *shape))
    x[:, ::2] = 0
    return x


def _in_domain(arguments: list[Array], domain: str) -> list[Array]:
    return [DOMAINS[domain](a) for a in arguments]


def _near(arguments: list[Array], domain: str) -> list[Array]:
    offset = 1 if domain == "above_one" else 0
    factor = 0.999 if domain == "open" else 1
    return [factor * jax.nn.sigmoid(a) + offset for a in arguments]


def _spread(arguments: list[Array], domain: str) -> list[Array]:
    if domain in ("unit", "open"):
        return [0.998 * jnp.exp(-7 * jnp.abs(a)) for a in arguments]
    lifted = [jnp.exp(7 * a) for a in arguments]
    if domain == "above_one":
        return [1 + a for a in lifted]
    if domain == "positive":
        return lifted
    signs = [jnp.where(h < 0.3, 1.0, -1.0) for h in arguments]
    return [sign * a for sign, a in zip(signs, lifted, strict=True)]


def _cancel(arguments: list[Array], domain: str) -> list[Array]:
    first = 100 + arguments[0]
    return [first, *(first + 0.1 * a for a in arguments[1:])]


def _count(arguments: list[Array], domain: str) -> list[Array]:
    return [1001 + a for a in arguments]


KINDS: dict[str, Kind] = {
    "plain": Kind(_normal, _in_domain, identity=False),
    "ties": Kind(_ties, _in_domain),
    "near": Kind(_saturated, _near),
    "wide": Kind(_wide, _spread),
    "cancelling": Kind(_normal, _cancel, centred=True),
    "integers": Kind(_integers, _count, centred=True),
    "zero": Kind(_zero, _in_domain),
    "long": Kind(_normal, _in_domain, shape=(4, 4096)),
    "long_ties": Kind(_ties, _in_domain, shape=(4, 4096)),
    "reads": Kind(_normal, _in_domain, shape=(8, 16)),
    "one": Kind(_normal, _in_domain, shape=(64, 1)),
}
"""By name: standard normal; many equal values; values near 0 and 1 (sigmoids of +-6);
magnitudes of 1e-3 to 1e3; near-equal values about 100; integers above 1000; rows of
zeros; an axis of 4096 numbers, plain or with ties; a table of 8 rows for functions that
read them thousands of times; an axis of one number."""
