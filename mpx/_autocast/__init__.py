"""Automatic mixed precision for any JAX function."""

from ._transform import (
    HOLDING_PROGRAMS as HOLDING_PROGRAMS,
    autocast as autocast,
    call_with_override as call_with_override,
    settings_of as settings_of,
)
