"""Wrong cases that are known and why; each reason names what would have to change."""

import fnmatch

EXPLAINED: dict[str, str] = {}
"""Patterns of case names, as `fnmatch` reads them, and one sentence each."""


def find_reason(name: str) -> str | None:
    """Returns why a case may be wrong, or None."""
    return next(
        (why for pattern, why in EXPLAINED.items() if fnmatch.fnmatch(name, pattern)),
        None,
    )
