"""Automatic mixed precision for any JAX function."""

from ._call import (
    HOLDING_PROGRAMS as HOLDING_PROGRAMS,
    call_with_override as call_with_override,
)
from ._decisions import Candidate as Candidate, Precision as Precision
from ._region import ambient_with as ambient_with
from ._rules import Rule as Rule, Rules as Rules
from ._transform import autocast as autocast, settings_of as settings_of
