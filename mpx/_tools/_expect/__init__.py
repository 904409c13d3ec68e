"""Contracts on the compiled step: what must hold of it, and what breaks it."""

from ._expect import ContractError, Violation, expect
