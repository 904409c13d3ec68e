"""Contracts on the compiled step: what must hold of it, and what breaks it."""

from ._claims import Violation as Violation
from ._expect import ContractError as ContractError, expect as expect
from ._hlo import parse as parse
from ._operations import (
    Operation as Operation,
    compiled_products as compiled_products,
)
