"""Counts of compiled programs, for accelerators that need not be there."""
