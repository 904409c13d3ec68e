"""Faults on purpose: killed processes, flipped bits, bad numbers, for a long time."""
