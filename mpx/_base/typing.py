"""Annotations that more than one module needs.

An argument that mpx validates itself, with an error that names the fix, is annotated
with one of the aliases below. A static checker sees the precise type; a runtime checker
(the jaxtyping hook of the tests) sees `Any`, so that users get mpx's error.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import jax
from jax.core import AbstractValue, ShapedArray
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Var
from jaxtyping import Array, Bool, Float, Float32

FloatScalar: TypeAlias = Float32[Array, ""]
# float32, or float64 where the program computes it so.
LossScalar: TypeAlias = Float[Array, ""]
BoolScalar: TypeAlias = Bool[Array, ""]

# A program, without the arrays that it closes over or with them.
Program: TypeAlias = Jaxpr | ClosedJaxpr
# An operand of an equation, or a result of a program.
Atom: TypeAlias = Var | Literal

# A predicate over leaves: it receives the leaf's path as a string, and the leaf.
LeafPredicate: TypeAlias = Callable[[str, Any], bool]

if TYPE_CHECKING:
    DTypeLike: TypeAlias = jax.typing.DTypeLike
    ScalarLike: TypeAlias = jax.typing.ArrayLike
    BoolLike: TypeAlias = bool | Bool[Array, ""]
    # A length may be symbolic in a program that `jax.export` makes, not an integer.
    Length: TypeAlias = int
    Shape: TypeAlias = tuple[int, ...]
    # The type of an operand or a result: an array's, except for tokens and references,
    # which have neither shape nor dtype.
    Aval: TypeAlias = ShapedArray
    # An array in a program: JAX's, or a literal, which is NumPy's or of a private class
    # of JAX.
    AnyArray: TypeAlias = Array
else:
    Aval = AbstractValue
    AnyArray = Any
    DTypeLike = ScalarLike = BoolLike = Length = Any
    Shape = tuple[Any, ...]
