"""Tests of mpx, and the checker of annotations that the jaxtyping hook applies."""

from typing import Any, Self

from beartype import BeartypeConf, FrozenDict, beartype

# jaxtyping hands over one method at a time, and from a method alone beartype cannot
# tell which class `Self` is. Everything else is checked.
check_types = beartype(conf=BeartypeConf(hint_overrides=FrozenDict({Self: Any})))
