"""The programs, a module for each package.

A module imports its package inside of its functions, so that each can be read, listed
and collected without it.
"""

import importlib

from ..record import Client

QUICK = ("equinox", "flax_linen", "flax_nnx", "haiku", "optax")
"""Modules whose packages the tests have."""

PACKAGES = (
    *QUICK,
    "diffrax",
    "kidger",
    "jaxopt",
    "jraph",
    "e3nn_jax",
    "jax_md",
    "keras",
    "numpyro",
    "deepmind",
    "flowjax",
    "physics",
    "tokamax",
    "language_models",
    "transformers",
    "qwix",
    "statistics",
    "equimo",
)
"""All modules, in the order of the table."""


def programs_of(module: str) -> dict[str, Client]:
    """The programs of a module by name."""
    found = importlib.import_module(f".{module}", __name__)
    return {v.name: v for v in vars(found).values() if isinstance(v, Client)}
