"""A case: one function, one kind of input, and the program that is made of both."""

import dataclasses
import math
import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rigs.sweep.kinds import KINDS, Array, Kind

_INNER = 16  # numbers that the first product sums over


@dataclasses.dataclass(frozen=True)
class Program:
    """Two functions of the same parameters and the same `x`.

    Attributes:
        values: The results of the function under test, `f(x @ w)`.
        loss: A weighted mean of `f(x @ w) @ v`; None where nothing is a float.
        params: `{"w": ..., "v": ...}`, and a layer's parameters as `"layer"`.
        x: What the first product reads.
    """

    values: Callable[[Any, Array], Any]
    loss: Callable[[Any, Array], Array] | None
    params: Any
    x: Array


@dataclasses.dataclass(frozen=True)
class Case:
    """A function behind a product and in front of one.

    Attributes:
        function: Its public name, `numpy.tanh`, or a description of a program.
        kind: The kind of input, a key of `KINDS`.
        call: The function, of `arity` arrays; of a layer's parameters first where there
            is an `init`.
        domain: A key of `DOMAINS`.
        init: Makes the parameters of a layer, of a key and the arrays.
        variant: Tells cases of one function and one kind apart.
    """

    function: str
    kind: str
    call: Callable[..., Any]
    arity: int = 1
    domain: str = "real"
    init: Callable[..., Any] | None = None
    variant: str = ""

    @property
    def name(self) -> str:
        """The name that selects a case, such as `numpy.tanh/plain`."""
        return "/".join(filter(None, (self.function, self.variant, self.kind)))

    @property
    def group(self) -> str:
        """The library, such as `numpy`."""
        return self.function.split(".")[0]

    def build(self) -> Program:
        """Makes the program and its input, the same ones in every run."""
        seed = zlib.crc32(self.name.encode())
        rng, kind = np.random.default_rng(seed), KINDS[self.kind]
        x, w = _input(rng, kind, self.arity)
        arguments = _reader(kind, self.arity, self.domain)
        params: dict[str, Any] = {"w": w}
        if self.init is not None:
            key = jax.random.key(seed)
            params["layer"] = jax.jit(self.init)(key, *arguments(params, x))

        def values(params: Any, x: Array) -> Any:
            layer = [] if self.init is None else [params["layer"]]
            results = self.call(*layer, *arguments(params, x))
            results = [_real(r) for r in jax.tree.leaves(results)]
            return [r for parts in results for r in _centred(parts, kind)]

        shapes = jax.eval_shape(values, params, x)
        floats = [i for i, s in enumerate(shapes) if _is_float(s) and s.size]
        widths = [_width(shapes[i].shape) for i in floats]
        params["v"] = [
            jnp.asarray(rng.uniform(0.2, 1.8, (n, 4)), jnp.float32) for n in widths
        ]
        weights = [
            (1 + rng.normal(size=(max(shapes[i].size // n, 1), 4)) / 2).astype("f4")
            for i, n in zip(floats, widths, strict=True)
        ]

        def loss(params: Any, x: Array) -> Array:
            results = values(params, x)
            total = jnp.float32(0)
            for i, n, v, c in zip(floats, widths, params["v"], weights, strict=True):
                total = total + jnp.mean(c * (_rows(results[i], n) @ v))
            return total

        return Program(values, loss if floats else None, params, x)


def _input(rng: np.random.Generator, kind: Kind, arity: int) -> tuple[Array, Array]:
    rows, columns = kind.shape
    rows, columns = (columns, rows) if kind.is_long else (rows, columns)
    if kind.identity:
        x = np.concatenate(kind.draw(rng, (rows, columns), arity), axis=-1)
        w = np.eye(arity * columns)
    else:
        (x,) = kind.draw(rng, (rows, _INNER), 1)
        w = rng.normal(size=(_INNER, arity * columns)) / math.sqrt(_INNER)
    return jnp.asarray(x, jnp.float32), jnp.asarray(w, jnp.float32)


def _reader(kind: Kind, arity: int, domain: str) -> Callable[[Any, Array], list[Array]]:
    def arguments(params: Any, x: Array) -> list[Array]:
        h = x @ params["w"]
        h = h.T if kind.is_long else h
        return kind.lift(jnp.split(h, arity, 0 if kind.is_long else 1), domain)

    return arguments


def _real(result: Any) -> list[Array]:
    result = jnp.asarray(result)
    if jnp.iscomplexobj(result):
        return [result.real, result.imag]
    return [result]


def _centred(results: list[Array], kind: Kind) -> list[Array]:
    if not kind.centred:
        return results
    return [r - jnp.mean(r) if _is_float(r) and r.size > 1 else r for r in results]


def _is_float(value: Any) -> bool:
    return jnp.issubdtype(value.dtype, jnp.floating)


def _width(shape: tuple[int, ...]) -> int:
    """How many numbers the second product sums over: more than one."""
    if shape and 1 < shape[-1] <= 256:
        return shape[-1]
    size = math.prod(shape)
    return next((n for n in (16, 8, 6, 5, 4, 3, 2) if size % n == 0), max(size, 4))


def _rows(result: Array, width: int) -> Array:
    if result.size == 1 and width > 1:  # a product needs more than one number
        return result.reshape(1, 1) * jnp.linspace(0.5, 1.5, width)[None]
    return result.reshape(-1, width)
