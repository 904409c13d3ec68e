"""Slow oracles in NumPy float64 and plain Python, written from the specification."""
