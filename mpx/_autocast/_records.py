"""What a run keeps: programs that it rewrote, and what it has used."""

import weakref
from typing import Any, NamedTuple

from .._quantize import AbstractRecipe
from .._rules import Rule


class Programs(weakref.WeakKeyDictionary[Any, dict[Any, Any]]):
    """A store for rewritten programs, each as long as the one it was made from.

    Pickled or copied it is empty: so a function that autocast made may be sent to
    another process (Ray, Dask, joblib).
    """

    def __reduce__(self) -> tuple:
        return Programs, ()

    def __deepcopy__(self, memo: object) -> "Programs":
        return Programs()


class Usage(NamedTuple):
    """What has been used, for what is reported when a call is over.

    Attributes:
        rules: The rules that applied to an operation.
        recipes: The recipes that quantized a product.
        one_row: Those that left one alone only for its batch of one row.
        computes_float16: Whether anything is computed in float16.
    """

    rules: frozenset[Rule] = frozenset()
    recipes: frozenset[AbstractRecipe] = frozenset()
    one_row: frozenset[AbstractRecipe] = frozenset()
    computes_float16: bool = False
