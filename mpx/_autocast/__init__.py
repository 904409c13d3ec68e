"""Automatic mixed precision for any JAX function."""

from ._transform import autocast as autocast, settings_of as settings_of
