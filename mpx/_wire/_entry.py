r"""Weights that enter `jax.shard_map` whole, in the forms that their uses read.

What goes in by `P()` every device has whole. If it lies in pieces outside, the compiler
gathers it in front of the `shard_map`, in the dtype in which it goes in: 8 bits if all
that uses it are products under a recipe, half precision if all cast it. Which it is to
be is known when the program inside is emitted. So that is emitted twice. First for its
types only, with weights that note what is `Asked` of them; then with weights that have
`Entered` in these forms, beside zeros to which their gradient goes in float32.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import equinox as eqx
import jax
import numpy as np
from jax.extend.core import JaxprEqn

from .._jax_compat import bind_equation
from .._policy import Wire
from .._program import properties
from .._quantize import (
    AbstractProduct,
    AbstractRecipe,
    Ahead,
    Target,
    may_travel,
    quantized_ahead,
)
from .._typing import AnyArray, Shape
from ._gathering import Gathering
from ._weights import (
    FLOAT32,
    cast_where_it_lies,
    gathered,
    only_gradient,
    travelling_dtype,
    where_it_lies,
)


class Quantized(NamedTuple):
    """The 8 bits of a weight that products read who agree on all of these.

    Attributes:
        recipe: How it is quantized.
        dtype: What it stands for.
        target: The device that it is quantized for.
        use: Whose scale it is, under delayed scaling.
        lengths: The lengths of the scans that cut it, of which each turn's part has a
            scale.
    """

    recipe: AbstractRecipe
    dtype: np.dtype
    target: Target
    use: str | None
    lengths: tuple[int, ...]

    @classmethod
    def by(
        cls, product: AbstractProduct, use: str | None, lengths: tuple[int, ...]
    ) -> "Quantized":
        """What a product reads of its weight."""
        return cls(product.recipe, product.dtype, product.target, use, lengths)


# What a use reads: 8 bits, or the weight cast to a dtype.
Form: TypeAlias = Quantized | np.dtype


class Asks:
    """What the uses of a weight read of it.

    Attributes:
        forms: The forms; of 8 bits with a product that reads them.
        is_read: Whether anything reads all of its digits.
    """

    def __init__(self) -> None:
        """Nothing yet."""
        self.forms: dict[Form, AbstractProduct | None] = {}
        self.is_read = False

    def __eq__(self, other: object) -> bool:
        """All are equal, so that programs that ask the same are found again."""
        return isinstance(other, Asks)

    def __hash__(self) -> int:
        return hash(Asks)

    def add(self, others: "Asks") -> None:
        """Adds what others have noted."""
        self.forms.update(others.forms)
        self.is_read |= others.is_read

    @property
    def is_narrow(self) -> bool:
        """Whether all forms together are fewer bytes than float32."""
        bytes = sum(f.itemsize if isinstance(f, np.dtype) else 1 for f in self.forms)
        return not self.is_read and 0 < bytes < FLOAT32.itemsize


class Asked(eqx.Module):
    """A weight in a program that is emitted to find out what it reads.

    Attributes:
        weight: The weight, float32.
        asks: Where each use says what it reads.
        wire: What was said of travelling.
        may_be_cut: Whether its first axis is that of what goes in.
        lengths: The lengths of the scans that cut it.
    """

    weight: AnyArray
    asks: Asks = eqx.field(static=True)
    wire: Wire = eqx.field(static=True)
    may_be_cut: bool = eqx.field(static=True, default=False)
    lengths: tuple[int, ...] = eqx.field(static=True, default=())

    @property
    def shape(self) -> Shape:
        """Its shape."""
        return self.weight.shape

    def then(self, equation: JaxprEqn) -> "Asked":
        """The same, moved by an equation."""
        weight = _moved(equation, self.weight, self.wire)
        may_be_cut = self.may_be_cut and properties(equation.primitive.name).spreads
        return dataclasses.replace(self, weight=weight, may_be_cut=may_be_cut)

    def cut(self, length: int) -> "Asked | None":
        """What a scan cuts, of which each turn gets its part; None: as an array."""
        if not self.may_be_cut:
            return None
        return dataclasses.replace(self, lengths=(*self.lengths, length))

    def noting(self, asks: Asks) -> "Asked":
        """The same, of which others note what they read."""
        return dataclasses.replace(self, asks=asks)

    def arrive(self, dtype: np.dtype | None = None) -> AnyArray:
        """The weight, float32, for a use that casts it to a dtype, or does not."""
        if dtype is None:
            self.asks.is_read = True
        else:
            self.asks.forms[np.dtype(dtype)] = None
        return self.weight

    def arrive_quantized(
        self, product: AbstractProduct, scales: AnyArray | None, use: str | None
    ) -> tuple[AnyArray, None] | None:
        """The weight for a product; None if the product reads more of it than 8 bits.

        Args:
            product: The product.
            scales: The scales of delayed scaling.
            use: Whose scales they are.
        """
        if not may_travel(product):
            return None
        self.asks.forms[Quantized.by(product, use, self.lengths)] = product
        return self.weight, None


class Entered(eqx.Module):
    """A weight that has gone in.

    Attributes:
        zeros: Zeros in its place, to which its gradient goes.
        pieces: It in each of its forms.
        forms: The forms.
        wire: What was said of travelling.
        lengths: The lengths of the scans that cut it.
    """

    zeros: AnyArray
    pieces: tuple[AnyArray | Ahead, ...]
    forms: tuple[Form, ...] = eqx.field(static=True)
    wire: Wire = eqx.field(static=True)
    lengths: tuple[int, ...] = eqx.field(static=True, default=())

    @property
    def shape(self) -> Shape:
        """Its shape."""
        return self.zeros.shape

    def then(self, equation: JaxprEqn) -> "Entered":
        """The same, moved by an equation."""

        def move(piece: AnyArray | Ahead) -> AnyArray | Ahead:
            if not isinstance(piece, Ahead):
                return bind_equation(equation, piece)[0]
            return piece.moved(lambda x: bind_equation(equation, x)[0])

        zeros, pieces = _moved(equation, self.zeros, self.wire), map(move, self.pieces)
        return dataclasses.replace(self, zeros=zeros, pieces=tuple(pieces))

    def cut(self, length: int) -> "Entered":
        """What a scan cuts: the forms of which each turn has a part."""
        lengths = (*self.lengths, length)
        kept = {
            form: piece
            for form, piece in zip(self.forms, self.pieces, strict=True)
            if not isinstance(form, Quantized)
            or form.lengths[: len(lengths)] == lengths
        }
        pieces, forms = tuple(kept.values()), tuple(kept)
        return Entered(self.zeros, pieces, forms, self.wire, lengths)

    def arrive(self, dtype: np.dtype | None = None) -> AnyArray:
        """The weight, float32, rounded to the dtype that a use casts it to."""
        assert dtype is not None  # or it had been read
        piece = self.pieces[self.forms.index(np.dtype(dtype))]
        return joined(piece, self.zeros)

    def arrive_quantized(
        self, product: AbstractProduct, scales: AnyArray | None, use: str | None
    ) -> tuple[AnyArray, Ahead] | None:
        """What the gradient goes to and the weight; see `Asked.arrive_quantized`."""
        if not may_travel(product):
            return None
        form = Quantized.by(product, use, self.lengths)
        piece = self.pieces[self.forms.index(form)]
        assert isinstance(piece, Ahead)
        return self.zeros, piece


def entering(
    weight: AnyArray | Gathering,
    asks: Asks,
    wire: Wire,
    here: Callable[[AbstractProduct], AbstractProduct],
    scales: Callable[[Quantized], AnyArray | None],
) -> Entered:
    """What goes in for a weight.

    Args:
        weight: The weight where it lies, float32; or what the program gathers.
        asks: What the uses read.
        wire: What was said of travelling.
        here: A product as it would be outside.
        scales: The scales of delayed scaling.

    Returns:
        Its pieces, without derivatives, and zeros.
    """

    def piece(form: Form, product: AbstractProduct | None) -> AnyArray | Ahead:
        if not isinstance(form, Quantized):
            return jax.lax.stop_gradient(_rounded(weight, form))
        assert product is not None  # it has asked
        return _quantized(weight, here(product), scales(form), form)

    pieces = tuple(piece(form, product) for form, product in asks.forms.items())
    if isinstance(weight, Gathering):
        zeros = weight.only_gradient()
    else:
        zeros = only_gradient(lambda x: x, weight, wire)
    return Entered(zeros, pieces, tuple(asks.forms), wire)


def _rounded(weight: AnyArray | Gathering, dtype: np.dtype) -> AnyArray:
    if isinstance(weight, Gathering):
        return weight.arrive().astype(dtype)
    return cast_where_it_lies(weight, dtype)


def _quantized(
    weight: AnyArray | Gathering,
    product: AbstractProduct,
    scales: AnyArray | None,
    form: Quantized,
) -> Ahead:
    if isinstance(weight, Gathering):
        found = weight.arrive_quantized(product, scales, form.use)
        assert found is not None  # or it had not been asked
        return found[1]

    def quantize(weight: AnyArray, scales: AnyArray | None) -> Ahead:
        return quantized_ahead(product, weight, scales, lambda x: x)

    for _ in form.lengths:
        quantize = jax.vmap(quantize)
    return quantize(weight, scales).moved(where_it_lies)


@jax.custom_vjp
def joined(narrow: AnyArray, zeros: AnyArray) -> AnyArray:
    """The weight where it has arrived, float32, whose gradient goes to the zeros."""
    return narrow.astype(FLOAT32)


def _forward(narrow: AnyArray, zeros: AnyArray) -> tuple[AnyArray, None]:
    return narrow.astype(FLOAT32), None


joined.defvjp(_forward, lambda _, g: (None, g))


def _moved(equation: JaxprEqn, weight: AnyArray, wire: Wire) -> AnyArray:
    name = equation.primitive.name
    if properties(name).spreads:
        dtype = travelling_dtype(wire, name, FLOAT32)
        if dtype is not None:  # its gradient has another one
            return gathered(equation, weight, dtype, wire)
    return bind_equation(equation, weight)[0]
