"""Tests of mpx, and the checker of annotations that the jaxtyping hook applies."""

import functools
from collections.abc import Callable
from typing import Any, Self


def check_types(annotated: Any) -> Any:
    """Has beartype check a function or a class, as it runs."""
    return _checker()(annotated)


@functools.cache
def _checker() -> Callable[[Any], Any]:
    # Here, since the tests in `tests/gpu` run where beartype is not installed.
    from beartype import BeartypeConf, FrozenDict, beartype

    # jaxtyping hands over one method at a time, and from a method alone beartype cannot
    # tell which class `Self` is. Everything else is checked.
    return beartype(conf=BeartypeConf(hint_overrides=FrozenDict({Self: Any})))
